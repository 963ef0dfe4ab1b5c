//! Registering: a spec becomes a plan, a pinned source and a run of its own, or a refusal that stands.

use deadpool_postgres::Transaction;
use replayfork_client::fork::{CloseFork, CloseReason, EndSpan, Fork, ForkResult, PlanOverview, RegisterFork, Reproducibility};
use replayfork_client::read::ForkedFrom;
use replayfork_core::Digest;
use replayfork_core::contract::patched_opening;
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::{Closing, Fidelity, Status};
use replayfork_core::plan::{self, Mark, Plan, PlanCounts, Prepared};
use serde_json::{Value, json};
use uuid::Uuid;

use super::close::make_terminal;
use super::steps::write_results;
use super::{close, get};
use crate::config::Config;
use crate::db::Connection;
use crate::endpoints::Endpoints;
use crate::planning::{self, Ready, Refusal};
use crate::problem::{ApiError, ApiResult};
use crate::store::{self, Packs, blobs, runs, snapshots};

/// Fields of a spec that may change while the fork stays the same.
const MUTABLE: [&str; 4] = ["suspend", "cancel", "ttlSecondsAfterFinished", "deletionPolicy"];

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
pub async fn register(
    client: &Transaction<'_>,
    (config, endpoints, packs): (&Config, &Endpoints, &Packs),
    uid: Uuid,
    request: &RegisterFork,
    now: i64,
) -> ApiResult<Fork> {
    client.run("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", &[&uid.to_string()]).await?;
    let digest = spec_digest(&request.spec);
    if let Some(row) = client.fetch_opt("SELECT spec_digest FROM forks WHERE uid = $1", &[&uid]).await? {
        if row.get::<_, &[u8]>(0) != digest.as_bytes() {
            return Err(ApiError::conflict(
                "SpecChanged",
                format!("fork {uid} was registered with another spec; specs don't change: create a new ReplayFork"),
            ));
        }
        let policy = deletion_policy(&request.spec);
        client.run("UPDATE forks SET deletion_policy = $2 WHERE uid = $1 AND deletion_policy <> $2", &[&uid, &policy]).await?;
        return get(client, uid).await;
    }
    let ns = store::namespace(client, packs, &request.namespace).await?;
    let nul = without_nul(&request.spec);
    let stored = nul.as_ref().unwrap_or(&request.spec);
    client
        .run(
            "INSERT INTO forks (uid, ns, name, spec, spec_digest, deletion_policy) VALUES ($1, $2, $3, $4, $5, $6)",
            &[&uid, &ns.number, &request.name, stored, &digest.as_bytes(), &deletion_policy(&request.spec)],
        )
        .await?;
    if nul.is_some() {
        return refuse(client, uid, CloseReason::SpecInvalid, NUL.to_owned()).await;
    }
    let spec: ForkSpec = match serde_json::from_value(request.spec.clone()) {
        Ok(spec) => spec,
        Err(error) => return refuse(client, uid, CloseReason::SpecInvalid, format!("spec: {error}")).await,
    };
    let found = match runs::find(client, packs, &request.namespace, &spec.source.run).await {
        Ok(found) => found,
        Err(error) if error.reason == "RunNotFound" => {
            return refuse(client, uid, CloseReason::RunNotFound, format!("spec.source.run: {}", error.detail)).await;
        }
        Err(error) => return Err(error),
    };
    match planning::check_sealed(&found) {
        Err(error) if request.give_up => return refuse(client, uid, CloseReason::RunNotSealed, error.detail).await,
        checked => checked?,
    }
    let ready = match planning::ready(client, &found, &spec, planning::LISTED).await? {
        Ok(ready) => ready,
        Err(refusal) => return refuse(client, uid, refusal.reason, refusal.message).await,
    };
    let made = ready.fork(&spec).and_then(|fork| Ok((ready.plan(config, endpoints, &found, &fork)?, fork)));
    let ((plan, overview), fork) = match made {
        Ok(made) => made,
        Err(refusal) => return refuse(client, uid, refusal.reason, refusal.message).await,
    };
    create_run(client, uid, request, &found, (&ready, &fork), &plan, &overview, now).await?;
    let named = planning::named(&spec, &fork.source.inherited);
    for digest in &named {
        client.run("INSERT INTO fork_blobs (uid, digest) VALUES ($1, $2) ON CONFLICT DO NOTHING", &[&uid, &digest.as_bytes()]).await?;
    }
    if !blobs::missing(client, found.ns.number, &named).await?.is_empty() {
        return Err(ApiError::unavailable("a content that a patch names has just expired"));
    }
    if !plan.sandbox {
        if !plan.check && plan.counts != (PlanCounts { reusable: plan.counts.reusable, ..PlanCounts::default() }) {
            record_without_sandbox(client, uid, &found, &spec, now).await?;
        }
        let (reason, message) = CloseReason::of_plan(&plan);
        let mut end = CloseFork::new(reason, message);
        end.warnings = plan.warnings.clone();
        if plan.check {
            end.reproducibility = Some(Reproducibility { not_executable: plan.counts.will_block, ..Reproducibility::default() });
        }
        close(client, packs, uid, &end, now).await?;
    }
    get(client, uid).await
}

