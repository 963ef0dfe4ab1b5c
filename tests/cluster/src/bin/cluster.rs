//! `cluster`: what the Makefile calls to build the cluster's parts and to run a cluster.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use replayfork_test_cluster::parts::Part;
use replayfork_test_cluster::phase::phase;
use replayfork_test_cluster::{Cluster, Options, interrupt};

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
        Verb::Up { state, gvisor, image } => up(Options { state, gvisor, postgres: true, images: image }),
    }
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
