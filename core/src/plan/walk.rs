//! The walk over the units: what each sees, whether that may differ, and what it leaves behind.

use std::collections::{BTreeSet, HashMap};

use super::paths::{Level, PathState, Paths, merge};
use super::{Mark, PlanCounts, PlannedSpan, Prepared, cannot_tell_writes, files_unknown, own_reasons, recorded_value, upstream_blocked};
use crate::binding::{BindingError, SpanValue};
use crate::contract::{Contract, Field, Rendered, arguments_digest};
use crate::footprint::Pattern;
use crate::model::{Executor, Inputs, Status, Verdict};
use crate::reason::{Blocked, BlockedReason, Cause};

/// A span's output as known before anything runs.
#[derive(Clone, Debug, Default)]
struct OutputState {
    differs: Level,
    blocked: Level,
    /// Given by a patch.
    known: Option<SpanValue>,
}

/// What is known at one point of the walk.
#[derive(Clone, Default)]
struct State {
    /// Of spans whose output may not be as recorded.
    outputs: HashMap<usize, OutputState>,
    /// How surely any output since the walk's begin is not as recorded.
    drift: Level,
    drifted: Vec<usize>,
    paths: Paths,
    /// By first member: entangled groups that are not as recorded, how surely, and because of which members.
    entangled: HashMap<usize, (Level, Vec<usize>)>,
    planned: Vec<PlannedSpan>,
    counts: PlanCounts,
}

struct Planner<'a> {
    fork: &'a Prepared<'a>,
    state: State,
}

/// Plans every unit; gives the affected and overridden ones, and the numbers.
pub fn walk(fork: &Prepared<'_>) -> (Vec<PlannedSpan>, PlanCounts) {
    let mut planner = Planner { fork, state: State::default() };
    for (pattern, trigger) in fork.unknown_at_start() {
        planner.state.paths.set(pattern, trigger.map_or_else(PathState::default, PathState::unknown));
    }
    for span in fork.units() {
        if fork.check {
            planner.check(span);
        } else {
            planner.visit_entangled(span);
            planner.visit(span);
        }
    }
    let State { planned, mut counts, .. } = planner.state;
    let units = (0..fork.source.spans.len()).filter(|&i| fork.source.is_unit(i)).count() as i64;
    counts.reusable = units - planned.len() as i64;
    (planned, counts)
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
            self.cause(cause);
            merge(&mut self.triggers, triggers);
        }
    }

    fn cause(&mut self, cause: Cause) {
        if !self.causes.contains(&cause) {
            self.causes.push(cause);
        }
    }

    fn level(&self) -> Level {
        self.differs.max(self.upstream)
    }
}

impl<'a> Planner<'a> {
    /// In a check every unit that can run does, on its recorded inputs.
    fn check(&mut self, span: usize) {
        let fork = self.fork;
        let record = &fork.source.spans[span];
        if record.did_not_run() {
            return;
        }
        let mut blocked: Vec<Blocked> =
            own_reasons(fork, span, fork.recorded_inputs(span).as_deref()).into_iter().map(|(blocked, _)| blocked).collect();
        if blocked.is_empty() {
            blocked.extend(fork.not_reproducible(span));
        }
        let mark = if blocked.is_empty() { Mark::WillRun } else { Mark::WillBeBlocked };
        self.push(span, Some(mark), Reach { causes: vec![Cause::PolicyForcedRerun], blocked, ..Reach::default() }, None);
    }

