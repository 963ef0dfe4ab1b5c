//! The keeper owns what outlives a single process: the link into the cluster's network, the cgroups, the state folder.
//!
//! It is a process of its own with one parent, whose end it sees as the end of its standard input, however that parent
//! ended. Then it takes everything down. Should the keeper itself be killed, the namespaces still die, because their
//! first process watches the keeper in the same way; what is left is removed by the next cluster that gets its index.

use std::fs;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::addresses::{Addresses, Claim};
use crate::command::{run, succeeds};
use crate::spec::{Event, ROLE, Spec};
use crate::{cgroups, pki};

/// How long the namespaces may take to die; then their first process is killed.
const DYING: Duration = Duration::from_secs(20);

/// Runs a cluster until the parent ends or a signal comes.
pub(crate) fn main(state: &Path) -> ExitCode {
    let result = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(anyhow::Error::from).and_then(|runtime| {
        let result = runtime.block_on(keep(state));
        // Its thread that reads the standard input can't be interrupted, and needn't be.
        runtime.shutdown_background();
        result
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            Event::Failed { message: format!("{error:#}") }.tell();
            ExitCode::FAILURE
        }
    }
}

async fn keep(state: &Path) -> Result<()> {
    // Ctrl-C goes to the parent alone; it decides when the cluster ends.
    rustix::process::setsid().context("can't leave the parent's terminal")?;
    let mut spec = Spec::read(state)?;
    let mut stop = Stop::install()?;
    let claim = Claim::take()?;
    spec.addresses = Some(claim.addresses);
    spec.write()?;
    let kept = Kept { spec: &spec };
    // What a killed keeper of the same index may have left.
    kept.remove_link();
    kept.remove_cgroups()?;

    let result = run_inside(&spec, &mut stop).await;
    kept.take_down()?;
    drop(claim);
    result
}

/// Starts the namespaces, connects them and waits for the end.
async fn run_inside(spec: &Spec, stop: &mut Stop) -> Result<()> {
    let addresses = spec.addresses();
    pki::write(spec)?;
    cgroups::make(&addresses.cgroup())?;
    // The mount namespace is private, so that nothing mounted inside is seen, or left, outside.
    let mut inside = Command::new("unshare")
        .args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"])
        .arg(std::env::current_exe()?)
        .args([ROLE, "init"])
        .arg(&spec.state)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("can't start unshare (package util-linux)")?;
    let pid = inside.id().context("unshare ended at once")?;
    let mut lines = BufReader::new(inside.stdout.take().expect("piped")).lines();
    loop {
        tokio::select! {
            line = lines.next_line() => {
                let Some(line) = line? else { break };
                match serde_json::from_str::<Event>(&line).with_context(|| format!("not an event: {line}"))? {
                    Event::Entered => {
                        fs::write(spec.state.join("unshare.pid"), pid.to_string())?;
                        connect(addresses, pid)?;
                    }
                    event => event.tell(),
                }
            }
            () = stop.asked() => break,
        }
    }
    succeeds(std::process::Command::new("ip").args(["link", "del", &addresses.link()]));
    end(&mut inside).await
}

/// Makes the link between this machine and the cluster's network namespace.
fn connect(addresses: Addresses, pid: u32) -> Result<()> {
    let link = addresses.link();
    let pid = pid.to_string();
    let ip = |args: &[&str]| run(std::process::Command::new("ip").args(args));
    ip(&["link", "add", &link, "type", "veth", "peer", "name", "eth0", "netns", &pid])?;
    ip(&["address", "add", &format!("{}/24", addresses.host_ip()), "dev", &link])?;
    ip(&["link", "set", &link, "up"])
}

/// Ends the namespaces by the end of their input, and waits until the kernel has removed every process in them.
async fn end(inside: &mut Child) -> Result<()> {
    drop(inside.stdin.take());
    if tokio::time::timeout(DYING, inside.wait()).await.is_err() {
        // Its child, the namespace's first process, is killed with it (--kill-child).
        inside.kill().await?;
        bail!("the cluster's processes did not end within {} s and were killed", DYING.as_secs());
    }
    Ok(())
}

/// The two ways in which a keeper is told to stop.
struct Stop {
    input: tokio::io::Stdin,
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Stop {
    fn install() -> Result<Self> {
        Ok(Self { input: tokio::io::stdin(), terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn asked(&mut self) {
        let mut byte = [0];
        tokio::select! {
            // The parent never writes: this ends when it ends, or when it lets go of the cluster.
            _ = self.input.read(&mut byte) => {}
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// What is left on the machine when the namespaces are gone.
struct Kept<'a> {
    spec: &'a Spec,
}

impl Kept<'_> {
    fn remove_link(&self) {
        succeeds(std::process::Command::new("ip").args(["link", "del", &self.spec.addresses().link()]));
    }

    fn remove_cgroups(&self) -> Result<()> {
        cgroups::remove(&self.spec.addresses().cgroup())
    }

    fn take_down(&self) -> Result<()> {
        self.remove_link();
        let cgroups = self.remove_cgroups();
        if self.spec.remove_state {
            let state = &self.spec.state;
            fs::remove_dir_all(state).with_context(|| format!("can't remove {}", state.display()))?;
        }
        cgroups
    }
}
