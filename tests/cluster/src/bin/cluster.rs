//! `cluster`: what the Makefile calls to build the cluster's parts, to run a cluster, and for the demo.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};
use replayfork_test_cluster::demo::{self, End, Wish};
use replayfork_test_cluster::images::{self, Image};
use replayfork_test_cluster::install::{Install, NAMESPACE};
use replayfork_test_cluster::packages::{self, Purpose};
use replayfork_test_cluster::parts::Part;
use replayfork_test_cluster::phase::phase;
use replayfork_test_cluster::place::Place;
use replayfork_test_cluster::product::{Product, Profile};
use replayfork_test_cluster::{Cluster, Options, command, interrupt, traces, workspace};

#[derive(Parser)]
#[command(about = "A real Kubernetes on this machine, for tests and demo")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Install the Debian packages that are needed, or say which.
    Packages {
        #[arg(value_enum, default_value = "cluster")]
        purpose: Purpose,
    },
    /// Build the Go parts into the cache.
    Parts {
        /// Only these.
        #[arg(long, value_delimiter = ',')]
        only: Vec<Part>,
    },
    /// Build the product: Rust workspace, static executor, viewer.
    Build {
        /// Optimized, for benches.
        #[arg(long)]
        release: bool,
    },
    /// Install the viewer's npm packages, if they changed.
    ViewerPackages,
    /// Build the images.
    Images,
    /// Run a cluster until Ctrl-C.
    Up {
        /// The folder for everything it writes; must be absent, is removed afterwards.
        #[arg(long)]
        state: Option<PathBuf>,
        /// With the RuntimeClass `gvisor`.
        #[arg(long)]
        gvisor: bool,
        /// With the images, and the chart set up for these namespaces.
        #[arg(long, value_delimiter = ',')]
        install: Vec<String>,
        /// Further OCI archives to import.
        #[arg(long)]
        image: Vec<PathBuf>,
        #[command(flatten)]
        source: Source,
    },
    /// Build, import the images into a running cluster, and restart the product there.
    Reload {
        /// That cluster's folder.
        #[arg(long)]
        state: PathBuf,
        #[command(flatten)]
        source: Source,
    },
    /// A shell on a fresh cluster with the chart installed.
    Shell,
    /// In a fresh clone, demo and test twice each; fails if anything is left on the machine.
    TestClean,
    /// From nothing to a fork and its diff.
    Demo {
        #[arg(long, env = "CLUSTER", value_enum, default_value = "own")]
        cluster: Where,
        #[arg(long, env = "REGISTRY")]
        registry: Option<String>,
        #[arg(long, env = "DATABASE_URL", hide_env_values = true)]
        database_url: Option<String>,
        /// 1: end after the last step.
        #[arg(long, env = "ONCE")]
        once: Option<String>,
    },
}

/// Which programs go into the images.
#[derive(Args)]
struct Source {
    /// Those that are in target/debug now, without building.
    #[arg(long)]
    as_built: bool,
}

