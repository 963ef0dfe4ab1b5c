//! The recorder: runs beside an agent, takes its spans on loopback, snapshots its workspace around them, and sends all that on.
//!
//! It never makes the agent fail: what it takes is written to its spool first and survives the recorder's own death; an api-server
//! that is away is waited for; `RECORDER=off` takes everything and keeps nothing.

mod collector;
mod runs;
mod spool;
mod upload;
mod workspace;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use replayfork_client::{ApiClient, Reach, Token};
use replayfork_core::model::RunEnvironment;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// Records an agent's run: collector on loopback, snapshots of the workspace, a spool, and an uploader.
#[derive(Clone, Debug, Parser)]
#[command(version)]
struct Config {
    #[command(subcommand)]
    command: Option<Command>,
    /// `off`: everything is taken and nothing kept.
    #[arg(long, env = "RECORDER", value_enum, default_value = "on")]
    recorder: Switch,
    #[arg(long, env = "REPLAYFORK_RECORDER_LISTEN", default_value = "127.0.0.1:4100")]
    listen: SocketAddr,
    #[arg(long, env = "REPLAYFORK_API_URL", default_value = "http://replayfork-api.replayfork-system.svc:3210")]
    api_url: String,
    /// Authorities (PEM) for an api-server behind TLS.
    #[arg(long, env = "REPLAYFORK_API_CA_FILE")]
    api_ca_file: Option<PathBuf>,
    #[arg(long, env = "REPLAYFORK_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// Where what was taken waits to be sent.
    #[arg(long, env = "REPLAYFORK_SPOOL_DIR", default_value = "/tmp/replayfork-spool")]
    spool_dir: PathBuf,
    /// The agent's workspace; without one no snapshots are taken.
    #[arg(long, env = "REPLAYFORK_WORKSPACE")]
    workspace: Option<PathBuf>,
    /// The agent's image, as written in its pod.
    #[arg(long, env = "REPLAYFORK_IMAGE")]
    image: Option<String>,
    /// Seconds that a call may wait for its snapshot.
    #[arg(long, env = "REPLAYFORK_SNAPSHOT_SECONDS", default_value_t = 10)]
    snapshot_seconds: u64,
    /// Seconds that are left for sending what is spooled when the recorder is told to go.
    #[arg(long, env = "REPLAYFORK_DRAIN_SECONDS", default_value_t = 55)]
    drain_seconds: u64,
    #[arg(long, env = "REPLAYFORK_LOG", default_value = "info")]
    log: String,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum Command {
    /// Exits with 0 when the recorder beside it answers: for a startup probe.
    Health,
}

fn main() -> anyhow::Result<()> {
    let config = Config::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    match config.command {
        Some(Command::Health) => runtime.block_on(health(config.listen)),
        None => {
            tracing_subscriber::fmt()
                .with_ansi(false)
                .with_env_filter(EnvFilter::try_new(&config.log).context("REPLAYFORK_LOG can't be read")?)
                .init();
            rustls::crypto::aws_lc_rs::default_provider()
                .install_default()
                .map_err(|_| anyhow::anyhow!("another TLS provider is installed"))?;
            runtime.block_on(run(config))
        }
    }
}

async fn health(listen: SocketAddr) -> anyhow::Result<()> {
    tokio::time::timeout(Duration::from_secs(2), tokio::net::TcpStream::connect(listen)).await.context("no answer")??;
    Ok(())
}

async fn run(config: Config) -> anyhow::Result<()> {
    let listener = tokio::net::TcpListener::bind(config.listen).await.with_context(|| format!("can't listen on {}", config.listen))?;
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let stopping = async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
    };
    if config.recorder == Switch::Off {
        tracing::warn!("RECORDER=off: nothing is recorded");
        axum::serve(listener, collector::discard()).with_graceful_shutdown(stopping).await?;
        return Ok(());
    }
    let environment = RunEnvironment {
        image: config.image.clone(),
        workspace_root: config.workspace.as_ref().map(|w| w.to_string_lossy().into_owned()),
        uid: Some(i64::from(rustix::process::geteuid().as_raw())),
        home: None,
    };
    let spool = Arc::new(spool::Spool::open(&config.spool_dir)?);
    let workspace = match &config.workspace {
        Some(root) => {
            Some(workspace::Snapshots::start(root, &config.spool_dir, spool.clone(), Duration::from_secs(config.snapshot_seconds))?)
        }
        None => None,
    };
    let token = config.token_file.clone().map_or(Token::None, Token::File);
    let uploader =
        upload::Uploader::new(ApiClient::new(&config.api_url, token, &Reach::with_ca_file(config.api_ca_file.as_deref())?)?, spool.clone());
    let sending = tokio::spawn(uploader.clone().run());
    let recorder = Arc::new(collector::Recorder::new(spool.clone(), workspace, uploader.clone(), environment));
    tracing::info!(listen = %config.listen, api = config.api_url, workspace = ?config.workspace, "recording");
    axum::serve(listener, collector::router(recorder)).with_graceful_shutdown(stopping).await?;

    tracing::info!(waiting = spool.len(), "told to go: sending what is spooled");
    match tokio::time::timeout(Duration::from_secs(config.drain_seconds), uploader.drain()).await {
        Ok(()) => tracing::info!("everything was sent"),
        Err(_) => {
            tracing::error!(left = spool.len(), spool = %config.spool_dir.display(), "not everything could be sent in time; it is still in the spool")
        }
    }
    sending.abort();
    Ok(())
}
