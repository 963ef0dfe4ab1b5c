//! Span by span: keep, override, block or execute, and report before going on.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use replayfork_client::ClientError;
use replayfork_client::fork::{BeginSpan, CloseReason, EndSpan, Reproducibility, ReusedSnapshots};
use replayfork_core::answers::Answer;
use replayfork_core::contract::{executed, patched_opening};
use replayfork_core::model::{Closing, Fidelity, Inputs, Opening, Output, SnapshotRef, Status};
use replayfork_core::plan::Prepared;
use replayfork_core::reason::Blocked;
use replayfork_core::replay::{Execution, Replay, Reproduced, Step};
use tokio::sync::watch;

use crate::api::Api;
use crate::execute::Attempt;
use crate::executor::Executor;
use crate::volumes::Full;
use crate::workspace::ForkWorkspace;

/// Why the fork is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Canceled,
    /// After this many seconds.
    DeadlineExceeded(u64),
    /// A volume is about to outgrow its limit.
    Full(Full),
    /// The pod is going away.
    Interrupted,
    /// Somebody else has ended the fork.
    Ended,
}

impl Stop {
    /// Stops the fork for this reason, unless it has been for another one.
    pub fn tell(self, stop: &watch::Sender<Option<Stop>>) {
        stop.send_if_modified(|current| {
            let first = current.is_none();
            current.get_or_insert(self);
            first
        });
    }

    pub fn close(self) -> (CloseReason, String) {
        match self {
            Stop::Canceled => (CloseReason::Canceled, "canceled as asked".into()),
            Stop::DeadlineExceeded(seconds) => {
                (CloseReason::DeadlineExceeded, format!("the {seconds} s of spec.sandbox.deadlineSeconds are over; what was done is kept"))
            }
            Stop::Full(full) => (CloseReason::WorkspaceFull, full.to_string()),
            Stop::Interrupted => {
                (CloseReason::Interrupted, "the pod was told to end (a drain, an eviction, or its Job was deleted)".into())
            }
            Stop::Ended => (CloseReason::Interrupted, "the fork was ended elsewhere".into()),
        }
    }
}

/// How the fork ends, and who still waits to hear of it.
pub struct Finish {
    pub reason: CloseReason,
    pub message: String,
    pub executor: Option<Executor>,
    /// The first span that was not decided about, where no row says so.
    pub unreached_from: Option<String>,
    pub reproducibility: Option<Reproducibility>,
    pub warnings: Vec<String>,
}

impl Finish {
    pub fn new(reason: CloseReason, message: impl Into<String>, executor: Option<Executor>) -> Self {
        Self { reason, message: message.into(), executor, unreached_from: None, reproducibility: None, warnings: Vec::new() }
    }

    fn stopped(stop: Stop, executor: Option<Executor>) -> Self {
        let (reason, message) = stop.close();
        Self::new(reason, message, executor)
    }
}

pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i64)
}

/// Resolves when the fork is stopped while it waits for its executor.
pub async fn stopped_before_start(mut stopped: watch::Receiver<Option<Stop>>) -> Finish {
    match stopped.wait_for(Option::is_some).await.ok().and_then(|s| *s) {
        Some(stop) => Finish::stopped(stop, None),
        None => std::future::pending().await,
    }
}

/// What the walk acts on.
pub struct Outside<'a> {
    pub api: &'a Api,
    pub workspace: ForkWorkspace,
    pub executor: Executor,
    pub stopped: watch::Receiver<Option<Stop>>,
    pub root: &'a Path,
}

/// The walk over the units.
struct Walk<'a> {
    fork: &'a Prepared<'a>,
    replay: Replay<'a>,
    out: Outside<'a>,
    reproducibility: Reproducibility,
}

