//! Patches: what a fork changes, and which spans each can be applied to.

mod content;
mod resolve;

pub use content::{ContentFrom, Contents};
pub(crate) use resolve::kind_takes_output;
pub use resolve::{FileOverride, Patches, Prompt, SnapshotOverride};

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Bytes of inline content of all patches of a fork: kubectl keeps a copy in an annotation of at most 256 KiB.
pub const MAX_INLINE: usize = 128 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
pub enum PatchType {
    CommandOverride,
    EnvVarOverride,
    FileContentOverride,
    ToolOutputOverride,
    PromptEdit,
    ModelConfigEdit,
    RetrievalContextOverride,
    SnapshotOverride,
}

impl PatchType {
    /// The member of [`Patch`] that a patch of this type has.
    pub fn member(self) -> &'static str {
        match self {
            PatchType::CommandOverride => "command",
            PatchType::EnvVarOverride => "env",
            PatchType::FileContentOverride => "files",
            PatchType::ToolOutputOverride => "output",
            PatchType::PromptEdit => "prompt",
            PatchType::ModelConfigEdit => "modelConfig",
            PatchType::RetrievalContextOverride => "retrieval",
            PatchType::SnapshotOverride => "snapshot",
        }
    }
}

/// One patch of a fork. Exactly the member that its type needs is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Patch {
    pub r#type: PatchType,
    /// The span it acts on: an id, or a name unique in the run. Default: the fork span.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub span: Option<String>,
    /// CommandOverride: what replaces the recorded command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<CommandPatch>,
    /// EnvVarOverride: variables to set, or without a value to unset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub env: Option<Vec<EnvVar>>,
    /// FileContentOverride: files to write before the span starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 8))]
    pub files: Option<Vec<FilePatch>>,
    /// ToolOutputOverride: what the span gives instead of being run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<OutputPatch>,
    /// PromptEdit: what replaces parts of a model call's prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<PromptPatch>,
    /// ModelConfigEdit: what replaces a model call's settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_config: Option<ModelConfigPatch>,
    /// RetrievalContextOverride: the documents that the span gives instead of being run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retrieval: Option<RetrievalPatch>,
    /// SnapshotOverride: the workspace that the span starts from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotPatch>,
}

impl Patch {
    /// Which members it has.
    fn members(&self) -> [(&'static str, bool); 8] {
        let Patch { r#type: _, span: _, command, env, files, output, prompt, model_config, retrieval, snapshot } = self;
        [
            ("command", command.is_some()),
            ("env", env.is_some()),
            ("files", files.is_some()),
            ("output", output.is_some()),
            ("prompt", prompt.is_some()),
            ("modelConfig", model_config.is_some()),
            ("retrieval", retrieval.is_some()),
            ("snapshot", snapshot.is_some()),
        ]
    }

    /// Digests of uploaded contents that it names.
    pub fn contents(&self) -> impl Iterator<Item = &ContentFrom> {
        let files = self.files.iter().flatten().filter_map(|f| f.content_from.as_ref());
        let output = self.output.iter().filter_map(|o| o.content_from.as_ref());
        let prompt = self.prompt.iter().filter_map(|p| p.content_from.as_ref());
        files.chain(output).chain(prompt).chain(self.retrieval.iter().filter_map(|r| r.content_from.as_ref()))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct EnvVar {
    #[schemars(length(min = 1, max = 256), regex(pattern = "^[A-Za-z_][A-Za-z0-9_]*$"))]
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 8192))]
    pub value: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CommandPatch {
    /// A script for `/bin/sh -c`; a template, as bindings are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 65536))]
    pub script: Option<String>,
    /// An argument vector; each argument is a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), inner(length(max = 8192)))]
    pub argv: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub cwd: Option<String>,
    /// Replaces the whole recorded environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub env: Option<Vec<EnvVar>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 65536))]
    pub stdin: Option<String>,
    /// What the new command may read and write; without them a new script or argv may touch everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128), inner(length(min = 1, max = 1024)))]
    pub reads: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128), inner(length(min = 1, max = 1024)))]
    pub writes: Option<Vec<String>>,
}

impl CommandPatch {
    /// Whether what was recorded of the command's reads and writes no longer holds.
    pub fn voids_footprint(&self) -> bool {
        self.script.is_some() || self.argv.is_some() || self.reads.is_some()
    }
}

/// A file to write, whatever was there. Either `content` or `contentFrom`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct FilePatch {
    /// Of the workspace: absolute, or relative to its root.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 131072))]
    pub content: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_from: Option<ContentFrom>,
    /// Its x bit. Default: as the recorded file has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executable: Option<bool>,
}

/// An output's text. Either `text` or `contentFrom`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct OutputPatch {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 131072))]
    pub text: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_from: Option<ContentFrom>,
    /// Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
}

/// Exactly one of its members. Texts are templates, as bindings are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PromptPatch {
    /// The system prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 131072))]
    pub system: Option<String>,
    /// One message, by its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<MessagePatch>,
    /// All messages, a system prompt among them included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    pub messages: Option<Vec<Message>>,
    /// One of the above, as an uploaded JSON document.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_from: Option<ContentFrom>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MessagePatch {
    /// From 0.
    #[schemars(range(min = 0, max = 100_000))]
    pub index: i64,
    #[schemars(length(max = 131072))]
    pub content: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Message {
    #[schemars(length(min = 1, max = 64))]
    pub role: String,
    #[schemars(length(max = 131072))]
    pub content: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelConfigPatch {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 256))]
    pub model: Option<String>,
    /// Members of the request to set, such as `temperature`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "any_members")]
    pub parameters: BTreeMap<String, Value>,
    /// Members of the request to remove.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(min = 1, max = 128)))]
    pub unset: Vec<String>,
}

/// Either `documents` or `contentFrom`, a JSON list.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct RetrievalPatch {
    /// Any JSON; the span's output text is the list of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_documents")]
    pub documents: Option<Vec<Value>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content_from: Option<ContentFrom>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SnapshotPatch {
    /// Content digest of a workspace that a run of the namespace was recorded with; `kubectl replay show RUN SPAN -o json` has those around a span.
    #[schemars(regex(pattern = "^[0-9a-f]{64}$"))]
    pub digest: String,
}

fn any_members(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "object", "additionalProperties": {"x-kubernetes-preserve-unknown-fields": true, "nullable": true}})
}

fn any_documents(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({"type": "array", "maxItems": 64, "items": {"x-kubernetes-preserve-unknown-fields": true, "nullable": true}})
}

/// Why a fork can't be planned. The words are the user's: field, value and remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("{field}: no span of run {run:?} has the id or name {span:?}; `kubectl replay show {run}` lists its spans")]
    SpanNotFound { field: String, run: String, span: String },
    #[error("{field}: {count} spans of run {run:?} are called {span:?}; name one by its id: {ids}")]
    SpanAmbiguous { field: String, run: String, span: String, count: usize, ids: String },
    #[error("{field}: {message}")]
    PatchRefused { field: String, message: String },
    #[error("{field}: {message}")]
    SpecInvalid { field: String, message: String },
}

impl Refused {
    /// The reason as it stands in a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Refused::SpanNotFound { .. } => "SpanNotFound",
            Refused::SpanAmbiguous { .. } => "SpanAmbiguous",
            Refused::PatchRefused { .. } => "PatchRefused",
            Refused::SpecInvalid { .. } => "SpecInvalid",
        }
    }
}
