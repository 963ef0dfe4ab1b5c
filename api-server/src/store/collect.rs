//! Collection of blobs that nothing names any more.
//!
//! A cycle marks what is reachable; condemns what is not and was born before the mark; waits until every transaction that may have
//! seen these uncondemned has ended; marks again, from everything not condemned too, and pardons what is reached; and deletes what is
//! still condemned. No writer waits. A writer of a root, or of a directory that names others, writes its row first and checks after,
//! in one READ COMMITTED transaction: it either ends before the second mark, or sees that what it names is condemned, and is told to
//! send it again, which pardons it.

use std::collections::HashSet;
use std::time::Duration;

use deadpool_postgres::{Client, Transaction};
use replayfork_core::Digest;
use replayfork_core::patch::Patch;
use replayfork_snapshot::{BlobKind, Node, PackBuilder, parse_pack, read_frame};
use tokio_postgres::Row;

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::{Namespace, Packs, blobs};

/// Blobs that one statement reads, condemns or deletes.
const BATCH: usize = 1000;
/// The advisory lock of the one collector.
pub const LOCK: i64 = 0x7266_6763;
/// How often it is looked whether older transactions have ended.
const LOOK: Duration = Duration::from_millis(100);

/// What a cycle has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    pub blobs: u64,
    pub packs: u64,
    /// Packs of which less than half was alive, and whose living blobs have moved.
    pub rewritten: u64,
    /// Objects that no pack named, in an object store.
    pub objects: u64,
    /// Namespaces in which something was wrong, so that nothing was deleted there.
    pub failed: u64,
    /// Stored bytes that are free now.
    pub bytes: i64,
}

/// One cycle over all namespaces; `None` where another collector is at work. `patience`: how long older transactions are waited for;
/// what is condemned then waits for the next cycle.
///
/// # Errors
/// What the database says; a tree that lacks a blob, which ends the cycle before anything is deleted.
pub async fn cycle(client: &mut Client, packs: &Packs, patience: Duration) -> ApiResult<Option<Collected>> {
    if !client.fetch_one("SELECT pg_try_advisory_lock($1)", &[&LOCK]).await?.get::<_, bool>(0) {
        return Ok(None);
    }
    let collected = all(client, packs, patience).await;
    client.run("SELECT pg_advisory_unlock($1)", &[&LOCK]).await?;
    collected.map(Some)
}

async fn all(client: &mut Client, packs: &Packs, patience: Duration) -> ApiResult<Collected> {
    client.run("DELETE FROM uploads WHERE uploaded_at < now() - interval '24 hours'", &[]).await?;
    let mut collected = Collected::default();
    for row in client.fetch("SELECT ns, name FROM namespaces ORDER BY ns", &[]).await? {
        let (ns, name) = (Namespace { number: row.get(0), packs: packs.clone() }, row.get::<_, String>(1));
        // What is wrong in one namespace keeps nothing in another.
        match of_namespace(client, &ns, patience, &mut collected).await {
            Ok(true) => {}
            Ok(false) => {
                tracing::info!(namespace = name, "a transaction goes on for so long that the collection of blobs waits for the next cycle")
            }
            Err(error) => {
                tracing::warn!(namespace = name, cause = %error, "blobs of this namespace could not be collected");
                collected.failed += 1;
            }
        }
    }
    collected.objects = packs.sweep(client).await?;
    Ok(collected)
}

/// `false`: older transactions go on for too long.
async fn of_namespace(client: &mut Client, ns: &Namespace, patience: Duration, collected: &mut Collected) -> ApiResult<bool> {
    condemn(client, ns).await?;
    if !older_have_ended(client, patience).await? {
        return Ok(false);
    }
    pardon(client, ns).await?;
    collected.blobs += delete(client, ns.number).await?;
    sweep_packs(client, ns, collected).await?;
    Ok(true)
}

