//! The uploader: sends the spool's items in order, again and again until they are acknowledged.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use replayfork_client::ingest::{Ingested, RunCreated, SnapshotBatch, SpanBatch};
use replayfork_client::{ApiClient, ClientError, Pack, PackRoutes};
use replayfork_core::Digest;
use replayfork_snapshot::{LocalStore, parse_pack};
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::spool::{Item, Spool};

const HAVE: &str = "/v1/blobs/have";
const PACKS: &str = "/v1/packs";
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(15);

#[derive(Clone)]
pub struct Uploader {
    client: ApiClient,
    spool: Arc<Spool>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Who waits for the name that a run really got.
    waiting: HashMap<Uuid, oneshot::Sender<String>>,
    /// Runs that were begun and not finished.
    open: HashSet<Uuid>,
}

impl Uploader {
    pub fn new(client: ApiClient, spool: Arc<Spool>) -> Self {
        Self { client, spool, state: Arc::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name that a run gets, once the api-server has said it.
    pub fn name_of(&self, run: Uuid) -> impl Future<Output = Option<String>> + use<> {
        let (send, receive) = oneshot::channel();
        self.state().waiting.insert(run, send);
        async move { receive.await.ok() }
    }

    /// Sends for ever.
    pub async fn run(self) {
        let mut pause = FIRST_PAUSE;
        loop {
            let mut items = Vec::new();
            for (number, item) in self.spool.first().await {
                match item {
                    Ok(item) => items.push((number, item)),
                    Err(error) => {
                        tracing::error!(%error, number, "a spooled item can't be read; it is set aside");
                        self.spool.reject(number);
                    }
                }
            }
            for ((number, _), sent) in items.iter().zip(self.send_all(&items).await) {
                match sent {
                    Ok(()) => {
                        self.spool.done(*number);
                        pause = FIRST_PAUSE;
                    }
                    Err(error) if error.is_transient() || error.status() == Some(401) || error.status() == Some(403) => {
                        tracing::warn!("not sent, trying again in {} ms: {error}", pause.as_millis());
                        tokio::time::sleep(pause).await;
                        pause = (pause * 2).min(LONGEST_PAUSE);
                    }
                    Err(error) => {
                        tracing::error!(number, "the api-server never takes this; it is set aside in the spool: {error}");
                        self.spool.reject(*number);
                    }
                }
            }
        }
    }

    /// Sends items in order, until one fails; packs that follow each other together.
    async fn send_all(&self, items: &[(u64, Item)]) -> Vec<Result<(), ClientError>> {
        let packs = items.iter().map_while(|(_, item)| if let Item::Pack { file } = item { Some(file.as_str()) } else { None });
        match (packs.collect::<Vec<_>>(), items) {
            (packs, _) if packs.len() > 1 => self.offer(&packs).await,
            (_, [(_, first), ..]) => vec![self.send(first).await],
            (_, []) => Vec::new(),
        }
    }

    /// Waits until the spool is empty, and says goodbye for runs that were not finished.
    pub async fn drain(&self) {
        loop {
            let sent = self.spool.sent.notified();
            if self.spool.len() == 0 {
                break;
            }
            sent.await;
        }
        let open: Vec<_> = self.state().open.iter().copied().collect();
        for run in open {
            let goodbye: Result<Ingested, _> = self.client.post(&format!("/v1/runs/{run}/goodbye"), &()).await;
            if let Err(error) = goodbye {
                tracing::warn!(%run, "the goodbye did not arrive: {error}");
            }
        }
    }

    async fn send(&self, item: &Item) -> Result<(), ClientError> {
        match item {
            Item::Run(request) => {
                let created: RunCreated = self.client.post("/v1/runs", request).await?;
                tracing::info!(run = %created.id, name = created.name, "recording a run");
                let mut state = self.state();
                state.open.insert(created.id);
                if let Some(waiting) = state.waiting.remove(&created.id) {
                    let _ = waiting.send(created.name);
                }
            }
            Item::Spans { run, spans } => {
                let batch = SpanBatch { spans: spans.clone() };
                let _: Ingested = self.client.post(&format!("/v1/runs/{run}/spans"), &batch).await?;
            }
            Item::Pack { file } => return self.offer(&[file]).await.pop().unwrap_or(Ok(())),
            Item::Snapshots { run, snapshots } => {
                let batch = SnapshotBatch { snapshots: snapshots.clone() };
                let path = format!("/v1/runs/{run}/snapshots");
                let _: Ingested = self.client.with_blobs(PACKS, self.pack_of(), || self.client.post(&path, &batch)).await?;
            }
            Item::Finish { run, finish } => {
                let _: Ingested = self.client.post(&format!("/v1/runs/{run}/finish"), finish).await?;
                self.state().open.remove(run);
                tracing::info!(%run, outcome = %finish.outcome, "a run is finished");
            }
        }
        Ok(())
    }

    async fn offer(&self, files: &[&str]) -> Vec<Result<(), ClientError>> {
        let mut packs = Vec::new();
        for file in files {
            let bytes = tokio::fs::read(self.spool.packs().join(file)).await.unwrap_or_else(|error| {
                tracing::error!(file, %error, "a pack can't be read from the spool");
                Vec::new()
            });
            // What is no pack has no blobs, and is not sent.
            let index = parse_pack(&bytes).ok();
            let digests = index.iter().flat_map(|index| index.digests()).collect();
            let has_directories = index.as_ref().is_some_and(|index| index.has_directories());
            packs.push(Pack { digests, has_directories, bytes: bytes.into() });
        }
        self.client.offer(&PackRoutes { have: HAVE.into(), packs: PACKS.into() }, &packs, self.pack_of()).await
    }

    /// The file of the pack that holds a blob: the server collects what nothing names, and a recorder that was killed may have stored
    /// a pack and not said so.
    fn pack_of(&self) -> impl Fn(&Digest) -> Option<PathBuf> {
        let store = OnceLock::new();
        move |digest| store.get_or_init(|| LocalStore::open(&self.spool.packs()).ok()).as_ref()?.pack_of(digest)
    }
}
