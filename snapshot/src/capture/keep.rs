//! Where what was read goes: into packs, or nowhere.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use replayfork_core::Digest;

use super::{Stored, THREADS};
use crate::error::SnapshotError;
use crate::node::Directory;
use crate::pack::{BlobKind, PackBuilder};
use crate::store::LocalStore;

pub enum Keep<'a> {
    Store(Box<Packs<'a>>),
    /// Directories that no store may have.
    Nothing(Mutex<HashMap<Digest, Directory>>),
}

/// One pack a thread for contents, and one for directories.
pub struct Packs<'a> {
    store: &'a LocalStore,
    contents: [Mutex<PackBuilder>; THREADS],
    directories: Mutex<PackBuilder>,
    /// Blobs that are in one of the open packs, or on their way to the store.
    open: Mutex<HashSet<Digest>>,
    stored: Mutex<Stored<'a>>,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Keep<'a> {
    pub fn nothing() -> Self {
        Self::Nothing(Mutex::default())
    }

    pub fn stores(&self) -> bool {
        matches!(self, Self::Store(_))
    }

    /// Reads a content of up to `room` bytes with `read` and keeps it; its digest and length. `buffer` is used where nothing is stored.
    ///
    /// # Errors
    /// What `read` or the store says.
    pub fn content(
        &self,
        lane: usize,
        room: usize,
        buffer: &mut Vec<u8>,
        read: impl FnOnce(&mut [u8]) -> Result<usize, SnapshotError>,
    ) -> Result<(Digest, usize), SnapshotError> {
        let Self::Store(packs) = self else {
            if buffer.len() < room {
                buffer.resize(room, 0);
            }
            let length = read(&mut buffer[..room])?;
            return Ok((Digest::of(&buffer[..length]), length));
        };
        let mut pack = lock(&packs.contents[lane]);
        let place = &mut pack.room(room)[..room];
        let length = read(place)?;
        let digest = Digest::of(&place[..length]);
        if packs.claim(&digest) {
            pack.keep(digest, BlobKind::Data, length);
            if pack.is_full() {
                packs.store(&mut pack)?;
            }
        }
        Ok((digest, length))
    }

    /// Keeps a content that is larger than a frame.
    ///
    /// # Errors
    /// What the store says.
    pub fn large(&self, lane: usize, content: &[u8]) -> Result<Digest, SnapshotError> {
        let digest = Digest::of(content);
        if let Self::Store(packs) = self {
            let mut pack = lock(&packs.contents[lane]);
            if packs.claim(&digest) {
                if pack.is_too_full_for(content.len()) {
                    packs.store(&mut pack)?;
                }
                pack.add(digest, BlobKind::Data, content);
            }
        }
        Ok(digest)
    }

    /// Keeps a directory; what it names has been kept before. Returns its node.
    ///
    /// # Errors
    /// What the store says.
    pub fn directory(&self, directory: Directory) -> Result<Digest, SnapshotError> {
        let bytes = directory.encode();
        let node = Digest::of(&bytes);
        match self {
            Self::Nothing(directories) => drop(lock(directories).insert(node, directory)),
            Self::Store(packs) => {
                let mut pack = lock(&packs.directories);
                if packs.claim(&node) {
                    pack.add(node, BlobKind::Directory, &bytes);
                    if pack.is_full() {
                        packs.store_contents()?;
                        packs.store(&mut pack)?;
                    }
                }
            }
        }
        Ok(node)
    }

    /// Stores what is still open, in one pack if that is not too much.
    ///
    /// # Errors
    /// What the store says.
    pub fn finish(&self) -> Result<(), SnapshotError> {
        let Self::Store(packs) = self else { return Ok(()) };
        let [first, others @ ..] = &packs.contents;
        let mut first = lock(first);
        for other in others.iter().chain([&packs.directories]) {
            let mut other = lock(other);
            if first.is_too_full_for(other.size()) {
                packs.store(&mut first)?;
            }
            first.absorb(&mut other);
        }
        packs.store(&mut first)
    }

    pub fn into_directories(self) -> HashMap<Digest, Directory> {
        match self {
            Self::Store(_) => HashMap::new(),
            Self::Nothing(directories) => directories.into_inner().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl<'a> Packs<'a> {
    pub fn new(store: &'a LocalStore, stored: Stored<'a>) -> Self {
        Self { store, contents: Default::default(), directories: Mutex::default(), open: Mutex::default(), stored: Mutex::new(stored) }
    }

    /// Whether a blob is new. It is to be added to a pack then that was locked before, so that nobody who takes it for known can
    /// store a directory that names it first.
    fn claim(&self, digest: &Digest) -> bool {
        lock(&self.open).insert(*digest) && {
            let stored = self.store.contains(digest);
            if stored {
                lock(&self.open).remove(digest);
            }
            !stored
        }
    }

    fn store_contents(&self) -> Result<(), SnapshotError> {
        self.contents.iter().try_for_each(|pack| self.store(&mut lock(pack)))
    }

    fn store(&self, pack: &mut PackBuilder) -> Result<(), SnapshotError> {
        if pack.is_empty() {
            return Ok(());
        }
        let (head, frames) = pack.close();
        let path = self.store.put_parts(&head, frames)?;
        let mut open = lock(&self.open);
        for digest in pack.digests() {
            open.remove(digest);
        }
        drop(open);
        pack.clear();
        (lock(&self.stored))(&path)
    }
}
