//! The planner: which spans a fork affects, before anything runs.
//!
//! It walks the units in sequence order from the fork span with what is known beforehand (recorded values and those
//! that patches give) and holds for every output and every path whether it may differ and whether it may be unknown
//! because of a blocked span. The result is an upper bound: what runs is in "will run" or "may run".

mod paths;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Digest;
use crate::binding::SpanValue;
use crate::contract::{Contract, Field, Rendered};
use crate::digest::Hasher;
use crate::footprint::Pattern;
use crate::fork::{ForkSpec, ModelMode};
use crate::model::{Executor, Output, ReplayPolicy, RunEnvironment, SpanKind, Status, Verdict};
use crate::patch::{Patches, Refused};
use crate::reason::{Blocked, BlockedReason, Cause};
use crate::source::Source;

pub use paths::Level;
use paths::{PathState, Paths, merge};

/// What will become of an affected span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Mark {
    /// Its digest is known to differ, and nothing blocks it.
    WillRun,
    MayRun,
    WillBeBlocked,
    /// It never runs: it is blocked if its inputs differ.
    MayBeBlocked,
    MayRunOrBeBlocked,
}

impl Mark {
    pub fn may_run(self) -> bool {
        matches!(self, Mark::WillRun | Mark::MayRun | Mark::MayRunOrBeBlocked)
    }

    pub fn may_block(self) -> bool {
        matches!(self, Mark::WillBeBlocked | Mark::MayBeBlocked | Mark::MayRunOrBeBlocked)
    }
}

/// One affected or overridden span of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedSpan {
    pub id: String,
    pub name: String,
    pub kind: SpanKind,
    /// Absent where a patch gives the output, so that the span is not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<Mark>,
    pub causes: Vec<Cause>,
    /// Ids of the spans that it is affected through.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub triggers: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<Blocked>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlanCounts {
    pub will_run: i64,
    pub may_run: i64,
    pub may_run_or_block: i64,
    pub will_block: i64,
    pub may_block: i64,
    pub overridden: i64,
    pub reusable: i64,
}

/// What a fork will do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// The same patches on the same run have the same digest, always.
    pub digest: Digest,
    /// Id of the fork span.
    pub fork_span: String,
    pub counts: PlanCounts,
    /// Affected and overridden spans in order.
    pub spans: Vec<PlannedSpan>,
    /// What the sandbox is built from: the recorded values or what the fork asks for.
    pub environment: RunEnvironment,
}

impl Plan {
    /// Whether any span may be executed, so that a sandbox is needed.
    pub fn needs_sandbox(&self) -> bool {
        self.spans.iter().any(|s| s.mark.is_some_and(Mark::may_run))
    }

    /// Nothing is affected: the fork equals its source but for overridden outputs.
    pub fn is_empty(&self) -> bool {
        self.spans.iter().all(|s| s.mark.is_none())
    }
}

/// A span's output as known before anything runs.
#[derive(Clone, Debug, Default)]
struct OutputState {
    differs: Level,
    blocked: Level,
    /// Given by a patch.
    known: Option<SpanValue>,
}

struct Planner<'a> {
    source: &'a Source,
    spec: &'a ForkSpec,
    patches: Patches,
    outputs: Vec<OutputState>,
    paths: Paths,
    image_changed: bool,
    planned: Vec<PlannedSpan>,
    counts: PlanCounts,
}

/// Plans a fork.
///
/// # Errors
/// An unknown or ambiguous span, or a patch that does not fit.
pub fn plan(source: &Source, spec: &ForkSpec) -> Result<Plan, Refused> {
    let fork_span = source.find("spec.source.span", &spec.source.run, &spec.source.span)?;
    let patches = Patches::resolve(source, &spec.source, fork_span, &spec.patches)?;
    let environment = environment(source, spec);
    let image_changed = source.environment.image.is_some() && source.environment.image != environment.image;
    let mut planner = Planner {
        source,
        spec,
        patches,
        outputs: vec![OutputState::default(); source.spans.len()],
        paths: Paths::default(),
        image_changed,
        planned: Vec::new(),
        counts: PlanCounts::default(),
    };
    if crate::replay::start_snapshot(source, fork_span).is_none() {
        planner.paths.set(Pattern::all(), PathState { differs: Level::No, blocked: Level::Certain, triggers: vec![fork_span] });
    }
    let units = (0..source.spans.len()).filter(|&i| source.is_unit(i)).count() as i64;
    for span in fork_span..source.spans.len() {
        if source.is_unit(span) {
            planner.visit(span);
        }
    }
    let Planner { planned, mut counts, .. } = planner;
    counts.reusable = units - planned.len() as i64;
    let digest = Hasher::new("plan")
        .value("source", &spec.source)
        .value("patches", &spec.patches)
        .value("model", &spec.model)
        .value("reuse", &spec.reuse)
        .value("environment", &environment)
        .value("spans", &planned)
        .finish();
    Ok(Plan { digest, fork_span: source.spans[fork_span].id.clone(), counts, spans: planned, environment })
}

