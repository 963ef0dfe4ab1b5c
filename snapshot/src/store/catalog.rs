//! Which pack has which blob. In memory are 16 bytes a blob; the rest is read from the packs' own indexes.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use replayfork_core::Digest;

use crate::error::{Hostile, SnapshotError};
use crate::pack::{Frame, HEAD, Index, PackedBlob, ROW};

/// Packs that are kept open.
const OPEN_PACKS: usize = 32;

/// Rows that are read at once where one is asked for: what lies close together is mostly asked for together.
const BLOCK: usize = 128;

/// A pack that is open for reading.
pub(crate) struct Pack {
    pub path: PathBuf,
    pub file: File,
    index: Index,
    /// The rows that were read last, and the first one's number.
    block: Mutex<(usize, Vec<u8>)>,
}

impl Pack {
    pub(super) fn open(path: PathBuf) -> Result<Self, SnapshotError> {
        let io = |e| SnapshotError::io(path.as_os_str().as_encoded_bytes(), e);
        let cut = || Hostile { entry: crate::path_text(path.as_os_str().as_encoded_bytes()), why: "is a pack cut off in its index" };
        let file = File::open(&path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut head = [0; HEAD];
        if size >= HEAD as u64 {
            file.read_exact_at(&mut head, 0).map_err(io)?;
        }
        let (table, rows) = Index::sizes(&head)?;
        let frames = size.checked_sub((HEAD + table + rows * ROW) as u64).ok_or_else(cut)?;
        let mut bytes = vec![0; table];
        file.read_exact_at(&mut bytes, HEAD as u64).map_err(io)?;
        let index = Index::parse(&bytes, rows, frames)?;
        Ok(Self { path, file, index, block: Mutex::default() })
    }

    pub fn io(&self, source: std::io::Error) -> SnapshotError {
        SnapshotError::io(self.path.as_os_str().as_encoded_bytes(), source)
    }

    pub fn rows(&self) -> Result<Vec<PackedBlob>, SnapshotError> {
        Ok(self.index.blobs(&self.read_rows(0, self.index.rows())?)?)
    }

    /// The blob of a row.
    pub fn blob(&self, row: u32) -> Result<PackedBlob, SnapshotError> {
        let mut block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
        let number = row as usize;
        let wanted = number..(number + 2).min(self.index.rows());
        if wanted.start < block.0 || wanted.end > block.0 + block.1.len() / ROW {
            let first = number.saturating_sub(BLOCK / 2);
            *block = (first, self.read_rows(first as u32, BLOCK.min(self.index.rows() - first))?);
        }
        Ok(self.index.blob(row, &block.1[(number - block.0) * ROW..])?)
    }

    fn read_rows(&self, first: u32, rows: usize) -> Result<Vec<u8>, SnapshotError> {
        let mut bytes = vec![0; rows * ROW];
        self.file.read_exact_at(&mut bytes, self.index.row_at(first) as u64).map_err(|e| self.io(e))?;
        Ok(bytes)
    }

    /// Where a frame begins in the file.
    pub fn place(&self, frame: Frame) -> u64 {
        self.index.len() as u64 + u64::from(frame.at)
    }

    /// A frame as it is stored.
    pub fn frame(&self, frame: Frame) -> Result<Vec<u8>, SnapshotError> {
        let mut bytes = vec![0; frame.len as usize];
        self.file.read_exact_at(&mut bytes, self.place(frame)).map_err(|e| self.io(e))?;
        Ok(bytes)
    }
}

/// Bits by which most digests that no pack has are told at once.
const BITS: usize = 1 << 20;

pub(super) struct Catalog {
    packs: Vec<PathBuf>,
    names: HashSet<PathBuf>,
    /// The beginning of a digest, the pack's number, the row in its index.
    rows: BTreeSet<(u64, u32, u32)>,
    /// Of every digest's beginning, one.
    bits: Vec<u64>,
    open: VecDeque<(u32, Arc<Pack>)>,
}

/// Where the bit of a prefix is.
fn bit(prefix: u64) -> (usize, u64) {
    let place = (prefix >> 32) as usize % BITS;
    (place / 64, 1 << (place % 64))
}

fn prefix(digest: &[u8]) -> u64 {
    u64::from_be_bytes(digest[..8].try_into().expect("a digest has 32 bytes"))
}

impl Catalog {
    /// Reads the indexes of all packs of a folder. What is no whole pack has no blobs; `fsck` tells.
    pub fn read(folder: &Path) -> Result<Self, SnapshotError> {
        let mut catalog =
            Self { packs: Vec::new(), names: HashSet::new(), rows: BTreeSet::new(), bits: vec![0; BITS / 64], open: VecDeque::new() };
        let io = |e| SnapshotError::io(folder.as_os_str().as_encoded_bytes(), e);
        for entry in fs::read_dir(folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_none_or(|e| e != "pack") {
                continue;
            }
            match Pack::open(path.clone()).and_then(|pack| pack.rows()) {
                Ok(rows) => catalog.add_rows(&path, rows.iter().map(|b| prefix(b.digest.as_bytes()))),
                Err(SnapshotError::Hostile(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(catalog)
    }

    fn add_rows(&mut self, path: &Path, prefixes: impl Iterator<Item = u64>) {
        if self.names.insert(path.to_owned()) {
            let number = self.packs.len() as u32;
            self.packs.push(path.to_owned());
            for (prefix, row) in prefixes.zip(0..) {
                self.rows.insert((prefix, number, row));
                let (word, bit) = bit(prefix);
                self.bits[word] |= bit;
            }
        }
    }

    /// Adds a pack by its index, which has been checked.
    pub fn add(&mut self, path: &Path, head: &[u8]) -> Result<(), SnapshotError> {
        let (table, _) = Index::sizes(head)?;
        self.add_rows(path, head[HEAD + table..].chunks_exact(ROW).map(prefix));
        Ok(())
    }

    pub fn candidates(&self, digest: &Digest) -> Vec<(u32, u32)> {
        let prefix = prefix(digest.as_bytes());
        let (word, bit) = bit(prefix);
        if self.bits[word] & bit == 0 {
            return Vec::new();
        }
        self.rows.range((prefix, 0, 0)..=(prefix, u32::MAX, u32::MAX)).map(|(_, pack, row)| (*pack, *row)).collect()
    }

    pub fn open(&mut self, number: u32) -> Result<Arc<Pack>, SnapshotError> {
        if let Some((_, pack)) = self.open.iter().find(|(n, _)| *n == number) {
            return Ok(pack.clone());
        }
        let pack = Arc::new(Pack::open(self.packs[number as usize].clone())?);
        if self.open.len() >= OPEN_PACKS {
            self.open.pop_front();
        }
        self.open.push_back((number, pack.clone()));
        Ok(pack)
    }
}
