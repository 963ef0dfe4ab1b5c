//! The walk over what is there and what is to be there.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use replayfork_core::Digest;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::disk::{self, Occupied, make_folder, make_link, open_below, set_time};
use super::write::{Wanted, Writer};
use crate::error::{Hostile, SnapshotError};
use crate::node::{Directory, Entry, Kind, Node};
use crate::queue::Queue;
use crate::stat::{look, open_folder};
use crate::store::LocalStore;
use crate::tree::{MAX_DEPTH, MAX_TREE, Nodes};

/// Threads that make folders.
const THREADS: usize = 2;
/// Entries from which on a tree is counted before more of it is made: a few directories that name each other again and again can
/// claim any number.
const COUNT_ABOVE: u64 = 50_000;

/// What is known of a folder before it is restored.
enum State {
    /// It was made just now.
    Fresh,
    Known(Arc<Directory>),
    Unknown,
}

/// A folder that is open, and its path below the root.
struct Open {
    handle: OwnedFd,
    path: Vec<u8>,
    depth: usize,
    state: State,
}

/// A subfolder that is to be made or changed: in which folder, and what is known to be in its place now.
struct Task {
    parent: Arc<Open>,
    name: Vec<u8>,
    now: Option<Entry>,
    node: Digest,
}

/// Subfolders of a folder in which something was changed, and the times that they are to have.
type Touched = (Vec<u8>, Vec<(Vec<u8>, i64)>);

struct Walk<'a> {
    store: &'a LocalStore,
    nodes: &'a Nodes,
    target: &'a Digest,
    queue: Queue<Task>,
    writer: Mutex<Writer<'a>>,
    touched: Mutex<Vec<Touched>>,
    /// Entries that were met.
    entries: AtomicU64,
    counted: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs the same work on several threads; the first error of all.
pub fn together(threads: usize, work: impl Fn() -> Result<(), SnapshotError> + Sync) -> Result<(), SnapshotError> {
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(&work)).collect();
        let own = work();
        let others = others.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        others.fold(own, |all, one| all.and(one))
    })
}

/// Makes the folder `top` equal a tree; see [`restore`](super::restore).
pub fn make(top: &OwnedFd, store: &LocalStore, nodes: &Nodes, current: Option<&Digest>, target: &Digest) -> Result<(), SnapshotError> {
    let walk = Walk {
        store,
        nodes,
        target,
        queue: Queue::default(),
        writer: Mutex::new(Writer::new(top, store)),
        touched: Mutex::default(),
        entries: AtomicU64::new(0),
        counted: AtomicBool::new(false),
    };
    let state = current.map_or(Ok(State::Unknown), |current| walk.directory(current).map(State::Known))?;
    let directory = walk.directory(target)?;
    let handle = open_below(top, b"").map_err(|e| SnapshotError::io(b"", e))?;
    walk.folder(Open { handle, path: Vec::new(), depth: 0, state }, &directory)?;
    together(THREADS, || {
        while let Some((task, _running)) = walk.queue.next() {
            if let Err(error) = walk.subfolder(task) {
                walk.queue.stop();
                return Err(error);
            }
        }
        Ok(())
    })?;
    lock(&walk.writer).flush()?;
    let touched = std::mem::take(&mut *lock(&walk.touched));
    let rest = Mutex::new(touched.iter());
    together(THREADS, || {
        loop {
            let Some((path, folders)) = lock(&rest).next() else { return Ok(()) };
            let handle = open_below(top, path).map_err(|e| SnapshotError::io(path.as_slice(), e))?;
            for (name, mtime) in folders {
                set_time(&handle, name, *mtime).map_err(|e| SnapshotError::io(below(path, name), e))?;
            }
        }
    })
}

