//! Payloads of spans: in segments of at most 256 KiB, one zstd frame each, or as blobs where they are large.

use std::collections::HashMap;

use deadpool_postgres::Transaction;
use replayfork_core::Digest;
use replayfork_snapshot::{BlobKind, PackBuilder};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::{Namespace, blobs};

/// Raw bytes of a segment.
const SEGMENT: usize = 256 << 10;
/// Raw bytes above which a payload is a blob of its own.
const BLOB_ABOVE: usize = 64 << 10;

/// Where a payload lies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    pub segment: Option<i32>,
    pub at: Option<i32>,
    pub len: Option<i32>,
    pub blob: Option<Vec<u8>>,
}

/// Collects the payloads of one transaction; segment numbers go on from the run's counter.
pub struct Writer {
    next: i32,
    open: Vec<u8>,
    closed: Vec<(i32, Vec<u8>)>,
    blobs: PackBuilder,
}

impl Writer {
    pub fn new(next_segment: i32) -> Self {
        Self { next: next_segment, open: Vec::new(), closed: Vec::new(), blobs: PackBuilder::default() }
    }

    /// # Errors
    /// The value is no JSON; no type of ours is.
    pub fn add(&mut self, value: &impl Serialize) -> ApiResult<Place> {
        let bytes = serde_json::to_vec(value).map_err(|e| ApiError::internal(&e))?;
        if bytes.len() > BLOB_ABOVE {
            let digest = Digest::of(&bytes);
            self.blobs.add(digest, BlobKind::Data, &bytes);
            return Ok(Place { len: Some(bytes.len() as i32), blob: Some(digest.as_bytes().to_vec()), ..Place::default() });
        }
        if self.open.len() + bytes.len() > SEGMENT {
            self.close();
        }
        let place = Place { segment: Some(self.next), at: Some(self.open.len() as i32), len: Some(bytes.len() as i32), blob: None };
        self.open.extend_from_slice(&bytes);
        Ok(place)
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            self.closed.push((self.next, std::mem::take(&mut self.open)));
            self.next += 1;
        }
    }

    /// Writes what was collected; returns the run's next segment number.
    ///
    /// # Errors
    /// What the database says.
    pub async fn finish(mut self, tx: &Transaction<'_>, ns: &Namespace, rid: i64) -> ApiResult<i32> {
        self.close();
        for (segment, raw) in &self.closed {
            let data = zstd::bulk::compress(raw, 1).map_err(|e| ApiError::internal(&e))?;
            tx.run(
                "INSERT INTO segments (rid, segment, raw_len, data) VALUES ($1, $2, $3, $4)",
                &[&rid, segment, &(raw.len() as i32), &data],
            )
            .await?;
        }
        if !self.blobs.is_empty() {
            blobs::put_pack(tx, ns, &blobs::Verified::of(self.blobs.finish())?).await?;
        }
        Ok(self.next)
    }
}

/// Reads payloads, each segment once.
#[derive(Default)]
pub struct Reader {
    segments: HashMap<(i64, i32), Vec<u8>>,
}

impl Reader {
    /// Loads the segments that `places` need in one query.
    ///
    /// # Errors
    /// What the database says.
    pub async fn load(&mut self, client: &impl Connection, places: impl Iterator<Item = (i64, &Place)>) -> ApiResult<()> {
        let mut wanted: Vec<(i64, i32)> =
            places.filter_map(|(rid, p)| Some((rid, p.segment?))).filter(|k| !self.segments.contains_key(k)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let (rids, segments): (Vec<i64>, Vec<i32>) = wanted.into_iter().unzip();
        if rids.is_empty() {
            return Ok(());
        }
        let rows = client
            .fetch(
                "SELECT s.rid, s.segment, s.raw_len, s.data FROM unnest($1::bigint[], $2::int[]) w(rid, segment) JOIN segments s USING (rid, segment)",
                &[&rids, &segments],
            )
            .await?;
        for row in rows {
            let raw_len: i32 = row.get(2);
            let raw = zstd::bulk::decompress(row.get::<_, &[u8]>(3), raw_len as usize).map_err(|e| ApiError::internal(&e))?;
            self.segments.insert((row.get(0), row.get(1)), raw);
        }
        Ok(())
    }

    /// # Errors
    /// The payload is gone or broken: a fault of ours.
    pub async fn get<T: DeserializeOwned>(
        &self,
        client: &impl Connection,
        ns: &Namespace,
        rid: i64,
        place: &Place,
    ) -> ApiResult<Option<T>> {
        let parse = |bytes: &[u8]| serde_json::from_slice(bytes).map(Some).map_err(|e| ApiError::internal(&e));
        if let Some(digest) = place.blob.as_deref().and_then(Digest::from_slice) {
            return parse(&blobs::get(client, ns, &digest).await?);
        }
        let (Some(segment), Some(at), Some(len)) = (place.segment, place.at, place.len) else { return Ok(None) };
        let raw = self.segments.get(&(rid, segment)).and_then(|raw| raw.get(at as usize..(at + len) as usize));
        parse(raw.ok_or_else(|| ApiError::internal(&format!("segment {segment} of run {rid} is gone")))?)
    }
}
