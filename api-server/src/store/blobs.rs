//! Blobs in packs, per namespace.

use std::collections::{BTreeMap, HashMap, HashSet};

use axum::http::StatusCode;
use deadpool_postgres::Transaction;
use replayfork_core::Digest;
use replayfork_snapshot::{
    BlobKind, Blobs, Frame, MAX_NODE_DEPTH, Node, Nodes, PackIndex, PackedBlob, SnapshotError, parse_pack, read_frame,
};

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::Namespace;
use crate::store::packs::Wanted;

/// Of a blob's row `b`: it counts as not there, since it is about to be collected, or its pack is lost.
const ABSENT: &str = "(b.condemned OR EXISTS (SELECT 1 FROM packs p WHERE p.ns = b.ns AND p.pack = b.pack AND p.lost))";
/// How often places of blobs are looked up, when these turn out to have moved.
const MOVES: usize = 3;
/// Frames that are in memory at once.
const FRAMES: usize = 32;

/// Which of these blobs are not in the namespace's store.
///
/// # Errors
/// What the database says.
pub async fn missing(client: &impl Connection, ns: i32, digests: &[Digest]) -> ApiResult<Vec<Digest>> {
    let wanted: Vec<&[u8]> = digests.iter().map(Digest::as_bytes).collect();
    let sql = format!("SELECT b.digest FROM blobs b WHERE b.ns = $1 AND b.digest = ANY($2) AND NOT {ABSENT}");
    let rows = client.fetch(&sql, &[&ns, &wanted]).await?;
    let have: HashSet<Digest> = rows.iter().filter_map(|r| Digest::from_slice(r.get(0))).collect();
    Ok(digests.iter().copied().filter(|d| !have.contains(d)).collect())
}

/// A pack whose every blob has been verified.
pub struct Verified<B> {
    bytes: B,
    /// What its directories name, and it has not.
    named: Vec<Digest>,
}

impl<B: AsRef<[u8]>> Verified<B> {
    /// Verifies a pack; some 30 ms of work where it is full.
    ///
    /// # Errors
    /// A hostile pack, or a blob that is not what its digest says.
    pub fn of(bytes: B) -> ApiResult<Self> {
        let (mut inside, mut named) = (HashSet::new(), Vec::new());
        parse_pack(bytes.as_ref()).map_err(SnapshotError::from)?.each::<ApiError>(|blob, content| {
            inside.insert(blob.digest);
            if blob.kind == BlobKind::Directory {
                named.extend(Node::decode(content).map_err(SnapshotError::from)?.blobs());
            }
            Ok(())
        })?;
        named.retain(|d| !inside.contains(d));
        named.sort_unstable();
        named.dedup();
        Ok(Self { bytes, named })
    }

    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

/// Stores a pack; all that its directories' nodes name must be there already, or in it. Returns how many blobs were new, and how many
/// known.
///
/// # Errors
/// 409 with what must be sent first.
pub async fn put_pack(tx: &Transaction<'_>, ns: &Namespace, verified: &Verified<impl AsRef<[u8]>>) -> ApiResult<(i64, i64)> {
    let pack = parse_pack(verified.bytes()).map_err(SnapshotError::from)?;
    let columns = Columns::of(&pack);
    let id = ns.packs.put(tx, ns.number, pack.frames).await?;
    // Sorted, so that two uploads of the same blobs lock them in the same order.
    let stored = tx
        .run(
            &format!(
                "INSERT INTO blobs AS b (ns, digest, kind, pack, frame_at, frame_len, raw_at, raw_len)
                 SELECT $1, * FROM unnest($2::bytea[], $3::smallint[], array_fill($4::bigint, ARRAY[cardinality($2::bytea[])]), $5::int[], $6::int[], $7::int[], $8::int[]) t(digest)
                 ORDER BY t.digest
                 ON CONFLICT (ns, digest) DO UPDATE SET condemned = false, pack = excluded.pack, frame_at = excluded.frame_at, frame_len = excluded.frame_len,
                   raw_at = excluded.raw_at, raw_len = excluded.raw_len
                 WHERE {ABSENT}"
            ),
            &[&ns.number, &columns.digests, &columns.kinds, &id, &columns.frame_at, &columns.frame_len, &columns.raw_at, &columns.raw_len],
        )
        .await? as i64;
    // Only now, when whoever collects blobs waits for this transaction: see `collect`.
    let absent = missing(tx, ns.number, &verified.named).await?;
    if !absent.is_empty() {
        return Err(ApiError::missing(absent));
    }
    if stored == 0 {
        tx.run("DELETE FROM packs WHERE ns = $1 AND pack = $2", &[&ns.number, &id]).await?;
    }
    Ok((stored, pack.blobs.len() as i64 - stored))
}

/// Stores a pack that takes the place of others for the blobs in it.
///
/// # Errors
/// What the database says.
pub(super) async fn move_to(tx: &Transaction<'_>, ns: &Namespace, pack: &PackIndex<'_>) -> ApiResult<()> {
    let columns = Columns::of(pack);
    let id = ns.packs.put(tx, ns.number, pack.frames).await?;
    tx.run(
        "UPDATE blobs b SET pack = $3, frame_at = t.frame_at, frame_len = t.frame_len, raw_at = t.raw_at, raw_len = t.raw_len
             FROM unnest($2::bytea[], $4::int[], $5::int[], $6::int[], $7::int[]) t(digest, frame_at, frame_len, raw_at, raw_len)
             WHERE b.ns = $1 AND b.digest = t.digest",
        &[&ns.number, &columns.digests, &id, &columns.frame_at, &columns.frame_len, &columns.raw_at, &columns.raw_len],
    )
    .await?;
    Ok(())
}

/// The blobs of a pack as they are stored.
struct Columns<'p> {
    digests: Vec<&'p [u8]>,
    kinds: Vec<i16>,
    frame_at: Vec<i32>,
    frame_len: Vec<i32>,
    raw_at: Vec<i32>,
    raw_len: Vec<i32>,
}

