//! Making a folder equal a snapshot, touching only what differs, never outside of its root.
//!
//! One thread walks the trees, removes what is too many and makes folders and symlinks; files are collected and written by two
//! threads, in the order in which packs hold them. Times of folders come last, because writing into a folder changes them.

pub(crate) mod disk;
mod write;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use replayfork_core::Digest;
use replayfork_core::model::SnapshotRef;
use rustix::fs::FileType;
use rustix::io::Errno;

use crate::capture::Capturer;
use crate::error::{Hostile, SnapshotError};
use crate::node::{Directory, Entry, Kind};
use crate::stat::{look, open_folder};
use crate::store::LocalStore;
use crate::tree::{MAX_DEPTH, MAX_TREE, Nodes, entry_at};
use disk::{Occupied, make_folder, make_link, open_below, open_root, parent, set_time, set_time_of};
use write::{Wanted, Writer};

/// Makes the folder equal the tree `target`, given that it now equals `current`. `None`: nothing is known of it, and everything in it
/// that is no folder of the target is written anew.
///
/// What the tree lacks is removed; types, contents, x bits, link targets and modification times are set. Only what differs is
/// touched. Nothing is ever written outside of the root, or through a symlink.
///
/// # Errors
/// A missing or hostile node or blob, or what the file system says; the entry is named. The folder is then something between.
pub fn restore(root: &Path, store: &LocalStore, nodes: &mut Nodes, current: Option<&Digest>, target: &Digest) -> Result<(), SnapshotError> {
    let top = open_root(root)?;
    let writer = Writer::new(&top, store);
    let mut walk = Walk { store, nodes, writer, touched: Vec::new(), entries: 0, counted: false, root: *target };
    let state = match current {
        Some(current) if current == target => return Ok(()),
        Some(current) => State::Known(walk.directory(current)?),
        None => State::Unknown,
    };
    let directory = walk.directory(target)?;
    walk.folder(&top, &mut Vec::new(), state, &directory, 0)?;
    walk.writer.flush()?;
    let touched = walk.touched;
    set_folder_times(&top, &touched)
}

impl Capturer {
    /// Makes the folder equal a snapshot, whatever is in it now: looks at it as a capture does, by the stat index where that can
    /// vouch for files, and touches what differs. Returns what it was before; of that nothing is stored.
    ///
    /// # Errors
    /// As [`restore`], and as [`Capturer::capture`] where the folder can't be read.
    pub fn restore(&mut self, store: &LocalStore, target: &Digest) -> Result<SnapshotRef, SnapshotError> {
        let scanned = self.scan(store)?;
        let mut nodes = Nodes::default();
        for (node, directory) in scanned.directories {
            nodes.insert(node, directory);
        }
        restore(self.root(), store, &mut nodes, Some(&scanned.snapshot.node), target)?;
        for skipped in &scanned.skipped {
            remove_skipped(self.root(), store, &mut nodes, target, &crate::path_bytes(&skipped.path))?;
        }
        Ok(scanned.snapshot)
    }
}

/// Removes what no snapshot holds, if it is still there.
fn remove_skipped(root: &Path, mut store: &LocalStore, nodes: &mut Nodes, target: &Digest, path: &[u8]) -> Result<(), SnapshotError> {
    if entry_at(nodes, &mut store, target, path)?.is_some() {
        return Ok(());
    }
    let top = open_root(root)?;
    // Its folder may be gone with it.
    let Ok((folder, name)) = parent(&top, path) else { return Ok(()) };
    disk::remove(&folder, name).map_err(|e| SnapshotError::io(path, e))?;
    let above = path.len().saturating_sub(name.len() + 1);
    match entry_at(nodes, &mut store, target, &path[..above])? {
        Some(above) => set_time_of(&folder, above.mtime).map_err(|e| SnapshotError::io(path, e)),
        None => Ok(()),
    }
}

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

struct Walk<'a, 'n> {
    store: &'a LocalStore,
    nodes: &'n mut Nodes,
    writer: Writer<'a>,
    /// Folders in which something was changed, and the times that they are to have.
    touched: Vec<(Vec<u8>, i64)>,
    /// Entries that were met.
    entries: u64,
    counted: bool,
    root: Digest,
}

impl Walk<'_, '_> {
    /// A directory; one that was not at hand before is not kept.
    fn directory(&mut self, node: &Digest) -> Result<Arc<Directory>, SnapshotError> {
        match self.nodes.at_hand(node) {
            Some(directory) => Ok(directory),
            None => Ok(Arc::new(Directory::decode(&self.store.read(node)?)?)),
        }
    }

    /// How many entries a tree has, without going through equal directories again.
    fn count(&mut self, node: &Digest, counts: &mut HashMap<Digest, u64>, depth: usize) -> Result<u64, SnapshotError> {
        if let Some(count) = counts.get(node) {
            return Ok(*count);
        }
        if depth > MAX_DEPTH {
            return Err(Hostile { entry: node.to_string(), why: "lies too deep" }.into());
        }
        let directory = self.directory(node)?;
        let mut count = directory.entries.len() as u64;
        for entry in &directory.entries {
            if let Kind::Directory { node, .. } = &entry.kind {
                count = count.saturating_add(self.count(node, counts, depth + 1)?);
            }
        }
        counts.insert(*node, count);
        Ok(count)
    }