/// What runs, forks and uploads of the namespace name.
async fn roots(client: &impl Connection, ns: i32) -> ApiResult<HashSet<Digest>> {
    let sql = "SELECT s.node FROM snapshots s JOIN runs r USING (rid) WHERE r.ns = $1 AND s.node IS NOT NULL
         UNION SELECT unnest(ARRAY[s.in_blob, s.out_blob]) FROM spans s JOIN runs r USING (rid)
           WHERE r.ns = $1 AND (s.in_blob IS NOT NULL OR s.out_blob IS NOT NULL)";
    let digest = |row: &Row| Digest::from_slice(row.get::<_, Option<&[u8]>>(0)?);
    let mut roots: HashSet<Digest> = client.fetch(sql, &[&ns]).await?.iter().filter_map(digest).collect();
    let inherited = client.fetch("SELECT inherits FROM runs WHERE ns = $1 AND state <> 'deleted' AND inherits <> '[]'", &[&ns]).await?;
    let mut inherits = Vec::new();
    for row in inherited {
        let patches: Vec<Patch> = serde_json::from_value(row.get(0)).map_err(|e| ApiError::internal(&e))?;
        inherits.extend(patches.iter().flat_map(Patch::contents).filter_map(|c| c.digest.parse::<Digest>().ok()));
    }
    let inherits: Vec<&[u8]> = inherits.iter().map(Digest::as_bytes).collect();
    // Whoever names a content that is not there is told so.
    let sql = "SELECT digest FROM blobs WHERE ns = $1 AND digest IN (SELECT digest FROM uploads WHERE ns = $1
         UNION SELECT b.digest FROM fork_blobs b JOIN forks f USING (uid) WHERE f.ns = $1 UNION SELECT unnest($2::bytea[]))";
    roots.extend(client.fetch(sql, &[&ns, &inherits]).await?.iter().filter_map(digest));
    Ok(roots)
}

/// All that is reached from these, themselves included.
async fn reached(client: &impl Connection, ns: &Namespace, from: HashSet<Digest>) -> ApiResult<HashSet<Digest>> {
    let mut reached = from;
    let mut open: Vec<Digest> = reached.iter().copied().collect();
    while !open.is_empty() {
        let some = open.split_off(open.len().saturating_sub(BATCH));
        for node in nodes(client, ns, &some).await? {
            for blob in node.blobs() {
                if reached.insert(blob) {
                    open.push(blob);
                }
            }
        }
    }
    Ok(reached)
}

/// Those of these blobs that are nodes of directories.
async fn nodes(client: &impl Connection, ns: &Namespace, digests: &[Digest]) -> ApiResult<Vec<Node>> {
    let wanted: Vec<&[u8]> = digests.iter().map(Digest::as_bytes).collect();
    let rows = client.fetch("SELECT digest, kind FROM blobs WHERE ns = $1 AND digest = ANY($2)", &[&ns.number, &wanted]).await?;
    if rows.len() != digests.len() {
        let there: HashSet<Digest> = rows.iter().filter_map(|row| Digest::from_slice(row.get(0))).collect();
        let lacking = digests.iter().find(|d| !there.contains(d)).map(ToString::to_string).unwrap_or_default();
        return Err(ApiError::internal(&format!("blob {lacking} of namespace {} is named and not there; nothing is collected", ns.number)));
    }
    let directory = BlobKind::Directory as i16;
    let of_kind = rows.iter().filter(|row| row.get::<_, i16>(1) == directory);
    let wanted: Vec<Digest> = of_kind.filter_map(|row| Digest::from_slice(row.get(0))).collect();
    let read = blobs::get_many(client, ns, &wanted).await?;
    read.values().map(|bytes| Node::decode(bytes).map_err(|e| ApiError::internal(&e))).collect()
}

/// Condemns what no root reaches and what was born before these were looked at.
async fn condemn(client: &impl Connection, ns: &Namespace) -> ApiResult<()> {
    let before: String = client.fetch_one("SELECT pg_snapshot_xmin(pg_current_snapshot())::text", &[]).await?.get(0);
    let marked = reached(client, ns, roots(client, ns.number).await?).await?;
    let mut after: Vec<u8> = Vec::new();
    loop {
        let page = client
            .fetch(
                "SELECT digest FROM blobs WHERE ns = $1 AND digest > $2 AND NOT condemned AND born < $3::text::xid8 ORDER BY digest LIMIT $4",
                &[&ns.number, &after, &before, &(BATCH as i64)],
            )
            .await?;
        let Some(last) = page.last() else { return Ok(()) };
        after = last.get(0);
        let unreached = |digest: &&[u8]| Digest::from_slice(digest).is_some_and(|d| !marked.contains(&d));
        let condemned: Vec<&[u8]> = page.iter().map(|row| row.get(0)).filter(unreached).collect();
        client
            .run("UPDATE blobs SET condemned = true WHERE ns = $1 AND digest = ANY($2) AND NOT condemned", &[&ns.number, &condemned])
            .await?;
    }
}

/// Waits until all transactions have ended that began before now.
async fn older_have_ended(client: &impl Connection, patience: Duration) -> ApiResult<bool> {
    let now: String = client.fetch_one("SELECT pg_current_xact_id()::text", &[]).await?.get(0);
    let ended = tokio::time::timeout(patience, async {
        loop {
            let row = client.fetch_one("SELECT pg_snapshot_xmin(pg_current_snapshot()) > $1::text::xid8", &[&now]).await?;
            if row.get(0) {
                return Ok::<_, ApiError>(());
            }
            tokio::time::sleep(LOOK).await;
        }
    });
    match ended.await {
        Ok(ended) => ended.map(|()| true),
        Err(_) => Ok(false),
    }
}

