//! Blobs in packs, per namespace.

use std::collections::{HashMap, HashSet};

use deadpool_postgres::GenericClient;
use replayfork_core::Digest;
use replayfork_snapshot::{BlobKind, Blobs, Directory, Frame, Nodes, SnapshotError, parse_pack, read_frame};

use crate::problem::{ApiError, ApiResult};

/// Which of these blobs are not in the namespace's store.
///
/// # Errors
/// What the database says.
pub async fn missing(client: &impl GenericClient, ns: i32, digests: &[Digest]) -> ApiResult<Vec<Digest>> {
    let wanted: Vec<&[u8]> = digests.iter().map(Digest::as_bytes).collect();
    let rows = client.query("SELECT digest FROM blobs WHERE ns = $1 AND digest = ANY($2) AND NOT condemned", &[&ns, &wanted]).await?;
    let have: HashSet<Digest> = rows.iter().filter_map(|r| Digest::from_slice(r.get(0))).collect();
    Ok(digests.iter().copied().filter(|d| !have.contains(d)).collect())
}

/// Stores a pack whose every blob has been verified, with all that its directories name already there or in it.
/// Returns how many blobs were new, and how many known.
///
/// # Errors
/// A hostile pack, a blob that is not what its digest says; 409 with what must be sent first.
pub async fn put_pack(client: &impl GenericClient, ns: i32, bytes: &[u8]) -> ApiResult<(i64, i64)> {
    let pack = parse_pack(bytes).map_err(SnapshotError::from)?;
    let mut inside = HashSet::new();
    let mut named = Vec::new();
    pack.each::<ApiError>(|blob, content| {
        inside.insert(blob.digest);
        if blob.kind == BlobKind::Directory {
            let directory = Directory::decode(content).map_err(SnapshotError::from)?;
            named.extend(directory.entries.iter().flat_map(replayfork_snapshot::Entry::blobs));
        }
        Ok(())
    })?;
    named.retain(|d| !inside.contains(d));
    named.sort_unstable();
    named.dedup();
    let absent = missing(client, ns, &named).await?;
    if !absent.is_empty() {
        return Err(ApiError::missing(absent));
    }
    let count = pack.blobs.len() as i64;
    let digests: Vec<&[u8]> = pack.blobs.iter().map(|b| b.digest.as_bytes()).collect();
    let kinds: Vec<i16> = pack.blobs.iter().map(|b| b.kind as i16).collect();
    let column = |f: &dyn Fn(&replayfork_snapshot::PackedBlob) -> u32| pack.blobs.iter().map(|b| f(b) as i32).collect::<Vec<i32>>();
    let (frame_at, frame_len) = (column(&|b| b.frame.at), column(&|b| b.frame.len));
    let (raw_at, raw_len) = (column(&|b| b.offset), column(&|b| b.len));
    let row = client
        .query_one(
            "INSERT INTO packs (ns, size, data) VALUES ($1, $2, $3) RETURNING pack",
            &[&ns, &(pack.frames.len() as i32), &pack.frames],
        )
        .await?;
    let id: i64 = row.get(0);
    // Sorted, so that two uploads of the same blobs lock them in the same order.
    let stored = client
        .execute(
            "INSERT INTO blobs (ns, digest, kind, pack, frame_at, frame_len, raw_at, raw_len)
             SELECT $1, * FROM unnest($2::bytea[], $3::smallint[], array_fill($4::bigint, ARRAY[cardinality($2::bytea[])]), $5::int[], $6::int[], $7::int[], $8::int[]) t(digest)
             ORDER BY t.digest
             ON CONFLICT (ns, digest) DO UPDATE SET condemned = false WHERE blobs.condemned",
            &[&ns, &digests, &kinds, &id, &frame_at, &frame_len, &raw_at, &raw_len],
        )
        .await? as i64;
    if stored == 0 {
        client.execute("DELETE FROM packs WHERE ns = $1 AND pack = $2", &[&ns, &id]).await?;
    }
    Ok((stored, count - stored))
}

