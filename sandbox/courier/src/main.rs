//! The courier: the container of a fork's pod that has the credential.
//!
//! It claims the fork, restores the workspace, waits until the network policy holds, and then lets the executor go. It alone
//! decides the order, renders bindings, snapshots after each step and reports results; a step is begun only when the one before
//! is acknowledged. It is never started twice in a pod, and a fork is never claimed twice, so no step runs twice.

mod api;
mod execute;
mod executor;
mod init;
mod policy;
mod steps;
mod volumes;
mod workspace;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Parser, Subcommand, ValueEnum};
use replayfork_client::Reach;
use replayfork_client::fork::{CloseFork, CloseReason};
use replayfork_core::patch::Contents;
use replayfork_core::plan::Prepared;
use replayfork_core::replay::Replay;
use replayfork_core::source::Source;
use tokio::sync::watch;
use uuid::Uuid;

use crate::api::Api;
use crate::executor::Executor;
use crate::steps::{Finish, Stop};
use crate::volumes::{Limit, Volumes};
use crate::workspace::ForkWorkspace;

#[derive(Parser)]
#[command(version, about = "The part of a fork's pod that has the credential")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Put the executor into a volume and make the workspace's folder: what the init container does.
    Init(init::Init),
    /// Carry out a fork.
    Run(Box<Run>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Isolation {
    #[value(name = "Enforced")]
    Enforced,
    #[value(name = "BestEffort")]
    BestEffort,
}

#[derive(clap::Args)]
struct Run {
    #[arg(long, env = "REPLAYFORK_FORK_UID")]
    fork: Uuid,
    #[arg(long, env = "REPLAYFORK_API_URL")]
    api_url: String,
    /// Address of that URL's host: a sandbox has no DNS.
    #[arg(long, env = "REPLAYFORK_API_ADDRESS")]
    api_address: SocketAddr,
    /// Authorities (PEM) of an api-server behind TLS.
    #[arg(long, env = "REPLAYFORK_API_CA")]
    api_ca: Option<String>,
    #[arg(long, env = "REPLAYFORK_TOKEN_FILE")]
    token_file: PathBuf,
    /// Where the workspace is mounted: at the recorded root's own path.
    #[arg(long, env = "REPLAYFORK_WORKSPACE")]
    workspace: PathBuf,
    #[arg(long, env = "REPLAYFORK_CONTROL_DIR")]
    control_dir: PathBuf,
    #[arg(long, env = "REPLAYFORK_SCRATCH_DIR")]
    scratch_dir: PathBuf,
    /// Where the volume is mounted that the executor has at /tmp.
    #[arg(long, env = "REPLAYFORK_TMP_DIR")]
    tmp_dir: PathBuf,
    /// What each of the volumes may hold.
    #[arg(long, env = "REPLAYFORK_VOLUME_LIMIT")]
    volume_limit: Limit,
    #[arg(long, env = "REPLAYFORK_NETWORK_ISOLATION", value_enum, default_value = "Enforced")]
    isolation: Isolation,
    /// The Kubernetes API's service, which no sandbox may reach.
    #[arg(long, env = "KUBERNETES_SERVICE_HOST")]
    kubernetes_host: String,
    #[arg(long, env = "KUBERNETES_SERVICE_PORT", default_value_t = 443)]
    kubernetes_port: u16,
    #[arg(long, env = "REPLAYFORK_LOG", default_value = "info")]
    log: String,
}

fn main() -> ExitCode {
    match Args::parse().command {
        Command::Init(init) => match init::init(&init) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("replayfork-courier init: {error:#}");
                ExitCode::FAILURE
            }
        },
        Command::Run(run) => {
            tracing_subscriber::fmt().with_ansi(false).with_env_filter(run.log.clone()).init();
            if rustls::crypto::aws_lc_rs::default_provider().install_default().is_err() {
                return ExitCode::FAILURE;
            }
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            match runtime.map_err(anyhow::Error::from).and_then(|runtime| runtime.block_on(carry_out(*run))) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    tracing::error!("{error:#}");
                    ExitCode::FAILURE
                }
            }
        }
    }
}

