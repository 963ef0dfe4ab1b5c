//! What demo and tests could leave on a machine, looked for before and after.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::command::{output, run, shown};
use crate::interrupt;

/// In the environment of all that a check starts, and inherited by whatever that starts.
const MARK: &str = "REPLAYFORK_TEST_CLEAN";

/// What is there at one moment, each thing as a line.
#[derive(Debug, Default)]
pub struct Traces(BTreeSet<String>);

impl Traces {
    pub fn take() -> Result<Self> {
        let mut traces = Self::default();
        for line in fs::read_to_string("/proc/self/mountinfo")?.lines() {
            // The first two words are numbers that change with every mount.
            traces.add("mount", line.split_whitespace().nth(4).unwrap_or(line));
        }
        for line in output(Command::new("ip").args(["-oneline", "link"]))?.lines() {
            traces.add("link", line.split(':').nth(1).unwrap_or(line).trim());
        }
        for line in output(Command::new("ip").args(["netns", "list"]))?.lines() {
            traces.add("network namespace", line);
        }
        for process in fs::read_dir("/proc")? {
            if let Ok(link) = fs::read_link(process?.path().join("ns/net")) {
                traces.add("network namespace", &link.display().to_string());
            }
        }
        traces.add_named("temporary folder", &std::env::temp_dir(), 1, &["replayfork-", ".tmp"])?;
        traces.add_named("cgroup", Path::new("/sys/fs/cgroup"), 3, &["replayfork", "kubepods"])?;
        traces.add_named("part of the cache", &crate::cache::root()?, 2, &[".making-", ".store-"])?;
        Ok(traces)
    }

    /// What is there now and wasn't then.
    pub fn since(&self, before: &Self) -> Vec<String> {
        self.0.difference(&before.0).cloned().collect()
    }

    fn add(&mut self, kind: &str, name: &str) {
        self.0.insert(format!("{kind} {name}"));
    }

    /// Adds the folders down to `depth` whose names begin in one of these ways.
    fn add_named(&mut self, kind: &str, folder: &Path, depth: usize, beginnings: &[&str]) -> Result<()> {
        let Ok(entries) = fs::read_dir(folder) else {
            return Ok(());
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !entry.file_type()?.is_dir() {
                continue;
            }
            if beginnings.iter().any(|beginning| name.starts_with(beginning)) {
                self.add(kind, &entry.path().display().to_string());
            }
            if depth > 1 {
                self.add_named(kind, &entry.path(), depth - 1, beginnings)?;
            }
        }
        Ok(())
    }
}

/// The processes that still carry the mark, with the network namespaces that they hold.
fn marked(mark: &str) -> Result<Vec<String>> {
    let wanted = format!("{MARK}={mark}");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let path = entry?.path();
        // A process may end while it is looked at.
        let Ok(environment) = fs::read(path.join("environ")) else {
            continue;
        };
        if environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes()) {
            let command = fs::read(path.join("cmdline")).unwrap_or_default();
            let command = String::from_utf8_lossy(&command).replace('\0', " ");
            found.push(format!("process {} {command}", path.file_name().unwrap_or_default().to_string_lossy()));
        }
    }
    Ok(found)
}

/// Clones the project as it is committed, runs demo and tests there twice, and compares the machine with before.
pub fn check(project: &Path) -> Result<()> {
    let clone = tempfile::Builder::new().prefix("clone-").tempdir()?;
    run(Command::new("git").args(["clone", "--quiet"]).arg(project).arg(clone.path()))?;
    let mark = std::process::id().to_string();
    let before = Traces::take()?;
    for round in ["first", "second"] {
        for target in [["demo", "ONCE=1"].as_slice(), &["test"]] {
            let mut make = Command::new("make");
            make.args(target).current_dir(clone.path()).env(MARK, &mark).stdin(Stdio::null());
            println!("\n== {round} time in a fresh clone: {}\n", shown(&make));
            let status = make.status().context("can't start make")?;
            interrupt::check()?;
            ensure!(status.success(), "{} failed the {round} time ({status})", shown(&make));
            compare(&before, &mark)?;
        }
    }
    println!("\nnothing is left: no process, mount, link, network namespace, cgroup or temporary folder");
    Ok(())
}

fn compare(before: &Traces, mark: &str) -> Result<()> {
    let mut left = Traces::take()?.since(before);
    left.extend(marked(mark)?);
    if !left.is_empty() {
        bail!("this is left on the machine:\n  {}", left.join("\n  "));
    }
    Ok(())
}
