//! The collector on loopback: the api-server's own ingest routes, answered once what they bring is in the spool.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use replayfork_client::ingest::{CreateRun, Edge, FinishRun, Ingested, RunCreated, SnapshotUpload, SpanBatch, SpanUpload};
use replayfork_client::{Problem, check, run_id};
use replayfork_core::model::{Closing, RunEnvironment};
use tokio::sync::Mutex;
use uuid::Uuid;

use crate::runs::RunMemory;
use crate::spool::{Item, Spool};
use crate::upload::Uploader;
use crate::workspace::Snapshots;

/// How long creating a run waits for the name that it really gets.
const NAME_PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of one request.
const MAX_REQUEST: usize = 64 << 20;

pub struct Recorder {
    spool: Arc<Spool>,
    snapshots: Option<Snapshots>,
    uploader: Uploader,
    environment: RunEnvironment,
    state: Mutex<Memory>,
}

struct Memory {
    runs: HashMap<Uuid, RunMemory>,
    /// The last start time given: they strictly increase.
    last: i64,
}

struct Refused(StatusCode, &'static str, String);

impl From<check::Invalid> for Refused {
    fn from(invalid: check::Invalid) -> Self {
        Self(StatusCode::BAD_REQUEST, invalid.reason, invalid.detail)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        let Self(status, reason, detail) = self;
        let title = status.canonical_reason().unwrap_or("error").to_owned();
        let problem = Problem {
            r#type: format!("about:blank#{reason}"),
            title,
            status: status.as_u16(),
            detail,
            reason: reason.to_owned(),
            missing: vec![],
        };
        (status, [("content-type", "application/problem+json")], Json(problem)).into_response()
    }
}

type Answer<T> = Result<(StatusCode, Json<T>), Refused>;

pub fn router(recorder: Arc<Recorder>) -> axum::Router {
    axum::Router::new()
        .route("/healthz", get(|| async { StatusCode::NO_CONTENT }))
        .route("/v1/runs", post(create_run))
        .route("/v1/runs/{run}/spans", post(put_spans))
        .route("/v1/runs/{run}/spans/{span}/end", post(end_span))
        .route("/v1/runs/{run}/finish", post(finish))
        .layer(DefaultBodyLimit::max(MAX_REQUEST))
        .with_state(recorder)
}

/// `RECORDER=off`: the same routes, and nothing is kept.
pub fn discard() -> axum::Router {
    let created = || async { (StatusCode::ACCEPTED, Json(RunCreated { id: Uuid::now_v7(), name: "not-recorded".into() })) };
    axum::Router::new()
        .route("/healthz", get(|| async { StatusCode::NO_CONTENT }))
        .route("/v1/runs", post(created))
        .fallback(|| async { (StatusCode::ACCEPTED, Json(Ingested { written: 0, rev: 0 })) })
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i64)
}

fn body<T>(body: Result<Json<T>, JsonRejection>) -> Result<T, Refused> {
    match body {
        Ok(Json(value)) => Ok(value),
        Err(rejection) => Err(Refused(StatusCode::BAD_REQUEST, "BodyInvalid", rejection.body_text())),
    }
}

impl Recorder {
    pub fn new(spool: Arc<Spool>, snapshots: Option<Snapshots>, uploader: Uploader, environment: RunEnvironment) -> Self {
        Self { spool, snapshots, uploader, environment, state: Mutex::new(Memory { runs: HashMap::new(), last: 0 }) }
    }

    fn spool(&self, item: &Item) -> Result<(), Refused> {
        self.spool.add(item).map_err(|error| {
            tracing::error!(%error, "the spool can't be written");
            Refused(
                StatusCode::INSUFFICIENT_STORAGE,
                "SpoolFull",
                format!("the recorder's spool can't be written ({error}); this was not recorded, go on without"),
            )
        })
    }

    async fn snapshot(&self, run: Uuid, span: &str, edge: Edge, sees_workspace: bool) -> Result<(), Refused> {
        let Some(snapshots) = &self.snapshots else { return Ok(()) };
        let taken = if sees_workspace { snapshots.now().await } else { snapshots.last().await };
        if let Err(why) = &taken {
            tracing::warn!(span, "no snapshot: {why}");
        }
        let (snapshot, missing) = match taken {
            Ok(snapshot) => (Some(snapshot), None),
            Err(why) => (None, Some(why)),
        };
        let upload = SnapshotUpload { span: span.to_owned(), edge, snapshot, missing };
        self.spool(&Item::Snapshots { run, snapshots: vec![upload] })
    }

