//! A fork whose patches have found their targets: what planning and replaying start from.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use crate::Digest;
use crate::answers::Answers;
use crate::binding::{self, Hole, SpanValue};
use crate::contract::{Contract, Rendered};
use crate::footprint::{Pattern, pattern, relative};
use crate::fork::{ForkSpec, ModelMode};
use crate::graph::Traits;
use crate::model::{Executor, Fidelity, Output, RunEnvironment, SnapshotRef, Status};
use crate::patch::{Contents, Patch, Patches, Refused};
use crate::source::Source;

/// A fork, checked.
pub struct Prepared<'a> {
    pub source: &'a Source,
    pub spec: &'a ForkSpec,
    pub patches: Patches,
    /// The span that the fork names.
    pub fork_span: usize,
    /// Where its walk begins, which may be earlier.
    pub first: usize,
    /// Nothing is patched.
    pub check: bool,
    pub environment: RunEnvironment,
    pub image_changed: bool,
    answers: Option<Answers>,
    /// By span; each with its place in the spec.
    approvals: BTreeMap<usize, Vec<(usize, Digest)>>,
    /// Recorded inputs that were rendered already; they are asked for often.
    rendered: Mutex<BTreeMap<usize, Option<Arc<Rendered>>>>,
}

/// What must be looked up in the recorded workspaces before a fork can be planned.
#[derive(Clone, Debug, Default)]
pub struct FactsNeeded {
    /// Per target: the state that it is compared with, and the files that are written.
    pub files: Vec<(usize, Option<SnapshotRef>, Vec<crate::patch::FileOverride>)>,
    /// Per target: the state that it is compared with, and the content digest that is named.
    pub snapshots: Vec<(usize, Option<SnapshotRef>, Digest)>,
}

impl<'a> Prepared<'a> {
    /// # Errors
    /// An unknown or ambiguous span, a patch that does not fit, content or a snapshot that is not there.
    pub fn new(source: &'a Source, contents: &Contents, spec: &'a ForkSpec) -> Result<Self, Refused> {
        let fork = Self::without_facts(source, contents, spec)?;
        for (target, snapshot) in &fork.patches.snapshot {
            if snapshot.fact.is_none() {
                let span = &source.spans[*target].opening;
                let message = format!(
                    "no run of this namespace was recorded with a workspace whose content digest is {}, which span {:?} ({}) is to start from; `kubectl replay show RUN SPAN -o json` has those around a span",
                    snapshot.content, span.name, span.kind
                );
                return Err(Refused::PatchRefused { field: format!("{}.snapshot.digest", snapshot.field), message });
            }
        }
        Ok(fork)
    }

    /// Which facts about the recorded workspaces the patches need; [`Source::with_facts`] takes them.
    ///
    /// # Errors
    /// As [`Prepared::new`], but for snapshots that are not there.
    pub fn facts_needed(source: &'a Source, contents: &Contents, spec: &'a ForkSpec) -> Result<FactsNeeded, Refused> {
        let mut needed = Self::without_facts(source, contents, spec)?.needed();
        let before = |target: usize| {
            let unit = (target..source.spans.len()).find(|&i| source.is_unit(i));
            unit.and_then(|unit| source.state_for_patches(unit))
        };
        needed.files.iter_mut().for_each(|(target, state, _)| *state = before(*target));
        needed.snapshots.iter_mut().for_each(|(target, state, _)| *state = before(*target));
        Ok(needed)
    }

    /// The same without the states, for who knows these otherwise.
    pub fn needed(&self) -> FactsNeeded {
        FactsNeeded {
            files: self.patches.files.iter().map(|(t, files)| (*t, None, files.clone())).collect(),
            snapshots: self.patches.snapshot.iter().map(|(t, snapshot)| (*t, None, snapshot.content)).collect(),
        }
    }

