//! What a file's metadata say, in one call relative to a directory handle.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx, StatxFlags};
use rustix::io::Errno;
use rustix::time::ClockId;

/// What of a file's metadata says that it has not changed. Times are nanoseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub size: u64,
    pub inode: u64,
    pub mtime: i64,
    pub ctime: i64,
}

impl Stamp {
    /// Whether a change at `moment` or later might leave the same times (git's rule for racy entries).
    pub fn is_racy(&self, moment: i64) -> bool {
        self.mtime >= moment || self.ctime >= moment
    }
}

/// An entry as the file system shows it.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    pub file_type: FileType,
    pub executable: bool,
    pub device: (u32, u32),
    pub stamp: Stamp,
}

const WANTED: StatxFlags = StatxFlags::BASIC_STATS;

/// Looks at an entry of a folder; a symlink stands for itself.
pub fn look(folder: impl AsFd, name: &[u8]) -> Result<Seen, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    rustix::fs::statx(folder, name, flags, WANTED).map(|s| seen(&s))
}

/// Looks at what is open.
pub fn look_at(file: impl AsFd) -> Result<Seen, Errno> {
    rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, WANTED).map(|s| seen(&s))
}

fn seen(stat: &Statx) -> Seen {
    let mode = u32::from(stat.stx_mode);
    Seen {
        file_type: FileType::from_raw_mode(mode),
        executable: mode & 0o100 != 0,
        device: (stat.stx_dev_major, stat.stx_dev_minor),
        stamp: Stamp {
            size: stat.stx_size,
            inode: stat.stx_ino,
            mtime: nanoseconds(stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec.into()),
            ctime: nanoseconds(stat.stx_ctime.tv_sec, stat.stx_ctime.tv_nsec.into()),
        },
    }
}

pub fn nanoseconds(seconds: i64, nanoseconds: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

/// The clock that the kernel stamps files with, so that "changed since" is decided on one scale.
pub fn file_clock() -> i64 {
    let now = rustix::time::clock_gettime(ClockId::RealtimeCoarse);
    nanoseconds(now.tv_sec, now.tv_nsec as i64)
}

/// Opens a folder by its path, which may lead through symlinks.
pub fn open_root(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// Opens a folder of a folder; never through a symlink.
pub fn open_folder(folder: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(folder, name, flags, Mode::empty())
}

/// Opens a file of a folder for reading; never through a symlink, and without waiting for whoever writes to a FIFO.
pub fn open_file(folder: impl AsFd, name: &[u8]) -> Result<std::fs::File, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::openat(folder, name, flags, Mode::empty()).map(std::fs::File::from)
}
