//! `cluster`: what the Makefile calls to build the cluster's parts and to run a cluster.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use replayfork_test_cluster::parts::Part;
use replayfork_test_cluster::phase::phase;
use replayfork_test_cluster::{Cluster, Options, images, interrupt};

#[derive(Parser)]
#[command(about = "A real Kubernetes on this machine, for tests and demo")]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Build the Go parts into the cache.
    Parts {
        /// Only these.
        #[arg(long, value_delimiter = ',')]
        only: Vec<Part>,
    },
    /// Build the images from what cargo built in target/debug.
    Images {
        /// Another clone than the one this program was built in.
        #[arg(long)]
        project: Option<PathBuf>,
    },
    /// Run a bare cluster until Ctrl-C.
    Up {
        /// The folder for everything it writes; must be absent, is removed afterwards.
        #[arg(long)]
        state: Option<PathBuf>,
        /// With the RuntimeClass `gvisor`.
        #[arg(long)]
        gvisor: bool,
        /// OCI archives to import.
        #[arg(long)]
        image: Vec<PathBuf>,
    },
}

fn main() -> ExitCode {
    if let Some(code) = replayfork_test_cluster::take_role() {
        return code;
    }
    let arguments = Arguments::parse();
    match interrupt::install().and_then(|()| carry_out(arguments.verb)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn carry_out(verb: Verb) -> Result<()> {
    match verb {
        Verb::Parts { only } => {
            let parts = if only.is_empty() { Part::ALL.to_vec() } else { only };
            parts.into_iter().try_for_each(|part| part.build().map(drop))
        }
        Verb::Images { project: other } => {
            for built in images::build(&other.unwrap_or_else(project))? {
                println!("{} {}", built.image.reference(), built.archive.display());
            }
            Ok(())
        }
        Verb::Up { state, gvisor, image } => up(Options { state, gvisor, postgres: true, images: image }),
    }
}

/// The clone that this program was built in.
fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn up(options: Options) -> Result<()> {
    let cluster = phase("starting the cluster", || Cluster::start(options))?;
    println!("export KUBECONFIG={}", cluster.kubeconfig().display());
    println!("export PATH={}", cluster.path());
    println!("export DATABASE_URL={}", cluster.database_url()?);
    println!("# logs: {}; Ctrl-C ends it", cluster.log_dir().display());
    interrupt::wait();
    phase("taking the cluster down", || {
        drop(cluster);
        Ok(())
    })
}
