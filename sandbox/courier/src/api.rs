//! The api-server, as one fork's courier sees it. What must not get lost is said until it is acknowledged.

use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;

use replayfork_client::fork::{BeginSpan, Bundle, ClaimFork, CloseFork, EndSpan, Fork, ForkResult, ReusedSnapshots, Wait};
use replayfork_client::ingest::{HaveBlobs, MissingBlobs, PackStored};
use replayfork_client::{ApiClient, Bytes, ClientError, Reach, Token};
use replayfork_core::Digest;
use uuid::Uuid;

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

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

    /// The packs of a workspace state, without what `base` has.
    pub async fn snapshot(&self, node: &Digest, base: Option<&Digest>) -> Result<Vec<Vec<u8>>, ClientError> {
        let query = base.map_or_else(String::new, |b| format!("?base={b}"));
        until_answered("restore", || self.packs(format!("snapshots/{node}{query}"))).await
    }

    async fn packs(&self, rest: String) -> Result<Vec<Vec<u8>>, ClientError> {
        let url = self.path(&rest);
        let mut response = self.client.get_bytes(&url).await?;
        let (mut buffer, mut packs) = (Vec::new(), Vec::new());
        loop {
            let chunk = response.chunk().await.map_err(|source| ClientError::Transport { url: url.clone(), source })?;
            let Some(chunk) = chunk else { break };
            buffer.extend_from_slice(&chunk);
            while let Some(head) = buffer.first_chunk::<4>() {
                let length = u32::from_le_bytes(*head) as usize;
                if buffer.len() < 4 + length {
                    break;
                }
                packs.push(buffer[4..4 + length].to_vec());
                buffer.drain(..4 + length);
            }
        }
        if buffer.is_empty() { Ok(packs) } else { Err(ClientError::Answer { url, detail: "a pack is cut off".into() }) }
    }

    pub async fn missing(&self, digests: Vec<Digest>) -> Result<Vec<Digest>, ClientError> {
        let request = HaveBlobs { digests };
        let path = self.path("blobs/have");
        let answer: MissingBlobs = until_answered("have", || self.client.post(&path, &request)).await?;
        Ok(answer.missing)
    }

    pub async fn put_pack(&self, pack: Vec<u8>) -> Result<(), ClientError> {
        let (path, pack) = (self.path("packs"), Bytes::from(pack));
        let _: PackStored = until_answered("pack", || self.client.put_bytes(&path, pack.clone())).await?;
        Ok(())
    }

    pub async fn begin(&self, span: &str, begin: &BeginSpan) -> Result<(), ClientError> {
        let path = self.span(span, "begin");
        until_answered("begin", || self.client.post(&path, begin)).await
    }

    pub async fn end(&self, span: &str, end: &EndSpan) -> Result<(), ClientError> {
        let path = self.span(span, "end");
        until_answered("end", || self.client.post(&path, end)).await
    }

    pub async fn reused(&self, states: &ReusedSnapshots) -> Result<(), ClientError> {
        let path = self.path("snapshots");
        until_answered("snapshots", || self.client.post(&path, states)).await
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
