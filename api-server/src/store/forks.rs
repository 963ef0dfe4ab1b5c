//! Forks: registered, claimed, terminal.

use deadpool_postgres::GenericClient;
use replayfork_client::fork::{
    BeginSpan, BlockedSpan, CloseReason, EndSpan, Fork, ForkResult, ForkState, PlanOverview, RegisterFork, ReusedSnapshots,
};
use replayfork_client::ingest::{Edge, SnapshotUpload};
use replayfork_client::read::{ForkedFrom, RunState};
use replayfork_core::Digest;
use replayfork_core::fork::{DeletionPolicy, ForkSpec};
use replayfork_core::model::{Closing, Fidelity, Opening, Output, Span, SpanKind, Status, Verdict};
use replayfork_core::plan::{Mark, Plan};
use replayfork_core::source::Source;
use serde_json::Value;
use uuid::Uuid;

use crate::config::Config;
use crate::planning::{self, Refusal, SHOWN};
use crate::problem::{ApiError, ApiResult};
use crate::store::payload::Writer;
use crate::store::{runs, snapshots, spans};

/// Fields of a spec that may change while the fork stays the same.
const MUTABLE: [&str; 4] = ["suspend", "cancel", "ttlSecondsAfterFinished", "deletionPolicy"];

const COLUMNS: &str = "f.uid, n.name AS namespace, f.name, f.state, f.plan -> 'overview' AS overview, f.pod_uid, f.deletion_policy, f.result, \
    s.id AS source_run, s.name AS source_run_name, r.id AS fork_run, r.name AS fork_run_name, \
    to_char(f.registered_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS registered_at, \
    to_char(f.cancel_requested_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS cancel_requested_at, \
    to_char(f.claimed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS claimed_at, \
    to_char(f.terminal_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') AS terminal_at";
const FROM: &str = "forks f JOIN namespaces n USING (ns) LEFT JOIN runs s ON s.rid = f.source_rid LEFT JOIN runs r ON r.rid = f.fork_rid";

fn view(row: &tokio_postgres::Row) -> ApiResult<Fork> {
    let parse = |column: &str| row.get::<_, Option<Value>>(column);
    let result: Option<ForkResult> = parse("result").map(serde_json::from_value).transpose().map_err(|e| ApiError::internal(&e))?;
    let plan: Option<PlanOverview> = parse("overview").map(serde_json::from_value).transpose().map_err(|e| ApiError::internal(&e))?;
    Ok(Fork {
        uid: row.get("uid"),
        namespace: row.get("namespace"),
        name: row.get("name"),
        state: match row.get("state") {
            "registered" => ForkState::Registered,
            "claimed" => ForkState::Claimed,
            _ => ForkState::Terminal,
        },
        source_run: row.get("source_run"),
        source_run_name: row.get("source_run_name"),
        fork_run: row.get("fork_run"),
        fork_run_name: row.get("fork_run_name"),
        plan,
        pod_uid: row.get("pod_uid"),
        cancel_requested_at: row.get("cancel_requested_at"),
        deletion_policy: if row.get::<_, &str>("deletion_policy") == "DeleteRun" {
            DeletionPolicy::DeleteRun
        } else {
            DeletionPolicy::Retain
        },
        result,
        registered_at: row.get("registered_at"),
        claimed_at: row.get("claimed_at"),
        terminal_at: row.get("terminal_at"),
    })
}

/// # Errors
/// 404 for an unknown uid.
pub async fn get(client: &impl GenericClient, uid: Uuid) -> ApiResult<Fork> {
    let row = client.query_opt(&format!("SELECT {COLUMNS} FROM {FROM} WHERE f.uid = $1"), &[&uid]).await?;
    view(&row.ok_or_else(|| unknown(uid))?)
}

fn unknown(uid: Uuid) -> ApiError {
    ApiError::not_found("ForkNotFound", format!("no fork with the uid {uid} is registered"))
}

