//! The product on a cluster of its own.

use std::ops::Deref;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Pod, Service};
use kube::api::{Api, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, ResourceExt};
use replayfork_test_cluster::command::{output, run};
use replayfork_test_cluster::images::{self, Built};
use replayfork_test_cluster::install::{Install, NAMESPACE};
use replayfork_test_cluster::kube::Kube;
use replayfork_test_cluster::phase::phase;
use replayfork_test_cluster::product::{Product, Profile};
use replayfork_test_cluster::{Attached, Cluster, Options, workspace};
use serde_json::json;

use crate::until;

/// How long a part of the product may take to be up again.
const RECOVERY: Duration = Duration::from_secs(120);

/// The cluster, the product on it, and the ways to talk to both. Taken down with the value.
pub struct World {
    cluster: Cluster,
    pub kube: Kube,
    pub client: Client,
    pub project: PathBuf,
    pub images: Vec<Built>,
    /// How the chart was installed.
    pub install: Install,
    runtime: tokio::runtime::Runtime,
}

impl Deref for World {
    type Target = Attached;

    fn deref(&self) -> &Attached {
        &self.cluster
    }
}

impl World {
    /// Builds what is missing, starts a cluster and installs the chart for these namespaces.
    ///
    /// # Errors
    /// What could not be built, started or installed.
    pub fn start(namespaces: &[&str], profile: Profile) -> Result<Self> {
        let project = workspace::project();
        let product = Product::build(&project, profile)?;
        let images = images::build(&project, &product)?;
        let archives = images.iter().map(|built| built.archive.clone()).collect();
        let cluster = Cluster::start(Options { gvisor: true, postgres: true, images: archives, state: None })?;
        let kube = cluster.kube()?.with(&product);
        // Blobs are collected all the time, so that whoever relies on one that nothing names yet is found out.
        let values = json!({"blobs": {"collectIntervalSeconds": 1}});
        let install = Install { values, ..Install::imported(cluster.database_url()?, namespaces) };
        phase("installing the chart", || install.run(&kube, &project))?;
        // Fails only where another part of this program was first.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let kubeconfig = Kubeconfig::read_from(cluster.kubeconfig())?;
        let client = runtime.block_on(async {
            let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
            anyhow::Ok(Client::try_from(config)?)
        })?;
        Ok(Self { cluster, kube, client, project, images, install, runtime })
    }

    /// Installs the chart in another way.
    ///
    /// # Errors
    /// It does not become ready.
    pub fn reinstall(&self, install: &Install) -> Result<()> {
        install.run(&self.kube, &self.project)
    }

    /// Waits for an answer of the Kubernetes API.
    pub fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// What the product's database says, as `psql` prints it.
    ///
    /// # Errors
    /// What Postgres says.
    pub fn sql(&self, query: &str) -> Result<String> {
        let said = output(Command::new("psql").args(["-qAt", "-v", "ON_ERROR_STOP=1", "-c", query, &self.database_url()?]))?;
        Ok(said.trim().to_owned())
    }

    /// # Errors
    /// As [`World::sql`]; what it printed is no JSON.
    pub fn sql_json(&self, query: &str) -> Result<serde_json::Value> {
        let said = self.sql(query)?;
        serde_json::from_str(&said).with_context(|| format!("{query} gave {said}"))
    }

    /// Pods of one of the product's own parts.
    ///
    /// # Errors
    /// What the Kubernetes API says.
    pub fn parts(&self, component: &str) -> Result<Vec<Pod>> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), NAMESPACE);
        let of_part = ListParams::default().labels(&format!("app.kubernetes.io/component={component}"));
        Ok(self.wait(pods.list(&of_part))?.items)
    }

    /// The main process of the operator that works, as this machine numbers it.
    ///
    /// # Errors
    /// None works within two minutes.
    pub fn working_operator(&self) -> Result<u32> {
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), NAMESPACE);
        until("an operator works", RECOVERY, || {
            let lease = self.wait(leases.get_opt("replayfork-operator"))?;
            let holder = lease.and_then(|lease| lease.spec?.holder_identity).filter(|holder| !holder.is_empty());
            let Some(holder) = holder else { return Ok(None) };
            Ok(self.container_pid(NAMESPACE, &holder, "operator").ok())
        })
    }

    /// The Service's address, port 3210 and 3212.
    ///
    /// # Errors
    /// What the Kubernetes API says.
    pub fn api_address(&self) -> Result<String> {
        let services: Api<Service> = Api::namespaced(self.client.clone(), NAMESPACE);
        self.wait(services.get("replayfork-api"))?.spec.and_then(|spec| spec.cluster_ip).context("the Service has no address")
    }

    /// Says how many api-servers there are to be, and waits until it is so.
    ///
    /// # Errors
    /// It is not so within two minutes.
    pub fn scale_api_server(&self, replicas: i32) -> Result<()> {
        let name = "replayfork-api-server";
        run(&mut self.kube.kubectl(["scale", "deployment", name, "-n", NAMESPACE, &format!("--replicas={replicas}")]))?;
        let deployments: Api<Deployment> = Api::namespaced(self.client.clone(), NAMESPACE);
        until("the api-server is scaled", RECOVERY, || {
            let ready = self.wait(deployments.get(name))?.status.and_then(|s| s.ready_replicas).unwrap_or(0);
            Ok((ready == replicas && self.parts("api-server")?.len() == replicas as usize).then_some(()))
        })
    }

    /// What the product's own parts logged last about a namespace, and last of all.
    pub fn story(&self, namespace: &str) -> String {
        let mut story = String::new();
        for component in ["operator", "api-server"] {
            for pod in self.parts(component).unwrap_or_default() {
                let logs = output(&mut self.kube.kubectl(["logs", "-n", NAMESPACE, &pod.name_any(), "--tail=400"]));
                let logs = logs.unwrap_or_else(|e| format!("{e:#}"));
                let lines: Vec<_> = logs.lines().collect();
                let about = lines.iter().filter(|line| line.contains(&format!("\"{namespace}\"")) || line.contains("\"ERROR\""));
                let about: Vec<_> = about.map(|line| line.split(",\"span\":").next().unwrap_or(line)).collect();
                let (about, last) = (&about[about.len().saturating_sub(20)..], &lines[lines.len().saturating_sub(3)..]);
                story.push_str(&format!("— {}\n{}\n…\n{}\n", pod.name_any(), about.join("\n"), last.join("\n")));
            }
        }
        story
    }
}
