//! The uploader: sends the spool's items in order, again and again until they are acknowledged.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use replayfork_client::ingest::{HaveBlobs, Ingested, MissingBlobs, PackStored, RunCreated, SnapshotBatch, SpanBatch};
use replayfork_client::{ApiClient, Bytes, ClientError};
use replayfork_core::Digest;
use replayfork_snapshot::{LocalStore, parse_pack};
use tokio::sync::oneshot;
use uuid::Uuid;

use crate::spool::{Item, Spool};

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
            let (number, item) = self.spool.first().await;
            let item = match item {
                Ok(item) => item,
                Err(error) => {
                    tracing::error!(%error, number, "a spooled item can't be read; it is set aside");
                    self.spool.reject(number);
                    continue;
                }
            };
            match self.send(&item).await {
                Ok(()) => {
                    self.spool.done(number);
                    pause = FIRST_PAUSE;
                }
                Err(error) if error.is_transient() || error.status() == Some(401) || error.status() == Some(403) => {
                    tracing::warn!("not sent, trying again in {} ms: {error}", pause.as_millis());
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                Err(error) => {
                    tracing::error!(number, "the api-server never takes this; it is set aside in the spool: {error}");
                    self.spool.reject(number);
                }
            }
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
            Item::Pack { file } => self.send_pack(file).await?,
            Item::Snapshots { run, snapshots } => {
                let batch = SnapshotBatch { snapshots: snapshots.clone() };
                let path = format!("/v1/runs/{run}/snapshots");
                let _: Ingested = self.with_blobs(|| self.client.post(&path, &batch)).await?;
            }
            Item::Finish { run, finish } => {
                let _: Ingested = self.client.post(&format!("/v1/runs/{run}/finish"), finish).await?;
                self.state().open.remove(run);
                tracing::info!(%run, outcome = %finish.outcome, "a run is finished");
            }
        }
        Ok(())
    }

    async fn send_pack(&self, file: &str) -> Result<(), ClientError> {
        let Ok(bytes) = tokio::fs::read(self.spool.packs().join(file)).await else {
            tracing::error!(file, "a pack is gone from the spool");
            return Ok(());
        };
        let digests: Vec<Digest> = parse_pack(&bytes).map(|p| p.blobs.iter().map(|b| b.digest).collect()).unwrap_or_default();
        let answer: MissingBlobs = self.client.post("/v1/blobs/have", &HaveBlobs { digests }).await?;
        if !answer.missing.is_empty() {
            let bytes = Bytes::from(bytes);
            let _: PackStored = self.with_blobs(|| self.client.put_bytes(PACKS, bytes.clone())).await?;
        }
        Ok(())
    }

    /// A request that names blobs, with those that the server turns out to lack: it collects what nothing names, and a recorder that
    /// was killed may have stored a pack and not said so.
    async fn with_blobs<T, F: Future<Output = Result<T, ClientError>>>(&self, request: impl Fn() -> F) -> Result<T, ClientError> {
        let store = OnceLock::new();
        let pack_of = |digest: &Digest| store.get_or_init(|| LocalStore::open(&self.spool.packs()).ok()).as_ref()?.pack_of(digest);
        self.client.with_blobs(PACKS, pack_of, request).await
    }
}
