//! Registering: a spec becomes a plan, a pinned source and a run of its own, or a refusal that stands.

use deadpool_postgres::GenericClient;
use replayfork_client::fork::{CloseFork, CloseReason, EndSpan, Fork, ForkResult, PlanOverview, RegisterFork};
use replayfork_client::read::ForkedFrom;
use replayfork_core::Digest;
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::{Closing, Fidelity, Opening, Output, Status, Verdict};
use replayfork_core::plan::{Mark, Plan};
use replayfork_core::source::Source;
use serde_json::Value;
use uuid::Uuid;

use super::close::make_terminal;
use super::steps::write_results;
use super::{close, get};
use crate::config::Config;
use crate::planning::{self, Refusal};
use crate::problem::{ApiError, ApiResult};
use crate::store::{self, runs};

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
    let ns = store::namespace(client, &request.namespace).await?;
    let nul = without_nul(&request.spec);
    let stored = nul.as_ref().unwrap_or(&request.spec);
    client
        .execute(
            "INSERT INTO forks (uid, ns, name, spec, spec_digest, deletion_policy) VALUES ($1, $2, $3, $4, $5, $6)",
            &[&uid, &ns, &request.name, stored, &digest.as_bytes(), &deletion_policy(&request.spec)],
        )
        .await?;
    if nul.is_some() {
        return refuse(client, uid, CloseReason::SpecInvalid, NUL.to_owned()).await;
    }
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
        close(client, uid, &CloseFork::new(reason, message), now).await?;
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
async fn refuse(client: &impl GenericClient, uid: Uuid, reason: CloseReason, message: String) -> ApiResult<Fork> {
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
    let mut results = Vec::new();
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
        results.push((record, EndSpan { fidelity, opening, closing, snapshot_before, snapshot_after, input_digest: None }));
    }
    if results.is_empty() { Ok(()) } else { write_results(client, uid, &results).await }
}

fn overriding(source: &Source, spec: &ForkSpec, index: usize) -> ApiResult<Output> {
    let fork_span = source.find("spec.source.span", &spec.source.run, &spec.source.span).map_err(|e| ApiError::internal(&e))?;
    let patches =
        replayfork_core::patch::Patches::resolve(source, &spec.source, fork_span, &spec.patches).map_err(|e| ApiError::internal(&e))?;
    let output = patches.output.get(&index).ok_or_else(|| ApiError::internal(&"an overridden span without an override"))?;
    Ok(Output::overridden(&output.text, output.exit_code.unwrap_or(0)))
}
