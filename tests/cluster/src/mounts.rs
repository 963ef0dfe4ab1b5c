//! Private copies, in the cluster's mount namespace, of what its components write to: the machine stays as it was.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::run;
use crate::spec::Spec;

/// Kernel settings of the whole machine that kubelet insists on changing; it gets files that it may change instead.
const SETTINGS: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

pub(crate) fn make(spec: &Spec) -> Result<()> {
    tmpfs("/run", &["containerd", "netns", "lock", "xtables"])?;
    tmpfs("/var/log", &["pods", "containers"])?;
    // Images, etcd and Postgres, about 0.6 GB: in memory they start faster, and are gone with the namespace, while a
    // disk that discards takes many seconds to remove them.
    tmpfs(&spec.run().display().to_string(), &[])?;
    overlay(spec, "/var/lib")?;
    overlay(spec, "/opt")?;
    // The pods' volumes stay on the disk: in memory they would count as the pods' own. Under kubelet's usual name, by
    // which gVisor recognises them.
    let kubelet = spec.state.join("kubelet");
    fs::create_dir_all(&kubelet)?;
    fs::create_dir_all("/var/lib/kubelet")?;
    run(Command::new("mount").arg("--bind").arg(&kubelet).arg("/var/lib/kubelet"))?;

    for setting in SETTINGS {
        let real = Path::new("/proc/sys").join(setting);
        let copy = Path::new("/run/settings").join(setting);
        fs::create_dir_all(copy.parent().expect("below /run/settings"))?;
        fs::write(&copy, fs::read(&real).with_context(|| format!("can't read {}", real.display()))?)?;
        run(Command::new("mount").arg("--bind").arg(&copy).arg(&real))?;
    }
    Ok(())
}

fn tmpfs(path: &str, folders: &[&str]) -> Result<()> {
    run(Command::new("mount").args(["-t", "tmpfs", "-o", "mode=755", "tmpfs", path]))?;
    for folder in folders {
        fs::create_dir(Path::new(path).join(folder))?;
    }
    Ok(())
}

fn overlay(spec: &Spec, path: &str) -> Result<()> {
    let layers = spec.run().join("overlay").join(path.trim_start_matches('/').replace('/', "-"));
    let (upper, work) = (layers.join("upper"), layers.join("work"));
    fs::create_dir_all(&upper)?;
    fs::create_dir_all(&work)?;
    let options = format!("lowerdir={path},upperdir={},workdir={}", upper.display(), work.display());
    run(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options, path]))
}
