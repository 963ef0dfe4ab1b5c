//! The courier's face: one fork, for the token of that fork's pod alone.

use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body as HttpBody;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use bytes::Bytes;
use deadpool_postgres::{Object, Transaction};
use replayfork_client::fork::{
    AskModel, BeginSpan, Bundle, CachedResult, ClaimFork, CloseFork, EndSpan, Fork, ForkResult, ModelAnswered, ReusedSnapshots, Wait,
};
use replayfork_client::ingest::{HaveBlobs, MissingBlobs, PackStored};
use replayfork_core::Digest;
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::Span;
use replayfork_snapshot::{BlobKind, PackBuilder, reachable};
use serde::Deserialize;
use tokio::sync::mpsc;
use utoipa::IntoParams;
use uuid::Uuid;

use super::Body;
use super::ingest::{store_pack, verified};
use crate::auth::Caller;
use crate::db::Connection;
use crate::planning;
use crate::problem::{ApiError, ApiResult};
use crate::state::{App, begin as begin_tx};
use crate::store::blobs::{self, Loaded, Trees};
use crate::store::{Namespace, forks, runs, spans};

/// How long a courier's open request waits to be told to stop.
const WAIT: Duration = Duration::from_secs(20);
const LOOK_EVERY: Duration = Duration::from_millis(300);
/// Blobs that are read for a restore at once: of at most 4 MiB each.
const RESTORE_BATCH: usize = 32;
/// Default of `spec.sandbox.deadlineSeconds`.
const DEADLINE_SECONDS: i64 = 900;

pub fn router() -> axum::Router<App> {
    axum::Router::new()
        .route("/sandbox/v1/forks/{uid}/claim", post(claim))
        .route("/sandbox/v1/forks/{uid}/bundle", get(bundle))
        .route("/sandbox/v1/forks/{uid}/snapshots", post(reused))
        .route("/sandbox/v1/forks/{uid}/snapshots/{node}", get(snapshot))
        .route("/sandbox/v1/forks/{uid}/blobs/have", post(have))
        .route("/sandbox/v1/forks/{uid}/packs", put(put_pack))
        .route("/sandbox/v1/forks/{uid}/spans/{span}/begin", post(begin))
        .route("/sandbox/v1/forks/{uid}/spans/{span}/end", post(end))
        .route("/sandbox/v1/forks/{uid}/spans/{span}/model", post(ask_model))
        .route("/sandbox/v1/forks/{uid}/contents/{digest}", get(content))
        .route("/sandbox/v1/forks/{uid}/results/{key}", get(cached))
        .route("/sandbox/v1/forks/{uid}/wait", get(wait))
        .route("/sandbox/v1/forks/{uid}/close", post(close))
}

/// The pod that asks: its token is bound to it and of the fork's namespace.
async fn pod(app: &App, headers: &HeaderMap, uid: Uuid) -> ApiResult<String> {
    let caller: Caller = app.auth.courier(headers, &uid).await?;
    let fork = forks::get(&app.db().await?, uid).await?;
    if caller.namespace() != Some(fork.namespace.as_str()) {
        return Err(ApiError::forbidden("Forbidden", format!("fork {uid} belongs to namespace {:?}, the token does not", fork.namespace)));
    }
    let pod = caller.pod_uid().ok_or_else(|| {
        ApiError::forbidden("TokenUnbound", "the token is bound to no pod; only the projected token of the fork's own pod is taken")
    })?;
    Ok(pod.to_owned())
}

/// Claim the fork, once.
#[utoipa::path(post, path = "/sandbox/v1/forks/{uid}/claim", tag = "sandbox", params(("uid" = Uuid, Path)), request_body = ClaimFork, responses((status = 200, body = Fork), (status = 409, description = "Claimed or ended", body = replayfork_client::Problem), (status = 425, description = "The pod is not named yet", body = replayfork_client::Problem)))]
pub async fn claim(
    State(app): State<App>,
    Path(uid): Path<Uuid>,
    headers: HeaderMap,
    Body(request): Body<ClaimFork>,
) -> ApiResult<Json<Fork>> {
    let pod = pod(&app, &headers, uid).await?;
    let nonce = hex::decode(&request.nonce).ok().filter(|n| n.len() == 32);
    let nonce = nonce.ok_or_else(|| ApiError::bad_request("NonceInvalid", "nonce: 32 random bytes in hex"))?;
    let mut db = app.db().await?;
    let tx = begin_tx(&mut db).await?;
    forks::claim(&tx, uid, &pod, &nonce).await?;
    let fork = forks::get(&tx, uid).await?;
    tx.commit().await?;
    Ok(Json(fork))
}

