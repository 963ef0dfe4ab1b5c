//! Where it is measured: an ext4 file system in an image in a tmpfs, so that no disk and no earlier deletion has a say.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A mounted file system; it goes when this is dropped.
pub struct Disk {
    _folder: tempfile::TempDir,
    memory: PathBuf,
    pub root: PathBuf,
}

/// Runs a command and fails if it does.
pub fn run(command: &mut Command) -> Result<(), Box<dyn Error>> {
    let done = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if done.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&done.stderr)).into())
}

impl Disk {
    /// # Errors
    /// Only root may mount, and only where loop devices are.
    pub fn mount(gigabytes: u32) -> Result<Self, Box<dyn Error>> {
        let folder = tempfile::tempdir()?;
        let (memory, root) = (folder.path().join("memory"), folder.path().join("disk"));
        std::fs::create_dir(&memory)?;
        std::fs::create_dir(&root)?;
        run(Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={}g", gigabytes + 1), "tmpfs"]).arg(&memory))?;
        let disk = Self { _folder: folder, memory, root };
        let image = disk.memory.join("image");
        std::fs::File::create(&image)?.set_len(u64::from(gigabytes) << 30)?;
        // Inodes for the million small files.
        run(Command::new("mkfs.ext4").args(["-q", "-m0", "-N", "2000000"]).arg(&image))?;
        run(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&disk.root))?;
        Ok(disk)
    }

    /// Waits until what was written or deleted before has reached the image, so that it costs whoever comes next nothing.
    pub fn settle(&self) -> Result<(), Box<dyn Error>> {
        rustix::fs::syncfs(std::fs::File::open(&self.root)?)?;
        Ok(())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        for mounted in [&self.root, &self.memory] {
            let _ = Command::new("umount").arg(mounted).status();
        }
    }
}

/// Bytes of all files below a folder whose names end so.
pub fn bytes(folder: &Path, ending: &str) -> std::io::Result<u64> {
    let files = super::one::files(folder)?;
    let sizes = files.iter().filter(|f| f.to_string_lossy().ends_with(ending)).map(|f| f.metadata().map(|m| m.len()));
    sizes.sum()
}