fn environment(source: &Source, spec: &ForkSpec) -> RunEnvironment {
    let mut environment = source.environment.clone();
    if let Some(image) = &spec.sandbox.image {
        environment.image = Some(image.clone());
    }
    if let Some(uid) = spec.sandbox.run_as_user {
        environment.uid = Some(uid);
    }
    environment
}

/// What the planner finds of one span's inputs.
#[derive(Default)]
struct Reach {
    /// Whether the inputs differ for another reason than a blocked span.
    differs: Level,
    /// Whether an input is missing because of a blocked span.
    upstream: Level,
    causes: Vec<Cause>,
    triggers: Vec<usize>,
    blocked: Vec<Blocked>,
}

impl Reach {
    fn differs(&mut self, level: Level, cause: Cause, triggers: &[usize]) {
        if level > Level::No {
            self.differs = self.differs.max(level);
            if !self.causes.contains(&cause) {
                self.causes.push(cause);
            }
            merge(&mut self.triggers, triggers);
        }
    }
}

impl Planner<'_> {
    fn visit(&mut self, span: usize) {
        let record = &self.source.spans[span];
        for path in &self.source.changed(span).before {
            self.paths.set(Pattern::Path(path.clone()), PathState::default());
        }
        if let Some(output) = self.patches.output.get(&span) {
            let exit_code = output.exit_code.unwrap_or(0);
            let value = SpanValue { output: Output::overridden(&output.text, exit_code), status: Status::Completed };
            self.apply_recorded(span);
            if same_output(record.output(), record.status(), &value) {
                return;
            }
            self.set_output(span, OutputState { differs: Level::Certain, blocked: Level::No, known: Some(value) });
            self.counts.overridden += 1;
            self.push(span, None, Reach { causes: vec![Cause::PatchedInput], ..Reach::default() });
            return;
        }
        if record.did_not_run() && !self.is_changed_by_patch(span) {
            return;
        }
        let (mut reach, rendered) = self.reach(span);
        if reach.differs == Level::No && reach.upstream == Level::No {
            self.apply_recorded(span);
            return;
        }
        let own = own_reasons(self.source, self.spec, &self.patches, span, rendered.as_ref());
        let blocks = own.iter().map(|(_, level)| *level).max().unwrap_or(Level::No);
        if reach.upstream < Level::Certain {
            reach.blocked.extend(own.into_iter().map(|(blocked, _)| blocked));
        }
        let may_run = reach.differs > Level::No && reach.upstream < Level::Certain && blocks < Level::Certain;
        let may_block = reach.upstream > Level::No || blocks > Level::No;
        let certain = reach.differs == Level::Certain || reach.upstream == Level::Certain;
        let mark = match (may_run, may_block, certain) {
            (true, true, _) => Mark::MayRunOrBeBlocked,
            (true, false, true) => Mark::WillRun,
            (true, false, false) => Mark::MayRun,
            (false, _, true) => Mark::WillBeBlocked,
            (false, _, false) => Mark::MayBeBlocked,
        };
        let count = match mark {
            Mark::WillRun => &mut self.counts.will_run,
            Mark::MayRun => &mut self.counts.may_run,
            Mark::MayRunOrBeBlocked => &mut self.counts.may_run_or_block,
            Mark::WillBeBlocked => &mut self.counts.will_block,
            Mark::MayBeBlocked => &mut self.counts.may_block,
        };
        *count += 1;
        self.after(span, mark, rendered.as_ref());
        self.push(span, Some(mark), reach);
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

    /// Why and how surely the span's inputs differ from the recorded ones; with its rendered fields where they are known.
    fn reach(&self, span: usize) -> (Reach, Option<Rendered>) {
        let source = self.source;
        let mut reach = Reach::default();
        if self.image_changed && source.spans[span].opening.executor.is_some() {
            reach.differs(Level::Certain, Cause::PatchedInput, &[]);
        }
        let (recorded, patched) = match (Contract::recorded(source, span), Contract::patched(source, &self.patches, span)) {
            (Ok(recorded), Ok(patched)) => (recorded, patched),
            // What it may see is not known; `own_reasons` says why it can't run.
            _ => {
                if self.patches.names(span) {
                    reach.differs(Level::Certain, Cause::PatchedInput, &[]);
                }
                let state = self.paths.of(&Pattern::all());
                reach.differs(state.differs.max(state.blocked).min(Level::Maybe), Cause::WorkspaceChanged, &state.triggers);
                return (reach, None);
            }
        };
        for &upstream in &patched.depends_on {
            self.through(&mut reach, upstream);
        }
        let mut rendered = None;
        if let Ok(bound) = patched.bound_spans(source) {
            let mut open = false;
            for &upstream in &bound {
                let state = &self.outputs[upstream];
                if state.blocked > Level::No {
                    self.through(&mut reach, upstream);
                }
                open |= state.known.is_none() && (state.differs > Level::No || state.blocked > Level::No);
            }
            if !open {
                rendered = patched.render(source, &|i| self.output(i)).ok();
            }
            for (level, cause) in self.compare(&recorded, &patched, rendered.as_ref()) {
                let changed: Vec<_> = bound.iter().copied().filter(|&u| self.outputs[u].differs > Level::No).collect();
                reach.differs(level, cause, if cause == Cause::UpstreamOutputChanged { &changed } else { &[] });
            }
            if open {
                let changed: Vec<_> = bound.iter().copied().filter(|&u| self.outputs[u].differs > Level::No).collect();
                if !changed.is_empty() {
                    reach.differs(Level::Maybe, Cause::UpstreamOutputChanged, &changed);
                }
            }
        } else if self.patches.command.contains_key(&span) {
            reach.differs(Level::Certain, Cause::PatchedInput, &[]);
        }
        let state = self.paths.of_all(&patched.footprint.sees);
        reach.differs(state.differs, Cause::WorkspaceChanged, &state.triggers);
        if patched.footprint != recorded.footprint {
            reach.differs(Level::Certain, Cause::PatchedInput, &[]);
        }
        if state.blocked > Level::No {
            reach.upstream = reach.upstream.max(state.blocked);
            merge(&mut reach.triggers, &state.triggers);
            reach.blocked.extend(state.triggers.iter().take(1).map(|&t| self.unknown_files(t, span)));
            if !reach.causes.contains(&Cause::WorkspaceChanged) {
                reach.causes.push(Cause::WorkspaceChanged);
            }
        }
        let record = &source.spans[span];
        let lacks_snapshot = !patched.footprint.writes.is_empty() && (record.snapshot_before.is_none() || record.snapshot_after.is_none());
        if !record.did_not_run() && (record.output().is_none() || lacks_snapshot) && record.opening.executor.is_some() {
            reach.differs(Level::Certain, Cause::MissingReusableResult, &[]);
        }
        if !self.spec.reuse.early_cutoff && reach.differs == Level::Maybe {
            reach.differs(Level::Certain, Cause::PolicyForcedRerun, &[]);
        }
        (reach, rendered)
    }

    fn through(&self, reach: &mut Reach, upstream: usize) {
        let state = &self.outputs[upstream];
        reach.differs(state.differs, Cause::UpstreamOutputChanged, &[upstream]);
        if state.blocked > Level::No {
            reach.upstream = reach.upstream.max(state.blocked);
            merge(&mut reach.triggers, &[upstream]);
            reach.blocked.push(upstream_blocked(self.source, upstream));
            if !reach.causes.contains(&Cause::UpstreamOutputChanged) {
                reach.causes.push(Cause::UpstreamOutputChanged);
            }
        }
    }

    fn unknown_files(&self, trigger: usize, span: usize) -> Blocked {
        files_unknown(self.source, trigger, span)
    }

    /// Field by field: certainly different, or different if an upstream output is. Fields that can't be rendered yet are left out.
    fn compare(&self, recorded: &Contract, patched: &Contract, rendered: Option<&Rendered>) -> Vec<(Level, Cause)> {
        let source = self.source;
        let mut found = Vec::new();
        let then = recorded.render(source, &|i| recorded_value(source, i));
        let names: std::collections::BTreeSet<_> = recorded.fields.keys().chain(patched.fields.keys()).collect();
        for name in names {
            let (before, after) = (recorded.fields.get(name), patched.fields.get(name));
            let template_patched = before != after;
            let now = match (rendered, after) {
                (Some(rendered), _) => rendered.get(name),
                (None, Some(Field::Literal(value))) => Some(value),
                (None, Some(Field::Bound { .. })) => {
                    if template_patched {
                        found.push((Level::Maybe, Cause::PatchedInput));
                    }
                    continue;
                }
                (None, None) => None,
            };
            let was = match (&then, before) {
                (Ok(then), _) => then.get(name),
                (Err(_), Some(Field::Literal(value))) => Some(value),
                _ => None,
            };
            if now != was {
                let cause = if template_patched { Cause::PatchedInput } else { Cause::UpstreamOutputChanged };
                found.push((Level::Certain, cause));
            }
        }
        found
    }

    fn output(&self, span: usize) -> Result<SpanValue, String> {
        match &self.outputs[span].known {
            Some(value) => Ok(value.clone()),
            None => recorded_value(self.source, span),
        }
    }

    /// The span's recorded changes happen: the paths are as recorded from here on.
    fn apply_recorded(&mut self, span: usize) {
        for path in &self.source.changed(span).during {
            self.paths.set(Pattern::Path(path.clone()), PathState::default());
        }
        if let Some(Executor::FileWrite { path, .. }) = &self.source.spans[span].opening.executor
            && let Ok(path) = crate::footprint::relative(path, self.source.root())
        {
            self.paths.set(Pattern::Path(path), PathState::default());
        }
    }

    /// What an affected span leaves behind.
    fn after(&mut self, span: usize, mark: Mark, rendered: Option<&Rendered>) {
        let blocked = match mark {
            Mark::WillBeBlocked => Level::Certain,
            mark if mark.may_block() => Level::Maybe,
            _ => Level::No,
        };
        let is_write = matches!(self.source.spans[span].opening.executor, Some(Executor::FileWrite { .. }));
        self.set_output(
            span,
            OutputState { differs: if mark.may_run() && !is_write { Level::Maybe } else { Level::No }, blocked, known: None },
        );
        let mut paths = match Contract::patched(self.source, &self.patches, span) {
            Ok(contract) => contract.footprint.writes,
            Err(_) => vec![Pattern::all()],
        };
        paths.extend(self.source.changed(span).during.iter().cloned().map(Pattern::Path));
        for pattern in paths {
            let before = self.paths.of(&pattern);
            let exact = matches!(pattern, Pattern::Path(_));
            let differs = match mark {
                // It sets its path to a content that is known: the recorded one, or certainly another.
                mark if is_write && !mark.may_block() && exact && rendered.is_some() => match self.writes_as_recorded(span, rendered) {
                    true => Level::No,
                    false if mark == Mark::WillRun => Level::Certain,
                    false => Level::Maybe,
                },
                mark if mark.may_run() => Level::Maybe,
                _ if exact => before.differs,
                _ => before.differs.min(Level::Maybe),
            };
            let blocked = if is_write && !mark.may_block() { Level::No } else { blocked.max(before.blocked.min(Level::Maybe)) };
            let mut triggers = vec![span];
            if blocked == Level::No || before.blocked > Level::No {
                merge(&mut triggers, &before.triggers);
            }
            self.paths.set(pattern, PathState { differs, blocked, triggers });
        }
    }

    /// Whether a write, whose inputs are known, writes what it wrote when recorded.
    fn writes_as_recorded(&self, span: usize, rendered: Option<&Rendered>) -> bool {
        let then = Contract::recorded(self.source, span).ok().and_then(|c| c.render(self.source, &|i| recorded_value(self.source, i)).ok());
        let record = &self.source.spans[span];
        let same = |name: &str| then.as_ref().and_then(|t| t.get(name)) == rendered.and_then(|r| r.get(name));
        record.status() == Status::Completed && ["path", "content", "executable"].into_iter().all(same)
    }

    /// A container's output differs, and is not known, when that of any descendant does.
    fn set_output(&mut self, span: usize, state: OutputState) {
        if state.differs > Level::No || state.blocked > Level::No {
            for container in self.source.ancestors(span) {
                let level = if state.blocked == Level::Certain || state.known.is_some() { Level::Certain } else { Level::Maybe };
                let of = &mut self.outputs[container];
                of.blocked = of.blocked.max(level);
            }
        }
        self.outputs[span] = state;
    }

    fn push(&mut self, span: usize, mark: Option<Mark>, reach: Reach) {
        let record = &self.source.spans[span];
        let mut blocked = reach.blocked;
        blocked.dedup();
        let mut triggers: Vec<_> = reach.triggers.iter().map(|&t| self.source.spans[t].id.clone()).collect();
        triggers.dedup();
        self.planned.push(PlannedSpan {
            id: record.id.clone(),
            name: record.opening.name.clone(),
            kind: record.opening.kind,
            mark,
            causes: reach.causes,
            triggers,
            blocked,
        });
    }
}

