//! What a user asks for: the part of a `ReplayFork` that planning and replaying need.
//!
//! The names are those of the custom resource (camelCase), so its spec can be handed on verbatim.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::patch::Patch;

/// Which run, from which span on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ForkSource {
    /// The run's name, unique in its namespace, or its id.
    #[schemars(length(min = 1, max = 253))]
    pub run: String,
    /// The span's id, or a name that is unique in the run.
    #[schemars(length(min = 1, max = 253))]
    pub span: String,
}

/// Who answers model calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
pub enum ModelMode {
    /// Nobody: an affected model call is blocked.
    #[default]
    Blocked,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    #[serde(default)]
    pub mode: ModelMode,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reuse {
    /// Whether a span whose inputs turn out as recorded is not executed.
    #[serde(default = "yes")]
    pub early_cutoff: bool,
}

impl Default for Reuse {
    fn default() -> Self {
        Self { early_cutoff: true }
    }
}

fn yes() -> bool {
    true
}

/// What the planner must know of the sandbox; the operator reads more of the same object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxChoice {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run_as_user: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_seconds: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_deadline_seconds: Option<i64>,
}

/// What becomes of the forked run when the custom resource is deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
pub enum DeletionPolicy {
    #[default]
    Retain,
    DeleteRun,
}

/// The spec of a fork as the api-server reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ForkSpec {
    pub source: ForkSource,
    #[serde(default)]
    pub patches: Vec<Patch>,
    #[serde(default)]
    pub model: ModelSpec,
    #[serde(default)]
    pub reuse: Reuse,
    #[serde(default)]
    pub sandbox: SandboxChoice,
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}
