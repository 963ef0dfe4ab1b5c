//! The product's way: plan, then only what the replay asks for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use replayfork_core::Digest;
use replayfork_core::binding::SpanValue;
use replayfork_core::contract::{Action, Contract, executed, patched_opening};
use replayfork_core::footprint::Pattern;
use replayfork_core::model::{Closing, Fidelity, Output, SnapshotRef, Span, Status};
use replayfork_core::plan::Prepared;
use replayfork_core::reason::Blocked;
use replayfork_core::replay::{Execution, Replay, Reproduced, Step, WorkspaceChange};
use replayfork_core::source::Source;

use super::files::{Changes, Entry, Files, Memory, Reach, States, changed, covered, set};

/// Results of other forks.
pub type Cache = BTreeMap<Digest, (Status, Output, Changes)>;

/// What commands do. Gives how the step ended, and the files after it.
pub trait Physics {
    fn perform(&mut self, action: &Action, reach: &Reach<'_>, files: &Files) -> (Status, Option<Output>, Files);

    /// What changes files once a step has ended, and is no step.
    fn meddle(&mut self, _files: &mut Files) {}
}

/// What a fork runs in.
pub struct World<'a> {
    pub states: &'a States,
    /// Every path that there may be.
    pub paths: &'a [String],
    pub cache: &'a mut Cache,
    pub physics: &'a mut dyn Physics,
}

/// How a fork ended.
#[derive(Clone, Debug, Default)]
pub struct End {
    pub files: Files,
    pub unknown: BTreeSet<String>,
    /// What each unit gave, blocked ones left out.
    pub outputs: BTreeMap<usize, Option<SpanValue>>,
    pub blocked: BTreeSet<usize>,
}

/// What became of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Became {
    /// Not affected.
    Kept,
    /// By early cutoff.
    Reused,
    Overridden,
    Executed,
    Served,
    Cached,
    Blocked(Vec<Blocked>),
    /// Of a check.
    Reproduced(Reproduced),
    NotExecutable(Vec<Blocked>),
}

impl fmt::Display for Became {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |blocked: &[Blocked]| blocked.iter().map(|b| b.reason.as_str()).collect::<Vec<_>>().join(" ");
        match self {
            Became::Kept => f.write_str("kept"),
            Became::Reused => f.write_str("reused"),
            Became::Overridden => f.write_str("overridden"),
            Became::Executed => f.write_str("ran"),
            Became::Served => f.write_str("served"),
            Became::Cached => f.write_str("cached"),
            Became::Blocked(blocked) => write!(f, "blocked: {}", names(blocked)),
            Became::Reproduced(Reproduced::Identical) => f.write_str("identical"),
            Became::Reproduced(Reproduced::Differs(respects)) => write!(f, "differs: {}", respects.join(", ")),
            Became::NotExecutable(blocked) => write!(f, "not executable: {}", names(blocked)),
        }
    }
}

/// Why a fork ended before its last unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Early {
    UndeclaredWrite { span: String, path: String },
    WorkspaceInconsistent(String),
}

impl fmt::Display for Early {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Early::UndeclaredWrite { span, path } => write!(f, "{span:?} changed {path:?}, which it does not declare"),
            Early::WorkspaceInconsistent(message) => f.write_str(message),
        }
    }
}

/// What a unit gave that is not simply kept, and what it changed.
#[derive(Clone, Debug, Default)]
pub struct Gave {
    pub output: Option<Output>,
    pub changed: Changes,
}

/// What came of a fork, besides its end.
#[derive(Default)]
pub struct Ran {
    pub became: BTreeMap<usize, Became>,
    pub gave: BTreeMap<usize, Gave>,
    pub early: Option<Early>,
    /// Executed though every input was as recorded.
    pub needless: BTreeSet<usize>,
    /// The fork as a run of its own.
    pub spans: Vec<Span>,
    /// Beyond the plan's.
    pub warnings: Vec<String>,
}

impl Ran {
    pub fn those(&self, is: impl Fn(&Became) -> bool) -> BTreeSet<usize> {
        self.became.iter().filter(|(_, became)| is(became)).map(|(n, _)| *n).collect()
    }
}

