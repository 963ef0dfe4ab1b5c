//! Wire types of the api-server, and the HTTP client that operator, courier and recorder share.
//!
//! What a type means is said in `replayfork-core`; here is only what is refused of a recording.

pub mod check;
pub mod fork;
mod http;
pub mod ingest;
mod packs;
pub mod read;
pub mod run_id;

pub use bytes::Bytes;
pub use http::{ApiClient, BLOBS_MISSING, ClientError, Reach, Token};
pub use packs::{Pack, PackRoutes};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Audience of tokens that people, agents and the operator show the api-server.
pub const API_AUDIENCE: &str = "replayfork-api";
/// Header for a token where a proxy on the way drops `Authorization`.
pub const TOKEN_HEADER: &str = "x-replayfork-token";
/// API group of the virtual resources `runs`, `runs/export` and `forks` that access reviews ask about.
pub const ACCESS_GROUP: &str = "runs.replayfork.dev";

/// Audience of the token that a fork's courier shows.
pub fn fork_audience(uid: &uuid::Uuid) -> String {
    format!("replayfork/{uid}")
}

/// An error answer (RFC 9457, `application/problem+json`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// A URI reference that names the kind of problem: `about:blank#REASON`.
    pub r#type: String,
    pub title: String,
    pub status: u16,
    /// What was wrong, where, and what to do.
    pub detail: String,
    /// A word for programs, e.g. `RunNotFound`.
    pub reason: String,
    /// Digests of blobs that must be sent first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<replayfork_core::Digest>,
}
