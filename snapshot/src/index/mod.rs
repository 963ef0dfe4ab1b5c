//! The stat index: what a folder looked like when it was last captured, on disk, so that an unchanged file is not read again.
//!
//! The file is a tree of sections, one per directory, each with the directory's digests and its entries sorted by name. A section
//! names those of its subdirectories by their place, so that an unchanged subtree is kept by naming it. New sections are appended,
//! and the header, which names the root's section, is written last: whoever dies before leaves the index as it was. Sections are
//! read where they are needed, through the page cache and not by a mapping, so that an index of any size costs no memory.
//!
//! The index is not synced. The header names the boot that wrote it, and it vouches for nothing after another.

mod section;

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use replayfork_core::Digest;
use rustix::fs::FlockOperation;

pub use section::{Body, BodyRef, Row, Section};

const MAGIC: &[u8; 4] = b"RFI2";
const HEADER: usize = 4 + 32 + 8 * 4 + 32;
/// Bytes that are collected before they are written.
const BUFFER: usize = 256 << 10;
/// Bytes of sections no longer used that are left alone.
const WASTE: u64 = 1 << 20;

/// Bytes that a window has before and after the section for which it is read.
const BEFORE: u64 = 16 << 10;
const AFTER: u64 = 48 << 10;

/// A part of the file that was read at once.
#[derive(Default)]
pub struct Window {
    at: u64,
    bytes: Vec<u8>,
}

/// Where a section lies in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    pub offset: u64,
    pub len: u32,
}

/// An open index. Only one process has it at a time.
pub struct StatIndex {
    file: File,
    /// What the index's vouching depends on: the boot, the root's path, the rules for what is ignored, the form of the index.
    key: Digest,
    root: Option<At>,
    /// Where new sections go.
    end: u64,
    /// Bytes of all sections when they were last written anew.
    compact: u64,
    tail: Mutex<Tail>,
}

#[derive(Default)]
struct Tail {
    buffer: Vec<u8>,
    at: u64,
}

impl StatIndex {
    /// Opens or makes an index; one that was written under another key, or of a store with fewer packs than it had, is emptied.
    /// `None`: another process has it open.
    ///
    /// # Errors
    /// What the file system says.
    pub fn open(path: &Path, packs: u64) -> io::Result<Option<Self>> {
        let file = File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let mut index = Self { file, key: Digest([0; 32]), root: None, end: HEADER as u64, compact: 0, tail: Mutex::new(Tail::default()) };
        let mut header = [0; HEADER];
        if index.file.read_exact_at(&mut header, 0).is_ok() {
            index.read_header(&header, packs);
        }
        Ok(Some(index))
    }

    fn read_header(&mut self, header: &[u8; HEADER], packs: u64) {
        let (body, check) = header.split_at(HEADER - 32);
        if !body.starts_with(MAGIC) || Digest::of(body).as_bytes() != check {
            return;
        }
        let number = |i: usize| u64::from_le_bytes(body[36 + 8 * i..44 + 8 * i].try_into().expect("eight bytes"));
        let (offset, len_and_packs, end, compact) = (number(0), number(1), number(2), number(3));
        if packs < len_and_packs >> 32 {
            return;
        }
        self.key = Digest(body[4..36].try_into().expect("32 bytes"));
        self.root = Some(At { offset, len: len_and_packs as u32 });
        (self.end, self.compact) = (end, compact);
    }

    /// The root's section, if the index was written under this key.
    pub fn root(&self, key: &Digest) -> Option<At> {
        self.root.filter(|_| self.key == *key)
    }

    /// Reads a section's bytes. `None`: the file has been tampered with.
    pub fn read(&self, at: At) -> Option<Vec<u8>> {
        let mut bytes = vec![0; at.len as usize];
        self.file.read_exact_at(&mut bytes, at.offset).ok()?;
        Some(bytes)
    }

