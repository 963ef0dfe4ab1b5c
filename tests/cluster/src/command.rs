//! Running the machine's own tools, with errors that say which command failed and what it printed last.

use std::fs::{self, File};
use std::io::{Read, Write};
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
    feed(command, "")
}

/// Runs a command to its end, with text on its standard input, and returns what it printed. An interrupt ends it.
pub fn feed(command: &mut Command, input: &str) -> Result<String> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("can't start {}", shown(command)))?;
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let (status, said, complained) = std::thread::scope(|scope| {
        // All three at once: a full pipe would block the command for ever.
        scope.spawn(|| stdin.expect("piped").write_all(input.as_bytes()));
        let said = scope.spawn(|| read(stdout));
        let complained = scope.spawn(|| read(stderr));
        let status = interrupt::wait_for(&mut child);
        (status, said.join().unwrap_or_default(), complained.join().unwrap_or_default())
    });
    let status = status?;
    if !status.success() {
        let all = format!("{said}\n{complained}");
        bail!("{} failed ({status}):\n{}", shown(command), last_lines(&all));
    }
    Ok(said)
}

fn read(pipe: Option<impl Read>) -> String {
    let mut bytes = Vec::new();
    // What was read before an error is still worth showing.
    let _ = pipe.map(|mut pipe| pipe.read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
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
