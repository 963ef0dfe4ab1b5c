//! A cluster as a value: it runs while the value lives, and nothing of it is left afterwards.

use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::Deref;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::attached::Attached;
use crate::parts::Part;
use crate::spec::{Database, Event, Parts, ROLE, Spec};
use crate::{images, interrupt};

/// How long a cluster may take to start; it takes ten seconds on two idle cores.
const STARTING: Duration = Duration::from_secs(300);

/// What a cluster is to have.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The folder of everything it writes. It must be absent, and is removed with the cluster. Default: a temporary one.
    pub state: Option<PathBuf>,
    /// The RuntimeClass `gvisor`.
    pub gvisor: bool,
    /// A Postgres server on the node's address.
    pub postgres: bool,
    /// OCI archives to import before the node is used.
    pub images: Vec<PathBuf>,
}

/// A running cluster that ends with this value.
#[derive(Debug)]
pub struct Cluster {
    attached: Attached,
    /// Its end is the keeper's sign to take everything down.
    lifeline: Option<ChildStdin>,
    keeper: Child,
    ended: Arc<AtomicBool>,
}

impl Cluster {
    /// Builds what is missing, starts a cluster and returns when everything in it answers.
    ///
    /// The calling program must begin with [`crate::take_role`].
    pub fn start(options: Options) -> Result<Self> {
        let parts = Parts {
            kube: Part::Kube.build()?,
            containerd: Part::Containerd.build()?,
            coredns: Part::Coredns.build()?,
            kube_router: Part::KubeRouter.build()?,
            gvisor: options.gvisor.then(|| Part::Gvisor.build()).transpose()?,
        };
        let spec = Spec {
            state: state_folder(options.state)?,
            remove_state: true,
            addresses: None,
            parts,
            pause: images::pause()?,
            images: options.images,
            postgres: options.postgres.then(Database::new).transpose()?,
        };
        spec.write()?;
        // A copy, since cargo may replace this program's file while it runs.
        let program = spec.state.join("program");
        fs::copy("/proc/self/exe", &program).context("can't copy this program")?;
        let mut keeper = Command::new(&program)
            .args([ROLE, "keep"])
            .arg(&spec.state)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("can't start the cluster's keeper")?;
        let lifeline = keeper.stdin.take();
        let events = BufReader::new(keeper.stdout.take().expect("piped"));
        // From here on, every way out takes the cluster down.
        let ended = Arc::new(AtomicBool::new(false));
        let state = spec.state.clone();
        let attached = Attached { spec, unshare: 0, init: 0 };
        let mut cluster = Self { attached, lifeline, keeper, ended: Arc::clone(&ended) };
        let (ready, became_ready) = mpsc::channel();
        std::thread::spawn(move || {
            watch(events, &ready);
            ended.store(true, Ordering::SeqCst);
        });
        await_ready(&became_ready)?;
        cluster.attached = Attached::to(&state)?;
        Ok(cluster)
    }

    /// Whether the cluster has ended by itself, since someone killed its processes.
    pub fn ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }
}

fn await_ready(became_ready: &Receiver<Event>) -> Result<()> {
    let until = Instant::now() + STARTING;
    loop {
        interrupt::check()?;
        match became_ready.recv_timeout(interrupt::SLICE) {
            Ok(Event::Ready) => return Ok(()),
            Ok(Event::Failed { message }) => bail!("the cluster did not start: {message}"),
            Ok(event) => bail!("the cluster did not start: {event:?}"),
            Err(RecvTimeoutError::Disconnected) => {
                bail!("the cluster's keeper ended before the cluster was ready")
            }
            Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
            Err(RecvTimeoutError::Timeout) => {
                bail!("the cluster was not ready within {} s", STARTING.as_secs())
            }
        }
    }
}

impl Deref for Cluster {
    type Target = Attached;

    fn deref(&self) -> &Attached {
        &self.attached
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.lifeline.take());
        let cleaned = self.keeper.wait().is_ok_and(|status| status.success());
        // A keeper that was killed has left its folder; its link and cgroups go with the next cluster of its index.
        if !cleaned && self.attached.spec.remove_state {
            let _ = fs::remove_dir_all(&self.attached.spec.state);
        }
    }
}

/// Reads the keeper's events to their end: the first decides the start, later ones are shown.
fn watch(events: impl BufRead, ready: &Sender<Event>) {
    let mut decided = false;
    for line in events.lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Event::Ended { component, message }) => {
                eprintln!("the cluster's {component}: {message}")
            }
            Ok(event) if !decided => {
                decided = true;
                let _ = ready.send(event);
            }
            Ok(event) => eprintln!("the cluster: {event:?}"),
            Err(_) => eprintln!("the cluster: {line}"),
        }
    }
}

/// Makes the state folder; Postgres, which is unprivileged, must be able to pass through it.
fn state_folder(wanted: Option<PathBuf>) -> Result<PathBuf> {
    let folder = match wanted {
        Some(folder) => {
            fs::create_dir(&folder).with_context(|| format!("can't make the state folder {}", folder.display()))?;
            folder.canonicalize()?
        }
        None => tempfile::Builder::new().prefix("replayfork-cluster-").tempdir()?.keep(),
    };
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o711))?;
    Ok(folder)
}
