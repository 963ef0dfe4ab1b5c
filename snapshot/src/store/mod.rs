//! Where blobs are: the trait, and a store in a local folder.

mod catalog;
mod fsck;
mod unpack;

use std::fs;
use std::io::{IoSlice, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use replayfork_core::Digest;
use rustix::fs::FlockOperation;

use crate::error::SnapshotError;
use crate::pack::{FRAME_SIZE, PackedBlob, check_parts, head_len, read_frame, slice};
use catalog::{Catalog, Pack};

pub use fsck::Fault;
pub(crate) use unpack::FrameReader;

/// Gives blobs by digest, verified.
pub trait Blobs {
    /// # Errors
    /// The blob is missing or broken.
    fn get(&mut self, digest: &Digest) -> Result<Vec<u8>, SnapshotError>;
}

/// Packs in a folder. A pack is a file named by the digest of its index; it appears whole or not at all.
///
/// Captures and restores share a store by reference, also from several threads. What another process adds is seen when the store
/// is opened; blobs that two processes store at once are stored twice, which does no harm.
///
/// Packs survive the death of their writer as soon as they are stored; nothing is synced, since a store lives no longer than its pod.
pub struct LocalStore {
    folder: PathBuf,
    catalog: Mutex<Option<Catalog>>,
    /// The frame read last: blobs of a frame are asked for one after the other.
    last: Mutex<Option<LastFrame>>,
}

struct LastFrame {
    pack: u32,
    at: u32,
    raw: Arc<Vec<u8>>,
}

/// Where a blob lies in this store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub pack: u32,
    pub blob: PackedBlob,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LocalStore {
    /// Opens a folder, made if it is missing; packs cut off by a crash are removed.
    ///
    /// # Errors
    /// The folder can't be read or made.
    pub fn open(folder: &Path) -> Result<Self, SnapshotError> {
        let io = |e| SnapshotError::io(folder.as_os_str().as_encoded_bytes(), e);
        fs::create_dir_all(folder).map_err(io)?;
        for entry in fs::read_dir(folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|e| e == "tmp") {
                remove_abandoned(&path).map_err(io)?;
            }
        }
        Ok(Self { folder: folder.to_owned(), catalog: Mutex::new(None), last: Mutex::new(None) })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Calls `f` with the catalog, which is read when it is first needed.
    fn with<T>(&self, f: impl FnOnce(&mut Catalog) -> Result<T, SnapshotError>) -> Result<T, SnapshotError> {
        let mut catalog = lock(&self.catalog);
        if catalog.is_none() {
            *catalog = Some(Catalog::read(&self.folder)?);
        }
        f(catalog.as_mut().expect("read just now"))
    }

    /// The file of a pack that holds a blob.
    pub fn pack_of(&self, digest: &Digest) -> Option<PathBuf> {
        let place = self.find(digest).ok().flatten()?;
        Some(self.pack(place.pack).ok()?.path.clone())
    }

    /// Whether the store has a blob. A pack that can't be read has none.
    pub fn contains(&self, digest: &Digest) -> bool {
        self.find(digest).is_ok_and(|found| found.is_some())
    }

    /// # Errors
    /// A pack can't be read.
    pub(crate) fn find(&self, digest: &Digest) -> Result<Option<Place>, SnapshotError> {
        let candidates = self.candidates(digest)?;
        for (number, row) in candidates {
            let blob = self.pack(number)?.blob(row)?;
            if blob.digest == *digest {
                return Ok(Some(Place { pack: number, blob }));
            }
        }
        Ok(None)
    }

    /// Packs and rows where the blob may be.
    ///
    /// # Errors
    /// The folder can't be read.
    pub(crate) fn candidates(&self, digest: &Digest) -> Result<Vec<(u32, u32)>, SnapshotError> {
        self.with(|catalog| Ok(catalog.candidates(digest)))
    }

    pub(crate) fn pack(&self, number: u32) -> Result<Arc<Pack>, SnapshotError> {
        self.with(|catalog| catalog.open(number))
    }

    /// All rows of a pack.
    ///
    /// # Errors
    /// It can't be read.
    pub(crate) fn rows(&self, number: u32) -> Result<Vec<PackedBlob>, SnapshotError> {
        self.pack(number)?.rows()
    }

    /// Reads a frame, decompressed. The decompressed frame stays at hand until another is read.
    fn frame(&self, place: &Place) -> Result<Arc<Vec<u8>>, SnapshotError> {
        if let Some(last) = &*lock(&self.last)
            && (last.pack, last.at) == (place.pack, place.blob.frame.at)
        {
            return Ok(last.raw.clone());
        }
        let raw = Arc::new(read_frame(&self.pack(place.pack)?.frame(place.blob.frame)?)?);
        // A frame of one large blob is not asked for again.
        if raw.len() <= FRAME_SIZE {
            *lock(&self.last) = Some(LastFrame { pack: place.pack, at: place.blob.frame.at, raw: raw.clone() });
        }
        Ok(raw)
    }

    /// # Errors
    /// As [`Blobs::get`].
    pub fn read(&self, digest: &Digest) -> Result<Vec<u8>, SnapshotError> {
        let place = self.find(digest)?.ok_or(SnapshotError::Missing(*digest))?;
        let raw = self.frame(&place)?;
        let content = slice(&raw, &place.blob).filter(|c| Digest::of(c) == *digest).ok_or(SnapshotError::Corrupt(*digest))?;
        Ok(content.to_vec())
    }

    /// Stores a pack; returns its file.
    ///
    /// # Errors
    /// No space, or no pack.
    pub fn put_pack(&self, bytes: &[u8]) -> Result<PathBuf, SnapshotError> {
        let (head, frames) = bytes.split_at_checked(head_len(bytes)?).unwrap_or((bytes, &[]));
        self.put_parts(head, frames)
    }

    /// Stores a pack that is given as its index and its frames.
    ///
    /// # Errors
    /// As [`LocalStore::put_pack`].
    pub(crate) fn put_parts(&self, head: &[u8], frames: &[u8]) -> Result<PathBuf, SnapshotError> {
        check_parts(head, frames)?;
        let path = self.folder.join(format!("{}.pack", Digest::of(head)));
        let io = |e| SnapshotError::io(path.as_os_str().as_encoded_bytes(), e);
        if !path.exists() {
            self.write(&path, head, frames).map_err(io)?;
        }
        self.with(|catalog| catalog.add(&path, head))?;
        Ok(path)
    }

    /// Writes a pack beside its place and moves it there. Whoever opens the store meanwhile leaves a locked file alone.
    fn write(&self, path: &Path, head: &[u8], frames: &[u8]) -> std::io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_extension(format!("{}-{number}.tmp", std::process::id()));
        for last_try in [false, true] {
            let mut file = fs::File::create(&temporary)?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            let mut parts = &mut [IoSlice::new(head), IoSlice::new(frames)][..];
            while !parts.is_empty() {
                let n = file.write_vectored(parts)?;
                if n == 0 && parts.iter().any(|p| !p.is_empty()) {
                    return Err(std::io::ErrorKind::WriteZero.into());
                }
                IoSlice::advance_slices(&mut parts, n);
            }
            match fs::rename(&temporary, path) {
                // Taken for abandoned before it was locked.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound && !last_try => {}
                other => return other,
            }
        }
        Ok(())
    }

    /// How many packs there are.
    ///
    /// # Errors
    /// The folder can't be read.
    pub(crate) fn packs_on_disk(&self) -> Result<u64, SnapshotError> {
        let listing = fs::read_dir(&self.folder).map_err(|e| SnapshotError::io(self.folder.as_os_str().as_encoded_bytes(), e))?;
        Ok(listing.flatten().filter(|e| e.path().extension().is_some_and(|e| e == "pack")).count() as u64)
    }
}

/// Removes a file that nobody writes any more.
fn remove_abandoned(path: &Path) -> std::io::Result<()> {
    let Ok(file) = fs::File::open(path) else { return Ok(()) };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => match fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
        Err(_) => Ok(()),
    }
}

impl Blobs for LocalStore {
    fn get(&mut self, digest: &Digest) -> Result<Vec<u8>, SnapshotError> {
        self.read(digest)
    }
}

impl Blobs for &LocalStore {
    fn get(&mut self, digest: &Digest) -> Result<Vec<u8>, SnapshotError> {
        self.read(digest)
    }
}
