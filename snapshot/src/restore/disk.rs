//! What is done to the folder that is restored: each step relative to a directory handle, and through no symlink.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Timespec, Timestamps};
use rustix::io::Errno;

use crate::error::SnapshotError;
use crate::stat::open_folder;

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

pub fn open_root(root: &Path) -> Result<OwnedFd, SnapshotError> {
    crate::stat::open_root(root).map_err(|e| SnapshotError::io(root.as_os_str().as_encoded_bytes(), e))
}

/// Opens a folder by its path below `top`, through no symlink; the empty path is `top` itself.
pub fn open_below(top: &OwnedFd, path: &[u8]) -> Result<OwnedFd, Errno> {
    if path.is_empty() {
        return rustix::io::fcntl_dupfd_cloexec(top, 0);
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    match rustix::fs::openat2(top, path, FOLDER, Mode::empty(), resolve) {
        // Older kernels, sandboxes, and paths too long for one call: one step at a time.
        Err(Errno::NOSYS | Errno::PERM | Errno::NAMETOOLONG | Errno::AGAIN) => {
            let mut at: Option<OwnedFd> = None;
            for name in path.split(|b| *b == b'/') {
                at = Some(open_folder(at.as_ref().unwrap_or(top), name)?);
            }
            at.ok_or(Errno::INVAL)
        }
        other => other,
    }
}

/// Opens the folder that `path` lies in; with the last component.
pub fn parent<'a>(top: &OwnedFd, path: &'a [u8]) -> Result<(OwnedFd, &'a [u8]), SnapshotError> {
    let (folder, name) = match path.iter().rposition(|b| *b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&path[..0], path),
    };
    if name.is_empty() || name == b"." || name == b".." {
        return Err(SnapshotError::io(path, Errno::INVAL));
    }
    Ok((open_below(top, folder).map_err(|e| SnapshotError::io(path, e))?, name))
}

/// Does something in a folder. Where its permissions keep us from it, they are changed: it is ours.
pub fn in_folder<T>(folder: &OwnedFd, mut act: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    match act() {
        Err(Errno::ACCESS) => {
            rustix::fs::fchmod(folder, Mode::from_raw_mode(0o755))?;
            act()
        }
        other => other,
    }
}

/// Makes a folder, or finds it there; whether it was made.
pub fn make_folder(folder: &OwnedFd, name: &[u8]) -> Result<bool, Errno> {
    match in_folder(folder, || rustix::fs::mkdirat(folder, name, Mode::from_raw_mode(0o755))) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Makes the folders that a path lies in where they are missing.
pub fn make_parents(top: &OwnedFd, path: &[u8]) -> Result<(), SnapshotError> {
    for (at, _) in path.iter().enumerate().filter(|(_, b)| **b == b'/') {
        let (folder, name) = parent(top, &path[..at])?;
        make_folder(&folder, name).map_err(|e| SnapshotError::io(path, e))?;
    }
    Ok(())
}

/// Removes whatever stands at a name, with all below it. What is not there is removed already.
pub fn remove(folder: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    match in_folder(folder, || rustix::fs::unlinkat(folder, name, AtFlags::empty())) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => remove_folder(folder, name),
        Err(error) => Err(error),
    }
}

fn remove_folder(folder: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    // Most that go are empty by then, or were always.
    match rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(_) => {}
    }
    let below = match open_folder(folder, name) {
        Err(Errno::ACCESS) => {
            rustix::fs::chmodat(folder, name, Mode::from_raw_mode(0o755), AtFlags::empty())?;
            open_folder(folder, name)?
        }
        other => other?,
    };
    for name in names(&below)? {
        remove(&below, &name)?;
    }
    in_folder(folder, || rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR))
}

/// The names in a folder, in no order.
pub fn names(folder: &OwnedFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}

/// What to do where something is to be made and something else has its name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Occupied {
    /// It goes.
    Replace,
    /// Nothing can be there but another entry of the same tree, in the eyes of this file system.
    Refuse,
}

/// Makes a file in the place of whatever was there: contents are never written through a link.
///
/// # Errors
/// `EXIST` if it is to refuse.
pub fn make_file(folder: &OwnedFd, name: &[u8], executable: bool, occupied: Occupied) -> Result<std::fs::File, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(if executable { 0o755 } else { 0o644 });
    let make = || rustix::fs::openat(folder, name, flags, mode);
    let file = match in_folder(folder, make) {
        Err(Errno::EXIST) if occupied == Occupied::Replace => {
            remove(folder, name)?;
            make()?
        }
        other => other?,
    };
    if mask_takes(mode) {
        rustix::fs::fchmod(&file, mode)?;
    }
    Ok(std::fs::File::from(file))
}

/// Whether the process's umask takes bits of a mode. Where the kernel does not tell, it is taken to.
fn mask_takes(mode: Mode) -> bool {
    static MASK: OnceLock<u32> = OnceLock::new();
    let mask = *MASK.get_or_init(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
        mask.and_then(|text| u32::from_str_radix(text.trim(), 8).ok()).unwrap_or(0o777)
    });
    mode.as_raw_mode() & mask != 0
}

/// Makes a symlink in the place of whatever was there.
///
/// # Errors
/// `EXIST` if it is to refuse.
pub fn make_link(folder: &OwnedFd, name: &[u8], target: &[u8], occupied: Occupied) -> Result<(), Errno> {
    match in_folder(folder, || rustix::fs::symlinkat(target, folder, name)) {
        Err(Errno::EXIST) if occupied == Occupied::Replace => {
            remove(folder, name)?;
            rustix::fs::symlinkat(target, folder, name)
        }
        other => other,
    }
}

fn times(mtime: i64) -> Timestamps {
    let time = Timespec { tv_sec: mtime.div_euclid(1_000_000_000), tv_nsec: mtime.rem_euclid(1_000_000_000) };
    Timestamps { last_access: time, last_modification: time }
}

/// Sets the time of an entry of a folder; of a symlink its own.
pub fn set_time(folder: impl AsFd, name: &[u8], mtime: i64) -> Result<(), Errno> {
    rustix::fs::utimensat(folder, name, &times(mtime), AtFlags::SYMLINK_NOFOLLOW)
}

/// Sets the time of what is open.
pub fn set_time_of(file: impl AsFd, mtime: i64) -> Result<(), Errno> {
    rustix::fs::futimens(file, &times(mtime))
}
