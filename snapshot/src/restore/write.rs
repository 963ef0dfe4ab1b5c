//! Writing many files: packs are read in order, each frame once, and several threads write what is in them.

use std::io::{Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use replayfork_core::Digest;
use rustix::io::Errno;

use super::disk::{Occupied, make_file, open_below, set_time_of};
use crate::error::{Hostile, SnapshotError};
use crate::pack::{Frame, slice_of};
use crate::store::{FrameReader, LocalStore};

/// Threads that write.
const THREADS: usize = 2;
/// Files that are planned at once; a plan takes about 150 bytes a file.
const BATCH: usize = 64 << 10;

/// A file that is to be written.
pub struct Wanted {
    pub name: Vec<u8>,
    pub mtime: i64,
    pub size: u64,
    pub executable: bool,
    pub digest: Digest,
    pub chunks: Vec<Digest>,
    pub occupied: Occupied,
}

/// Collects files of folders, and writes them when they are many enough.
pub struct Writer<'a> {
    top: &'a OwnedFd,
    store: &'a LocalStore,
    folders: Vec<Vec<u8>>,
    files: Vec<(u32, Wanted)>,
}

/// Where a file's content lies: pack, frame, offset and length in the raw frame; and the file.
#[derive(Clone, Copy)]
struct Located {
    pack: u32,
    frame: Frame,
    offset: u32,
    len: u32,
    file: u32,
}

enum Job<'a> {
    /// Files whose contents are in one frame.
    Frame(&'a [Located]),
    /// A file in chunks.
    Chunked(u32),
}

/// What a thread uses again and again.
struct Hand {
    frames: FrameReader,
    folder: Option<(u32, OwnedFd)>,
}

impl<'a> Writer<'a> {
    pub fn new(top: &'a OwnedFd, store: &'a LocalStore) -> Self {
        Self { top, store, folders: Vec::new(), files: Vec::new() }
    }

    /// Adds files of the folder at a path; they may be written at once, and are when [`Writer::flush`] returns.
    ///
    /// # Errors
    /// As [`Writer::flush`].
    pub fn add(&mut self, folder: &[u8], files: Vec<Wanted>) -> Result<(), SnapshotError> {
        if files.is_empty() {
            return Ok(());
        }
        let number = self.folders.len() as u32;
        self.folders.push(folder.to_vec());
        self.files.extend(files.into_iter().map(|file| (number, file)));
        if self.files.len() >= BATCH { self.flush() } else { Ok(()) }
    }