    /// As [`Prepared::new`], before the facts are there.
    ///
    /// # Errors
    /// As [`Prepared::facts_needed`].
    pub fn without_facts(source: &'a Source, contents: &Contents, spec: &'a ForkSpec) -> Result<Self, Refused> {
        spec.check()?;
        let fork_span = source.find("spec.source.span", &spec.source.run, &spec.source.span)?;
        let check = spec.patches.is_empty();
        let first = source.first_of(fork_span, check);
        let patches =
            if check { Patches::default() } else { Patches::resolve(source, contents, &spec.source, fork_span, first, &spec.patches)? };
        let mut environment = source.environment.clone();
        if let Some(image) = &spec.sandbox.image {
            environment.image = Some(image.clone());
        }
        if let Some(uid) = spec.sandbox.run_as_user {
            environment.uid = Some(uid);
        }
        let image_changed = source.environment.image.is_some() && source.environment.image != environment.image;
        let mut approvals: BTreeMap<usize, Vec<(usize, Digest)>> = BTreeMap::new();
        for (n, approval) in spec.approvals.iter().enumerate() {
            let field = format!("spec.approvals[{n}]");
            let span = source.find(&format!("{field}.span"), &spec.source.run, &approval.span)?;
            let digest: Digest = approval
                .input_digest
                .parse()
                .map_err(|e| Refused::SpecInvalid { field: format!("{field}.inputDigest"), message: format!("{e}") })?;
            approvals.entry(span).or_default().push((n, digest));
        }
        let answers = match spec.model.mode {
            ModelMode::Recorded => Some(Answers::of(source, contents, &spec.model)?),
            _ => None,
        };
        let rendered = Mutex::default();
        Ok(Self { source, spec, patches, fork_span, first, check, environment, image_changed, answers, approvals, rendered })
    }

