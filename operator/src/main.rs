//! The operator: from `ReplayFork` objects to plans, sandboxes and status.
//!
//! It holds no database and no workspace bytes. The state of a fork is its row in the api-server; Jobs and watches are hints.

mod apply;
mod config;
mod context;
mod decide;
mod lease;
mod metrics;
mod observe;
mod publish;
mod sandbox;
mod shallow;
mod status;
mod sweep;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Parser;
use futures::StreamExt;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ListParams};
use kube::core::DeserializeGuard;
use kube::runtime::controller::{Action, Config as ControllerConfig, Controller};
use kube::runtime::reflector::ObjectRef;
use kube::runtime::watcher;
use kube::{Client, ResourceExt};
use replayfork_crds::ReplayFork;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::config::{Config, LogFormat};
use crate::context::{Context, Error};
use crate::metrics::{ErrorLabels, Metrics};

type Guarded = DeserializeGuard<ReplayFork>;

const CONCURRENCY: u16 = 16;
/// Events of one moment are dealt with together; each that comes in between starts the wait anew.
const DEBOUNCE: Duration = Duration::from_millis(10);
const SHORTEST_RETRY: Duration = Duration::from_millis(500);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let config = Config::parse();
    // It would log whole answers that it can't read, and with them what patches hold.
    let filter = EnvFilter::try_new(format!("{},kube_client=error", config.log)).context("REPLAYFORK_LOG can't be read")?;
    let logs = tracing_subscriber::fmt().with_ansi(false).with_env_filter(filter);
    match config.log_format {
        LogFormat::Text => logs.init(),
        LogFormat::Json => logs.json().init(),
    }
    rustls::crypto::aws_lc_rs::default_provider().install_default().map_err(|_| anyhow::anyhow!("another TLS provider is installed"))?;
    let metrics = Arc::new(Metrics::default());
    let listener =
        tokio::net::TcpListener::bind(config.metrics_listen).await.with_context(|| format!("can't listen on {}", config.metrics_listen))?;
    let router = metrics::router(metrics.clone());
    tokio::spawn(async move { axum::serve(listener, router).await });

    let client = shallow::client().await.context("no cluster")?;
    wait_for_crd(&client).await;
    metrics.set_ready();
    let leadership = lease::Leadership::new(client.clone(), &config.pod_namespace, &config.pod_name);
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let mut stopping = Box::pin(async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
    });
    tokio::select! {
        () = leadership.acquire() => {}
        () = &mut stopping => return Ok(()),
    }
    tracing::info!("working");
    metrics.leader.set(1);
    let ctx = Arc::new(Context::new(client, config, metrics)?);
    tokio::select! {
        () = work(ctx) => anyhow::bail!("the watch ended"),
        () = leadership.hold() => anyhow::bail!("the lease was lost to another replica"),
        () = &mut stopping => {}
    }
    leadership.release().await;
    tracing::info!("stopped");
    Ok(())
}

/// A missing CRD is said, and waited for; it is no reason to crash.
async fn wait_for_crd(client: &Client) {
    let api: Api<Guarded> = Api::all(client.clone());
    let mut said = false;
    loop {
        match api.list(&ListParams::default().limit(1)).await {
            Ok(_) => return,
            Err(error) => {
                if !said {
                    tracing::error!(
                        "ReplayForks can't be listed ({error}); install the CRD (chart value crds.enabled, or kubectl apply -f crds/) and the operator's roles"
                    );
                    said = true;
                }
                tokio::time::sleep(Duration::from_secs(2)).await;
            }
        }
    }
}

async fn work(ctx: Arc<Context>) {
    let client = ctx.client.clone();
    let ours = watcher::Config::default().labels(sandbox::UID_LABEL);
    let (deleted, to_sweep) = tokio::sync::mpsc::channel(1);
    let sweeping = sweep::run(&ctx, to_sweep);
    let deletions = watch_deletions(client.clone(), deleted);
    let controller = Controller::new(Api::<Guarded>::all(client.clone()), watcher::Config::default());
    let _ = ctx.metrics.forks.set(controller.store());
    let controller = controller
        .with_config(ControllerConfig::default().concurrency(CONCURRENCY).debounce(DEBOUNCE))
        .owns(Api::<Job>::all(client.clone()), ours.clone())
        .watches(Api::<Pod>::all(client), ours, |pod| {
            let namespace = pod.namespace()?;
            // A name too long for a label finds nothing here; such a fork is looked at by its timer.
            let name = pod.labels().get(sandbox::NAME_LABEL)?;
            Some(ObjectRef::<Guarded>::new(name).within(&namespace))
        })
        .run(reconcile, on_error, ctx.clone())
        .for_each(|result| async move {
            if let Err(error) = result {
                tracing::debug!("{error}");
            }
        });
    tokio::join!(controller, sweeping, deletions);
}

/// Tells the sweeper of every deletion.
async fn watch_deletions(client: Client, deleted: tokio::sync::mpsc::Sender<()>) {
    let api: Api<kube::core::PartialObjectMeta<ReplayFork>> = Api::all(client);
    let mut events = std::pin::pin!(watcher(api, watcher::Config::default()));
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Delete(_)) => drop(deleted.try_send(())),
            Ok(_) => {}
            Err(_) => tokio::time::sleep(SHORTEST_RETRY).await,
        }
    }
}

async fn reconcile(object: Arc<Guarded>, ctx: Arc<Context>) -> Result<Action, Error> {
    let start = Instant::now();
    let result = match &object.0 {
        Ok(fork) => reconcile_fork(fork, &ctx).await,
        // Reported on its own; it never stops the others.
        Err(invalid) => Err(Error::Invalid(invalid.error.clone())),
    };
    ctx.metrics.reconcile_seconds.observe(start.elapsed().as_secs_f64());
    if let Err(error) = &result {
        ctx.metrics.errors.get_or_create(&ErrorLabels { kind: error.kind() }).inc();
        tracing::warn!(namespace = object.namespace(), fork = object.name_any(), "{error}");
    }
    result
}

async fn reconcile_fork(fork: &ReplayFork, ctx: &Context) -> Result<Action, Error> {
    if fork.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let observed = observe::observe(ctx, fork).await?;
    let decision = decide::decide(&observed, Timestamp::now());
    let acted = !decision.actions.is_empty();
    apply::apply(ctx, &observed, decision.actions).await?;
    let observed = if acted { observe::observe(ctx, fork).await? } else { observed };
    let diff = publish::diff(ctx, &observed).await;
    let status = status::status(&observed, diff.as_ref(), ctx.config.viewer_url.as_deref(), Timestamp::now());
    publish::publish_status(ctx, fork, status).await?;
    Ok(match decision.look_again {
        Some(seconds) => Action::requeue(Duration::from_secs(seconds.max(0) as u64).max(SHORTEST_RETRY)),
        None => Action::await_change(),
    })
}

/// Backs off per kind of fault: a server that is away is asked again soon, an object that can't be read only when it changes.
fn on_error(_: Arc<Guarded>, error: &Error, _: Arc<Context>) -> Action {
    match error {
        Error::Invalid(_) => Action::requeue(Duration::from_secs(300)),
        Error::Api(error) if !error.is_transient() => Action::requeue(Duration::from_secs(30)),
        _ => Action::requeue(Duration::from_secs(2)),
    }
}