    /// At the first member of an entangled group: whether any member is reached while the others are as recorded. What began
    /// between two members is looked at on the way, on a copy of all that is known.
    fn visit_entangled(&mut self, span: usize) {
        let Some(group) = self.fork.source.entangled(span).filter(|g| g.members[0] == span) else { return };
        let mut trial = Planner { fork: self.fork, state: State { planned: Vec::new(), ..self.state.clone() } };
        let (mut level, mut reached) = (Level::No, Vec::new());
        let last = *group.members.last().unwrap_or(&span);
        for unit in (span..=last).filter(|&i| self.fork.source.is_unit(i)) {
            if !group.members.contains(&unit) {
                trial.visit(unit);
                continue;
            }
            trial.begin(unit);
            let of_member = match self.fork.patches.output.contains_key(&unit) {
                true if self.fork.overriding(unit).is_some() => Level::Certain,
                true => Level::No,
                false => trial.reach(unit).0.level(),
            };
            if of_member > Level::No {
                reached.push(unit);
            }
            level = level.max(of_member);
            trial.apply_recorded(unit);
        }
        if level > Level::No {
            self.state.entangled.insert(span, (level, reached));
        }
    }

    /// What happens before the span: changes outside of any span, then workspaces and files that patches give.
    fn begin(&mut self, span: usize) {
        let Self { fork, state } = self;
        for path in &fork.source.changed(span).before {
            state.paths.set(Pattern::Path(path.clone()), PathState::default());
        }
        for target in fork.patches.targets_before(fork.source, span) {
            let differs = |same: Option<bool>| match same {
                Some(true) => PathState::default(),
                Some(false) => PathState { differs: Level::Certain, triggers: vec![target], ..PathState::default() },
                None => PathState { differs: Level::Maybe, triggers: vec![target], ..PathState::default() },
            };
            if let Some(fact) = fork.patches.snapshot.get(&target).and_then(|s| s.fact.as_ref()) {
                state.paths.set(Pattern::all(), differs(fact.changed.as_ref().map(|_| true)));
                for path in fact.changed.iter().flatten() {
                    state.paths.set(Pattern::Path(path.clone()), differs(Some(false)));
                }
            }
            for file in fork.patches.files.get(&target).into_iter().flatten() {
                state.paths.set(Pattern::Path(file.path.clone()), differs(file.same));
            }
        }
    }

    fn visit(&mut self, span: usize) {
        let fork = self.fork;
        let source = fork.source;
        self.begin(span);
        if fork.patches.output.contains_key(&span) {
            self.visit_overridden(span);
            return;
        }
        if fork.stays_out(span) {
            self.apply_recorded(span);
            return;
        }
        let (mut reach, rendered) = self.reach(span);
        let alone = reach.level();
        let group = source.entangled(span).and_then(|g| self.state.entangled.get(&g.members[0]));
        if let Some((level, reached)) = group {
            let others: Vec<_> = reached.iter().copied().filter(|&m| m != span).collect();
            if reach.differs < *level {
                reach.differs(*level, Cause::WorkspaceChanged, &others);
            }
        }
        if reach.level() == Level::No {
            self.apply_recorded(span);
            return;
        }
        let failed = rendered.as_ref().and_then(|r| r.as_ref().err()).map(|error| {
            let message = format!("a binding of {:?} can't be rendered: {error}", source.spans[span].opening.name);
            (Blocked::new(BlockedReason::BindingFailed, message), Level::Certain)
        });
        let rendered = rendered.and_then(Result::ok);
        let mut own = own_reasons(fork, span, rendered.as_ref());
        if let Some(failed) = failed {
            own.retain(|(_, level)| *level == Level::Certain);
            if own.is_empty() {
                own.push(failed);
            }
        }
        let surely_alone = alone == Level::Certain && !reach.causes.contains(&Cause::PolicyForcedRerun);
        if !surely_alone && group.is_some() && own.iter().any(|(_, level)| *level == Level::Certain) {
            // Where only the others differ, it is blocked for another reason.
            let instead = (cannot_tell_writes(source, span), Level::Certain);
            if alone == Level::No { own = vec![instead] } else { own.push(instead) }
        }
        let blocks = own.iter().map(|(_, level)| *level).max().unwrap_or(Level::No);
        if reach.upstream < Level::Certain {
            reach.blocked.extend(own.into_iter().map(|(blocked, _)| blocked));
        }
        let may_run = reach.differs > Level::No && reach.upstream < Level::Certain && blocks < Level::Certain;
        let may_block = reach.upstream > Level::No || blocks > Level::No;
        let certain = reach.level() == Level::Certain;
        let mark = match (may_run, may_block, certain) {
            (true, true, _) => Mark::MayRunOrBeBlocked,
            (true, false, true) => Mark::WillRun,
            (true, false, false) => Mark::MayRun,
            (false, _, true) => Mark::WillBeBlocked,
            (false, _, false) => Mark::MayBeBlocked,
        };
        self.after(span, mark, rendered.as_ref());
        self.push(span, Some(mark), reach, rendered.as_ref());
    }

