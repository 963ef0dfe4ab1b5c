//! What is read about runs, and what acts on them.

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use bytes::Bytes;
use replayfork_client::read::{
    PlanAnswer, PlanRequest, Run, RunDiff, RunPage, RunQuery, SpanDetail, SpanPage, SpanQuery, TreeEntry, TreeEntryKind, TreeListing,
    Uploaded,
};
use replayfork_core::Digest;
use replayfork_core::forensics::{End, Forensics};
use replayfork_core::model::SnapshotRef;
use replayfork_snapshot::{Kind, entry_at, path_bytes, path_text};
use serde::Deserialize;
use utoipa::IntoParams;

use super::Body;
use crate::auth::{Caller, Right};
use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::state::{App, begin};
use crate::store::blobs::{self, Loaded, Trees};
use crate::store::runs::{self, Found};
use crate::store::{self, forks, snapshots, spans};
use crate::{diffing, planning};

pub fn router() -> axum::Router<App> {
    axum::Router::new()
        .route("/api/v1/runs", get(list_runs))
        .route("/api/v1/runs/{run}", get(get_run).delete(delete_run))
        .route("/api/v1/runs/{run}/spans", get(list_spans))
        .route("/api/v1/runs/{run}/spans/{span}", get(get_span))
        .route("/api/v1/runs/{run}/forks", get(list_forks))
        .route("/api/v1/runs/{run}/forensics", get(forensics))
        .route("/api/v1/runs/{run}/snapshots/{digest}/tree", get(tree))
        .route("/api/v1/runs/{run}/snapshots/{digest}/file", get(file))
        .route("/api/v1/diffs/{a}/{b}", get(diff))
        .route("/api/v1/plans", post(plan))
        .route("/api/v1/uploads", post(upload))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Namespace {
    /// Default: the caller's ServiceAccount's.
    namespace: Option<String>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct PathQuery {
    namespace: Option<String>,
    /// Path in the workspace; empty: its root.
    #[serde(default)]
    path: String,
}

async fn find(
    app: &App,
    caller: &Caller,
    right: Right,
    namespace: Option<&str>,
    run: &str,
) -> ApiResult<(deadpool_postgres::Object, Found)> {
    let namespace = app.allowed(caller, right, namespace).await?;
    let db = app.db().await?;
    let found = runs::find(&db, &app.packs, &namespace, run).await?;
    Ok((db, found))
}

/// List runs, newest first.
#[utoipa::path(get, path = "/api/v1/runs", tag = "read", params(RunQuery), responses((status = 200, body = RunPage)))]
pub async fn list_runs(State(app): State<App>, caller: Caller, Query(query): Query<RunQuery>) -> ApiResult<Json<RunPage>> {
    let namespace = app.allowed(&caller, Right::ListRuns, query.namespace.as_deref()).await?;
    let db = app.db().await?;
    Ok(Json(runs::list(&db, &namespace, &query).await?))
}

/// One run.
#[utoipa::path(get, path = "/api/v1/runs/{run}", tag = "read", params(("run" = String, Path, description = "Id or name"), Namespace), responses((status = 200, body = Run)))]
pub async fn get_run(
    State(app): State<App>,
    caller: Caller,
    Path(run): Path<String>,
    Query(query): Query<Namespace>,
) -> ApiResult<Json<Run>> {
    Ok(Json(find(&app, &caller, Right::GetRuns, query.namespace.as_deref(), &run).await?.1.run))
}

/// Spans of a run in order, without payloads.
#[utoipa::path(get, path = "/api/v1/runs/{run}/spans", tag = "read", params(("run" = String, Path), SpanQuery), responses((status = 200, body = SpanPage)))]
pub async fn list_spans(
    State(app): State<App>,
    caller: Caller,
    Path(run): Path<String>,
    Query(query): Query<SpanQuery>,
) -> ApiResult<Json<SpanPage>> {
    let (db, found) = find(&app, &caller, Right::GetRuns, query.namespace.as_deref(), &run).await?;
    Ok(Json(spans::page(&db, &found, &query).await?))
}

/// One span with its payloads.
#[utoipa::path(get, path = "/api/v1/runs/{run}/spans/{span}", tag = "read", params(("run" = String, Path), ("span" = String, Path, description = "Id, or a name unique in the run"), Namespace), responses((status = 200, body = SpanDetail)))]
pub async fn get_span(
    State(app): State<App>,
    caller: Caller,
    Path((run, span)): Path<(String, String)>,
    Query(query): Query<Namespace>,
) -> ApiResult<Json<SpanDetail>> {
    let (db, found) = find(&app, &caller, Right::GetRuns, query.namespace.as_deref(), &run).await?;
    let (span, rid) = spans::one(&db, &found, &span).await?;
    let recorded_in = if rid == found.rid { found.run.id } else { runs::by_rid(&db, &app.packs, rid).await?.run.id };
    let states = snapshots::of_run(&db, rid, Some(std::slice::from_ref(&span.id))).await?;
    let snapshots_missing = states.into_iter().filter_map(|((_, edge), state)| state.err().map(|why| format!("{edge:?}: {why}"))).collect();
    Ok(Json(SpanDetail { run: found.run.id, recorded_in, span, snapshots_missing }))
}

/// Forks of a run.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forks", tag = "read", params(("run" = String, Path), Namespace), responses((status = 200, body = Vec<Run>)))]
pub async fn list_forks(
    State(app): State<App>,
    caller: Caller,
    Path(run): Path<String>,
    Query(query): Query<Namespace>,
) -> ApiResult<Json<Vec<Run>>> {
    let (db, found) = find(&app, &caller, Right::GetRuns, query.namespace.as_deref(), &run).await?;
    Ok(Json(runs::forks_of(&db, found.rid).await?))
}

/// What went wrong in a run, and because of what.
#[utoipa::path(get, path = "/api/v1/runs/{run}/forensics", tag = "read", params(("run" = String, Path), Namespace), responses((status = 200, body = Forensics)))]
pub async fn forensics(
    State(app): State<App>,
    caller: Caller,
    Path(run): Path<String>,
    Query(query): Query<Namespace>,
) -> ApiResult<Json<Forensics>> {
    let (db, found) = find(&app, &caller, Right::GetRuns, query.namespace.as_deref(), &run).await?;
    let source = planning::source(&db, &found).await?;
    let end = End { outcome: found.run.outcome, decided_by: found.run.decided_by.as_deref() };
    Ok(Json(replayfork_core::forensics::forensics(&source, end)))
}

/// The state's root, if it is one of this run or of its base: a digest alone opens nothing.
async fn state_of(db: &deadpool_postgres::Object, found: &Found, digest: &str) -> ApiResult<SnapshotRef> {
    let digest: Digest =
        digest.parse().map_err(|e: replayfork_core::digest::ParseDigestError| ApiError::bad_request("DigestInvalid", e.to_string()))?;
    let rids = vec![found.rid, found.base_rid.unwrap_or(found.rid)];
    let row = db
        .fetch_opt(
            "SELECT node, content FROM snapshots WHERE rid = ANY($1) AND (node = $2 OR content = $2) LIMIT 1",
            &[&rids, &digest.as_bytes()],
        )
        .await?;
    let read = |row: &tokio_postgres::Row, i| Digest::from_slice(row.get(i));
    row.and_then(|r| Some(SnapshotRef { node: read(&r, 0)?, content: read(&r, 1)? }))
        .ok_or_else(|| ApiError::not_found("SnapshotNotFound", format!("run {:?} has no workspace state {digest}", found.run.name)))
}

/// A folder of a workspace state.
#[utoipa::path(get, path = "/api/v1/runs/{run}/snapshots/{digest}/tree", tag = "read", params(("run" = String, Path), ("digest" = String, Path), PathQuery), responses((status = 200, body = TreeListing)))]
pub async fn tree(
    State(app): State<App>,
    caller: Caller,
    Path((run, digest)): Path<(String, String)>,
    Query(query): Query<PathQuery>,
) -> ApiResult<Json<TreeListing>> {
    let (db, found) = find(&app, &caller, Right::GetRuns, query.namespace.as_deref(), &run).await?;
    let snapshot = state_of(&db, &found, &digest).await?;
    let mut trees = Trees::default();
    trees.load(&db, &found.ns, [snapshot.node]).await?;
    let path = path_bytes(query.path.trim_matches('/'));
    let node = if path.is_empty() {
        snapshot.node
    } else {
        match entry_at(&mut trees.nodes, &mut Loaded, &snapshot.node, &path)?.map(|e| e.kind) {
            Some(Kind::Directory { node }) => node,
            _ => return Err(diffing::not_in_tree(&query.path)),
        }
    };
    let directory = trees.nodes.get(&mut Loaded, &node)?;
    let entries = directory.entries().map(|e| entry(&mut trees, e)).collect::<Result<_, _>>()?;
    Ok(Json(TreeListing { snapshot, path: query.path, entries }))
}

fn entry(trees: &mut Trees, entry: &replayfork_snapshot::Entry) -> ApiResult<TreeEntry> {
    let (kind, size, digest, target) = match &entry.kind {
        Kind::File { size, executable, digest, .. } => {
            (if *executable { TreeEntryKind::Executable } else { TreeEntryKind::File }, Some(*size as i64), Some(*digest), None)
        }
        Kind::Symlink { target } => (TreeEntryKind::Symlink, None, None, Some(path_text(target))),
        Kind::Directory { node } => (TreeEntryKind::Directory, None, Some(trees.nodes.content(&mut Loaded, node)?), None),
    };
    Ok(TreeEntry { name: path_text(&entry.name), kind, size, digest, target, mtime: entry.mtime })
}

/// A file of a workspace state.
#[utoipa::path(get, path = "/api/v1/runs/{run}/snapshots/{digest}/file", tag = "read", params(("run" = String, Path), ("digest" = String, Path), PathQuery), responses((status = 200, content_type = "application/octet-stream")))]
pub async fn file(
    State(app): State<App>,
    caller: Caller,
    Path((run, digest)): Path<(String, String)>,
    Query(query): Query<PathQuery>,
) -> ApiResult<impl IntoResponse> {
    let (db, found) = find(&app, &caller, Right::GetRuns, query.namespace.as_deref(), &run).await?;
    let snapshot = state_of(&db, &found, &digest).await?;
    let mut trees = Trees::default();
    trees.load(&db, &found.ns, [snapshot.node]).await?;
    let entry = entry_at(&mut trees.nodes, &mut Loaded, &snapshot.node, &path_bytes(query.path.trim_matches('/')))?;
    let blobs = match entry {
        Some(entry) if matches!(entry.kind, Kind::File { .. }) => entry.blobs(),
        _ => return Err(diffing::not_in_tree(&query.path)),
    };
    let mut content = Vec::new();
    for digest in blobs {
        content.extend(blobs::get(&db, &found.ns, &digest).await?);
    }
    // Never rendered by a browser as a page of this origin.
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CONTENT_DISPOSITION, "attachment"),
    ];
    Ok((headers, content))
}

