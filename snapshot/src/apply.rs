//! Making a folder equal a snapshot, touching only what differs, never outside of its root.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use replayfork_core::Digest;
use rustix::fs::{AtFlags, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;

use crate::error::SnapshotError;
use crate::node::{Entry, Kind};
use crate::store::Blobs;
use crate::tree::{Change, Nodes, diff, entry_at};

/// Makes the folder equal the tree `target`, given that it now equals `current` (`None`: it is empty).
///
/// Files that the tree lacks are removed, types, contents, x bits and link targets set, modification times of what was
/// written restored. Only what differs is touched.
///
/// # Errors
/// A missing or hostile node or blob, or what the file system says; the entry is named.
pub fn restore(
    root: &Path,
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    current: Option<&Digest>,
    target: &Digest,
) -> Result<(), SnapshotError> {
    let changes = diff(nodes, blobs, current, Some(target))?;
    apply(root, nodes, blobs, target, &changes)
}

/// Makes paths of a folder that now equals `current` what they are in the tree `target`, whatever they are now: one that the
/// target lacks goes, with all below it. A folder stands for itself; what is below is listed, or stays.
///
/// # Errors
/// As [`restore`].
pub fn replay_paths(
    root: &Path,
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    current: &Digest,
    (target, paths): (&Digest, &[Vec<u8>]),
) -> Result<(), SnapshotError> {
    let mut changes = Vec::new();
    for path in paths {
        let now = entry_at(nodes, blobs, current, path)?;
        let after = entry_at(nodes, blobs, target, path)?;
        let is_folder = |e: &Option<Entry>| matches!(e.as_ref().map(|e| &e.kind), Some(Kind::Directory { .. }));
        if is_folder(&now) && !is_folder(&after) {
            changes.extend(all_below(nodes, blobs, now.as_ref(), path)?);
        }
        if after.is_some() {
            changes.extend(no_folders(nodes, blobs, current, path)?);
        }
        let same = now.as_ref().map(Entry::identity) == after.as_ref().map(Entry::identity);
        if !same || is_folder(&now) != is_folder(&after) {
            changes.push(Change { path: path.clone(), before: now, after });
        }
    }
    changes.sort_by(|a, b| a.path.cmp(&b.path));
    changes.dedup_by(|b, a| a.path == b.path && b.after.is_none());
    apply(root, nodes, blobs, target, &changes)
}

/// The removal of everything below a folder.
fn all_below(nodes: &mut Nodes, blobs: &mut dyn Blobs, folder: Option<&Entry>, path: &[u8]) -> Result<Vec<Change>, SnapshotError> {
    let Some(Entry { kind: Kind::Directory { node, .. }, .. }) = folder else { return Ok(Vec::new()) };
    let below = diff(nodes, blobs, Some(node), None)?;
    Ok(below.into_iter().map(|below| Change { path: [path, b"/", &below.path[..]].concat(), ..below }).collect())
}

/// The removal of what stands in the place of a folder that a path lies in.
fn no_folders(nodes: &mut Nodes, blobs: &mut dyn Blobs, current: &Digest, path: &[u8]) -> Result<Vec<Change>, SnapshotError> {
    let mut changes = Vec::new();
    for (at, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
        let before = entry_at(nodes, blobs, current, &path[..at])?;
        if before.as_ref().is_some_and(|e| !matches!(e.kind, Kind::Directory { .. })) {
            changes.push(Change { path: path[..at].to_vec(), before, after: None });
        }
    }
    Ok(changes)
}

/// Sets a path of a folder that now equals `current` to a file, whatever was there: a folder goes with all below it, and so does
/// a file in the place of a folder that the path lies in.
///
/// # Errors
/// As [`restore`].
pub fn put_file(
    root: &Path,
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    current: &Digest,
    (path, content, executable): (&str, &[u8], bool),
) -> Result<(), SnapshotError> {
    let bytes = crate::path_bytes(path);
    let now = entry_at(nodes, blobs, current, &bytes)?;
    let mut gone = no_folders(nodes, blobs, current, &bytes)?;
    if matches!(now.as_ref().map(|e| &e.kind), Some(Kind::Directory { .. })) {
        gone.extend(all_below(nodes, blobs, now.as_ref(), &bytes)?);
        gone.push(Change { path: bytes, before: now, after: None });
    }
    gone.sort_by(|a, b| a.path.cmp(&b.path));
    let top = open_root(root)?;
    for change in gone.iter().rev() {
        remove(&top, change)?;
    }
    write_file(root, path, content, executable)
}

fn apply(root: &Path, nodes: &mut Nodes, blobs: &mut dyn Blobs, target: &Digest, changes: &[Change]) -> Result<(), SnapshotError> {
    let top = open_root(root)?;
    // Removals from the leaves up, so that folders are empty when their turn comes.
    for change in changes.iter().rev() {
        let replaced = match (&change.before, &change.after) {
            (Some(_), None) => true,
            (Some(before), Some(after)) => std::mem::discriminant(&before.kind) != std::mem::discriminant(&after.kind),
            _ => false,
        };
        if replaced {
            remove(&top, change)?;
        }
    }
    for change in changes {
        if let Some(after) = &change.after {
            make_parents(&top, &change.path)?;
            create(&top, &change.path, after, blobs)?;
        }
    }
    restore_folder_times(&top, nodes, blobs, target, changes)
}

/// Makes the folders that a path lies in where they are missing.
fn make_parents(top: &OwnedFd, path: &[u8]) -> Result<(), SnapshotError> {
    for (at, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
        let (folder, name) = parent(top, &path[..at])?;
        match rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(SnapshotError::io(path, error)),
        }
    }
    Ok(())
}

