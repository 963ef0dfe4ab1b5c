//! Ctrl-C and SIGTERM as an ordinary error: whatever waits asks here, returns, and its guards clean up on the way out.

use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::signal::unix::{SignalKind, signal};

static ASKED: AtomicBool = AtomicBool::new(false);

/// How often a wait looks for an interrupt.
pub const SLICE: Duration = Duration::from_millis(50);

/// How long an interrupted child may take to end before it is killed.
const ENDING: Duration = Duration::from_secs(10);

/// From now on the two signals no longer end the process. To be called once, early in `main`.
pub fn install() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut interrupt, mut terminate) = {
        let _context = runtime.enter();
        (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?)
    };
    std::thread::spawn(move || {
        runtime.block_on(async {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                ASKED.store(true, Ordering::SeqCst);
            }
        });
    });
    Ok(())
}

/// Whether the user asked to stop.
pub fn asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}

/// An error once the user asked to stop.
pub fn check() -> Result<()> {
    if asked() {
        bail!("interrupted");
    }
    Ok(())
}

/// Waits until the user asks to stop.
pub fn wait() {
    while !asked() {
        std::thread::sleep(SLICE);
    }
}

/// Takes back an interrupt that was meant for a shell in the foreground.
pub fn forget() {
    ASKED.store(false, Ordering::SeqCst);
}

/// Waits for a child that leads a process group of its own; an interrupt ends the group.
pub fn wait_for(child: &mut Child) -> Result<ExitStatus> {
    let mut slice = Duration::from_millis(1);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if asked() {
            end_group(child)?;
            bail!("interrupted");
        }
        std::thread::sleep(slice);
        // Most commands end at once; a long one needn't be looked at often.
        slice = SLICE.min(slice * 2);
    }
}

/// Ends a process group: politely, then not.
pub fn end_group(child: &mut Child) -> Result<()> {
    let group = Pid::from_child(child);
    let _ = kill_process_group(group, Signal::TERM);
    for _ in 0..ENDING.as_millis() / SLICE.as_millis() {
        if child.try_wait()?.is_some() {
            break;
        }
        std::thread::sleep(SLICE);
    }
    let _ = kill_process_group(group, Signal::KILL);
    child.wait()?;
    Ok(())
}
