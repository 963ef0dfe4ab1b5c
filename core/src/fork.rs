//! What a user asks for: the part of a `ReplayFork` that planning and replaying need.
//!
//! The names are those of the custom resource (camelCase), so its spec can be handed on verbatim.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::patch::{ContentFrom, Patch, Refused};

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
    /// The record: by the request's digest from the run, then from the fixtures.
    Recorded,
    /// A command in the sandbox: the request as JSON on its standard input, the response as JSON on its standard output.
    Command,
    /// An OpenAI-compatible service that the installation names; the api-server makes the call.
    Endpoint,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    #[serde(default)]
    pub mode: ModelMode,
    /// Endpoint: its name in the installation's configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub endpoint: Option<String>,
    /// Command: what answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<ModelCommand>,
    /// Recorded: answers beyond the run's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixtures: Option<Fixtures>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelCommand {
    #[schemars(length(min = 1, max = 128), inner(length(max = 8192)))]
    pub argv: Vec<String>,
    /// Seconds for one answer. Default: 60.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 3600))]
    pub timeout_seconds: Option<i64>,
}

/// Either `inline` or `contentFrom`, a JSON list of the same.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Fixtures {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub inline: Option<Vec<Fixture>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_from: Option<ContentFrom>,
}

/// The answer to one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Fixture {
    /// As a blocked call's message names it; or give the request itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-f]{64}$"))]
    pub request_digest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_json")]
    pub request: Option<Value>,
    /// The text, or a chat completion.
    #[schemars(schema_with = "any_json")]
    pub response: Value,
}

fn any_json(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"x-kubernetes-preserve-unknown-fields": true})
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Reuse {
    /// Whether a span whose inputs turn out as recorded is not executed.
    #[serde(default = "yes")]
    pub early_cutoff: bool,
    /// Whether results of other forks of the namespace may stand for an execution, where the span's policy is Cacheable or Pure.
    #[serde(default = "yes")]
    pub result_cache: bool,
}

impl Default for Reuse {
    fn default() -> Self {
        Self { early_cutoff: true, result_cache: true }
    }
}

fn yes() -> bool {
    true
}

/// Consent to run a step that a gate let through with other arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Approval {
    /// The span's id, or a name that is unique in the run.
    #[schemars(length(min = 1, max = 253))]
    pub span: String,
    /// Of the arguments that are approved, as the plan or the blocked span's message names it.
    #[schemars(regex(pattern = "^[0-9a-f]{64}$"))]
    pub input_digest: String,
}

/// What the planner must know of the sandbox; the operator reads more of the same object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
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
    /// Whether it opens any of the network is all that planning looks at.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub egress: Vec<Value>,
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
    /// None: the fork checks whether the run can be reproduced.
    #[serde(default)]
    pub patches: Vec<Patch>,
    #[serde(default)]
    pub model: ModelSpec,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub approvals: Vec<Approval>,
    #[serde(default)]
    pub reuse: Reuse,
    #[serde(default)]
    pub sandbox: SandboxChoice,
    #[serde(default)]
    pub deletion_policy: DeletionPolicy,
}

impl ForkSpec {
    /// Uploaded contents that it names.
    pub fn contents(&self) -> impl Iterator<Item = &ContentFrom> {
        let fixtures = self.model.fixtures.iter().filter_map(|f| f.content_from.as_ref());
        self.patches.iter().flat_map(Patch::contents).chain(fixtures)
    }

    /// Whether the members of `model` are those that its mode takes; the same rule stands in the CRD.
    ///
    /// # Errors
    /// The first member that is missing or has no place.
    pub fn check(&self) -> Result<(), Refused> {
        let ModelSpec { mode, endpoint, command, fixtures } = &self.model;
        let members = [
            ("endpoint", endpoint.is_some(), ModelMode::Endpoint, true),
            ("command", command.is_some(), ModelMode::Command, true),
            ("fixtures", fixtures.is_some(), ModelMode::Recorded, false),
        ];
        for (name, given, of, needed) in members {
            let message = match (given, *mode == of) {
                (true, false) => format!("`{name}` belongs to mode {of:?}, and the mode is {mode:?}; remove it, or set the mode"),
                (false, true) if needed => format!("mode {mode:?} needs `{name}`"),
                _ => continue,
            };
            return Err(Refused::SpecInvalid { field: "spec.model".into(), message });
        }
        for (n, patch) in self.patches.iter().enumerate() {
            for (name, value) in patch.model_config.iter().flat_map(|config| &config.parameters) {
                shallow(&format!("spec.patches[{n}].modelConfig.parameters.{name}"), value)?;
            }
            for (i, document) in patch.retrieval.iter().flat_map(|r| r.documents.iter().flatten()).enumerate() {
                shallow(&format!("spec.patches[{n}].retrieval.documents[{i}]"), document)?;
            }
        }
        for (n, fixture) in fixtures.iter().flat_map(|f| f.inline.iter().flatten()).enumerate() {
            let of = |member: &str| format!("spec.model.fixtures.inline[{n}].{member}");
            fixture.request.iter().try_for_each(|request| shallow(&of("request"), request))?;
            shallow(&of("response"), &fixture.response)?;
        }
        Ok(())
    }
}

/// Levels that a value in a spec may be nested. What reads specs gives up somewhere; this is well before.
const MAX_NESTING: usize = 64;

fn shallow(field: &str, value: &Value) -> Result<(), Refused> {
    fn depth(value: &Value) -> usize {
        match value {
            Value::Array(items) => 1 + items.iter().map(depth).max().unwrap_or(0),
            Value::Object(members) => 1 + members.values().map(depth).max().unwrap_or(0),
            _ => 0,
        }
    }
    if depth(value) <= MAX_NESTING {
        return Ok(());
    }
    let message = format!("it is nested deeper than {MAX_NESTING} levels; make it flatter");
    Err(Refused::SpecInvalid { field: field.to_owned(), message })
}
