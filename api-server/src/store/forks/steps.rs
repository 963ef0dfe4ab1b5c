//! Steps: begun before they are executed, ended with what they gave.

use deadpool_postgres::Transaction;
use replayfork_client::fork::{BeginSpan, CachedResult, EndSpan, ModelAnswered, ReusedSnapshots};
use replayfork_client::ingest::{Edge, SnapshotUpload};
use replayfork_core::Digest;
use replayfork_core::model::{Fidelity, Span, Status};
use uuid::Uuid;

use super::Claimed;
use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::payload::Writer;
use crate::store::{Namespace, Packs, runs, snapshots, spans};

/// A step is about to be executed: said before the executor is told.
///
/// # Errors
/// 409 where the step was begun before, or the fork is not this pod's.
pub async fn begin(client: &Transaction<'_>, uid: Uuid, claimed: &Claimed, span: &Span, begin: &BeginSpan) -> ApiResult<()> {
    let inserted = client
        .run("INSERT INTO fork_steps (uid, span_id, state) VALUES ($1, $2, 'begun') ON CONFLICT DO NOTHING", &[&uid, &span.id])
        .await?;
    if inserted == 0 {
        let state: String =
            client.fetch_one("SELECT state FROM fork_steps WHERE uid = $1 AND span_id = $2", &[&uid, &span.id]).await?.get(0);
        if state == "ended" {
            return Err(ApiError::conflict("StepEnded", format!("span {:?} was executed already", span.id)));
        }
        return Ok(());
    }
    let (rev, segments) = bump(client, claimed.fork_rid).await?;
    let mut payloads = Writer::new(segments);
    let place = payloads.add(&begin.opening)?;
    insert_row(client, claimed.fork_rid, &span.id, rev, Fidelity::Reexecuted, Some(&begin.input_digest)).await?;
    spans::write_opening(client, claimed.fork_rid, &span.id, rev, span.ord, &begin.opening, &place).await?;
    let next = payloads.finish(client, &claimed.ns, claimed.fork_rid).await?;
    client.run("UPDATE runs SET segments = $2 WHERE rid = $1", &[&claimed.fork_rid, &next]).await?;
    Ok(())
}

/// A span's result. Said twice, the first one stands.
///
/// # Errors
/// 409 for a step that was not begun; 409 with the blobs that must be sent first.
pub async fn end(client: &Transaction<'_>, uid: Uuid, claimed: &Claimed, span: &Span, result: &EndSpan) -> ApiResult<()> {
    if result.fidelity == Fidelity::Reexecuted {
        let updated = client
            .fetch_opt(
                "UPDATE fork_steps SET state = 'ended' WHERE uid = $1 AND span_id = $2 AND state = 'begun' RETURNING 1",
                &[&uid, &span.id],
            )
            .await?;
        if updated.is_none() {
            let row = client.fetch_opt("SELECT 1 FROM fork_steps WHERE uid = $1 AND span_id = $2", &[&uid, &span.id]).await?;
            return row.map(drop).ok_or_else(|| ApiError::conflict("StepNotBegun", format!("span {:?} was not begun", span.id)));
        }
    }
    write_results(client, &claimed.ns.packs, uid, &[(span, result.clone())]).await?;
    leave_out(client, uid, claimed, &result.left_out, result.opening.started).await?;
    if let Some(key) = result.cache_key.filter(|_| result.fidelity == Fidelity::Reexecuted && result.closing.output.is_some()) {
        let sql = "INSERT INTO results (ns, key, rid, span_id) SELECT ns, $2::bytea, fork_rid, $3::text FROM forks WHERE uid = $1 ON CONFLICT DO NOTHING";
        client.run(sql, &[&uid, &key.as_bytes(), &span.id]).await?;
    }
    Ok(())
}

/// Spans that ran as part of one that has another result now have none of their own.
async fn leave_out(client: &Transaction<'_>, uid: Uuid, claimed: &Claimed, ids: &[String], now: i64) -> ApiResult<()> {
    if ids.is_empty() {
        return Ok(());
    }
    let found = runs::by_rid(client, &claimed.ns.packs, claimed.source_rid).await?;
    let mut inner = Vec::new();
    for id in ids {
        inner.push(spans::one(client, &found, id).await?.0);
    }
    let results: Vec<_> = inner.iter().map(|span| (span, EndSpan::skipped(span, now))).collect();
    write_results(client, &claimed.ns.packs, uid, &results).await
}

/// A result that another fork left under this key. The fork that asks depends on that run from now on.
///
/// # Errors
/// What the database says.
pub async fn cached(client: &impl Connection, claimed: &Claimed, key: &Digest) -> ApiResult<Option<CachedResult>> {
    let row = client
        .fetch_opt(
            "SELECT c.rid, c.span_id FROM results c JOIN runs r USING (rid) WHERE c.ns = $1 AND c.key = $2 AND r.state <> 'deleted' FOR SHARE OF r",
            &[&claimed.ns.number, &key.as_bytes()],
        )
        .await?;
    let Some(row) = row else { return Ok(None) };
    let (rid, id): (i64, String) = (row.get(0), row.get(1));
    let found = runs::by_rid(client, &claimed.ns.packs, rid).await?;
    let (span, _) = spans::one(client, &found, &id).await?;
    let Some(closing) = span.closing.filter(|c| c.output.is_some()) else { return Ok(None) };
    let sql = "INSERT INTO run_deps (rid, needs) SELECT $1::bigint, $2::bigint WHERE $1::bigint <> $2::bigint ON CONFLICT DO NOTHING";
    client.run(sql, &[&claimed.fork_rid, &rid]).await?;
    Ok(Some(CachedResult {
        closing,
        snapshot_before: span.snapshot_before,
        snapshot_after: span.snapshot_after,
        run: found.run.id,
        span: id,
    }))
}