    /// Indices of the units to walk, in order.
    pub fn units(&self) -> impl Iterator<Item = usize> + '_ {
        (self.first..self.source.spans.len()).filter(|&i| self.source.is_unit(i))
    }

    /// Paths that patches name: of files, of given workspaces, and of what new commands may see and write.
    pub fn paths(&self) -> Vec<Pattern> {
        let patches = &self.patches;
        let files = patches.files.values().flatten().map(|f| Pattern::Path(f.path.clone()));
        let given = patches.snapshot.values().filter_map(|s| s.fact.as_ref()).flat_map(|f| f.changed.iter().flatten());
        let mut paths: Vec<Pattern> = files.chain(given.cloned().map(Pattern::Path)).collect();
        for (target, _) in patches.command.iter().filter(|(_, command)| command.voids_footprint()) {
            if let Ok(contract) = Contract::patched(self.source, patches, *target) {
                paths.extend(contract.footprint.sees.into_iter().chain(contract.footprint.writes));
            }
        }
        paths
    }

    /// What the templates of patches use, by target.
    pub fn holes(&self) -> Vec<(usize, Hole)> {
        let commands = self.patches.command.iter().flat_map(|(target, command)| {
            let texts = [&command.script, &command.cwd, &command.stdin].into_iter().flatten();
            texts.chain(command.argv.iter().flatten()).map(|text| (*target, text))
        });
        let prompts = self.patches.prompt.iter().flat_map(|(target, prompt)| {
            let all = prompt.all.iter().flatten().map(|m| &m.content);
            prompt.system.iter().chain(prompt.messages.values()).chain(all).map(|text| (*target, text))
        });
        let texts = commands.chain(prompts);
        texts.flat_map(|(target, text)| binding::holes(text).unwrap_or_default().into_iter().map(move |hole| (target, hole))).collect()
    }

    pub fn answers(&self) -> Option<&Answers> {
        self.answers.as_ref()
    }

    /// Whether results of other forks may stand for an execution of a span.
    pub(crate) fn may_use_cache(&self, traits: Traits) -> bool {
        // A recorded answer needs no cache, and where nobody is to answer, nobody's answer will do.
        let answered = !traits.has(Traits::MODEL) || matches!(self.spec.model.mode, ModelMode::Command | ModelMode::Endpoint);
        let cacheable = traits.has(Traits::CACHEABLE) && !traits.has(Traits::INPUTS_UNKNOWN);
        cacheable && answered && self.spec.reuse.result_cache && !self.check
    }

    /// Approvals by place in the spec, each with its span.
    pub(super) fn approved(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.approvals.iter().flat_map(|(span, given)| given.iter().map(|(n, _)| (*n, *span)))
    }

    pub fn is_approved(&self, span: usize, arguments: &Digest) -> bool {
        self.approvals.get(&span).is_some_and(|given| given.iter().any(|(_, digest)| digest == arguments))
    }

    /// The recorded inputs, rendered; `None` where the record can't give them.
    pub fn recorded_inputs(&self, span: usize) -> Option<Arc<Rendered>> {
        let cache = || self.rendered.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = cache().get(&span) {
            return known.clone();
        }
        let contract = Contract::recorded(self.source, span).ok();
        let rendered = contract.and_then(|c| c.render(self.source, &|i| recorded_value(self.source, i)).ok()).map(Arc::new);
        cache().insert(span, rendered.clone());
        rendered
    }

    /// The span was not run when recorded, and no patch changes that.
    pub fn stays_out(&self, span: usize) -> bool {
        self.source.spans[span].did_not_run() && !self.is_changed_by_patch(span)
    }

    /// Whether a patch names the span and changes something about it.
    fn is_changed_by_patch(&self, span: usize) -> bool {
        if !self.patches.names(span) {
            return false;
        }
        match (Contract::recorded(self.source, span), Contract::patched(self.source, &self.patches, span)) {
            (Ok(recorded), Ok(patched)) => recorded.fields != patched.fields || recorded.footprint != patched.footprint,
            _ => true,
        }
    }

    /// The output that a patch gives, unless it is the recorded one.
    pub fn overriding(&self, span: usize) -> Option<SpanValue> {
        let output = self.patches.output.get(&span)?;
        let value = SpanValue { output: output.clone(), status: Status::Completed };
        let record = &self.source.spans[span];
        (!same_output(record.output(), record.status(), &value)).then_some(value)
    }

    /// The output that a patch gives; where it is the recorded one, as it was recorded.
    pub fn given(&self, span: usize) -> Option<SpanValue> {
        self.patches.output.get(&span)?;
        self.overriding(span).or_else(|| recorded_value(self.source, span).ok())
    }

    /// The paths that change when the span's recorded result is kept or its output is overridden; files that a patch writes on the
    /// same span stand where its output is given.
    pub fn kept_paths(&self, span: usize) -> Vec<String> {
        let mut paths = self.source.kept_changes(span).to_vec();
        match self.source.entangled(span) {
            None => paths.extend(self.written_path(span)),
            Some(group) if group.members.last() == Some(&span) => paths.extend(group.members.iter().filter_map(|&m| self.written_path(m))),
            Some(_) => {}
        }
        if self.patches.output.contains_key(&span) {
            let patched = self.patches.files.get(&span).map_or(&[][..], Vec::as_slice);
            paths.retain(|p| patched.iter().all(|f| f.path != *p));
        }
        paths.sort();
        paths.dedup();
        paths
    }

    /// The path that a FileWrite set when recorded.
    pub fn written_path(&self, span: usize) -> Option<String> {
        self.target_path(span).filter(|_| self.source.spans[span].status() == Status::Completed)
    }

    /// The path that a FileWrite sets.
    pub fn target_path(&self, span: usize) -> Option<String> {
        match &self.source.spans[span].opening.executor {
            Some(Executor::FileWrite { path, .. }) => relative(path, self.source.root()).ok(),
            _ => None,
        }
    }

    /// What a span may leave behind when it runs, or leave unknown when it is blocked: what it declares to write, and what it changed
    /// when recorded.
    pub fn may_write(&self, span: usize) -> Vec<Pattern> {
        let writes = Contract::patched(self.source, &self.patches, span).map_or_else(|_| vec![Pattern::all()], |c| c.footprint.writes);
        writes.into_iter().chain(self.source.changed(span).during.iter().cloned().map(Pattern::Path)).collect()
    }

    /// Whether a patch gives the workspace another content than the recorded one, or may.
    pub fn changes_workspace(&self) -> bool {
        let given = self.patches.snapshot.values().map(|s| s.fact.as_ref().and_then(|f| f.changed.as_ref()));
        self.patches.files.values().flatten().any(|f| f.same != Some(true)) || given.into_iter().any(|c| c.is_none_or(|c| !c.is_empty()))
    }

    /// The paths that nobody knows once the span has been passed over, as a record names them: in order, each once.
    pub fn leaves_unknown(&self, span: usize) -> Vec<String> {
        let patterns = self.may_write(span);
        if patterns.contains(&Pattern::all()) {
            return vec![Pattern::all().declared()];
        }
        let unknown: BTreeSet<String> = patterns.iter().map(Pattern::declared).collect();
        unknown.into_iter().collect()
    }

    /// The patches that a fork of this fork takes over, each with its target's id: what gives outputs, files and workspaces. A new
    /// one on the same field wins over one that this fork took over itself.
    pub fn to_inherit(&self) -> Vec<Patch> {
        let source = self.source;
        let gives = |p: &Patch| p.output.is_some() || p.retrieval.is_some() || p.files.is_some() || p.snapshot.is_some();
        let mut own = Vec::new();
        for patch in self.spec.patches.iter().filter(|p| gives(p)) {
            let index = match &patch.span {
                Some(span) => source.find("span", &self.spec.source.run, span).ok(),
                None => Some(self.fork_span),
            };
            own.extend(index.map(|i| Patch { span: Some(source.spans[i].id.clone()), ..patch.clone() }));
        }
        let mut all = Vec::new();
        for patch in &source.inherited {
            let later = patch.span.as_deref().and_then(|id| source.index(id)).is_some_and(|i| i >= self.first);
            let mut patch = patch.clone();
            for new in own.iter().filter(|new| later && new.span == patch.span) {
                if new.output.is_some() || new.retrieval.is_some() {
                    (patch.output, patch.retrieval) = (None, None);
                }
                if new.snapshot.is_some() {
                    patch.snapshot = None;
                }
                if let (Some(files), Some(by)) = (&mut patch.files, &new.files) {
                    let relative = |path: &str| relative(path, source.root()).unwrap_or_default();
                    files.retain(|f| by.iter().all(|b| relative(&b.path) != relative(&f.path)));
                }
            }
            patch.files = patch.files.filter(|files| !files.is_empty());
            if gives(&patch) {
                all.push(patch);
            }
        }
        all.extend(own);
        all
    }

    /// Paths that forks before this one left unknown where the walk begins: with the blocked span, or `None` once known again.
    pub fn unknown_at_start(&self) -> Vec<(Pattern, Option<usize>)> {
        let source = self.source;
        let mut unknown: Vec<(Pattern, Option<usize>)> = Vec::new();
        for (i, span) in source.spans[..self.first].iter().enumerate() {
            if let Some(closing) = span.closing.as_ref().filter(|c| !c.unknown.is_empty()) {
                let patterns = closing.unknown.iter().filter_map(|text| pattern(text, source.root()).ok());
                unknown.extend(patterns.map(|p| (p, Some(i))));
            } else if !unknown.is_empty() {
                let changed = source.changed(i);
                let during = if span.fidelity == Fidelity::Reexecuted { &[][..] } else { &changed.during[..] };
                let known = changed.before.iter().chain(during).cloned().chain(self.written_path(i));
                unknown.extend(known.map(|p| (Pattern::Path(p), None)));
            }
        }
        if !unknown.is_empty() {
            // The state that it starts from shows them.
            unknown.extend(source.changed(self.first).before.iter().map(|p| (Pattern::Path(p.clone()), None)));
        }
        if source.start_state(self.first).is_none() {
            unknown.push((Pattern::all(), Some(self.first)));
        }
        unknown
    }
}

pub(crate) fn same_output(recorded: Option<&Output>, status: Status, value: &SpanValue) -> bool {
    recorded.is_some_and(|r| {
        r.text == value.output.text && r.stderr == value.output.stderr && r.exit_code.unwrap_or(0) == value.output.exit_code.unwrap_or(0)
    }) && status == value.status
}

/// A recorded output as a template sees it.
pub(crate) fn recorded_value(source: &Source, span: usize) -> Result<SpanValue, String> {
    let record = &source.spans[span];
    let output = record.output().ok_or_else(|| format!("span {:?} ended without an output", record.opening.name))?;
    Ok(SpanValue { output: output.clone(), status: record.status() })
}