/// Values as far as a reader can tell them apart.
pub fn seen(value: &SpanValue) -> (String, String, i32, Status) {
    (value.output.text.clone(), value.output.stderr.clone(), value.output.exit_code.unwrap_or(0), value.status)
}

/// The recorded value of a span.
pub fn value(source: &Source, i: usize) -> Result<SpanValue, String> {
    let span = &source.spans[i];
    let gave = span.output().map(|o| SpanValue { output: o.clone(), status: span.status() });
    gave.ok_or_else(|| format!("span {:?} ended without an output", span.opening.name))
}

/// The paths that forks before this one left unknown where it begins.
pub fn unknown_paths(fork: &Prepared<'_>, paths: &[String]) -> BTreeSet<String> {
    let mut unknown = BTreeSet::new();
    for (pattern, trigger) in fork.unknown_at_start() {
        for path in paths.iter().filter(|p| pattern.covers(&Pattern::Path((*p).clone()))) {
            if trigger.is_some() {
                unknown.insert(path.clone())
            } else {
                unknown.remove(path)
            };
        }
    }
    unknown
}

/// A fork under way.
struct Driver<'a, 'b> {
    fork: &'a Prepared<'a>,
    world: World<'b>,
    replay: Replay<'a>,
    memory: Memory,
    end: End,
    ran: Ran,
}

/// Carries a fork out.
pub fn replayed(fork: &Prepared<'_>, world: World<'_>) -> (End, Ran, States) {
    let source = fork.source;
    let start = source.start_state(fork.first).map(|s| world.states.of(&s).clone()).unwrap_or_default();
    let mut driver = Driver {
        fork,
        replay: Replay::new(fork),
        memory: Memory { states: world.states.clone(), files: start },
        end: End { unknown: unknown_paths(fork, world.paths), ..End::default() },
        ran: Ran { spans: source.spans.clone(), ..Ran::default() },
        world,
    };
    for n in fork.units() {
        driver.unit(n);
        if driver.ran.early.is_some() {
            break;
        }
    }
    let Driver { mut end, mut ran, memory, replay, .. } = driver;
    end.files = memory.files;
    ran.warnings = replay.warnings;
    (end, ran, memory.states)
}

impl Driver<'_, '_> {
    fn unit(&mut self, n: usize) {
        let before = self.replay.before(n);
        self.apply(&before);
        let start = self.memory.files.clone();
        let at_start = self.memory.states.record(&start);
        let Ok(mut step) = self.replay.step(n, &mut self.memory);
        if let Step::Cached { key, otherwise } = step {
            step = match self.world.cache.get(&key).cloned() {
                Some(result) => {
                    let output = self.cached(n, at_start, result);
                    return self.tell(n, Became::Cached, Some(output), &start);
                }
                None => *otherwise,
            };
        }
        let (became, output) = match step {
            Step::Keep { reused, changes } => {
                self.apply(&changes);
                self.keep(n, at_start);
                (if reused { Became::Reused } else { Became::Kept }, None)
            }
            Step::Override { output, changes } => {
                self.apply(&changes);
                self.overridden(n, at_start, output.clone());
                (Became::Overridden, Some(output))
            }
            Step::Block { blocked, unknown } => {
                self.block(n, at_start, unknown);
                (Became::Blocked(blocked), None)
            }
            Step::Serve(execution, answer) => {
                let output = answer.output();
                self.end.outputs.insert(n, Some(SpanValue { output: output.clone(), status: Status::Completed }));
                self.replay.executed(n, Status::Completed, Some(output.clone()), &[]);
                self.store(n, at_start, Fidelity::ServedFromRecording, (Status::Completed, Some(output.clone())), Some(&execution));
                (Became::Served, Some(output))
            }
            Step::Execute(execution) => self.execute(n, at_start, &execution),
            Step::NotExecutable(blocked) => (Became::NotExecutable(blocked), None),
            Step::Inconsistent { message, .. } => {
                self.ran.early = Some(Early::WorkspaceInconsistent(message));
                return;
            }
            Step::Cached { .. } => panic!("a cached result stands for another one"),
        };
        self.tell(n, became, output, &start);
    }

