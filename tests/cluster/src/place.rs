//! Where a demo runs: on a cluster of its own, or on the one of the user's kubeconfig, after asking.

use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::buildah::Builder;
use crate::cache::Inputs;
use crate::cluster::{Cluster, Options};
use crate::command::output;
use crate::images::{Built, Image, REGISTRY, TAG};
use crate::install::{Install, NAMESPACE};
use crate::interrupt;
use crate::kube::Kube;
use crate::phase::{note, phase};
use crate::product::Product;

/// The value of REGISTRY that says: the nodes have the images already.
const PRESENT: &str = "present";

/// How long a rollout may take on nodes that pull the images first.
const PULLING: Duration = Duration::from_secs(300);

/// A cluster to install on.
#[derive(Debug)]
pub struct Place {
    pub kube: Kube,
    pub install: Install,
    /// The cluster, if it is ours; it ends with this value.
    pub own: Option<Cluster>,
}

/// What the user's own cluster needs from them, complete and confirmed.
#[derive(Debug)]
pub struct Current {
    kube: Kube,
    registry: String,
    database_url: String,
}

impl Place {
    /// Starts a cluster with the images imported.
    pub fn own(product: &Product, images: &[Built], namespaces: &[&str]) -> Result<Self> {
        let archives = images.iter().map(|built| built.archive.clone()).collect();
        let options = Options { state: None, gvisor: true, postgres: true, images: archives };
        let cluster = phase("starting the cluster, with Postgres beside it", || Cluster::start(options))?;
        let install = Install::imported(cluster.database_url()?, namespaces);
        Ok(Self { kube: cluster.kube()?.with(product), install, own: Some(cluster) })
    }

    /// Brings the images to where the user's cluster finds them.
    pub fn current(current: Current, product: &Product, images: &[Built], namespaces: &[&str]) -> Result<Self> {
        let Current { kube, registry, database_url } = current;
        let mut install = Install::imported(database_url, namespaces);
        if registry != PRESENT {
            let mut all = Inputs::new();
            for built in images {
                all.add_path(built.image.repository(), &built.archive)?;
            }
            // A tag of its own for each content, since nodes don't pull a tag again that they have.
            install.tag = format!("demo-{}", all.digest());
            install.registry = registry;
            install.rollout = PULLING;
            publish(images, &install)?;
        }
        Ok(Self { kube: kube.with(product), install, own: None })
    }

    /// A manifest of the examples with the images' names of this place.
    pub fn localized(&self, file: &Path) -> Result<String> {
        let mut text = std::fs::read_to_string(file).with_context(|| format!("can't read {}", file.display()))?;
        for image in Image::ALL {
            let here = format!("{}/{}:{}", self.install.registry, image.repository(), self.install.tag);
            text = text.replace(&image.reference(), &here);
        }
        Ok(text)
    }
}

impl Current {
    /// Checks what the user gave, tells what will be done to which cluster, and asks whether it may be.
    pub fn confirm(registry: Option<String>, database_url: Option<String>, namespaces: &[&str]) -> Result<Self> {
        let registry = registry.filter(|text| !text.is_empty());
        let database_url = database_url.filter(|text| !text.is_empty());
        let mut missing = Vec::new();
        if registry.is_none() {
            missing.push(format!(
                "  REGISTRY=HOST/PATH\n      a registry that you may push to and the cluster's nodes may pull from; or\n      \
                 REGISTRY={PRESENT}, if the nodes have {REGISTRY}/replayfork/*:{TAG} already"
            ));
        }
        if database_url.is_none() {
            missing.push(
                "  DATABASE_URL=postgres://USER:PASSWORD@HOST:5432/DATABASE\n      an empty database that the cluster's pods reach"
                    .to_owned(),
            );
        }
        let (Some(registry), Some(database_url)) = (registry, database_url) else {
            bail!("CLUSTER=current needs besides:\n{}", missing.join("\n"));
        };
        let registry = registry.trim_end_matches('/').to_owned();
        let kube = Kube::current()?;
        ask(&kube, &registry, namespaces)?;
        Ok(Self { kube, registry, database_url })
    }
}

/// Tells what will be done to which cluster, and goes on only after a yes.
fn ask(kube: &Kube, registry: &str, namespaces: &[&str]) -> Result<()> {
    let context = output(&mut kube.kubectl(["config", "current-context"])).context("there is no current kubeconfig context")?;
    let server = output(&mut kube.kubectl(["config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}"]))?;
    println!("This uses your cluster {} at {server}. It will", context.trim());
    if registry != PRESENT {
        println!("  push five images to {registry}/replayfork/…");
    }
    println!("  make the namespaces {NAMESPACE} and {}, unless they exist,", namespaces.join(", "));
    println!("  install the chart (a ReplayFork definition, roles, two Deployments) in {NAMESPACE},");
    println!("  and run the example agent and a fork of its run in {}.", namespaces.join(", "));
    println!("It stays there afterwards; `helm uninstall replayfork -n {NAMESPACE}` removes it.");
    print!("Go on? [y/N] ");
    std::io::stdout().flush()?;
    let answer = read_answer()?;
    ensure!(matches!(answer.trim(), "y" | "Y" | "yes"), "not confirmed, so nothing was done");
    Ok(())
}

/// A line of standard input, or an error when the user interrupts instead.
fn read_answer() -> Result<String> {
    let (read, answer) = mpsc::channel();
    // A read can't be interrupted, so it waits in a thread that ends with the process.
    std::thread::spawn(move || {
        let mut line = String::new();
        let _ = read.send(std::io::stdin().lock().read_line(&mut line).map(|_| line));
    });
    loop {
        interrupt::check()?;
        match answer.recv_timeout(interrupt::SLICE) {
            Ok(line) => return Ok(line?),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("standard input can't be read"),
        }
    }
}

fn publish(images: &[Built], install: &Install) -> Result<()> {
    let builder = Builder::new()?;
    for built in images {
        let name = format!("{}/{}:{}", install.registry, built.image.repository(), install.tag);
        phase(&format!("pushing {name}"), || builder.publish(&built.archive, &built.image.reference(), &name))?;
    }
    note("the images are pushed; the nodes pull them from there");
    Ok(())
}