    fn folder(
        &mut self,
        handle: &OwnedFd,
        path: &mut Vec<u8>,
        state: State,
        target: &Directory,
        depth: usize,
    ) -> Result<(), SnapshotError> {
        if depth > MAX_DEPTH {
            return Err(Hostile { entry: crate::path_text(path), why: "lies too deep" }.into());
        }
        self.entries += target.entries.len() as u64;
        if self.entries > COUNT_ABOVE && !std::mem::replace(&mut self.counted, true) {
            let root = self.root;
            if self.count(&root, &mut HashMap::new(), 0)? > MAX_TREE as u64 {
                return Err(Hostile { entry: root.to_string(), why: "names too many entries for a tree" }.into());
            }
        }
        match &state {
            State::Fresh => {}
            State::Known(now) => {
                for entry in now.entries.iter().filter(|e| target.get(&e.name).is_none()) {
                    disk::remove(handle, &entry.name).map_err(|e| SnapshotError::io(below(path, &entry.name), e))?;
                }
            }
            State::Unknown => {
                for name in disk::names(handle).map_err(|e| SnapshotError::io(&path, e))? {
                    if target.get(&name).is_none() {
                        disk::remove(handle, &name).map_err(|e| SnapshotError::io(below(path, &name), e))?;
                    }
                }
            }
        }
        let occupied = if matches!(state, State::Fresh) { Occupied::Refuse } else { Occupied::Replace };
        let mut files = Vec::new();
        for entry in &target.entries {
            let now = match &state {
                State::Known(now) => now.get(&entry.name),
                _ => None,
            };
            if now == Some(entry) {
                continue;
            }
            let length = path.len();
            if length > 0 {
                path.push(b'/');
            }
            path.extend_from_slice(&entry.name);
            match &entry.kind {
                Kind::Directory { node, .. } => self.subfolder(handle, path, &state, (now, entry, node), depth)?,
                Kind::Symlink { target } => {
                    let made = make_link(handle, &entry.name, target, occupied);
                    if made == Err(Errno::EXIST) {
                        return Err(collision(path));
                    }
                    made.and_then(|()| set_time(handle, &entry.name, entry.mtime)).map_err(|e| SnapshotError::io(&path, e))?;
                }
                Kind::File { .. } if now.is_some_and(|now| now.identity() == entry.identity()) => {
                    set_time(handle, &entry.name, entry.mtime).map_err(|e| SnapshotError::io(&path, e))?;
                }
                Kind::File { size, executable, digest, chunks } => {
                    files.push(Wanted {
                        name: entry.name.clone(),
                        mtime: entry.mtime,
                        size: *size,
                        executable: *executable,
                        digest: *digest,
                        chunks: chunks.clone(),
                        occupied,
                    });
                }
            }
            path.truncate(length);
        }
        self.writer.add(path, files)
    }

    fn subfolder(
        &mut self,
        handle: &OwnedFd,
        path: &mut Vec<u8>,
        state: &State,
        (now, entry, node): (Option<&Entry>, &Entry, &Digest),
        depth: usize,
    ) -> Result<(), SnapshotError> {
        let io = |path: &[u8], e: Errno| SnapshotError::io(path, e);
        self.touched.push((path.clone(), entry.mtime));
        if let Some(Entry { kind: Kind::Directory { node: now, .. }, .. }) = now {
            if now == node {
                return Ok(());
            }
            let (now, target) = (self.directory(now)?, self.directory(node)?);
            let opened = open_folder(handle, &entry.name).map_err(|e| io(path, e))?;
            return self.folder(&opened, path, State::Known(now), &target, depth + 1);
        }
        if now.is_some() {
            disk::remove(handle, &entry.name).map_err(|e| io(path, e))?;
        }
        let target = self.directory(node)?;
        let mut made = make_folder(handle, &entry.name).map_err(|e| io(path, e))?;
        if !made {
            if matches!(state, State::Fresh) {
                return Err(collision(path));
            }
            let there = look(handle, &entry.name).map_err(|e| io(path, e))?;
            if there.file_type != FileType::Directory {
                disk::remove(handle, &entry.name).map_err(|e| io(path, e))?;
                made = make_folder(handle, &entry.name).map_err(|e| io(path, e))?;
            }
        }
        let opened = open_folder(handle, &entry.name).map_err(|e| io(path, e))?;
        let state = if made { State::Fresh } else { State::Unknown };
        self.folder(&opened, path, state, &target, depth + 1)
    }
}

/// In a folder that was made just now nothing can be but what the tree has.
fn collision(path: &[u8]) -> SnapshotError {
    Hostile { entry: crate::path_text(path), why: "has the name of another entry in the eyes of this file system" }.into()
}

fn below(path: &[u8], name: &[u8]) -> Vec<u8> {
    if path.is_empty() { name.to_vec() } else { [path, b"/", name].concat() }
}

/// Sets the times of folders, by several threads.
fn set_folder_times(top: &OwnedFd, folders: &[(Vec<u8>, i64)]) -> Result<(), SnapshotError> {
    let set = |part: &[(Vec<u8>, i64)]| {
        part.iter().try_for_each(|(path, mtime)| {
            open_below(top, path).and_then(|folder| set_time_of(&folder, *mtime)).map_err(|e| SnapshotError::io(path, e))
        })
    };
    if folders.len() < 64 {
        return set(folders);
    }
    let (left, right) = folders.split_at(folders.len() / 2);
    std::thread::scope(|scope| {
        let other = scope.spawn(move || set(right));
        let own = set(left);
        own.and(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}