impl<'p> Columns<'p> {
    fn of(pack: &'p PackIndex<'_>) -> Self {
        let column = |f: fn(&PackedBlob) -> u32| pack.blobs.iter().map(|b| f(b) as i32).collect();
        Self {
            digests: pack.blobs.iter().map(|b| b.digest.as_bytes()).collect(),
            kinds: pack.blobs.iter().map(|b| b.kind as i16).collect(),
            frame_at: column(|b| b.frame.at),
            frame_len: column(|b| b.frame.len),
            raw_at: column(|b| b.offset),
            raw_len: column(|b| b.len),
        }
    }
}

/// Reads many blobs, each frame once.
///
/// # Errors
/// 409 naming what is missing.
pub async fn get_many(client: &impl Connection, ns: &Namespace, digests: &[Digest]) -> ApiResult<HashMap<Digest, Vec<u8>>> {
    let mut found = HashMap::with_capacity(digests.len());
    let mut open = digests.to_vec();
    // Blobs may move to another pack between the two looks.
    for _ in 0..MOVES {
        read(client, ns, &open, &mut found).await?;
        open.retain(|d| !found.contains_key(d));
        if open.is_empty() {
            return Ok(found);
        }
    }
    let wanted: Vec<&[u8]> = open.iter().map(Digest::as_bytes).collect();
    let sql = "SELECT p.object FROM blobs b JOIN packs p USING (ns, pack) WHERE b.ns = $1 AND b.digest = ANY($2) AND p.lost LIMIT 1";
    let Some(lost) = client.fetch_opt(sql, &[&ns.number, &wanted]).await? else { return Err(ApiError::missing(open)) };
    let (many, object): (_, String) = (open.len(), lost.get(0));
    Err(ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        "BlobsLost",
        format!(
            "{many} of these blobs are gone from the blob store, the first object is {object}; whoever runs it must restore it from a backup"
        ),
    ))
}

async fn read(client: &impl Connection, ns: &Namespace, digests: &[Digest], found: &mut HashMap<Digest, Vec<u8>>) -> ApiResult<()> {
    let wanted: Vec<&[u8]> = digests.iter().map(Digest::as_bytes).collect();
    let rows = client
        .fetch(
            "SELECT b.digest, b.pack, b.frame_at, b.frame_len, b.raw_at, b.raw_len FROM blobs b WHERE b.ns = $1 AND b.digest = ANY($2) ORDER BY b.pack, b.frame_at",
            &[&ns.number, &wanted],
        )
        .await?;
    let mut inside: BTreeMap<Wanted, Vec<(Digest, usize, usize)>> = BTreeMap::new();
    for row in &rows {
        let digest = Digest::from_slice(row.get(0)).ok_or_else(|| ApiError::internal(&"a digest of another length"))?;
        let number = |column: usize| row.get::<_, i32>(column) as u32;
        let (at, len) = (number(4) as usize, number(5) as usize);
        inside.entry((row.get(1), Frame { at: number(2), len: number(3) })).or_default().push((digest, at, len));
    }
    let frames: Vec<Wanted> = inside.keys().copied().collect();
    for some in frames.chunks(FRAMES) {
        for (frame, bytes) in ns.packs.frames(client, ns.number, some).await? {
            let raw = read_frame(&bytes).map_err(|e| ApiError::internal(&e))?;
            for (digest, at, len) in &inside[&frame] {
                let content = raw.get(*at..at + len).filter(|content| Digest::of(content) == *digest);
                found.insert(*digest, content.ok_or_else(|| ApiError::internal(&format!("blob {digest} is broken")))?.to_vec());
            }
        }
    }
    Ok(())
}

/// # Errors
/// As [`get_many`].
pub async fn get(client: &impl Connection, ns: &Namespace, digest: &Digest) -> ApiResult<Vec<u8>> {
    let mut found = get_many(client, ns, std::slice::from_ref(digest)).await?;
    found.remove(digest).ok_or_else(|| ApiError::missing(vec![*digest]))
}

/// Nodes of trees, fetched level by level, so that pure code can walk them.
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
    pub async fn load(&mut self, client: &impl Connection, ns: &Namespace, roots: impl IntoIterator<Item = Digest>) -> ApiResult<()> {
        let mut level: Vec<Digest> = roots.into_iter().filter(|d| !self.nodes.contains(d)).collect();
        for _ in 0..MAX_NODE_DEPTH {
            level.sort_unstable();
            level.dedup();
            if level.is_empty() {
                return Ok(());
            }
            let mut below = Vec::new();
            for (digest, bytes) in get_many(client, ns, &level).await? {
                let node = Node::decode(&bytes).map_err(|e| ApiError::internal(&e))?;
                below.extend(node.nodes().into_iter().filter(|below| !self.nodes.contains(below)));
                self.nodes.insert(digest, node);
            }
            level = below;
        }
        Err(ApiError::bad_request("TreeTooDeep", format!("a tree has more than {} levels", replayfork_snapshot::MAX_DEPTH)))
    }
}