    fn tell(&mut self, n: usize, became: Became, output: Option<Output>, start: &Files) {
        self.ran.became.insert(n, became);
        self.ran.gave.insert(n, Gave { output, changed: changed(start, &self.memory.files) });
    }

    fn cached(&mut self, n: usize, at_start: SnapshotRef, (status, output, writes): (Status, Output, Changes)) -> Output {
        for (path, content) in &writes {
            set(&mut self.memory.files, path, content.as_ref());
        }
        let changed: Vec<_> = writes.into_keys().collect();
        self.end.outputs.insert(n, Some(SpanValue { output: output.clone(), status }));
        self.replay.executed(n, status, Some(output.clone()), &changed);
        self.store(n, at_start, Fidelity::Reused, (status, Some(output.clone())), None);
        output
    }

    fn keep(&mut self, n: usize, at_start: SnapshotRef) {
        let source = self.fork.source;
        self.replay.kept(n);
        self.end.outputs.insert(n, value(source, n).ok());
        if self.fork.check {
            return;
        }
        let after = self.memory.states.record(&self.memory.files.clone());
        let times = source.interval(n);
        let span = &mut self.ran.spans[n];
        let differs = |state: Option<SnapshotRef>, now: SnapshotRef| state.is_some_and(|s| s.content != now.content);
        if differs(span.snapshot_before, at_start) || differs(span.snapshot_after, after) {
            span.snapshot_before = span.snapshot_before.map(|_| at_start);
            span.snapshot_after = span.snapshot_after.map(|_| after);
            span.first_recorded = Some(times);
        }
    }

    fn overridden(&mut self, n: usize, at_start: SnapshotRef, output: Output) {
        self.replay.overridden(n, output.clone());
        if !self.fork.source.shows_changes(n) {
            self.forget(n);
        }
        self.end.outputs.insert(n, Some(SpanValue { output: output.clone(), status: Status::Completed }));
        self.store(n, at_start, Fidelity::Overridden, (Status::Completed, Some(output)), None);
    }

    fn block(&mut self, n: usize, at_start: SnapshotRef, unknown: Vec<String>) {
        let source = self.fork.source;
        self.end.blocked.insert(n);
        self.forget(n);
        self.replay.blocked(n);
        let opening = patched_opening(source, &self.fork.patches, n, source.spans[n].opening.started);
        let span = &mut self.ran.spans[n];
        let times = source.interval(n);
        *span = Span {
            opening,
            closing: Some(Closing { verdict: span.verdict(), unknown, ..Closing::new(times.1.min(i64::MAX - 1), Status::Blocked, None) }),
            fidelity: Fidelity::Blocked,
            first_recorded: Some(times),
            snapshot_before: span.opening.sees_workspace().then_some(at_start),
            snapshot_after: None,
            ..span.clone()
        };
        leave_out(source, &mut self.ran.spans, n);
    }

    fn execute(&mut self, n: usize, at_start: SnapshotRef, execution: &Execution) -> (Became, Option<Output>) {
        let fork = self.fork;
        if as_recorded(fork, &self.world, &self.memory, &self.end, n, execution) {
            self.ran.needless.insert(n);
        }
        let contract = Contract::patched(fork.source, &fork.patches, n).expect("it is executed");
        let reach = Reach { sees: &contract.footprint.sees, writes: &execution.writes };
        let (status, output, files) = self.world.physics.perform(&execution.action, &reach, &self.memory.files);
        let writes = changed(&self.memory.files, &files);
        let paths: Vec<_> = writes.keys().cloned().collect();
        self.memory.files = files;
        self.world.physics.meddle(&mut self.memory.files);
        let undeclared = execution.undeclared(&paths).filter(|_| !fork.check);
        if let (Some(key), Some(output), None) = (execution.cache_key, &output, undeclared) {
            self.world.cache.insert(key, (status, output.clone(), writes));
        }
        if fork.check {
            let Ok(reproduced) = self.replay.reproduced(n, status, output.as_ref(), &mut self.memory);
            return (Became::Reproduced(reproduced), output);
        }
        if let Some(path) = undeclared {
            let span = fork.source.spans[n].opening.name.clone();
            self.ran.early = Some(Early::UndeclaredWrite { span, path: path.to_owned() });
            return (Became::Executed, output);
        }
        if let Action::WriteFile { path, .. } = &execution.action {
            self.end.unknown.remove(path);
        }
        self.end.outputs.insert(n, output.clone().map(|output| SpanValue { output, status }));
        self.replay.executed(n, status, output.clone(), &paths);
        self.store(n, at_start, Fidelity::Reexecuted, (status, output.clone()), Some(execution));
        (Became::Executed, output)
    }