/// Carries out the plan.
///
/// # Errors
/// A fault of the sandbox's: the fork is then closed as SandboxFailed.
pub async fn run<'a>(fork: &'a Prepared<'a>, replay: Replay<'a>, out: Outside<'a>) -> anyhow::Result<Finish> {
    let mut walk = Walk { fork, replay, out, reproducibility: Reproducibility::default() };
    let mut ended = None;
    for index in fork.units() {
        let span = &fork.source.spans[index];
        let stop = *walk.out.stopped.borrow();
        if let Some(stop) = stop {
            ended = Some(End { reached: false, ..End::stopped(stop) });
        } else {
            ended = walk.visit(index).await?;
        }
        if let Some(end) = &mut ended {
            end.unreached_from = (!end.reached).then(|| span.id.clone());
            break;
        }
    }
    let Walk { mut replay, out, reproducibility, .. } = walk;
    let end = ended.unwrap_or_else(|| {
        let (reason, message) = if fork.check {
            let message = format!(
                "{} steps gave what they gave when recorded, {} something else, {} can't be run again",
                reproducibility.identical, reproducibility.differs, reproducibility.not_executable
            );
            (CloseReason::Succeeded, message)
        } else {
            let (reason, message) = CloseReason::of_plan(&replay.plan);
            (reason, message.to_owned())
        };
        End::new(reason, message)
    });
    let executor = (!end.executor_gone).then_some(out.executor);
    let mut warnings = replay.plan.warnings.clone();
    warnings.append(&mut replay.warnings);
    let reproducibility = fork.check.then_some(reproducibility);
    Ok(Finish { unreached_from: end.unreached_from, reproducibility, warnings, ..Finish::new(end.reason, end.message, executor) })
}

/// Why the walk ends before its last unit.
struct End {
    reason: CloseReason,
    message: String,
    /// Something was reported of the unit at which it ends.
    reached: bool,
    executor_gone: bool,
    unreached_from: Option<String>,
}

impl End {
    fn new(reason: CloseReason, message: String) -> Self {
        Self { reason, message, reached: true, executor_gone: false, unreached_from: None }
    }

    fn stopped(stop: Stop) -> Self {
        let (reason, message) = stop.close();
        Self::new(reason, message)
    }
}

