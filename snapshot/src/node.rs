//! One directory of a snapshot and its two digests: `content` (no times) and the stored node (times included).

use replayfork_core::Digest;
use replayfork_core::digest::Hasher;

use crate::error::Hostile;

/// Entries that one directory may have.
pub const MAX_ENTRIES: usize = 1_000_000;
/// Bytes that a name may have.
pub const MAX_NAME: usize = 255;
const MAX_TARGET: usize = 4096;
const MAGIC: &[u8] = b"RFT1";

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `digest` is of the whole content; `chunks` are the blobs that make it up, empty where it is one blob of that digest.
    File {
        size: u64,
        executable: bool,
        digest: Digest,
        chunks: Vec<Digest>,
    },
    Symlink {
        target: Vec<u8>,
    },
    Directory {
        content: Digest,
        node: Digest,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: Vec<u8>,
    /// Nanoseconds since the Unix epoch.
    pub mtime: i64,
    pub kind: Kind,
}

impl Entry {
    /// What the entry is, without name and time.
    pub fn identity(&self) -> Digest {
        let hasher = Hasher::new("entry");
        match &self.kind {
            Kind::File { executable, digest, .. } => hasher.part("file", digest.as_bytes()).part("x", &[u8::from(*executable)]),
            Kind::Symlink { target } => hasher.part("symlink", target),
            Kind::Directory { content, .. } => hasher.part("directory", content.as_bytes()),
        }
        .finish()
    }

    /// Blobs of the entry's content, without those below it.
    pub fn blobs(&self) -> Vec<Digest> {
        match &self.kind {
            Kind::File { digest, chunks, .. } if chunks.is_empty() => vec![*digest],
            Kind::File { chunks, .. } => chunks.clone(),
            Kind::Symlink { .. } => vec![],
            Kind::Directory { node, .. } => vec![*node],
        }
    }
}

/// A directory: entries sorted by the bytes of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    pub entries: Vec<Entry>,
}

impl Directory {
    pub fn get(&self, name: &[u8]) -> Option<&Entry> {
        self.entries.binary_search_by(|e| e.name.as_slice().cmp(name)).ok().map(|i| &self.entries[i])
    }

    /// Names and identities of all below; modification times don't count.
    pub fn content(&self) -> Digest {
        let mut hasher = Hasher::new("directory");
        for entry in &self.entries {
            hasher.add("name", &entry.name);
            hasher.add("is", entry.identity().as_bytes());
        }
        hasher.finish()
    }

    /// The stored form: `RFT1`, then per entry its type byte, name, time and what the type needs; little-endian, lengths before bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        for entry in &self.entries {
            let (tag, executable) = match &entry.kind {
                Kind::File { executable, .. } => (b'f', *executable),
                Kind::Symlink { .. } => (b'l', false),
                Kind::Directory { .. } => (b'd', false),
            };
            out.push(if executable { b'x' } else { tag });
            out.extend_from_slice(&(entry.name.len() as u16).to_le_bytes());
            out.extend_from_slice(&entry.name);
            out.extend_from_slice(&entry.mtime.to_le_bytes());
            match &entry.kind {
                Kind::File { size, digest, chunks, .. } => {
                    out.extend_from_slice(&size.to_le_bytes());
                    out.extend_from_slice(digest.as_bytes());
                    out.extend_from_slice(&(chunks.len() as u32).to_le_bytes());
                    for chunk in chunks {
                        out.extend_from_slice(chunk.as_bytes());
                    }
                }
                Kind::Symlink { target } => {
                    out.extend_from_slice(&(target.len() as u16).to_le_bytes());
                    out.extend_from_slice(target);
                }
                Kind::Directory { content, node } => {
                    out.extend_from_slice(content.as_bytes());
                    out.extend_from_slice(node.as_bytes());
                }
            }
        }
        out
    }

    /// Reads the stored form.
    ///
    /// # Errors
    /// Anything that [`Directory::encode`] does not write for a directory of a Linux file system: names with `/` or
    /// NUL, `.` and `..`, duplicates, a wrong order, truncation, counts beyond the limits.
    pub fn decode(bytes: &[u8]) -> Result<Self, Hostile> {
        let mut reader = Reader { rest: bytes, entry: String::new() };
        if reader.take(MAGIC.len())? != MAGIC {
            return Err(reader.hostile("is in no directory: the stored node has another format"));
        }
        let mut entries: Vec<Entry> = Vec::new();
        while !reader.rest.is_empty() {
            if entries.len() >= MAX_ENTRIES {
                return Err(reader.hostile("is one too many for a directory"));
            }
            let entry = reader.entry()?;
            if entries.last().is_some_and(|last| last.name >= entry.name) {
                return Err(reader.hostile("stands twice or out of order"));
            }
            entries.push(entry);
        }
        Ok(Self { entries })
    }
}

