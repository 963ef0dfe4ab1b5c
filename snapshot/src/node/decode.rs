//! Reading a stored node, which anyone may have written.

use replayfork_core::Digest;

use super::{Body, Entry, Kind, MAGIC, MAX_ENTRIES, MAX_LEVEL, MAX_TARGET, Node, TOP};
use crate::error::Hostile;

impl Node {
    /// Reads the stored form.
    ///
    /// # Errors
    /// Anything that a capture does not write for a directory of a Linux file system: names with `/` or NUL, `.` and `..`,
    /// duplicates, a wrong order, truncation, counts and levels beyond the limits. The entry is named, or the node where it has none.
    pub fn decode(bytes: &[u8]) -> Result<Self, Hostile> {
        let mut reader = Reader { rest: bytes, entry: String::new(), node: bytes };
        if reader.take(MAGIC.len())? != MAGIC {
            return Err(reader.hostile("is no node of a directory: it has another format"));
        }
        let [head] = reader.array()?;
        let level = head & !TOP;
        if level > MAX_LEVEL {
            return Err(reader.hostile("is a node of too high a level"));
        }
        let content = if head & TOP == 0 { None } else { Some(reader.digest()?) };
        if reader.rest.is_empty() && (content.is_none() || level > 0) {
            return Err(reader.hostile("is a node with nothing in it"));
        }
        let body = if level == 0 { Body::Entries(reader.entries()?) } else { Body::Parts { level, nodes: reader.parts()? } };
        Ok(Self { content, body })
    }
}

struct Reader<'a> {
    rest: &'a [u8],
    /// The entry that is read.
    entry: String,
    node: &'a [u8],
}

impl<'a> Reader<'a> {
    fn hostile(&self, why: &'static str) -> Hostile {
        let entry = if self.entry.is_empty() { Digest::of(self.node).to_string() } else { self.entry.clone() };
        Hostile { entry, why }
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

    /// A number in LEB128, as short as it can be.
    fn number(&mut self) -> Result<u64, Hostile> {
        let mut n = 0u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array()?;
            let bits = u64::from(byte & 0x7f);
            n |= bits << shift;
            if bits << shift >> shift != bits || (byte == 0 && shift > 0) {
                break;
            }
            if byte < 0x80 {
                return Ok(n);
            }
        }
        Err(self.hostile("has a number that is written in another way"))
    }

    fn parts(&mut self) -> Result<Vec<Digest>, Hostile> {
        if self.rest.len() / 32 > MAX_ENTRIES {
            return Err(self.hostile("has too many parts for a directory"));
        }
        let mut parts = Vec::with_capacity(self.rest.len() / 32);
        while !self.rest.is_empty() {
            parts.push(self.digest()?);
        }
        Ok(parts)
    }

    fn entries(&mut self) -> Result<Vec<Entry>, Hostile> {
        let mut entries: Vec<Entry> = Vec::new();
        while !self.rest.is_empty() {
            if entries.len() >= MAX_ENTRIES {
                return Err(self.hostile("is one too many for a directory"));
            }
            let entry = self.entry()?;
            if entries.last().is_some_and(|last| last.name >= entry.name) {
                return Err(self.hostile("stands twice or out of order"));
            }
            entries.push(entry);
        }
        Ok(entries)
    }

    fn entry(&mut self) -> Result<Entry, Hostile> {
        let [tag, length] = self.array()?;
        let name = self.take(length.into())?.to_vec();
        self.entry = crate::path_text(&name);
        check_name(&name).map_err(|why| self.hostile(why))?;
        let mtime = i64::from_le_bytes(self.array()?);
        let kind = match tag {
            b'f' | b'x' => {
                let size = self.number()?;
                let digest = self.digest()?;
                let count = self.number()?;
                if count > self.rest.len() as u64 / 32 {
                    return Err(self.hostile("claims more chunks than there are"));
                }
                let chunks = (0..count).map(|_| self.digest()).collect::<Result<_, _>>()?;
                Kind::File { size, executable: tag == b'x', digest, chunks }
            }
            b'l' => {
                let length = self.number()?;
                if length == 0 || length > MAX_TARGET as u64 {
                    return Err(self.hostile("is a symlink without a possible target"));
                }
                let target = self.take(length as usize)?.to_vec();
                if target.contains(&0) {
                    return Err(self.hostile("is a symlink without a possible target"));
                }
                Kind::Symlink { target }
            }
            b'd' => Kind::Directory { node: self.digest()? },
            _ => return Err(self.hostile("is of an unknown type")),
        };
        Ok(Entry { name, mtime, kind })
    }
}

fn check_name(name: &[u8]) -> Result<(), &'static str> {
    match name {
        b"" => Err("has no name"),
        b"." | b".." => Err("is no name of its own"),
        _ if name.contains(&b'/') => Err("has a slash in its name"),
        _ if name.contains(&0) => Err("has a NUL in its name"),
        _ => Ok(()),
    }
}
