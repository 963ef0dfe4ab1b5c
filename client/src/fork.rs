//! Forks: what the operator registers, and what a sandbox does.

use std::collections::BTreeMap;

use replayfork_core::Digest;
use replayfork_core::fork::{DeletionPolicy, ForkSpec};
use replayfork_core::model::{Closing, Fidelity, Opening, RunEnvironment, SnapshotRef, Span, SpanKind, Status};
use replayfork_core::patch::Patch;
use replayfork_core::plan::{Plan, PlanCounts};
use replayfork_core::reason::Blocked;
use replayfork_core::source::{Changed, Facts};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// `PUT /api/v1/forks/{uid}`: idempotent; another spec under the same uid is 409.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RegisterFork {
    pub namespace: String,
    pub name: String,
    /// The custom resource's spec, verbatim.
    pub spec: serde_json::Value,
    /// A run that is not sealed is not waited for any longer: the fork ends as RunNotSealed.
    #[serde(default)]
    pub give_up: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ForkState {
    Registered,
    Claimed,
    Terminal,
}

/// How a fork ended. Only `Succeeded` means that the plan was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub enum CloseReason {
    Succeeded,
    /// Nothing could run.
    Blocked,
    RunNotFound,
    RunNotSealed,
    SpanNotFound,
    SpanAmbiguous,
    PatchRefused,
    SpecInvalid,
    Canceled,
    DeadlineExceeded,
    StartDeadlineExceeded,
    Interrupted,
    PlanMismatch,
    UndeclaredWrite,
    WorkspaceInconsistent,
    WorkspacePathUnsupported,
    WorkspaceFull,
    ImageNotUsable,
    ImagePullFailed,
    CreateFailed,
    PodSandboxFailed,
    NetworkNotIsolated,
    NetworkPolicyConflict,
    OOMKilled,
    SandboxFailed,
    Deleted,
}

impl CloseReason {
    /// How a fork ends whose plan was carried out to its end, and why.
    pub fn of_plan(plan: &Plan) -> (Self, &'static str) {
        match plan.counts.may_be_run() {
            0 if plan.is_empty() => (Self::Succeeded, "the patches change nothing that would have to run"),
            0 if plan.check => (Self::Blocked, "no step from the fork span on can be run again"),
            0 => (Self::Blocked, "every span that the patches reach is blocked"),
            _ => (Self::Succeeded, "every span of the plan was executed, reused, overridden or blocked as planned"),
        }
    }
}

impl std::fmt::Display for CloseReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

/// A blocked span, as the custom resource's status shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BlockedSpan {
    pub span: String,
    pub name: String,
    pub kind: SpanKind,
    pub blocked: Blocked,
}

/// What stands of a terminal fork for ever.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ForkResult {
    pub reason: CloseReason,
    pub message: String,
    /// Status of the deciding span in the fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<Status>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_outcome: Option<Status>,
    pub reexecuted: i64,
    pub reused: i64,
    pub overridden: i64,
    pub blocked: i64,
    /// At most 20.
    #[serde(default)]
    pub blocked_spans: Vec<BlockedSpan>,
    /// Of a fork without patches.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reproducibility: Option<Reproducibility>,
    /// What a reader should know, at most 20.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// What a check of a run found: how many of its steps gave what they gave when recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reproducibility {
    pub identical: i64,
    pub differs: i64,
    pub not_executable: i64,
}

impl ForkResult {
    /// A result with nothing counted yet.
    pub fn new(reason: CloseReason, message: impl Into<String>) -> Self {
        Self {
            reason,
            message: message.into(),
            outcome: None,
            source_outcome: None,
            reexecuted: 0,
            reused: 0,
            overridden: 0,
            blocked: 0,
            blocked_spans: vec![],
            reproducibility: None,
            warnings: vec![],
        }
    }
}

/// A fork's row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Fork {
    pub uid: Uuid,
    pub namespace: String,
    pub name: String,
    pub state: ForkState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_run: Option<Uuid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_run_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork_run: Option<Uuid>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork_run_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanOverview>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// RFC 3339.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cancel_requested_at: Option<String>,
    pub deletion_policy: DeletionPolicy,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<ForkResult>,
    /// RFC 3339.
    pub registered_at: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed_at: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal_at: Option<String>,
}

/// What the operator needs of a plan: numbers, the first blocked spans, and what to build the pod from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanOverview {
    pub digest: Digest,
    pub counts: PlanCounts,
    /// Whether a pod is needed, as [`Plan::sandbox`] says.
    pub sandbox: bool,
    /// At most 20.
    pub blocked_spans: Vec<BlockedSpan>,
    /// Resolved: image, uid, workspace root and HOME that the sandbox gets.
    pub environment: RunEnvironment,
}

