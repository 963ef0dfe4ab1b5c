//! The end of a fork: the first one stands, with counts and outcome.

use deadpool_postgres::Transaction;
use replayfork_client::fork::{BlockedSpan, CloseFork, CloseReason, EndSpan, ForkResult, ForkState};
use replayfork_client::read::RunState;
use replayfork_core::fork::DeletionPolicy;
use replayfork_core::model::{Closing, Fidelity, SpanKind, Status};
use serde_json::Value;
use uuid::Uuid;

use super::steps::write_results;
use super::{get, unknown};
use crate::db::Connection;
use crate::planning::SHOWN;
use crate::problem::{ApiError, ApiResult};
use crate::store::payload::Writer;
use crate::store::{Namespace, Packs, graphs, runs, spans};

/// Ends a fork. The first end stands, and is what is returned.
///
/// # Errors
/// 404.
pub async fn close(client: &Transaction<'_>, packs: &Packs, uid: Uuid, request: &CloseFork, now: i64) -> ApiResult<ForkResult> {
    let row = client
        .fetch_opt("SELECT f.state, f.result, f.fork_rid, f.source_rid, r.base_rid FROM forks f LEFT JOIN runs r ON r.rid = f.fork_rid WHERE f.uid = $1 FOR UPDATE OF f", &[&uid])
        .await?
        .ok_or_else(|| unknown(uid))?;
    if row.get::<_, &str>(0) == "terminal" {
        return serde_json::from_value(row.get(1)).map_err(|e| ApiError::internal(&e));
    }
    let mut result = ForkResult::new(request.reason, request.message.chars().take(2000).collect::<String>());
    result.reproducibility = request.reproducibility;
    result.warnings = request.warnings.iter().take(SHOWN).map(|w| w.chars().take(500).collect()).collect();
    let rids = (row.get::<_, Option<i64>>(2), row.get::<_, Option<i64>>(3), row.get::<_, Option<i64>>(4));
    if let (Some(fork_rid), Some(source_rid), Some(base_rid)) = rids {
        interrupt_open_steps(client, packs, uid, fork_rid, now).await?;
        if !matches!(request.reason, CloseReason::Succeeded | CloseReason::Blocked) {
            skip_unreached(client, packs, uid, (fork_rid, source_rid, base_rid), request, now).await?;
        }
        summarize(client, packs, fork_rid, source_rid, &mut result).await?;
        // Blocked steps spent nothing here, and executed ones what they spent.
        client
            .run(
                "UPDATE runs SET state = 'sealed', outcome = $2, ended = $3, rev = rev + 1, tokens = t.tokens, cost_usd = t.cost_usd
                 FROM (SELECT sum(coalesce(o.tokens_in, 0) + coalesce(o.tokens_out, 0))::bigint AS tokens, sum(o.cost_usd) AS cost_usd
                       FROM (SELECT * FROM spans WHERE rid = $1
                             UNION ALL
                             SELECT * FROM spans s WHERE rid = $4 AND NOT EXISTS (SELECT 1 FROM spans f WHERE f.rid = $1 AND f.span_id = s.span_id)) o
                       WHERE o.tokens_in IS NOT NULL OR o.tokens_out IS NOT NULL OR o.cost_usd IS NOT NULL) t
                 WHERE rid = $1 AND state <> 'deleted'",
                &[&fork_rid, &result.outcome.map(Status::code), &now, &base_rid],
            )
            .await?;
    }
    make_terminal(client, uid, &result).await?;
    Ok(result)
}

pub(super) async fn make_terminal(client: &impl Connection, uid: Uuid, result: &ForkResult) -> ApiResult<()> {
    client
        .run(
            "UPDATE forks SET state = 'terminal', reason = $2, result = $3, terminal_at = now() WHERE uid = $1",
            &[&uid, &result.reason.to_string(), &serde_json::json!(result)],
        )
        .await?;
    Ok(())
}