/// Forks that the operator must compare with the custom resources that exist: open ones, and those whose run goes with them.
///
/// # Errors
/// What the database says.
pub async fn open_or_owned(client: &impl GenericClient) -> ApiResult<Vec<Fork>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM {FROM} WHERE f.cr_gone_at IS NULL AND (f.state <> 'terminal' OR (f.deletion_policy = 'DeleteRun' AND f.fork_rid IS NOT NULL)) ORDER BY f.registered_at"
    );
    client.query(&sql, &[]).await?.iter().map(view).collect()
}

/// The digest of a spec without the fields that may change.
fn spec_digest(spec: &Value) -> Digest {
    let mut spec = spec.clone();
    if let Some(members) = spec.as_object_mut() {
        for field in MUTABLE {
            members.remove(field);
        }
    }
    Digest::of_json(&spec)
}

/// Registers a fork: plans it, pins plan and source, and creates its run. A spec that can't be planned, an empty plan
/// and one where nothing can run are terminal at once. The caller commits.
///
/// # Errors
/// 409 for another spec under this uid, or for a run that is not sealed yet (no row is written then).
pub async fn register(client: &impl GenericClient, config: &Config, uid: Uuid, request: &RegisterFork, now: i64) -> ApiResult<Fork> {
    client.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", &[&uid.to_string()]).await?;
    let digest = spec_digest(&request.spec);
    if let Some(row) = client.query_opt("SELECT spec_digest FROM forks WHERE uid = $1", &[&uid]).await? {
        if row.get::<_, &[u8]>(0) != digest.as_bytes() {
            return Err(ApiError::conflict(
                "SpecChanged",
                format!("fork {uid} was registered with another spec; specs don't change: create a new ReplayFork"),
            ));
        }
        let policy = deletion_policy(&request.spec);
        client.execute("UPDATE forks SET deletion_policy = $2 WHERE uid = $1 AND deletion_policy <> $2", &[&uid, &policy]).await?;
        return get(client, uid).await;
    }
    let ns = super::namespace(client, &request.namespace).await?;
    client
        .execute(
            "INSERT INTO forks (uid, ns, name, spec, spec_digest, deletion_policy) VALUES ($1, $2, $3, $4, $5, $6)",
            &[&uid, &ns, &request.name, &request.spec, &digest.as_bytes(), &deletion_policy(&request.spec)],
        )
        .await?;
    let planned = match serde_json::from_value::<ForkSpec>(request.spec.clone()) {
        Err(error) => Err(Refusal { reason: CloseReason::SpecInvalid, message: format!("spec: {error}") }),
        Ok(spec) => match runs::find(client, &request.namespace, &spec.source.run).await {
            Err(error) if error.reason == "RunNotFound" => {
                Err(Refusal { reason: CloseReason::RunNotFound, message: format!("spec.source.run: {}", error.detail) })
            }
            Err(error) => return Err(error),
            Ok(found) => {
                match planning::check_sealed(&found) {
                    Err(error) if request.give_up => {
                        return refuse(client, uid, CloseReason::RunNotSealed, error.detail).await;
                    }
                    checked => checked?,
                }
                let source = planning::load(client, &found).await?;
                planning::plan_fork(config, &found, &source, &spec).map(|(plan, overview)| (found, source, plan, overview))
            }
        },
    };
    let (found, source, plan, overview) = match planned {
        Ok(planned) => planned,
        Err(Refusal { reason, message }) => {
            return refuse(client, uid, reason, message).await;
        }
    };
    create_run(client, uid, request, &found, &source, &plan, &overview, now).await?;
    if !plan.needs_sandbox() {
        record_without_sandbox(client, uid, &request.spec, &source, &plan, now).await?;
        let (reason, message) = if plan.is_empty() {
            (CloseReason::Succeeded, "the patches change nothing that would have to run".to_owned())
        } else {
            (CloseReason::Blocked, "every span that the patches reach is blocked".to_owned())
        };
        close(client, uid, reason, &message, now).await?;
    }
    get(client, uid).await
}

