//! One command: started, watched, and cleared away with all that it started.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use replayfork_protocol::{Ended, MAX_OUTPUT, Run, SCRATCH, ToExecutor};
use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process_group, wait};

use crate::cgroup::oom_kills;
use crate::place::{denied, find, is_usable_home};

/// What can happen while a command runs or none does.
pub enum Event {
    Courier(ToExecutor),
    Disconnected,
    /// SIGTERM from outside of the container.
    Terminate,
    Exited(io::Result<ExitStatus>),
}

/// Runs a command to its end, and kills what it leaves running. `None`: the executor itself must go.
pub fn run(command: &Run, events: &Sender<Event>, inbox: &Receiver<Event>) -> Option<Ended> {
    let kills_before = oom_kills();
    let mut ended = Ended::default();
    let mut env = command.env.clone();
    if let Some(home) = env.get_mut("HOME").filter(|home| !is_usable_home(home)) {
        ended.home_unusable = Some(std::mem::replace(home, SCRATCH.to_owned()));
    }
    let mut child = match start(command, &env) {
        Ok(child) => child,
        Err(Unstarted { program, error }) => {
            if error.kind() == io::ErrorKind::PermissionDenied {
                ended.denied = denied(command, &program);
            }
            ended.failed_start = Some(format!("{program:?} in {:?} can't be started: {error}", command.cwd));
            return Some(ended);
        }
    };
    let readers = [child.stdout.take().map(collect), child.stderr.take().map(collect)];
    if let Some(mut stdin) = child.stdin.take() {
        let text = command.stdin.clone();
        thread::spawn(move || stdin.write_all(text.as_bytes()));
    }
    let group = Pid::from_child(&child);
    let events = events.clone();
    thread::spawn(move || events.send(Event::Exited(child.wait())));
    let deadline = command.timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
    let mut must_go = false;
    loop {
        let left = deadline.map_or(Duration::from_secs(3600), |d| d.saturating_duration_since(Instant::now()));
        match inbox.recv_timeout(left) {
            Ok(Event::Exited(Ok(status))) => {
                if ended.timed_out.is_none() && !ended.stopped {
                    ended.exit_code = status.code().or_else(|| status.signal().map(|s| 128 + s));
                }
                break;
            }
            Ok(Event::Exited(Err(error))) => {
                ended.failed_start = Some(format!("its end could not be awaited: {error}"));
                break;
            }
            Ok(Event::Courier(ToExecutor::Stop)) => {
                ended.stopped = true;
                kill_started(group);
            }
            Ok(Event::Terminate | Event::Disconnected | Event::Courier(_)) => {
                must_go = true;
                kill_started(group);
            }
            Err(RecvTimeoutError::Timeout) if deadline.is_some_and(|d| Instant::now() >= d) => {
                ended.timed_out = command.timeout_ms;
                kill_started(group);
            }
            Err(_) => {}
        }
    }
    ended.left_running = kill_all();
    for (reader, into) in readers.into_iter().zip([&mut ended.stdout, &mut ended.stderr]) {
        if let Some((kept, dropped)) = reader.and_then(|r| r.join().ok()) {
            *into = kept;
            ended.dropped += dropped;
        }
    }
    ended.oom_kills = oom_kills().saturating_sub(kills_before);
    (!must_go).then_some(ended)
}

/// A command that did not start: what was tried, and what the kernel said.
struct Unstarted {
    program: String,
    error: io::Error,
}

fn start(command: &Run, env: &BTreeMap<String, String>) -> Result<Child, Unstarted> {
    let Some((program, arguments)) = command.argv.split_first() else {
        return Err(Unstarted { program: String::new(), error: io::Error::new(io::ErrorKind::InvalidInput, "the command is empty") });
    };
    let unstarted = |program: &str, error| Unstarted { program: program.to_owned(), error };
    // A program without a slash is looked for in the command's own PATH, not in this process's.
    let file = if program.contains('/') { program.clone() } else { find(program, command).map_err(|e| unstarted(program, e))? };
    Command::new(&file)
        .args(arguments)
        .current_dir(&command.cwd)
        .env_clear()
        .envs(env)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| unstarted(&file, error))
}

/// Reads a stream to its end, keeping at most [`MAX_OUTPUT`] bytes; with how many were dropped.
fn collect(mut stream: impl Read + Send + 'static) -> JoinHandle<(Vec<u8>, u64)> {
    thread::spawn(move || {
        let (mut kept, mut dropped, mut buffer) = (Vec::new(), 0u64, vec![0; 64 << 10]);
        loop {
            match stream.read(&mut buffer) {
                Ok(0) => return (kept, dropped),
                Ok(n) => {
                    let room = MAX_OUTPUT.saturating_sub(kept.len()).min(n);
                    kept.extend_from_slice(&buffer[..room]);
                    dropped += (n - room) as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return (kept, dropped),
            }
        }
    })
}

fn is_init() -> bool {
    getpid().is_init()
}

fn kill_started(group: Pid) {
    let _ = kill_process_group(group, Signal::KILL);
    if is_init() {
        kill_everything();
    }
}

/// kill(2) with -1, which rustix has only as "process group 1": every process that this one may signal, but itself.
fn kill_everything() {
    let _ = kill_process_group(Pid::INIT, Signal::KILL);
}

/// Kills everything in the container but this process, and reaps it; says how many processes there were. Where this is no PID 1
/// (outside of a container) it has no right to, and does nothing.
pub fn kill_all() -> u32 {
    if !is_init() {
        return 0;
    }
    let mut killed = 0;
    loop {
        kill_everything();
        // Of any child; `waitpid` without a number means those of one process group.
        match wait(WaitOptions::empty()) {
            // Orphans that had ended by themselves are only reaped.
            Ok(Some((_, status))) => killed += u32::from(status.terminating_signal() == Some(Signal::KILL.as_raw())),
            _ => return killed,
        }
    }
}