    fn visit_overridden(&mut self, span: usize) {
        let (fork, source) = (self.fork, self.fork.source);
        let overriding = fork.overriding(span);
        let group = source.entangled(span).map(|g| self.state.entangled.get(&g.members[0]).map(|(level, _)| *level));
        let kept = match group {
            Some(affected) => affected.is_none(),
            None => source.shows_changes(span),
        };
        if kept || source.shows_changes(span) {
            self.apply_recorded(span);
            self.keep_patched_files(span);
            if overriding.is_none() && kept {
                return;
            }
        } else {
            // Which changes were its own is not recorded, so none happen, and what it may write is not known; unless the group turns
            // out to be as recorded.
            let blocked = group.flatten().filter(|_| overriding.is_none()).unwrap_or(Level::Certain);
            for pattern in fork.may_write(span) {
                let before = self.state.paths.of(&pattern);
                let differs = before.differs.min(Level::Maybe);
                self.state.paths.set(pattern, PathState { blocked, differs, ..PathState::unknown(span) });
            }
        }
        let differs = if overriding.is_some() { Level::Certain } else { Level::No };
        self.set_output(span, OutputState { differs, blocked: Level::No, known: overriding });
        self.leave_out_inner(span, Level::Certain);
        self.push(span, None, Reach { causes: vec![Cause::PatchedInput], ..Reach::default() }, None);
    }

    /// Files that patches write on a span whose output is given stand, where it changed them when recorded.
    fn keep_patched_files(&mut self, span: usize) {
        let fork = self.fork;
        let during = fork.source.kept_changes(span);
        for file in fork.patches.files.get(&span).into_iter().flatten().filter(|f| during.contains(&f.path)) {
            let differs = if file.same == Some(true) { Level::Certain } else { Level::Maybe };
            self.state.paths.set(Pattern::Path(file.path.clone()), PathState { differs, triggers: vec![span], ..PathState::default() });
        }
    }

    fn output_state(&self, upstream: usize) -> OutputState {
        match self.state.outputs.get(&upstream) {
            Some(state) => state.clone(),
            // A fork before this one left it without a result.
            None if self.fork.source.was_left_out(upstream) => OutputState { blocked: Level::Certain, ..OutputState::default() },
            None => OutputState::default(),
        }
    }

