//! The spec.

use k8s_openapi::api::core::v1::Toleration;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::CustomResource;
use replayfork_core::fork::{Approval, DeletionPolicy, ForkSource, ModelSpec, Reuse};
use replayfork_core::patch::Patch;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

use crate::status::ReplayForkStatus;

/// An image reference, as distribution/reference has it: host and port, path, tag, digest.
const IMAGE: &str = r"^((\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+)(:[0-9]+)?/)?[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[A-Za-z][A-Za-z0-9]*([+._-][A-Za-z][A-Za-z0-9]*)*:[0-9A-Fa-f]{32,})?$";
/// A quantity that is not negative, as apimachinery reads it.
const QUANTITY: &str = r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$";

/// A fork of a recorded run: this run, from this span on, with these patches.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "replayfork.dev",
    version = "v1alpha1",
    kind = "ReplayFork",
    namespaced,
    derive = "PartialEq",
    status = "ReplayForkStatus",
    shortname = "rfork",
    category = "replay",
    printcolumn(name = "Run", type_ = "string", json_path = ".spec.source.run"),
    printcolumn(name = "Span", type_ = "string", json_path = ".spec.source.span"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason"),
    printcolumn(name = "Will run", type_ = "integer", json_path = ".status.plan.willRun"),
    printcolumn(name = "Outcome", type_ = "string", json_path = ".status.result.outcome"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Fork run", type_ = "string", json_path = ".status.forkRunName", priority = 1),
    printcolumn(name = "Job", type_ = "string", json_path = ".status.jobName", priority = 1),
    validation = Rule::new("self.spec.source == oldSelf.spec.source").message("spec.source can't be changed; create a new ReplayFork"),
    validation = Rule::new("has(self.spec.patches) == has(oldSelf.spec.patches) && (!has(self.spec.patches) || self.spec.patches == oldSelf.spec.patches)").message("spec.patches can't be changed; create a new ReplayFork"),
    validation = Rule::new("has(self.spec.model) == has(oldSelf.spec.model) && (!has(self.spec.model) || self.spec.model == oldSelf.spec.model)").message("spec.model can't be changed; create a new ReplayFork"),
    validation = Rule::new("has(self.spec.reuse) == has(oldSelf.spec.reuse) && (!has(self.spec.reuse) || self.spec.reuse == oldSelf.spec.reuse)").message("spec.reuse can't be changed; create a new ReplayFork"),
    validation = Rule::new("has(self.spec.approvals) == has(oldSelf.spec.approvals) && (!has(self.spec.approvals) || self.spec.approvals == oldSelf.spec.approvals)").message("spec.approvals can't be changed; create a new ReplayFork"),
    validation = Rule::new("has(self.spec.sandbox) == has(oldSelf.spec.sandbox) && (!has(self.spec.sandbox) || self.spec.sandbox == oldSelf.spec.sandbox)").message("spec.sandbox can't be changed; create a new ReplayFork"),
    validation = Rule::new("!(has(oldSelf.spec.cancel) && oldSelf.spec.cancel) || (has(self.spec.cancel) && self.spec.cancel)").message("spec.cancel can't be taken back"),
    validation = Rule::new("!has(self.spec.patches) || self.spec.patches.all(p, has(p.command) == (p.type == 'CommandOverride') && has(p.env) == (p.type == 'EnvVarOverride') && has(p.files) == (p.type == 'FileContentOverride') && has(p.output) == (p.type == 'ToolOutputOverride') && has(p.prompt) == (p.type == 'PromptEdit') && has(p.modelConfig) == (p.type == 'ModelConfigEdit') && has(p.retrieval) == (p.type == 'RetrievalContextOverride') && has(p.snapshot) == (p.type == 'SnapshotOverride'))").message("each patch takes exactly the member of its type: command for CommandOverride, env for EnvVarOverride, files for FileContentOverride, output for ToolOutputOverride, prompt for PromptEdit, modelConfig for ModelConfigEdit, retrieval for RetrievalContextOverride, snapshot for SnapshotOverride"),
    validation = Rule::new("!has(self.spec.patches) || self.spec.patches.all(p, !has(p.command) || !(has(p.command.script) && has(p.command.argv)))").message("a CommandOverride takes script or argv, not both"),
    validation = Rule::new("!has(self.spec.patches) || self.spec.patches.all(p, !has(p.command) || has(p.command.reads) == has(p.command.writes))").message("a CommandOverride declares reads and writes together or not at all"),
    validation = Rule::new("!has(self.spec.patches) || self.spec.patches.all(p, !has(p.files) || p.files.all(f, has(f.content) != has(f.contentFrom)))").message("a file has either content or contentFrom"),
    validation = Rule::new("!has(self.spec.patches) || self.spec.patches.all(p, !has(p.output) || has(p.output.text) != has(p.output.contentFrom))").message("an output has either text or contentFrom"),
    validation = Rule::new("!has(self.spec.patches) || self.spec.patches.all(p, !has(p.prompt) || [has(p.prompt.system), has(p.prompt.message), has(p.prompt.messages), has(p.prompt.contentFrom)].filter(g, g).size() == 1)").message("a prompt has exactly one of system, message, messages and contentFrom"),
    validation = Rule::new("!has(self.spec.model) || (has(self.spec.model.mode) && self.spec.model.mode == 'Endpoint') == has(self.spec.model.endpoint)").message("model.endpoint belongs to mode Endpoint, and that mode needs it"),
    validation = Rule::new("!has(self.spec.model) || (has(self.spec.model.mode) && self.spec.model.mode == 'Command') == has(self.spec.model.command)").message("model.command belongs to mode Command, and that mode needs it"),
    validation = Rule::new("!has(self.spec.model) || !has(self.spec.model.fixtures) || (has(self.spec.model.mode) && self.spec.model.mode == 'Recorded' && has(self.spec.model.fixtures.inline) != has(self.spec.model.fixtures.contentFrom))").message("model.fixtures belongs to mode Recorded, and has either inline or contentFrom")
)]
#[serde(rename_all = "camelCase")]
pub struct ReplayForkSpec {
    pub source: ForkSource,
    /// What is changed; each names its target span, by default the fork span. None: the fork checks whether the run can be
    /// reproduced from its fork span on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub patches: Option<Vec<Patch>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelSpec>,
    /// Consent to steps that a gate let through with other arguments when recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub approvals: Option<Vec<Approval>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reuse: Option<Reuse>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxSpec>,
    /// Holds a fork that no pod has claimed; without effect on one that runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend: Option<bool>,
    /// Stops the fork; what is finished is kept. Can't be taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cancel: Option<bool>,
    /// Seconds after which Job, pod and NetworkPolicy of an ended fork are deleted. Default: 86400.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31536000))]
    pub ttl_seconds_after_finished: Option<i64>,
    /// What becomes of the forked run when this object is deleted. Default: Retain.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<DeletionPolicy>,
}

