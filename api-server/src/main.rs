//! See the library: this is its process.

use std::time::Duration;

use anyhow::Context;
use axum::serve::ListenerExt;
use clap::Parser;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use replayfork_api_server::auth::Authenticator;
use replayfork_api_server::config::{AuthMode, Config, LogFormat};
use replayfork_api_server::endpoints::Endpoints;
use replayfork_api_server::state::App;
use replayfork_api_server::tls::{Certificate, TlsListener};
use replayfork_api_server::{db, routes, store};

/// How often abandoned runs are looked for.
const HOUSEKEEPING: Duration = Duration::from_secs(60);
const PARTITIONS: Duration = Duration::from_secs(24 * 3600);
/// How long a collection of blobs waits for transactions that began before it condemned any.
const PATIENCE: Duration = Duration::from_secs(600);

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    if std::env::args().any(|a| a == "--openapi") {
        println!("{}", routes::document().to_pretty_json()?);
        return Ok(());
    }
    let config = Config::parse();
    // The database's notices and the migrations' every line say nothing at info.
    let filter = format!("tokio_postgres=warn,refinery_core=warn,{}", config.log);
    let filter = EnvFilter::try_new(filter).context("REPLAYFORK_LOG can't be read")?;
    let logs = tracing_subscriber::fmt().with_ansi(false).with_env_filter(filter);
    match config.log_format {
        LogFormat::Text => logs.init(),
        LogFormat::Json => logs.json().init(),
    }
    rustls::crypto::aws_lc_rs::default_provider().install_default().map_err(|_| anyhow::anyhow!("another TLS provider is installed"))?;

    let pool = db::pool(&config.database_url, config.database_ca.as_deref().filter(|ca| !ca.is_empty()), config.database_connections)?;
    wait_for_database(&pool).await?;
    let packs = store::Packs::open(&pool.get().await?, &config.blob_store, std::env::vars()).await?;
    let cluster = match config.auth_mode {
        AuthMode::Kubernetes => {
            Some(kube::Client::try_default().await.context("no cluster to check tokens with; set REPLAYFORK_AUTH_MODE=None on a laptop")?)
        }
        AuthMode::None => {
            tracing::warn!("auth.mode is None: whoever reaches this port may read and change every run");
            None
        }
    };
    let endpoints = Endpoints::load(config.endpoints_file.as_deref())?;
    let app = App::new(config.clone(), pool, packs, Authenticator::new(cluster), endpoints);
    tokio::spawn(housekeeping(app.clone()));
    tokio::spawn(collecting(app.clone()));

    let probe = TcpListener::bind(config.probe_listen).await.with_context(|| format!("can't listen on {}", config.probe_listen))?;
    tokio::spawn(async move { axum::serve(probe, routes::probe()).await });
    let listener = TcpListener::bind(config.listen).await.with_context(|| format!("can't listen on {}", config.listen))?;
    let router = routes::router(app);
    match (&config.tls_cert, &config.tls_key) {
        (Some(cert), Some(key)) => {
            let listener = TlsListener::new(listener, Certificate::load(cert, key)?)?;
            tracing::info!(listen = %config.listen, tls = true, "ready");
            axum::serve(listener, router).with_graceful_shutdown(asked_to_stop()).await?;
        }
        _ => {
            let listener = listener.tap_io(|stream| drop(stream.set_nodelay(true)));
            tracing::info!(listen = %config.listen, tls = false, "ready");
            axum::serve(listener, router).with_graceful_shutdown(asked_to_stop()).await?;
        }
    }
    tracing::info!("stopped");
    Ok(())
}

/// Migrates once the database answers; a database that is starting is waited for, any other fault ends the start.
async fn wait_for_database(pool: &deadpool_postgres::Pool) -> anyhow::Result<()> {
    let mut reported = false;
    for _ in 0..120 {
        match pool.get().await {
            Ok(_) => return db::migrate(pool).await,
            Err(error) if !reported => {
                tracing::warn!(cause = %error, "waiting for the database");
                reported = true;
            }
            Err(_) => {}
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    db::migrate(pool).await
}

async fn housekeeping(app: App) {
    let mut partitions_at = tokio::time::Instant::now() + PARTITIONS;
    loop {
        tokio::time::sleep(HOUSEKEEPING).await;
        let Ok(client) = app.db().await else { continue };
        match store::runs::seal_abandoned(&client).await {
            Ok(sealed) if sealed.is_empty() => {}
            Ok(sealed) => {
                sealed.iter().for_each(|spent| app.metrics.agents.sealed(spent));
                tracing::info!(sealed = sealed.len(), "sealed runs whose recorder went silent");
            }
            Err(error) => tracing::warn!(cause = %error, "abandoned runs could not be sealed"),
        }
        if tokio::time::Instant::now() >= partitions_at {
            match db::make_partitions(&client).await {
                Ok(()) => partitions_at = tokio::time::Instant::now() + PARTITIONS,
                Err(error) => tracing::warn!(cause = %error, "the next months' partitions could not be made; tried again in a minute"),
            }
        }
    }
}

async fn collecting(app: App) {
    let interval = Duration::from_secs(app.config.collect_interval_seconds);
    loop {
        tokio::time::sleep(interval).await;
        let Ok(mut client) = app.db().await else { continue };
        match store::collect::cycle(&mut client, &app.packs, PATIENCE).await {
            Ok(None) => {}
            Ok(Some(collected)) => {
                app.metrics.blobs_collected.inc_by(collected.blobs);
                app.metrics.bytes_collected.inc_by(collected.bytes.max(0) as u64);
                if collected != store::collect::Collected::default() {
                    tracing::info!(
                        blobs = collected.blobs,
                        packs = collected.packs,
                        rewritten = collected.rewritten,
                        objects = collected.objects,
                        bytes = collected.bytes,
                        "collected blobs that nothing names"
                    );
                }
            }
            Err(error) => tracing::warn!(cause = %error, "blobs could not be collected; tried again at the next interval"),
        }
    }
}

async fn asked_to_stop() {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else { return };
    tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
    tracing::info!("stopping: requests under way are finished");
}
