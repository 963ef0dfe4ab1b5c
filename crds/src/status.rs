//! The status, and its conditions.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The condition types, in the order in which they are shown. `Stalled` is there only when it is true.
pub const CONDITION_TYPES: [&str; 6] = ["Planned", "SandboxReady", "Finished", "Succeeded", "Ready", "Stalled"];

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplayForkStatus {
    /// The generation that the conditions are about.
    #[serde(default = "unobserved")]
    pub observed_generation: i64,
    #[serde(default)]
    #[schemars(schema_with = "conditions")]
    pub conditions: Vec<Condition>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanStatus>,
    /// At most 20.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 20))]
    pub blocked_spans: Vec<BlockedSpanStatus>,
    /// There are more blocked spans than are shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked_truncated: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<ResultStatus>,
    /// Pinned when the fork was planned.
    #[serde(default, rename = "sourceRunID", skip_serializing_if = "Option::is_none")]
    pub source_run_id: Option<String>,
    #[serde(default, rename = "forkRunID", skip_serializing_if = "Option::is_none")]
    pub fork_run_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fork_run_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time")]
    pub start_time: Option<Time>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "time")]
    pub completion_time: Option<Time>,
    #[serde(default, rename = "viewerURL", skip_serializing_if = "Option::is_none")]
    pub viewer_url: Option<String>,
}

impl Default for ReplayForkStatus {
    fn default() -> Self {
        Self {
            observed_generation: unobserved(),
            conditions: Vec::new(),
            plan: None,
            blocked_spans: Vec::new(),
            blocked_truncated: None,
            result: None,
            source_run_id: None,
            fork_run_id: None,
            fork_run_name: None,
            job_name: None,
            start_time: None,
            completion_time: None,
            viewer_url: None,
        }
    }
}

fn unobserved() -> i64 {
    -1
}

fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "date-time"})
}

/// As the API conventions have it: one entry per type.
fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {"type": "string", "maxLength": 316},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
                "message": {"type": "string", "maxLength": 32768},
            },
        },
    })
}

/// How many spans the plan gives which mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlanStatus {
    pub will_run: i64,
    pub may_run: i64,
    pub may_run_or_block: i64,
    pub will_block: i64,
    pub may_block: i64,
    pub overridden: i64,
    pub reusable: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BlockedSpanStatus {
    pub span: String,
    pub name: String,
    pub reason: String,
    pub message: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResultStatus {
    /// Status of the deciding span in the fork.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_outcome: Option<String>,
    pub reexecuted: i64,
    pub reused: i64,
    pub overridden: i64,
    pub blocked: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_divergent_span: Option<String>,
    /// The difference in a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_delta: Option<i64>,
}

/// The condition of a type.
pub fn condition<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|c| c.type_ == kind)
}

/// Whether two lists differ in anything but their transition times.
pub fn conditions_differ(a: &[Condition], b: &[Condition]) -> bool {
    let bare = |c: &Condition| (c.type_.clone(), c.status.clone(), c.reason.clone(), c.message.clone(), c.observed_generation);
    a.iter().map(bare).ne(b.iter().map(bare))
}
