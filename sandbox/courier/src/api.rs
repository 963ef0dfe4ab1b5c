//! The api-server, as one fork's courier sees it. What must not get lost is said until it is acknowledged.

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use replayfork_client::fork::{
    AskModel, BeginSpan, Bundle, CachedResult, ClaimFork, CloseFork, EndSpan, Fork, ForkResult, ModelAnswered, ReusedSnapshots, Wait,
};
use replayfork_client::{ApiClient, ClientError, Pack, PackRoutes, Reach, Token};
use replayfork_core::Digest;
use replayfork_snapshot::{LocalStore, SnapshotError};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use uuid::Uuid;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Why a workspace state did not arrive.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Store(#[from] SnapshotError),
}

#[derive(Clone)]
pub struct Api {
    client: ApiClient,
    base: String,
}

/// Repeats while the fault is a passing one, until the pod ends.
async fn until_answered<T, F: Future<Output = Result<T, ClientError>>>(what: &str, mut call: impl FnMut() -> F) -> Result<T, ClientError> {
    let mut pause = FIRST_PAUSE;
    loop {
        match call().await {
            Err(error) if error.is_transient() => {
                tracing::warn!("{what}: {error}; trying again in {} ms", pause.as_millis());
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            other => return other,
        }
    }
}

impl Api {
    pub fn new(url: &str, token_file: PathBuf, reach: &Reach, fork: Uuid) -> Result<Self, ClientError> {
        Ok(Self { client: ApiClient::new(url, Token::File(token_file), reach)?, base: format!("/sandbox/v1/forks/{fork}") })
    }

    fn path(&self, rest: &str) -> String {
        format!("{}/{rest}", self.base)
    }

    fn span(&self, span: &str, rest: &str) -> String {
        let encoded: String = span
            .bytes()
            .map(|b| if b.is_ascii_alphanumeric() || b"-_.".contains(&b) { (b as char).to_string() } else { format!("%{b:02X}") })
            .collect();
        format!("{}/spans/{encoded}/{rest}", self.base)
    }

    pub async fn claim(&self) -> Result<Fork, ClientError> {
        let claim = ClaimFork { nonce: hex::encode(rand::random::<[u8; 32]>()) };
        let path = self.path("claim");
        until_answered("claim", || self.client.post(&path, &claim)).await
    }

    pub async fn bundle(&self) -> Result<Bundle, ClientError> {
        let path = self.path("bundle");
        until_answered("bundle", || self.client.get(&path)).await
    }

    /// Puts the packs of a workspace state into the store as they arrive, without what `base` has. A transfer that breaks off is
    /// begun again: what has arrived is known then.
    pub async fn snapshot(&self, node: &Digest, base: Option<&Digest>, store: &mut LocalStore) -> Result<(), RestoreError> {
        let query = base.map_or_else(String::new, |b| format!("?base={b}"));
        let path = self.path(&format!("snapshots/{node}{query}"));
        let mut pause = FIRST_PAUSE;
        loop {
            match self.transfer(&path, store).await {
                Err(RestoreError::Client(error)) if error.is_transient() => {
                    tracing::warn!("restore: {error}; trying again in {} ms", pause.as_millis());
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                other => return other,
            }
        }
    }

    async fn transfer(&self, path: &str, store: &mut LocalStore) -> Result<(), RestoreError> {
        let mut response = self.client.get_bytes(path).await?;
        let mut buffer = Vec::new();
        loop {
            let chunk = response.chunk().await.map_err(|source| ClientError::Transport { url: path.to_owned(), source })?;
            let Some(chunk) = chunk else { break };
            buffer.extend_from_slice(&chunk);
            while let Some(head) = buffer.first_chunk::<4>() {
                let length = u32::from_le_bytes(*head) as usize;
                if buffer.len() < 4 + length {
                    break;
                }
                store.put_pack(&buffer[4..4 + length])?;
                buffer.drain(..4 + length);
            }
        }
        if buffer.is_empty() {
            Ok(())
        } else {
            Err(ClientError::Answer { url: path.to_owned(), detail: "a pack is cut off".into() }.into())
        }
    }

    /// An uploaded content that the fork's patches name.
    pub async fn content(&self, digest: &Digest) -> Result<Vec<u8>, ClientError> {
        let path = self.path(&format!("contents/{digest}"));
        let transport = |source| ClientError::Transport { url: path.clone(), source };
        until_answered("content", async || self.client.get_bytes(&path).await?.bytes().await.map_err(transport)).await.map(|b| b.to_vec())
    }

    /// A result that another fork left, if there is one.
    pub async fn cached(&self, key: &Digest) -> Result<Option<CachedResult>, ClientError> {
        let path = self.path(&format!("results/{key}"));
        match until_answered("result", || self.client.get(&path)).await {
            Ok(result) => Ok(Some(result)),
            Err(error) if error.status() == Some(404) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Asks the model that the fork's spec names, through the api-server. Asked again, it gives the same answer.
    pub async fn ask_model(&self, span: &str, request: &Value) -> Result<ModelAnswered, ClientError> {
        let path = self.span(span, "model");
        let ask = AskModel { request: request.clone() };
        until_answered("model", || self.client.post(&path, &ask)).await
    }

    /// Posts until it is answered, with the blobs that it names where the store lacks any.
    async fn post_with_blobs<T: DeserializeOwned>(
        &self,
        what: &str,
        path: &str,
        body: &impl Serialize,
        store: &LocalStore,
    ) -> Result<T, ClientError> {
        let packs = self.path("packs");
        let post = || self.client.post(path, body);
        until_answered(what, || self.client.with_blobs(&packs, |digest| store.pack_of(digest), post)).await
    }

    /// Sends what the store lacks of these packs.
    pub async fn offer(&self, packs: &[Pack], store: &LocalStore) -> Result<(), ClientError> {
        let to = PackRoutes { have: self.path("blobs/have"), packs: self.path("packs") };
        let offer = async || self.client.offer(&to, packs, |digest| store.pack_of(digest)).await.into_iter().collect();
        until_answered("packs", offer).await
    }

    pub async fn begin(&self, span: &str, begin: &BeginSpan) -> Result<(), ClientError> {
        let path = self.span(span, "begin");
        until_answered("begin", || self.client.post(&path, begin)).await
    }

    pub async fn end(&self, span: &str, end: &EndSpan, store: &LocalStore) -> Result<(), ClientError> {
        self.post_with_blobs("end", &self.span(span, "end"), end, store).await
    }

    pub async fn reused(&self, states: &ReusedSnapshots, store: &LocalStore) -> Result<(), ClientError> {
        self.post_with_blobs("snapshots", &self.path("snapshots"), states, store).await
    }

    pub async fn close(&self, close: &CloseFork) -> Result<ForkResult, ClientError> {
        let path = self.path("close");
        until_answered("close", || self.client.post(&path, close)).await
    }

    /// Returns when the fork is to stop, or after a while.
    pub async fn wait(&self) -> Result<Wait, ClientError> {
        self.client.get(&self.path("wait")).await
    }
}