impl Walk<'_> {
    /// A directory; nodes that were not at hand before are not kept.
    fn directory(&self, node: &Digest) -> Result<Arc<Directory>, SnapshotError> {
        let load = &mut |digest: &Digest| match self.nodes.at_hand(digest) {
            Some(node) => Ok(node),
            None => Ok(Arc::new(Node::decode(&self.store.read(digest)?)?)),
        };
        Directory::read(node, load).map(Arc::new)
    }

    /// How many entries a tree has, without going through equal directories again.
    fn count(&self, node: &Digest, counts: &mut HashMap<Digest, u64>, depth: usize) -> Result<u64, SnapshotError> {
        if let Some(count) = counts.get(node) {
            return Ok(*count);
        }
        if depth > MAX_DEPTH {
            return Err(Hostile { entry: node.to_string(), why: "lies too deep" }.into());
        }
        let directory = self.directory(node)?;
        let mut count = directory.len() as u64;
        for entry in directory.entries() {
            if let Kind::Directory { node } = &entry.kind {
                count = count.saturating_add(self.count(node, counts, depth + 1)?);
            }
        }
        counts.insert(*node, count);
        Ok(count)
    }

    /// Makes or opens a subfolder, and makes it what it is to be.
    fn subfolder(&self, Task { parent, name, now, node }: Task) -> Result<(), SnapshotError> {
        let path = below(&parent.path, &name);
        let io = |e: Errno| SnapshotError::io(&path, e);
        let depth = parent.depth + 1;
        if depth > MAX_DEPTH {
            return Err(Hostile { entry: crate::path_text(&path), why: "lies too deep" }.into());
        }
        let target = self.directory(&node)?;
        let state = if let Some(Entry { kind: Kind::Directory { node: now }, .. }) = now {
            State::Known(self.directory(&now)?)
        } else if now.is_some() {
            disk::remove(&parent.handle, &name).map_err(io)?;
            State::Fresh
        } else {
            State::Unknown
        };
        let state = match state {
            State::Known(now) => State::Known(now),
            _ if make_folder(&parent.handle, &name).map_err(io)? => State::Fresh,
            _ if matches!(parent.state, State::Fresh) => return Err(collision(&path)),
            _ if look(&parent.handle, &name).map_err(io)?.file_type == FileType::Directory => State::Unknown,
            _ => {
                disk::remove(&parent.handle, &name).map_err(io)?;
                make_folder(&parent.handle, &name).map_err(io)?;
                State::Fresh
            }
        };
        let handle = open_folder(&parent.handle, &name).map_err(io)?;
        self.folder(Open { handle, path, depth, state }, &target)
    }

    /// Makes an open folder what it is to be; its subfolders become tasks.
    fn folder(&self, open: Open, target: &Directory) -> Result<(), SnapshotError> {
        self.check_count(target.len() as u64)?;
        self.remove_others(&open, target)?;
        let occupied = if matches!(open.state, State::Fresh) { Occupied::Refuse } else { Occupied::Replace };
        let open = Arc::new(open);
        let (mut files, mut tasks, mut touched) = (Vec::new(), Vec::new(), Vec::new());
        for entry in target.entries() {
            let now = match &open.state {
                State::Known(now) => now.get(&entry.name),
                _ => None,
            };
            if now == Some(entry) {
                continue;
            }
            let io = |e: Errno| SnapshotError::io(below(&open.path, &entry.name), e);
            match &entry.kind {
                Kind::Directory { node } => {
                    touched.push((entry.name.clone(), entry.mtime));
                    let same = now.is_some_and(|now| matches!(&now.kind, Kind::Directory { node: now } if now == node));
                    if !same {
                        tasks.push(Task { parent: open.clone(), name: entry.name.clone(), now: now.cloned(), node: *node });
                    }
                }
                Kind::Symlink { target } => {
                    match make_link(&open.handle, &entry.name, target, occupied) {
                        Err(Errno::EXIST) => return Err(collision(&below(&open.path, &entry.name))),
                        made => made.map_err(io)?,
                    }
                    set_time(&open.handle, &entry.name, entry.mtime).map_err(io)?;
                }
                Kind::File { .. } if now.is_some_and(|now| now.identity() == entry.identity()) => {
                    set_time(&open.handle, &entry.name, entry.mtime).map_err(io)?;
                }
                Kind::File { size, executable, digest, chunks } => files.push(Wanted {
                    name: entry.name.clone(),
                    mtime: entry.mtime,
                    size: *size,
                    executable: *executable,
                    digest: *digest,
                    chunks: chunks.clone(),
                    occupied,
                }),
            }
        }
        if !touched.is_empty() {
            lock(&self.touched).push((open.path.clone(), touched));
        }
        if !tasks.is_empty() {
            self.queue.push(tasks);
        }
        if files.is_empty() { Ok(()) } else { lock(&self.writer).add(&open.path, files) }
    }

    fn check_count(&self, more: u64) -> Result<(), SnapshotError> {
        let met = self.entries.fetch_add(more, Ordering::Relaxed) + more;
        if met > COUNT_ABOVE
            && !self.counted.swap(true, Ordering::Relaxed)
            && self.count(self.target, &mut HashMap::new(), 0)? > MAX_TREE as u64
        {
            return Err(Hostile { entry: self.target.to_string(), why: "names too many entries for a tree" }.into());
        }
        Ok(())
    }

    /// Removes what is too many.
    fn remove_others(&self, open: &Open, target: &Directory) -> Result<(), SnapshotError> {
        let remove = |name: &[u8]| disk::remove(&open.handle, name).map_err(|e| SnapshotError::io(below(&open.path, name), e));
        match &open.state {
            State::Fresh => Ok(()),
            State::Known(now) => now.entries().filter(|e| target.get(&e.name).is_none()).try_for_each(|e| remove(&e.name)),
            State::Unknown => {
                let names = disk::names(&open.handle).map_err(|e| SnapshotError::io(&open.path, e))?;
                names.iter().filter(|name| target.get(name).is_none()).try_for_each(|name| remove(name))
            }
        }
    }
}

/// In a folder that was made just now nothing can be but what the tree has.
fn collision(path: &[u8]) -> SnapshotError {
    Hostile { entry: crate::path_text(path), why: "has the name of another entry in the eyes of this file system" }.into()
}

fn below(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() }
}
