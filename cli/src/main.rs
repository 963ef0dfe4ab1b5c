//! `kubectl replay`: runs, plans, diffs and the viewer, with whatever the user's kubeconfig has.

mod connection;
mod diff;
mod forensics;
mod manifest;
mod plan;
mod screen;
mod show;
mod text;
mod ui;
mod upload;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::connection::Connection;

#[derive(Parser)]
#[command(name = "kubectl-replay", bin_name = "kubectl replay", version, about = "Recorded agent runs: look, fork, compare")]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    target: Target,
}

/// Which cluster, which namespace, which installation.
#[derive(Args, Clone, Debug)]
struct Target {
    /// Namespace of the runs. Default: the kubeconfig context's.
    #[arg(short, long, global = true)]
    namespace: Option<String>,
    /// Context of the kubeconfig.
    #[arg(long, global = true)]
    context: Option<String>,
    /// The api-server's Service, as NAMESPACE/SERVICE, or NAMESPACE/https:SERVICE where it is behind TLS.
    #[arg(long, global = true, env = "REPLAYFORK_API", default_value = "replayfork-system/replayfork-api")]
    api: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    #[default]
    Table,
    Wide,
    Json,
    Yaml,
}

#[derive(Args, Clone, Debug)]
struct Format {
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

#[derive(Subcommand)]
enum Command {
    /// List runs, newest first.
    Runs {
        /// Only runs of this agent.
        #[arg(long)]
        agent: Option<String>,
        /// Only runs with this in their name.
        #[arg(long)]
        search: Option<String>,
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(i64).range(1..))]
        limit: i64,
        #[command(flatten)]
        format: Format,
    },
    /// Show a run and its spans, or one span whole.
    Show {
        run: String,
        span: Option<String>,
        #[command(flatten)]
        format: Format,
    },
    /// Plan a fork without creating anything.
    Plan {
        /// A file with ReplayForks, or - for standard input.
        #[arg(short, long)]
        filename: String,
        #[command(flatten)]
        format: Format,
    },
    /// Send content for a patch that is too large for a ReplayFork, and get the digest that names it.
    Upload {
        /// A file, or - for standard input.
        file: String,
        #[command(flatten)]
        format: Format,
    },
    /// Compare any two runs, or a fork with its source.
    Diff {
        /// A run, or a ReplayFork.
        a: String,
        b: Option<String>,
        #[command(flatten)]
        format: Format,
    },
    /// Say what went wrong in a run, and because of what.
    Forensics {
        run: String,
        #[command(flatten)]
        format: Format,
    },
    /// Delete a run with all that was recorded of it; refused while another run needs it.
    Delete { run: String },
    /// Open the viewer: serves it on loopback with your credentials.
    Ui {
        /// Port on loopback; 0: any.
        #[arg(long, default_value_t = 0)]
        port: u16,
    },
}

/// `kubectl replay … | head` closes the pipe: that is an end, and no fault.
fn end_quietly_with_the_pipe() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.payload().downcast_ref::<String>();
        if message.is_some_and(|m| m.contains("failed printing to stdout")) {
            std::process::exit(141);
        }
        report(panic);
    }));
}

#[tokio::main]
async fn main() -> ExitCode {
    end_quietly_with_the_pipe();
    let cli = Cli::parse();
    if rustls::crypto::aws_lc_rs::default_provider().install_default().is_err() {
        return ExitCode::FAILURE;
    }
    match run(cli).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> anyhow::Result<()> {
    let target = cli.target;
    let connection = Connection::open(&target).await?;
    match cli.command {
        Command::Runs { agent, search, limit, format } => show::runs(&connection, agent, search, limit, format.output).await,
        Command::Show { run, span: None, format } => show::run(&connection, &run, format.output).await,
        Command::Show { run, span: Some(span), format } => show::span(&connection, &run, &span, format.output).await,
        Command::Plan { filename, format } => {
            plan::plan(&connection, target.namespace.as_deref(), &manifest::read(&filename)?, format.output).await
        }
        Command::Upload { file, format } => upload::upload(&connection, &file, format.output).await,
        Command::Diff { a, b, format } => diff::diff(&connection, &a, b.as_deref(), format.output).await,
        Command::Forensics { run, format } => forensics::forensics(&connection, &run, format.output).await,
        Command::Delete { run } => show::delete(&connection, &run).await,
        Command::Ui { port } => ui::serve(connection, port).await,
    }
}
