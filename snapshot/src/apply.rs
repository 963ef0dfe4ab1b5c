//! Changes to single paths of a folder whose state is known.

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use replayfork_core::Digest;
use rustix::fs::FileType;
use rustix::io::Errno;

use crate::error::SnapshotError;
use crate::node::{Entry, Kind};
use crate::restore::disk::{self, Occupied, make_file, make_folder, make_link, make_parents, open_root, parent, set_time, set_time_of};
use crate::stat::{look_at, open_file};
use crate::store::Blobs;
use crate::tree::{Nodes, entry_at};

/// A path, what is there, and what is to be there.
struct Step {
    path: Vec<u8>,
    before: Option<Entry>,
    after: Option<Entry>,
}

/// Makes paths of a folder that now equals `current` what they are in the tree `target`, whatever they are now: one that the
/// target lacks goes, with all below it. A folder stands for itself; what is below is listed, or stays.
///
/// # Errors
/// As [`restore`](crate::restore()).
pub fn replay_paths(
    root: &Path,
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    current: &Digest,
    (target, paths): (&Digest, &[Vec<u8>]),
) -> Result<(), SnapshotError> {
    let mut steps = Vec::new();
    for path in paths {
        let before = entry_at(nodes, blobs, current, path)?;
        let after = entry_at(nodes, blobs, target, path)?;
        if after.is_some() {
            steps.extend(no_folders(nodes, blobs, current, path)?);
        }
        if !same(before.as_ref(), after.as_ref()) {
            steps.push(Step { path: path.clone(), before, after });
        }
    }
    steps.sort_by(|a, b| a.path.cmp(&b.path));
    steps.dedup_by(|b, a| a.path == b.path && b.after.is_none());
    let top = open_root(root)?;
    // Removals from the leaves up, so that no folder is looked for in one that is gone.
    for step in steps.iter().rev().filter(|s| s.removes()) {
        remove(&top, &step.path)?;
    }
    for step in &steps {
        if let Some(after) = &step.after {
            create(&top, &step.path, after, blobs)?;
        }
    }
    restore_folder_times(&top, nodes, blobs, target, &steps)
}

/// Whether two entries are equal but for name and time; folders are if all below them is.
fn same(one: Option<&Entry>, other: Option<&Entry>) -> bool {
    match (one.map(|e| &e.kind), other.map(|e| &e.kind)) {
        (Some(Kind::Directory { node: one }), Some(Kind::Directory { node: other })) => one == other,
        (one, other) => one.map(Kind::identity) == other.map(Kind::identity),
    }
}

impl Step {
    /// Whether what is there has to go first; a file in the place of a file is replaced.
    fn removes(&self) -> bool {
        match (&self.before, &self.after) {
            (Some(_), None) => true,
            (Some(before), Some(after)) => std::mem::discriminant(&before.kind) != std::mem::discriminant(&after.kind),
            (None, _) => false,
        }
    }
}

/// The removal of what stands in the place of a folder that a path lies in.
fn no_folders(nodes: &mut Nodes, blobs: &mut dyn Blobs, current: &Digest, path: &[u8]) -> Result<Vec<Step>, SnapshotError> {
    let mut steps = Vec::new();
    for (at, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
        let before = entry_at(nodes, blobs, current, &path[..at])?;
        if before.as_ref().is_some_and(|e| !matches!(e.kind, Kind::Directory { .. })) {
            steps.push(Step { path: path[..at].to_vec(), before, after: None });
        }
    }
    Ok(steps)
}

/// Sets a path of a folder that now equals `current` to a file, whatever was there: a folder goes with all below it, and so does
/// a file in the place of a folder that the path lies in.
///
/// # Errors
/// As [`restore`](crate::restore()).
pub fn put_file(
    root: &Path,
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    current: &Digest,
    (path, content, executable): (&str, &[u8], bool),
) -> Result<(), SnapshotError> {
    let bytes = crate::path_bytes(path);
    let top = open_root(root)?;
    for step in no_folders(nodes, blobs, current, &bytes)? {
        remove(&top, &step.path)?;
    }
    make_parents(&top, &bytes)?;
    let (folder, name) = parent(&top, &bytes)?;
    let mut file = make_file(&folder, name, executable, Occupied::Replace).map_err(|e| SnapshotError::io(&bytes, e))?;
    file.write_all(content).map_err(|e| SnapshotError::io(&bytes, e))
}