pub(crate) fn same_output(recorded: Option<&Output>, status: Status, value: &SpanValue) -> bool {
    recorded.is_some_and(|r| {
        r.text == value.output.text && r.stderr.is_empty() && r.exit_code.unwrap_or(0) == value.output.exit_code.unwrap_or(0)
    }) && status == value.status
}

/// A recorded output as a template sees it.
pub(crate) fn recorded_value(source: &Source, span: usize) -> Result<SpanValue, String> {
    let record = &source.spans[span];
    let output = record.output().ok_or_else(|| format!("span {:?} ended without an output", record.opening.name))?;
    Ok(SpanValue { output: output.clone(), status: record.status() })
}

pub(crate) fn upstream_blocked(source: &Source, upstream: usize) -> Blocked {
    let record = &source.spans[upstream];
    Blocked::upstream(
        BlockedReason::UpstreamBlocked,
        &record.id,
        format!(
            "it needs the output of {:?}, which is blocked; override that output with a ToolOutputOverride, or fork later",
            record.opening.name
        ),
    )
}

pub(crate) fn files_unknown(source: &Source, trigger: usize, span: usize) -> Blocked {
    let record = &source.spans[trigger];
    if trigger == span || crate::replay::start_snapshot(source, trigger).is_none() && record.snapshot_before.is_none() {
        return Blocked::new(
            BlockedReason::SnapshotMissing,
            "no workspace snapshot was recorded before the fork span; fork at a later span that has one",
        );
    }
    Blocked::upstream(
        BlockedReason::UpstreamBlocked,
        &record.id,
        format!("it may see files that {:?} would have written, which is blocked", record.opening.name),
    )
}

