//! Installs the project's chart, as a user would.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::command::feed;
use crate::images::{Image, REGISTRY, TAG};
use crate::interrupt;
use crate::kube::Kube;

/// The release's namespace, which is where clients look for the api-server by default.
pub const NAMESPACE: &str = "replayfork-system";

/// How long the rollout may take on a node that has the images; it takes a few seconds.
const ROLLOUT: Duration = Duration::from_secs(60);

/// How the chart is installed.
#[derive(Clone, Debug)]
pub struct Install {
    pub registry: String,
    pub tag: String,
    pub database_url: String,
    /// Who vouches for the database (PEM), if its URL says `sslmode=require`.
    pub database_ca: Option<String>,
    /// Namespaces to set up for recording; made if they don't exist.
    pub namespaces: Vec<String>,
    /// How long the rollout may take.
    pub rollout: Duration,
    /// Further values, over the others.
    pub values: Value,
}

impl Install {
    /// On a cluster that got the images by import.
    pub fn imported(database_url: String, namespaces: &[&str]) -> Self {
        Self {
            registry: REGISTRY.to_owned(),
            tag: TAG.to_owned(),
            database_url,
            database_ca: None,
            namespaces: namespaces.iter().copied().map(String::from).collect(),
            rollout: ROLLOUT,
            values: json!({}),
        }
    }

    /// Installs or upgrades the release and waits until every pod is ready.
    pub fn run(&self, kube: &Kube, project: &Path) -> Result<()> {
        for namespace in self.namespaces.iter().map(String::as_str).chain([NAMESPACE]) {
            kube.restricted_namespace(namespace)?;
        }
        let mut secret = json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "replayfork-database", "namespace": NAMESPACE},
            "stringData": {"url": self.database_url},
        });
        if let Some(ca) = &self.database_ca {
            secret["stringData"]["ca.crt"] = json!(ca);
        }
        kube.apply(&secret.to_string())?;

        let mut values = json!({
            "images": {"registry": self.registry, "tag": self.tag},
            "database": {"existingSecret": "replayfork-database"},
            "sandbox": {"defaultImage": format!("{}/{}:{}", self.registry, Image::ScriptedAgent.repository(), self.tag)},
            "namespaces": self.namespaces,
        });
        merge(&mut values, &self.values);
        // Helm keeps caches and settings of its own; a throw-away folder leaves the user's alone.
        let home = tempfile::tempdir()?;
        let mut helm = kube.helm(["upgrade", "--install", "replayfork"]);
        helm.arg(project.join("charts/replayfork"));
        helm.args(["--namespace", NAMESPACE, "--values", "-", "--wait", "--timeout", &format!("{}s", self.rollout.as_secs())]);
        for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
            helm.env(variable, home.path());
        }
        let installed = feed(&mut helm, &values.to_string()).map(drop);
        installed.map_err(|error| match troubles(kube) {
            Ok(troubles) if !interrupt::asked() => error.context(format!("the chart did not become ready; its pods:\n{troubles}")),
            _ => error,
        })
    }
}

/// The state of the release's pods, their latest events and the ends of their logs.
fn troubles(kube: &Kube) -> Result<String> {
    let show = |arguments: &[&str]| -> Result<String> {
        let mut kubectl: Command = kube.kubectl(["--namespace", NAMESPACE]);
        let done = kubectl.args(arguments).output().context("can't start kubectl")?;
        Ok(String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned())
    };
    let selector = "app.kubernetes.io/part-of=replayfork";
    Ok([
        show(&["get", "pods", "-o", "wide"])?,
        show(&["get", "events", "--field-selector", "type=Warning"])?,
        show(&["logs", "--selector", selector, "--prefix", "--tail=20"])?,
    ]
    .concat())
}

/// Puts `over` on top of `base`, object by object.
fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                merge(base.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (base, over) => *base = over.clone(),
    }
}
