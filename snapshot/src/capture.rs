//! Taking a snapshot: walk, compare with the stat index, read what is new, pack it.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ignore::gitignore::{Gitignore, GitignoreBuilder};
use replayfork_core::Digest;
use replayfork_core::model::SnapshotRef;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::error::SnapshotError;
use crate::node::{Directory, Entry, Kind};
use crate::pack::{BlobKind, PackBuilder};

/// Files above this size are split by content.
const SPLIT_ABOVE: u64 = 1 << 20;
/// Chunk sizes: least, wanted, most.
const CHUNKS: (usize, usize, usize) = (256 << 10, 1 << 20, 4 << 20);
const IGNORE_FILE: &str = ".replayforkignore";
/// How often a file that changes while it is read is read again.
const READ_TRIES: usize = 3;

/// An entry that a snapshot leaves out, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    pub path: String,
    pub why: String,
}

/// A snapshot that was taken.
#[derive(Clone, Debug)]
pub struct Captured {
    pub snapshot: SnapshotRef,
    pub files: u64,
    pub bytes: u64,
    /// Files that were read because the index could not vouch for them.
    pub read: u64,
    pub skipped: Vec<Skipped>,
}

/// What of a file's metadata says that it has not changed.
#[derive(Clone, Copy, PartialEq, Eq)]
struct StatKey {
    size: i64,
    inode: u64,
    mtime: i64,
    ctime: i64,
    mode: u32,
}

impl StatKey {
    fn of(stat: &Stat) -> Self {
        Self {
            size: stat.st_size,
            inode: stat.st_ino,
            mtime: nanoseconds(stat.st_mtime, stat.st_mtime_nsec as i64),
            ctime: nanoseconds(stat.st_ctime, stat.st_ctime_nsec as i64),
            mode: stat.st_mode,
        }
    }
}

fn nanoseconds(seconds: i64, nanoseconds: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

struct Indexed {
    stat: StatKey,
    kind: Kind,
    /// The file was changed so shortly before it was read that a later change could bear the same times.
    racy: bool,
}

/// Takes snapshots of one folder, one after the other, each cheap after the first.
pub struct Capturer {
    root: PathBuf,
    index: HashMap<Vec<u8>, Indexed>,
    /// Blobs that were handed out before.
    known: HashSet<Digest>,
}

struct Walk<'a> {
    ignore: Gitignore,
    started: i64,
    old: HashMap<Vec<u8>, Indexed>,
    new: HashMap<Vec<u8>, Indexed>,
    known: &'a mut HashSet<Digest>,
    pack: PackBuilder,
    emit: &'a mut dyn FnMut(Vec<u8>) -> Result<(), SnapshotError>,
    result: Captured,
}

impl Capturer {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), index: HashMap::new(), known: HashSet::new() }
    }

    /// Blobs that need not be handed out, because the store has them.
    pub fn assume_known(&mut self, digests: impl IntoIterator<Item = Digest>) {
        self.known.extend(digests);
    }

    /// Takes a snapshot. New blobs are handed to `emit` in packs, children before the directories that name them.
    ///
    /// # Errors
    /// The root can't be read, or `emit` fails. Entries that can't be read are reported as skipped.
    pub fn capture(&mut self, emit: &mut dyn FnMut(Vec<u8>) -> Result<(), SnapshotError>) -> Result<Captured, SnapshotError> {
        let io = |e: Errno| SnapshotError::io(self.root.as_os_str().as_bytes(), e);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&self.root, flags, Mode::empty()).map_err(io)?;
        // The clock that the kernel stamps files with, so that "changed since" is decided on one scale.
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        let empty = SnapshotRef { content: Digest([0; 32]), node: Digest([0; 32]) };
        let mut walk = Walk {
            ignore: ignore_rules(&self.root),
            started: nanoseconds(now.tv_sec, now.tv_nsec as i64),
            old: std::mem::take(&mut self.index),
            new: HashMap::new(),
            known: &mut self.known,
            pack: PackBuilder::default(),
            emit,
            result: Captured { snapshot: empty, files: 0, bytes: 0, read: 0, skipped: Vec::new() },
        };
        let walked = walk.directory(&root, &mut Vec::new());
        let flushed = walked.and_then(|snapshot| {
            walk.flush()?;
            Ok(snapshot)
        });
        let Walk { new, mut result, .. } = walk;
        match flushed {
            Ok(snapshot) => {
                self.index = new;
                result.snapshot = snapshot;
                Ok(result)
            }
            // What was handed out may not have arrived.
            Err(error) => {
                self.known.clear();
                Err(error)
            }
        }
    }
}

