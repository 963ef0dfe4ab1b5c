//! The run of a plan, step by step: the same rules as the planner's, on what really happened.
//!
//! [`Replay`] decides what becomes of each span; whoever drives it restores files, runs commands and reports back.
//! It holds no I/O: contents of the workspace come in through [`Workspace`].

mod entangled;
mod step;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::Digest;
use crate::answers::Answer;
use crate::binding::SpanValue;
use crate::contract::{Action, Contract, Rendered, Surroundings, input_digest};
use crate::digest::Hasher;
use crate::footprint::{Footprint, Pattern};
use crate::model::{Output, SnapshotRef, Status};
use crate::plan::{self, Plan, Prepared, recorded_value, same_output};
use crate::reason::Blocked;
use crate::source::Source;

/// The contents that input digests cover. Equal digests mean equal existence, types, contents, x bits and link targets.
pub trait Workspace {
    type Error;

    /// Content of the patterns in the fork's workspace as it is now.
    ///
    /// # Errors
    /// Whatever keeps it from being read.
    fn now(&mut self, patterns: &[Pattern]) -> Result<Digest, Self::Error>;

    /// Content of the patterns in a recorded state.
    ///
    /// # Errors
    /// Whatever keeps it from being read.
    fn recorded(&mut self, snapshot: &SnapshotRef, patterns: &[Pattern]) -> Result<Digest, Self::Error>;
}

/// Something that is to happen to the workspace without any step being run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkspaceChange {
    /// Everything becomes as in this state.
    Restore(SnapshotRef),
    /// These paths become as they are in the recorded state, whatever was there; one that it lacks goes.
    Recorded { state: SnapshotRef, paths: Vec<String> },
    /// A path becomes this file, whatever was there.
    File { path: String, content: Arc<[u8]>, executable: bool },
}

/// What is to be done about a span.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Not affected, or reused by early cutoff: its recorded changes are applied.
    Keep {
        reused: bool,
        changes: Vec<WorkspaceChange>,
    },
    /// A patch gives its output; its recorded changes are applied.
    Override {
        output: Output,
        changes: Vec<WorkspaceChange>,
    },
    /// It can't run. Nobody knows the paths that it may write from here on.
    Block {
        blocked: Vec<Blocked>,
        unknown: Vec<String>,
    },
    Execute(Box<Execution>),
    /// A recorded answer is the model's.
    Serve(Box<Execution>, Answer),
    /// A result that another fork left under this key is its result; if there is none, the other step is.
    Cached {
        key: Digest,
        otherwise: Box<Step>,
    },
    /// Of a check: the step can't be run on its recorded inputs, and stays as recorded.
    NotExecutable(Vec<Blocked>),
    /// A span that the plan calls unaffected sees another workspace than the recorded one: the fork must end.
    Inconsistent {
        span: String,
        message: String,
    },
}

/// A step to be executed.
#[derive(Clone, Debug, PartialEq)]
pub struct Execution {
    pub action: Action,
    pub rendered: Rendered,
    pub input_digest: Digest,
    /// What it may change; any other change ends the fork.
    pub writes: Vec<Pattern>,
    /// Under which its result may stand for another fork's, if it ends by itself.
    pub cache_key: Option<Digest>,
}

impl Execution {
    /// The first of these changed paths that the step has not declared; folders that a declared path lies in may come and go.
    pub fn undeclared<'a>(&self, changed: &'a [String]) -> Option<&'a str> {
        changed.iter().map(String::as_str).find(|path| !Footprint::declares(&self.writes, path))
    }
}

/// What came of a span in the fork.
#[derive(Clone, Debug)]
enum Outcome {
    Value(SpanValue),
    Blocked,
    /// It ended without an output.
    Nothing,
}

/// What a check found of one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reproduced {
    Identical,
    /// In which respects.
    Differs(Vec<&'static str>),
}

