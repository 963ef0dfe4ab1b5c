//! Runs: creating, finding, listing, finishing.

use std::collections::BTreeMap;

use replayfork_client::ingest::{CreateRun, FinishRun, RunCreated};
use replayfork_client::read::{ForkEnd, ForkedFrom, Run, RunKind, RunPage, RunQuery, RunState};
use replayfork_client::{check, run_id};
use replayfork_core::model::{RunEnvironment, Status};
use serde::de::DeserializeOwned;
use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::{Namespace, Packs};

/// A run as the other queries need it.
#[derive(Clone, Debug)]
pub struct Found {
    pub rid: i64,
    pub ns: Namespace,
    pub base_rid: Option<i64>,
    pub run: Run,
}

const COLUMNS: &str = "r.rid, r.ns, r.base_rid, r.id, n.name AS namespace, r.name, r.kind, r.state, r.agent, r.model, r.session, r.labels, r.environment, \
    r.outcome, r.decided_by, r.started, r.ended, r.spans, r.tokens, r.cost_usd, r.rev, r.forked_from, \
    (SELECT f.result FROM forks f WHERE f.uid = (r.forked_from ->> 'fork')::uuid) AS fork_end, \
    (SELECT count(*) FROM forks f JOIN runs k ON k.rid = f.fork_rid WHERE f.source_rid = r.rid AND k.state <> 'deleted') AS forks";

fn json<T: DeserializeOwned>(row: &Row, column: &str) -> ApiResult<Option<T>> {
    match row.get::<_, Option<serde_json::Value>>(column) {
        None => Ok(None),
        Some(value) => serde_json::from_value(value).map(Some).map_err(|e| ApiError::internal(&e)),
    }
}

fn found(row: &Row, packs: &Packs) -> ApiResult<Found> {
    let ns = Namespace { number: row.get("ns"), packs: packs.clone() };
    Ok(Found { rid: row.get("rid"), ns, base_rid: row.get("base_rid"), run: run(row)? })
}

fn run(row: &Row) -> ApiResult<Run> {
    let kind = match row.get("kind") {
        "recorded" => RunKind::Recorded,
        "imported" => RunKind::Imported,
        _ => RunKind::Fork,
    };
    let state = match row.get("state") {
        "open" => RunState::Open,
        "finished" => RunState::Finished,
        "sealed" => RunState::Sealed,
        _ => RunState::Deleted,
    };
    Ok(Run {
        id: row.get("id"),
        namespace: row.get("namespace"),
        name: row.get("name"),
        kind,
        state,
        agent: row.get("agent"),
        model: row.get("model"),
        session: row.get("session"),
        labels: json::<BTreeMap<String, String>>(row, "labels")?.unwrap_or_default(),
        environment: json::<RunEnvironment>(row, "environment")?.unwrap_or_default(),
        outcome: row.get::<_, Option<i16>>("outcome").and_then(Status::from_code),
        decided_by: row.get("decided_by"),
        started: row.get("started"),
        ended: row.get("ended"),
        spans: i64::from(row.get::<_, i32>("spans")),
        tokens: row.get("tokens"),
        cost_usd: row.get("cost_usd"),
        rev: row.get("rev"),
        forked_from: json::<ForkedFrom>(row, "forked_from")?,
        // The fork's result has these members among others.
        fork_end: json::<ForkEnd>(row, "fork_end")?,
        forks: row.get("forks"),
    })
}

/// A free name: the wanted one, or with a suffix. The caller inserts it in the same transaction; names are locked per namespace until then.
///
/// # Errors
/// What the database says.
pub async fn free_name(client: &impl Connection, ns: i32, wanted: &str) -> ApiResult<String> {
    client.run("SELECT pg_advisory_xact_lock(hashtextextended($1, $2))", &[&wanted, &i64::from(ns)]).await?;
    let mut name = wanted.to_owned();
    while client.fetch_opt("SELECT 1 FROM runs WHERE ns = $1 AND name = $2 AND state <> 'deleted'", &[&ns, &name]).await?.is_some() {
        name = suffixed(wanted);
    }
    Ok(name)
}

/// The name with five random characters behind it.
fn suffixed(name: &str) -> String {
    let random = Uuid::new_v4().simple().to_string();
    let stem: String = name.chars().take(run_id::MAX_NAME - 6).collect();
    format!("{}-{}", stem.trim_end_matches('-'), &random[..5])
}