async fn load(app: &App, db: &impl Connection, uid: Uuid) -> ApiResult<(ForkSpec, Digest, runs::Found)> {
    let (spec, digest, source_rid) = forks::spec_of(db, uid).await?;
    let spec = serde_json::from_value(spec).map_err(|e| ApiError::internal(&e))?;
    Ok((spec, digest, runs::by_rid(db, &app.packs, source_rid).await?))
}

async fn claimed(app: &App, headers: &HeaderMap, uid: Uuid) -> ApiResult<(Object, forks::Claimed)> {
    let pod = pod(app, headers, uid).await?;
    let db = app.db().await?;
    let claimed = forks::claimed(&db, &app.packs, uid, &pod).await?;
    Ok((db, claimed))
}

/// A transaction that holds the lock of the claimed fork. What the pod reports changes with it, or not at all.
async fn change<'a>(app: &App, headers: &HeaderMap, uid: Uuid, db: &'a mut Object) -> ApiResult<(Transaction<'a>, forks::Claimed)> {
    let pod = pod(app, headers, uid).await?;
    let tx = begin_tx(db).await?;
    let claimed = forks::claimed(&tx, &app.packs, uid, &pod).await?;
    Ok((tx, claimed))
}

/// Spec, plan digest and recorded spans.
#[utoipa::path(get, path = "/sandbox/v1/forks/{uid}/bundle", tag = "sandbox", params(("uid" = Uuid, Path)), responses((status = 200, body = Bundle)))]
pub async fn bundle(State(app): State<App>, Path(uid): Path<Uuid>, headers: HeaderMap) -> ApiResult<Json<Bundle>> {
    let (db, _) = claimed(&app, &headers, uid).await?;
    let (spec, plan_digest, found) = load(&app, &db, uid).await?;
    let input = planning::load(&db, &found, &spec).await?.map_err(|refusal| ApiError::conflict("ForkRefused", refusal.message))?;
    let contents = planning::named(&spec, &input.source.inherited);
    let source = input.source;
    let sandbox = forks::get(&db, uid).await?.plan.map(|p| p.environment).unwrap_or_default();
    let deadline_seconds = spec.sandbox.deadline_seconds.unwrap_or(DEADLINE_SECONDS);
    Ok(Json(Bundle {
        spec,
        plan_digest,
        recorded: source.environment,
        sandbox,
        spans: source.spans,
        changed: source.changed,
        facts: source.facts,
        inherited: source.inherited,
        contents,
        deadline_seconds,
    }))
}

/// An uploaded content that the fork's patches name.
#[utoipa::path(get, path = "/sandbox/v1/forks/{uid}/contents/{digest}", tag = "sandbox", params(("uid" = Uuid, Path), ("digest" = String, Path)), responses((status = 200, content_type = "application/octet-stream")))]
pub async fn content(State(app): State<App>, Path((uid, digest)): Path<(Uuid, Digest)>, headers: HeaderMap) -> ApiResult<Response> {
    let (db, claimed) = claimed(&app, &headers, uid).await?;
    if db.fetch_opt("SELECT 1 FROM fork_blobs WHERE uid = $1 AND digest = $2", &[&uid, &digest.as_bytes()]).await?.is_none() {
        return Err(ApiError::not_found("ContentNotFound", format!("{digest} is no content of this fork's patches")));
    }
    let bytes = blobs::get(&db, &claimed.ns, &digest).await?;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response())
}

/// A result that another fork left.
#[utoipa::path(get, path = "/sandbox/v1/forks/{uid}/results/{key}", tag = "sandbox", params(("uid" = Uuid, Path), ("key" = String, Path)), responses((status = 200, body = CachedResult), (status = 404, description = "There is none", body = replayfork_client::Problem)))]
pub async fn cached(State(app): State<App>, Path((uid, key)): Path<(Uuid, Digest)>, headers: HeaderMap) -> ApiResult<Json<CachedResult>> {
    let mut db = app.db().await?;
    let (tx, claimed) = change(&app, &headers, uid, &mut db).await?;
    let found = forks::cached(&tx, &claimed, &key).await?;
    tx.commit().await?;
    found.map(Json).ok_or_else(|| ApiError::not_found("ResultNotFound", "no fork of this namespace has left a result under this key"))
}

