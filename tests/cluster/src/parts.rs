//! The parts of the cluster that are built from Go modules: Kubernetes, containerd, CoreDNS, kube-router, gVisor, Helm.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::cache::{self, Inputs};
use crate::command::run_logged;
use crate::phase::phase_with_log;

/// Changes when the recipes below change, so that what older ones built is not taken for the new.
const RECIPE: &str = "1";

/// The names that the one Kubernetes binary answers to.
const KUBE_NAMES: [&str; 7] = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"];

/// One Go module below `parts/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ValueEnum)]
pub enum Part {
    /// etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubelet, kube-proxy and kubectl.
    Kube,
    /// containerd, its runc shim, ctr, and the CNI plugins.
    Containerd,
    Coredns,
    /// NetworkPolicy enforcement.
    KubeRouter,
    /// runsc and its shim.
    Gvisor,
    Helm,
}

impl Part {
    /// What a cluster is made of, and Helm to install the chart.
    pub const ALL: [Self; 6] = [Self::Kube, Self::Containerd, Self::Coredns, Self::KubeRouter, Self::Gvisor, Self::Helm];

    fn name(self) -> &'static str {
        match self {
            Self::Kube => "kube",
            Self::Containerd => "containerd",
            Self::Coredns => "coredns",
            Self::KubeRouter => "kube-router",
            Self::Gvisor => "gvisor",
            Self::Helm => "helm",
        }
    }

    /// About how long a build takes on two idle cores, to be told before it starts.
    fn minutes(self) -> f32 {
        match self {
            Self::Kube => 7.0,
            Self::Containerd => 1.2,
            Self::Coredns | Self::Gvisor => 1.4,
            Self::KubeRouter => 2.0,
            Self::Helm => 2.5,
        }
    }

    /// The folder of the built binaries; builds them first if no clone has done so with the same sources.
    pub fn build(self) -> Result<PathBuf> {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("parts").join(self.name());
        let digest = Inputs::new().add("recipe", RECIPE).add_path("source", &source)?.digest();
        let log = cache::root()?.join("log").join(format!("part-{}.log", self.name()));
        cache::entry("parts", self.name(), &digest, |folder| {
            let _ = fs::remove_file(&log);
            let title = format!("building {} from its Go modules (about {} min)", self.name(), self.minutes());
            phase_with_log(&title, &log, || self.compile(&source, folder, &log))
        })
        .with_context(|| format!("the cluster's part {} could not be built", self.name()))
    }

    fn compile(self, source: &Path, into: &Path, log: &Path) -> Result<()> {
        match self {
            Self::Kube => {
                let version = kubernetes_version(source)?;
                let minor = version.split('.').nth(1).unwrap_or_default().to_owned();
                let set = [
                    format!("-X k8s.io/component-base/version.gitVersion={version}"),
                    format!("-X k8s.io/client-go/pkg/version.gitVersion={version}"),
                    "-X k8s.io/component-base/version.gitMajor=1".to_owned(),
                    format!("-X k8s.io/component-base/version.gitMinor={minor}"),
                ];
                go_build(source, &into.join("kube"), ".", &set.join(" "), log)?;
                for name in KUBE_NAMES {
                    std::os::unix::fs::symlink("kube", into.join(name))?;
                }
                Ok(())
            }
            Self::Coredns => go_build(source, &into.join("coredns"), ".", "", log),
            Self::Containerd | Self::KubeRouter | Self::Helm => go_build(source, into, "tool", "", log),
            Self::Gvisor => compile_gvisor(source, into, log),
        }
    }
}

/// gVisor's shim asks for the lowest oom_score_adj there is, which takes a capability that a sandboxed machine lacks; it
/// has no setting for it, so one number of a vendored copy is changed.
fn compile_gvisor(source: &Path, into: &Path, log: &Path) -> Result<()> {
    let work = tempfile::tempdir()?;
    for file in ["go.mod", "go.sum"] {
        fs::copy(source.join(file), work.path().join(file))?;
    }
    run_logged(Command::new("go").args(["mod", "vendor"]).current_dir(work.path()), log)?;
    let manager = work.path().join("vendor/gvisor.dev/gvisor/pkg/shim/v1/manager.go");
    let before = fs::read_to_string(&manager)?;
    let after = before.replace("oomScoreMax = -999", "oomScoreMax = 0");
    ensure!(before != after, "gVisor's shim no longer has the number that this build changes; look at {}", manager.display());
    fs::write(&manager, after)?;
    go_build(work.path(), into, "tool", "", log)?;
    fs::rename(into.join("shim"), into.join("containerd-shim-runsc-v1"))?;
    Ok(())
}

fn go_build(source: &Path, output: &Path, what: &str, set: &str, log: &Path) -> Result<()> {
    // `go build -o FOLDER` puts several binaries into it only if the name ends as a folder's does.
    let output = if output.is_dir() { output.join("") } else { output.to_owned() };
    let mut go = Command::new("go");
    go.args(["build", "-v", "-trimpath", "-ldflags", &format!("-s -w {set}"), "-o"]).arg(output).arg(what);
    run_logged(go.current_dir(source).env("CGO_ENABLED", "0").env("GOWORK", "off"), log)
}

/// The version that go.mod requires, which the binaries should report.
fn kubernetes_version(source: &Path) -> Result<String> {
    let text = fs::read_to_string(source.join("go.mod"))?;
    let version = text
        .lines()
        .map(str::trim)
        .find_map(|line| line.trim_start_matches("require ").strip_prefix("k8s.io/kubernetes ").map(|rest| rest.split_whitespace().next()));
    Ok(version.flatten().context("parts/kube/go.mod doesn't require k8s.io/kubernetes")?.to_owned())
}