/// Creates a run, or finds the one that was created with the same id.
///
/// # Errors
/// 400 for a name that is no DNS label; 409 for an id of another namespace; 410 for a deleted run.
pub async fn create(client: &impl Connection, ns: i32, request: &CreateRun, now: i64) -> ApiResult<RunCreated> {
    check::run(request)?;
    let id = request.id.unwrap_or_else(Uuid::now_v7);
    if let Some(row) = client.fetch_opt("SELECT ns, name, state FROM runs WHERE id = $1", &[&id]).await? {
        if row.get::<_, i32>(0) != ns {
            return Err(ApiError::conflict("RunExists", format!("run {id} belongs to another namespace")));
        }
        if row.get::<_, &str>(2) == "deleted" {
            return Err(gone(&id.to_string()));
        }
        return Ok(RunCreated { id, name: row.get(1) });
    }
    let wanted = match &request.name {
        Some(name) => name.clone(),
        None => suffixed(&run_id::to_label(&request.agent)),
    };
    let name = free_name(client, ns, &wanted).await?;
    let started = if request.started == 0 { now } else { request.started };
    let (labels, environment) = (serde_json::json!(request.labels), serde_json::json!(request.environment));
    let inserted = client
        .run(
            "INSERT INTO runs (id, ns, name, kind, agent, model, session, labels, environment, started)
             VALUES ($1, $2, $3, 'recorded', $4, $5, $6, $7, $8, $9) ON CONFLICT (id) DO NOTHING",
            &[&id, &ns, &name, &request.agent, &request.model, &request.session, &labels, &environment, &started],
        )
        .await?;
    if inserted == 0 {
        return Err(ApiError::unavailable("the same run is being created by another request; try again"));
    }
    Ok(RunCreated { id, name })
}

fn gone(run: &str) -> ApiError {
    ApiError::new(axum::http::StatusCode::GONE, "RunDeleted", format!("run {run} was deleted; nothing more is taken for it"))
}

/// The run of this name or id in a namespace.
///
/// # Errors
/// 404 naming run and namespace.
pub async fn find(client: &impl Connection, packs: &Packs, namespace: &str, run: &str) -> ApiResult<Found> {
    let id = Uuid::parse_str(run).ok();
    let sql = format!(
        "SELECT {COLUMNS} FROM runs r JOIN namespaces n USING (ns) WHERE n.name = $1 AND r.state <> 'deleted' AND (r.name = $2 OR r.id = $3)
         ORDER BY (r.name = $2) DESC LIMIT 1"
    );
    let row = client.fetch_opt(&sql, &[&namespace, &run, &id]).await?;
    match row {
        Some(row) => found(&row, packs),
        None => Err(ApiError::not_found(
            "RunNotFound",
            format!("no run of namespace {namespace:?} has the name or id {run:?}; `kubectl replay runs -n {namespace}` lists them"),
        )),
    }
}

/// # Errors
/// 404.
pub async fn by_rid(client: &impl Connection, packs: &Packs, rid: i64) -> ApiResult<Found> {
    let sql = format!("SELECT {COLUMNS} FROM runs r JOIN namespaces n USING (ns) WHERE r.rid = $1");
    found(&client.fetch_one(&sql, &[&rid]).await?, packs)
}