/// Reads many blobs, each frame once.
///
/// # Errors
/// 409 naming what is missing.
pub async fn get_many(client: &impl GenericClient, ns: i32, digests: &[Digest]) -> ApiResult<HashMap<Digest, Vec<u8>>> {
    let wanted: Vec<&[u8]> = digests.iter().map(Digest::as_bytes).collect();
    let rows = client
        .query(
            "SELECT b.digest, b.pack, b.frame_at, b.frame_len, b.raw_at, b.raw_len FROM blobs b WHERE b.ns = $1 AND b.digest = ANY($2) ORDER BY b.pack, b.frame_at",
            &[&ns, &wanted],
        )
        .await?;
    let mut found = HashMap::with_capacity(rows.len());
    let mut frame: Option<((i64, Frame), Vec<u8>)> = None;
    for row in rows {
        let digest = Digest::from_slice(row.get(0)).ok_or_else(|| ApiError::internal(&"a digest of another length"))?;
        let (pack, at, len): (i64, i32, i32) = (row.get(1), row.get(2), row.get(3));
        let key = (pack, Frame { at: at as u32, len: len as u32 });
        if frame.as_ref().is_none_or(|(k, _)| *k != key) {
            let row = client
                .query_one("SELECT substring(data FROM $3 FOR $4) FROM packs WHERE ns = $1 AND pack = $2", &[&ns, &pack, &(at + 1), &len])
                .await?;
            frame = Some((key, read_frame(row.get(0)).map_err(|e| ApiError::internal(&e))?));
        }
        let raw = frame.as_ref().map_or(&[][..], |(_, raw)| raw);
        let (at, len): (i32, i32) = (row.get(4), row.get(5));
        let content = raw.get(at as usize..(at + len) as usize).filter(|c| Digest::of(c) == digest);
        found.insert(digest, content.ok_or_else(|| ApiError::internal(&format!("blob {digest} is broken")))?.to_vec());
    }
    let absent: Vec<_> = digests.iter().copied().filter(|d| !found.contains_key(d)).collect();
    if absent.is_empty() { Ok(found) } else { Err(ApiError::missing(absent)) }
}

/// # Errors
/// As [`get_many`].
pub async fn get(client: &impl GenericClient, ns: i32, digest: &Digest) -> ApiResult<Vec<u8>> {
    let mut found = get_many(client, ns, std::slice::from_ref(digest)).await?;
    found.remove(digest).ok_or_else(|| ApiError::missing(vec![*digest]))
}

/// Directories of trees, fetched level by level, so that pure code can walk them.
#[derive(Default)]
pub struct Trees {
    pub nodes: Nodes,
}

/// Everything that pure code asks for has been loaded before.
pub struct Loaded;

impl Blobs for Loaded {
    fn get(&mut self, digest: &Digest) -> Result<Vec<u8>, SnapshotError> {
        Err(SnapshotError::Missing(*digest))
    }
}

impl Trees {
    /// Loads all directories of these trees that are not yet there.
    ///
    /// # Errors
    /// A missing or hostile node.
    pub async fn load(&mut self, client: &impl GenericClient, ns: i32, roots: impl IntoIterator<Item = Digest>) -> ApiResult<()> {
        let mut level: Vec<Digest> = roots.into_iter().filter(|d| !self.nodes.contains(d)).collect();
        for _ in 0..=replayfork_snapshot::MAX_DEPTH {
            level.sort_unstable();
            level.dedup();
            if level.is_empty() {
                return Ok(());
            }
            let mut below = Vec::new();
            for (digest, bytes) in get_many(client, ns, &level).await? {
                let directory = Directory::decode(&bytes).map_err(|e| ApiError::internal(&e))?;
                for entry in &directory.entries {
                    if let replayfork_snapshot::Kind::Directory { node, .. } = &entry.kind
                        && !self.nodes.contains(node)
                    {
                        below.push(*node);
                    }
                }
                self.nodes.insert(digest, directory);
            }
            level = below;
        }
        Err(ApiError::bad_request("TreeTooDeep", format!("a tree has more than {} levels", replayfork_snapshot::MAX_DEPTH)))
    }
}
