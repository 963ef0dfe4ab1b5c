//! The walk: which directories and files are as the index says, and what the others are now.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ignore::gitignore::Gitignore;
use replayfork_core::Digest;
use replayfork_core::model::SnapshotRef;
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use super::folder::{Folder, holds};
use super::keep::Keep;
use super::listing::{Listed, Old, joined, list};
use super::read::{Outcome, read};
use super::{Captured, Skipped, THREADS};
use crate::error::SnapshotError;
use crate::index::{At, Body, BodyRef, Row, Section, StatIndex};
use crate::node::{DirectoryBuilder, Kind, MAX_ENTRIES};
use crate::queue::Queue;
use crate::stat::{Seen, Stamp, file_clock, look, look_at, open_folder};
use crate::tree::MAX_DEPTH;

/// Entries of one directory that a thread looks at before another one may take the next.
const PIECE: usize = 256;
/// File systems whose directories change their times whenever a name comes or goes: ext2 to 4, XFS, Btrfs, tmpfs, overlayfs, F2FS.
const TIMES_TELL: [u32; 6] = [0xEF53, 0x5846_5342, 0x9123_683E, 0x0102_1994, 0x794C_7630, 0xF2F5_2010];
/// In the place of a section that is not written.
const NOWHERE: At = At { offset: u64::MAX, len: 0 };