/// A page of a namespace's runs, newest first.
///
/// # Errors
/// 400 for a cursor or limit that is none.
pub async fn list(client: &impl Connection, namespace: &str, query: &RunQuery) -> ApiResult<RunPage> {
    let limit = query.limit.unwrap_or(50);
    if !(1..=500).contains(&limit) {
        return Err(ApiError::bad_request("LimitInvalid", format!("limit: {limit} is not between 1 and 500")));
    }
    let before = match &query.before {
        None => i64::MAX,
        Some(cursor) => {
            cursor.parse().map_err(|_| ApiError::bad_request("CursorInvalid", format!("before: {cursor:?} is no cursor of a run list")))?
        }
    };
    let pattern = query.q.as_ref().map(|q| format!("%{}%", q.replace('\\', "\\\\").replace('%', "\\%").replace('_', "\\_")));
    let state = query.state.map(|s| serde_json::json!(s).as_str().unwrap_or_default().to_owned());
    let sql = format!(
        "SELECT {COLUMNS} FROM runs r JOIN namespaces n USING (ns)
         WHERE n.name = $1 AND r.state <> 'deleted' AND r.rid < $2 AND ($3::text IS NULL OR r.agent = $3)
           AND ($4::text IS NULL OR r.name ILIKE $4) AND ($5::text IS NULL OR r.state = $5)
         ORDER BY r.rid DESC LIMIT $6"
    );
    let params: [&(dyn ToSql + Sync); 6] = [&namespace, &before, &query.agent, &pattern, &state, &(limit + 1)];
    let rows = client.fetch(&sql, &params).await?;
    let page = &rows[..rows.len().min(limit as usize)];
    let next = page.last().filter(|_| rows.len() > page.len()).map(|row| row.get::<_, i64>("rid").to_string());
    Ok(RunPage { runs: page.iter().map(run).collect::<ApiResult<_>>()?, next })
}

/// Forks whose source is this run, oldest first.
///
/// # Errors
/// What the database says.
pub async fn forks_of(client: &impl Connection, rid: i64) -> ApiResult<Vec<Run>> {
    let sql = format!(
        "SELECT {COLUMNS} FROM runs r JOIN namespaces n USING (ns) JOIN forks f ON f.fork_rid = r.rid
         WHERE f.source_rid = $1 AND r.state <> 'deleted' ORDER BY r.rid"
    );
    client.fetch(&sql, &[&rid]).await?.iter().map(run).collect()
}

/// A run that takes more, locked.
pub struct Open {
    pub rid: i64,
    /// Taken by this transaction.
    pub rev: i64,
    pub segments: i32,
    pub workspace_root: Option<String>,
}

/// The run's row lock and its counters; the new revision is taken.
///
/// # Errors
/// 410 for a deleted run, 409 for a sealed one.
pub async fn next_rev(client: &impl Connection, run: Uuid, ns: i32) -> ApiResult<Open> {
    let updated = client
        .fetch_opt(
            "UPDATE runs SET rev = rev + 1, last_at = now() WHERE id = $1 AND ns = $2 AND kind = 'recorded' AND state IN ('open', 'finished') RETURNING rid, rev, segments, environment ->> 'workspace_root'",
            &[&run, &ns],
        )
        .await?;
    if let Some(row) = updated {
        return Ok(Open { rid: row.get(0), rev: row.get(1), segments: row.get(2), workspace_root: row.get(3) });
    }
    let row = client.fetch_opt("SELECT state FROM runs WHERE id = $1 AND ns = $2", &[&run, &ns]).await?;
    match row.as_ref().map(|r| r.get::<_, &str>(0)) {
        None => Err(ApiError::not_found("RunNotFound", format!("no run {run} in this namespace; create it first"))),
        Some("deleted") => Err(gone(&run.to_string())),
        Some(_) => Err(ApiError::conflict("RunSealed", format!("run {run} is sealed and takes nothing more"))),
    }
}

/// Steps of the run of an UPDATE: an end without a beginning is none.
const STEPS: &str = "(SELECT count(*) FROM spans s WHERE s.rid = runs.rid AND s.ord IS NOT NULL)";

/// Finishes and seals a recorded run. Said twice, the first time stands.
///
/// # Errors
/// 400 for a deciding span that the run does not have; 404, 410.
pub async fn finish(client: &impl Connection, ns: i32, run: Uuid, request: &FinishRun, now: i64) -> ApiResult<(i64, Option<Spent>)> {
    let Open { rid, rev, .. } = match next_rev(client, run, ns).await {
        Err(error) if error.reason == "RunSealed" => {
            return Ok((client.fetch_one("SELECT rev FROM runs WHERE id = $1", &[&run]).await?.get(0), None));
        }
        other => other?,
    };
    let decided_by = match &request.decided_by {
        None => None,
        Some(span) => {
            let row = client
                .fetch_opt(
                    "SELECT span_id FROM spans WHERE rid = $1 AND ord IS NOT NULL AND (span_id = $2 OR name = $2) ORDER BY (span_id = $2) DESC, ord DESC LIMIT 1",
                    &[&rid, span],
                )
                .await?;
            let row = row.ok_or_else(|| {
                ApiError::bad_request("SpanNotFound", format!("decided_by: run {run} has no span with the id or name {span:?}"))
            })?;
            Some(row.get::<_, String>(0))
        }
    };
    let ended = if request.ended == 0 { now } else { request.ended };
    client
        .run(
            &format!("UPDATE runs SET state = 'sealed', outcome = $2, decided_by = $3, ended = $4, spans = {STEPS} WHERE rid = $1"),
            &[&rid, &request.outcome.code(), &decided_by, &ended],
        )
        .await?;
    Ok((rev, spent(client, &[rid]).await?.pop()))
}

