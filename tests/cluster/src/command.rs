//! Running the machine's own tools, with errors that say which command failed and what it printed last.

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::interrupt;

/// How many lines of a log are shown when something fails.
const TAIL: usize = 25;

/// Runs a command to its end; its output is shown only if it fails.
pub fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// Runs a command to its end and returns what it printed.
pub fn output(command: &mut Command) -> Result<String> {
    let done = command.stdin(Stdio::null()).output().with_context(|| format!("can't start {}", shown(command)))?;
    if !done.status.success() {
        let said = [done.stdout, done.stderr].concat();
        bail!("{} failed ({}):\n{}", shown(command), done.status, last_lines(&String::from_utf8_lossy(&said)));
    }
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// Whether a command succeeds; what it prints is dropped.
pub fn succeeds(command: &mut Command) -> bool {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Runs a command, which may take long, with all its output appended to `log`; a failure shows the log's end, an
/// interrupt ends it.
pub fn run_logged(command: &mut Command, log: &Path) -> Result<()> {
    let file = append(log)?;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .process_group(0)
        .spawn()
        .with_context(|| format!("can't start {}", shown(command)))?;
    let status = interrupt::wait_for(&mut child)?;
    if !status.success() {
        bail!("{} failed ({status}); the end of {}:\n{}", shown(command), log.display(), tail(log));
    }
    Ok(())
}

/// Opens a log for appending, with its folder.
pub fn append(log: &Path) -> Result<File> {
    if let Some(folder) = log.parent() {
        fs::create_dir_all(folder)?;
    }
    File::options().create(true).append(true).open(log).with_context(|| format!("can't write {}", log.display()))
}

/// The last lines of a log, indented.
pub fn tail(log: &Path) -> String {
    match fs::read(log) {
        Ok(text) => last_lines(&String::from_utf8_lossy(&text)),
        Err(error) => format!("  ({} can't be read: {error})", log.display()),
    }
}

/// The command as a person would type it.
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(TAIL)..].iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}