    /// Writes all files that were added.
    ///
    /// # Errors
    /// A blob is missing or not what its digest says, or what the file system says; with the file named.
    pub fn flush(&mut self) -> Result<(), SnapshotError> {
        let located = self.locate()?;
        let mut jobs: Vec<Job<'_>> =
            self.files.iter().zip(0..).filter(|((_, f), _)| !f.chunks.is_empty()).map(|(_, n)| Job::Chunked(n)).collect();
        jobs.extend(located.chunk_by(|a, b| (a.pack, a.frame) == (b.pack, b.frame)).map(Job::Frame));
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            let mut hand = Hand { frames: FrameReader::default(), folder: None };
            while !failed.load(Ordering::Relaxed) {
                let Some(job) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                let done = match job {
                    Job::Frame(files) => self.write_frame(&mut hand, files),
                    Job::Chunked(file) => self.write_chunked(&mut hand, *file),
                };
                if let Err(error) = done {
                    failed.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
            Ok(())
        };
        super::walk::together(THREADS.min(jobs.len()), work)?;
        self.folders.clear();
        self.files.clear();
        Ok(())
    }

    fn path(&self, file: u32) -> Vec<u8> {
        let (folder, wanted) = &self.files[file as usize];
        let folder = &self.folders[*folder as usize];
        if folder.is_empty() { wanted.name.clone() } else { [folder, &b"/"[..], &wanted.name].concat() }
    }

    fn hostile(&self, file: u32, why: &'static str) -> SnapshotError {
        Hostile { entry: crate::path_text(&self.path(file)), why }.into()
    }

    /// Where the contents of all files are that are one blob each, in the order in which they lie.
    fn locate(&self) -> Result<Vec<Located>, SnapshotError> {
        let mut rows = Vec::with_capacity(self.files.len());
        for ((_, file), number) in self.files.iter().zip(0u32..).filter(|((_, f), _)| f.chunks.is_empty()) {
            let (pack, row) = *self.store.candidates(&file.digest)?.first().ok_or(SnapshotError::Missing(file.digest))?;
            rows.push((pack, row, number));
        }
        rows.sort_unstable();
        let mut located = Vec::with_capacity(rows.len());
        for of_pack in rows.chunk_by(|a, b| a.0 == b.0) {
            let blobs = self.store.rows(of_pack[0].0)?;
            for (pack, row, number) in of_pack {
                let digest = &self.files[*number as usize].1.digest;
                let (mut pack, mut blob) = (*pack, blobs[*row as usize]);
                if blob.digest != *digest {
                    // Another one that begins with the same bytes.
                    let found = self.store.find(digest)?.ok_or(SnapshotError::Missing(*digest))?;
                    (pack, blob) = (found.pack, found.blob);
                }
                located.push(Located { pack, frame: blob.frame, offset: blob.offset, len: blob.len, file: *number });
            }
        }
        located.sort_unstable_by_key(|l| (l.pack, l.frame, l.offset, l.len, l.file));
        Ok(located)
    }

    fn write_frame(&self, hand: &mut Hand, files: &[Located]) -> Result<(), SnapshotError> {
        let Hand { frames, folder } = hand;
        let pack = self.store.pack(files[0].pack)?;
        let raw = frames.read(&pack, files[0].frame)?;
        let mut verified = None;
        for located in files {
            let digest = self.files[located.file as usize].1.digest;
            let content = slice_of(raw, located.offset, located.len).ok_or(SnapshotError::Corrupt(digest))?;
            // Equal files come one after the other.
            if verified != Some(digest) {
                if Digest::of(content) != digest {
                    return Err(SnapshotError::Corrupt(digest));
                }
                verified = Some(digest);
            }
            self.write(folder, located.file, |file| Ok(file.write_all(content)), content.len() as u64)?;
        }
        Ok(())
    }

    fn write_chunked(&self, hand: &mut Hand, number: u32) -> Result<(), SnapshotError> {
        let Hand { frames, folder } = hand;
        let wanted = &self.files[number as usize].1;
        let write = |file: &mut std::fs::File| {
            let mut length = 0;
            for digest in &wanted.chunks {
                let place = self.store.find(digest)?.ok_or(SnapshotError::Missing(*digest))?;
                let pack = self.store.pack(place.pack)?;
                let raw = frames.read(&pack, place.blob.frame)?;
                let content = slice_of(raw, place.blob.offset, place.blob.len).ok_or(SnapshotError::Corrupt(*digest))?;
                if Digest::of(content) != *digest {
                    return Err(SnapshotError::Corrupt(*digest));
                }
                length += content.len() as u64;
                if length > wanted.size {
                    return Err(self.hostile(number, "has chunks of more bytes than it has"));
                }
                // Zeros are left out: the file gets a hole.
                let written = if content.iter().all(|b| *b == 0) {
                    file.seek(SeekFrom::Start(length)).and_then(|_| file.set_len(length))
                } else {
                    file.write_all(content)
                };
                if written.is_err() {
                    return Ok(written);
                }
            }
            if length < wanted.size {
                return Err(self.hostile(number, "has chunks of fewer bytes than it has"));
            }
            Ok(Ok(()))
        };
        self.write(folder, number, write, wanted.size)
    }

    /// Makes a file, has its `length` bytes written and sets its time.
    fn write(
        &self,
        open: &mut Option<(u32, OwnedFd)>,
        number: u32,
        write: impl FnOnce(&mut std::fs::File) -> Result<std::io::Result<()>, SnapshotError>,
        length: u64,
    ) -> Result<(), SnapshotError> {
        let (folder, wanted) = &self.files[number as usize];
        if length != wanted.size {
            return Err(self.hostile(number, "has another size than its content"));
        }
        let io = |e: Errno| SnapshotError::io(self.path(number), e);
        let handle = match open {
            Some((at, handle)) if at == folder => handle,
            other => &other.insert((*folder, open_below(self.top, &self.folders[*folder as usize]).map_err(io)?)).1,
        };
        let mut file = match make_file(handle, &wanted.name, wanted.executable, wanted.occupied) {
            Err(Errno::EXIST) if wanted.occupied == Occupied::Refuse => {
                return Err(self.hostile(number, "has the name of another entry in the eyes of this file system"));
            }
            other => other.map_err(io)?,
        };
        write(&mut file)?.map_err(|e| SnapshotError::io(self.path(number), e))?;
        set_time_of(&file, wanted.mtime).map_err(io)
    }
}
