//! The walk: which directories and files are as the index says, and what the others are now.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ignore::gitignore::Gitignore;
use replayfork_core::Digest;
use replayfork_core::model::SnapshotRef;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::complete::broken;
use super::folder::{Folder, holds};
use super::glance::{Glance, Touched};
use super::keep::Keep;
use super::listing::{Listed, Old, joined, list};
use super::read::{Outcome, read};
use super::{Captured, Skipped, THREADS};
use crate::error::SnapshotError;
use crate::index::{At, Body, BodyRef, Row, Section, StatIndex};
use crate::node::{Kind, MAX_ENTRIES};
use crate::queue::Queue;
use crate::stat::{Stamp, file_clock, look, look_at, open_folder, open_root};
use crate::tree::MAX_DEPTH;

/// Entries of one directory that a thread looks at before another one may take the next.
const PIECE: usize = 256;
pub struct Walk<'a, 'k> {
    root_path: &'a Path,
    ignore: Gitignore,
    pub(super) index: &'a StatIndex,
    pub(super) keep: &'a Keep<'k>,
    pub(super) started: i64,
    /// What may have changed since the index was written; none where the index can't tell.
    glance: Option<Glance>,
    queue: Queue<Task>,
    skipped: Mutex<Vec<Skipped>>,
    files: AtomicU64,
    bytes: AtomicU64,
    read: AtomicU64,
    pub(super) result: Mutex<Option<(SnapshotRef, At)>>,
}

enum Task {
    /// A directory: in which other one, at which position of that, named how, and its section in the index.
    Folder { parent: Option<(Arc<Folder>, usize)>, name: Vec<u8>, old: Option<At> },
    /// Entries of a directory, the first of them at this position.
    Entries { folder: Arc<Folder>, first: usize, listed: Vec<Listed> },
}

/// What a thread uses again and again.
struct Scratch {
    lane: usize,
    listing: Vec<u8>,
    content: Vec<u8>,
    files: u64,
    bytes: u64,
    read: u64,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a, 'k> Walk<'a, 'k> {
    pub fn new(
        root_path: &'a Path,
        ignore: Gitignore,
        index: &'a StatIndex,
        key: Digest,
        keep: &'a Keep<'k>,
    ) -> Result<Self, SnapshotError> {
        let started = file_clock();
        let root = index.root(&key);
        let glance = match root {
            Some(at) => Glance::take(root_path, index, at).map_err(|e| SnapshotError::io(root_path.as_os_str().as_bytes(), e))?,
            None => None,
        };
        Ok(Self {
            root_path,
            ignore,
            index,
            keep,
            started,
            queue: Queue::new(Task::Folder { parent: None, name: Vec::new(), old: root }),
            skipped: Mutex::default(),
            files: AtomicU64::new(glance.as_ref().map_or(0, |g| g.files)),
            bytes: AtomicU64::new(glance.as_ref().map_or(0, |g| g.bytes)),
            read: AtomicU64::new(0),
            glance,
            result: Mutex::new(None),
        })
    }

