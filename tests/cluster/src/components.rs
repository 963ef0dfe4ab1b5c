//! The components of the cluster and how each is started.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::pki::NODE;
use crate::spec::Spec;

/// The image of the container that holds a pod's namespaces.
pub const PAUSE_IMAGE: &str = "replayfork.local/pause:1";

pub(crate) const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";

/// One process of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Component {
    Etcd,
    ApiServer,
    ControllerManager,
    Scheduler,
    Containerd,
    Kubelet,
    KubeProxy,
    Coredns,
    KubeRouter,
    Postgres,
}

impl Component {
    pub const ALL: [Self; 10] = [
        Self::Etcd,
        Self::ApiServer,
        Self::ControllerManager,
        Self::Scheduler,
        Self::Containerd,
        Self::Kubelet,
        Self::KubeProxy,
        Self::Coredns,
        Self::KubeRouter,
        Self::Postgres,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Containerd => "containerd",
            Self::Kubelet => "kubelet",
            Self::KubeProxy => "kube-proxy",
            Self::Coredns => "coredns",
            Self::KubeRouter => "kube-router",
            Self::Postgres => "postgres",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|component| component.name() == name)
    }

    pub fn log(self, spec: &Spec) -> PathBuf {
        spec.log().join(format!("{}.log", self.name()))
    }

    /// The command that runs the component in the foreground.
    pub fn command(self, spec: &Spec) -> Result<Command> {
        let (bin, arguments) = match self {
            Self::Etcd => (&spec.parts.kube, etcd(spec)),
            Self::ApiServer => (&spec.parts.kube, api_server(spec)),
            Self::ControllerManager => (&spec.parts.kube, controller_manager(spec)),
            Self::Scheduler => (&spec.parts.kube, scheduler(spec)),
            Self::Containerd => (&spec.parts.containerd, words(["-c", &shown(&spec.run().join("containerd.toml"))])),
            Self::Kubelet => (&spec.parts.kube, kubelet(spec)),
            Self::KubeProxy => (&spec.parts.kube, kube_proxy(spec)),
            Self::Coredns => (&spec.parts.coredns, words(["-conf", &shown(&spec.run().join("Corefile"))])),
            Self::KubeRouter => (&spec.parts.kube_router, kube_router(spec)),
            Self::Postgres => return crate::postgres::server(spec),
        };
        let mut command = Command::new(bin.join(self.name()));
        command.args(arguments).env("PATH", spec.path());
        Ok(command)
    }
}

fn etcd(spec: &Spec) -> Vec<String> {
    // The cluster never outlives its machine's power, so nothing is waited for on the disk.
    words(["-data-dir", &shown(&spec.run().join("etcd")), "-unsafe-no-fsync"])
}

fn api_server(spec: &Spec) -> Vec<String> {
    let addresses = spec.addresses();
    let pki = |file: &str| shown(&spec.pki().join(file));
    words([
        "--etcd-servers=http://127.0.0.1:2379",
        "--bind-address=0.0.0.0",
        &format!("--advertise-address={}", addresses.node_ip()),
        "--secure-port=6443",
        &format!("--tls-cert-file={}", pki("apiserver.crt")),
        &format!("--tls-private-key-file={}", pki("apiserver.key")),
        &format!("--client-ca-file={}", pki("ca.crt")),
        "--service-account-issuer=https://kubernetes.default.svc",
        &format!("--service-account-key-file={}", pki("sa.pub")),
        &format!("--service-account-signing-key-file={}", pki("sa.key")),
        &format!("--service-cluster-ip-range={}", addresses.service_cidr()),
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        &format!("--kubelet-client-certificate={}", pki("apikubelet.crt")),
        &format!("--kubelet-client-key={}", pki("apikubelet.key")),
        "--kubelet-preferred-address-types=InternalIP",
        &format!("--requestheader-client-ca-file={}", pki("ca.crt")),
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        &format!("--proxy-client-cert-file={}", pki("front.crt")),
        &format!("--proxy-client-key-file={}", pki("front.key")),
        "--enable-aggregator-routing=true",
        "--allow-privileged=true",
    ])
}

fn controller_manager(spec: &Spec) -> Vec<String> {
    let mut arguments = leaderless(&spec.pki().join("kcm.kubeconfig"));
    arguments.extend(words([
        &format!("--service-account-private-key-file={}", shown(&spec.pki().join("sa.key"))),
        &format!("--root-ca-file={}", shown(&spec.pki().join("ca.crt"))),
        "--use-service-account-credentials=true",
        "--allocate-node-cidrs=true",
        &format!("--cluster-cidr={}", spec.addresses().pod_cidr()),
        "--node-cidr-mask-size=24",
    ]));
    arguments
}

fn scheduler(spec: &Spec) -> Vec<String> {
    leaderless(&spec.pki().join("sched.kubeconfig"))
}

/// What the two controllers have in common: they are alone, so they elect no leader.
fn leaderless(kubeconfig: &Path) -> Vec<String> {
    let kubeconfig = shown(kubeconfig);
    words([
        &format!("--kubeconfig={kubeconfig}"),
        &format!("--authentication-kubeconfig={kubeconfig}"),
        &format!("--authorization-kubeconfig={kubeconfig}"),
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    ])
}

fn kubelet(spec: &Spec) -> Vec<String> {
    words([
        &format!("--config={}", shown(&spec.run().join("kubelet.yaml"))),
        &format!("--kubeconfig={}", shown(&spec.pki().join("kubelet.kubeconfig"))),
        &format!("--hostname-override={NODE}"),
        &format!("--node-ip={}", spec.addresses().node_ip()),
        &format!("--cert-dir={}", shown(&spec.run().join("kubelet-pki"))),
    ])
}

fn kube_proxy(spec: &Spec) -> Vec<String> {
    words([
        &format!("--kubeconfig={}", shown(&spec.pki().join("proxy.kubeconfig"))),
        "--proxy-mode=nftables",
        &format!("--hostname-override={NODE}"),
        &format!("--cluster-cidr={}", spec.addresses().pod_cidr()),
        &format!("--bind-address={}", spec.addresses().node_ip()),
        // Connection tracking limits are the whole machine's: left as they are.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0s",
        "--conntrack-tcp-timeout-close-wait=0s",
    ])
}

fn kube_router(spec: &Spec) -> Vec<String> {
    words([
        &format!("--kubeconfig={}", shown(&spec.kubeconfig())),
        "--run-router=false",
        "--run-service-proxy=false",
        "--run-firewall=true",
        &format!("--hostname-override={NODE}"),
        &format!("--service-cluster-ip-range={}", spec.addresses().service_cidr()),
        "--health-port=0",
    ])
}

fn words<const N: usize>(arguments: [&str; N]) -> Vec<String> {
    arguments.map(String::from).into()
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}