/// The difference of two runs: by lineage where they have a common source, else as their steps are aligned.
#[utoipa::path(get, path = "/api/v1/diffs/{a}/{b}", tag = "read", params(("a" = String, Path), ("b" = String, Path), Namespace), responses((status = 200, body = RunDiff)))]
pub async fn diff(
    State(app): State<App>,
    caller: Caller,
    Path((a, b)): Path<(String, String)>,
    Query(query): Query<Namespace>,
) -> ApiResult<Json<RunDiff>> {
    // The operator reads the summary of the forks that it works for.
    let right = if app.auth.check(&caller, Right::OperateForks, None).await.is_ok() { Right::OperateForks } else { Right::GetRuns };
    let namespace = app.namespace(&caller, query.namespace.as_deref())?;
    if right == Right::GetRuns {
        app.auth.check(&caller, right, Some(&namespace)).await?;
    }
    let db = app.db().await?;
    let left = runs::find(&db, &app.packs, &namespace, &a).await?;
    let right = runs::find(&db, &app.packs, &left.run.namespace, &b).await?;
    Ok(Json(diffing::run_diff(&db, &left, &right).await?))
}

/// Plan a fork without creating anything.
#[utoipa::path(post, path = "/api/v1/plans", tag = "act", request_body = PlanRequest, responses((status = 200, body = PlanAnswer), (status = 422, description = "The fork can't be planned", body = replayfork_client::Problem)))]
pub async fn plan(State(app): State<App>, caller: Caller, Body(request): Body<PlanRequest>) -> ApiResult<Json<PlanAnswer>> {
    let refused = |reason: &'static str, detail: String| ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, reason, detail);
    let namespace = app.allowed(&caller, Right::GetRuns, Some(&request.namespace)).await?;
    if forks::without_nul(&serde_json::json!(request.spec)).is_some() {
        return Err(refused("SpecInvalid", forks::NUL.to_owned()));
    }
    let db = app.db().await?;
    let found = runs::find(&db, &app.packs, &namespace, &request.spec.source.run).await.map_err(|e| match e.reason {
        "RunNotFound" => refused("RunNotFound", format!("spec.source.run: {}", e.detail)),
        _ => e,
    })?;
    planning::check_sealed(&found)?;
    let told = |refusal: planning::Refusal| refused("ForkRefused", refusal.message);
    let ready = planning::ready(&db, &found, &request.spec, planning::LISTED).await?.map_err(told)?;
    let fork = ready.fork(&request.spec).map_err(told)?;
    let (plan, overview) = ready.plan(&app.config, &app.endpoints, &found, &fork).map_err(told)?;
    let plan = replayfork_core::plan::Plan { environment: overview.environment, ..plan };
    Ok(Json(PlanAnswer { run: found.run.id, run_name: found.run.name, plan }))
}