/// A fork that has no plan is terminal at once.
async fn refuse(client: &impl GenericClient, uid: Uuid, reason: CloseReason, message: String) -> ApiResult<Fork> {
    let result = ForkResult {
        reason,
        message,
        outcome: None,
        source_outcome: None,
        reexecuted: 0,
        reused: 0,
        overridden: 0,
        blocked: 0,
        blocked_spans: vec![],
    };
    make_terminal(client, uid, &result).await?;
    get(client, uid).await
}

fn deletion_policy(spec: &Value) -> &'static str {
    match spec.get("deletionPolicy").and_then(Value::as_str) {
        Some("DeleteRun") => "DeleteRun",
        _ => "Retain",
    }
}

#[allow(clippy::too_many_arguments)]
async fn create_run(
    client: &impl GenericClient,
    uid: Uuid,
    request: &RegisterFork,
    found: &runs::Found,
    source: &Source,
    plan: &Plan,
    overview: &PlanOverview,
    now: i64,
) -> ApiResult<()> {
    let name = runs::free_name(client, found.ns, &replayfork_client::run_id::to_label(&request.name)).await?;
    let step = source.index(&plan.fork_span).map_or(0, |i| i as i64 + 1);
    let span_name = source.index(&plan.fork_span).map_or("", |i| source.spans[i].opening.name.as_str());
    let from = ForkedFrom {
        run: found.run.id,
        run_name: found.run.name.clone(),
        span: plan.fork_span.clone(),
        span_name: span_name.to_owned(),
        step,
        fork: uid,
        fork_name: request.name.clone(),
    };
    let row = client
        .query_one(
            "INSERT INTO runs (id, ns, name, kind, agent, model, session, labels, environment, decided_by, started, spans, tokens, cost_usd, base_rid, forked_from)
             SELECT $2, ns, $3, 'fork', agent, model, session, labels, $4, decided_by, $5, spans, tokens, cost_usd, rid, $6 FROM runs WHERE rid = $1
             RETURNING rid",
            &[&found.rid, &Uuid::now_v7(), &name, &serde_json::json!(overview.environment), &now, &serde_json::json!(from)],
        )
        .await?;
    let fork_rid: i64 = row.get(0);
    client.execute("INSERT INTO run_deps (rid, needs) VALUES ($1, $2)", &[&fork_rid, &found.rid]).await?;
    let plan_json = serde_json::json!({"overview": overview, "plan": plan});
    client
        .execute(
            "UPDATE forks SET source_rid = $2, fork_rid = $3, plan = $4, plan_digest = $5, environment = $6 WHERE uid = $1",
            &[&uid, &found.rid, &fork_rid, &plan_json, &plan.digest.as_bytes(), &serde_json::json!(overview.environment)],
        )
        .await?;
    Ok(())
}

/// Overridden and blocked spans of a fork that needs no pod.
async fn record_without_sandbox(
    client: &impl GenericClient,
    uid: Uuid,
    spec: &Value,
    source: &Source,
    plan: &Plan,
    now: i64,
) -> ApiResult<()> {
    let spec: ForkSpec = serde_json::from_value(spec.clone()).map_err(|e| ApiError::internal(&e))?;
    for planned in &plan.spans {
        let Some(index) = source.index(&planned.id) else { continue };
        let record = &source.spans[index];
        let mut closing = Closing {
            ended: now,
            status: Status::Completed,
            verdict: record.verdict(),
            output: None,
            error: None,
            input_tokens: None,
            output_tokens: None,
            cost_usd: None,
            blocked: vec![],
        };
        let fidelity = match planned.mark {
            None => {
                closing.output = Some(overriding(source, &spec, index)?);
                Fidelity::Overridden
            }
            Some(Mark::WillBeBlocked | Mark::MayBeBlocked) => {
                closing.status = Status::Blocked;
                closing.verdict = Verdict::None;
                closing.blocked = planned.blocked.clone();
                Fidelity::Blocked
            }
            Some(_) => return Err(ApiError::internal(&"a span that may run in a plan without a sandbox")),
        };
        let opening = Opening { started: now, ..record.opening.clone() };
        let (snapshot_before, snapshot_after) =
            if fidelity == Fidelity::Overridden { (record.snapshot_before, record.snapshot_after) } else { (None, None) };
        write_result(client, uid, record, &EndSpan { fidelity, opening, closing, snapshot_before, snapshot_after, input_digest: None })
            .await?;
    }
    Ok(())
}

