//! The run of a plan, step by step: the same rules as the planner's, on what really happened.
//!
//! [`Replay`] decides what becomes of each span; whoever drives it restores files, runs commands and reports back.
//! It holds no I/O: contents of the workspace come in through [`Workspace`].

use std::collections::HashMap;

use crate::Digest;
use crate::binding::SpanValue;
use crate::contract::{Action, Contract, Rendered, Surroundings, action, input_digest};
use crate::footprint::Pattern;
use crate::fork::ForkSpec;
use crate::model::{Executor, Output, SnapshotRef, Status};
use crate::patch::{Patches, Refused};
use crate::plan::{Level, Plan, files_unknown, own_reasons, plan, recorded_value, same_output, upstream_blocked};
use crate::reason::{Blocked, BlockedReason};
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

/// What is to be done about a span.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Not affected, or reused by early cutoff: its recorded changes are applied.
    Keep {
        reused: bool,
    },
    /// A patch gives its output; its recorded changes are applied.
    Override(Output),
    Block(Vec<Blocked>),
    Execute(Box<Execution>),
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
}

impl Execution {
    /// The first of these changed paths that the step has not declared; folders that a declared path lies in may come and go.
    pub fn undeclared<'a>(&self, changed: &'a [String]) -> Option<&'a str> {
        let declared = |path: &str| {
            let change = Pattern::Path(path.to_owned());
            self.writes.iter().any(|w| w.covers(&change) || w.path().strip_prefix(path).is_some_and(|rest| rest.starts_with('/')))
        };
        changed.iter().map(String::as_str).find(|path| !declared(path))
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

/// The state of a run of a plan.
pub struct Replay<'a> {
    source: &'a Source,
    spec: &'a ForkSpec,
    pub plan: Plan,
    patches: Patches,
    fork_span: usize,
    results: HashMap<usize, Outcome>,
    /// Paths whose content is unknown because of a blocked span; `None`: known again. Later entries win.
    unknown: Vec<(Pattern, Option<usize>)>,
}

/// The recorded state of the workspace that a fork at this span starts from.
pub fn start_snapshot(source: &Source, fork_span: usize) -> Option<SnapshotRef> {
    let at = &source.spans[fork_span];
    at.snapshot_before.or_else(|| source.spans[..fork_span].iter().rev().find_map(|s| s.snapshot_after.or(s.snapshot_before)))
}

impl<'a> Replay<'a> {
    /// Plans the fork anew; the caller compares the digest with the pinned plan's.
    ///
    /// # Errors
    /// As [`plan`].
    pub fn new(source: &'a Source, spec: &'a ForkSpec) -> Result<Self, Refused> {
        let plan = plan(source, spec)?;
        let fork_span = source.find("spec.source.span", &spec.source.run, &spec.source.span)?;
        let patches = Patches::resolve(source, &spec.source, fork_span, &spec.patches)?;
        let mut unknown = Vec::new();
        if start_snapshot(source, fork_span).is_none() {
            unknown.push((Pattern::all(), Some(fork_span)));
        }
        Ok(Self { source, spec, plan, patches, fork_span, results: HashMap::new(), unknown })
    }

    /// Indices of the units to walk, in order.
    pub fn units(&self) -> Vec<usize> {
        (self.fork_span..self.source.spans.len()).filter(|&i| self.source.is_unit(i)).collect()
    }