/// The state of a run of a plan.
pub struct Replay<'a> {
    fork: &'a Prepared<'a>,
    source: &'a Source,
    pub plan: Plan,
    /// What a reader should know of the run, beyond the plan's warnings.
    pub warnings: Vec<String>,
    /// Place in the plan, by span.
    planned: HashMap<usize, usize>,
    results: HashMap<usize, Outcome>,
    /// Containers of spans whose output is not as recorded.
    changed_containers: HashSet<usize>,
    /// Some output is not as recorded.
    drifted: bool,
    /// By first member: whether an entangled group is executed.
    groups: HashMap<usize, bool>,
    /// Paths whose content is unknown because of a blocked span; `None`: known again. Later entries win.
    unknown: Vec<(Pattern, Option<usize>)>,
    /// Paths that the fork changed.
    touched: HashSet<String>,
}

impl<'a> Replay<'a> {
    /// Plans the fork; the caller compares the digest with the pinned plan's.
    pub fn new(fork: &'a Prepared<'a>) -> Self {
        let plan = plan::of(fork);
        let planned = plan.spans.iter().enumerate().filter_map(|(n, p)| Some((fork.source.index(&p.id)?, n))).collect();
        Self {
            fork,
            source: fork.source,
            plan,
            warnings: Vec::new(),
            planned,
            results: HashMap::new(),
            changed_containers: HashSet::new(),
            drifted: false,
            groups: HashMap::new(),
            unknown: fork.unknown_at_start(),
            touched: HashSet::new(),
        }
    }

    /// What happens to the workspace before a span is looked at: what changed outside of any span, then what patches give.
    pub fn before(&mut self, span: usize) -> Vec<WorkspaceChange> {
        let (fork, record) = (self.fork, &self.source.spans[span]);
        let mut changes = Vec::new();
        if fork.check {
            let runs = self.planned.get(&span).is_some_and(|&n| self.plan.spans[n].mark.is_some_and(plan::Mark::may_run));
            changes.extend(record.snapshot_before.filter(|_| runs).map(WorkspaceChange::Restore));
            return changes;
        }
        let gap = &self.source.changed(span).before;
        if let (Some(state), false, true) = (record.snapshot_before, gap.is_empty(), span != fork.first) {
            if let Some(path) = gap.iter().find(|p| self.touched.contains(*p)) {
                self.warnings.push(format!(
                    "{path:?} was changed outside of any span before {:?} when recorded, and that change was applied over the fork's own",
                    record.opening.name
                ));
            }
            changes.push(WorkspaceChange::Recorded { state, paths: gap.clone() });
            self.as_recorded_again(gap);
        }
        for target in fork.patches.targets_before(self.source, span) {
            if let Some(fact) = fork.patches.snapshot.get(&target).and_then(|s| s.fact.as_ref()) {
                changes.push(WorkspaceChange::Restore(fact.state));
                self.unknown.clear();
                match &fact.changed {
                    Some(paths) => self.touched.extend(paths.iter().cloned()),
                    None => drop(self.touched.insert(String::new())),
                }
            }
            for file in fork.patches.files.get(&target).into_iter().flatten() {
                changes.push(WorkspaceChange::File { path: file.path.clone(), content: file.content.clone(), executable: file.executable });
                self.known_again(std::slice::from_ref(&file.path));
                // What the record has there already is no change.
                if file.same != Some(true) {
                    self.touched.insert(file.path.clone());
                }
            }
        }
        changes
    }

    /// What a span's recorded result does to the workspace.
    fn kept_changes(&self, span: usize) -> Vec<WorkspaceChange> {
        let paths = self.fork.kept_paths(span);
        if paths.is_empty() {
            return Vec::new();
        }
        match self.source.state_after(span) {
            Some(state) => vec![WorkspaceChange::Recorded { state, paths }],
            None => self.written_file(span).into_iter().collect(),
        }
    }