/// A step that began and has no result is in doubt: it may have run, and is not run again.
async fn interrupt_open_steps(client: &Transaction<'_>, packs: &Packs, uid: Uuid, fork_rid: i64, now: i64) -> ApiResult<()> {
    let open = client.fetch("UPDATE fork_steps SET state = 'ended' WHERE uid = $1 AND state = 'begun' RETURNING span_id", &[&uid]).await?;
    for row in open {
        let span: String = row.get(0);
        let row = client.fetch_one("SELECT ns, segments, rev + 1 FROM runs WHERE rid = $1", &[&fork_rid]).await?;
        let ns = Namespace { number: row.get(0), packs: packs.clone() };
        let (segments, rev): (i32, i64) = (row.get(1), row.get(2));
        let closing = canceled(now, "Interrupted: the fork ended before this step's result arrived; it may have run".into());
        let mut payloads = Writer::new(segments);
        let place = payloads.add(&closing)?;
        spans::write_closing(client, fork_rid, &span, rev, &closing, &place).await?;
        let next = payloads.finish(client, &ns, fork_rid).await?;
        client.run("UPDATE runs SET segments = $2, rev = $3 WHERE rid = $1", &[&fork_rid, &next, &rev]).await?;
    }
    Ok(())
}

fn canceled(now: i64, error: String) -> Closing {
    Closing { error: Some(error), ..Closing::new(now, Status::Canceled, None) }
}

/// Spans of the plan that the fork did not come to get rows of their own, since a reader would else see the source's results.
/// What lies before the last reported span was decided about, and reused where it has no row.
async fn skip_unreached(
    client: &Transaction<'_>,
    packs: &Packs,
    uid: Uuid,
    (fork_rid, source_rid, base_rid): (i64, i64, i64),
    request: &CloseFork,
    now: i64,
) -> ApiResult<()> {
    let planned = client
        .fetch_opt(
            "SELECT f.planned FROM forks f WHERE f.uid = $1 AND f.planned IS NOT NULL AND EXISTS (SELECT 1 FROM runs r WHERE r.rid = $2 AND r.state <> 'deleted')",
            &[&uid, &fork_rid],
        )
        .await?;
    let Some(planned) = planned else { return Ok(()) };
    let planned = planned.get::<_, &[u8]>(0).chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let bounds = client
        .fetch(
            "(SELECT 1, s.ord, s.span_id FROM spans s
              WHERE s.rid = $2 AND s.span_id IN (
                SELECT span_id FROM spans WHERE rid = $1 AND pay_rid = $1 UNION ALL SELECT span_id FROM snapshots WHERE rid = $1 AND NOT inherited)
              ORDER BY s.ord DESC, s.span_id DESC LIMIT 1)
             UNION ALL SELECT 0, ord, span_id FROM spans WHERE rid = $2 AND span_id = $3",
            &[&fork_rid, &base_rid, &request.unreached_from],
        )
        .await?;
    let source = runs::by_rid(client, packs, source_rid).await?;
    let mut names = graphs::Known::default();
    let mut from = 0;
    for row in bounds {
        let place = names.places(client, &source, &[(row.get(1), row.get(2))]).await?[0];
        // What lies before the first one was decided about, and so was the last one that was reported.
        from = from.max(place + row.get::<_, i32>(0) as u32);
    }
    let unreached: Vec<u32> = planned.filter(|place| *place >= from).collect();
    if unreached.is_empty() {
        return Ok(());
    }
    names.load(client, &source, unreached.iter().copied()).await?;
    let ids: Vec<String> = unreached.iter().filter_map(|&place| names.get(place)).map(|n| n.id.clone()).collect();
    let closing = canceled(now, format!("not reached: the fork ended as {} before it came to this step", request.reason));
    let spans = spans::of_ids(client, &source, &ids).await?;
    let results: Vec<_> = spans.iter().map(|span| (span, EndSpan { closing: closing.clone(), ..EndSpan::skipped(span, now) })).collect();
    write_results(client, packs, uid, &results).await
}

