//! One directory of the stat index.
//!
//! Layout, little-endian: the directory's stamp (inode, mtime, ctime: 8 bytes each), whether its listing is racy (1), content digest
//! and node digest (32 each), then the entries: type (1), whether racy (1), length of the name (1), the name, and then for
//! files: stamp (32), number of chunks (4), digest (32), chunks (32 each); for symlinks: stamp (32), length of the target (2), the
//! target; for directories: place and length of their section (8, 4); for what was skipped nothing.

use replayfork_core::Digest;

use super::At;
use crate::node::Kind;
use crate::stat::Stamp;

const HEAD: usize = 24 + 1 + 64;

/// An entry of a directory, as it was.
#[derive(Clone, Debug)]
pub struct Row {
    pub name: Vec<u8>,
    /// It was changed so shortly before it was read that a later change could bear the same times.
    pub racy: bool,
    pub body: Body,
}

#[derive(Clone, Debug)]
pub enum Body {
    /// A file or a symlink.
    Leaf { stamp: Stamp, kind: Kind },
    /// A directory; its section and its time, content and node.
    Folder { at: At, mtime: i64, content: Digest, node: Digest },
    /// Listed, but not recorded: looked at again each time.
    Skipped,
}

/// An entry as it lies in a section.
pub struct RowRef<'a> {
    pub name: &'a [u8],
    pub racy: bool,
    pub body: BodyRef<'a>,
    position: usize,
}

pub enum BodyRef<'a> {
    Leaf { tag: u8, stamp: Stamp, rest: &'a [u8] },
    Folder(At),
    Skipped,
}

/// A section's bytes.
#[derive(Clone, Copy)]
pub struct Section<'a> {
    bytes: &'a [u8],
}

impl RowRef<'_> {
    /// A file's or symlink's row of its own.
    pub fn leaf(&self) -> Option<Row> {
        let BodyRef::Leaf { tag, stamp, rest } = self.body else { return None };
        let kind = match tag {
            b'l' => Kind::Symlink { target: rest.to_vec() },
            tag => {
                let (digest, chunks) = rest.split_at_checked(32)?;
                let chunks = chunks.chunks_exact(32).filter_map(Digest::from_slice).collect();
                Kind::File { size: stamp.size, executable: tag == b'x', digest: Digest::from_slice(digest)?, chunks }
            }
        };
        Some(Row { name: self.name.to_vec(), racy: self.racy, body: Body::Leaf { stamp, kind } })
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(n)?;
        self.rest = rest;
        Some(head)
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn stamp(&mut self) -> Option<Stamp> {
        Some(Stamp { size: self.u64()?, inode: self.u64()?, mtime: self.u64()? as i64, ctime: self.u64()? as i64 })
    }
}

impl<'a> Section<'a> {
    /// `None`: no section.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        (bytes.len() >= HEAD).then_some(Self { bytes })
    }

    /// Where what comes before a section's entries lies.
    pub fn head(at: At) -> At {
        At { len: HEAD as u32, ..at }
    }

    /// The directory's stamp, without a size, and whether its listing is racy.
    pub fn stamp(&self) -> (Stamp, bool) {
        let number = |i: usize| u64::from_le_bytes(self.bytes[8 * i..8 * i + 8].try_into().expect("eight bytes"));
        (Stamp { size: 0, inode: number(0), mtime: number(1) as i64, ctime: number(2) as i64 }, self.bytes[24] != 0)
    }

    /// Content and node.
    pub fn digests(&self) -> (Digest, Digest) {
        let digest = |at: usize| Digest(self.bytes[at..at + 32].try_into().expect("32 bytes"));
        (digest(25), digest(57))
    }

    /// Its entries, sorted by name. Ends early where the section is broken.
    pub fn rows(&self) -> impl Iterator<Item = RowRef<'a>> + use<'a> {
        let all = self.bytes;
        let mut reader = Reader { rest: &all[HEAD..] };
        std::iter::from_fn(move || {
            let &[tag, racy, length] = reader.take(3)? else { return None };
            let name = reader.take(length.into())?;
            let position = all.len() - reader.rest.len();
            let body = match tag {
                b'd' => BodyRef::Folder(At { offset: reader.u64()?, len: reader.u32()? }),
                b'l' => {
                    let stamp = reader.stamp()?;
                    let length = u16::from_le_bytes(reader.take(2)?.try_into().ok()?);
                    BodyRef::Leaf { tag, stamp, rest: reader.take(length.into())? }
                }
                b'f' | b'x' => {
                    let stamp = reader.stamp()?;
                    let chunks = reader.u32()? as usize;
                    BodyRef::Leaf { tag, stamp, rest: reader.take(chunks.checked_mul(32)?.checked_add(32)?)? }
                }
                _ => BodyRef::Skipped,
            };
            Some(RowRef { name, racy: racy != 0, body, position })
        })
    }

    /// Where its subdirectories are named, and their sections.
    pub fn folders(&self) -> Vec<(usize, At)> {
        let place = |row: RowRef<'_>| match row.body {
            BodyRef::Folder(at) => Some((row.position, at)),
            _ => None,
        };
        self.rows().filter_map(place).collect()
    }

    /// Writes another place of a subdirectory's section, where `folders` said that it is named.
    pub fn set_place(section: &mut [u8], position: usize, at: At) {
        section[position..position + 8].copy_from_slice(&at.offset.to_le_bytes());
        section[position + 8..position + 12].copy_from_slice(&at.len.to_le_bytes());
    }

    /// A section's bytes.
    pub fn encode((stamp, racy): (Stamp, bool), (content, node): (Digest, Digest), rows: &[Row]) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + rows.len() * 96);
        for number in [stamp.inode, stamp.mtime as u64, stamp.ctime as u64] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.push(u8::from(racy));
        out.extend_from_slice(content.as_bytes());
        out.extend_from_slice(node.as_bytes());
        for row in rows {
            let tag = match &row.body {
                Body::Leaf { kind: Kind::File { executable: true, .. }, .. } => b'x',
                Body::Leaf { kind: Kind::Symlink { .. }, .. } => b'l',
                Body::Leaf { .. } => b'f',
                Body::Folder { .. } => b'd',
                Body::Skipped => b's',
            };
            out.extend_from_slice(&[tag, u8::from(row.racy), row.name.len() as u8]);
            out.extend_from_slice(&row.name);
            match &row.body {
                Body::Leaf { stamp, kind } => put_leaf(&mut out, stamp, kind),
                Body::Folder { at, .. } => {
                    out.extend_from_slice(&at.offset.to_le_bytes());
                    out.extend_from_slice(&at.len.to_le_bytes());
                }
                Body::Skipped => {}
            }
        }
        out
    }
}

fn put_leaf(out: &mut Vec<u8>, stamp: &Stamp, kind: &Kind) {
    for number in [stamp.size, stamp.inode, stamp.mtime as u64, stamp.ctime as u64] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    match kind {
        Kind::File { digest, chunks, .. } => {
            out.extend_from_slice(&(chunks.len() as u32).to_le_bytes());
            out.extend_from_slice(digest.as_bytes());
            chunks.iter().for_each(|chunk| out.extend_from_slice(chunk.as_bytes()));
        }
        Kind::Symlink { target } => {
            out.extend_from_slice(&(target.len() as u16).to_le_bytes());
            out.extend_from_slice(target);
        }
        Kind::Directory { .. } => {}
    }
}
