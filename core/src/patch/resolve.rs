//! Patches with their targets found, checked against the spans they act on.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};

use super::{CommandPatch, Contents, EnvVar, MAX_INLINE, Message, ModelConfigPatch, Patch, PatchType, PromptPatch, Refused};
use crate::Digest;
use crate::fork::ForkSource;
use crate::model::{Executor, Output, ReplayPolicy, Span, SpanKind};
use crate::source::{SnapshotFact, Source};

/// A file that is written before a span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileOverride {
    /// Relative to the workspace root.
    pub path: String,
    pub content: Arc<[u8]>,
    pub executable: bool,
    /// Whether the recorded workspace has it so already, where that is known.
    pub same: Option<bool>,
}

/// A workspace that a span starts from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotOverride {
    /// Where the user wrote it.
    pub field: String,
    pub content: Digest,
    /// Absent until it was looked up.
    pub fact: Option<SnapshotFact>,
}

/// What a prompt becomes: `all`, or single parts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub system: Option<String>,
    pub messages: BTreeMap<usize, String>,
    pub all: Option<Vec<Message>>,
}

/// By index of the target span.
#[derive(Clone, Debug, Default)]
pub struct Patches {
    pub env: BTreeMap<usize, Vec<EnvVar>>,
    pub command: BTreeMap<usize, CommandPatch>,
    pub output: BTreeMap<usize, Output>,
    pub files: BTreeMap<usize, Vec<FileOverride>>,
    pub snapshot: BTreeMap<usize, SnapshotOverride>,
    pub prompt: BTreeMap<usize, Prompt>,
    pub model_config: BTreeMap<usize, ModelConfigPatch>,
}

/// A patch that is being resolved, and where the user wrote it.
struct Target<'a> {
    source: &'a Source,
    contents: &'a Contents,
    patch: &'a Patch,
    field: String,
    index: usize,
    /// The patches before it that name the same span, each with where the user wrote it.
    earlier: Vec<(String, &'a Patch)>,
}

