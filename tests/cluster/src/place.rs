//! Where a demo runs: on a cluster of its own, or on the one of the user's kubeconfig, after asking.

use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::buildah::Builder;
use crate::cache::Inputs;
use crate::cluster::{Cluster, Options};
use crate::command::output;
use crate::images::{Built, Image, REGISTRY, TAG};
use crate::install::{Install, NAMESPACE};
use crate::kube::Kube;
use crate::phase::{note, phase};

/// The value of REGISTRY that says: the nodes have the images already.
const PRESENT: &str = "present";

/// A cluster to install on.
#[derive(Debug)]
pub struct Place {
    pub kube: Kube,
    pub install: Install,
    /// The cluster, if it is ours; it ends with this value.
    pub own: Option<Cluster>,
}

/// What the user said about a cluster of theirs.
#[derive(Debug, Default)]
pub struct Current {
    pub registry: Option<String>,
    pub database_url: Option<String>,
}

impl Place {
    /// Starts a cluster with the images imported.
    pub fn own(images: &[Built], namespaces: &[&str]) -> Result<Self> {
        let archives = images.iter().map(|built| built.archive.clone()).collect();
        let options = Options {
            state: None,
            gvisor: true,
            postgres: true,
            images: archives,
        };
        let cluster = phase("starting the cluster, with Postgres beside it", || {
            Cluster::start(options)
        })?;
        let install = Install::imported(cluster.database_url()?, namespaces);
        Ok(Self {
            kube: cluster.kube()?,
            install,
            own: Some(cluster),
        })
    }

    /// Asks, and then brings the images to where the user's cluster finds them.
    pub fn current(current: Current, images: &[Built], namespaces: &[&str]) -> Result<Self> {
        let kube = Kube::current()?;
        let (registry, database_url) = current.complete()?;
        ask(&kube, &registry, namespaces)?;
        let mut install = Install::imported(database_url, namespaces);
        if registry != PRESENT {
            let mut all = Inputs::new();
            for built in images {
                all.add_path(built.image.repository(), &built.archive)?;
            }
            // A tag of its own for each content, since nodes don't pull a tag again that they have.
            install.tag = format!("demo-{}", all.digest());
            install.registry = registry;
            publish(images, &install)?;
        }
        Ok(Self {
            kube,
            install,
            own: None,
        })
    }

    /// A manifest of the examples with the images' names of this place.
    pub fn localized(&self, file: &Path) -> Result<String> {
        let mut text = std::fs::read_to_string(file)
            .with_context(|| format!("can't read {}", file.display()))?;
        for image in Image::ALL {
            let here = format!(
                "{}/{}:{}",
                self.install.registry,
                image.repository(),
                self.install.tag
            );
            text = text.replace(&image.reference(), &here);
        }
        Ok(text)
    }
}

impl Current {
    /// What a cluster of the user's needs from them.
    fn complete(self) -> Result<(String, String)> {
        let registry = self.registry.filter(|text| !text.is_empty());
        let database_url = self.database_url.filter(|text| !text.is_empty());
        let (Some(registry), Some(database_url)) = (registry, database_url) else {
            bail!(
                "CLUSTER=current needs both of these:\n  \
                 REGISTRY=HOST/PATH    a registry that you may push to and the cluster's nodes may pull from\n  \
                 {:21} (or REGISTRY={PRESENT}, if the nodes have {REGISTRY}/replayfork/*:{TAG} already)\n  \
                 DATABASE_URL=postgres://USER:PASSWORD@HOST:5432/DATABASE    an empty database that the cluster's pods reach",
                ""
            );
        };
        Ok((registry.trim_end_matches('/').to_owned(), database_url))
    }
}

/// Tells what will be done to which cluster, and goes on only after a yes.
fn ask(kube: &Kube, registry: &str, namespaces: &[&str]) -> Result<()> {
    let context = output(&mut kube.kubectl(["config", "current-context"]))
        .context("there is no current kubeconfig context")?;
    let server = output(&mut kube.kubectl([
        "config",
        "view",
        "--minify",
        "-o",
        "jsonpath={.clusters[0].cluster.server}",
    ]))?;
    println!(
        "This uses your cluster {} at {server}. It will",
        context.trim()
    );
    if registry != PRESENT {
        println!("  push five images to {registry}/replayfork/…");
    }
    println!(
        "  make the namespaces {NAMESPACE} and {}, unless they exist,",
        namespaces.join(", ")
    );
    println!(
        "  install the chart (a ReplayFork definition, roles, two Deployments) in {NAMESPACE},"
    );
    println!(
        "  and run the example agent and a fork of its run in {}.",
        namespaces.join(", ")
    );
    println!("It stays there afterwards; `helm uninstall replayfork -n {NAMESPACE}` removes it.");
    print!("Go on? [y/N] ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    ensure!(
        matches!(answer.trim(), "y" | "Y" | "yes"),
        "not confirmed, so nothing was done"
    );
    Ok(())
}

fn publish(images: &[Built], install: &Install) -> Result<()> {
    let builder = Builder::new()?;
    for built in images {
        let name = format!(
            "{}/{}:{}",
            install.registry,
            built.image.repository(),
            install.tag
        );
        phase(&format!("pushing {name}"), || {
            builder.publish(&built.archive, &built.image.reference(), &name)
        })?;
    }
    note("the images are pushed; the nodes pull them from there");
    Ok(())
}
