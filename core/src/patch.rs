//! Patches: what a fork changes, and which spans each can be applied to.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::fork::ForkSource;
use crate::model::{Executor, ReplayPolicy, Span, SpanKind};
use crate::source::Source;

/// Bytes of inline content of all patches of a fork: kubectl keeps a copy in an annotation of at most 256 KiB.
pub const MAX_INLINE: usize = 128 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
pub enum PatchType {
    EnvVarOverride,
    CommandOverride,
    ToolOutputOverride,
}

/// One patch of a fork. Exactly the member that its type needs is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Patch {
    pub r#type: PatchType,
    /// The span it acts on: an id, or a name unique in the run. Default: the fork span.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub span: Option<String>,
    /// EnvVarOverride: variables to set, or without a value to unset.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub env: Option<Vec<EnvVar>>,
    /// CommandOverride: what replaces the recorded command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<CommandPatch>,
    /// ToolOutputOverride: what the span gives instead of being run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<OutputPatch>,
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct OutputPatch {
    #[schemars(length(max = 131072))]
    pub text: String,
    /// Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
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
}

impl Refused {
    /// The reason as it stands in a condition.
    pub fn reason(&self) -> &'static str {
        match self {
            Refused::SpanNotFound { .. } => "SpanNotFound",
            Refused::SpanAmbiguous { .. } => "SpanAmbiguous",
            Refused::PatchRefused { .. } => "PatchRefused",
        }
    }
}

/// Patches with their targets found, checked against the spans they act on.
#[derive(Clone, Debug, Default)]
pub struct Patches {
    /// By index of the target: variables in order, an outer span's before an inner's.
    pub env: BTreeMap<usize, Vec<EnvVar>>,
    pub command: BTreeMap<usize, CommandPatch>,
    pub output: BTreeMap<usize, OutputPatch>,
}

impl Patches {
    /// Finds each patch's target and checks that it fits.
    ///
    /// # Errors
    /// An unknown or ambiguous span, a target before the fork span, a patch that doesn't fit its span's kind, two
    /// patches on the same field, a member that doesn't belong to the type.
    pub fn resolve(source: &Source, fork: &ForkSource, fork_span: usize, patches: &[Patch]) -> Result<Self, Refused> {
        let mut resolved = Self::default();
        let inline = serde_json::to_string(patches).map_or(0, |json| json.len());
        if inline > MAX_INLINE {
            let message = format!("the patches have {inline} bytes of inline content, at most {MAX_INLINE} are allowed together");
            return Err(Refused::PatchRefused { field: "spec.patches".into(), message });
        }
        for (i, patch) in patches.iter().enumerate() {
            let field = format!("spec.patches[{i}]");
            check_members(&field, patch)?;
            let target = match &patch.span {
                Some(name) => source.find(&format!("{field}.span"), &fork.run, name)?,
                None => fork_span,
            };
            resolved.add(source, &field, fork_span, target, patch)?;
        }
        Ok(resolved)
    }