fn ignore_rules(root: &Path) -> Gitignore {
    let mut builder = GitignoreBuilder::new(root);
    builder.add(root.join(IGNORE_FILE));
    builder.build().unwrap_or_else(|_| Gitignore::empty())
}

impl Walk<'_> {
    fn skip(&mut self, path: &[u8], why: impl ToString) {
        self.result.skipped.push(Skipped { path: crate::path_text(path), why: why.to_string() });
    }

    fn directory(&mut self, folder: &OwnedFd, path: &mut Vec<u8>) -> Result<SnapshotRef, SnapshotError> {
        let mut names = Vec::new();
        let listing = rustix::fs::Dir::read_from(folder).map_err(|e| SnapshotError::io(&path, e))?;
        for entry in listing {
            let entry = entry.map_err(|e| SnapshotError::io(&path, e))?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                names.push(name.to_vec());
            }
        }
        names.sort_unstable();
        let mut entries = Vec::with_capacity(names.len());
        for name in names {
            let length = path.len();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            let entry = self.entry(folder, &name, path)?;
            path.truncate(length);
            entries.extend(entry);
        }
        let directory = Directory { entries };
        let bytes = directory.encode();
        let node = Digest::of(&bytes);
        self.blob(node, BlobKind::Directory, &bytes)?;
        Ok(SnapshotRef { content: directory.content(), node })
    }

    fn entry(&mut self, folder: &OwnedFd, name: &[u8], path: &mut Vec<u8>) -> Result<Option<Entry>, SnapshotError> {
        let stat = match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => {
                self.skip(path, std::io::Error::from(error));
                return Ok(None);
            }
        };
        let file_type = FileType::from_raw_mode(stat.st_mode);
        let is_folder = file_type == FileType::Directory;
        if self.ignore.matched(Path::new(std::ffi::OsStr::from_bytes(path)), is_folder).is_ignore() {
            return Ok(None);
        }
        let key = StatKey::of(&stat);
        let kind = match file_type {
            FileType::RegularFile => match self.file(folder, name, path, key)? {
                Some(kind) => kind,
                None => return Ok(None),
            },
            FileType::Symlink => match rustix::fs::readlinkat(folder, name, Vec::new()) {
                Ok(target) => Kind::Symlink { target: target.into_bytes() },
                Err(Errno::NOENT) => return Ok(None),
                Err(error) => {
                    self.skip(path, std::io::Error::from(error));
                    return Ok(None);
                }
            },
            FileType::Directory => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                match rustix::fs::openat(folder, name, flags, Mode::empty()) {
                    Ok(below) => {
                        let SnapshotRef { content, node } = self.directory(&below, path)?;
                        Kind::Directory { content, node }
                    }
                    Err(Errno::NOENT) => return Ok(None),
                    Err(error) => {
                        self.skip(path, std::io::Error::from(error));
                        return Ok(None);
                    }
                }
            }
            other => {
                self.skip(path, format!("a {other:?} is not recorded"));
                return Ok(None);
            }
        };
        Ok(Some(Entry { name: name.to_vec(), mtime: key.mtime, kind }))
    }

    /// The file's entry: from the index where that can vouch for it, else by reading. `None`: it vanished or can't be read.
    fn file(&mut self, folder: &OwnedFd, name: &[u8], path: &[u8], key: StatKey) -> Result<Option<Kind>, SnapshotError> {
        self.result.files += 1;
        self.result.bytes += key.size as u64;
        if let Some(indexed) = self.old.remove(path)
            && indexed.stat == key
            && !indexed.racy
            && self.is_known(&indexed.kind)
        {
            let kind = indexed.kind.clone();
            self.new.insert(path.to_vec(), indexed);
            return Ok(Some(kind));
        }
        for _ in 0..READ_TRIES {
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = match rustix::fs::openat(folder, name, flags, Mode::empty()) {
                Ok(file) => std::fs::File::from(file),
                Err(Errno::NOENT) => return Ok(None),
                Err(error) => {
                    self.skip(path, std::io::Error::from(error));
                    return Ok(None);
                }
            };
            let before = rustix::fs::fstat(&file).map_err(|e| SnapshotError::io(path, e))?;
            let kind = self.read(&file, path, before.st_size as u64, before.st_mode)?;
            let after = rustix::fs::fstat(&file).map_err(|e| SnapshotError::io(path, e))?;
            if StatKey::of(&before) == StatKey::of(&after) {
                let stat = StatKey::of(&after);
                let racy = stat.ctime >= self.started || stat.mtime >= self.started;
                self.new.insert(path.to_vec(), Indexed { stat, kind: kind.clone(), racy });
                return Ok(Some(kind));
            }
        }
        self.skip(path, "it kept changing while it was read");
        Ok(None)
    }

    fn is_known(&self, kind: &Kind) -> bool {
        match kind {
            Kind::File { digest, chunks, .. } if chunks.is_empty() => self.known.contains(digest),
            Kind::File { chunks, .. } => chunks.iter().all(|c| self.known.contains(c)),
            _ => true,
        }
    }

    fn read(&mut self, file: &std::fs::File, path: &[u8], size: u64, mode: u32) -> Result<Kind, SnapshotError> {
        self.result.read += 1;
        let executable = mode & 0o100 != 0;
        let io = |e| SnapshotError::io(path, e);
        if size <= SPLIT_ABOVE {
            let mut content = Vec::with_capacity(size as usize + 1);
            file.take(SPLIT_ABOVE + 1).read_to_end(&mut content).map_err(io)?;
            if content.len() as u64 <= SPLIT_ABOVE {
                let digest = Digest::of(&content);
                self.blob(digest, BlobKind::Data, &content)?;
                return Ok(Kind::File { size: content.len() as u64, executable, digest, chunks: vec![] });
            }
            let whole = std::io::Cursor::new(content).chain(file);
            return self.split(whole, path, executable);
        }
        self.split(file, path, executable)
    }

    fn split(&mut self, content: impl Read, path: &[u8], executable: bool) -> Result<Kind, SnapshotError> {
        let (mut whole, mut size, mut chunks) = (blake3::Hasher::new(), 0, Vec::new());
        for chunk in fastcdc::v2020::StreamCDC::new(content, CHUNKS.0, CHUNKS.1, CHUNKS.2) {
            let chunk = chunk.map_err(|e| SnapshotError::io(path, std::io::Error::from(e)))?;
            whole.update(&chunk.data);
            size += chunk.data.len() as u64;
            let digest = Digest::of(&chunk.data);
            self.blob(digest, BlobKind::Data, &chunk.data)?;
            chunks.push(digest);
        }
        Ok(Kind::File { size, executable, digest: Digest(*whole.finalize().as_bytes()), chunks })
    }

    fn blob(&mut self, digest: Digest, kind: BlobKind, bytes: &[u8]) -> Result<(), SnapshotError> {
        if self.known.insert(digest) {
            self.pack.add(digest, kind, bytes);
            if self.pack.is_full() {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), SnapshotError> {
        if self.pack.is_empty() {
            return Ok(());
        }
        let pack = self.pack.finish();
        (self.emit)(pack)
    }
}