/// Why the span itself can't be executed once its inputs differ: one function for the plan and for the run. `rendered` is
/// absent while an input is not known; a reason that needs it is then a "maybe".
pub fn own_reasons(source: &Source, spec: &ForkSpec, patches: &Patches, span: usize, rendered: Option<&Rendered>) -> Vec<(Blocked, Level)> {
    let record = &source.spans[span];
    let opening = &record.opening;
    let name = &opening.name;
    let certain = |reason, message: String| vec![(Blocked::new(reason, message), Level::Certain)];
    if record.verdict().refuses() {
        return certain(BlockedReason::VerdictDenied, format!("{name:?} was denied ({}) when recorded, and stays so", record.verdict()));
    }
    if !opening.redacted.is_empty() {
        return certain(
            BlockedReason::RedactedInput,
            format!("inputs of {name:?} were redacted when recorded: {}", opening.redacted.join(", ")),
        );
    }
    if opening.kind == SpanKind::HumanInput {
        return certain(
            BlockedReason::HumanInputNeeded,
            format!("{name:?} needs a person's answer; override its readers' inputs, or fork after it"),
        );
    }
    if opening.kind == SpanKind::LlmCall || matches!(opening.executor, Some(Executor::Model { .. })) {
        return match spec.model.mode {
            ModelMode::Blocked => certain(BlockedReason::ModelBlocked, format!("{name:?} is a model call, and spec.model.mode is Blocked")),
        };
    }
    if opening.executor.is_none() {
        return certain(
            BlockedReason::NoExecutor,
            format!("{name:?} ({}) was recorded without an executor, so nothing can run it", opening.kind),
        );
    }
    if opening.policy() == ReplayPolicy::RecordOnly {
        return certain(BlockedReason::RecordOnly, format!("{name:?} was recorded with the policy RecordOnly"));
    }
    let contract = match Contract::patched(source, patches, span) {
        Ok(contract) => contract,
        Err(incomplete) => return certain(BlockedReason::IncompleteContract, format!("{name:?} can't be run: {incomplete}")),
    };
    if let Err(error) = contract.bound_spans(source) {
        return certain(BlockedReason::BindingFailed, format!("a binding of {name:?} can't be rendered: {error}"));
    }
    if record.verdict() == Verdict::GateAllow {
        let then = Contract::recorded(source, span).ok().and_then(|c| c.render(source, &|i| recorded_value(source, i)).ok());
        let message = format!("{name:?} was let through a gate with other arguments; it needs approval again");
        let blocked = Blocked::new(BlockedReason::ApprovalNeeded, message);
        match (rendered, then) {
            (Some(now), Some(then)) if *now == then => {}
            (Some(_), _) => return vec![(blocked, Level::Certain)],
            (None, _) => return vec![(blocked, Level::Maybe)],
        }
    }
    Vec::new()
}