    fn add(&mut self, source: &Source, field: &str, fork_span: usize, target: usize, patch: &Patch) -> Result<(), Refused> {
        let span = &source.spans[target];
        let refuse = |message: String| Refused::PatchRefused { field: field.to_owned(), message };
        let kind = format!("{:?}", patch.r#type);
        let what = describe(span);
        if target < fork_span && !(patch.r#type == PatchType::EnvVarOverride && source.is_container(target)) {
            return Err(refuse(format!(
                "{kind} names {what}, which began before the fork span {}; fork at it or at an earlier span",
                describe(&source.spans[fork_span])
            )));
        }
        if let Some(unit) = source.unit_above(target) {
            return Err(refuse(format!(
                "{kind} names {what}, which runs as part of {}; patch that span instead",
                describe(&source.spans[unit])
            )));
        }
        let same = |with: &str| refuse(format!("{kind} and {with} both change the same field of {what}; keep one of them"));
        match patch.r#type {
            PatchType::EnvVarOverride => {
                if self.command.get(&target).is_some_and(|c| c.env.is_some()) {
                    return Err(same("CommandOverride.env"));
                }
                let vars = patch.env.clone().unwrap_or_default();
                let set = self.env.entry(target).or_default();
                for var in vars {
                    if set.iter().any(|v| v.name == var.name) {
                        return Err(refuse(format!("the variable {:?} of {what} is given twice; keep one of them", var.name)));
                    }
                    set.push(var);
                }
            }
            PatchType::CommandOverride => {
                let fits = matches!(span.opening.kind, SpanKind::ShellCommand | SpanKind::ToolCall)
                    && matches!(span.opening.executor, Some(Executor::Shell(_)));
                if !fits {
                    return Err(refuse(format!(
                        "CommandOverride needs a ShellCommand, or a ToolCall that was recorded with a command; {what} is none; use ToolOutputOverride for its output"
                    )));
                }
                if span.opening.policy() == ReplayPolicy::RecordOnly {
                    return Err(refuse(format!("CommandOverride names {what}, which was recorded as RecordOnly and is never run again")));
                }
                let command = patch.command.clone().unwrap_or_default();
                let literal = command.cwd.iter().filter(|cwd| !cwd.contains("{{"));
                for path in literal.chain(command.reads.iter().flatten()).chain(command.writes.iter().flatten()) {
                    crate::footprint::relative(path, source.root()).map_err(|e| refuse(format!("CommandOverride of {what}: {e}")))?;
                }
                if command.env.is_some() && self.env.contains_key(&target) {
                    return Err(same("EnvVarOverride"));
                }
                if self.output.contains_key(&target) {
                    return Err(same("ToolOutputOverride"));
                }
                if self.command.insert(target, command).is_some() {
                    return Err(same("another CommandOverride"));
                }
            }
            PatchType::ToolOutputOverride => {
                use SpanKind::*;
                if !matches!(span.opening.kind, ToolCall | ShellCommand | Retrieval | FileRead) || source.is_container(target) {
                    return Err(refuse(format!(
                        "ToolOutputOverride needs a ToolCall, ShellCommand, Retrieval or FileRead; {what} is none of these"
                    )));
                }
                if self.command.contains_key(&target) {
                    return Err(same("CommandOverride"));
                }
                let output = patch.output.clone().unwrap_or(OutputPatch { text: String::new(), exit_code: None });
                if self.output.insert(target, output).is_some() {
                    return Err(same("another ToolOutputOverride"));
                }
            }
        }
        Ok(())
    }

    /// The environment of a span after patches: recorded, then its containers' overrides (outermost first), then a
    /// CommandOverride's environment or the span's own override.
    pub fn environment(&self, source: &Source, span: usize, recorded: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let mut env = recorded.clone();
        let mut chain = source.ancestors(span);
        chain.reverse();
        for container in chain {
            apply(&mut env, self.env.get(&container));
        }
        if let Some(replaced) = self.command.get(&span).and_then(|c| c.env.as_ref()) {
            env.clear();
            apply(&mut env, Some(replaced));
        }
        apply(&mut env, self.env.get(&span));
        env
    }

    /// Whether a patch names this very span.
    pub fn names(&self, span: usize) -> bool {
        self.env.contains_key(&span) || self.command.contains_key(&span) || self.output.contains_key(&span)
    }
}

fn apply(env: &mut BTreeMap<String, String>, vars: Option<&Vec<EnvVar>>) {
    for var in vars.into_iter().flatten() {
        match &var.value {
            Some(value) => env.insert(var.name.clone(), value.clone()),
            None => env.remove(&var.name),
        };
    }
}

fn describe(span: &Span) -> String {
    format!("span {:?} ({})", span.opening.name, span.opening.kind)
}

/// Exactly the member that the type needs; the same rule stands in the CRD.
fn check_members(field: &str, patch: &Patch) -> Result<(), Refused> {
    let refuse = |message: String| Refused::PatchRefused { field: field.to_owned(), message };
    let given = [("env", patch.env.is_some()), ("command", patch.command.is_some()), ("output", patch.output.is_some())];
    let needed = match patch.r#type {
        PatchType::EnvVarOverride => "env",
        PatchType::CommandOverride => "command",
        PatchType::ToolOutputOverride => "output",
    };
    for (name, is_given) in given {
        if is_given != (name == needed) {
            return Err(refuse(format!(
                "{:?} takes the member `{needed}` and no other; `{name}` {}",
                patch.r#type,
                if is_given { "must go" } else { "is missing" }
            )));
        }
    }
    if let Some(command) = &patch.command {
        if command.script.is_some() && command.argv.is_some() {
            return Err(refuse("CommandOverride takes `script` or `argv`, not both".into()));
        }
        if *command == CommandPatch::default() {
            return Err(refuse("CommandOverride changes nothing: give at least one of script, argv, cwd, env, stdin".into()));
        }
        if command.reads.is_some() != command.writes.is_some() {
            return Err(refuse("`reads` and `writes` are declared together or not at all".into()));
        }
    }
    Ok(())
}