/// Notes that a model's endpoint is about to be asked for a step. `Some`: it was before, and this was the answer.
///
/// # Errors
/// 409 where it was asked and no answer is known: it is not asked twice.
pub async fn ask_once(client: &impl Connection, uid: Uuid, span: &str) -> ApiResult<Option<ModelAnswered>> {
    let step = client.fetch_opt("SELECT 1 FROM fork_steps WHERE uid = $1 AND span_id = $2 AND state = 'begun'", &[&uid, &span]).await?;
    if step.is_none() {
        return Err(ApiError::conflict("StepNotBegun", format!("span {span:?} was not begun")));
    }
    let first = client.run("INSERT INTO fork_answers (uid, span_id) VALUES ($1, $2) ON CONFLICT DO NOTHING", &[&uid, &span]).await? == 1;
    if first {
        return Ok(None);
    }
    let sql = "SELECT answer, asked_at > now() - interval '10 minutes' FROM fork_answers WHERE uid = $1 AND span_id = $2";
    let row = client.fetch_one(sql, &[&uid, &span]).await?;
    match row.get::<_, Option<serde_json::Value>>(0) {
        Some(answer) => Ok(Some(serde_json::from_value(answer).map_err(|e| ApiError::internal(&e))?)),
        None if row.get(1) => Err(ApiError::new(
            axum::http::StatusCode::TOO_EARLY,
            "ModelCallUnderWay",
            format!("the model is being asked for span {span:?}; ask again for its answer"),
        )),
        None => Err(ApiError::conflict(
            "ModelCallInDoubt",
            format!("the model was asked for span {span:?} before, and what it answered is not known; it is not asked twice"),
        )),
    }
}

/// # Errors
/// What the database says.
pub async fn answered(client: &impl Connection, uid: Uuid, span: &str, answer: &ModelAnswered) -> ApiResult<()> {
    client.run("UPDATE fork_answers SET answer = $3 WHERE uid = $1 AND span_id = $2", &[&uid, &span, &serde_json::json!(answer)]).await?;
    Ok(())
}

async fn bump(client: &impl Connection, rid: i64) -> ApiResult<(i64, i32)> {
    let row = client.fetch_one("UPDATE runs SET rev = rev + 1, last_at = now() WHERE rid = $1 RETURNING rev, segments", &[&rid]).await?;
    Ok((row.get(0), row.get(1)))
}

async fn insert_row(
    client: &impl Connection,
    rid: i64,
    span: &str,
    rev: i64,
    fidelity: Fidelity,
    digest: Option<&Digest>,
) -> ApiResult<()> {
    // A row that was taken over from the forked fork gives way.
    if client.run("DELETE FROM spans WHERE rid = $1 AND span_id = $2 AND pay_rid <> $1", &[&rid, &span]).await? > 0 {
        client.run("DELETE FROM snapshots WHERE rid = $1 AND span_id = $2 AND inherited", &[&rid, &span]).await?;
    }
    client
        .run(
            "INSERT INTO spans (rid, span_id, rev, status, fidelity, input_digest, pay_rid) VALUES ($1, $2, $3, $4, $5, $6, $1) ON CONFLICT DO NOTHING",
            &[&rid, &span, &rev, &Status::Running.code(), &fidelity.code(), &digest.map(Digest::as_bytes)],
        )
        .await?;
    Ok(())
}

/// Rows of the fork's own for these spans, in one revision.
pub(super) async fn write_results(client: &Transaction<'_>, packs: &Packs, uid: Uuid, results: &[(&Span, EndSpan)]) -> ApiResult<()> {
    let row = client.fetch_one("SELECT fork_rid, ns FROM forks WHERE uid = $1", &[&uid]).await?;
    let (rid, ns): (i64, _) = (row.get(0), Namespace { number: row.get(1), packs: packs.clone() });
    let (rev, segments) = bump(client, rid).await?;
    let mut payloads = Writer::new(segments);
    for (span, result) in results {
        insert_row(client, rid, &span.id, rev, result.fidelity, result.input_digest.as_ref()).await?;
        let opening = payloads.add(&result.opening)?;
        spans::write_opening(client, rid, &span.id, rev, span.ord, &result.opening, &opening).await?;
        let closing = payloads.add(&result.closing)?;
        spans::write_closing(client, rid, &span.id, rev, &result.closing, &closing).await?;
    }
    let next = payloads.finish(client, &ns, rid).await?;
    client.run("UPDATE runs SET segments = $2 WHERE rid = $1", &[&rid, &next]).await?;
    for (span, result) in results {
        put_states(client, ns.number, rid, &span.id, result.snapshot_before, result.snapshot_after).await?;
    }
    Ok(())
}

async fn put_states(
    client: &impl Connection,
    ns: i32,
    rid: i64,
    span: &str,
    before: Option<replayfork_core::model::SnapshotRef>,
    after: Option<replayfork_core::model::SnapshotRef>,
) -> ApiResult<()> {
    let upload =
        |edge, snapshot: Option<_>| snapshot.map(|s| SnapshotUpload { span: span.to_owned(), edge, snapshot: Some(s), missing: None });
    let uploads: Vec<_> = upload(Edge::Before, before).into_iter().chain(upload(Edge::After, after)).collect();
    snapshots::put(client, ns, rid, &uploads).await
}

/// Workspace states around a reused span, where they differ from the recorded ones.
///
/// # Errors
/// 409 with the blobs that must be sent first.
pub async fn reused(client: &impl Connection, claimed: &Claimed, states: &ReusedSnapshots) -> ApiResult<()> {
    put_states(client, claimed.ns.number, claimed.fork_rid, &states.span, Some(states.snapshot_before), Some(states.snapshot_after)).await
}
