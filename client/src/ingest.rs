//! What recorders and agents send.

use std::collections::BTreeMap;

use replayfork_core::Digest;
use replayfork_core::model::{Closing, Opening, RunEnvironment, SnapshotRef, Status};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// `POST /v1/runs`. Sent twice with the same id, the second one changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateRun {
    /// Default: a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<Uuid>,
    /// The name to ask for; where it is taken, a suffix is added. Default: the agent's name and five characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub agent: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// A session or conversation that groups runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub environment: RunEnvironment,
    /// Nanoseconds since the Unix epoch; 0: now.
    #[serde(default)]
    pub started: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunCreated {
    pub id: Uuid,
    /// The name that the run has, or asked for as long as the api-server has not been reached.
    pub name: String,
}

/// One span of a batch; its two parts may come together or apart, in any order, and each is written once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SpanUpload {
    pub id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opening: Option<Opening>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closing: Option<Closing>,
}

/// `POST /v1/runs/{run}/spans`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SpanBatch {
    pub spans: Vec<SpanUpload>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Ingested {
    /// Parts that were new.
    pub written: i64,
    /// The run's revision.
    pub rev: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Edge {
    Before,
    After,
}

impl Edge {
    pub fn code(self) -> &'static str {
        match self {
            Edge::Before => "b",
            Edge::After => "a",
        }
    }
}

/// A workspace state beside a span, or why there is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotUpload {
    pub span: String,
    pub edge: Edge,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotRef>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
}

/// `POST /v1/runs/{run}/snapshots`; 409 with the missing blobs where a tree is not complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotBatch {
    pub snapshots: Vec<SnapshotUpload>,
}

/// `POST /v1/runs/{run}/finish`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FinishRun {
    pub outcome: Status,
    /// Id or name of the span that decides the outcome.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided_by: Option<String>,
    /// Nanoseconds since the Unix epoch; 0: now.
    #[serde(default)]
    pub ended: i64,
}

/// `POST /v1/blobs/have`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HaveBlobs {
    pub digests: Vec<Digest>,
}

/// The asked-for blobs that have to be sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MissingBlobs {
    pub missing: Vec<Digest>,
}

/// Answer to `PUT /v1/packs`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PackStored {
    /// Blobs that were new in the namespace.
    pub stored: i64,
    pub known: i64,
}