/// What a sealed run used up.
#[derive(Clone, Debug, PartialEq)]
pub struct Spent {
    pub agent: String,
    pub model: Option<String>,
    pub tokens: i64,
    pub cost_usd: f64,
    /// Steps that failed.
    pub errors: i64,
}

async fn spent(client: &impl Connection, rids: &[i64]) -> ApiResult<Vec<Spent>> {
    let rows = client
        .fetch(
            "SELECT agent, model, coalesce(tokens, 0), coalesce(cost_usd, 0), (SELECT count(*) FROM spans s WHERE s.rid = r.rid AND s.status = $2)
             FROM runs r WHERE rid = ANY($1)",
            &[&rids, &Status::Failed.code()],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Spent { agent: row.get(0), model: row.get(1), tokens: row.get(2), cost_usd: row.get(3), errors: row.get(4) })
        .collect())
}

/// The recorder of this run is going away and has sent all it had.
///
/// # Errors
/// What the database says.
pub async fn goodbye(client: &impl Connection, ns: i32, run: Uuid) -> ApiResult<()> {
    client.run("UPDATE runs SET goodbye_at = now() WHERE id = $1 AND ns = $2 AND state = 'open'", &[&run, &ns]).await?;
    Ok(())
}

/// Seals runs whose recorder went silent: ten quiet minutes after its goodbye, a day without one. Returns what each used up.
///
/// # Errors
/// What the database says.
pub async fn seal_abandoned(client: &impl Connection) -> ApiResult<Vec<Spent>> {
    let canceled = Status::Canceled.code();
    let rows = client
        .fetch(
            &format!(
                "UPDATE runs SET state = 'sealed', outcome = $1, rev = rev + 1, spans = {STEPS},
               labels = labels || jsonb_build_object('replayfork.dev/aborted', 'true')
             WHERE kind = 'recorded' AND state IN ('open', 'finished')
               AND (last_at < now() - interval '24 hours' OR (goodbye_at IS NOT NULL AND last_at < now() - interval '10 minutes'))
             RETURNING rid"
            ),
            &[&canceled],
        )
        .await?;
    let rids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    if rids.is_empty() { Ok(Vec::new()) } else { spent(client, &rids).await }
}

/// Deletes a run: its rows go, a tombstone stays, so that batches sent again revive nothing.
///
/// # Errors
/// 409 naming the runs that need it: forks of it, and those that reuse its results.
pub async fn delete(client: &impl Connection, found: &Found) -> ApiResult<()> {
    let rid = found.rid;
    client.run("SELECT 1 FROM runs WHERE rid = $1 FOR UPDATE", &[&rid]).await?;
    let needing =
        client.fetch("SELECT r.name FROM run_deps d JOIN runs r USING (rid) WHERE d.needs = $1 ORDER BY r.rid LIMIT 20", &[&rid]).await?;
    if !needing.is_empty() {
        let names: Vec<String> = needing.iter().map(|r| r.get(0)).collect();
        return Err(ApiError::conflict(
            "RunNeeded",
            format!(
                "run {:?} is needed by runs that are forks of it or reuse its results ({}); delete these first",
                found.run.name,
                names.join(", ")
            ),
        ));
    }
    for table in ["spans", "span_events", "span_edges", "segments", "snapshots", "run_graphs", "run_deps", "results"] {
        client.run(&format!("DELETE FROM {table} WHERE rid = $1"), &[&rid]).await?;
    }
    client.run("UPDATE runs SET state = 'deleted', deleted_at = now() WHERE rid = $1", &[&rid]).await?;
    Ok(())
}