async fn summarize(client: &impl Connection, packs: &Packs, fork_rid: i64, source_rid: i64, result: &mut ForkResult) -> ApiResult<()> {
    let rows = client
        .fetch(
            "SELECT span_id, name, kind, status, fidelity, blocked FROM spans WHERE rid = $1 AND pay_rid = $1 AND ord IS NOT NULL ORDER BY ord, span_id",
            &[&fork_rid],
        )
        .await?;
    for row in &rows {
        match Fidelity::from_code(row.get("fidelity")) {
            Some(Fidelity::Reexecuted | Fidelity::ServedFromRecording) => result.reexecuted += 1,
            Some(Fidelity::Reused) => result.reused += 1,
            Some(Fidelity::Overridden) => result.overridden += 1,
            Some(Fidelity::Blocked) => {
                result.blocked += 1;
                let blocked: Option<Value> = row.get("blocked");
                if result.blocked_spans.len() < SHOWN
                    && let (Some(blocked), Some(kind)) =
                        (blocked.and_then(|b| serde_json::from_value(b).ok()), SpanKind::from_code(row.get("kind")))
                {
                    result.blocked_spans.push(BlockedSpan { span: row.get("span_id"), name: row.get("name"), kind, blocked });
                }
            }
            _ => {}
        }
    }
    let source = runs::by_rid(client, packs, source_rid).await?;
    debug_assert_eq!(source.run.state, RunState::Sealed);
    result.reused += source.run.spans - rows.len() as i64;
    result.source_outcome = source.run.outcome;
    if matches!(result.reason, CloseReason::Succeeded | CloseReason::Blocked) {
        let fork = runs::by_rid(client, packs, fork_rid).await?;
        result.outcome = outcome(client, &fork, source.run.outcome).await?;
    }
    Ok(())
}

/// The status of the deciding span in the fork; without one, of the last span in sequence with a result. Where that is as it was, so
/// is the outcome: who recorded the run may have judged otherwise than by the status.
async fn outcome(client: &impl Connection, fork: &runs::Found, of_source: Option<Status>) -> ApiResult<Option<Status>> {
    let base = fork.base_rid.unwrap_or(fork.rid);
    let row = client
        .fetch_opt(
            "SELECT coalesce(f.status, s.status), coalesce(f.pay_rid = f.rid AND f.fidelity <> $6, false) FROM spans s LEFT JOIN spans f ON f.rid = $2 AND f.span_id = s.span_id
             WHERE s.rid = $1 AND s.ord IS NOT NULL
               AND CASE WHEN $3::text IS NULL THEN coalesce(f.status, s.status) NOT IN ($4, $5) ELSE s.span_id = $3 END
             ORDER BY s.ord DESC, s.span_id DESC LIMIT 1",
            &[&base, &fork.rid, &fork.run.decided_by, &Status::Blocked.code(), &Status::Running.code(), &Fidelity::Reused.code()],
        )
        .await?;
    match row {
        Some(row) if !row.get::<_, bool>(1) && of_source.is_some() => Ok(of_source),
        row => Ok(row.and_then(|r| Status::from_code(r.get(0)))),
    }
}

/// The custom resource is gone: an open fork is closed, and the run deleted where the spec asked for that.
///
/// # Errors
/// 404.
pub async fn resource_gone(client: &Transaction<'_>, packs: &Packs, uid: Uuid, now: i64) -> ApiResult<()> {
    let fork = get(client, uid).await?;
    if fork.state != ForkState::Terminal {
        close(client, packs, uid, &CloseFork::new(CloseReason::Deleted, "the ReplayFork was deleted"), now).await?;
    }
    client.run("UPDATE forks SET cr_gone_at = now() WHERE uid = $1", &[&uid]).await?;
    if fork.deletion_policy == DeletionPolicy::DeleteRun
        && let Some(fork_rid) = client.fetch_one("SELECT fork_rid FROM forks WHERE uid = $1", &[&uid]).await?.get::<_, Option<i64>>(0)
    {
        runs::delete(client, &runs::by_rid(client, packs, fork_rid).await?).await?;
    }
    Ok(())
}