    /// As [`StatIndex::read`], for many sections that lie close together.
    pub fn read_in<'w>(&self, window: &'w mut Window, at: At) -> Option<&'w [u8]> {
        let len = u64::from(at.len);
        let end = at.offset.checked_add(len)?;
        if at.offset < window.at || end > window.at + window.bytes.len() as u64 {
            // Sections of subdirectories come before, those of the next directories behind.
            window.at = at.offset.saturating_sub(BEFORE);
            window.bytes.resize((end - window.at + AFTER) as usize, 0);
            let read = read_up_to(&self.file, &mut window.bytes, window.at).ok()?;
            window.bytes.truncate(read);
        }
        let start = (at.offset - window.at) as usize;
        window.bytes.get(start..start + len as usize)
    }

    /// Adds a section.
    ///
    /// # Errors
    /// What the file system says.
    pub fn append(&self, section: &[u8]) -> io::Result<At> {
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        if tail.at == 0 {
            tail.at = self.end;
        }
        let at = At { offset: tail.at + tail.buffer.len() as u64, len: section.len() as u32 };
        tail.buffer.extend_from_slice(section);
        if tail.buffer.len() >= BUFFER {
            self.file.write_all_at(&tail.buffer, tail.at)?;
            tail.at += tail.buffer.len() as u64;
            tail.buffer.clear();
        }
        Ok(at)
    }

    /// Forgets the sections that were added since the index was opened or committed.
    pub fn abandon(&mut self) {
        self.tail = Mutex::default();
    }

    /// Makes `root` the root's section, in a store that has `packs` packs.
    ///
    /// # Errors
    /// What the file system says.
    pub fn commit(&mut self, key: Digest, root: At, packs: u64) -> io::Result<()> {
        let tail = std::mem::take(&mut *self.tail.lock().unwrap_or_else(PoisonError::into_inner));
        let before = self.end;
        if tail.at > 0 {
            self.file.write_all_at(&tail.buffer, tail.at)?;
            self.end = tail.at + tail.buffer.len() as u64;
        }
        if self.root.is_none() || self.key != key {
            self.compact = self.end - before;
        }
        (self.key, self.root) = (key, Some(root));
        self.write_header(packs)
    }

    fn write_header(&self, packs: u64) -> io::Result<()> {
        let root = self.root.unwrap_or(At { offset: 0, len: 0 });
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(self.key.as_bytes());
        for number in [root.offset, u64::from(root.len) | packs << 32, self.end, self.compact] {
            header.extend_from_slice(&number.to_le_bytes());
        }
        header.extend_from_slice(Digest::of(&header).as_bytes());
        self.file.write_all_at(&header, 0)
    }

    /// Whether this is the file at a path.
    pub fn is_at(&self, path: &Path) -> bool {
        let identity = |m: &Metadata| (m.dev(), m.ino());
        matches!((self.file.metadata(), std::fs::metadata(path)), (Ok(own), Ok(there)) if identity(&own) == identity(&there))
    }

    /// Whether most of the file is sections that nobody names any more.
    pub fn is_wasteful(&self) -> bool {
        self.end > 2 * self.compact + WASTE
    }

    /// Copies the sections in use to another, empty index and commits it there.
    ///
    /// # Errors
    /// What the file system says.
    pub fn copy_to(&self, other: &mut Self, packs: u64) -> io::Result<()> {
        let Some(root) = self.root else { return Ok(()) };
        let root = self.copy_section(root, other)?;
        other.commit(self.key, root, packs)
    }

    fn copy_section(&self, at: At, other: &Self) -> io::Result<At> {
        let broken = || io::Error::new(io::ErrorKind::InvalidData, "the stat index is broken");
        let mut bytes = self.read(at).ok_or_else(broken)?;
        let places = Section::parse(&bytes).ok_or_else(broken)?.folders();
        for (position, below) in places {
            let below = self.copy_section(below, other)?;
            Section::set_place(&mut bytes, position, below);
        }
        other.append(&bytes)
    }
}

/// Reads until the place is full or the file ends.
fn read_up_to(file: &File, place: &mut [u8], at: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < place.len() {
        match file.read_at(&mut place[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// What says that this is still the boot in which an index was written; empty where the kernel does not tell.
pub fn boot() -> Vec<u8> {
    std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}
