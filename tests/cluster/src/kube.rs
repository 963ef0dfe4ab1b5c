//! `kubectl` and `helm` against one cluster: the tests' own, or the one of the user's kubeconfig.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::command::{feed, output};
use crate::interrupt;
use crate::parts::Part;
use crate::product::Product;

/// The clients of one cluster.
#[derive(Clone, Debug)]
pub struct Kube {
    /// Absent: what the user's own environment says.
    kubeconfig: Option<PathBuf>,
    kubectl: PathBuf,
    helm: PathBuf,
    path: String,
}

impl Kube {
    pub(crate) fn new(kubeconfig: PathBuf, bins: &[PathBuf]) -> Result<Self> {
        Self::of(Some(kubeconfig), bins)
    }

    /// The cluster that the user's kubeconfig names at the moment.
    pub fn current() -> Result<Self> {
        Self::of(None, &[])
    }

    fn of(kubeconfig: Option<PathBuf>, bins: &[PathBuf]) -> Result<Self> {
        let (kube, helm) = (Part::Kube.build()?, Part::Helm.build()?);
        let mut path: Vec<String> = bins.iter().map(|bin| bin.display().to_string()).collect();
        path.extend([helm.display().to_string(), kube.display().to_string()]);
        path.extend(std::env::var("PATH"));
        path.push("/usr/sbin:/sbin".to_owned());
        Ok(Self { kubeconfig, kubectl: kube.join("kubectl"), helm: helm.join("helm"), path: path.join(":") })
    }

    /// With `kubectl replay`, which kubectl finds in PATH.
    pub fn with(mut self, product: &Product) -> Self {
        self.path = format!("{}:{}", product.programs().display(), self.path);
        self
    }

    /// What PATH must be for `kubectl`, `kubectl replay` and `helm` to be found.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A command that talks to this cluster.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("PATH", &self.path);
        if let Some(kubeconfig) = &self.kubeconfig {
            command.env("KUBECONFIG", kubeconfig);
        }
        command
    }

    pub fn kubectl<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut kubectl = self.command(&self.kubectl);
        kubectl.args(arguments);
        kubectl
    }

    pub fn helm<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut helm = self.command(&self.helm);
        helm.args(arguments);
        helm
    }

    /// Applies manifests; their text never shows in a list of processes.
    pub fn apply(&self, manifests: &str) -> Result<String> {
        feed(&mut self.kubectl(["apply", "-f", "-"]), manifests)
    }

    /// Applies manifests that name no namespace of their own.
    pub fn apply_in(&self, namespace: &str, manifests: &str) -> Result<String> {
        feed(&mut self.kubectl(["apply", "-n", namespace, "-f", "-"]), manifests)
    }

    /// Makes a namespace that enforces the Pod Security Standard `restricted`, or leaves it as it is if it exists.
    pub fn restricted_namespace(&self, name: &str) -> Result<()> {
        if output(&mut self.kubectl(["get", "namespace", name, "--ignore-not-found", "-o", "name"]))?.trim().is_empty() {
            let labels = "{pod-security.kubernetes.io/enforce: restricted}";
            self.apply(&format!("{{apiVersion: v1, kind: Namespace, metadata: {{name: {name}, labels: {labels}}}}}"))?;
        }
        Ok(())
    }

    /// Asks `kubectl get … -o jsonpath` until the answer is one of `wanted`, and returns it.
    pub fn wait_for_value(&self, object: &[&str], path: &str, wanted: &[&str], limit: Duration) -> Result<String> {
        let until = Instant::now() + limit;
        loop {
            let mut get = self.kubectl(["get"]);
            get.args(object).args(["-o", &format!("jsonpath={path}")]);
            let value = output(&mut get)?;
            if wanted.contains(&value.trim()) {
                return Ok(value.trim().to_owned());
            }
            interrupt::check()?;
            if Instant::now() > until {
                bail!("{} is {:?} and not one of {wanted:?} after {} s", object.join(" "), value.trim(), limit.as_secs());
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}
