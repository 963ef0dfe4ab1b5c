//! What recorders and agents send. The run's namespace is that of the ServiceAccount that asks.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{post, put};
use bytes::Bytes;
use deadpool_postgres::{Object, Transaction};
use replayfork_client::check;
use replayfork_client::ingest::{
    CreateRun, FinishRun, HaveBlobs, Ingested, MissingBlobs, PackStored, RunCreated, SnapshotBatch, SpanBatch, SpanUpload,
};
use replayfork_core::model::Closing;
use uuid::Uuid;

use super::Body;
use crate::auth::{Caller, Right};
use crate::problem::{ApiError, ApiResult};
use crate::state::{App, begin, now};
use crate::store::{self, Namespace, blobs, runs, snapshots, spans};

pub fn router() -> axum::Router<App> {
    axum::Router::new()
        .route("/v1/runs", post(create_run))
        .route("/v1/runs/{run}/spans", post(put_spans))
        .route("/v1/runs/{run}/spans/{span}/end", post(end_span))
        .route("/v1/runs/{run}/snapshots", post(put_snapshots))
        .route("/v1/runs/{run}/finish", post(finish))
        .route("/v1/runs/{run}/goodbye", post(goodbye))
        .route("/v1/blobs/have", post(have))
        .route("/v1/packs", put(put_pack))
}

/// A transaction of who may record, and the caller's namespace.
async fn change<'a>(app: &App, caller: &Caller, db: &'a mut Object) -> ApiResult<(Transaction<'a>, Namespace)> {
    let namespace = app.allowed(caller, Right::CreateRuns, None).await?;
    let tx = begin(db).await?;
    let ns = store::namespace(&tx, &app.packs, &namespace).await?;
    Ok((tx, ns))
}

/// Begin a run.
#[utoipa::path(post, path = "/v1/runs", tag = "ingest", request_body = CreateRun, responses((status = 200, body = RunCreated)))]
pub async fn create_run(State(app): State<App>, caller: Caller, Body(request): Body<CreateRun>) -> ApiResult<Json<RunCreated>> {
    let mut db = app.db().await?;
    let (tx, ns) = change(&app, &caller, &mut db).await?;
    let created = runs::create(&tx, ns.number, &request, now()).await?;
    tx.commit().await?;
    Ok(Json(created))
}

/// Send parts of spans; of a part sent twice, the first one stands.
#[utoipa::path(post, path = "/v1/runs/{run}/spans", tag = "ingest", params(("run" = Uuid, Path)), request_body = SpanBatch, responses((status = 200, body = Ingested)))]
pub async fn put_spans(
    State(app): State<App>,
    caller: Caller,
    Path(run): Path<Uuid>,
    Body(batch): Body<SpanBatch>,
) -> ApiResult<Json<Ingested>> {
    write_spans(&app, &caller, run, &batch.spans).await
}

/// End a span.
#[utoipa::path(post, path = "/v1/runs/{run}/spans/{span}/end", tag = "ingest", params(("run" = Uuid, Path), ("span" = String, Path)), request_body = Closing, responses((status = 200, body = Ingested)))]
pub async fn end_span(
    State(app): State<App>,
    caller: Caller,
    Path((run, span)): Path<(Uuid, String)>,
    Body(closing): Body<Closing>,
) -> ApiResult<Json<Ingested>> {
    write_spans(&app, &caller, run, &[SpanUpload { id: span, opening: None, closing: Some(closing) }]).await
}

async fn write_spans(app: &App, caller: &Caller, run: Uuid, uploads: &[SpanUpload]) -> ApiResult<Json<Ingested>> {
    check::spans(uploads)?;
    let mut db = app.db().await?;
    let (tx, ns) = change(app, caller, &mut db).await?;
    let runs::Open { rid, rev, segments, workspace_root } = runs::next_rev(&tx, run, ns.number).await?;
    check::paths(uploads, workspace_root.as_deref())?;
    let written = spans::upsert(&tx, &ns, rid, rev, segments, uploads).await?;
    if written == 0 {
        // Nothing was new: no revision is used up.
        tx.rollback().await?;
        return Ok(Json(Ingested { written, rev: rev - 1 }));
    }
    tx.commit().await?;
    app.metrics.spans_ingested.inc_by(written as u64);
    Ok(Json(Ingested { written, rev }))
}