fn overriding(source: &Source, spec: &ForkSpec, index: usize) -> ApiResult<Output> {
    let fork_span = source.find("spec.source.span", &spec.source.run, &spec.source.span).map_err(|e| ApiError::internal(&e))?;
    let patches =
        replayfork_core::patch::Patches::resolve(source, &spec.source, fork_span, &spec.patches).map_err(|e| ApiError::internal(&e))?;
    let output = patches.output.get(&index).ok_or_else(|| ApiError::internal(&"an overridden span without an override"))?;
    Ok(Output::overridden(&output.text, output.exit_code.unwrap_or(0)))
}

/// What a sandbox's request is checked against.
pub struct Claimed {
    pub fork_rid: i64,
    pub source_rid: i64,
    pub ns: i32,
}

/// The row lock of a claimed fork of this pod.
///
/// # Errors
/// 404; 409 where the fork is not claimed by this pod, or has ended.
pub async fn claimed(client: &impl GenericClient, uid: Uuid, pod_uid: &str) -> ApiResult<Claimed> {
    let row = client
        .query_opt("SELECT state, pod_uid, fork_rid, source_rid, ns FROM forks WHERE uid = $1 FOR UPDATE", &[&uid])
        .await?
        .ok_or_else(|| unknown(uid))?;
    match row.get::<_, &str>(0) {
        "claimed" if row.get::<_, Option<&str>>(1) == Some(pod_uid) => {}
        "terminal" => return Err(ApiError::conflict("ForkTerminal", "the fork has ended; its result stands")),
        _ => return Err(ApiError::conflict("ForkNotClaimed", "the fork is not claimed by this pod")),
    }
    let missing = || ApiError::conflict("ForkRunGone", "the fork's run was deleted");
    Ok(Claimed {
        fork_rid: row.get::<_, Option<i64>>(2).ok_or_else(missing)?,
        source_rid: row.get::<_, Option<i64>>(3).ok_or_else(missing)?,
        ns: row.get(4),
    })
}

/// Claims a fork for a pod: once. The same number gets the same answer.
///
/// # Errors
/// 425 until the operator has named the pod; 409 for any other pod or number, and after the end.
pub async fn claim(client: &impl GenericClient, uid: Uuid, pod_uid: &str, nonce: &[u8]) -> ApiResult<()> {
    let row = client
        .query_opt("SELECT state, pod_uid, claim FROM forks WHERE uid = $1 FOR UPDATE", &[&uid])
        .await?
        .ok_or_else(|| unknown(uid))?;
    let (state, named, claim): (&str, Option<&str>, Option<&[u8]>) = (row.get(0), row.get(1), row.get(2));
    match (state, named) {
        ("terminal", _) => Err(ApiError::conflict("ForkTerminal", "the fork has ended; its result stands")),
        (_, None) => {
            Err(ApiError::new(axum::http::StatusCode::TOO_EARLY, "PodNotNamed", "the operator has not named the fork's pod yet; try again"))
        }
        (_, Some(pod)) if pod != pod_uid => Err(ApiError::conflict("ForkClaimed", "another pod is this fork's")),
        ("claimed", _) if claim == Some(nonce) => Ok(()),
        ("claimed", _) => Err(ApiError::conflict("ForkClaimed", "the fork is already claimed; a fork runs at most once")),
        _ => {
            client.execute("UPDATE forks SET state = 'claimed', claim = $2, claimed_at = now() WHERE uid = $1", &[&uid, &nonce]).await?;
            Ok(())
        }
    }
}

