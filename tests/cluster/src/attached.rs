//! What can be done with a running cluster, by the program that started it or by another one.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::addresses::Addresses;
use crate::command::{run, run_logged};
use crate::components::CONTAINERD_SOCKET;
use crate::kube::Kube;
use crate::postgres;
use crate::spec::Spec;
use crate::supervisor::{Answer, Request};

/// A running cluster, as seen from this machine. It doesn't keep the cluster alive.
#[derive(Clone, Debug)]
pub struct Attached {
    pub(crate) spec: Spec,
    /// Has the cluster's network and mounts.
    pub(crate) unshare: u32,
    /// The first process of the cluster's PID namespace.
    pub(crate) init: u32,
}

impl Attached {
    /// Finds the cluster that writes to the folder `state`.
    pub fn to(state: &Path) -> Result<Self> {
        let spec = Spec::read(&state.canonicalize().with_context(|| format!("there is no cluster in {}", state.display()))?)?;
        let unshare: u32 = fs::read_to_string(spec.state.join("unshare.pid"))?.trim().parse()?;
        let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).context("the cluster has ended")?;
        let init = children.trim().parse().context("the cluster's first process has ended")?;
        Ok(Self { spec, unshare, init })
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

    /// `kubectl`, `kubectl replay` and `helm` as the administrator.
    pub fn kube(&self) -> Result<Kube> {
        Kube::new(self.kubeconfig(), &self.spec.bins())
    }

    /// Writes a file for a shell to `source`, after which its `kubectl` is this cluster's, and returns its path.
    pub fn write_env(&self, kube: &Kube) -> Result<PathBuf> {
        let file = self.state_dir().join("env");
        let kubeconfig = self.kubeconfig();
        let text = format!("export KUBECONFIG={}\nexport PATH={}\n", kubeconfig.display(), kube.path());
        fs::write(&file, text).with_context(|| format!("can't write {}", file.display()))?;
        Ok(file)
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