/// How the sandbox is built.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxSpec {
    /// Default: the image that the run recorded, else the chart's. Another image than the recorded one changes every input.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), regex(pattern = IMAGE))]
    pub image: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub runtime_class_name: Option<String>,
    /// Default: the recorded uid if it is not 0, else the chart's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4294967294i64))]
    pub run_as_user: Option<i64>,
    /// Seconds of execution. Default: 900.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 604800))]
    pub deadline_seconds: Option<i64>,
    /// Seconds for scheduling and pulling. Default: 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub start_deadline_seconds: Option<i64>,
    /// What the sandbox may reach besides the api-server. Default: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub egress: Option<Vec<EgressRule>>,
    /// Enforced (default): nothing runs before the network policy has been seen to hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_isolation: Option<NetworkIsolation>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxProperties" = 32))]
    pub node_selector: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub tolerations: Option<Vec<Toleration>>,
    /// Names of Secrets with registry credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 253)))]
    pub image_pull_secrets: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub service_account_name: Option<String>,
    /// Limit of the workspace volume and of the scratch volume, each. Default: 2Gi.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32), regex(pattern = "^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$"))]
    pub scratch_size: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NetworkIsolation {
    #[default]
    Enforced,
    BestEffort,
}

/// Requests and limits of the executor's container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Resources {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<ResourceAmounts>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<ResourceAmounts>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ResourceAmounts {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub cpu: Option<IntOrString>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub memory: Option<IntOrString>,
}

fn quantity(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": true, "maxLength": 32, "pattern": QUANTITY, "description": "A quantity, e.g. 500m or 1Gi"})
}

/// A range of addresses, and the ports there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EgressRule {
    /// At least /16 (IPv4) or /32 (IPv6); never the cluster's services or its API.
    #[schemars(
        length(min = 1, max = 64),
        extend("x-kubernetes-validations" = [
            {"rule": "isCIDR(self)", "message": "it is no CIDR, like 203.0.113.0/24"},
            {"rule": "!isCIDR(self) || cidr(self).prefixLength() >= (cidr(self).ip().family() == 4 ? 16 : 32)",
             "message": "it is too wide; at least /16 is needed for IPv4, /32 for IPv6"},
        ])
    )]
    pub cidr: String,
    #[schemars(length(min = 1, max = 16))]
    pub ports: Vec<PortRule>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PortRule {
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
    /// TCP (default) or UDP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^(TCP|UDP)$"), length(max = 3))]
    pub protocol: Option<String>,
}
