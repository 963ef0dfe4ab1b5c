//! Health, metrics and the OpenAPI document.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use utoipa::OpenApi;

use crate::db::Connection;
use crate::problem::ApiResult;
use crate::state::App;

pub fn router() -> axum::Router<App> {
    axum::Router::new()
        .route("/healthz", get(|| async { StatusCode::NO_CONTENT }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(|| async { Json(document()) }))
}

/// The OpenAPI 3.1 document.
pub fn document() -> utoipa::openapi::OpenApi {
    super::ApiDoc::openapi()
}

async fn ready(State(app): State<App>) -> ApiResult<StatusCode> {
    app.db().await?.fetch_one("SELECT 1", &[]).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn metrics(State(app): State<App>) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], app.metrics.encode())
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_committed_document_is_what_the_routes_say() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../web/openapi.json");
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        let now = super::document().to_pretty_json().expect("the document is JSON");
        // Not both texts: they are long.
        let differs = committed.trim().lines().zip(now.trim().lines()).find(|(a, b)| a != b);
        assert!(committed.trim() == now.trim(), "{} is not up to date ({differs:?}): run `make generate`", path.display());
    }
}
