//! A cluster as a value: it runs while the value lives, and nothing of it is left afterwards.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::addresses::Addresses;
use crate::command::{output, run, run_logged};
use crate::components::CONTAINERD_SOCKET;
use crate::parts::Part;
use crate::spec::{Database, Event, Parts, ROLE, Spec};
use crate::supervisor::{Answer, Request};
use crate::{images, interrupt, postgres};

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

/// A running cluster.
#[derive(Debug)]
pub struct Cluster {
    spec: Spec,
    unshare: u32,
    init: u32,
    // Dropped first: its end is the keeper's sign to take everything down.
    lifeline: Option<ChildStdin>,
    keeper: Child,
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
        let mut keeper = Command::new(std::env::current_exe()?)
            .args([ROLE, "keep"])
            .arg(&spec.state)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("can't start the cluster's keeper")?;
        let lifeline = keeper.stdin.take();
        let events = BufReader::new(keeper.stdout.take().expect("piped"));
        // From here on, every way out takes the cluster down.
        let mut cluster = Self { spec, unshare: 0, init: 0, lifeline, keeper };
        let (ready, became_ready) = mpsc::channel();
        std::thread::spawn(move || watch(events, &ready));
        cluster.await_ready(&became_ready)?;
        cluster.spec = Spec::read(&cluster.spec.state)?;
        cluster.unshare = fs::read_to_string(cluster.spec.state.join("unshare.pid"))?.trim().parse()?;
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", cluster.unshare))?;
        cluster.init = children.trim().parse().context("the cluster's first process has ended")?;
        Ok(cluster)
    }

    fn await_ready(&self, became_ready: &Receiver<Event>) -> Result<()> {
        let until = Instant::now() + STARTING;
        loop {
            interrupt::check()?;
            match became_ready.recv_timeout(interrupt::SLICE) {
                Ok(Event::Ready) => return Ok(()),
                Ok(Event::Failed { message }) => bail!("the cluster did not start: {message}"),
                Ok(event) => bail!("the cluster did not start: {event:?}"),
                Err(RecvTimeoutError::Disconnected) => bail!("the cluster's keeper ended before the cluster was ready"),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(RecvTimeoutError::Timeout) => bail!("the cluster was not ready within {} s", STARTING.as_secs()),
            }
        }
    }

    /// The folder of everything that the cluster writes.
    pub fn state_dir(&self) -> &Path {
        &self.spec.state
    }

    /// The components' logs, `NAME.log` each.
    pub fn log_dir(&self) -> PathBuf {
        self.spec.log()
    }

    /// An administrator's kubeconfig (client certificate), usable from this machine and inside.
    pub fn kubeconfig(&self) -> PathBuf {
        self.spec.kubeconfig()
    }

    pub fn kubectl_path(&self) -> PathBuf {
        self.spec.parts.kube.join("kubectl")
    }

    /// `PATH` with the cluster's own binaries first.
    pub fn path(&self) -> String {
        self.spec.path()
    }

    pub fn addresses(&self) -> Addresses {
        self.spec.addresses()
    }

    /// The API server's URL, for this machine and for pods alike.
    pub fn api_server(&self) -> String {
        self.addresses().api_server()
    }

    /// The product's empty database as pods, and this machine, reach it.
    pub fn database_url(&self) -> Result<String> {
        postgres::url(&self.spec).context("this cluster was started without Postgres")
    }

    /// `kubectl` as the administrator.
    pub fn kubectl<S: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut kubectl = Command::new(self.kubectl_path());
        kubectl.env("KUBECONFIG", self.kubeconfig()).args(arguments);
        kubectl
    }

    /// A command inside the cluster's namespaces: its network, its mounts, its processes.
    pub fn inside(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg("--target").arg(self.init.to_string()).args(["--mount", "--net", "--pid", "--"]).arg(program);
        command.env("PATH", self.path()).env("KUBECONFIG", self.kubeconfig());
        command
    }

    /// A command of this machine that sees only the cluster's network.
    pub fn in_network(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.unshare)).arg("--").arg(program);
        command.env("PATH", self.path()).env("KUBECONFIG", self.kubeconfig());
        command
    }

    /// A listener of the calling process on an address inside the cluster's network (`127.0.0.1:0`, say): for a webhook
    /// that the API server calls, or a target that a policy must keep out of reach.
    pub fn listen(&self, address: &str) -> Result<TcpListener> {
        let namespace = fs::File::open(format!("/proc/{}/ns/net", self.unshare))?;
        let address = address.to_owned();
        // Only a thread of its own may change its network; a socket stays where it was made.
        std::thread::spawn(move || {
            use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
            use std::os::fd::AsFd;
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
            TcpListener::bind(&address).with_context(|| format!("can't listen on {address} inside the cluster"))
        })
        .join()
        .expect("doesn't panic")
    }

    /// Gives an address to the cluster's loopback interface, so that a test can listen on it ([`Self::listen`]).
    pub fn add_address(&self, address: &str) -> Result<()> {
        run(self.in_network("ip").args(["address", "add", &format!("{address}/32"), "dev", "lo"]))
    }

    /// Imports an OCI archive into the node.
    pub fn import_image(&self, archive: &Path) -> Result<()> {
        let mut ctr = self.ctr();
        ctr.args(["images", "import"]).arg(archive);
        run_logged(&mut ctr, &self.log_dir().join("import.log"))
    }

    /// `ctr` in the namespace of Kubernetes' containers.
    pub fn ctr(&self) -> Command {
        let mut ctr = self.inside("ctr");
        ctr.args(["-a", CONTAINERD_SOCKET, "-n", "k8s.io"]);
        ctr
    }

    /// Sends SIGKILL to the main process of a pod's container, as a crash would.
    pub fn kill_container(&self, namespace: &str, pod: &str, container: &str) -> Result<()> {
        run(self.ctr().args(["tasks", "kill", "--signal", "SIGKILL", &self.container(namespace, pod, container)?]))
    }

    /// The main process of a pod's container, as this machine numbers it: for `/proc`, or a signal.
    pub fn container_pid(&self, namespace: &str, pod: &str, container: &str) -> Result<u32> {
        let id = self.container(namespace, pod, container)?;
        let tasks = output(self.ctr().args(["tasks", "list"]))?;
        let inner = tasks.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some(&id)).then(|| words.next()?.parse::<u32>().ok()).flatten()
        });
        let inner = inner.with_context(|| format!("the container {container} of {namespace}/{pod} has no process"))?;
        self.outer_pid(inner)
    }

    /// The id of a pod's newest container of this name.
    pub fn container(&self, namespace: &str, pod: &str, container: &str) -> Result<String> {
        let labels = [("pod.namespace", namespace), ("pod.name", pod), ("container.name", container)];
        let filter = labels.map(|(key, value)| format!("labels.\"io.kubernetes.{key}\"=={value}")).join(",");
        let ids = output(self.ctr().args(["tasks", "list", "--quiet"]))?;
        let known = output(self.ctr().args(["containers", "list", "--quiet", &filter]))?;
        // A container that was restarted stays listed; the one with a process is meant.
        let mut known = known.lines();
        let id = known.find(|id| ids.lines().any(|running| running == *id));
        Ok(id.with_context(|| format!("no container {container} runs in the pod {namespace}/{pod}"))?.to_owned())
    }

    /// The number on this machine of a process that has the number `inner` inside the cluster.
    fn outer_pid(&self, inner: u32) -> Result<u32> {
        let namespace = fs::read_link(format!("/proc/{}/ns/pid_for_children", self.unshare))?;
        let (mut found, inner) = (None, inner.to_string());
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            // A process may end while it is looked at.
            let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
            // One number for each nested namespace, from this machine's inwards; the cluster's is the second.
            if numbers.split_whitespace().nth(1) == Some(&inner) && self.belongs(pid, &namespace) {
                found = Some(pid);
            }
        }
        found.with_context(|| format!("the process {inner} of the cluster has ended"))
    }

    /// Whether a process lives in the cluster's PID namespace or in one below it.
    fn belongs(&self, pid: u32, namespace: &Path) -> bool {
        let mut current = pid;
        while current > 1 {
            if current == self.init || fs::read_link(format!("/proc/{current}/ns/pid")).is_ok_and(|link| link == namespace) {
                return true;
            }
            let Ok(stat) = fs::read_to_string(format!("/proc/{current}/status")) else { return false };
            let parent = stat.lines().find_map(|line| line.strip_prefix("PPid:")).and_then(|text| text.trim().parse().ok());
            let Some(parent) = parent else { return false };
            current = parent;
        }
        false
    }

    /// Shuts Postgres down as its administrator would, dropping its clients.
    pub fn stop_postgres(&self) -> Result<()> {
        self.ask(&Request::Stop { component: "postgres".to_owned() })
    }

    /// Starts Postgres again and waits until it takes connections.
    pub fn start_postgres(&self) -> Result<()> {
        self.ask(&Request::Start { component: "postgres".to_owned() })
    }

    pub fn restart_postgres(&self) -> Result<()> {
        self.stop_postgres()?;
        self.start_postgres()
    }

    /// Starts a component (`kubelet`, `kube-apiserver` …) that was stopped or killed.
    pub fn start_component(&self, name: &str) -> Result<()> {
        self.ask(&Request::Start { component: name.to_owned() })
    }

    /// Ends a component by SIGTERM and waits for its end.
    pub fn stop_component(&self, name: &str) -> Result<()> {
        self.ask(&Request::Stop { component: name.to_owned() })
    }

    /// Ends a component by SIGKILL.
    pub fn kill_component(&self, name: &str) -> Result<()> {
        self.ask(&Request::Kill { component: name.to_owned() })
    }

    fn ask(&self, request: &Request) -> Result<()> {
        let stream = UnixStream::connect(self.spec.control()).context("the cluster's supervisor is gone")?;
        writeln!(&stream, "{}", serde_json::to_string(request)?)?;
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line)?;
        match serde_json::from_str::<Answer>(&line).context("the cluster's supervisor ended")?.error {
            None => Ok(()),
            Some(error) => bail!("{request:?}: {error}"),
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.lifeline.take());
        if let Err(error) = self.keeper.wait() {
            eprintln!("the cluster's keeper can't be waited for: {error}");
        }
    }
}

/// Reads the keeper's events to their end: the first decides the start, later ones are shown.
fn watch(events: impl BufRead, ready: &Sender<Event>) {
    let mut decided = false;
    for line in events.lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Event::Ended { component, message }) => eprintln!("the cluster's {component}: {message}"),
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