fn open_root(root: &Path) -> Result<OwnedFd, SnapshotError> {
    rustix::fs::open(root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(|e| SnapshotError::io(root.as_os_str().as_encoded_bytes(), e))
}

/// Opens the folder that `path` lies in, one component at a time and through no symlink; with the last component.
fn parent<'a>(top: &OwnedFd, path: &'a [u8]) -> Result<(OwnedFd, &'a [u8]), SnapshotError> {
    let mut at = top.try_clone().map_err(|e| SnapshotError::io(path, e))?;
    let mut parts = path.split(|b| *b == b'/').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return Ok((at, part));
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        at = rustix::fs::openat(&at, part, flags, Mode::empty()).map_err(|e| SnapshotError::io(path, e))?;
    }
    Err(SnapshotError::io(path, Errno::INVAL))
}

fn remove(top: &OwnedFd, change: &Change) -> Result<(), SnapshotError> {
    let is_folder = matches!(change.before.as_ref().map(|e| &e.kind), Some(Kind::Directory { .. }));
    let (folder, name) = parent(top, &change.path)?;
    let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    match rustix::fs::unlinkat(&folder, name, flags) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        // Its permissions keep us from emptying it; it is ours, so they can be changed.
        Err(Errno::ACCESS) => {
            rustix::fs::fchmod(&folder, Mode::from_raw_mode(0o755)).map_err(|e| SnapshotError::io(&change.path, e))?;
            rustix::fs::unlinkat(&folder, name, flags).map_err(|e| SnapshotError::io(&change.path, e))
        }
        // Sockets and the like are no part of a snapshot; they go with their folder.
        Err(Errno::NOTEMPTY | Errno::EXIST) if is_folder => remove_leftovers(&folder, name, &change.path),
        Err(error) => Err(SnapshotError::io(&change.path, error)),
    }
}

fn remove_leftovers(folder: &OwnedFd, name: &[u8], path: &[u8]) -> Result<(), SnapshotError> {
    let io = |e: Errno| SnapshotError::io(path, e);
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let below = rustix::fs::openat(folder, name, flags, Mode::empty()).map_err(io)?;
    for entry in rustix::fs::Dir::read_from(&below).map_err(io)? {
        let entry = entry.map_err(io)?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        match rustix::fs::unlinkat(&below, name, AtFlags::empty()) {
            Err(Errno::ISDIR | Errno::PERM) => remove_leftovers(&below, name, path)?,
            other => other.map_err(io)?,
        }
    }
    rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR).map_err(io)
}