async fn carry_out(args: Run) -> anyhow::Result<()> {
    let api = Api::new(
        &args.api_url,
        args.token_file.clone(),
        &Reach { authorities: args.api_ca.clone(), address: Some(args.api_address) },
        args.fork,
    )?;
    api.claim().await.context("the fork can't be claimed")?;
    tracing::info!(fork = %args.fork, "claimed");
    let (stop, stopped) = watch::channel(None);
    let terminating = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let volumes = Volumes::new(&args.workspace, &args.tmp_dir, &args.scratch_dir, args.volume_limit);
    tokio::spawn(watch_for_stop(api.clone(), terminating, volumes.clone(), stop.clone()));
    tokio::spawn(volumes.watch(stop.clone()));
    let finish = match attempt(&args, &api, &stop, stopped).await {
        Ok(finish) => finish,
        Err(error) => Finish::new(CloseReason::SandboxFailed, format!("{error:#}"), None),
    };
    tracing::info!(reason = %finish.reason, "closing: {}", finish.message);
    let close = CloseFork {
        reason: finish.reason,
        message: finish.message,
        unreached_from: finish.unreached_from,
        reproducibility: finish.reproducibility,
        warnings: finish.warnings,
    };
    let result = api.close(&close).await?;
    // Only now that the result stands may the executor end well.
    if let Some(mut executor) = finish.executor {
        executor.done();
    }
    tracing::info!(reason = %result.reason, "closed");
    Ok(())
}

async fn attempt(
    args: &Run,
    api: &Api,
    stop: &watch::Sender<Option<Stop>>,
    stopped: watch::Receiver<Option<Stop>>,
) -> anyhow::Result<Finish> {
    let bundle = api.bundle().await?;
    let mut contents = Contents::default();
    for digest in &bundle.contents {
        contents.insert(api.content(digest).await.context("a content of the patches can't be fetched")?);
    }
    let source = Source::new(bundle.recorded, bundle.spans, bundle.changed).with_facts(bundle.facts).with_inherited(bundle.inherited);
    let fork = Prepared::new(&source, &contents, &bundle.spec).context("the plan can't be made again")?;
    let replay = Replay::new(&fork);
    if replay.plan.digest != bundle.plan_digest {
        let message = format!(
            "the sandbox's plan {} is not the pinned one {}: api-server and sandbox image are of different versions",
            replay.plan.digest, bundle.plan_digest
        );
        return Ok(Finish::new(CloseReason::PlanMismatch, message, None));
    }
    let started = std::time::Instant::now();
    let mut workspace = ForkWorkspace::open(api.clone(), &args.workspace, &args.scratch_dir)?;
    let waiting = policy::holds(args.api_address, args.kubernetes_host.clone(), args.kubernetes_port);
    let isolation = tokio::spawn(async move { (waiting.await, started.elapsed()) });
    match source.start_state(fork.first) {
        Some(start) => workspace.start_from(&start).await?,
        // It starts empty, and that is sent.
        None => drop(workspace.capture().await?),
    }
    let restored = started.elapsed();
    let (isolated, policy) = isolation.await?;
    tracing::info!(
        restore_ms = restored.as_millis() as u64,
        policy_ms = policy.as_millis() as u64,
        isolated = isolated.is_ok(),
        "workspace restored"
    );
    if let Err(why) = isolated {
        if args.isolation == Isolation::Enforced {
            let message = format!("{why}; install a network policy engine, or set spec.sandbox.networkIsolation: BestEffort");
            return Ok(Finish::new(CloseReason::NetworkNotIsolated, message, None));
        }
        tracing::warn!("{why}; going on, since networkIsolation is BestEffort");
    }
    let executor = tokio::select! {
        executor = Executor::let_go(&args.control_dir) => executor?,
        finish = steps::stopped_before_start(stopped.clone()) => return Ok(finish),
    };
    tracing::info!("the executor is let go");
    let deadline = Duration::from_secs(bundle.deadline_seconds.max(1) as u64);
    tokio::spawn(watch_deadline(deadline, stop.clone()));
    let outside = steps::Outside { api, workspace, executor, stopped, root: &args.workspace };
    steps::run(&fork, replay, outside).await
}

/// Cancel, the fork's end from elsewhere, and the pod's own end.
async fn watch_for_stop(api: Api, mut terminating: tokio::signal::unix::Signal, volumes: Volumes, stop: watch::Sender<Option<Stop>>) {
    let asked = async {
        loop {
            match api.wait().await {
                Ok(wait) if wait.terminal => return Stop::Ended,
                Ok(wait) if wait.cancel => return Stop::Canceled,
                Ok(_) => {}
                Err(_) => tokio::time::sleep(Duration::from_secs(1)).await,
            }
        }
    };
    let why = tokio::select! {
        why = asked => why,
        // An eviction for a full volume looks like any other end from here.
        _ = terminating.recv() => volumes.full_at_the_end().await.map_or(Stop::Interrupted, Stop::Full),
    };
    why.tell(&stop);
}

async fn watch_deadline(deadline: Duration, stop: watch::Sender<Option<Stop>>) {
    tokio::time::sleep(deadline).await;
    Stop::DeadlineExceeded(deadline.as_secs()).tell(&stop);
}
