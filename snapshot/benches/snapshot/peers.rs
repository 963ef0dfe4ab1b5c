//! The other tools, each as its manual says and with its cheapest settings.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Stored;
use super::disk::{Disk, bytes, run};
use super::measure::Table;

/// Stores of one round; they go with this.
pub struct Peers<'a> {
    disk: &'a Path,
    work: &'a Path,
    git: PathBuf,
    restic: PathBuf,
    borg: PathBuf,
    tar: PathBuf,
    copy: PathBuf,
}

impl<'a> Peers<'a> {
    /// Makes empty stores.
    pub fn prepare(disk: &'a Path, work: &'a Path) -> Result<Self, Box<dyn Error>> {
        let at = |name: &str| disk.join(name);
        let peers = Self { disk, work, git: at("git"), restic: at("restic"), borg: at("borg"), tar: at("tar.zst"), copy: at("copy") };
        run(peers.git().args(["init", "-q"]))?;
        for setting in ["core.untrackedCache=true", "core.compression=1", "gc.auto=0", "user.name=bench", "user.email=bench@localhost"] {
            let (name, value) = setting.split_once('=').ok_or("a setting has a value")?;
            run(peers.git().args(["config", name, value]))?;
        }
        run(peers.restic().arg("init"))?;
        run(peers.borg().args(["init", "-e", "none"]).arg(&peers.borg))?;
        Ok(peers)
    }

    fn git(&self) -> Command {
        let mut git = Command::new("git");
        git.arg("--git-dir").arg(&self.git).arg("--work-tree").arg(self.work);
        git
    }

    /// A line for the shell with git's two folders.
    fn git_line(&self, words: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-ec", words]).env("GIT_DIR", &self.git).env("GIT_WORK_TREE", self.work);
        shell
    }

    fn restic(&self) -> Command {
        let mut restic = Command::new("restic");
        restic.args(["--quiet", "--repo"]).arg(&self.restic).arg("--cache-dir").arg(self.disk.join("restic-cache"));
        restic.env("RESTIC_PASSWORD", "bench");
        restic
    }

    fn borg(&self) -> Command {
        let mut borg = Command::new("borg");
        borg.env("BORG_BASE_DIR", self.disk.join("borg-home")).env("BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK", "yes");
        borg
    }

    pub fn full(&self, disk: &Disk, table: &mut Table) -> Result<(), Box<dyn Error>> {
        let mut tar = Command::new("sh");
        tar.args(["-ec", "tar -cf - -C \"$0\" . | zstd -q -1 -T2 -o \"$1\""]).arg(self.work).arg(&self.tar);
        let mut borg = self.borg();
        borg.args(["create", "-C", "zstd,1"]).arg(format!("{}::full", self.borg.display())).arg(self.work);
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(self.work).arg(&self.copy);
        for (tool, command) in [
            ("tar+zstd", &mut tar),
            ("git add", &mut self.git_line("git add -A -f . && git write-tree")),
            ("restic", self.restic().arg("backup").arg(self.work)),
            ("borg", &mut borg),
            ("cp -a", &mut copy),
        ] {
            disk.settle()?;
            table.run("full", tool, self.disk, command)?;
        }
        run(self.git().args(["commit", "-q", "-m", "full"]))?;
        std::fs::remove_dir_all(&self.copy)?;
        Ok(())
    }

    pub fn stored(&self) -> Result<Stored, Box<dyn Error>> {
        Ok(Stored {
            ours: 0,
            tar: self.tar.metadata()?.len(),
            git: bytes(&self.git.join("objects"), "")?,
            restic: bytes(&self.restic, "")?,
            borg: bytes(&self.borg, "")?,
            edits: (0, 1),
        })
    }

    pub fn unchanged(&self, table: &mut Table) -> Result<(), Box<dyn Error>> {
        // The first one fills git's caches.
        run(&mut self.git_line("git status --porcelain"))?;
        for _ in 0..2 {
            table.run("no change", "git status", self.disk, &mut self.git_line("git status --porcelain"))?;
        }
        table.run("no change", "restic", self.disk, self.restic().arg("backup").arg(self.work))?;
        Ok(())
    }

    pub fn changed(&self, table: &mut Table) -> Result<(), Box<dyn Error>> {
        table.run("ten files changed", "git add", self.disk, &mut self.git_line("git add -A -f . && git write-tree"))?;
        Ok(())
    }

    pub fn restore(&self, disk: &Disk, table: &mut Table) -> Result<(), Box<dyn Error>> {
        let to = self.copy.as_os_str();
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(self.work).arg(to);
        let mut tar = Command::new("sh");
        tar.args(["-ec", "mkdir \"$1\" && zstd -q -dc \"$0\" | tar -xf - -C \"$1\""]).arg(&self.tar).arg(to);
        let mut restic = self.restic();
        restic.args(["restore", "latest", "--target"]).arg(to);
        let mut git = Command::new("sh");
        git.args(["-ec", "mkdir \"$0\" && git --work-tree \"$0\" checkout-index -a -f --prefix=\"$0/\""]).arg(to);
        git.env("GIT_DIR", &self.git);
        for (tool, command) in [("cp -a", &mut copy), ("tar+zstd", &mut tar), ("restic", &mut restic), ("git", &mut git)] {
            disk.settle()?;
            table.run("cold restore", tool, self.disk, command)?;
            std::fs::remove_dir_all(&self.copy)?;
        }
        Ok(())
    }
}

impl Drop for Peers<'_> {
    fn drop(&mut self) {
        for folder in [&self.git, &self.restic, &self.borg, &self.copy, &self.disk.join("restic-cache"), &self.disk.join("borg-home")] {
            let _ = std::fs::remove_dir_all(folder);
        }
        let _ = std::fs::remove_file(&self.tar);
    }
}