fn create(top: &OwnedFd, path: &[u8], entry: &Entry, blobs: &mut dyn Blobs) -> Result<(), SnapshotError> {
    let io = |e: Errno| SnapshotError::io(path, e);
    let (folder, name) = parent(top, path)?;
    match &entry.kind {
        Kind::Directory { .. } => match rustix::fs::mkdirat(&folder, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => Ok(()),
            Err(error) => Err(io(error)),
        },
        Kind::Symlink { target } => {
            match rustix::fs::unlinkat(&folder, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(error) => return Err(io(error)),
            }
            rustix::fs::symlinkat(target.as_slice(), &folder, name).map_err(io)?;
            set_time(&folder, name, entry.mtime).map_err(io)
        }
        Kind::File { executable, .. } => {
            let mut file = replace(&folder, name, *executable).map_err(io)?;
            for digest in entry.blobs() {
                file.write_all(&blobs.get(&digest)?).map_err(|e| SnapshotError::io(path, e))?;
            }
            set_time(&folder, name, entry.mtime).map_err(io)
        }
    }
}

/// A fresh file in the place of whatever file or link was there: contents are never written through a link.
fn replace(folder: &impl AsFd, name: &[u8], executable: bool) -> Result<std::fs::File, Errno> {
    match rustix::fs::unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => {}
        Err(error) => return Err(error),
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(if executable { 0o755 } else { 0o644 });
    let file = rustix::fs::openat(folder, name, flags, mode)?;
    rustix::fs::fchmod(&file, mode)?;
    Ok(std::fs::File::from(file))
}

fn set_time(folder: &impl AsFd, name: &[u8], mtime: i64) -> Result<(), Errno> {
    let time = Timespec { tv_sec: mtime.div_euclid(1_000_000_000), tv_nsec: mtime.rem_euclid(1_000_000_000) };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(folder, name, &times, AtFlags::SYMLINK_NOFOLLOW)
}

/// Writing into a folder touches its time; those of all folders that were written in are set back, leaves first.
fn restore_folder_times(
    top: &OwnedFd,
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    target: &Digest,
    changes: &[Change],
) -> Result<(), SnapshotError> {
    let mut folders = std::collections::BTreeSet::new();
    for change in changes {
        let mut path = change.path.as_slice();
        folders.insert(path.to_vec());
        while let Some(at) = path.iter().rposition(|b| *b == b'/') {
            path = &path[..at];
            folders.insert(path.to_vec());
        }
    }
    for path in folders.iter().rev() {
        if let Some(entry) = entry_at(nodes, blobs, target, path)?
            && matches!(entry.kind, Kind::Directory { .. })
        {
            let (folder, name) = parent(top, path)?;
            set_time(&folder, name, entry.mtime).map_err(|e| SnapshotError::io(path, e))?;
        }
    }
    Ok(())
}

/// Sets a path of the workspace to a content, in the place of any file or link; missing folders are made.
///
/// # Errors
/// A folder on the way is a symlink or a file, or the path is one that the file system refuses.
fn write_file(root: &Path, path: &str, content: &[u8], executable: bool) -> Result<(), SnapshotError> {
    let top = open_root(root)?;
    let path = crate::path_bytes(path);
    make_parents(&top, &path)?;
    let (folder, name) = parent(&top, &path)?;
    let mut file = replace(&folder, name, executable).map_err(|e| SnapshotError::io(&path, e))?;
    file.write_all(content).map_err(|e| SnapshotError::io(&path, e))
}

/// Reads a file of the workspace, at most `limit` bytes; no symlink on the way is followed.
///
/// # Errors
/// It is no regular file, can't be read, or is larger.
pub fn read_file(root: &Path, path: &str, limit: u64) -> Result<Vec<u8>, SnapshotError> {
    use std::io::Read;
    let top = open_root(root)?;
    let path = crate::path_bytes(path);
    let (folder, name) = parent(&top, &path)?;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::openat(&folder, name, flags, Mode::empty()).map_err(|e| SnapshotError::io(&path, e))?;
    let mut content = Vec::new();
    std::fs::File::from(file).take(limit + 1).read_to_end(&mut content).map_err(|e| SnapshotError::io(&path, e))?;
    if content.len() as u64 > limit {
        return Err(SnapshotError::Store(format!("{}: it has more than {limit} bytes", crate::path_text(&path))));
    }
    Ok(content)
}
