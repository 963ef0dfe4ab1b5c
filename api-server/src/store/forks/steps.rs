//! Steps: begun before they are executed, ended with what they gave.

use deadpool_postgres::GenericClient;
use replayfork_client::fork::{BeginSpan, EndSpan, ReusedSnapshots};
use replayfork_client::ingest::{Edge, SnapshotUpload};
use replayfork_core::Digest;
use replayfork_core::model::{Fidelity, Span, Status};
use uuid::Uuid;

use super::Claimed;
use crate::problem::{ApiError, ApiResult};
use crate::store::payload::Writer;
use crate::store::{snapshots, spans};

/// A step is about to be executed: said before the executor is told.
///
/// # Errors
/// 409 where the step was begun before, or the fork is not this pod's.
pub async fn begin(client: &impl GenericClient, uid: Uuid, claimed: &Claimed, span: &Span, begin: &BeginSpan) -> ApiResult<()> {
    let inserted = client
        .execute("INSERT INTO fork_steps (uid, span_id, state) VALUES ($1, $2, 'begun') ON CONFLICT DO NOTHING", &[&uid, &span.id])
        .await?;
    if inserted == 0 {
        let state: String =
            client.query_one("SELECT state FROM fork_steps WHERE uid = $1 AND span_id = $2", &[&uid, &span.id]).await?.get(0);
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
    let next = payloads.finish(client, claimed.ns, claimed.fork_rid).await?;
    client.execute("UPDATE runs SET segments = $2 WHERE rid = $1", &[&claimed.fork_rid, &next]).await?;
    Ok(())
}

/// A span's result. Said twice, the first one stands.
///
/// # Errors
/// 409 for a step that was not begun; 409 with the blobs that must be sent first.
pub async fn end(client: &impl GenericClient, uid: Uuid, span: &Span, result: &EndSpan) -> ApiResult<()> {
    if result.fidelity == Fidelity::Reexecuted {
        let updated = client
            .query_opt(
                "UPDATE fork_steps SET state = 'ended' WHERE uid = $1 AND span_id = $2 AND state = 'begun' RETURNING 1",
                &[&uid, &span.id],
            )
            .await?;
        if updated.is_none() {
            let row = client.query_opt("SELECT 1 FROM fork_steps WHERE uid = $1 AND span_id = $2", &[&uid, &span.id]).await?;
            return row.map(drop).ok_or_else(|| ApiError::conflict("StepNotBegun", format!("span {:?} was not begun", span.id)));
        }
    }
    write_result(client, uid, span, result).await
}

async fn bump(client: &impl GenericClient, rid: i64) -> ApiResult<(i64, i32)> {
    let row = client.query_one("UPDATE runs SET rev = rev + 1, last_at = now() WHERE rid = $1 RETURNING rev, segments", &[&rid]).await?;
    Ok((row.get(0), row.get(1)))
}

async fn insert_row(
    client: &impl GenericClient,
    rid: i64,
    span: &str,
    rev: i64,
    fidelity: Fidelity,
    digest: Option<&Digest>,
) -> ApiResult<()> {
    client
        .execute(
            "INSERT INTO spans (rid, span_id, rev, status, fidelity, input_digest, pay_rid) VALUES ($1, $2, $3, $4, $5, $6, $1) ON CONFLICT DO NOTHING",
            &[&rid, &span, &rev, &Status::Running.code(), &fidelity.code(), &digest.map(Digest::as_bytes)],
        )
        .await?;
    Ok(())
}

async fn write_result(client: &impl GenericClient, uid: Uuid, span: &Span, result: &EndSpan) -> ApiResult<()> {
    write_results(client, uid, &[(span, result.clone())]).await
}

/// Rows of the fork's own for these spans, in one revision.
pub(super) async fn write_results(client: &impl GenericClient, uid: Uuid, results: &[(&Span, EndSpan)]) -> ApiResult<()> {
    let row = client.query_one("SELECT fork_rid, ns FROM forks WHERE uid = $1", &[&uid]).await?;
    let (rid, ns): (i64, i32) = (row.get(0), row.get(1));
    let (rev, segments) = bump(client, rid).await?;
    let mut payloads = Writer::new(segments);
    for (span, result) in results {
        insert_row(client, rid, &span.id, rev, result.fidelity, result.input_digest.as_ref()).await?;
        let opening = payloads.add(&result.opening)?;
        spans::write_opening(client, rid, &span.id, rev, span.ord, &result.opening, &opening).await?;
        let closing = payloads.add(&result.closing)?;
        spans::write_closing(client, rid, &span.id, rev, &result.closing, &closing).await?;
    }
    let next = payloads.finish(client, ns, rid).await?;
    client.execute("UPDATE runs SET segments = $2 WHERE rid = $1", &[&rid, &next]).await?;
    for (span, result) in results {
        put_states(client, ns, rid, &span.id, result.snapshot_before, result.snapshot_after).await?;
    }
    Ok(())
}

async fn put_states(
    client: &impl GenericClient,
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
pub async fn reused(client: &impl GenericClient, claimed: &Claimed, states: &ReusedSnapshots) -> ApiResult<()> {
    put_states(client, claimed.ns, claimed.fork_rid, &states.span, Some(states.snapshot_before), Some(states.snapshot_after)).await
}
