//! Errors as RFC 9457 problems.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use replayfork_client::{BLOBS_MISSING, Problem};
use replayfork_core::Digest;

/// An error that a client sees: what was wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{detail}")]
pub struct ApiError {
    pub status: StatusCode,
    pub reason: &'static str,
    pub detail: String,
    pub missing: Vec<Digest>,
}

pub type ApiResult<T> = Result<T, ApiError>;

impl ApiError {
    pub fn new(status: StatusCode, reason: &'static str, detail: impl Into<String>) -> Self {
        Self { status, reason, detail: detail.into(), missing: Vec::new() }
    }

    pub fn bad_request(reason: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, reason, detail)
    }

    pub fn not_found(reason: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, reason, detail)
    }

    pub fn conflict(reason: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, reason, detail)
    }

    pub fn forbidden(reason: &'static str, detail: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, reason, detail)
    }

    pub fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "Unavailable", detail)
    }

    pub fn internal(cause: &dyn std::fmt::Display) -> Self {
        tracing::error!(%cause, "internal error");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "Internal", "the api-server failed; its log has the cause")
    }

    /// Blobs that must be sent before this can be accepted.
    pub fn missing(mut missing: Vec<Digest>) -> Self {
        missing.sort_unstable();
        missing.dedup();
        let detail = format!("{} blobs are not in the store, the first one {}; send them and try again", missing.len(), missing[0]);
        Self { status: StatusCode::CONFLICT, reason: BLOBS_MISSING, detail, missing }
    }
}

impl From<replayfork_client::check::Invalid> for ApiError {
    fn from(invalid: replayfork_client::check::Invalid) -> Self {
        Self::bad_request(invalid.reason, invalid.detail)
    }
}

impl From<tokio_postgres::Error> for ApiError {
    fn from(error: tokio_postgres::Error) -> Self {
        use tokio_postgres::error::SqlState;
        match error.code() {
            Some(code) if code.code() == "RF001" => Self::conflict("ForkTerminal", "the fork has ended; its result stands"),
            Some(code) if code.code() == "RF002" => Self::conflict("ForkClaimed", "the fork is claimed by another pod"),
            Some(&SqlState::DISK_FULL | &SqlState::OUT_OF_MEMORY | &SqlState::TOO_MANY_CONNECTIONS) => {
                Self::unavailable(format!("the database has no room: {error}"))
            }
            Some(
                &SqlState::T_R_SERIALIZATION_FAILURE
                | &SqlState::T_R_DEADLOCK_DETECTED
                | &SqlState::ADMIN_SHUTDOWN
                | &SqlState::CANNOT_CONNECT_NOW,
            ) => Self::unavailable("the database was busy or restarting; try again"),
            Some(&SqlState::CHARACTER_NOT_IN_REPERTOIRE | &SqlState::UNTRANSLATABLE_CHARACTER) => {
                Self::bad_request("NulCharacter", "the request holds a NUL character, which no name or value may have; remove it")
            }
            None if std::error::Error::source(&error).is_some_and(|cause| !error.is_closed() && !cause.is::<std::io::Error>()) => {
                // A parameter or a row that does not fit: a fault of ours, not the database's.
                Self::internal(&format!("{error}: {:?}", std::error::Error::source(&error)))
            }
            None => {
                tracing::warn!(cause = %error, "the database went away");
                Self::unavailable("the database can't be reached; try again")
            }
            Some(_) => Self::internal(&format!("{error}: {:?}", error.as_db_error().map(tokio_postgres::error::DbError::message))),
        }
    }
}

impl From<deadpool_postgres::PoolError> for ApiError {
    fn from(error: deadpool_postgres::PoolError) -> Self {
        tracing::warn!(cause = %error, "no database connection");
        Self::unavailable("the database can't be reached; try again")
    }
}

impl From<replayfork_snapshot::SnapshotError> for ApiError {
    fn from(error: replayfork_snapshot::SnapshotError) -> Self {
        use replayfork_snapshot::SnapshotError;
        match error {
            SnapshotError::Hostile(_) | SnapshotError::Corrupt(_) => Self::bad_request("PackRefused", error.to_string()),
            SnapshotError::Missing(digest) => Self::missing(vec![digest]),
            other => Self::internal(&other),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let problem = Problem {
            r#type: format!("about:blank#{}", self.reason),
            title: self.status.canonical_reason().unwrap_or("error").to_owned(),
            status: self.status.as_u16(),
            detail: self.detail,
            reason: self.reason.to_owned(),
            missing: self.missing,
        };
        let mut response = (self.status, Json(problem)).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if self.status == StatusCode::SERVICE_UNAVAILABLE || self.status.as_u16() == 425 {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