/// Names the pod of a fork's Job. Said again, it is the same pod or it is refused.
///
/// # Errors
/// 404; 409 once another pod is named or the fork has ended.
pub async fn name_pod(client: &impl GenericClient, uid: Uuid, pod_uid: &str) -> ApiResult<()> {
    let row = client.query_opt("SELECT state, pod_uid FROM forks WHERE uid = $1 FOR UPDATE", &[&uid]).await?.ok_or_else(|| unknown(uid))?;
    let (state, named): (&str, Option<&str>) = (row.get(0), row.get(1));
    match (state, named) {
        (_, Some(pod)) if pod == pod_uid => Ok(()),
        // The Job may have been made anew (suspended and resumed) as long as nothing has been claimed.
        ("registered", _) => {
            client.execute("UPDATE forks SET pod_uid = $2 WHERE uid = $1", &[&uid, &pod_uid]).await?;
            Ok(())
        }
        _ => Err(ApiError::conflict("ForkClaimed", "the fork is claimed by another pod, or has ended")),
    }
}

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
    let row = client.query_one("SELECT fork_rid, ns FROM forks WHERE uid = $1", &[&uid]).await?;
    let (rid, ns): (i64, i32) = (row.get(0), row.get(1));
    let (rev, segments) = bump(client, rid).await?;
    insert_row(client, rid, &span.id, rev, result.fidelity, result.input_digest.as_ref()).await?;
    let mut payloads = Writer::new(segments);
    let opening = payloads.add(&result.opening)?;
    spans::write_opening(client, rid, &span.id, rev, span.ord, &result.opening, &opening).await?;
    let closing = payloads.add(&result.closing)?;
    spans::write_closing(client, rid, &span.id, rev, &result.closing, &closing).await?;
    let next = payloads.finish(client, ns, rid).await?;
    client.execute("UPDATE runs SET segments = $2 WHERE rid = $1", &[&rid, &next]).await?;
    put_states(client, ns, rid, &span.id, result.snapshot_before, result.snapshot_after).await
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

/// Asks a running fork to stop.
///
/// # Errors
/// 404.
pub async fn request_cancel(client: &impl GenericClient, uid: Uuid) -> ApiResult<()> {
    client
        .execute(
            "UPDATE forks SET cancel_requested_at = now() WHERE uid = $1 AND state <> 'terminal' AND cancel_requested_at IS NULL",
            &[&uid],
        )
        .await?;
    Ok(())
}

/// Whether a fork is asked to stop, and whether it has ended.
///
/// # Errors
/// 404.
pub async fn asked_to_stop(client: &impl GenericClient, uid: Uuid) -> ApiResult<(bool, bool)> {
    let row = client
        .query_opt("SELECT cancel_requested_at IS NOT NULL, state = 'terminal' FROM forks WHERE uid = $1", &[&uid])
        .await?
        .ok_or_else(|| unknown(uid))?;
    Ok((row.get(0), row.get(1)))
}