    /// A recorded write whose workspace was not captured.
    fn written_file(&self, span: usize) -> Option<WorkspaceChange> {
        let path = self.fork.written_path(span)?;
        let rendered = self.fork.recorded_inputs(span)?;
        let content = rendered.get("content").and_then(serde_json::Value::as_str)?.as_bytes().into();
        Some(WorkspaceChange::File { path, content, executable: rendered.get("executable") == Some(&serde_json::Value::Bool(true)) })
    }

    fn digest<W: Workspace>(&self, contract: &Contract, rendered: &Rendered, workspace: &mut W) -> Result<Digest, W::Error> {
        let values: Vec<_> = contract.depends_on.iter().map(|&i| self.value(i).ok()).collect();
        let content = if contract.footprint.sees.is_empty() { None } else { Some(workspace.now(&contract.footprint.sees)?) };
        let recorded = self.source.environment.image.as_deref();
        Ok(input_digest(
            rendered,
            &Surroundings {
                image: recorded.and(self.plan.environment.image.as_deref()),
                dependencies: values.iter().map(Option::as_ref).collect(),
                workspace: content,
            },
        ))
    }

    /// The digest of the recorded inputs, by the same code; `None` where the record can't give it.
    fn recorded_digest<W: Workspace>(&self, span: usize, workspace: &mut W) -> Result<Option<Digest>, W::Error> {
        let Ok(contract) = Contract::recorded(self.source, span) else { return Ok(None) };
        let Some(rendered) = self.fork.recorded_inputs(span) else { return Ok(None) };
        let values: Vec<_> = contract.depends_on.iter().map(|&i| recorded_value(self.source, i).ok()).collect();
        let content = match (contract.footprint.sees.is_empty(), self.source.state_before(span)) {
            (true, _) => None,
            (false, Some(before)) => Some(workspace.recorded(&before, &contract.footprint.sees)?),
            (false, None) => return Ok(None),
        };
        let around = Surroundings {
            image: self.source.environment.image.as_deref(),
            dependencies: values.iter().map(Option::as_ref).collect(),
            workspace: content,
        };
        Ok(Some(input_digest(&rendered, &around)))
    }

    /// The key of the result cache; everything that the sandbox is built from counts too, and for a model call who answers.
    fn cache_key(&self, span: usize, digest: Digest) -> Option<Digest> {
        let asks = matches!(self.source.spans[span].opening.executor, Some(crate::model::Executor::Model { .. }));
        let key = || {
            let hasher = Hasher::new("result").value("inputs", &digest).value("environment", &self.plan.environment);
            if asks { hasher.value("model", &self.fork.spec.model).finish() } else { hasher.finish() }
        };
        self.fork.may_use_cache(crate::graph::Traits::of_record(&self.source.spans[span])).then(key)
    }

    fn value(&self, span: usize) -> Result<SpanValue, String> {
        match self.results.get(&span) {
            None => recorded_value(self.source, span),
            Some(Outcome::Value(value)) => Ok(value.clone()),
            Some(Outcome::Blocked) => Err(format!("span {:?} is blocked", self.source.spans[span].opening.name)),
            Some(Outcome::Nothing) => Err(format!("span {:?} ended without an output", self.source.spans[span].opening.name)),
        }
    }

    /// No output of it is known: it is blocked, was so in a fork before this one, or holds spans that differ.
    fn is_blocked(&self, span: usize) -> bool {
        match self.results.get(&span) {
            Some(outcome) => matches!(outcome, Outcome::Blocked),
            None => self.changed_containers.contains(&span) || self.source.was_left_out(span),
        }
    }

    fn unknown(&self, pattern: &Pattern) -> Vec<usize> {
        let (mut seen, mut triggers): (Vec<&Pattern>, Vec<usize>) = (Vec::new(), Vec::new());
        for (entry, trigger) in self.unknown.iter().rev() {
            if !entry.overlaps(pattern) || seen.iter().any(|s| s.covers(entry)) {
                continue;
            }
            triggers.extend(trigger.filter(|t| !triggers.contains(t)));
            if entry.covers(pattern) {
                break;
            }
            seen.push(entry);
        }
        triggers
    }