impl Source {
    fn product(&self, project: &Path) -> Result<Product> {
        if self.as_built { Product::as_built(project) } else { Product::build(project, Profile::Dev) }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Where {
    Own,
    Current,
}

fn main() -> ExitCode {
    if let Some(code) = replayfork_test_cluster::take_role() {
        return code;
    }
    let arguments = Arguments::parse();
    match interrupt::install().and_then(|()| carry_out(arguments.verb)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\n{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn carry_out(verb: Verb) -> Result<()> {
    let project = workspace::project();
    match verb {
        Verb::Packages { purpose } => packages::ensure(purpose),
        Verb::Parts { only } => {
            let parts = if only.is_empty() { Part::ALL.to_vec() } else { only };
            parts.into_iter().try_for_each(|part| part.build().map(drop))
        }
        Verb::Build { release } => Product::build(&project, if release { Profile::Release } else { Profile::Dev }).map(drop),
        Verb::ViewerPackages => workspace::install_viewer_packages(&project),
        Verb::TestClean => traces::check(&project),
        Verb::Images => {
            for built in images::build(&project, &Product::build(&project, Profile::Dev)?)? {
                println!("{} {}", built.image.reference(), built.archive.display());
            }
            Ok(())
        }
        Verb::Up { state, gvisor, install, image, source } => up(state, gvisor, &install, image, source),
        Verb::Reload { state, source } => {
            let cluster = replayfork_test_cluster::Attached::to(&state)?;
            for built in images::build(&project, &source.product(&project)?)? {
                cluster.import_image(&built.archive)?;
            }
            let kube = cluster.kube()?;
            let deployments = ["deployment/replayfork-api-server", "deployment/replayfork-operator"];
            command::run(kube.kubectl(["rollout", "restart", "-n", NAMESPACE]).args(deployments))?;
            deployments.iter().try_for_each(|name| command::run(&mut kube.kubectl(["rollout", "status", "-n", NAMESPACE, name])))
        }
        Verb::Shell => shell(),
        Verb::Demo { cluster, registry, database_url, once } => {
            let wish = match cluster {
                Where::Own => Wish::Own,
                Where::Current => Wish::Current { registry, database_url },
            };
            let once = once.is_some_and(|text| !matches!(text.as_str(), "" | "0"));
            demo::run_demo(wish, if once { End::Once } else { End::OnInterrupt })
        }
    }
}

fn up(state: Option<PathBuf>, gvisor: bool, namespaces: &[String], mut images: Vec<PathBuf>, source: Source) -> Result<()> {
    let project = workspace::project();
    let product = if namespaces.is_empty() { None } else { Some(source.product(&project)?) };
    if let Some(product) = &product {
        images.extend(images::build(&project, product)?.into_iter().map(|built| built.archive));
    }
    let options = Options { state, gvisor, postgres: true, images };
    let cluster = phase("starting the cluster", || Cluster::start(options))?;
    let mut kube = cluster.kube()?;
    if let Some(product) = &product {
        kube = kube.with(product);
        let namespaces: Vec<_> = namespaces.iter().map(String::as_str).collect();
        let install = Install::imported(cluster.database_url()?, &namespaces);
        phase("installing the chart", || install.run(&kube, &project))?;
    }
    println!("export KUBECONFIG={}", cluster.kubeconfig().display());
    println!("export PATH={}", kube.path());
    println!("export DATABASE_URL={}", cluster.database_url()?);
    println!("# logs: {}; Ctrl-C ends it", cluster.log_dir().display());
    while !interrupt::asked() {
        ensure!(!cluster.ended(), "the cluster has ended by itself");
        std::thread::sleep(interrupt::SLICE);
    }
    phase("taking the cluster down", || {
        drop(cluster);
        Ok(())
    })
}

fn shell() -> Result<()> {
    let project = workspace::project();
    packages::ensure(Purpose::Cluster)?;
    Part::ALL.into_iter().try_for_each(|part| part.build().map(drop))?;
    let product = Product::build(&project, Profile::Dev)?;
    let images = images::build(&project, &product)?;
    let place = Place::own(&product, &images, &["agents"])?;
    phase("installing the chart", || place.install.run(&place.kube, &project))?;
    let cluster = place.own.as_ref().context("it is our own")?;
    println!("A shell on a fresh cluster. Try: kubectl get pods -A; kubectl replay runs -n agents");
    println!("Images by their names here: {}", Image::ALL.map(Image::reference).join(" "));
    println!("It is gone when you leave the shell.");
    let mut shell = Command::new(std::env::var_os("SHELL").unwrap_or_else(|| "/bin/sh".into()));
    shell.env("KUBECONFIG", cluster.kubeconfig()).env("PATH", place.kube.path()).env("DATABASE_URL", cluster.database_url()?);
    // The shell's own last status says nothing about the cluster.
    shell.status().context("can't start the shell")?;
    // Ctrl-C in the shell reached this process too, and meant the shell.
    interrupt::forget();
    phase("taking the cluster down", || {
        drop(place);
        Ok(())
    })
}