/// Ask the model that the fork's spec names, once for a step.
#[utoipa::path(post, path = "/sandbox/v1/forks/{uid}/spans/{span}/model", tag = "sandbox", params(("uid" = Uuid, Path), ("span" = String, Path)), request_body = AskModel, responses((status = 200, body = ModelAnswered), (status = 409, description = "It was asked before, and the answer is not known", body = replayfork_client::Problem)))]
pub async fn ask_model(
    State(app): State<App>,
    Path((uid, span)): Path<(Uuid, String)>,
    headers: HeaderMap,
    Body(request): Body<AskModel>,
) -> ApiResult<Json<ModelAnswered>> {
    let mut db = app.db().await?;
    let (tx, _) = change(&app, &headers, uid, &mut db).await?;
    let known = forks::ask_once(&tx, uid, &span).await?;
    let (spec, _, _) = load(&app, &tx, uid).await?;
    let namespace = forks::get(&tx, uid).await?.namespace;
    // Noted before the call: a call whose answer is lost is not made again.
    tx.commit().await?;
    if let Some(known) = known {
        return Ok(Json(known));
    }
    let Some(endpoint) = spec.model.endpoint else {
        return Err(ApiError::conflict("NoEndpoint", "the fork's spec names no model endpoint"));
    };
    // On its own, so that a courier that goes away does not lose an answer that was paid for.
    let asking = tokio::spawn(async move {
        let answer = match app.endpoints.ask(&endpoint, &namespace, &request.request).await {
            Ok(response) => ModelAnswered { response: Some(response), error: None },
            Err(why) => ModelAnswered { response: None, error: Some(why) },
        };
        forks::answered(&app.db().await?, uid, &span, &answer).await?;
        Ok::<_, ApiError>(answer)
    });
    Ok(Json(asking.await.map_err(|e| ApiError::internal(&e))??))
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Base {
    /// A state whose blobs the asker has.
    base: Option<Digest>,
}

/// All that a workspace state needs, as packs, each behind its length (u32, little-endian).
#[utoipa::path(get, path = "/sandbox/v1/forks/{uid}/snapshots/{node}", tag = "sandbox", params(("uid" = Uuid, Path), ("node" = String, Path), Base), responses((status = 200, content_type = "application/octet-stream")))]
pub async fn snapshot(
    State(app): State<App>,
    Path((uid, node)): Path<(Uuid, Digest)>,
    Query(query): Query<Base>,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let (db, claimed) = claimed(&app, &headers, uid).await?;
    forks::check_root(&db, &claimed, &node).await?;
    if let Some(base) = &query.base {
        forks::check_root(&db, &claimed, base).await?;
    }
    let mut trees = Trees::default();
    trees.load(&db, &claimed.ns, std::iter::once(node).chain(query.base)).await?;
    let order = reachable(&mut trees.nodes, &mut Loaded, &node, query.base.as_ref())?;
    let (sender, receiver) = mpsc::channel::<Result<Bytes, std::io::Error>>(2);
    let ns = claimed.ns;
    tokio::spawn(async move {
        if let Err(error) = send_packs(&db, &ns, &order, &trees, &sender).await {
            tracing::warn!(cause = %error, "a restore broke off");
            let _ = sender.send(Err(std::io::Error::other(error.detail))).await;
        }
    });
    let stream = futures::stream::unfold(receiver, |mut receiver| async move { receiver.recv().await.map(|item| (item, receiver)) });
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], HttpBody::from_stream(stream)).into_response())
}

async fn send_packs(
    db: &Object,
    ns: &Namespace,
    order: &[Digest],
    trees: &Trees,
    sender: &mpsc::Sender<Result<Bytes, std::io::Error>>,
) -> ApiResult<()> {
    let mut pack = PackBuilder::default();
    for batch in order.chunks(RESTORE_BATCH) {
        let mut contents = blobs::get_many(db, ns, batch).await?;
        for digest in batch {
            let content = contents.remove(digest).unwrap_or_default();
            let kind = if trees.nodes.contains(digest) { BlobKind::Directory } else { BlobKind::Data };
            pack.add(*digest, kind, &content);
            if pack.is_full() && sender.send(Ok(framed(&mut pack))).await.is_err() {
                return Ok(());
            }
        }
    }
    if !pack.is_empty() {
        let _ = sender.send(Ok(framed(&mut pack))).await;
    }
    Ok(())
}

fn framed(pack: &mut PackBuilder) -> Bytes {
    let pack = pack.finish();
    let mut out = (pack.len() as u32).to_le_bytes().to_vec();
    out.extend(pack);
    out.into()
}

/// Ask which blobs must be sent.
#[utoipa::path(post, path = "/sandbox/v1/forks/{uid}/blobs/have", tag = "sandbox", params(("uid" = Uuid, Path)), request_body = HaveBlobs, responses((status = 200, body = MissingBlobs)))]
pub async fn have(
    State(app): State<App>,
    Path(uid): Path<Uuid>,
    headers: HeaderMap,
    Body(request): Body<HaveBlobs>,
) -> ApiResult<Json<MissingBlobs>> {
    let (db, claimed) = claimed(&app, &headers, uid).await?;
    Ok(Json(MissingBlobs { missing: blobs::missing(&db, claimed.ns.number, &request.digests).await? }))
}