/// Ends a fork. The first end stands, and is what is returned.
///
/// # Errors
/// 404.
pub async fn close(client: &impl GenericClient, uid: Uuid, reason: CloseReason, message: &str, now: i64) -> ApiResult<ForkResult> {
    let row = client
        .query_opt("SELECT state, result, fork_rid, source_rid FROM forks WHERE uid = $1 FOR UPDATE", &[&uid])
        .await?
        .ok_or_else(|| unknown(uid))?;
    if row.get::<_, &str>(0) == "terminal" {
        return serde_json::from_value(row.get(1)).map_err(|e| ApiError::internal(&e));
    }
    let mut result = ForkResult {
        reason,
        message: message.chars().take(2000).collect(),
        outcome: None,
        source_outcome: None,
        reexecuted: 0,
        reused: 0,
        overridden: 0,
        blocked: 0,
        blocked_spans: vec![],
    };
    if let (Some(fork_rid), Some(source_rid)) = (row.get::<_, Option<i64>>(2), row.get::<_, Option<i64>>(3)) {
        interrupt_open_steps(client, uid, fork_rid, now).await?;
        summarize(client, fork_rid, source_rid, &mut result).await?;
        // Blocked steps spent nothing here, and executed ones what they spent.
        client
            .execute(
                "UPDATE runs SET state = 'sealed', outcome = $2, ended = $3, rev = rev + 1, tokens = t.tokens, cost_usd = t.cost_usd
                 FROM (SELECT sum(coalesce(o.tokens_in, 0) + coalesce(o.tokens_out, 0))::bigint AS tokens, sum(o.cost_usd) AS cost_usd
                       FROM (SELECT * FROM spans WHERE rid = $1
                             UNION ALL
                             SELECT * FROM spans s WHERE rid = $4 AND NOT EXISTS (SELECT 1 FROM spans f WHERE f.rid = $1 AND f.span_id = s.span_id)) o
                       WHERE o.tokens_in IS NOT NULL OR o.tokens_out IS NOT NULL OR o.cost_usd IS NOT NULL) t
                 WHERE rid = $1 AND state <> 'deleted'",
                &[&fork_rid, &result.outcome.map(Status::code), &now, &source_rid],
            )
            .await?;
    }
    make_terminal(client, uid, &result).await?;
    Ok(result)
}

async fn make_terminal(client: &impl GenericClient, uid: Uuid, result: &ForkResult) -> ApiResult<()> {
    client
        .execute(
            "UPDATE forks SET state = 'terminal', reason = $2, result = $3, terminal_at = now() WHERE uid = $1",
            &[&uid, &result.reason.to_string(), &serde_json::json!(result)],
        )
        .await?;
    Ok(())
}

/// A step that began and has no result is in doubt: it may have run, and is not run again.
async fn interrupt_open_steps(client: &impl GenericClient, uid: Uuid, fork_rid: i64, now: i64) -> ApiResult<()> {
    let open = client.query("UPDATE fork_steps SET state = 'ended' WHERE uid = $1 AND state = 'begun' RETURNING span_id", &[&uid]).await?;
    for row in open {
        let span: String = row.get(0);
        let row = client.query_one("SELECT ns, segments, rev + 1 FROM runs WHERE rid = $1", &[&fork_rid]).await?;
        let (ns, segments, rev): (i32, i32, i64) = (row.get(0), row.get(1), row.get(2));
        let closing = Closing {
            ended: now,
            status: Status::Canceled,
            verdict: Verdict::None,
            output: None,
            error: Some("Interrupted: the fork ended before this step's result arrived; it may have run".into()),
            input_tokens: None,
            output_tokens: None,
            cost_usd: None,
            blocked: vec![],
        };
        let mut payloads = Writer::new(segments);
        let place = payloads.add(&closing)?;
        spans::write_closing(client, fork_rid, &span, rev, &closing, &place).await?;
        let next = payloads.finish(client, ns, fork_rid).await?;
        client.execute("UPDATE runs SET segments = $2, rev = $3 WHERE rid = $1", &[&fork_rid, &next, &rev]).await?;
    }
    Ok(())
}