impl Walk<'_> {
    async fn visit(&mut self, index: usize) -> anyhow::Result<Option<End>> {
        self.fetch_states(index).await?;
        let changes = self.replay.before(index);
        self.out.workspace.change(&changes).await?;
        let before = self.out.workspace.now;
        let mut step = self.replay.step(index, &mut self.out.workspace)?;
        if let Step::Cached { key, otherwise } = step {
            if self.use_cached(index, before, &key, &otherwise).await? {
                return Ok(None);
            }
            step = *otherwise;
        }
        match step {
            Step::Keep { changes, .. } => {
                self.out.workspace.change(&changes).await?;
                self.replay.kept(index);
                if !self.fork.check {
                    self.report_reused(index, before).await?;
                }
            }
            Step::Override { output, changes } => {
                self.out.workspace.change(&changes).await?;
                self.override_with(index, before, output).await?;
            }
            Step::Block { blocked, unknown } => self.block(index, before, blocked, unknown).await?,
            Step::Serve(execution, answer) => self.serve(index, before, &execution, &answer).await?,
            Step::Execute(execution) => return self.execute(index, before, &execution).await,
            Step::NotExecutable(blocked) => {
                self.end(index, &EndSpan::not_executable(&self.fork.source.spans[index], blocked)).await?;
                self.reproducibility.not_executable += 1;
            }
            Step::Inconsistent { message, .. } => {
                return Ok(Some(End { reached: false, ..End::new(CloseReason::WorkspaceInconsistent, message) }));
            }
            Step::Cached { .. } => anyhow::bail!("a cached result stands for another one"),
        }
        Ok(None)
    }

    /// What the decision about a unit looks at.
    async fn fetch_states(&mut self, index: usize) -> anyhow::Result<()> {
        let (source, span) = (self.fork.source, &self.fork.source.spans[index]);
        let unknown = span.opening.inputs == Inputs::Unknown;
        let patched = source.state_for_patches(index).filter(|_| unknown);
        let states = [span.snapshot_before, span.snapshot_after, source.state_before(index), source.state_after(index), patched];
        for state in states.into_iter().flatten() {
            self.out.workspace.fetch(&state).await?;
        }
        Ok(())
    }

    fn opening(&self, index: usize) -> Opening {
        patched_opening(self.fork.source, &self.fork.patches, index, now())
    }

    /// Spans that run as part of this one, and have no result of their own any more.
    fn left_out(&self, index: usize) -> Vec<String> {
        self.fork.source.inner(index).iter().map(|&i| self.fork.source.spans[i].id.clone()).collect()
    }

    /// A result without an execution.
    fn end_of(&self, index: usize, fidelity: Fidelity, closing: Closing, states: Option<(SnapshotRef, SnapshotRef)>) -> EndSpan {
        EndSpan {
            snapshot_before: states.map(|s| s.0),
            snapshot_after: states.map(|s| s.1),
            left_out: self.left_out(index),
            ..EndSpan::new(fidelity, self.opening(index), closing)
        }
    }

    async fn end(&self, index: usize, end: &EndSpan) -> Result<(), ClientError> {
        self.out.api.end(&self.fork.source.spans[index].id, end, self.out.workspace.store()).await
    }

    async fn override_with(&mut self, index: usize, before: SnapshotRef, output: Output) -> anyhow::Result<()> {
        let span = &self.fork.source.spans[index];
        let mut closing = Closing { verdict: span.verdict(), ..Closing::new(now(), Status::Completed, Some(output.clone())) };
        let hidden = !self.fork.source.shows_changes(index);
        if hidden {
            closing.unknown = self.fork.leaves_unknown(index);
        }
        let mut end = self.end_of(index, Fidelity::Overridden, closing, Some((before, self.out.workspace.now)));
        if hidden {
            end.snapshot_after = None;
        }
        self.end(index, &end).await?;
        self.replay.overridden(index, output);
        Ok(())
    }

    async fn block(&mut self, index: usize, before: SnapshotRef, blocked: Vec<Blocked>, unknown: Vec<String>) -> anyhow::Result<()> {
        // The verdict stays: a fork of this fork is no way around a gate.
        let span = &self.fork.source.spans[index];
        let verdict = span.verdict();
        let closing = Closing { verdict, blocked, unknown, ..Closing::new(now(), Status::Blocked, None) };
        let mut end = self.end_of(index, Fidelity::Blocked, closing, None);
        // A fork of this fork may begin here.
        end.snapshot_before = span.opening.sees_workspace().then_some(before);
        self.end(index, &end).await?;
        self.replay.blocked(index);
        Ok(())
    }

    /// A recorded answer; nothing was spent for it.
    async fn serve(&mut self, index: usize, before: SnapshotRef, execution: &Execution, answer: &Answer) -> anyhow::Result<()> {
        let span = &self.fork.source.spans[index];
        let output = answer.output();
        let mut closing = Closing { verdict: span.verdict(), ..Closing::new(now(), Status::Completed, Some(output.clone())) };
        if self.fork.check {
            closing.reproduced = Some(self.compare(index, Status::Completed, Some(&output), &mut closing.error)?);
        }
        let mut end = self.end_of(index, Fidelity::ServedFromRecording, closing, None);
        end.opening = executed(end.opening, &execution.rendered);
        end.input_digest = Some(execution.input_digest);
        if span.snapshot_before.is_some() {
            (end.snapshot_before, end.snapshot_after) = (Some(before), Some(self.out.workspace.now));
        }
        self.end(index, &end).await?;
        self.replay.executed(index, Status::Completed, Some(output), &[]);
        Ok(())
    }

    /// Another fork's result, if there is one.
    async fn use_cached(
        &mut self,
        index: usize,
        before: SnapshotRef,
        key: &replayfork_core::Digest,
        otherwise: &Step,
    ) -> anyhow::Result<bool> {
        let Some(result) = self.out.api.cached(key).await? else { return Ok(false) };
        let mut changed = Vec::new();
        if let (Some(then), Some(after)) = (result.snapshot_before, result.snapshot_after) {
            changed = self.out.workspace.difference(&then, &after).await?;
            let change = replayfork_core::replay::WorkspaceChange::Recorded { state: after, paths: changed.clone() };
            self.out.workspace.change(&[change]).await?;
        }
        let status = result.closing.status;
        let output = result.closing.output.clone();
        let note = format!("the result of span {:?} of run {}, which had the same inputs", result.span, result.run);
        let closing =
            Closing { verdict: self.fork.source.spans[index].verdict(), error: Some(note), ..Closing::new(now(), status, output.clone()) };
        let mut end = self.end_of(index, Fidelity::Reused, closing, Some((before, self.out.workspace.now)));
        if let Step::Execute(execution) | Step::Serve(execution, _) = otherwise {
            end.opening = executed(end.opening, &execution.rendered);
            end.input_digest = Some(execution.input_digest);
        }
        self.end(index, &end).await?;
        self.replay.executed(index, status, output, &changed);
        Ok(true)
    }

    async fn execute(&mut self, index: usize, before: SnapshotRef, execution: &Execution) -> anyhow::Result<Option<End>> {
        let span = &self.fork.source.spans[index];
        let opening = executed(self.opening(index), &execution.rendered);
        self.out.api.begin(&span.id, &BeginSpan { opening: opening.clone(), input_digest: execution.input_digest }).await?;
        tracing::info!(span = span.id, "begun");
        let attempt = crate::execute::attempt(self.fork, span, execution, &mut self.out).await?;
        let Attempt { mut closing, stop, unusable } = match attempt {
            Ok(attempt) => attempt,
            // SIGTERM reaches both containers, one a little before the other; the courier's own says which end it is.
            Err(Some(stop)) => return Ok(Some(End::stopped(stop))),
            Err(None) => {
                let message = format!(
                    "the executor's container was killed while span {:?} ran, as a node does where memory runs out; raise spec.sandbox.resources.limits.memory, unless somebody killed it by hand",
                    span.opening.name
                );
                return Ok(Some(End { executor_gone: true, ..End::new(CloseReason::OOMKilled, message) }));
            }
        };
        let changed = self.out.workspace.capture().await?;
        closing.verdict = span.verdict();
        closing.ended = now();
        if let Some(first) = self.out.workspace.unread.first() {
            let more = match self.out.workspace.unread.len() - 1 {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let note = format!("{:?}{more} can't be read ({}), so the recorded workspace lacks it", first.path, first.why);
            closing.error = Some(closing.error.take().map_or_else(|| note.clone(), |error| format!("{error}; {note}")));
        }
        let (status, output) = (closing.status, closing.output.clone());
        let whole = stop.is_none() && unusable.is_none();
        let mut states = (Some(before), Some(self.out.workspace.now));
        if self.fork.check && whole {
            closing.reproduced = Some(self.compare(index, status, output.as_ref(), &mut closing.error)?);
            // A check leaves the workspace as it was recorded.
            states = (span.snapshot_before, span.snapshot_after);
        }
        let undeclared = execution.undeclared(&changed).map(str::to_owned).filter(|_| !self.fork.check);
        let end = EndSpan {
            fidelity: Fidelity::Reexecuted,
            opening,
            closing,
            snapshot_before: states.0,
            snapshot_after: states.1,
            input_digest: Some(execution.input_digest),
            cache_key: execution.cache_key.filter(|_| whole && undeclared.is_none()),
            left_out: if self.fork.check { Vec::new() } else { self.left_out(index) },
        };
        self.end(index, &end).await?;
        Ok(match (stop, unusable, undeclared) {
            (Some(stop), _, _) => Some(End::stopped(stop)),
            (None, Some(message), _) => Some(End::new(CloseReason::ImageNotUsable, message)),
            (None, None, Some(path)) => {
                let message = format!(
                    "span {:?} changed {path:?}, which is outside of the writes it declares; declare it, or declare nothing",
                    span.opening.name
                );
                Some(End::new(CloseReason::UndeclaredWrite, message))
            }
            (None, None, None) => {
                self.replay.executed(index, status, output, &changed);
                None
            }
        })
    }

    /// Of a check: whether the step gave what it gave when recorded.
    fn compare(&mut self, index: usize, status: Status, output: Option<&Output>, error: &mut Option<String>) -> anyhow::Result<bool> {
        match self.replay.reproduced(index, status, output, &mut self.out.workspace)? {
            Reproduced::Identical => {
                self.reproducibility.identical += 1;
                Ok(true)
            }
            Reproduced::Differs(respects) => {
                self.reproducibility.differs += 1;
                let note = format!("not as recorded: {}", respects.join(", "));
                *error = Some(error.take().map_or_else(|| note.clone(), |e| format!("{e}; {note}")));
                Ok(false)
            }
        }
    }

    /// A reused span needs a row of its own only where its workspace differs from the recorded one.
    async fn report_reused(&self, index: usize, before: SnapshotRef) -> Result<(), ClientError> {
        let span = &self.fork.source.spans[index];
        let now = self.out.workspace.now;
        let as_recorded = |state: Option<SnapshotRef>, now: SnapshotRef| state.is_none_or(|s| s.content == now.content);
        if as_recorded(span.snapshot_before, before) && as_recorded(span.snapshot_after, now) {
            return Ok(());
        }
        let states = ReusedSnapshots { span: span.id.clone(), snapshot_before: before, snapshot_after: now };
        self.out.api.reused(&states, self.out.workspace.store()).await
    }
}