/// What a spec with a NUL character is told: no argument, variable or file name may hold one, and no database keeps it.
pub const NUL: &str = "spec: it holds a NUL character (\\u0000), which no command, variable or output may have; remove it";

/// The value with every NUL replaced; `None` where it has none.
pub fn without_nul(value: &Value) -> Option<Value> {
    let text = value.to_string();
    text.contains("\\u0000").then(|| serde_json::from_str(&text.replace("\\u0000", "\u{fffd}")).unwrap_or(Value::Null))
}

/// A fork that has no plan is terminal at once.
async fn refuse(client: &impl Connection, uid: Uuid, reason: CloseReason, message: String) -> ApiResult<Fork> {
    let result = ForkResult::new(reason, message);
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
    client: &impl Connection,
    uid: Uuid,
    request: &RegisterFork,
    found: &runs::Found,
    (ready, fork): (&Ready, &Prepared<'_>),
    plan: &Plan,
    overview: &PlanOverview,
    now: i64,
) -> ApiResult<()> {
    let name = runs::free_name(client, found.ns.number, &replayfork_client::run_id::to_label(&request.name)).await?;
    let span = &fork.source.spans[fork.fork_span];
    let from = ForkedFrom {
        run: found.run.id,
        run_name: found.run.name.clone(),
        span: span.id.clone(),
        span_name: span.opening.name.clone(),
        step: ready.view(fork).fork_span() as i64 + 1,
        fork: uid,
        fork_name: request.name.clone(),
    };
    // A check changes nothing that a fork of it could take over.
    let inherits = if fork.check { json!(fork.source.inherited) } else { json!(fork.to_inherit()) };
    let row = client
        .fetch_one(
            "INSERT INTO runs (id, ns, name, kind, agent, model, session, labels, environment, decided_by, started, spans, tokens, cost_usd, base_rid, forked_from, inherits)
             SELECT $2::uuid, ns, $3::text, 'fork', agent, model, session, labels, $4::jsonb, decided_by, $5::bigint, spans, tokens, cost_usd, coalesce(base_rid, rid), $6::jsonb, $7::jsonb
             FROM runs WHERE rid = $1 RETURNING rid",
            &[&found.rid, &Uuid::now_v7(), &name, &json!(overview.environment), &now, &json!(from), &inherits],
        )
        .await?;
    let fork_rid: i64 = row.get(0);
    client
        .run(
            "INSERT INTO run_deps (rid, needs) SELECT $1::bigint, $2::bigint UNION SELECT $1::bigint, needs FROM run_deps WHERE rid = $2::bigint",
            &[&fork_rid, &found.rid],
        )
        .await?;
    for snapshot in fork.patches.snapshot.values() {
        if let Some((_, rid)) = snapshots::by_content(client, found.ns.number, &snapshot.content).await? {
            client.run("INSERT INTO run_deps (rid, needs) VALUES ($1, $2) ON CONFLICT DO NOTHING", &[&fork_rid, &rid]).await?;
        }
    }
    if found.base_rid.is_some() {
        take_over(client, found.rid, fork_rid).await?;
    }
    let plan_json = json!({"overview": overview, "plan": plan});
    client
        .run(
            "UPDATE forks SET source_rid = $2, fork_rid = $3, plan = $4, plan_digest = $5, environment = $6, planned = $7 WHERE uid = $1",
            &[&uid, &found.rid, &fork_rid, &plan_json, &plan.digest.as_bytes(), &json!(overview.environment), &ready.planned()],
        )
        .await?;
    Ok(())
}

/// A fork of a fork starts with its parent's narrow rows, so that a reader reads two runs at any depth. Payloads stay the parent's.
async fn take_over(client: &impl Connection, parent: i64, fork: i64) -> ApiResult<()> {
    let columns = "span_id, ord, parent_id, rev, kind, status, verdict, fidelity, started, ended, name, model, tokens_in, tokens_out, cost_usd, \
        input_digest, blocked, pay_rid, in_segment, in_at, in_len, in_blob, out_segment, out_at, out_len, out_blob";
    client
        .run(&format!("INSERT INTO spans (rid, {columns}) SELECT $2::bigint, {columns} FROM spans WHERE rid = $1"), &[&parent, &fork])
        .await?;
    client
        .run(
            "INSERT INTO snapshots (rid, span_id, edge, node, content, missing, inherited)
             SELECT $2::bigint, span_id, edge, node, content, missing, true FROM snapshots WHERE rid = $1",
            &[&parent, &fork],
        )
        .await?;
    Ok(())
}

/// Overridden and blocked spans of a fork that needs no pod: their records are written, so all of them are read.
async fn record_without_sandbox(client: &Transaction<'_>, uid: Uuid, found: &runs::Found, spec: &ForkSpec, now: i64) -> ApiResult<()> {
    let refused = |refusal: Refusal| ApiError::internal(&refusal.message);
    let input = planning::load(client, found, spec).await?.map_err(refused)?;
    let fork = Prepared::new(&input.source, &input.contents, spec).map_err(|r| refused(r.into()))?;
    let plan = plan::of(&fork);
    let source = fork.source;
    let mut results = Vec::new();
    for planned in &plan.spans {
        let Some(index) = source.index(&planned.id) else { continue };
        let record = &source.spans[index];
        if plan.check {
            results.push((record, EndSpan::not_executable(record, planned.blocked.clone())));
            continue;
        }
        let mut closing = Closing { verdict: record.verdict(), ..Closing::new(now, Status::Completed, None) };
        let unknown = || fork.leaves_unknown(index);
        let fidelity = match planned.mark {
            None => {
                closing.output = fork.given(index).map(|value| value.output);
                if !source.shows_changes(index) {
                    closing.unknown = unknown();
                }
                Fidelity::Overridden
            }
            Some(Mark::WillBeBlocked | Mark::MayBeBlocked) => {
                closing.status = Status::Blocked;
                closing.blocked = planned.blocked.clone();
                closing.unknown = unknown();
                Fidelity::Blocked
            }
            Some(_) => return Err(ApiError::internal(&"a span that may run in a plan without a sandbox")),
        };
        let states = if fidelity == Fidelity::Overridden && closing.unknown.is_empty() {
            (record.snapshot_before, record.snapshot_after)
        } else {
            // No patch changes the workspace: what was recorded before the step is there, but for what is unknown.
            (source.state_for_patches(index).filter(|_| record.opening.sees_workspace()), None)
        };
        let end = EndSpan::new(fidelity, patched_opening(source, &fork.patches, index, now), closing);
        let end = EndSpan { snapshot_before: states.0, snapshot_after: states.1, ..end };
        results.push((record, end));
        for &inner in source.inner(index) {
            let span = &source.spans[inner];
            results.push((span, EndSpan::skipped(span, now)));
        }
    }
    if results.is_empty() { Ok(()) } else { write_results(client, &found.ns.packs, uid, &results).await }
}
