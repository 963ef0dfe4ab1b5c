//! The first look at a folder: which of its directories are not as the index says. It takes one call per entry, by its path, and opens
//! nothing.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use super::THREADS;
use crate::index::{At, BodyRef, Section, StatIndex, Window};
use crate::queue::Queue;
use crate::stat::{Stamp, look, look_at, open_root};

/// File systems whose directories change their times whenever a name comes or goes: ext2 to 4, XFS, Btrfs, tmpfs, overlayfs, F2FS.
const TIMES_TELL: [u32; 6] = [0xEF53, 0x5846_5342, 0x9123_683E, 0x0102_1994, 0x794C_7630, 0xF2F5_2010];

/// What may have changed since the index was written, by the places of directories' sections.
#[derive(Default)]
pub struct Glance {
    touched: HashMap<u64, Touched>,
    /// Files and their bytes in directories that have not changed themselves.
    pub files: u64,
    pub bytes: u64,
}

/// How a directory differs from what the index says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touched {
    /// Only in what lies below one of its subdirectories.
    Below,
    /// In its names, or in one of its files or symlinks.
    Itself,
    /// It is gone or another directory; nothing of what lies below was looked at.
    Replaced,
}

/// A directory that is to be looked at.
struct Task {
    at: At,
    path: Vec<u8>,
    line: Option<Arc<Line>>,
}

/// A directory's section, and those of the directories that it lies in.
struct Line {
    at: At,
    line: Option<Arc<Line>>,
}

struct Look<'a> {
    root: OwnedFd,
    index: &'a StatIndex,
    device: (u32, u32),
    queue: Queue<Task>,
    touched: Mutex<HashMap<u64, Touched>>,
    files: AtomicU64,
    bytes: AtomicU64,
}

impl Glance {
    /// Looks at everything that the index knows of a folder, by its root's section. `None`: on this file system times of directories
    /// may not tell whether names came or went.
    ///
    /// # Errors
    /// The root can't be read.
    pub fn take(root: &Path, index: &StatIndex, at: At) -> Result<Option<Self>, Errno> {
        let root = open_root(root)?;
        if !TIMES_TELL.contains(&(rustix::fs::fstatfs(&root)?.f_type as u32)) {
            return Ok(None);
        }
        let look = Look {
            device: look_at(&root)?.device,
            root,
            index,
            queue: Queue::new(Task { at, path: Vec::new(), line: None }),
            touched: Mutex::default(),
            files: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        };
        std::thread::scope(|scope| {
            for _ in 1..THREADS {
                scope.spawn(|| look.work());
            }
            look.work();
        });
        let touched = look.touched.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Some(Self { touched, files: look.files.into_inner(), bytes: look.bytes.into_inner() }))
    }

    /// How a directory differs from its section. `None`: not at all, nor does anything below it.
    pub fn of(&self, at: At) -> Option<Touched> {
        self.touched.get(&at.offset).copied()
    }
}

impl Look<'_> {
    fn work(&self) {
        let (mut window, mut files, mut bytes) = (Window::default(), 0, 0);
        while let Some((task, _running)) = self.queue.next() {
            let seen = self.directory(&mut window, task);
            files += seen.0;
            bytes += seen.1;
        }
        self.files.fetch_add(files, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Looks at a directory's own entries; its subdirectories become tasks. How many files and bytes are as the index says.
    fn directory(&self, window: &mut Window, task: Task) -> (u64, u64) {
        let Some(section) = self.index.read_in(window, task.at).and_then(Section::parse) else {
            return self.touch(&task, Touched::Replaced);
        };
        let (stamp, racy) = section.stamp();
        match look(&self.root, if task.path.is_empty() { b"." } else { &task.path }) {
            Ok(seen) if seen.stamp.inode == stamp.inode && seen.device == self.device => {
                let same = !racy && stamp == Stamp { size: 0, ..seen.stamp };
                self.entries(section, task, same)
            }
            _ => self.touch(&task, Touched::Replaced),
        }
    }

    fn entries(&self, section: Section<'_>, task: Task, mut same: bool) -> (u64, u64) {
        let mut path = task.path.clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        let folder = path.len();
        let (mut folders, mut files, mut bytes) = (Vec::new(), 0, 0);
        for row in section.rows() {
            path.truncate(folder);
            path.extend_from_slice(row.name);
            match row.body {
                BodyRef::Leaf { tag, stamp, .. } if same => {
                    same = !row.racy && look(&self.root, &path).is_ok_and(|seen| seen.stamp == stamp);
                    if tag != b'l' {
                        files += 1;
                        bytes += stamp.size;
                    }
                }
                BodyRef::Leaf { .. } => {}
                BodyRef::Folder(at) => folders.push((at, path.clone())),
                BodyRef::Skipped => same = false,
            }
        }
        if !same {
            (files, bytes) = self.touch(&task, Touched::Itself);
        }
        if !folders.is_empty() {
            let line = Some(Arc::new(Line { at: task.at, line: task.line }));
            self.queue.push(folders.into_iter().map(|(at, path)| Task { at, path, line: line.clone() }).collect());
        }
        (files, bytes)
    }

    /// Remembers a directory as changed, and those that it lies in as changed below.
    fn touch(&self, task: &Task, how: Touched) -> (u64, u64) {
        let mut touched = self.touched.lock().unwrap_or_else(PoisonError::into_inner);
        touched.insert(task.at.offset, how);
        let mut line = &task.line;
        while let Some(above) = line {
            if touched.contains_key(&above.at.offset) {
                break;
            }
            touched.insert(above.at.offset, Touched::Below);
            line = &above.line;
        }
        (0, 0)
    }
}