    fn known_again(&mut self, paths: &[String]) {
        if !self.unknown.is_empty() {
            self.unknown.extend(paths.iter().map(|p| (Pattern::Path(p.clone()), None)));
        }
    }

    /// What was recorded of these paths has been applied.
    fn as_recorded_again(&mut self, paths: &[String]) {
        self.known_again(paths);
        for path in paths {
            self.touched.remove(path);
        }
    }

    /// The span's output is not as recorded.
    fn drift(&mut self, span: usize) {
        self.drifted = true;
        self.changed_containers.extend(self.source.ancestors(span));
    }

    fn leave_out_inner(&mut self, span: usize) {
        let inner = self.source.inner(span).iter().map(|&i| (i, Outcome::Blocked));
        self.results.extend(inner);
    }

    /// The span was kept: its recorded changes have been applied.
    pub fn kept(&mut self, span: usize) {
        let paths = self.fork.kept_paths(span);
        self.as_recorded_again(&paths);
    }

    /// A patch gave the span's output, and its recorded changes have been applied, where the record shows them.
    pub fn overridden(&mut self, span: usize, output: Output) {
        if self.source.shows_changes(span) {
            self.kept(span);
        } else {
            let patterns = self.fork.may_write(span);
            self.unknown.extend(patterns.into_iter().map(|p| (p, Some(span))));
        }
        self.results.insert(span, Outcome::Value(SpanValue { output, status: Status::Completed }));
        if self.fork.overriding(span).is_some() {
            self.drift(span);
        }
        self.leave_out_inner(span);
    }

    pub fn blocked(&mut self, span: usize) {
        self.results.insert(span, Outcome::Blocked);
        self.drift(span);
        self.leave_out_inner(span);
        let patterns = self.fork.may_write(span);
        self.unknown.extend(patterns.into_iter().map(|p| (p, Some(span))));
    }

    /// The span was executed, or another fork's result stands for it; `None`: it ended without an output. `changed` are the paths
    /// that it changed.
    pub fn executed(&mut self, span: usize, status: Status, output: Option<Output>, changed: &[String]) {
        if let Some(path) = self.fork.target_path(span).filter(|_| status == Status::Completed) {
            self.known_again(&[path]);
        }
        self.touched.extend(changed.iter().cloned());
        let record = &self.source.spans[span];
        let result = output.map(|output| SpanValue { output, status });
        if !result.as_ref().is_some_and(|value| same_output(record.output(), record.status(), value)) {
            self.drift(span);
        }
        self.results.insert(span, result.map_or(Outcome::Nothing, Outcome::Value));
        self.leave_out_inner(span);
    }

    /// Whether a step of a check gave what it gave when recorded.
    ///
    /// # Errors
    /// What the workspace gives.
    pub fn reproduced<W: Workspace>(
        &self,
        span: usize,
        status: Status,
        output: Option<&Output>,
        workspace: &mut W,
    ) -> Result<Reproduced, W::Error> {
        let record = &self.source.spans[span];
        let recorded = record.output();
        let mut respects = Vec::new();
        if record.status() != status {
            respects.push("status");
        }
        let differ = |f: fn(&Output) -> &String| recorded.map(f) != output.map(f);
        for (name, differs) in [
            ("output", differ(|o| &o.text)),
            ("stderr", differ(|o| &o.stderr)),
            ("exit code", recorded.map(|o| o.exit_code.unwrap_or(0)) != output.map(|o| o.exit_code.unwrap_or(0))),
        ] {
            if differs {
                respects.push(name);
            }
        }
        let writes = self.source.footprint(span).writes;
        if let (Some(after), false) = (record.snapshot_after, writes.is_empty())
            && workspace.now(&writes)? != workspace.recorded(&after, &writes)?
        {
            respects.push("files");
        }
        Ok(if respects.is_empty() { Reproduced::Identical } else { Reproduced::Differs(respects) })
    }
}
