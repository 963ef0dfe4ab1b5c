//! What is read about runs.

use std::collections::BTreeMap;

use replayfork_core::Digest;
use replayfork_core::diff::Diff;
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::{Fidelity, RunEnvironment, SnapshotRef, Span, SpanKind, Status, Verdict};
use replayfork_core::plan::Plan;
use replayfork_core::reason::Blocked;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use crate::fork::{CloseReason, Reproducibility};

/// Where a run comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunKind {
    Recorded,
    Imported,
    Fork,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    Open,
    Finished,
    Sealed,
    Deleted,
}

/// Whose fork a run is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ForkedFrom {
    pub run: Uuid,
    pub run_name: String,
    /// Id and name of the fork span, and its step in the source.
    pub span: String,
    pub span_name: String,
    pub step: i64,
    /// uid and name of the custom resource.
    pub fork: Uuid,
    pub fork_name: String,
}

/// How a fork ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ForkEnd {
    pub reason: CloseReason,
    pub message: String,
    /// Of a fork without patches: what its check found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reproducibility: Option<Reproducibility>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Run {
    pub id: Uuid,
    pub namespace: String,
    pub name: String,
    pub kind: RunKind,
    pub state: RunState,
    pub agent: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub environment: RunEnvironment,
    /// What `finish` said; for a fork the status of the deciding span.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Status>,
    /// Id of the span that decides the outcome.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided_by: Option<String>,
    /// Nanoseconds since the Unix epoch.
    pub started: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<i64>,
    pub spans: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
    pub rev: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forked_from: Option<ForkedFrom>,
    /// Of a fork that has ended. Only one that Succeeded has carried out its plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork_end: Option<ForkEnd>,
    /// How many forks name this run as their source.
    pub forks: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunPage {
    pub runs: Vec<Run>,
    /// Give it as `before` to get the next page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct RunQuery {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Part of a name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<RunState>,
    /// 1 to 500, default 50.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
}

/// One line about a span: all that lists and timelines need, without payloads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SpanSummary {
    pub id: String,
    pub ord: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    pub name: String,
    pub kind: SpanKind,
    pub status: Status,
    pub verdict: Verdict,
    pub fidelity: Fidelity,
    /// Nanoseconds since the Unix epoch.
    pub started: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
    /// Whether a workspace state was recorded before and after.
    pub snapshot_before: bool,
    pub snapshot_after: bool,
    /// The first reason of a blocked span.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked: Option<Blocked>,
    /// In a check of a run: whether the step gave what it gave when recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reproduced: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SpanPage {
    pub spans: Vec<SpanSummary>,
    /// Step of the first span of this page, counted from 1.
    pub first_step: i64,
    /// Give it as `after` to get the next page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct SpanQuery {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// 1 to 5000, default 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SpanDetail {
    pub run: Uuid,
    /// The run whose record this is: the source's for a span that a fork reuses.
    pub recorded_in: Uuid,
    pub span: Span,
    /// Why a workspace state is missing, where it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots_missing: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TreeEntryKind {
    File,
    Executable,
    Symlink,
    Directory,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TreeEntry {
    pub name: String,
    pub kind: TreeEntryKind,
    /// Bytes of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Nanoseconds since the Unix epoch.
    pub mtime: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TreeListing {
    pub snapshot: SnapshotRef,
    pub path: String,
    pub entries: Vec<TreeEntry>,
}

/// A side of a diff.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunDiff {
    pub a: Run,
    pub b: Run,
    /// The difference in a sentence.
    pub summary: String,
    /// Whether the two ended in another way.
    pub outcome_changed: bool,
    /// How many spans of `b` ran again, were reused, overridden, blocked.
    pub reexecuted: i64,
    pub reused: i64,
    pub overridden: i64,
    pub blocked: i64,
    /// What was not compared, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    pub diff: Diff,
}

/// `POST /api/v1/plans`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanRequest {
    pub namespace: String,
    pub spec: ForkSpec,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanAnswer {
    pub run: Uuid,
    pub run_name: String,
    pub plan: Plan,
}

/// Answer to `POST /api/v1/uploads`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Uploaded {
    /// What a patch names as `contentFrom.digest`.
    pub digest: Digest,
    pub size: i64,
}
