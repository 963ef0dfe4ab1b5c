//! What a cluster is to be, handed from the process that wants it to those that run it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::addresses::Addresses;

/// The first argument by which a program that uses this crate is started again as one of the cluster's own processes.
pub(crate) const ROLE: &str = "--replayfork-test-cluster";

/// One cluster, settled but for its addresses, which the keeper claims.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Spec {
    /// The folder of everything that this cluster writes.
    pub state: PathBuf,
    /// Whether the folder goes away with the cluster.
    pub remove_state: bool,
    pub addresses: Option<Addresses>,
    pub parts: Parts,
    pub pause: PathBuf,
    /// OCI archives to import before the node is used.
    pub images: Vec<PathBuf>,
    pub postgres: Option<Database>,
}

/// Folders of binaries.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Parts {
    pub kube: PathBuf,
    pub containerd: PathBuf,
    pub coredns: PathBuf,
    pub kube_router: PathBuf,
    pub gvisor: Option<PathBuf>,
}

/// The database that the product gets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Database {
    /// Folder of `initdb` and `postgres`.
    pub bin: PathBuf,
    /// Of the user `replayfork`, who owns the database `replayfork`.
    pub password: String,
}

impl Spec {
    pub fn file(state: &Path) -> PathBuf {
        state.join("spec.json")
    }

    pub fn read(state: &Path) -> Result<Self> {
        let file = Self::file(state);
        let text = fs::read(&file).with_context(|| format!("can't read {}", file.display()))?;
        Ok(serde_json::from_slice(&text)?)
    }

    pub fn write(&self) -> Result<()> {
        use std::io::Write;
        use std::os::unix::fs::OpenOptionsExt;
        let path = Self::file(&self.state);
        // The database's password is in it.
        let mut options = fs::OpenOptions::new();
        options.create(true).write(true).truncate(true).mode(0o600);
        let mut file = options.open(&path).with_context(|| format!("can't write {}", path.display()))?;
        Ok(file.write_all(&serde_json::to_vec_pretty(self)?)?)
    }

    pub fn addresses(&self) -> Addresses {
        self.addresses.expect("the keeper settles the addresses before anything else runs")
    }

    pub fn pki(&self) -> PathBuf {
        self.state.join("pki")
    }

    pub fn run(&self) -> PathBuf {
        self.state.join("run")
    }

    pub fn log(&self) -> PathBuf {
        self.state.join("log")
    }

    /// Where the supervisor takes requests.
    pub fn control(&self) -> PathBuf {
        self.state.join("control.sock")
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.pki().join("admin.kubeconfig")
    }

    /// All folders of binaries, for PATH.
    pub fn bins(&self) -> Vec<PathBuf> {
        let parts = &self.parts;
        let mut bins = vec![parts.kube.clone(), parts.containerd.clone(), parts.coredns.clone(), parts.kube_router.clone()];
        bins.extend(parts.gvisor.clone());
        bins
    }

    /// PATH with the cluster's binaries first, and the folders where Debian keeps what only root uses.
    pub fn path(&self) -> String {
        let mut path: Vec<String> = self.bins().iter().map(|bin| bin.display().to_string()).collect();
        path.extend(std::env::var("PATH"));
        path.push("/usr/sbin:/sbin".to_owned());
        path.join(":")
    }
}

/// What the processes of a cluster tell the one that wanted it, one JSON object a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// The private namespaces exist; their first process waits for the network.
    Entered,
    /// Everything answers.
    Ready,
    /// It can't start. The message holds the end of the log of what failed.
    Failed { message: String },
    /// A component ended unasked.
    Ended { component: String, message: String },
}

impl Event {
    /// Tells it on standard output, which is a pipe to the process above.
    pub fn tell(&self) {
        use std::io::Write;
        let mut line = serde_json::to_string(self).expect("an event is plain JSON");
        line.push('\n');
        // A reader that is gone means that this process is about to end too.
        let _ = std::io::stdout().write_all(line.as_bytes());
    }
}
