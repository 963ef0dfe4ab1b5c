//! Why a span is affected, and why it cannot run.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why the planner or a replay says that a span's inputs differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub enum Cause {
    PatchedInput,
    UpstreamOutputChanged,
    WorkspaceChanged,
    DependencyUnknown,
    MissingReusableResult,
    PolicyForcedRerun,
}

/// Why an affected span can't run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub enum BlockedReason {
    UpstreamBlocked,
    UpstreamEnded,
    BindingFailed,
    VerdictDenied,
    ApprovalNeeded,
    RedactedInput,
    HumanInputNeeded,
    ModelBlocked,
    NoRecordedResponse,
    NoExecutor,
    RecordOnly,
    IncompleteContract,
    SnapshotMissing,
    NetworkNeeded,
}

impl BlockedReason {
    pub fn as_str(self) -> &'static str {
        use BlockedReason::*;
        match self {
            UpstreamBlocked => "UpstreamBlocked",
            UpstreamEnded => "UpstreamEnded",
            BindingFailed => "BindingFailed",
            VerdictDenied => "VerdictDenied",
            ApprovalNeeded => "ApprovalNeeded",
            RedactedInput => "RedactedInput",
            HumanInputNeeded => "HumanInputNeeded",
            ModelBlocked => "ModelBlocked",
            NoRecordedResponse => "NoRecordedResponse",
            NoExecutor => "NoExecutor",
            RecordOnly => "RecordOnly",
            IncompleteContract => "IncompleteContract",
            SnapshotMissing => "SnapshotMissing",
            NetworkNeeded => "NetworkNeeded",
        }
    }
}

impl std::fmt::Display for BlockedReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A reason with what it is about, in words that a user can act on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Blocked {
    pub reason: BlockedReason,
    /// The span that it comes from, when it is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    pub message: String,
}

impl Blocked {
    pub fn new(reason: BlockedReason, message: impl Into<String>) -> Self {
        Self { reason, upstream: None, message: message.into() }
    }

    pub fn upstream(reason: BlockedReason, span: &str, message: impl Into<String>) -> Self {
        Self { reason, upstream: Some(span.to_owned()), message: message.into() }
    }
}
