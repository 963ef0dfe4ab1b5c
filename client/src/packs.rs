//! Sending packs of blobs.

use std::future::Future;
use std::path::PathBuf;

use bytes::Bytes;
use replayfork_core::Digest;

use crate::Problem;
use crate::http::{ApiClient, BLOBS_MISSING, ClientError};
use crate::ingest::{HaveBlobs, MissingBlobs, PackStored};

/// How often what a request names is sent; it may be collected again meanwhile.
const TRIES: usize = 5;
/// Packs of one upload that are sent anew at most, each as often as it is refused.
const MOST_PACKS: usize = 100_000;

/// Where packs are sent to.
#[derive(Clone, Debug)]
pub struct PackRoutes {
    /// Asked which blobs are lacking.
    pub have: String,
    pub packs: String,
}

/// A pack that may have to be sent.
pub struct Pack {
    pub bytes: Bytes,
    /// Of its blobs.
    pub digests: Vec<Digest>,
    /// It has directories, which name blobs of packs before it.
    pub has_directories: bool,
}

impl ApiClient {
    /// Sends packs of which the server lacks any blob, in order; two at a time where the second one names nothing, so that the server
    /// looks into the one while its database takes in the other. Ends after a failure: what comes after it has no result.
    ///
    /// `pack_of`: the file of the pack that holds a blob, for what turns out to be lacking beyond.
    pub async fn offer(
        &self,
        to: &PackRoutes,
        packs: &[Pack],
        pack_of: impl Fn(&Digest) -> Option<PathBuf>,
    ) -> Vec<Result<(), ClientError>> {
        let mut results = Vec::with_capacity(packs.len());
        let mut rest = packs;
        while results.iter().all(Result::is_ok) {
            rest = match rest {
                [] => break,
                [one, two, more @ ..] if !two.has_directories => {
                    let (one, two) = tokio::join!(self.offer_one(to, one, &pack_of), self.offer_one(to, two, &pack_of));
                    results.extend([one, two]);
                    more
                }
                [one, more @ ..] => {
                    results.push(self.offer_one(to, one, &pack_of).await);
                    more
                }
            };
        }
        results
    }

    async fn offer_one(&self, to: &PackRoutes, pack: &Pack, pack_of: &impl Fn(&Digest) -> Option<PathBuf>) -> Result<(), ClientError> {
        if pack.digests.is_empty() {
            return Ok(());
        }
        let answer: MissingBlobs = self.post(&to.have, &HaveBlobs { digests: pack.digests.clone() }).await?;
        if answer.missing.is_empty() {
            return Ok(());
        }
        let put = || self.put_bytes::<PackStored>(&to.packs, pack.bytes.clone());
        self.with_blobs(&to.packs, pack_of, put).await.map(drop)
    }

    /// Sends a request; where it is refused for blobs that the store lacks, first the packs that hold these, then the request again.
    /// Whoever uploads must be ready for that: what nothing names yet may be collected before it is named.
    ///
    /// `packs`: where packs are sent to. `pack_of`: the file of the pack that holds a blob.
    pub async fn with_blobs<T, F: Future<Output = Result<T, ClientError>>>(
        &self,
        packs: &str,
        pack_of: impl Fn(&Digest) -> Option<PathBuf>,
        request: impl Fn() -> F,
    ) -> Result<T, ClientError> {
        for _ in 0..TRIES {
            match request().await {
                Err(ClientError::Problem(problem)) if problem.reason == BLOBS_MISSING => self.send_packs(packs, &pack_of, problem).await?,
                other => return other,
            }
        }
        request().await
    }

    /// A pack that is refused for what it names comes after the packs that hold that.
    async fn send_packs(
        &self,
        to: &str,
        pack_of: &impl Fn(&Digest) -> Option<PathBuf>,
        mut refused: Box<Problem>,
    ) -> Result<(), ClientError> {
        let mut open: Vec<PathBuf> = Vec::new();
        for _ in 0..MOST_PACKS {
            let before: Vec<PathBuf> = refused.missing.iter().filter_map(pack_of).filter(|pack| open.last() != Some(pack)).collect();
            if before.is_empty() {
                break;
            }
            open.extend(before);
            loop {
                let Some(pack) = open.last().cloned() else { return Ok(()) };
                let bytes = std::fs::read(&pack).map_err(|source| ClientError::Pack { path: pack.clone(), source })?;
                match self.put_bytes::<PackStored>(to, bytes.into()).await {
                    Ok(_) => open.retain(|other| *other != pack),
                    Err(ClientError::Problem(problem)) if problem.reason == BLOBS_MISSING => {
                        refused = problem;
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        Err(ClientError::Problem(refused))
    }
}
