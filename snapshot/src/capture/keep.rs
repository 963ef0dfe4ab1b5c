//! Where what was read goes: into packs, or nowhere.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use replayfork_core::Digest;

use super::{Stored, THREADS};
use crate::error::SnapshotError;
use crate::node::Node;
use crate::pack::{BlobKind, PackBuilder};
use crate::store::LocalStore;

pub enum Keep<'a> {
    Store(Box<Packs<'a>>),
    /// Nodes that no store may have.
    Nothing(Mutex<HashMap<Digest, Node>>),
}

/// One pack a thread for contents, and one for nodes of directories.
pub struct Packs<'a> {
    store: &'a LocalStore,
    contents: [Mutex<PackBuilder>; THREADS],
    nodes: Mutex<PackBuilder>,
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

    /// Keeps a node of a directory; what it names has been kept before.
    ///
    /// # Errors
    /// What the store says.
    pub fn node(&self, digest: Digest, bytes: &[u8]) -> Result<(), SnapshotError> {
        match self {
            Self::Nothing(nodes) => drop(lock(nodes).insert(digest, Node::decode(bytes)?)),
            Self::Store(packs) => {
                let mut pack = lock(&packs.nodes);
                if packs.claim(&digest) {
                    pack.add(digest, BlobKind::Directory, bytes);
                    if pack.is_full() {
                        packs.store_contents()?;
                        packs.store(&mut pack)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Stores what is still open, in one pack if that is not too much.
    ///
    /// # Errors
    /// What the store says.
    pub fn finish(&self) -> Result<(), SnapshotError> {
        let Self::Store(packs) = self else { return Ok(()) };
        let [first, others @ ..] = &packs.contents;
        let mut first = lock(first);
        for other in others.iter().chain([&packs.nodes]) {
            let mut other = lock(other);
            if first.is_too_full_for(other.size()) {
                packs.store(&mut first)?;
            }
            first.absorb(&mut other);
        }
        packs.store(&mut first)
    }

    pub fn into_nodes(self) -> HashMap<Digest, Node> {
        match self {
            Self::Store(_) => HashMap::new(),
            Self::Nothing(nodes) => nodes.into_inner().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

impl<'a> Packs<'a> {
    pub fn new(store: &'a LocalStore, stored: Stored<'a>) -> Self {
        Self { store, contents: Default::default(), nodes: Mutex::default(), open: Mutex::default(), stored: Mutex::new(stored) }
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