fn remove(top: &OwnedFd, path: &[u8]) -> Result<(), SnapshotError> {
    let (folder, name) = parent(top, path)?;
    disk::remove(&folder, name).map_err(|e| SnapshotError::io(path, e))
}

fn create(top: &OwnedFd, path: &[u8], entry: &Entry, blobs: &mut dyn Blobs) -> Result<(), SnapshotError> {
    let io = |e: Errno| SnapshotError::io(path, e);
    make_parents(top, path)?;
    let (folder, name) = parent(top, path)?;
    match &entry.kind {
        Kind::Directory { .. } => make_folder(&folder, name).map(drop).map_err(io),
        Kind::Symlink { target } => {
            make_link(&folder, name, target, Occupied::Replace).map_err(io)?;
            set_time(&folder, name, entry.mtime).map_err(io)
        }
        Kind::File { executable, .. } => {
            let mut file = make_file(&folder, name, *executable, Occupied::Replace).map_err(io)?;
            for digest in entry.blobs() {
                file.write_all(&blobs.get(&digest)?).map_err(|e| SnapshotError::io(path, e))?;
            }
            set_time_of(&file, entry.mtime).map_err(io)
        }
    }
}

/// Writing into a folder touches its time; those of all folders that were written in are set back.
fn restore_folder_times(
    top: &OwnedFd,
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    target: &Digest,
    steps: &[Step],
) -> Result<(), SnapshotError> {
    let mut folders = std::collections::BTreeSet::new();
    for step in steps {
        let mut path = step.path.as_slice();
        folders.insert(path);
        while let Some(at) = path.iter().rposition(|b| *b == b'/') {
            path = &path[..at];
            folders.insert(path);
        }
    }
    for path in folders {
        if let Some(entry) = entry_at(nodes, blobs, target, path)?
            && matches!(entry.kind, Kind::Directory { .. })
        {
            let (folder, name) = parent(top, path)?;
            set_time(&folder, name, entry.mtime).map_err(|e| SnapshotError::io(path, e))?;
        }
    }
    Ok(())
}

/// Reads a file of the workspace, at most `limit` bytes; symlinks are followed as far as they stay in it.
///
/// # Errors
/// It is no regular file, lies elsewhere, can't be read, or is larger.
pub fn read_file(root: &Path, path: &str, limit: u64) -> Result<Vec<u8>, SnapshotError> {
    let top = open_root(root)?;
    let path = crate::path_bytes(path);
    let failed = |e| SnapshotError::io(&path, e);
    let whole = root.canonicalize().map_err(failed)?;
    let target = root.join(OsStr::from_bytes(&path)).canonicalize().map_err(failed)?;
    let elsewhere = |_| failed(std::io::Error::other(format!("it leads to {}, out of the workspace", target.display())));
    // Where it leads to by now is opened through no symlink.
    let path = target.strip_prefix(&whole).map_err(elsewhere)?.as_os_str().as_bytes().to_vec();
    let (folder, name) = parent(&top, &path)?;
    let file = open_file(&folder, name).map_err(|e| SnapshotError::io(&path, e))?;
    if look_at(&file).map_err(|e| SnapshotError::io(&path, e))?.file_type != FileType::RegularFile {
        return Err(SnapshotError::io(&path, std::io::Error::other("it is no regular file")));
    }
    let mut content = Vec::new();
    file.take(limit + 1).read_to_end(&mut content).map_err(|e| SnapshotError::io(&path, e))?;
    if content.len() as u64 > limit {
        return Err(SnapshotError::Store(format!("{}: it has more than {limit} bytes", crate::path_text(&path))));
    }
    Ok(content)
}
