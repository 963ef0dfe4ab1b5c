//! What a snapshot costs once it is kept: captured and sent to an api-server, as a recorder does, into Postgres and into S3, against the
//! same capture kept in a local folder. All in turns in each round. The folder to capture is given as the argument.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Parser;
use deadpool_postgres::Pool;
use replayfork_api_server::auth::Authenticator;
use replayfork_api_server::config::Config;
use replayfork_api_server::endpoints::Endpoints;
use replayfork_api_server::routes;
use replayfork_api_server::state::App;
use replayfork_api_server::store::Packs;
use replayfork_client::ingest::{CreateRun, Ingested, RunCreated};
use replayfork_client::{ApiClient, Pack, PackRoutes, Reach, Token};
use replayfork_core::model::SnapshotRef;
use replayfork_snapshot::{Capturer, LocalStore, SnapshotError, parse_pack};
use replayfork_tests::{postgres, s3};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

const FULL_GOAL: f64 = 2.0;
const AGAIN_GOAL: f64 = 1.1;

#[derive(Parser)]
struct Arguments {
    /// The folder to capture.
    folder: PathBuf,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

/// Seconds of the first snapshot, and of one more when nothing has changed.
#[derive(Clone, Copy)]
struct Took {
    full: f64,
    again: f64,
}

/// Kept locally, and by each api-server.
type Round = (Took, Vec<Took>);

/// An api-server on loopback, and its database.
struct Kept {
    name: &'static str,
    client: ApiClient,
    pool: Pool,
    packs: Packs,
    _database: postgres::Server,
}

impl Kept {
    async fn start(name: &'static str, store: Option<&s3::Server>) -> Result<Self> {
        let database = postgres::Server::start()?;
        let pool = postgres::pool(&database.url()).await?;
        let packs = match store {
            Some(store) => Packs::open(&pool.get().await?, &store.url(), store.settings()).await?,
            None => Packs::default(),
        };
        let config = Config::parse_from(["bench-upload", "--database-url", "unused", "--auth-mode", "None"]);
        let app = App::new(config, pool.clone(), packs.clone(), Authenticator::new(None), Endpoints::load(None)?);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let client = ApiClient::new(&format!("http://{}", listener.local_addr()?), Token::None, &Reach::default())?;
        tokio::spawn(async move { axum::serve(listener, routes::router(app)).await });
        Ok(Self { name, client, pool, packs, _database: database })
    }

    /// As if nothing had been sent yet.
    async fn empty(&self) -> Result<()> {
        let client = self.pool.get().await?;
        client.batch_execute("DELETE FROM snapshots; TRUNCATE packs, blobs; CHECKPOINT").await?;
        self.packs.sweep(&client).await.map_err(|e| anyhow::anyhow!("{}", e.detail))?;
        Ok(())
    }

    async fn snapshot(&self, folder: &Path, store: &Path) -> Result<f64> {
        let request: CreateRun = serde_json::from_value(json!({"id": uuid::Uuid::new_v4(), "agent": "bench", "environment": {}}))?;
        let run: RunCreated = self.client.post("/v1/runs", &request).await?;
        let begun = Instant::now();
        let (stored, mut packs) = mpsc::unbounded_channel::<PathBuf>();
        let captured = capture(folder, store, move |pack| drop(stored.send(pack.to_owned())));
        let to = PackRoutes { have: "/v1/blobs/have".into(), packs: "/v1/packs".into() };
        let mut stored = Vec::new();
        // Two together, as a recorder does.
        while packs.recv_many(&mut stored, 2).await > 0 {
            let mut read = Vec::new();
            for pack in stored.drain(..) {
                let bytes = tokio::fs::read(&pack).await?;
                let index = parse_pack(&bytes)?;
                let (digests, has_directories) = (index.digests().collect(), index.has_directories());
                read.push(Pack { digests, has_directories, bytes: bytes.into() });
            }
            self.client.offer(&to, &read, |_| None).await.into_iter().collect::<Result<(), _>>()?;
        }
        let snapshot = captured.await??;
        let batch = json!({"snapshots": [{"span": "s", "edge": "after", "snapshot": snapshot}]});
        let _: Ingested = self.client.post(&format!("/v1/runs/{}/snapshots", run.id), &batch).await?;
        Ok(begun.elapsed().as_secs_f64())
    }
}

/// Takes a snapshot with an empty memory.
fn capture(
    folder: &Path,
    store: &Path,
    mut stored: impl FnMut(&Path) + Send + 'static,
) -> tokio::task::JoinHandle<Result<SnapshotRef, SnapshotError>> {
    let (folder, store) = (folder.to_owned(), store.to_owned());
    tokio::task::spawn_blocking(move || {
        let store = LocalStore::open(&store)?;
        let captured = Capturer::new(&folder).capture(&store, &mut |pack| {
            stored(pack);
            Ok(())
        })?;
        Ok(captured.snapshot)
    })
}

async fn local(folder: &Path, store: &Path) -> Result<f64> {
    let begun = Instant::now();
    capture(folder, store, |_| {}).await??;
    Ok(begun.elapsed().as_secs_f64())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let folder = arguments.folder.canonicalize().with_context(|| arguments.folder.display().to_string())?;
    let objects = s3::Server::start().await?;
    let kept = [Kept::start("postgres", None).await?, Kept::start("s3", Some(&objects)).await?];
    let mut rounds: Vec<Round> = Vec::new();
    // The first one reads the files from the disk, and does not count.
    for round in 0..=arguments.rounds {
        let store = tempfile::tempdir()?;
        let ours = Took { full: local(&folder, store.path()).await?, again: local(&folder, store.path()).await? };
        eprintln!("round {round}: local {:.3} s, again {:.3} s", ours.full, ours.again);
        let mut theirs = Vec::new();
        for kept in &kept {
            kept.empty().await?;
            let store = tempfile::tempdir()?;
            let took = Took { full: kept.snapshot(&folder, store.path()).await?, again: kept.snapshot(&folder, store.path()).await? };
            eprintln!("round {round}: {} {:.3} s, again {:.3} s", kept.name, took.full, took.again);
            theirs.push(took);
        }
        if round > 0 {
            rounds.push((ours, theirs));
        }
    }
    println!("{:<20} {:>9} {:>9}", "kept in", "full s", "again s");
    let of = |f: &dyn Fn(&Round) -> f64| median(rounds.iter().map(f).collect());
    println!("{:<20} {:>9.3} {:>9.3}", "local folder", of(&|r| r.0.full), of(&|r| r.0.again));
    for (n, kept) in kept.iter().enumerate() {
        println!("{:<20} {:>9.3} {:>9.3}", kept.name, of(&|r| r.1[n].full), of(&|r| r.1[n].again));
    }
    for (n, kept) in kept.iter().enumerate() {
        println!("ratio upload-{}/full {:.3} <= {FULL_GOAL:.2}", kept.name, of(&|r| r.1[n].full / r.0.full));
        println!("ratio upload-{}-again/no-change {:.3} <= {AGAIN_GOAL:.2}", kept.name, of(&|r| r.1[n].again / r.0.again));
    }
    Ok(())
}
