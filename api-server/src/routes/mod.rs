//! HTTP: who may ask, what is in the request, which store function answers.

mod fork;
mod ingest;
mod read;
mod sandbox;
mod system;

use std::time::Instant;

use axum::extract::{DefaultBodyLimit, MatchedPath, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tower_http::compression::CompressionLayer;
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::services::{ServeDir, ServeFile};
use utoipa::OpenApi;

use crate::metrics::{ReasonLabel, RequestLabels};
use crate::problem::ApiError;
use crate::state::App;

pub use system::document;

/// All routes of port 3210.
pub fn router(app: App) -> axum::Router {
    let mut router = axum::Router::new()
        .merge(ingest::router())
        .merge(read::router())
        .merge(fork::router())
        .merge(sandbox::router())
        .merge(system::router());
    if let Some(folder) = &app.config.viewer_dir {
        let page = ServeFile::new(folder.join("index.html"));
        router = router
            .nest_service("/replay", ServeDir::new(folder).fallback(page))
            .route("/", get(|| async { axum::response::Redirect::to("/replay/") }));
    }
    router
        .fallback(|| async { ApiError::not_found("RouteNotFound", "there is no such address; /openapi.json lists them") })
        .layer(DefaultBodyLimit::max(app.config.max_request_bytes))
        .layer(middleware::from_fn_with_state(app.clone(), measure))
        .layer(RequestDecompressionLayer::new())
        .layer(CompressionLayer::new())
        .with_state(app)
}

/// The probe port: nothing but 204.
pub fn probe() -> axum::Router {
    axum::Router::new().fallback(|| async { StatusCode::NO_CONTENT })
}

async fn measure(State(app): State<App>, path: Option<MatchedPath>, request: Request, next: Next) -> Response {
    let route = path.map_or_else(|| "other".to_owned(), |p| p.as_str().to_owned());
    let method = request.method().to_string();
    let ingest = route.starts_with("/v1/");
    let start = Instant::now();
    let mut response = next.run(request).await;
    app.metrics.seconds.observe(start.elapsed().as_secs_f64());
    // Whoever knows a closer limit has said so already.
    let said = response.headers().get(header::CONTENT_TYPE).is_some_and(|t| t.as_bytes().ends_with(b"json"));
    if response.status() == StatusCode::PAYLOAD_TOO_LARGE && !said {
        let limit = app.config.max_request_bytes;
        let detail = format!("the request is larger than {limit} bytes; send less at once, or raise REPLAYFORK_MAX_REQUEST_BYTES");
        response = ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "TooLarge", detail).into_response();
    } else if response.status().is_client_error() && !said {
        response = as_problem(response).await;
    }
    let status = response.status().as_u16();
    if ingest && status >= 400 {
        app.metrics.rejected.get_or_create(&ReasonLabel { reason: status.to_string() }).inc();
    }
    app.metrics.requests.get_or_create(&RequestLabels { route, method, status }).inc();
    response
}

/// What the framework refuses by itself (a parameter, an encoding, a method), in the form of all other errors.
async fn as_problem(response: Response) -> Response {
    let (parts, body) = response.into_parts();
    let text = axum::body::to_bytes(body, 4096).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&text).into_owned();
    let (reason, detail) = match parts.status {
        StatusCode::METHOD_NOT_ALLOWED => ("MethodNotAllowed", "this address has other methods; the header Allow lists them".to_owned()),
        _ => ("RequestInvalid", text),
    };
    let mut problem = ApiError::new(parts.status, reason, detail).into_response();
    problem.headers_mut().extend(parts.headers.get(header::ALLOW).map(|allow| (header::ALLOW, allow.clone())));
    problem
}

/// A JSON body; what can't be read is refused with the place.
pub struct Body<T>(pub T);

impl<T: serde::de::DeserializeOwned> axum::extract::FromRequest<App> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &App) -> Result<Self, ApiError> {
        let limit = app.config.max_request_bytes;
        let bytes = bytes::Bytes::from_request(request, app).await.map_err(|rejection| {
            if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE {
                ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "TooLarge", format!("the request is larger than {limit} bytes"))
            } else {
                ApiError::bad_request("BodyUnreadable", rejection.to_string())
            }
        })?;
        serde_json::from_slice(&bytes).map(Body).map_err(|e| ApiError::bad_request("BodyInvalid", format!("the body can't be read: {e}")))
    }
}

#[derive(OpenApi)]
#[openapi(
    info(title = "ReplayFork api-server", description = "Recorded agent runs, their forks, and the difference."),
    paths(
        ingest::create_run,
        ingest::put_spans,
        ingest::end_span,
        ingest::put_snapshots,
        ingest::finish,
        ingest::goodbye,
        ingest::have,
        ingest::put_pack,
        read::list_runs,
        read::get_run,
        read::list_spans,
        read::get_span,
        read::list_forks,
        read::tree,
        read::file,
        read::diff,
        read::forensics,
        read::plan,
        read::upload,
        read::delete_run,
        fork::register,
        fork::list,
        fork::get,
        fork::name_pod,
        fork::cancel,
        fork::close,
        fork::resource_gone,
        sandbox::claim,
        sandbox::bundle,
        sandbox::snapshot,
        sandbox::have,
        sandbox::put_pack,
        sandbox::begin,
        sandbox::end,
        sandbox::ask_model,
        sandbox::content,
        sandbox::cached,
        sandbox::reused,
        sandbox::wait,
        sandbox::close,
    ),
    components(schemas(replayfork_client::Problem))
)]
struct ApiDoc;