    async fn take(&self, run: Uuid, mut spans: Vec<SpanUpload>) -> Answer<Ingested> {
        let written = spans.iter().map(|s| i64::from(s.opening.is_some()) + i64::from(s.closing.is_some())).sum();
        let mut is_now = Vec::with_capacity(spans.len());
        for span in &mut spans {
            let (opening, closing) = (span.opening.as_mut(), span.closing.as_mut());
            let begins = opening.filter(|opening| opening.started <= 0).map(|opening| opening.started = now());
            let ends = closing.filter(|closing| closing.ended <= 0).map(|closing| closing.ended = now());
            is_now.push((begins.is_some(), ends.is_some()));
        }
        // Said while the agent can still hear it.
        check::spans(&spans)?;
        check::paths(&spans, self.environment.workspace_root.as_deref())?;
        for (mut span, (begins, ends)) in spans.into_iter().zip(is_now) {
            if let Some(opening) = &mut span.opening {
                {
                    let mut state = self.state.lock().await;
                    let memory = state.runs.entry(run).or_insert_with(RunMemory::partial);
                    memory.check_bindings(&span.id, opening).map_err(|why| Refused(StatusCode::BAD_REQUEST, "BindingInvalid", why))?;
                    memory.begun(&span.id, opening);
                }
                self.snapshot(run, &span.id, Edge::Before, opening.sees_workspace()).await?;
                let mut state = self.state.lock().await;
                // It begins once the workspace has been captured, and ends before it is again.
                let started = if begins { now() } else { opening.started };
                opening.started = started.max(state.last + 1);
                state.last = opening.started;
            }
            if let Some(closing) = &mut span.closing {
                let begun = span.opening.as_ref().map_or(0, |opening| opening.started);
                let ended = if ends { now() } else { closing.ended };
                closing.ended = ended.max(begun);
                let sees_workspace = self.state.lock().await.runs.entry(run).or_insert_with(RunMemory::partial).ended(&span.id);
                self.snapshot(run, &span.id, Edge::After, sees_workspace).await?;
            }
            self.spool(&Item::Spans { run, spans: vec![span] })?;
        }
        Ok((StatusCode::ACCEPTED, Json(Ingested { written, rev: 0 })))
    }
}

async fn create_run(State(recorder): State<Arc<Recorder>>, request: Result<Json<CreateRun>, JsonRejection>) -> Answer<RunCreated> {
    let mut request = body(request)?;
    check::run(&request)?;
    let id = *request.id.get_or_insert_with(Uuid::now_v7);
    if request.started <= 0 {
        request.started = now();
    }
    let ours = recorder.environment.clone();
    let given = std::mem::take(&mut request.environment);
    request.environment = RunEnvironment {
        image: given.image.or(ours.image),
        workspace_root: given.workspace_root.or(ours.workspace_root),
        uid: given.uid.or(ours.uid),
        home: given.home.or(ours.home),
    };
    let suffix = id.simple().to_string();
    let asked = request
        .name
        .get_or_insert_with(|| format!("{}-{}", run_id::to_label(&request.agent).chars().take(57).collect::<String>(), &suffix[27..]))
        .clone();
    recorder.state.lock().await.runs.insert(id, RunMemory::default());
    if let Some(snapshots) = &recorder.snapshots {
        snapshots.forget();
    }
    let named = recorder.uploader.name_of(id);
    recorder.spool(&Item::Run(request))?;
    let name = match tokio::time::timeout(NAME_PATIENCE, named).await {
        Ok(Some(name)) => name,
        _ => asked,
    };
    Ok((StatusCode::ACCEPTED, Json(RunCreated { id, name })))
}

async fn put_spans(
    State(recorder): State<Arc<Recorder>>,
    Path(run): Path<Uuid>,
    request: Result<Json<SpanBatch>, JsonRejection>,
) -> Answer<Ingested> {
    recorder.take(run, body(request)?.spans).await
}

async fn end_span(
    State(recorder): State<Arc<Recorder>>,
    Path((run, span)): Path<(Uuid, String)>,
    request: Result<Json<Closing>, JsonRejection>,
) -> Answer<Ingested> {
    recorder.take(run, vec![SpanUpload { id: span, opening: None, closing: Some(body(request)?) }]).await
}

async fn finish(
    State(recorder): State<Arc<Recorder>>,
    Path(run): Path<Uuid>,
    request: Result<Json<FinishRun>, JsonRejection>,
) -> Answer<Ingested> {
    let mut finish = body(request)?;
    if let (Some(decides), Some(memory)) = (&finish.decided_by, recorder.state.lock().await.runs.get(&run)) {
        memory.check_decides(decides).map_err(|why| Refused(StatusCode::BAD_REQUEST, "SpanNotFound", why))?;
    }
    if finish.ended <= 0 {
        finish.ended = now();
    }
    recorder.spool(&Item::Finish { run, finish })?;
    recorder.state.lock().await.runs.remove(&run);
    Ok((StatusCode::ACCEPTED, Json(Ingested { written: 1, rev: 0 })))
}