    /// Decides about a span. Its gap changes have been applied and reported with [`Replay::gap_applied`].
    ///
    /// # Errors
    /// What the workspace gives.
    pub fn step<W: Workspace>(&self, span: usize, workspace: &mut W) -> Result<Step, W::Error> {
        let record = &self.source.spans[span];
        if let Some(patch) = self.patches.output.get(&span) {
            let value = SpanValue { output: Output::overridden(&patch.text, patch.exit_code.unwrap_or(0)), status: Status::Completed };
            return Ok(if same_output(record.output(), record.status(), &value) {
                Step::Keep { reused: false }
            } else {
                Step::Override(value.output)
            });
        }
        let affected = self.plan.spans.iter().any(|p| p.id == record.id);
        if !affected {
            return self.check_unaffected(span, workspace);
        }
        let mut blocked = Vec::new();
        let contract = match Contract::patched(self.source, &self.patches, span) {
            Ok(contract) => contract,
            Err(_) => return Ok(Step::Block(self.own(span, None))),
        };
        let bound = contract.bound_spans(self.source).unwrap_or_default();
        let mut upstreams: Vec<_> = contract.depends_on.iter().chain(&bound).copied().collect();
        upstreams.sort_unstable();
        upstreams.dedup();
        for upstream in upstreams {
            if self.is_blocked(upstream) {
                blocked.push(upstream_blocked(self.source, upstream));
            } else if bound.contains(&upstream) && matches!(self.results.get(&upstream), Some(Outcome::Nothing)) {
                let upstream = &self.source.spans[upstream];
                let message = format!("it needs the output of {:?}, which ended without one", upstream.opening.name);
                blocked.push(Blocked::upstream(BlockedReason::UpstreamEnded, &upstream.id, message));
            }
        }
        if let Some(trigger) = contract.footprint.sees.iter().find_map(|p| self.unknown(p)) {
            blocked.push(files_unknown(self.source, trigger, span));
        }
        if !blocked.is_empty() {
            return Ok(Step::Block(blocked));
        }
        let rendered = match contract.render(self.source, &|i| self.value(i)) {
            Ok(rendered) => rendered,
            Err(error) => {
                let own = self.own(span, None);
                let failed = Blocked::new(
                    BlockedReason::BindingFailed,
                    format!("a binding of {:?} can't be rendered: {error}", record.opening.name),
                );
                return Ok(Step::Block(if own.is_empty() { vec![failed] } else { own }));
            }
        };
        let digest = self.digest(&contract, &rendered, workspace)?;
        if self.spec.reuse.early_cutoff && record.output().is_some() && self.recorded_digest(span, workspace)? == Some(digest) {
            return Ok(Step::Keep { reused: true });
        }
        let own = self.own(span, Some(&rendered));
        if !own.is_empty() {
            return Ok(Step::Block(own));
        }
        Ok(match action(self.source, &rendered, contract.timeout_ms) {
            Ok(action) => Step::Execute(Box::new(Execution { action, rendered, input_digest: digest, writes: contract.footprint.writes })),
            Err(message) => Step::Block(vec![Blocked::new(BlockedReason::IncompleteContract, message)]),
        })
    }

    fn own(&self, span: usize, rendered: Option<&Rendered>) -> Vec<Blocked> {
        own_reasons(self.source, self.spec, &self.patches, span, rendered)
            .into_iter()
            .filter(|(_, level)| *level == Level::Certain)
            .map(|(blocked, _)| blocked)
            .collect()
    }

    fn check_unaffected<W: Workspace>(&self, span: usize, workspace: &mut W) -> Result<Step, W::Error> {
        let record = &self.source.spans[span];
        let keep = Step::Keep { reused: false };
        let Some(before) = record.snapshot_before.filter(|_| record.opening.executor.is_some() && !record.did_not_run()) else {
            return Ok(keep);
        };
        let Ok(contract) = Contract::recorded(self.source, span) else { return Ok(keep) };
        for pattern in &contract.footprint.sees {
            let one = std::slice::from_ref(pattern);
            if workspace.now(one)? != workspace.recorded(&before, one)? {
                return Ok(Step::Inconsistent {
                    span: record.id.clone(),
                    message: format!(
                        "span {:?} should see {pattern} as recorded, and it is not; a span before it wrote outside of what it declared",
                        record.opening.name
                    ),
                });
            }
        }
        Ok(keep)
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
        let Ok(rendered) = contract.render(self.source, &|i| recorded_value(self.source, i)) else { return Ok(None) };
        let values: Vec<_> = contract.depends_on.iter().map(|&i| recorded_value(self.source, i).ok()).collect();
        let content = match (contract.footprint.sees.is_empty(), self.source.spans[span].snapshot_before) {
            (true, _) => None,
            (false, Some(before)) => Some(workspace.recorded(&before, &contract.footprint.sees)?),
            (false, None) => return Ok(None),
        };
        if !contract.footprint.writes.is_empty() && self.source.spans[span].snapshot_after.is_none() {
            return Ok(None);
        }
        let around = Surroundings {
            image: self.source.environment.image.as_deref(),
            dependencies: values.iter().map(Option::as_ref).collect(),
            workspace: content,
        };
        Ok(Some(input_digest(&rendered, &around)))
    }