/// Send content for a patch that is too large for a custom resource. It is kept for a day, or as long as a fork that names it.
#[utoipa::path(post, path = "/api/v1/uploads", tag = "act", params(Namespace), request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses((status = 200, body = Uploaded), (status = 413, description = "It is larger than the installation allows", body = replayfork_client::Problem)))]
pub async fn upload(State(app): State<App>, caller: Caller, Query(query): Query<Namespace>, body: Bytes) -> ApiResult<Json<Uploaded>> {
    // Whoever may read runs may plan forks, and this is a part of a plan.
    let namespace = app.allowed(&caller, Right::GetRuns, query.namespace.as_deref()).await?;
    let limit = app.config.max_content_bytes;
    if body.len() > limit {
        let detail = format!("the content has {} bytes, at most {limit} are allowed (chart value limits.contentBytes)", body.len());
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "ContentTooLarge", detail));
    }
    let mut db = app.db().await?;
    let tx = begin(&mut db).await?;
    let ns = store::namespace(&tx, &app.packs, &namespace).await?;
    let digest = store::uploads::put(&tx, &ns, &body).await?;
    tx.commit().await?;
    Ok(Json(Uploaded { digest, size: body.len() as i64 }))
}

/// Delete a run. One that forks need is kept.
#[utoipa::path(delete, path = "/api/v1/runs/{run}", tag = "act", params(("run" = String, Path), Namespace), responses((status = 204), (status = 409, description = "Forks need it", body = replayfork_client::Problem)))]
pub async fn delete_run(
    State(app): State<App>,
    caller: Caller,
    Path(run): Path<String>,
    Query(query): Query<Namespace>,
) -> ApiResult<StatusCode> {
    let (mut db, found) = find(&app, &caller, Right::DeleteRuns, query.namespace.as_deref(), &run).await?;
    let tx = begin(&mut db).await?;
    runs::delete(&tx, &found).await?;
    tx.commit().await?;
    Ok(StatusCode::NO_CONTENT)
}