/// Send a pack of blobs.
#[utoipa::path(put, path = "/sandbox/v1/forks/{uid}/packs", tag = "sandbox", params(("uid" = Uuid, Path)), request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses((status = 200, body = PackStored)))]
pub async fn put_pack(State(app): State<App>, Path(uid): Path<Uuid>, headers: HeaderMap, body: Bytes) -> ApiResult<Json<PackStored>> {
    let (db, claimed) = claimed(&app, &headers, uid).await?;
    drop(db);
    let pack = verified(body).await?;
    let mut db = app.db().await?;
    let tx = begin_tx(&mut db).await?;
    Ok(Json(store_pack(&app, tx, &claimed.ns, &pack).await?))
}

async fn source_span(db: &impl Connection, claimed: &forks::Claimed, id: &str) -> ApiResult<Span> {
    let found = runs::by_rid(db, &claimed.ns.packs, claimed.source_rid).await?;
    Ok(spans::one(db, &found, id).await?.0)
}

/// Say that a step is about to be executed.
#[utoipa::path(post, path = "/sandbox/v1/forks/{uid}/spans/{span}/begin", tag = "sandbox", params(("uid" = Uuid, Path), ("span" = String, Path)), request_body = BeginSpan, responses((status = 204), (status = 409, description = "It was executed already, or the fork has ended", body = replayfork_client::Problem)))]
pub async fn begin(
    State(app): State<App>,
    Path((uid, span)): Path<(Uuid, String)>,
    headers: HeaderMap,
    Body(request): Body<BeginSpan>,
) -> ApiResult<Json<()>> {
    let mut db = app.db().await?;
    let (tx, claimed) = change(&app, &headers, uid, &mut db).await?;
    let span = source_span(&tx, &claimed, &span).await?;
    forks::begin(&tx, uid, &claimed, &span, &request).await?;
    tx.commit().await?;
    Ok(Json(()))
}

/// A span's result.
#[utoipa::path(post, path = "/sandbox/v1/forks/{uid}/spans/{span}/end", tag = "sandbox", params(("uid" = Uuid, Path), ("span" = String, Path)), request_body = EndSpan, responses((status = 204), (status = 409, description = "Blobs are missing, or the fork has ended", body = replayfork_client::Problem)))]
pub async fn end(
    State(app): State<App>,
    Path((uid, span)): Path<(Uuid, String)>,
    headers: HeaderMap,
    Body(request): Body<EndSpan>,
) -> ApiResult<Json<()>> {
    let mut db = app.db().await?;
    let (tx, claimed) = change(&app, &headers, uid, &mut db).await?;
    let span = source_span(&tx, &claimed, &span).await?;
    forks::end(&tx, uid, &claimed, &span, &request).await?;
    tx.commit().await?;
    Ok(Json(()))
}

/// Workspace states around a reused span, where they differ from the recorded ones.
#[utoipa::path(post, path = "/sandbox/v1/forks/{uid}/snapshots", tag = "sandbox", params(("uid" = Uuid, Path)), request_body = ReusedSnapshots, responses((status = 204)))]
pub async fn reused(
    State(app): State<App>,
    Path(uid): Path<Uuid>,
    headers: HeaderMap,
    Body(request): Body<ReusedSnapshots>,
) -> ApiResult<Json<()>> {
    let mut db = app.db().await?;
    let (tx, claimed) = change(&app, &headers, uid, &mut db).await?;
    forks::reused(&tx, &claimed, &request).await?;
    tx.commit().await?;
    Ok(Json(()))
}

/// Wait to be told to stop.
#[utoipa::path(get, path = "/sandbox/v1/forks/{uid}/wait", tag = "sandbox", params(("uid" = Uuid, Path)), responses((status = 200, body = Wait)))]
pub async fn wait(State(app): State<App>, Path(uid): Path<Uuid>, headers: HeaderMap) -> ApiResult<Json<Wait>> {
    pod(&app, &headers, uid).await?;
    let start = Instant::now();
    loop {
        let (cancel, terminal) = forks::asked_to_stop(&app.db().await?, uid).await?;
        if cancel || terminal || start.elapsed() >= WAIT {
            return Ok(Json(Wait { cancel, terminal }));
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// End the fork; the first end stands and is returned.
#[utoipa::path(post, path = "/sandbox/v1/forks/{uid}/close", tag = "sandbox", params(("uid" = Uuid, Path)), request_body = CloseFork, responses((status = 200, body = ForkResult)))]
pub async fn close(
    State(app): State<App>,
    Path(uid): Path<Uuid>,
    headers: HeaderMap,
    Body(request): Body<CloseFork>,
) -> ApiResult<(StatusCode, Json<ForkResult>)> {
    let pod = pod(&app, &headers, uid).await?;
    let fork = forks::get(&app.db().await?, uid).await?;
    if fork.pod_uid.as_deref() != Some(pod.as_str()) {
        return Err(ApiError::conflict("ForkNotClaimed", "the fork is another pod's"));
    }
    Ok((StatusCode::OK, Json(super::fork::close_fork(&app, uid, &request).await?)))
}
