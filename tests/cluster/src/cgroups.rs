//! The cgroups below which kubelet puts the pods: version 1 has a folder in each hierarchy, version 2 a single one.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

const ROOT: &str = "/sys/fs/cgroup";

/// What kubelet needs to control under version 2.
const CONTROLLERS: [&str; 5] = ["cpu", "cpuset", "memory", "pids", "io"];

/// How long the last processes of a cgroup may take to vanish after they were killed.
const EMPTYING: Duration = Duration::from_secs(10);

/// Makes the root cgroup of a cluster in every hierarchy.
pub(crate) fn make(name: &str) -> Result<()> {
    for hierarchy in hierarchies()? {
        let folder = hierarchy.join(name);
        fs::create_dir_all(&folder).with_context(|| format!("can't make the cgroup {}", folder.display()))?;
        // Version 1: an empty cpuset takes no process, and its children can't have more than it.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            if folder.join(file).exists() && hierarchy.join("cgroup.procs").exists() && !unified(&hierarchy) {
                fs::write(folder.join(file), fs::read_to_string(hierarchy.join(file))?.trim())?;
            }
        }
        if unified(&hierarchy) && hierarchy == Path::new(ROOT) {
            delegate(&hierarchy)?;
            delegate(&folder)?;
        }
    }
    Ok(())
}

/// Removes the root cgroup of a cluster and all below it, once nothing lives in them.
pub(crate) fn remove(name: &str) -> Result<()> {
    let until = Instant::now() + EMPTYING;
    for hierarchy in hierarchies()? {
        let folder = hierarchy.join(name);
        while folder.exists() {
            match remove_tree(&folder) {
                Ok(()) => {}
                Err(error) if Instant::now() > until => {
                    bail!("the cgroup {} can't be removed: {error}", folder.display())
                }
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }
    Ok(())
}

/// Every place where cgroups are made: the only one of version 2, or each controller's of version 1.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let root = Path::new(ROOT);
    if unified(root) {
        return Ok(vec![root.to_owned()]);
    }
    let mut found = Vec::new();
    for entry in fs::read_dir(root).context("no cgroups are mounted on /sys/fs/cgroup")? {
        let entry = entry?;
        // Links such as cpu,cpuacct lead to folders that are listed as well.
        if entry.file_type()?.is_dir() && entry.path().join("cgroup.procs").exists() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn unified(hierarchy: &Path) -> bool {
    hierarchy.join("cgroup.controllers").exists()
}

/// Version 2: lets the children of a cgroup use the controllers that kubelet sets limits with.
fn delegate(folder: &Path) -> Result<()> {
    let available = fs::read_to_string(folder.join("cgroup.controllers"))?;
    for controller in CONTROLLERS.iter().filter(|wanted| available.split_whitespace().any(|found| found == **wanted)) {
        fs::write(folder.join("cgroup.subtree_control"), format!("+{controller}"))
            .with_context(|| format!("can't enable the controller {controller} below {}", folder.display()))?;
    }
    Ok(())
}

fn remove_tree(folder: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(folder)
}