struct Reader<'a> {
    rest: &'a [u8],
    entry: String,
}

impl<'a> Reader<'a> {
    fn hostile(&self, why: &'static str) -> Hostile {
        Hostile { entry: self.entry.clone(), why }
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Hostile> {
        let (head, rest) = self.rest.split_at_checked(n).ok_or_else(|| self.hostile("is cut off"))?;
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Hostile> {
        let head = self.take(N)?;
        Ok(head.try_into().expect("take gives N bytes"))
    }

    fn digest(&mut self) -> Result<Digest, Hostile> {
        Ok(Digest(self.array()?))
    }

    fn entry(&mut self) -> Result<Entry, Hostile> {
        let [tag] = self.array()?;
        let length = u16::from_le_bytes(self.array()?) as usize;
        let name = self.take(length)?.to_vec();
        self.entry = crate::path_text(&name);
        check_name(&name).map_err(|why| self.hostile(why))?;
        let mtime = i64::from_le_bytes(self.array()?);
        let kind = match tag {
            b'f' | b'x' => {
                let size = u64::from_le_bytes(self.array()?);
                let digest = self.digest()?;
                let count = u32::from_le_bytes(self.array()?) as usize;
                if count > self.rest.len() / 32 {
                    return Err(self.hostile("claims more chunks than there are"));
                }
                let chunks = (0..count).map(|_| self.digest()).collect::<Result<_, _>>()?;
                Kind::File { size, executable: tag == b'x', digest, chunks }
            }
            b'l' => {
                let length = u16::from_le_bytes(self.array()?) as usize;
                let target = self.take(length)?.to_vec();
                if target.is_empty() || target.len() > MAX_TARGET || target.contains(&0) {
                    return Err(self.hostile("is a symlink without a possible target"));
                }
                Kind::Symlink { target }
            }
            b'd' => Kind::Directory { content: self.digest()?, node: self.digest()? },
            _ => return Err(self.hostile("is of an unknown type")),
        };
        Ok(Entry { name, mtime, kind })
    }
}

fn check_name(name: &[u8]) -> Result<(), &'static str> {
    match name {
        b"" => Err("has no name"),
        b"." | b".." => Err("is no name of its own"),
        _ if name.len() > MAX_NAME => Err("has a name of over 255 bytes"),
        _ if name.contains(&b'/') => Err("has a slash in its name"),
        _ if name.contains(&0) => Err("has a NUL in its name"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &[u8], mtime: i64) -> Entry {
        Entry { name: name.to_vec(), mtime, kind: Kind::Symlink { target: b"t".to_vec() } }
    }

    #[test]
    fn times_are_stored_and_are_no_part_of_the_content() {
        let (a, b) = (Directory { entries: vec![link(b"a", 1)] }, Directory { entries: vec![link(b"a", 2)] });
        assert_eq!(a.content(), b.content());
        assert_ne!(a.encode(), b.encode());
        assert_eq!(Directory::decode(&a.encode()).unwrap(), a);
    }

    #[test]
    fn hostile_nodes_are_refused_with_the_entry_named() {
        for (entries, why) in [
            (vec![link(b"../x", 0)], "slash"),
            (vec![link(b"..", 0)], "no name of its own"),
            (vec![link(b"", 0)], "no name"),
            (vec![link(b"a\0", 0)], "NUL"),
            (vec![link(b"b", 0), link(b"a", 0)], "out of order"),
            (vec![link(b"a", 0), link(b"a", 0)], "twice"),
            (vec![link(&[b'n'; 256], 0)], "255"),
        ] {
            let error = Directory::decode(&Directory { entries }.encode()).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
        let whole = Directory { entries: vec![link(b"a", 0)] }.encode();
        for cut in 0..whole.len() {
            assert!(cut == MAGIC.len() || Directory::decode(&whole[..cut]).is_err(), "cut at {cut}");
        }
    }
}