    /// Why and how surely the span's inputs differ from the recorded ones; with its rendered fields where all that they are
    /// rendered from is known.
    fn reach(&self, span: usize) -> (Reach, Option<Result<Rendered, BindingError>>) {
        let (fork, source) = (self.fork, self.fork.source);
        let record = &source.spans[span];
        let mut reach = Reach::default();
        if fork.image_changed && record.opening.executor.is_some() {
            reach.differs(Level::Certain, Cause::PatchedInput, &[]);
        }
        if source.was_left_out(span) {
            reach.differs(Level::Certain, Cause::MissingReusableResult, &[]);
        }
        let (recorded, patched) = match (Contract::recorded(source, span), Contract::patched(source, &fork.patches, span)) {
            (Ok(recorded), Ok(patched)) => (recorded, patched),
            // What it may see is not known; `own_reasons` says why it can't run.
            _ => {
                if fork.patches.names(span) {
                    reach.differs(Level::Certain, Cause::PatchedInput, &[]);
                }
                let state = self.state.paths.of(&Pattern::all());
                reach.differs(state.differs.max(state.blocked).min(Level::Maybe), Cause::WorkspaceChanged, &state.triggers);
                return (reach, None);
            }
        };
        for &upstream in &patched.depends_on {
            self.through(&mut reach, upstream);
        }
        let rendered = self.bound(&mut reach, span, &recorded, &patched);
        let state = self.state.paths.of_all(&patched.footprint.sees);
        reach.differs(state.differs, Cause::WorkspaceChanged, &state.triggers);
        if patched.footprint.sees != recorded.footprint.sees {
            reach.differs(Level::Certain, Cause::PatchedInput, &[]);
        }
        if state.blocked > Level::No {
            reach.upstream = reach.upstream.max(state.blocked);
            merge(&mut reach.triggers, &state.triggers);
            reach.blocked.extend(state.unknown_from.iter().map(|&t| files_unknown(fork, t, span)));
            reach.cause(Cause::WorkspaceChanged);
        }
        if record.opening.inputs == Inputs::Unknown {
            let everything = self.state.paths.of(&Pattern::all());
            // A workspace that was never recorded is no sign of a change.
            let unknown = everything.unknown_from.iter().any(|&t| t != fork.first || source.start_state(t).is_some());
            let blocked = if unknown { everything.blocked } else { Level::No };
            let level = self.state.drift.max(everything.differs).max(blocked);
            let triggers: Vec<_> = self.state.drifted.iter().chain(&everything.triggers).copied().collect();
            reach.differs(level, Cause::DependencyUnknown, &triggers);
        }
        if !record.did_not_run() && record.opening.executor.is_some() && !source.has_result(span) {
            reach.differs(Level::Certain, Cause::MissingReusableResult, &[]);
        }
        if !fork.spec.reuse.early_cutoff && (reach.differs == Level::Maybe || reach.upstream == Level::Maybe) {
            reach.differs(Level::Certain, Cause::PolicyForcedRerun, &[]);
        }
        (reach, rendered)
    }

    /// The outputs that templates use.
    fn bound(&self, reach: &mut Reach, span: usize, recorded: &Contract, patched: &Contract) -> Option<Result<Rendered, BindingError>> {
        let source = self.fork.source;
        let Ok(bound) = patched.bound_spans(source) else {
            if self.fork.patches.names(span) {
                reach.differs(Level::Certain, Cause::PatchedInput, &[]);
            }
            return None;
        };
        let states: Vec<_> = bound.iter().map(|&u| (u, self.output_state(u))).collect();
        for (upstream, _) in states.iter().filter(|(_, s)| s.blocked > Level::No) {
            self.through(reach, *upstream);
        }
        let open = states.iter().any(|(_, s)| s.known.is_none() && (s.differs > Level::No || s.blocked > Level::No));
        let changed: Vec<_> = states.iter().filter(|(_, s)| s.differs > Level::No).map(|(u, _)| *u).collect();
        let rendered = if open { None } else { Some(patched.render(source, &|i| self.output(i))) };
        if matches!(rendered, Some(Err(_))) && self.fork.patches.names(span) {
            reach.differs(Level::Certain, Cause::PatchedInput, &[]);
        }
        if matches!(rendered, Some(Err(_))) && !changed.is_empty() {
            reach.differs(Level::Certain, Cause::UpstreamOutputChanged, &changed);
        }
        for (level, cause) in self.compare(span, recorded, patched, rendered.as_ref().and_then(|r| r.as_ref().ok())) {
            reach.differs(level, cause, if cause == Cause::UpstreamOutputChanged { &changed } else { &[] });
        }
        if open && !changed.is_empty() {
            reach.differs(Level::Maybe, Cause::UpstreamOutputChanged, &changed);
        }
        rendered
    }

