//! The product's way: plan, then only what the replay asks for.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use replayfork_core::Digest;
use replayfork_core::binding::SpanValue;
use replayfork_core::contract::{Action, Contract, executed, patched_opening};
use replayfork_core::footprint::Pattern;
use replayfork_core::model::{Closing, Fidelity, Output, SnapshotRef, Span, Status};
use replayfork_core::plan::Prepared;
use replayfork_core::replay::{Execution, Replay, Step, WorkspaceChange};
use replayfork_core::source::Source;

use crate::memory::Memory;
use crate::reference::{End, seen};
use crate::world::{PATHS, Reach, States, changes, covered, perform, set, value};

/// Results of other forks.
pub type Cache = BTreeMap<Digest, (Status, Output, BTreeMap<String, Option<String>>)>;

/// What came of a fork, besides its end.
#[derive(Default)]
pub struct Ran {
    pub executed: BTreeSet<usize>,
    pub served: BTreeSet<usize>,
    pub cached: BTreeSet<usize>,
    /// Executed though every input was as recorded.
    pub needless: BTreeSet<usize>,
    pub reasons: BTreeMap<usize, Vec<String>>,
    /// The fork as a run of its own.
    pub spans: Vec<Span>,
}

pub fn unknown_paths(fork: &Prepared<'_>) -> BTreeSet<String> {
    let mut unknown = BTreeSet::new();
    for (pattern, trigger) in fork.unknown_at_start() {
        for path in PATHS.iter().filter(|p| pattern.covers(&Pattern::Path((**p).to_owned()))) {
            if trigger.is_some() {
                unknown.insert((*path).to_owned())
            } else {
                unknown.remove(*path)
            };
        }
    }
    unknown
}

/// Carries a fork out. `salt` makes commands give other results than when recorded.
pub fn replayed(fork: &Prepared<'_>, states: &States, cache: &mut Cache, salt: &str) -> Result<(End, Ran, States), TestCaseError> {
    let source = fork.source;
    let mut replay = Replay::new(fork);
    let start = source.start_state(fork.first).map(|s| states.0[&s.content].clone()).unwrap_or_default();
    let mut memory = Memory { states: states.clone(), files: start };
    let mut end = End { unknown: unknown_paths(fork), ..End::default() };
    let mut ran = Ran { spans: source.spans.clone(), ..Ran::default() };
    for n in fork.units() {
        let before = replay.before(n);
        apply(&mut memory, &mut end, &before);
        let at_start = memory.states.record(&memory.files.clone());
        let mut step = replay.step(n, &mut memory).unwrap();
        if let Step::Cached { key, otherwise } = step {
            if let Some((status, output, writes)) = cache.get(&key) {
                ran.cached.insert(n);
                let changed: Vec<_> = writes.keys().cloned().collect();
                for (path, content) in writes {
                    set(&mut memory.files, path, content.as_ref());
                }
                end.outputs.insert(n, Some(SpanValue { output: output.clone(), status: *status }));
                replay.executed(n, *status, Some(output.clone()), &changed);
                store(fork, &mut ran, &mut memory, n, at_start, Fidelity::Reused, (*status, Some(output.clone())), None);
                continue;
            }
            step = *otherwise;
        }
        match step {
            Step::Keep { changes, .. } => {
                apply(&mut memory, &mut end, &changes);
                replay.kept(n);
                end.outputs.insert(n, value(source, n).ok());
                let after = memory.states.record(&memory.files.clone());
                let times = source.interval(n);
                let span = &mut ran.spans[n];
                let differs = |state: Option<SnapshotRef>, now: SnapshotRef| state.is_some_and(|s| s.content != now.content);
                if differs(span.snapshot_before, at_start) || differs(span.snapshot_after, after) {
                    span.snapshot_before = span.snapshot_before.map(|_| at_start);
                    span.snapshot_after = span.snapshot_after.map(|_| after);
                    span.first_recorded = Some(times);
                }
            }
            Step::Override { output, changes } => {
                apply(&mut memory, &mut end, &changes);
                replay.overridden(n, output.clone());
                if !source.shows_changes(n) {
                    forget(fork, &mut end, n);
                }
                end.outputs.insert(n, Some(SpanValue { output: output.clone(), status: Status::Completed }));
                store(fork, &mut ran, &mut memory, n, at_start, Fidelity::Overridden, (Status::Completed, Some(output)), None);
            }
            Step::Block { blocked, unknown } => {
                ran.reasons.insert(n, blocked.iter().map(|b| b.reason.to_string()).collect());
                end.blocked.insert(n);
                forget(fork, &mut end, n);
                replay.blocked(n);
                let opening = patched_opening(source, &fork.patches, n, source.spans[n].opening.started);
                let span = &mut ran.spans[n];
                let times = source.interval(n);
                *span = Span {
                    opening,
                    closing: Some(Closing { unknown, ..Closing::new(times.1.min(i64::MAX - 1), Status::Blocked, None) }),
                    fidelity: Fidelity::Blocked,
                    first_recorded: Some(times),
                    snapshot_before: None,
                    snapshot_after: None,
                    ..span.clone()
                };
                leave_out(source, &mut ran.spans, n);
            }
            Step::Serve(execution, answer) => {
                ran.served.insert(n);
                let output = answer.output();
                end.outputs.insert(n, Some(SpanValue { output: output.clone(), status: Status::Completed }));
                replay.executed(n, Status::Completed, Some(output.clone()), &[]);
                store(
                    fork,
                    &mut ran,
                    &mut memory,
                    n,
                    at_start,
                    Fidelity::ServedFromRecording,
                    (Status::Completed, Some(output)),
                    Some(&execution),
                );
            }
            Step::Execute(execution) => {
                ran.executed.insert(n);
                if as_recorded(fork, &memory, &end, n, &execution) {
                    ran.needless.insert(n);
                }
                let contract = Contract::patched(source, &fork.patches, n).unwrap();
                let reach = Reach { sees: &contract.footprint.sees, writes: &execution.writes };
                let asks = matches!(execution.action, Action::AskModel { .. });
                let salt = if asks { "command" } else { salt };
                let (status, output, files) = perform(&execution.action, &reach, &memory.files, salt);
                let changed = changes(&memory.files, &files);
                if let Action::WriteFile { path, .. } = &execution.action {
                    end.unknown.remove(path);
                }
                if let Some(key) = execution.cache_key {
                    let writes = changed.iter().map(|p| (p.clone(), files.get(p).cloned())).collect();
                    cache.insert(key, (status, output.clone(), writes));
                }
                memory.files = files;
                end.outputs.insert(n, Some(SpanValue { output: output.clone(), status }));
                replay.executed(n, status, Some(output.clone()), &changed);
                store(fork, &mut ran, &mut memory, n, at_start, Fidelity::Reexecuted, (status, Some(output)), Some(&execution));
            }
            Step::Inconsistent { message, .. } => return Err(TestCaseError::fail(message)),
            Step::Cached { .. } | Step::NotExecutable(_) => return Err(TestCaseError::fail("no step of a fork with patches")),
        }
    }
    end.files = memory.files;
    Ok((end, ran, memory.states))
}

