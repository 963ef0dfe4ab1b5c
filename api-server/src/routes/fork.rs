//! The operator's face: registering, watching and ending forks. Only for the operator's ServiceAccount.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get as get_route, post, put};
use replayfork_client::fork::{CloseFork, Fork, ForkResult, NamePod, RegisterFork};
use uuid::Uuid;

use super::Body;
use crate::auth::{Caller, Right};
use crate::metrics::ReasonLabel;
use crate::problem::ApiResult;
use crate::state::{App, begin, now};
use crate::store::forks;

pub fn router() -> axum::Router<App> {
    axum::Router::new()
        .route("/api/v1/forks", get_route(list))
        .route("/api/v1/forks/{uid}", put(register).get(get).delete(resource_gone))
        .route("/api/v1/forks/{uid}/pod", put(name_pod))
        .route("/api/v1/forks/{uid}/cancel", post(cancel))
        .route("/api/v1/forks/{uid}/close", post(close))
}

/// The operator works for all namespaces, so its right is one of the whole cluster.
async fn operator(app: &App, caller: &Caller) -> ApiResult<()> {
    app.auth.check(caller, Right::OperateForks, None).await
}

/// Register and plan a fork.
#[utoipa::path(put, path = "/api/v1/forks/{uid}", tag = "operator", params(("uid" = Uuid, Path)), request_body = RegisterFork, responses((status = 200, body = Fork), (status = 409, description = "Another spec, or the run is not sealed yet", body = replayfork_client::Problem)))]
pub async fn register(
    State(app): State<App>,
    caller: Caller,
    Path(uid): Path<Uuid>,
    Body(request): Body<RegisterFork>,
) -> ApiResult<Json<Fork>> {
    operator(&app, &caller).await?;
    let mut db = app.db().await?;
    let tx = begin(&mut db).await?;
    let fork = forks::register(&tx, (&app.config, &app.endpoints, &app.packs), uid, &request, now()).await?;
    tx.commit().await?;
    Ok(Json(fork))
}

/// Forks to compare with the custom resources that exist.
#[utoipa::path(get, path = "/api/v1/forks", tag = "operator", responses((status = 200, body = Vec<Fork>)))]
pub async fn list(State(app): State<App>, caller: Caller) -> ApiResult<Json<Vec<Fork>>> {
    operator(&app, &caller).await?;
    Ok(Json(forks::open_or_owned(&app.db().await?).await?))
}

/// A fork's row.
#[utoipa::path(get, path = "/api/v1/forks/{uid}", tag = "operator", params(("uid" = Uuid, Path)), responses((status = 200, body = Fork)))]
pub async fn get(State(app): State<App>, caller: Caller, Path(uid): Path<Uuid>) -> ApiResult<Json<Fork>> {
    operator(&app, &caller).await?;
    Ok(Json(forks::get(&app.db().await?, uid).await?))
}

/// Say which pod is the fork's.
#[utoipa::path(put, path = "/api/v1/forks/{uid}/pod", tag = "operator", params(("uid" = Uuid, Path)), request_body = NamePod, responses((status = 200, body = Fork)))]
pub async fn name_pod(
    State(app): State<App>,
    caller: Caller,
    Path(uid): Path<Uuid>,
    Body(request): Body<NamePod>,
) -> ApiResult<Json<Fork>> {
    operator(&app, &caller).await?;
    let mut db = app.db().await?;
    let tx = begin(&mut db).await?;
    forks::name_pod(&tx, uid, &request.pod_uid).await?;
    let fork = forks::get(&tx, uid).await?;
    tx.commit().await?;
    Ok(Json(fork))
}

/// Ask a fork to stop.
#[utoipa::path(post, path = "/api/v1/forks/{uid}/cancel", tag = "operator", params(("uid" = Uuid, Path)), responses((status = 200, body = Fork)))]
pub async fn cancel(State(app): State<App>, caller: Caller, Path(uid): Path<Uuid>) -> ApiResult<Json<Fork>> {
    operator(&app, &caller).await?;
    let db = app.db().await?;
    forks::request_cancel(&db, uid).await?;
    Ok(Json(forks::get(&db, uid).await?))
}

/// End a fork; the first end stands and is returned.
#[utoipa::path(post, path = "/api/v1/forks/{uid}/close", tag = "operator", params(("uid" = Uuid, Path)), request_body = CloseFork, responses((status = 200, body = ForkResult)))]
pub async fn close(
    State(app): State<App>,
    caller: Caller,
    Path(uid): Path<Uuid>,
    Body(request): Body<CloseFork>,
) -> ApiResult<Json<ForkResult>> {
    operator(&app, &caller).await?;
    Ok(Json(close_fork(&app, uid, &request).await?))
}

/// Ends a fork in a transaction of its own.
///
/// # Errors
/// As [`forks::close`].
pub async fn close_fork(app: &App, uid: Uuid, request: &CloseFork) -> ApiResult<ForkResult> {
    let mut db = app.db().await?;
    let tx = begin(&mut db).await?;
    let result = forks::close(&tx, &app.packs, uid, request, now()).await?;
    tx.commit().await?;
    app.metrics.forks_closed.get_or_create(&ReasonLabel { reason: result.reason.to_string() }).inc();
    Ok(result)
}

/// The custom resource is gone: close the fork, and delete its run where the spec asked for that.
#[utoipa::path(delete, path = "/api/v1/forks/{uid}", tag = "operator", params(("uid" = Uuid, Path)), responses((status = 204)))]
pub async fn resource_gone(State(app): State<App>, caller: Caller, Path(uid): Path<Uuid>) -> ApiResult<StatusCode> {
    operator(&app, &caller).await?;
    let mut db = app.db().await?;
    let tx = begin(&mut db).await?;
    forks::resource_gone(&tx, &app.packs, uid, now()).await?;
    tx.commit().await?;
    Ok(StatusCode::NO_CONTENT)
}