/// `PUT /api/v1/forks/{uid}/pod`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NamePod {
    pub pod_uid: String,
}

/// `POST /api/v1/forks/{uid}/close` and `POST /sandbox/v1/forks/{uid}/close`: the first one stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CloseFork {
    pub reason: CloseReason,
    pub message: String,
    /// Id of the first span that was not decided about. Default: the one after the last of which anything was reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unreached_from: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reproducibility: Option<Reproducibility>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl CloseFork {
    pub fn new(reason: CloseReason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), unreached_from: None, reproducibility: None, warnings: Vec::new() }
    }
}

/// `POST /sandbox/v1/forks/{uid}/claim`: the same number gets the same answer, any other 409 for ever.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClaimFork {
    /// 32 random bytes in hex.
    pub nonce: String,
}

/// `GET /sandbox/v1/forks/{uid}/bundle`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Bundle {
    pub spec: ForkSpec,
    pub plan_digest: Digest,
    /// As recorded.
    pub recorded: RunEnvironment,
    /// As the sandbox has it.
    pub sandbox: RunEnvironment,
    pub spans: Vec<Span>,
    pub changed: BTreeMap<String, Changed>,
    pub facts: Facts,
    /// Patches of the forks that the source comes from.
    pub inherited: Vec<Patch>,
    /// Uploaded contents that the spec and inherited patches name; `GET …/contents/{digest}` has them.
    pub contents: Vec<Digest>,
    /// Seconds of execution.
    pub deadline_seconds: i64,
}

/// `POST /sandbox/v1/forks/{uid}/spans/{span}/begin`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BeginSpan {
    /// The opening as it is executed: patched and rendered.
    pub opening: Opening,
    pub input_digest: Digest,
}

/// `POST /sandbox/v1/forks/{uid}/spans/{span}/end`: the result of a step that was begun, or of one that needs no execution.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EndSpan {
    pub fidelity: Fidelity,
    pub opening: Opening,
    pub closing: Closing,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_before: Option<SnapshotRef>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_after: Option<SnapshotRef>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_digest: Option<Digest>,
    /// Under which other forks may use the result. Only of steps that were executed and ended by themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_key: Option<Digest>,
    /// Spans below this one, which have no result of their own any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
}

impl EndSpan {
    /// A result without an execution, and without a workspace.
    pub fn new(fidelity: Fidelity, opening: Opening, mut closing: Closing) -> Self {
        // What is given takes no time, whoever looks at the clock first.
        closing.ended = closing.ended.max(opening.started);
        Self {
            fidelity,
            opening,
            closing,
            snapshot_before: None,
            snapshot_after: None,
            input_digest: None,
            cache_key: None,
            left_out: Vec::new(),
        }
    }

    /// No result: the step was not reached, or is part of one that has another result now.
    pub fn skipped(span: &Span, now: i64) -> Self {
        let opening = Opening { started: now, ..span.opening.clone() };
        Self::new(Fidelity::Skipped, opening, Closing::new(now, Status::Skipped, None))
    }

    /// What a check can't run stays as recorded, with why.
    pub fn not_executable(span: &Span, blocked: Vec<Blocked>) -> Self {
        let recorded = span.closing.clone().unwrap_or_else(|| Closing::new(span.opening.started, span.status(), None));
        let end = Self::new(Fidelity::Recorded, span.opening.clone(), Closing { blocked, ..recorded });
        Self { snapshot_before: span.snapshot_before, snapshot_after: span.snapshot_after, ..end }
    }
}

/// `GET /sandbox/v1/forks/{uid}/results/{key}`: a result that another fork left, which this fork then depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CachedResult {
    pub closing: Closing,
    /// The workspace around it there; what differs between them is what it changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_before: Option<SnapshotRef>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_after: Option<SnapshotRef>,
    /// Run and span that it was executed in.
    pub run: Uuid,
    pub span: String,
}

/// `POST /sandbox/v1/forks/{uid}/spans/{span}/model`: the api-server asks the endpoint that the fork's spec names, once per step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AskModel {
    /// A chat completion's body.
    pub request: serde_json::Value,
}

/// What the endpoint answered, or why there is no answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelAnswered {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response: Option<serde_json::Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// `POST /sandbox/v1/forks/{uid}/snapshots`: workspace states around spans that are reused, where they differ from the recorded ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReusedSnapshots {
    pub span: String,
    pub snapshot_before: SnapshotRef,
    pub snapshot_after: SnapshotRef,
}

/// Answer to `GET /sandbox/v1/forks/{uid}/wait`, which returns when it is asked to stop, or after at most 20 s.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Wait {
    pub cancel: bool,
    pub terminal: bool,
}
