//! One line for each phase with the time it took, and a sign of life from the long ones.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Result;

/// How often a long phase says that it is still at work.
const SIGN_OF_LIFE: Duration = Duration::from_secs(15);

/// Runs one phase: `name` says what is being done, in a few words.
pub fn phase<T>(name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    follow(name, None, work)
}

/// Runs one phase and shows the last line of `log` in its signs of life.
pub fn phase_with_log<T>(name: &str, log: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    follow(name, Some(log.to_owned()), work)
}

/// Says something between phases, on the same margin.
pub fn note(text: &str) {
    println!("         {text}");
    let _ = std::io::stdout().flush();
}

fn follow<T>(name: &str, log: Option<PathBuf>, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let started = Instant::now();
    let ticker = Ticker::start(name.to_owned(), log, started);
    let result = work();
    drop(ticker);
    line(started.elapsed(), &if result.is_ok() { name.to_owned() } else { format!("FAILED: {name}") });
    result
}

fn line(time: Duration, text: &str) {
    println!("{:6.1} s {text}", time.as_secs_f32());
    let _ = std::io::stdout().flush();
}

/// A thread that prints signs of life until it is dropped.
struct Ticker {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    fn start(name: String, log: Option<PathBuf>, started: Instant) -> Self {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(SIGN_OF_LIFE) {
                let last = log.as_deref().and_then(last_line).map(|line| format!(": {line}")).unwrap_or_default();
                line(started.elapsed(), &format!("… {name}{last}"));
            }
        });
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn last_line(log: &Path) -> Option<String> {
    let text = std::fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().rev().find(|line| !line.trim().is_empty())?;
    Some(line.trim().chars().take(100).collect())
}