    fn through(&self, reach: &mut Reach, upstream: usize) {
        let state = self.output_state(upstream);
        reach.differs(state.differs, Cause::UpstreamOutputChanged, &[upstream]);
        if state.blocked > Level::No {
            reach.upstream = reach.upstream.max(state.blocked);
            merge(&mut reach.triggers, &[upstream]);
            reach.blocked.push(upstream_blocked(self.fork.source, upstream));
            reach.cause(Cause::UpstreamOutputChanged);
        }
    }

    /// Field by field: certainly different, or different if an upstream output is. Fields that can't be rendered yet are left out.
    fn compare(&self, span: usize, recorded: &Contract, patched: &Contract, rendered: Option<&Rendered>) -> Vec<(Level, Cause)> {
        let mut found = Vec::new();
        let then = self.fork.recorded_inputs(span);
        let names: BTreeSet<_> = recorded.fields.keys().chain(patched.fields.keys()).collect();
        for name in names {
            let (before, after) = (recorded.fields.get(name), patched.fields.get(name));
            let template_patched = before != after;
            let now = match (rendered, after) {
                (Some(rendered), _) => rendered.get(name),
                (None, Some(Field::Literal(value))) => Some(value),
                (None, Some(Field::Bound { .. } | Field::Request { .. })) => {
                    if template_patched {
                        found.push((Level::Maybe, Cause::PatchedInput));
                    }
                    continue;
                }
                (None, None) => None,
            };
            let was = match (&then, before) {
                (Some(then), _) => then.get(name),
                (None, Some(Field::Literal(value))) => Some(value),
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
        match self.state.outputs.get(&span).and_then(|s| s.known.as_ref()) {
            Some(value) => Ok(value.clone()),
            None => recorded_value(self.fork.source, span),
        }
    }

    /// The span's recorded changes happen: the paths are as recorded from here on.
    fn apply_recorded(&mut self, span: usize) {
        for path in self.fork.kept_paths(span) {
            self.state.paths.set(Pattern::Path(path), PathState::default());
        }
    }

    /// What an affected span leaves behind.
    fn after(&mut self, span: usize, mark: Mark, rendered: Option<&Rendered>) {
        let fork = self.fork;
        let blocked = match mark {
            Mark::WillBeBlocked => Level::Certain,
            mark if mark.may_block() => Level::Maybe,
            _ => Level::No,
        };
        let executor = &fork.source.spans[span].opening.executor;
        let is_write = matches!(executor, Some(Executor::FileWrite { .. }));
        let alone = fork.source.entangled(span).is_none();
        let gives_as_recorded =
            is_write && fork.source.spans[span].status() == Status::Completed && fork.source.spans[span].output().is_some();
        let differs = if mark.may_run() && !gives_as_recorded { Level::Maybe } else { Level::No };
        self.set_output(span, OutputState { differs, blocked, known: None });
        self.leave_out_inner(span, if matches!(mark, Mark::WillRun | Mark::WillBeBlocked) { Level::Certain } else { Level::Maybe });
        let written = fork.target_path(span);
        for pattern in fork.may_write(span) {
            let before = self.state.paths.of(&pattern);
            let exact = matches!(pattern, Pattern::Path(_));
            let is_write = is_write && written.as_deref() == Some(pattern.path());
            // A write that happens makes its path known again.
            let stays = exact && !(is_write && mark.may_run());
            let left = if stays { before.blocked } else { before.blocked.min(Level::Maybe) };
            let differs = match mark {
                // It sets its path to a content that is known: the recorded one, or certainly another; unless another step wrote it
                // at the same time.
                mark if is_write && !mark.may_block() && exact && alone && rendered.is_some() => {
                    match self.writes_as_recorded(span, rendered) {
                        true => Level::No,
                        false if mark == Mark::WillRun => Level::Certain,
                        false => Level::Maybe,
                    }
                }
                mark if mark.may_run() => Level::Maybe,
                _ if exact => before.differs,
                _ => before.differs.min(Level::Maybe),
            };
            let blocked = if is_write && !mark.may_block() { Level::No } else { blocked.max(left) };
            let mut triggers = vec![span];
            let mut unknown_from = if blocked > Level::No && mark.may_block() { vec![span] } else { Vec::new() };
            if blocked == Level::No || before.blocked > Level::No {
                merge(&mut triggers, &before.triggers);
            }
            if blocked > Level::No && before.blocked > Level::No && mark != Mark::WillBeBlocked {
                merge(&mut unknown_from, &before.unknown_from);
            }
            self.state.paths.set(pattern, PathState { differs, blocked, triggers, unknown_from });
        }
    }

    /// Whether a write, whose inputs are known, writes what it wrote when recorded.
    fn writes_as_recorded(&self, span: usize, rendered: Option<&Rendered>) -> bool {
        let then = self.fork.recorded_inputs(span);
        let record = &self.fork.source.spans[span];
        let same = |name: &str| then.as_ref().and_then(|t| t.get(name)) == rendered.and_then(|r| r.get(name));
        record.status() == Status::Completed && ["path", "content", "executable"].into_iter().all(same)
    }

    /// A container's output differs, and is not known, when that of any descendant does.
    fn set_output(&mut self, span: usize, state: OutputState) {
        if state.differs > Level::No || state.blocked > Level::No {
            self.state.drift = self.state.drift.max(state.differs).max(state.blocked);
            if self.state.drifted.len() < 8 {
                self.state.drifted.push(span);
            }
            for container in self.fork.source.ancestors(span) {
                let level = if state.blocked == Level::Certain || state.known.is_some() { Level::Certain } else { Level::Maybe };
                let of = self.state.outputs.entry(container).or_default();
                of.blocked = of.blocked.max(level);
            }
        }
        self.state.outputs.insert(span, state);
    }

    /// What runs as part of a unit has no result of its own once the unit has not its recorded one.
    fn leave_out_inner(&mut self, unit: usize, level: Level) {
        for &inner in self.fork.source.inner(unit) {
            self.state.outputs.insert(inner, OutputState { differs: Level::No, blocked: level, known: None });
        }
    }

    fn push(&mut self, span: usize, mark: Option<Mark>, reach: Reach, rendered: Option<&Rendered>) {
        let source = self.fork.source;
        let record = &source.spans[span];
        let mut blocked: Vec<Blocked> = Vec::new();
        for one in reach.blocked {
            if !blocked.contains(&one) {
                blocked.push(one);
            }
        }
        let gated = record.verdict() == Verdict::GateAllow;
        self.state.counts.count(mark);
        self.state.planned.push(PlannedSpan {
            id: record.id.clone(),
            name: record.opening.name.clone(),
            kind: record.opening.kind,
            mark,
            causes: reach.causes,
            triggers: reach.triggers.iter().map(|&t| source.spans[t].id.clone()).collect(),
            blocked,
            input_digest: rendered.filter(|_| gated).map(arguments_digest),
        });
    }
}

impl Prepared<'_> {
    /// What keeps a step of a check from being run on its recorded inputs, beyond its own reasons.
    pub fn not_reproducible(&self, span: usize) -> Option<Blocked> {
        let source = self.source;
        let name = &source.spans[span].opening.name;
        if source.was_left_out(span) || source.spans[span].output().is_none() {
            return Some(Blocked::new(
                BlockedReason::IncompleteContract,
                format!("IncompleteContract(output): {name:?} has no recorded output to compare with"),
            ));
        }
        if source.entangled(span).is_some() {
            return Some(cannot_tell_writes(source, span));
        }
        if self.recorded_inputs(span).is_none() {
            return Some(Blocked::new(BlockedReason::BindingFailed, format!("the recorded inputs of {name:?} can't be rendered")));
        }
        let lacks = !source.footprint(span).is_none() && (source.spans[span].snapshot_before.is_none() || !source.has_result(span));
        lacks.then(|| Blocked::new(BlockedReason::SnapshotMissing, format!("the workspace around {name:?} was not recorded")))
    }
}