impl Target<'_> {
    fn span(&self) -> &Span {
        &self.source.spans[self.index]
    }

    fn refuse(&self, message: impl Into<String>) -> Refused {
        Refused::PatchRefused { field: self.field.clone(), message: message.into() }
    }

    /// As [`Target::refuse`], where a member of the patch is wrong.
    fn refuse_at(&self, member: &str, message: impl Into<String>) -> Refused {
        Refused::PatchRefused { field: format!("{}.{member}", self.field), message: message.into() }
    }

    /// The type does not fit the span, for the reason that `needs` says.
    fn does_not_fit(&self, needs: &str, none: &str) -> Refused {
        let (kind, what, instead) = (self.patch.r#type, self.what(), instead(self.source, self.index));
        self.refuse(format!("{kind:?} needs {needs}; {what} is {none}; {instead}"))
    }

    fn what(&self) -> String {
        describe(self.span())
    }

    /// The earlier patch that this one clashes with.
    fn earlier(&self, clashes: impl Fn(&Patch) -> bool) -> Option<(&str, PatchType)> {
        self.earlier.iter().find(|(_, p)| clashes(p)).map(|(field, p)| (field.as_str(), p.r#type))
    }

    fn same_field(&self, clashes: impl Fn(&Patch) -> bool) -> Refused {
        self.both_change("the same field", clashes)
    }

    fn both_change(&self, field: &str, clashes: impl Fn(&Patch) -> bool) -> Refused {
        let kind = self.patch.r#type;
        let with = match self.earlier(clashes) {
            Some((at, other)) if other == kind => format!("{at}, another {other:?},"),
            Some((at, other @ PatchType::EnvVarOverride)) => format!("{at}, an {other:?},"),
            Some((at, other)) => format!("{at}, a {other:?},"),
            None => "an earlier patch".to_owned(),
        };
        self.refuse(format!("{kind:?} and {with} both change {field} of {}; keep one of them", self.what()))
    }

    fn twice(&self, member: &str, thing: &str, name: &str, clashes: impl Fn(&Patch) -> bool) -> Refused {
        let also = self.earlier(clashes).map(|(field, _)| format!(", here and in {field}")).unwrap_or_default();
        self.refuse_at(member, format!("the {thing} {name:?} of {} is given twice{also}; keep one of them", self.what()))
    }
}

impl Patches {
    /// Finds each patch's target and checks that it fits; then adds what the run's own forks left to inherit for
    /// spans from `first` on, where the walk begins.
    ///
    /// # Errors
    /// An unknown or ambiguous span, a target before the fork span, a patch that doesn't fit its span's kind, two
    /// patches on the same field, a member that doesn't belong to the type, content that is not there.
    pub fn resolve(
        source: &Source,
        contents: &Contents,
        fork: &ForkSource,
        fork_span: usize,
        first: usize,
        patches: &[Patch],
    ) -> Result<Self, Refused> {
        let mut resolved = Self::default();
        let inline = serde_json::to_string(patches).map_or(0, |json| json.len());
        if inline > MAX_INLINE {
            let message = format!(
                "the patches have {inline} bytes of inline content, at most {MAX_INLINE} are allowed together; upload larger content with `kubectl replay upload` and name it by `contentFrom`"
            );
            return Err(Refused::PatchRefused { field: "spec.patches".into(), message });
        }
        let mut before: Vec<(usize, String, &Patch)> = Vec::new();
        for (i, patch) in patches.iter().enumerate() {
            let field = format!("spec.patches[{i}]");
            check_members(&field, patch)?;
            let index = match &patch.span {
                Some(name) => source.find(&format!("{field}.span"), &fork.run, name)?,
                None => fork_span,
            };
            let earlier = before.iter().filter(|(at, ..)| *at == index).map(|(_, field, patch)| (field.clone(), *patch)).collect();
            let target = Target { source, contents, patch, field, index, earlier };
            check_place(&target, fork_span)?;
            resolved.add(&target)?;
            before.push((index, target.field, patch));
        }
        for (n, patch) in source.inherited.iter().enumerate() {
            let Some(index) = patch.span.as_deref().and_then(|id| source.index(id)).filter(|&i| i >= first) else { continue };
            let field = format!("spec.source.run, inherited patch {n}");
            let target = Target { source, contents, patch, field, index, earlier: Vec::new() };
            let mut alone = Self::default();
            alone.add(&target)?;
            resolved.inherit(alone);
        }
        Ok(resolved)
    }

    /// What is not set already.
    fn inherit(&mut self, from: Patches) {
        let Patches { env: _, command: _, output, files, snapshot, prompt: _, model_config: _ } = from;
        for (span, output) in output {
            if !self.command.contains_key(&span) {
                self.output.entry(span).or_insert(output);
            }
        }
        for (span, inherited) in files {
            let set = self.files.entry(span).or_default();
            for file in inherited {
                if set.iter().all(|f| f.path != file.path) {
                    set.push(file);
                }
            }
        }
        for (span, snapshot) in snapshot {
            self.snapshot.entry(span).or_insert(snapshot);
        }
    }

    fn add(&mut self, target: &Target<'_>) -> Result<(), Refused> {
        match target.patch.r#type {
            PatchType::CommandOverride => self.add_command(target),
            PatchType::EnvVarOverride => self.add_env(target),
            PatchType::FileContentOverride => self.add_files(target),
            PatchType::ToolOutputOverride => self.add_output(target),
            PatchType::PromptEdit => self.add_prompt(target),
            PatchType::ModelConfigEdit => self.add_model_config(target),
            PatchType::RetrievalContextOverride => self.add_retrieval(target),
            PatchType::SnapshotOverride => self.add_snapshot(target),
        }
    }

    fn add_env(&mut self, target: &Target<'_>) -> Result<(), Refused> {
        if self.command.get(&target.index).is_some_and(|c| c.env.is_some()) {
            return Err(target.both_change("the environment", |p| p.command.as_ref().is_some_and(|c| c.env.is_some())));
        }
        let set = self.env.entry(target.index).or_default();
        for var in target.patch.env.iter().flatten() {
            if set.iter().any(|v| v.name == var.name) {
                let clashes = |p: &Patch| p.env.iter().flatten().any(|v| v.name == var.name);
                return Err(target.twice("env", "variable", &var.name, clashes));
            }
            set.push(var.clone());
        }
        Ok(())
    }

    fn add_command(&mut self, target: &Target<'_>) -> Result<(), Refused> {
        let opening = &target.span().opening;
        let what = target.what();
        if !matches!(opening.kind, SpanKind::ShellCommand | SpanKind::ToolCall) || !matches!(opening.executor, Some(Executor::Shell(_))) {
            return Err(target.does_not_fit("a ShellCommand, or a ToolCall that was recorded with a command", "none"));
        }
        if opening.policy() == ReplayPolicy::RecordOnly {
            return Err(target.refuse(format!(
                "CommandOverride names {what}, which was recorded as RecordOnly and is never run again; {}",
                instead(target.source, target.index)
            )));
        }
        let command = target.patch.command.clone().unwrap_or_default();
        let literal = command.cwd.iter().filter(|cwd| !cwd.contains("{{"));
        for path in literal.chain(command.reads.iter().flatten()).chain(command.writes.iter().flatten()) {
            crate::footprint::relative(path, target.source.root())
                .map_err(|e| target.refuse_at("command", format!("{e}; name one of the workspace")))?;
        }
        if command.env.is_some() && self.env.contains_key(&target.index) {
            return Err(target.both_change("the environment", |p| p.env.is_some()));
        }
        if self.output.contains_key(&target.index) {
            return Err(target.same_field(gives_output));
        }
        match self.command.insert(target.index, command) {
            Some(_) => Err(target.same_field(|p| p.command.is_some())),
            None => Ok(()),
        }
    }

    fn add_output(&mut self, target: &Target<'_>) -> Result<(), Refused> {
        if !takes_output(target.source, target.index) {
            return Err(target.does_not_fit("a ToolCall, ShellCommand, Retrieval or FileRead", "none of these"));
        }
        let Some(output) = &target.patch.output else { return Ok(()) };
        let text = target.contents.text(&format!("{}.output", target.field), output.text.as_ref(), output.content_from.as_ref())?;
        self.give(target, Output::overridden(&text, output.exit_code.unwrap_or(0)))
    }

    fn add_retrieval(&mut self, target: &Target<'_>) -> Result<(), Refused> {
        if target.span().opening.kind != SpanKind::Retrieval || target.source.is_container(target.index) {
            return Err(target.does_not_fit("a Retrieval", "none"));
        }
        let Some(retrieval) = &target.patch.retrieval else { return Ok(()) };
        let field = format!("{}.retrieval", target.field);
        let inline = retrieval.documents.as_ref().map(|d| json!(d).to_string());
        let text = target.contents.text(&field, inline.as_ref(), retrieval.content_from.as_ref())?;
        let documents: Vec<Value> =
            serde_json::from_str(&text).map_err(|e| target.refuse_at("retrieval", format!("the documents are no JSON list: {e}")))?;
        self.give(target, Output::overridden(&json!(documents).to_string(), 0))
    }

    fn give(&mut self, target: &Target<'_>, output: Output) -> Result<(), Refused> {
        if self.command.contains_key(&target.index) {
            return Err(target.same_field(|p| p.command.is_some()));
        }
        match self.output.insert(target.index, output) {
            Some(_) => Err(target.same_field(gives_output)),
            None => Ok(()),
        }
    }

    fn add_files(&mut self, target: &Target<'_>) -> Result<(), Refused> {
        let span = target.span();
        if !span.opening.sees_workspace() {
            return Err(target.refuse(format!(
                "FileContentOverride needs a span that sees the workspace; {} does not; name the first span after it that does",
                target.what()
            )));
        }
        let facts = target.source.facts.files.get(&span.id);
        for (n, file) in target.patch.files.iter().flatten().enumerate() {
            let field = format!("{}.files[{n}]", target.field);
            let refuse = |message: String| target.refuse_at(&format!("files[{n}].path"), message);
            let relative = |path: &str| crate::footprint::relative(path, target.source.root());
            let path = relative(&file.path).map_err(|e| refuse(format!("{e}; name one of the workspace")))?;
            if path.is_empty() {
                return Err(refuse(format!("{:?} is the workspace itself, and no file; name a file in it", file.path)));
            }
            // NAME_MAX and PATH_MAX of Linux.
            if path.len() > 4095 || path.split('/').any(|name| name.len() > 255) {
                return Err(refuse("no file can have this path: a name has at most 255 bytes, a path 4095; shorten it".to_owned()));
            }
            let content = target.contents.bytes(&field, file.content.as_ref(), file.content_from.as_ref())?;
            let fact = facts.and_then(|f| f.get(&path)).copied().unwrap_or_default();
            let executable = file.executable.unwrap_or(fact.executable);
            let set = self.files.entry(target.index).or_default();
            let within = |a: &str, b: &str| a.strip_prefix(b).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
            if let Some(other) = set.iter().find(|f| within(&f.path, &path) || within(&path, &f.path)) {
                let clashes = |p: &Patch| p.files.iter().flatten().any(|f| relative(&f.path).is_ok_and(|p| p == other.path));
                let of = target.earlier(clashes).map(|(field, _)| format!(" ({field})")).unwrap_or_default();
                return Err(refuse(format!(
                    "{path:?} and {:?}{of} of {} are the same file, or one lies in the other; keep one of them",
                    other.path,
                    target.what()
                )));
            }
            set.push(FileOverride { path, content, executable, same: fact.same.map(|same| same && executable == fact.executable) });
        }
        Ok(())
    }

    fn add_snapshot(&mut self, target: &Target<'_>) -> Result<(), Refused> {
        let Some(snapshot) = &target.patch.snapshot else { return Ok(()) };
        let content: Digest = snapshot.digest.parse().map_err(|e| target.refuse_at("snapshot.digest", format!("{e}")))?;
        let fact = target.source.facts.snapshots.get(&target.span().id).filter(|f| f.state.content == content).cloned();
        match self.snapshot.insert(target.index, SnapshotOverride { field: target.field.clone(), content, fact }) {
            Some(_) => Err(target.same_field(|p| p.snapshot.is_some())),
            None => Ok(()),
        }
    }

    fn add_prompt(&mut self, target: &Target<'_>) -> Result<(), Refused> {
        let count = messages_of(target)?;
        let Some(patch) = &target.patch.prompt else { return Ok(()) };
        let uploaded: Option<PromptPatch> = match &patch.content_from {
            None => None,
            Some(from) => {
                let text = target.contents.text(&format!("{}.prompt", target.field), None, Some(from))?;
                Some(serde_json::from_str(&text).map_err(|e| {
                    target.refuse_at("prompt", format!("what was uploaded is no JSON object with `system`, `message` or `messages`: {e}"))
                })?)
            }
        };
        let edit = uploaded.as_ref().unwrap_or(patch);
        let given = [edit.system.is_some(), edit.message.is_some(), edit.messages.is_some()];
        if given.iter().filter(|g| **g).count() != 1
            || (uploaded.is_some() && (patch.system.is_some() || patch.message.is_some() || patch.messages.is_some()))
        {
            return Err(target.refuse_at("prompt", "PromptEdit takes exactly one of `system`, `message`, `messages` and `contentFrom`"));
        }
        let texts = edit.system.iter().chain(edit.message.iter().map(|m| &m.content));
        for text in texts.chain(edit.messages.iter().flatten().map(|m| &m.content)) {
            crate::binding::holes(text).map_err(|e| {
                target.refuse_at("prompt", format!("it is a template and can't be read (write {{{{ '{{{{' }}}} for braces): {e}"))
            })?;
        }
        let of = self.prompt.entry(target.index).or_default();
        let mut clash = of.all.is_some();
        if let Some(system) = &edit.system {
            clash |= of.system.replace(system.clone()).is_some();
        }
        if let Some(message) = &edit.message {
            let index = usize::try_from(message.index).ok().filter(|i| *i < count).ok_or_else(|| {
                let (index, what) = (message.index, target.what());
                target.refuse_at("prompt.message.index", format!("{index} is no message of {what}, which has {count} (from 0)"))
            })?;
            clash |= of.messages.insert(index, message.content.clone()).is_some();
        }
        if let Some(messages) = &edit.messages {
            clash |= of.system.is_some() || !of.messages.is_empty();
            of.all = Some(messages.clone());
        }
        let clashes = |p: &Patch| {
            p.prompt.as_ref().is_some_and(|p| {
                let index = |p: &PromptPatch| p.message.as_ref().map(|m| m.index);
                let part = (p.system.is_some() && edit.system.is_some()) || (index(p).is_some() && index(p) == index(edit));
                part || p.messages.is_some() || edit.messages.is_some() || p.content_from.is_some()
            })
        };
        if clash { Err(target.same_field(clashes)) } else { Ok(()) }
    }

    fn add_model_config(&mut self, target: &Target<'_>) -> Result<(), Refused> {
        messages_of(target)?;
        let patch = target.patch.model_config.clone().unwrap_or_default();
        if patch == ModelConfigPatch::default() {
            return Err(target.refuse_at("modelConfig", "ModelConfigEdit changes nothing: give at least one of model, parameters, unset"));
        }
        for name in patch.parameters.keys().chain(&patch.unset) {
            if name == "messages" || name == "system" || name == "model" {
                let message = format!("ModelConfigEdit can't change `{name}`; use PromptEdit, or `modelConfig.model`");
                return Err(target.refuse_at("modelConfig", message));
            }
        }
        let of = self.model_config.entry(target.index).or_default();
        if patch.model.is_some() && of.model.is_some() {
            return Err(target.same_field(|p| p.model_config.as_ref().is_some_and(|c| c.model.is_some())));
        }
        of.model = of.model.take().or(patch.model);
        for name in patch.parameters.keys().chain(&patch.unset) {
            if of.parameters.contains_key(name) || of.unset.contains(name) {
                let of = |c: &ModelConfigPatch| c.parameters.contains_key(name) || c.unset.contains(name);
                return Err(target.twice("modelConfig", "parameter", name, |p| p.model_config.as_ref().is_some_and(of)));
            }
        }
        let mut names: Vec<_> = patch.parameters.keys().chain(&patch.unset).collect();
        names.sort();
        if let Some(twice) = names.windows(2).find(|w| w[0] == w[1]) {
            let message = format!("the parameter {:?} of {} is both set and removed; keep one of them", twice[0], target.what());
            return Err(target.refuse_at("modelConfig", message));
        }
        of.parameters.extend(patch.parameters.clone());
        of.unset.extend(patch.unset.clone());
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

    /// Whether a patch names this very span and acts on its inputs.
    pub fn names(&self, span: usize) -> bool {
        self.env.contains_key(&span)
            || self.command.contains_key(&span)
            || self.prompt.contains_key(&span)
            || self.model_config.contains_key(&span)
    }

    /// The targets whose file and snapshot patches act right before this unit: itself, and what began since the unit before it.
    pub fn targets_before(&self, source: &Source, unit: usize) -> Vec<usize> {
        let mut targets: Vec<_> = self.files.range(..=unit).map(|(t, _)| *t).chain(self.snapshot.range(..=unit).map(|(t, _)| *t)).collect();
        targets.sort_unstable();
        targets.dedup();
        targets.retain(|&t| (t..unit).all(|i| !source.is_unit(i)));
        targets
    }

    /// Nothing is patched.
    pub fn is_empty(&self) -> bool {
        let Self { env, command, output, files, snapshot, prompt, model_config } = self;
        env.is_empty()
            && command.is_empty()
            && output.is_empty()
            && files.is_empty()
            && snapshot.is_empty()
            && prompt.is_empty()
            && model_config.is_empty()
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

/// How many messages the target's request has.
fn messages_of(target: &Target<'_>) -> Result<usize, Refused> {
    let messages = |request: &Value| request.get("messages").and_then(Value::as_array).map(Vec::len);
    match &target.span().opening.executor {
        Some(Executor::Model { request, .. }) => messages(request).ok_or_else(|| {
            let (kind, what) = (target.patch.r#type, target.what());
            target.refuse(format!("{kind:?} needs a model call whose request has `messages`; that of {what} has none"))
        }),
        _ => Err(target.does_not_fit("a model call that was recorded with its request", "none")),
    }
}

/// Whether a patch may give the span's output.
fn takes_output(source: &Source, span: usize) -> bool {
    kind_takes_output(source.spans[span].opening.kind) && !source.is_container(span)
}

/// Whether a patch may give the output of a span of this kind that holds no others.
pub(crate) fn kind_takes_output(kind: SpanKind) -> bool {
    use SpanKind::*;
    matches!(kind, ToolCall | ShellCommand | Retrieval | FileRead)
}

fn gives_output(patch: &Patch) -> bool {
    patch.output.is_some() || patch.retrieval.is_some()
}

/// What can be patched about a span that another patch does not fit.
fn instead(source: &Source, span: usize) -> String {
    let opening = &source.spans[span].opening;
    let takes_output = takes_output(source, span);
    let own = match &opening.executor {
        _ if source.is_container(span) => return "use a patch on a span that it holds".into(),
        _ if opening.kind == SpanKind::Retrieval => return "use RetrievalContextOverride for its documents".into(),
        Some(Executor::FileWrite { .. }) => return "use FileContentOverride on the span after it".into(),
        None if opening.kind == SpanKind::FileWrite => return "use FileContentOverride on the span after it".into(),
        Some(Executor::Shell(_)) if takes_output && opening.policy() != ReplayPolicy::RecordOnly => "CommandOverride for its command",
        Some(Executor::Model { .. }) => "PromptEdit or ModelConfigEdit for its request",
        _ => "",
    };
    match (own, takes_output) {
        ("", true) => "use ToolOutputOverride for its output".into(),
        ("", false) => "use a patch on a span that reads its output".into(),
        (own, true) => format!("use {own}, or ToolOutputOverride for its output"),
        (own, false) => format!("use {own}"),
    }
}

fn describe(span: &Span) -> String {
    format!("span {:?} ({})", span.opening.name, span.opening.kind)
}

fn check_place(target: &Target<'_>, fork_span: usize) -> Result<(), Refused> {
    let kind = target.patch.r#type;
    if target.index < fork_span && !(kind == PatchType::EnvVarOverride && target.source.is_container(target.index)) {
        return Err(target.refuse(format!(
            "{kind:?} names {}, which began before the fork span, {}; fork at it or at an earlier span",
            target.what(),
            describe(&target.source.spans[fork_span])
        )));
    }
    if let Some(unit) = target.source.unit_above(target.index) {
        return Err(target.refuse(format!(
            "{kind:?} names {}, which runs as part of {}; patch that span instead",
            target.what(),
            describe(&target.source.spans[unit])
        )));
    }
    Ok(())
}

/// Exactly the member that the type needs; the same rule stands in the CRD.
fn check_members(field: &str, patch: &Patch) -> Result<(), Refused> {
    let refuse = |message: String| Refused::PatchRefused { field: field.to_owned(), message };
    let needed = patch.r#type.member();
    for (name, is_given) in patch.members() {
        if is_given != (name == needed) {
            return Err(refuse(format!(
                "{:?} takes the member `{needed}` and no other; `{name}` {}",
                patch.r#type,
                if is_given { "must go" } else { "is missing" }
            )));
        }
    }
    let refuse = |message: &str| Refused::PatchRefused { field: format!("{field}.command"), message: message.to_owned() };
    if let Some(command) = &patch.command {
        if command.script.is_some() && command.argv.is_some() {
            return Err(refuse("CommandOverride takes `script` or `argv`, not both; keep one of them"));
        }
        if *command == CommandPatch::default() {
            return Err(refuse("CommandOverride changes nothing: give at least one of script, argv, cwd, env, stdin"));
        }
        let missing = match (&command.reads, &command.writes) {
            (Some(_), None) => "writes",
            (None, Some(_)) => "reads",
            _ => return Ok(()),
        };
        return Err(refuse(&format!("`reads` and `writes` are declared together or not at all; `{missing}` is missing")));
    }
    Ok(())
}