/// Whether every input of the step is what it was when recorded.
fn as_recorded(fork: &Prepared<'_>, memory: &Memory, end: &End, n: usize, execution: &Execution) -> bool {
    let source = fork.source;
    let (Ok(now), Ok(then)) = (Contract::patched(source, &fork.patches, n), Contract::recorded(source, n)) else { return false };
    let unchanged = |d: &usize| end.outputs.get(d).is_none_or(|v| v.as_ref().map(seen) == value(source, *d).ok().as_ref().map(seen));
    let files = source.state_before(n).is_some_and(|before| {
        let before = &memory.states.0[&before.content];
        PATHS.iter().filter(|p| covered(&now.footprint.sees, p)).all(|p| before.get(*p) == memory.files.get(*p))
    });
    fork.recorded_inputs(n).is_some_and(|then| *then == execution.rendered)
        && now.footprint.sees == then.footprint.sees
        && now.depends_on.iter().all(|d| source.is_unit(*d) && unchanged(d) && !source.was_left_out(*d))
        && (files || now.footprint.sees.is_empty())
        && !source.was_left_out(n)
}

fn apply(memory: &mut Memory, end: &mut End, all: &[WorkspaceChange]) {
    for change in all {
        match change {
            WorkspaceChange::Restore(state) => {
                memory.files = memory.states.0[&state.content].clone();
                end.unknown.clear();
            }
            WorkspaceChange::Recorded { state, paths } => {
                let from = memory.states.0[&state.content].clone();
                for path in paths {
                    set(&mut memory.files, path, from.get(path));
                    end.unknown.remove(path);
                }
            }
            WorkspaceChange::File { path, content, .. } => {
                memory.files.insert(path.clone(), String::from_utf8(content.to_vec()).unwrap());
                end.unknown.remove(path);
            }
        }
    }
}

fn forget(fork: &Prepared<'_>, end: &mut End, n: usize) {
    let patterns = fork.may_write(n);
    end.unknown.extend(PATHS.iter().filter(|p| covered(&patterns, p)).map(|p| (*p).to_owned()));
}

fn leave_out(source: &Source, spans: &mut [Span], n: usize) {
    for &inner in source.inner(n) {
        let (started, ended) = source.interval(inner);
        spans[inner].closing = Some(Closing::new(ended.max(started), Status::Skipped, None));
        spans[inner].fidelity = Fidelity::Skipped;
        spans[inner].first_recorded = Some((started, ended));
    }
}

/// The span as the fork's run has it.
#[allow(clippy::too_many_arguments)]
fn store(
    fork: &Prepared<'_>,
    ran: &mut Ran,
    memory: &mut Memory,
    n: usize,
    before: SnapshotRef,
    fidelity: Fidelity,
    (status, output): (Status, Option<Output>),
    execution: Option<&Execution>,
) {
    let source = fork.source;
    let record = &source.spans[n];
    let times = source.interval(n);
    let mut opening = patched_opening(source, &fork.patches, n, record.opening.started);
    if let Some(execution) = execution {
        opening = executed(opening, &execution.rendered);
    }
    let after = memory.states.record(&memory.files.clone());
    let sees = record.opening.sees_workspace() && (fidelity != Fidelity::Overridden || source.shows_changes(n));
    let unknown = if fidelity == Fidelity::Overridden && !source.shows_changes(n) {
        fork.may_write(n).iter().map(Pattern::declared).collect()
    } else {
        vec![]
    };
    ran.spans[n] = Span {
        opening,
        closing: Some(Closing { verdict: record.verdict(), unknown, ..Closing::new(times.1.min(i64::MAX - 1), status, output) }),
        fidelity,
        first_recorded: Some(times),
        snapshot_before: sees.then_some(before),
        snapshot_after: sees.then_some(after),
        ..record.clone()
    };
    leave_out(source, &mut ran.spans, n);
}