/// Say which workspace states lie around spans.
#[utoipa::path(post, path = "/v1/runs/{run}/snapshots", tag = "ingest", params(("run" = Uuid, Path)), request_body = SnapshotBatch, responses((status = 204), (status = 409, description = "Blobs are missing", body = replayfork_client::Problem)))]
pub async fn put_snapshots(
    State(app): State<App>,
    caller: Caller,
    Path(run): Path<Uuid>,
    Body(batch): Body<SnapshotBatch>,
) -> ApiResult<Json<Ingested>> {
    let mut db = app.db().await?;
    let (tx, ns) = change(&app, &caller, &mut db).await?;
    let runs::Open { rid, rev, .. } = runs::next_rev(&tx, run, ns.number).await?;
    snapshots::put(&tx, ns.number, rid, &batch.snapshots).await?;
    tx.commit().await?;
    Ok(Json(Ingested { written: batch.snapshots.len() as i64, rev }))
}

/// Finish and seal a run.
#[utoipa::path(post, path = "/v1/runs/{run}/finish", tag = "ingest", params(("run" = Uuid, Path)), request_body = FinishRun, responses((status = 200, body = Ingested)))]
pub async fn finish(
    State(app): State<App>,
    caller: Caller,
    Path(run): Path<Uuid>,
    Body(request): Body<FinishRun>,
) -> ApiResult<Json<Ingested>> {
    let mut db = app.db().await?;
    let (tx, ns) = change(&app, &caller, &mut db).await?;
    let (rev, spent) = runs::finish(&tx, ns.number, run, &request, now()).await?;
    tx.commit().await?;
    spent.iter().for_each(|spent| app.metrics.agents.sealed(spent));
    Ok(Json(Ingested { written: 1, rev }))
}

/// Say that the recorder of a run goes away, with all sent that it had.
#[utoipa::path(post, path = "/v1/runs/{run}/goodbye", tag = "ingest", params(("run" = Uuid, Path)), responses((status = 200, body = Ingested)))]
pub async fn goodbye(State(app): State<App>, caller: Caller, Path(run): Path<Uuid>) -> ApiResult<Json<Ingested>> {
    let namespace = app.allowed(&caller, Right::CreateRuns, None).await?;
    let db = app.db().await?;
    let ns = store::namespace(&db, &app.packs, &namespace).await?;
    runs::goodbye(&db, ns.number, run).await?;
    Ok(Json(Ingested { written: 0, rev: 0 }))
}

/// Ask which blobs must be sent.
#[utoipa::path(post, path = "/v1/blobs/have", tag = "ingest", request_body = HaveBlobs, responses((status = 200, body = MissingBlobs)))]
pub async fn have(State(app): State<App>, caller: Caller, Body(request): Body<HaveBlobs>) -> ApiResult<Json<MissingBlobs>> {
    let namespace = app.allowed(&caller, Right::CreateRuns, None).await?;
    let db = app.db().await?;
    let ns = store::namespace(&db, &app.packs, &namespace).await?;
    Ok(Json(MissingBlobs { missing: blobs::missing(&db, ns.number, &request.digests).await? }))
}

/// Send a pack of blobs.
#[utoipa::path(put, path = "/v1/packs", tag = "ingest", request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses((status = 200, body = PackStored), (status = 409, description = "Blobs are missing", body = replayfork_client::Problem)))]
pub async fn put_pack(State(app): State<App>, caller: Caller, body: Bytes) -> ApiResult<(StatusCode, Json<PackStored>)> {
    let namespace = app.allowed(&caller, Right::CreateRuns, None).await?;
    let pack = verified(body).await?;
    let mut db = app.db().await?;
    let tx = begin(&mut db).await?;
    let ns = store::namespace(&tx, &app.packs, &namespace).await?;
    let stored = store_pack(&app, tx, &ns, &pack).await?;
    Ok((StatusCode::OK, Json(stored)))
}

/// A pack from a caller that may send one, verified where it holds up no other request, nor a connection of the database.
///
/// # Errors
/// As [`blobs::Verified::of`].
pub async fn verified(body: Bytes) -> ApiResult<blobs::Verified<Bytes>> {
    tokio::task::spawn_blocking(|| blobs::Verified::of(body)).await.map_err(|e| ApiError::internal(&e))?
}

/// Stores a pack in a transaction of its own.
///
/// # Errors
/// As [`blobs::put_pack`].
pub async fn store_pack(app: &App, tx: Transaction<'_>, ns: &Namespace, pack: &blobs::Verified<Bytes>) -> ApiResult<PackStored> {
    let (stored, known) = blobs::put_pack(&tx, ns, pack).await?;
    tx.commit().await?;
    app.metrics.blob_bytes.inc_by(pack.bytes().len() as u64);
    app.metrics.blobs_stored.inc_by(stored as u64);
    app.metrics.blobs_deduplicated.inc_by(known as u64);
    Ok(PackStored { stored, known })
}
