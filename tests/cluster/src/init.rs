//! The first process of the cluster's PID namespace: it reaps what is orphaned and lives as long as the supervisor,
//! its only child of its own. When it ends, the kernel kills everything in the namespace.

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use rustix::process::{Pid, WaitOptions, wait};

use crate::spec::{Event, ROLE};

pub(crate) fn main(state: &Path) -> ExitCode {
    match reap_until_supervisor_ends(state) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            Event::Failed { message: format!("{error:#}") }.tell();
            ExitCode::FAILURE
        }
    }
}

fn reap_until_supervisor_ends(state: &Path) -> Result<()> {
    // Input and output stay the keeper's pipes: the supervisor watches the one and tells events on the other.
    let supervisor = Command::new(std::env::current_exe()?)
        .args([ROLE, "supervise"])
        .arg(state)
        .spawn()
        .context("can't start the cluster's supervisor")?;
    let supervisor = Pid::from_child(&supervisor);
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, _))) if pid == supervisor => return Ok(()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("can't wait for the cluster's processes"),
        }
    }
}