async fn summarize(client: &impl GenericClient, fork_rid: i64, source_rid: i64, result: &mut ForkResult) -> ApiResult<()> {
    let rows = client
        .query(
            "SELECT span_id, name, kind, status, fidelity, blocked FROM spans WHERE rid = $1 AND ord IS NOT NULL ORDER BY ord, span_id",
            &[&fork_rid],
        )
        .await?;
    for row in &rows {
        match Fidelity::from_code(row.get("fidelity")) {
            Some(Fidelity::Reexecuted) => result.reexecuted += 1,
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
    let source = runs::by_rid(client, source_rid).await?;
    debug_assert_eq!(source.run.state, RunState::Sealed);
    result.reused = source.run.spans - rows.len() as i64;
    result.source_outcome = source.run.outcome;
    if matches!(result.reason, CloseReason::Succeeded | CloseReason::Blocked) {
        let fork = runs::by_rid(client, fork_rid).await?;
        result.outcome = outcome(client, &fork).await?;
    }
    Ok(())
}

/// The status of the deciding span in the fork; without one, of the last span in sequence with a result.
async fn outcome(client: &impl GenericClient, fork: &runs::Found) -> ApiResult<Option<Status>> {
    let base = fork.base_rid.unwrap_or(fork.rid);
    let row = client
        .query_opt(
            "SELECT coalesce(f.status, s.status) FROM spans s LEFT JOIN spans f ON f.rid = $2 AND f.span_id = s.span_id
             WHERE s.rid = $1 AND s.ord IS NOT NULL
               AND CASE WHEN $3::text IS NULL THEN coalesce(f.status, s.status) NOT IN ($4, $5) ELSE s.span_id = $3 END
             ORDER BY s.ord DESC, s.span_id DESC LIMIT 1",
            &[&base, &fork.rid, &fork.run.decided_by, &Status::Blocked.code(), &Status::Running.code()],
        )
        .await?;
    Ok(row.and_then(|r| Status::from_code(r.get(0))))
}

/// The custom resource is gone: an open fork is closed, and the run deleted where the spec asked for that.
///
/// # Errors
/// 404.
pub async fn resource_gone(client: &impl GenericClient, uid: Uuid, now: i64) -> ApiResult<()> {
    let fork = get(client, uid).await?;
    if fork.state != ForkState::Terminal {
        close(client, uid, CloseReason::Deleted, "the ReplayFork was deleted", now).await?;
    }
    client.execute("UPDATE forks SET cr_gone_at = now() WHERE uid = $1", &[&uid]).await?;
    if fork.deletion_policy == DeletionPolicy::DeleteRun
        && let Some(fork_rid) = client.query_one("SELECT fork_rid FROM forks WHERE uid = $1", &[&uid]).await?.get::<_, Option<i64>>(0)
    {
        runs::delete(client, &runs::by_rid(client, fork_rid).await?).await?;
    }
    Ok(())
}

/// What the sandbox's bundle is made of: spec, source, fork.
///
/// # Errors
/// 404.
pub async fn spec_of(client: &impl GenericClient, uid: Uuid) -> ApiResult<(Value, Digest, i64)> {
    let row =
        client.query_opt("SELECT spec, plan_digest, source_rid FROM forks WHERE uid = $1 AND source_rid IS NOT NULL", &[&uid]).await?;
    let row = row.ok_or_else(|| unknown(uid))?;
    let digest = row.get::<_, Option<&[u8]>>(1).and_then(Digest::from_slice).ok_or_else(|| unknown(uid))?;
    Ok((row.get(0), digest, row.get(2)))
}

/// Whether a fork's sandbox may restore this tree: only the roots of its source and of itself.
///
/// # Errors
/// 404 otherwise.
pub async fn check_root(client: &impl GenericClient, claimed: &Claimed, node: &Digest) -> ApiResult<()> {
    let row = client
        .query_opt(
            "SELECT 1 FROM snapshots WHERE rid = ANY($1) AND node = $2 LIMIT 1",
            &[&vec![claimed.source_rid, claimed.fork_rid], &node.as_bytes()],
        )
        .await?;
    row.map(drop).ok_or_else(|| ApiError::not_found("SnapshotNotFound", format!("{node} is no workspace state of this fork or its source")))
}