    fn value(&self, span: usize) -> Result<SpanValue, String> {
        match self.results.get(&span) {
            None => recorded_value(self.source, span),
            Some(Outcome::Value(value)) => Ok(value.clone()),
            Some(Outcome::Blocked) => Err(format!("span {:?} is blocked", self.source.spans[span].opening.name)),
            Some(Outcome::Nothing) => Err(format!("span {:?} ended without an output", self.source.spans[span].opening.name)),
        }
    }

    /// A container whose descendants differ has no known output.
    fn is_blocked(&self, span: usize) -> bool {
        if self.source.is_container(span) {
            return self.results.iter().any(|(&i, _)| self.source.ancestors(i).contains(&span));
        }
        matches!(self.results.get(&span), Some(Outcome::Blocked))
    }

    fn unknown(&self, pattern: &Pattern) -> Option<usize> {
        let mut seen: Vec<&Pattern> = Vec::new();
        for (entry, trigger) in self.unknown.iter().rev() {
            if !entry.overlaps(pattern) || seen.iter().any(|s| s.covers(entry)) {
                continue;
            }
            if trigger.is_some() {
                return *trigger;
            }
            if entry.covers(pattern) {
                return None;
            }
            seen.push(entry);
        }
        None
    }

    fn known_again(&mut self, paths: &[String]) {
        if !self.unknown.is_empty() {
            self.unknown.extend(paths.iter().map(|p| (Pattern::Path(p.clone()), None)));
        }
    }

    /// The recorded changes between the span and its predecessor have been applied.
    pub fn gap_applied(&mut self, span: usize) {
        let paths = self.source.changed(span).before.clone();
        self.known_again(&paths);
    }

    /// The span was kept: its recorded changes have been applied.
    pub fn kept(&mut self, span: usize) {
        let mut paths = self.source.changed(span).during.clone();
        paths.extend(self.written_path(span));
        self.known_again(&paths);
    }

    /// A patch gave the span's output, and its recorded changes have been applied.
    pub fn overridden(&mut self, span: usize, output: Output) {
        self.kept(span);
        self.results.insert(span, Outcome::Value(SpanValue { output, status: Status::Completed }));
    }

    pub fn blocked(&mut self, span: usize) {
        self.results.insert(span, Outcome::Blocked);
        let writes = Contract::patched(self.source, &self.patches, span).map_or_else(|_| vec![Pattern::all()], |c| c.footprint.writes);
        let changed = self.source.changed(span).during.iter().cloned().map(Pattern::Path);
        self.unknown.extend(writes.into_iter().chain(changed).map(|p| (p, Some(span))));
    }

    /// The span was executed and gave this; `None`: it ended without an output.
    pub fn executed(&mut self, span: usize, status: Status, output: Option<Output>) {
        let path: Vec<_> = self.written_path(span).into_iter().collect();
        self.known_again(&path);
        let result = output.map_or(Outcome::Nothing, |output| Outcome::Value(SpanValue { output, status }));
        self.results.insert(span, result);
    }

    fn written_path(&self, span: usize) -> Option<String> {
        match &self.source.spans[span].opening.executor {
            Some(Executor::FileWrite { path, .. }) => crate::footprint::relative(path, self.source.root()).ok(),
            _ => None,
        }
    }
}