pub struct Walk<'a, 'k> {
    root_path: &'a Path,
    ignore: Gitignore,
    index: &'a StatIndex,
    keep: &'a Keep<'k>,
    started: i64,
    /// The device whose directories' times tell whether names came or went, if there is one.
    device: Option<(u32, u32)>,
    queue: Queue<Task>,
    skipped: Mutex<Vec<Skipped>>,
    files: AtomicU64,
    bytes: AtomicU64,
    read: AtomicU64,
    result: Mutex<Option<(SnapshotRef, At)>>,
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a, 'k> Walk<'a, 'k> {
    pub fn new(root: &'a Path, ignore: Gitignore, index: &'a StatIndex, key: Digest, keep: &'a Keep<'k>) -> Result<Self, SnapshotError> {
        let first = Task::Folder { parent: None, name: Vec::new(), old: index.root(&key) };
        let file_system = rustix::fs::statfs(root).map_err(|e| SnapshotError::io(root.as_os_str().as_bytes(), e))?;
        let device = if TIMES_TELL.contains(&(file_system.f_type as u32)) {
            Some(look(rustix::fs::CWD, root.as_os_str().as_bytes()).map_err(|e| SnapshotError::io(root.as_os_str().as_bytes(), e))?.device)
        } else {
            None
        };
        Ok(Self {
            root_path: root,
            ignore,
            index,
            keep,
            started: file_clock(),
            device,
            queue: Queue::new(first),
            skipped: Mutex::default(),
            files: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            read: AtomicU64::new(0),
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

    /// Opens a directory and looks at it; its entries, or pieces of them, become tasks where there are many.
    fn folder(
        &self,
        scratch: &mut Scratch,
        parent: Option<(Arc<Folder>, usize)>,
        name: Vec<u8>,
        old: Option<At>,
    ) -> Result<(), SnapshotError> {
        let opened = match &parent {
            Some((folder, _)) if folder.depth >= MAX_DEPTH => Err(std::io::Error::other("it lies too deep")),
            Some((folder, _)) => open_folder(&folder.handle, &name).map_err(Into::into),
            None => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
                rustix::fs::open(self.root_path, flags, Mode::empty()).map_err(Into::into)
            }
        };
        let looked = opened.and_then(|handle| {
            let seen = look_at(&handle)?;
            let section = old.and_then(|at| self.index.read(at));
            let section = section.as_deref().and_then(Section::parse);
            // Time and size of a directory are read before its names, so that a name that comes later shows the next time.
            let listed = match section {
                Some(section) if self.listing_holds(&section, &seen) => {
                    if let Some(folders) = self.quick_look(scratch, &handle, &section) {
                        return Ok((handle, seen, true, folders));
                    }
                    section.rows().map(|row| (row.name.to_vec(), FileType::Unknown)).collect()
                }
                _ => list(&handle, &mut scratch.listing)?,
            };
            if listed.len() > MAX_ENTRIES {
                return Err(std::io::Error::other(format!("it has more than {MAX_ENTRIES} entries")));
            }
            Ok((handle, seen, false, joined(listed, section)))
        });
        let (handle, seen, as_indexed, listed) = match (looked, &parent) {
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
        let depth = parent.as_ref().map_or(0, |(p, _)| p.depth + 1);
        let unchanged = old.filter(|_| as_indexed);
        let pieces = listed.len().div_ceil(PIECE).max(1);
        let folder = Arc::new(Folder {
            parent,
            name,
            depth,
            handle,
            stamp: seen.stamp,
            unchanged,
            old,
            changed: AtomicBool::new(false),
            rows: Mutex::default(),
            left: AtomicUsize::new(pieces),
        });
        if pieces == 1 {
            return self.entries(scratch, &folder, 0, listed);
        }
        let (mut tasks, mut listed) = (Vec::with_capacity(pieces), listed.into_iter());
        for first in (0..pieces).map(|n| n * PIECE) {
            tasks.push(Task::Entries { folder: folder.clone(), first, listed: listed.by_ref().take(PIECE).collect() });
        }
        self.queue.push(tasks);
        Ok(())
    }

    /// Whether a directory has the names that the index says.
    fn listing_holds(&self, section: &Section<'_>, seen: &Seen) -> bool {
        let (stamp, racy) = section.stamp();
        !racy && stamp == (Stamp { size: 0, ..seen.stamp }) && self.device == Some(seen.device)
    }

    /// If all files and symlinks of a directory are as the index says: its subdirectories, at their positions.
    fn quick_look(&self, scratch: &mut Scratch, handle: &OwnedFd, section: &Section<'_>) -> Option<Vec<Listed>> {
        let mut folders = Vec::new();
        let (mut files, mut bytes) = (0, 0);
        for (position, row) in section.rows().enumerate() {
            match row.body {
                BodyRef::Leaf { tag, stamp, .. } => {
                    if row.racy || look(handle, row.name).ok()?.stamp != stamp {
                        return None;
                    }
                    if tag != b'l' {
                        files += 1;
                        bytes += stamp.size;
                    }
                }
                BodyRef::Folder(at) => {
                    // The position takes the place of those before it that are no directories.
                    folders.resize_with(position, Listed::nothing);
                    folders.push(Listed { name: row.name.to_vec(), file_type: FileType::Directory, old: Some(Old::Folder(at)) });
                }
                BodyRef::Skipped => return None,
            }
        }
        scratch.files += files;
        scratch.bytes += bytes;
        Some(folders)
    }

    /// Looks at entries of a directory.
    fn entries(&self, scratch: &mut Scratch, folder: &Arc<Folder>, first: usize, listed: Vec<Listed>) -> Result<(), SnapshotError> {
        let (mut rows, mut tasks) = (Vec::new(), Vec::new());
        for (position, entry) in (first..).zip(listed) {
            if entry.name.is_empty() {
                continue;
            }
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

    /// Adds rows that one task has made to a directory, and ends each one that is complete now, from here to the root.
    fn add(&self, mut folder: Arc<Folder>, mut rows: Vec<(usize, Row)>) -> Result<(), SnapshotError> {
        loop {
            lock(&folder.rows).append(&mut rows);
            if folder.left.fetch_sub(1, Ordering::AcqRel) > 1 {
                return Ok(());
            }
            let (at, SnapshotRef { content, node }, same) = self.complete(&folder)?;
            let Some((parent, position)) = &folder.parent else {
                *lock(&self.result) = Some((SnapshotRef { content, node }, at));
                return Ok(());
            };
            if !same {
                parent.changed.store(true, Ordering::Release);
            }
            let body = Body::Folder { at, mtime: folder.stamp.mtime, content, node };
            rows.push((*position, Row { name: folder.name.clone(), racy: false, body }));
            folder = parent.clone();
        }
    }

    /// A directory's section and digests, and whether it is just as the index says.
    fn complete(&self, folder: &Folder) -> Result<(At, SnapshotRef, bool), SnapshotError> {
        let io = |e| SnapshotError::io(b"the stat index", e);
        let broken = || io(std::io::Error::new(std::io::ErrorKind::InvalidData, "it is broken"));
        let mut rows = std::mem::take(&mut *lock(&folder.rows));
        let old = folder.old.and_then(|at| self.index.read(at));
        let section = old.as_deref().and_then(Section::parse);
        if let (Some(at), Some(section)) = (folder.unchanged, section) {
            if !folder.changed.load(Ordering::Acquire) {
                let (content, node) = section.digests();
                return Ok((at, SnapshotRef { content, node }, true));
            }
            rows.extend(section.rows().enumerate().filter_map(|(position, row)| Some((position, row.leaf()?))));
        } else if folder.unchanged.is_some() {
            return Err(broken());
        }
        rows.sort_unstable_by_key(|(position, _)| *position);
        let rows: Vec<Row> = rows.into_iter().map(|(_, row)| row).collect();
        let snapshot = self.directory(&rows)?;
        if !self.keep.stores() {
            return Ok((NOWHERE, snapshot, false));
        }
        let stamp = Stamp { size: 0, ..folder.stamp };
        let fresh = Section::encode((stamp, stamp.is_racy(self.started)), (snapshot.content, snapshot.node), &rows);
        match folder.old {
            Some(at) if old.as_deref() == Some(&fresh) => Ok((at, snapshot, true)),
            _ => Ok((self.index.append(&fresh).map_err(io)?, snapshot, false)),
        }
    }

    /// Keeps the nodes of a directory.
    fn directory(&self, rows: &[Row]) -> Result<SnapshotRef, SnapshotError> {
        let mut builder = DirectoryBuilder::default();
        let mut keep = |digest, bytes: &[u8]| self.keep.node(digest, bytes);
        for row in rows {
            match &row.body {
                Body::Leaf { stamp, kind } => builder.add(&row.name, stamp.mtime, kind, &mut keep)?,
                Body::Folder { mtime, content, node, .. } => {
                    let snapshot = SnapshotRef { content: *content, node: *node };
                    builder.add_directory(&row.name, *mtime, snapshot, &mut keep)?;
                }
                Body::Skipped => {}
            }
        }
        builder.finish(&mut keep)
    }
}

enum Found {
    Row(Row),
    Folder(Vec<u8>, Option<At>),
}