    /// Walks; what was captured, and the root's section.
    ///
    /// # Errors
    /// The root can't be read, or nothing can be kept.
    pub fn run(&self) -> Result<(Captured, At), SnapshotError> {
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..THREADS).map(|lane| scope.spawn(move || self.work(lane))).collect();
            let own = self.work(0);
            let others = others.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
            others.fold(own, |all, one| all.and(one))
        })?;
        let result = lock(&self.result).take();
        let (snapshot, at) = result.ok_or_else(|| SnapshotError::Store("the walk ended before its root".into()))?;
        let mut skipped = std::mem::take(&mut *lock(&self.skipped));
        skipped.sort_by(|a, b| a.path.cmp(&b.path));
        let count = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let captured = Captured { snapshot, files: count(&self.files), bytes: count(&self.bytes), read: count(&self.read), skipped };
        Ok((captured, at))
    }

    fn work(&self, lane: usize) -> Result<(), SnapshotError> {
        let mut scratch = Scratch { lane, listing: Vec::with_capacity(32 << 10), content: Vec::new(), files: 0, bytes: 0, read: 0 };
        while let Some((task, _running)) = self.queue.next() {
            let done = match task {
                Task::Folder { parent, name, old } => self.folder(&mut scratch, parent, name, old),
                Task::Entries { folder, first, listed } => self.entries(&mut scratch, &folder, first, listed),
            };
            if let Err(error) = done {
                self.queue.stop();
                return Err(error);
            }
        }
        self.files.fetch_add(scratch.files, Ordering::Relaxed);
        self.bytes.fetch_add(scratch.bytes, Ordering::Relaxed);
        self.read.fetch_add(scratch.read, Ordering::Relaxed);
        Ok(())
    }

    fn skip(&self, path: &[u8], why: impl ToString) {
        lock(&self.skipped).push(Skipped { path: crate::path_text(path), why: why.to_string(), unread: true });
    }

    /// How a directory differs from its section in the index.
    pub(super) fn touched(&self, parent: Option<&Folder>, old: Option<At>) -> Option<Touched> {
        match (old, &self.glance) {
            (Some(at), Some(glance)) if parent.is_none_or(|p| !p.replaced) => glance.of(at),
            _ => Some(Touched::Replaced),
        }
    }

    /// Opens a directory and looks at it, if it is not as the index says; its entries, or pieces of them, become tasks.
    fn folder(
        &self,
        scratch: &mut Scratch,
        parent: Option<(Arc<Folder>, usize)>,
        name: Vec<u8>,
        old: Option<At>,
    ) -> Result<(), SnapshotError> {
        let touched = match (self.touched(parent.as_ref().map(|(folder, _)| &**folder), old), old) {
            (Some(touched), _) => touched,
            (None, Some(at)) => return self.leave(parent, name, at),
            (None, None) => Touched::Replaced,
        };
        let opened = match &parent {
            Some((folder, _)) if folder.depth >= MAX_DEPTH => Err(std::io::Error::other("it lies too deep")),
            Some((folder, _)) => open_folder(&folder.handle, &name).map_err(Into::into),
            None => open_root(self.root_path).map_err(Into::into),
        };
        let section = old.and_then(|at| self.index.read(at));
        let section = section.as_deref().and_then(Section::parse);
        let looked = opened.and_then(|handle| {
            if let (Touched::Below, Some(section)) = (touched, section) {
                return Ok((handle, section.stamp().0, Vec::new()));
            }
            // Time and size of a directory are read before its names, so that a name that comes later shows the next time.
            let seen = look_at(&handle)?;
            let listed = list(&handle, &mut scratch.listing)?;
            if listed.len() > MAX_ENTRIES {
                return Err(std::io::Error::other(format!("it has more than {MAX_ENTRIES} entries")));
            }
            Ok((handle, seen.stamp, joined(listed, section)))
        });
        let (handle, stamp, listed) = match (looked, &parent) {
            (Ok(looked), _) => looked,
            (Err(error), None) => return Err(SnapshotError::io(self.root_path.as_os_str().as_bytes(), error)),
            (Err(error), Some((folder, position))) => {
                if error.kind() != std::io::ErrorKind::NotFound {
                    self.skip(&folder.path_of(&name), error);
                }
                folder.changed.store(true, Ordering::Relaxed);
                let folder = folder.clone();
                return self.add(folder, vec![(*position, Row { name, racy: false, body: Body::Skipped })]);
            }
        };
        let folder = Arc::new(Folder {
            depth: parent.as_ref().map_or(0, |(p, _)| p.depth + 1),
            parent,
            name,
            handle,
            stamp,
            old,
            replaced: touched == Touched::Replaced,
            unchanged: old.filter(|_| touched == Touched::Below),
            changed: AtomicBool::new(false),
            rows: Mutex::default(),
            left: AtomicUsize::new(listed.len().div_ceil(PIECE).max(1)),
        });
        if folder.unchanged.is_some() {
            return self.touched_below(folder, section);
        }
        if listed.len() <= PIECE {
            return self.entries(scratch, &folder, 0, listed);
        }
        let (mut tasks, starts, mut listed) = (Vec::new(), (0..listed.len()).step_by(PIECE), listed.into_iter());
        for first in starts {
            tasks.push(Task::Entries { folder: folder.clone(), first, listed: listed.by_ref().take(PIECE).collect() });
        }
        self.queue.push(tasks);
        Ok(())
    }

    /// Adds a directory to the one that it lies in, just as the index has it.
    fn leave(&self, parent: Option<(Arc<Folder>, usize)>, name: Vec<u8>, at: At) -> Result<(), SnapshotError> {
        let Some((folder, position)) = parent else {
            let (_, snapshot) = self.vouched(at)?;
            *lock(&self.result) = Some((snapshot, at));
            return Ok(());
        };
        let row = self.vouched_row(name, at)?;
        self.add(folder, vec![(position, row)])
    }

    /// Makes tasks of those subdirectories of a directory that are not as the index says.
    fn touched_below(&self, folder: Arc<Folder>, section: Option<Section<'_>>) -> Result<(), SnapshotError> {
        let mut tasks = Vec::new();
        for (position, row) in section.ok_or_else(broken)?.rows().enumerate() {
            if let BodyRef::Folder(at) = row.body
                && self.touched(Some(&folder), Some(at)).is_some()
            {
                tasks.push(Task::Folder { parent: Some((folder.clone(), position)), name: row.name.to_vec(), old: Some(at) });
            }
        }
        folder.left.fetch_add(tasks.len(), Ordering::Relaxed);
        self.queue.push(tasks);
        self.add(folder, Vec::new())
    }

    /// Looks at entries of a directory.
    fn entries(&self, scratch: &mut Scratch, folder: &Arc<Folder>, first: usize, listed: Vec<Listed>) -> Result<(), SnapshotError> {
        let (mut rows, mut tasks) = (Vec::new(), Vec::new());
        for (position, entry) in (first..).zip(listed) {
            if let Some(found) = self.entry(scratch, folder, entry)? {
                match found {
                    Found::Row(row) => rows.push((position, row)),
                    Found::Folder(name, old) => tasks.push(Task::Folder { parent: Some((folder.clone(), position)), name, old }),
                }
            }
        }
        folder.left.fetch_add(tasks.len(), Ordering::Relaxed);
        self.queue.push(tasks);
        self.add(folder.clone(), rows)
    }

    /// What an entry is now. `None`: it is to be ignored.
    fn entry(
        &self,
        scratch: &mut Scratch,
        folder: &Folder,
        Listed { name, file_type, old }: Listed,
    ) -> Result<Option<Found>, SnapshotError> {
        let skipped = |name| Ok(Some(Found::Row(Row { name, racy: false, body: Body::Skipped })));
        let mut seen = None;
        let mut file_type = file_type;
        if file_type == FileType::Unknown || file_type == FileType::Symlink || matches!(old, Some(Old::Leaf(_))) {
            match look(&folder.handle, &name) {
                Ok(now) => {
                    file_type = now.file_type;
                    seen = Some(now);
                }
                Err(Errno::NOENT) => return skipped(name),
                Err(error) => {
                    self.skip(&folder.path_of(&name), std::io::Error::from(error));
                    return skipped(name);
                }
            }
        }
        let is_folder = file_type == FileType::Directory;
        if !self.ignore.is_empty() {
            let path = folder.path_of(&name);
            if self.ignore.matched(Path::new(OsStr::from_bytes(&path)), is_folder).is_ignore() {
                return Ok(None);
            }
        }
        match (file_type, old, seen) {
            (FileType::Directory, Some(Old::Folder(at)), _) => Ok(Some(Found::Folder(name, Some(at)))),
            (FileType::Directory, _, _) => Ok(Some(Found::Folder(name, None))),
            (FileType::RegularFile | FileType::Symlink, Some(Old::Leaf(row)), Some(now)) if holds(&row, &now) => {
                if file_type == FileType::RegularFile {
                    scratch.files += 1;
                    scratch.bytes += now.stamp.size;
                }
                Ok(Some(Found::Row(row)))
            }
            (FileType::RegularFile, _, _) => {
                scratch.read += 1;
                match read(self.keep, scratch.lane, &mut scratch.content, &folder.handle, &name)? {
                    Outcome::Read(stamp, kind) => {
                        scratch.files += 1;
                        scratch.bytes += stamp.size;
                        Ok(Some(Found::Row(self.leaf(name, stamp, kind))))
                    }
                    Outcome::Vanished => skipped(name),
                    Outcome::Unreadable(why) => {
                        self.skip(&folder.path_of(&name), why);
                        skipped(name)
                    }
                }
            }
            (FileType::Symlink, _, Some(now)) => match rustix::fs::readlinkat(&folder.handle, name.as_slice(), Vec::new()) {
                Ok(target) => Ok(Some(Found::Row(self.leaf(name, now.stamp, Kind::Symlink { target: target.into_bytes() })))),
                Err(Errno::NOENT) => skipped(name),
                Err(error) => {
                    self.skip(&folder.path_of(&name), std::io::Error::from(error));
                    skipped(name)
                }
            },
            (other, _, _) => {
                let (path, why) = (crate::path_text(&folder.path_of(&name)), format!("a {other:?} is not recorded"));
                lock(&self.skipped).push(Skipped { path, why, unread: false });
                skipped(name)
            }
        }
    }

    fn leaf(&self, name: Vec<u8>, stamp: Stamp, kind: Kind) -> Row {
        Row { name, racy: stamp.is_racy(self.started), body: Body::Leaf { stamp, kind } }
    }
}

enum Found {
    Row(Row),
    Folder(Vec<u8>, Option<At>),
}