/// Frees what is reached from the roots, or from anything that is not condemned.
async fn pardon(client: &impl Connection, ns: &Namespace) -> ApiResult<()> {
    let mut from = roots(client, ns.number).await?;
    let live = client.fetch("SELECT digest FROM blobs WHERE ns = $1 AND NOT condemned", &[&ns.number]).await?;
    from.extend(live.iter().filter_map(|row| Digest::from_slice(row.get(0))));
    let reached: Vec<Digest> = reached(client, ns, from).await?.into_iter().collect();
    for page in reached.chunks(BATCH) {
        let page: Vec<&[u8]> = page.iter().map(Digest::as_bytes).collect();
        client.run("UPDATE blobs SET condemned = false WHERE ns = $1 AND digest = ANY($2) AND condemned", &[&ns.number, &page]).await?;
    }
    Ok(())
}

async fn delete(client: &impl Connection, ns: i32) -> ApiResult<u64> {
    let sql = "DELETE FROM blobs WHERE ns = $1 AND condemned AND digest IN (SELECT digest FROM blobs WHERE ns = $1 AND condemned LIMIT $2)";
    let mut deleted = 0;
    loop {
        let now = client.run(sql, &[&ns, &(BATCH as i64)]).await?;
        deleted += now;
        if now == 0 {
            return Ok(deleted);
        }
    }
}

/// Deletes packs without a living blob, and moves what lives in packs of which less than half does.
async fn sweep_packs(client: &mut Client, ns: &Namespace, collected: &mut Collected) -> ApiResult<()> {
    let sql = "SELECT p.pack, p.size, coalesce(l.live, 0) FROM packs p
         LEFT JOIN (SELECT pack, sum(frame_len) AS live FROM (SELECT DISTINCT pack, frame_at, frame_len FROM blobs WHERE ns = $1) f GROUP BY pack) l USING (pack)
         WHERE p.ns = $1 AND coalesce(l.live, 0) * 2 < p.size ORDER BY p.pack";
    for row in client.fetch(sql, &[&ns.number]).await? {
        let (pack, size, live): (i64, i32, i64) = (row.get(0), row.get(1), row.get(2));
        let tx = client.transaction().await?;
        let grown = if live > 0 { rewrite(&tx, ns, pack).await? } else { 0 };
        tx.run("DELETE FROM packs WHERE ns = $1 AND pack = $2", &[&ns.number, &pack]).await?;
        tx.commit().await?;
        if live > 0 {
            collected.rewritten += 1
        } else {
            collected.packs += 1
        }
        collected.bytes += i64::from(size) - grown;
    }
    Ok(())
}

/// Moves the living blobs of a pack to a new one; returns that one's size.
async fn rewrite(tx: &Transaction<'_>, ns: &Namespace, pack: i64) -> ApiResult<i64> {
    let data = ns.packs.whole(tx, ns.number, pack).await?;
    let living = tx
        .fetch(
            "SELECT digest, kind, frame_at, frame_len, raw_at, raw_len FROM blobs WHERE ns = $1 AND pack = $2 ORDER BY frame_at, raw_at FOR UPDATE",
            &[&ns.number, &pack],
        )
        .await?;
    let mut moved = PackBuilder::default();
    let mut frame: Option<(i32, Vec<u8>)> = None;
    for row in &living {
        let broken = || ApiError::internal(&format!("pack {pack} of namespace {} is broken", ns.number));
        let (at, len): (i32, i32) = (row.get(2), row.get(3));
        if frame.as_ref().is_none_or(|(of, _)| *of != at) {
            let bytes = data.get(at as usize..(at + len) as usize).ok_or_else(broken)?;
            frame = Some((at, read_frame(bytes).map_err(|e| ApiError::internal(&e))?));
        }
        let raw = frame.as_ref().map_or(&[][..], |(_, raw)| raw);
        let (at, len): (i32, i32) = (row.get(4), row.get(5));
        let digest = Digest::from_slice(row.get(0)).ok_or_else(broken)?;
        let content = raw.get(at as usize..(at + len) as usize).filter(|c| Digest::of(c) == digest).ok_or_else(broken)?;
        moved.add(digest, if row.get::<_, i16>(1) == BlobKind::Directory as i16 { BlobKind::Directory } else { BlobKind::Data }, content);
    }
    let bytes = moved.finish();
    let pack = parse_pack(&bytes).map_err(|e| ApiError::internal(&e))?;
    blobs::move_to(tx, ns, &pack).await?;
    Ok(pack.frames.len() as i64)
}