    fn apply(&mut self, all: &[WorkspaceChange]) {
        let Self { memory, end, .. } = self;
        for change in all {
            match change {
                WorkspaceChange::Restore(state) => {
                    memory.files = memory.states.of(state).clone();
                    end.unknown.clear();
                }
                WorkspaceChange::Recorded { state, paths } => {
                    let from = memory.states.of(state).clone();
                    for path in paths {
                        set(&mut memory.files, path, from.get(path));
                        end.unknown.remove(path);
                    }
                }
                WorkspaceChange::File { path, content, executable } => {
                    let content = String::from_utf8(content.to_vec()).expect("tests write text");
                    set(&mut memory.files, path, Some(&Entry::File { content, executable: *executable }));
                    end.unknown.remove(path);
                }
            }
        }
    }

    fn forget(&mut self, n: usize) {
        let patterns = self.fork.may_write(n);
        self.end.unknown.extend(self.world.paths.iter().filter(|p| covered(&patterns, p)).cloned());
    }

    /// The span as the fork's run has it.
    fn store(
        &mut self,
        n: usize,
        before: SnapshotRef,
        fidelity: Fidelity,
        (status, output): (Status, Option<Output>),
        execution: Option<&Execution>,
    ) {
        let fork = self.fork;
        let source = fork.source;
        let record = &source.spans[n];
        let times = source.interval(n);
        let mut opening = patched_opening(source, &fork.patches, n, record.opening.started);
        if let Some(execution) = execution {
            opening = executed(opening, &execution.rendered);
        }
        let after = self.memory.states.record(&self.memory.files.clone());
        let hidden = fidelity == Fidelity::Overridden && !source.shows_changes(n);
        let sees = record.opening.sees_workspace();
        let unknown = if hidden { fork.leaves_unknown(n) } else { vec![] };
        self.ran.spans[n] = Span {
            opening,
            closing: Some(Closing { verdict: record.verdict(), unknown, ..Closing::new(times.1.min(i64::MAX - 1), status, output) }),
            fidelity,
            first_recorded: Some(times),
            snapshot_before: sees.then_some(before),
            snapshot_after: (sees && !hidden).then_some(after),
            ..record.clone()
        };
        leave_out(source, &mut self.ran.spans, n);
    }
}

/// Whether every input of the step is what it was when recorded.
fn as_recorded(fork: &Prepared<'_>, world: &World<'_>, memory: &Memory, end: &End, n: usize, execution: &Execution) -> bool {
    let source = fork.source;
    let (Ok(now), Ok(then)) = (Contract::patched(source, &fork.patches, n), Contract::recorded(source, n)) else { return false };
    let unchanged = |d: &usize| end.outputs.get(d).is_none_or(|v| v.as_ref().map(seen) == value(source, *d).ok().as_ref().map(seen));
    let files = source.state_before(n).is_some_and(|before| {
        let before = memory.states.of(&before);
        world.paths.iter().filter(|p| covered(&now.footprint.sees, p)).all(|p| before.get(p) == memory.files.get(p))
    });
    fork.recorded_inputs(n).is_some_and(|then| *then == execution.rendered)
        && now.footprint.sees == then.footprint.sees
        && now.depends_on.iter().all(|d| source.is_unit(*d) && unchanged(d) && !source.was_left_out(*d))
        && (files || now.footprint.sees.is_empty())
        && !source.was_left_out(n)
}

fn leave_out(source: &Source, spans: &mut [Span], n: usize) {
    for &inner in source.inner(n) {
        let (started, ended) = source.interval(inner);
        spans[inner].closing = Some(Closing::new(ended.max(started), Status::Skipped, None));
        spans[inner].fidelity = Fidelity::Skipped;
        spans[inner].first_recorded = Some((started, ended));
    }
}
