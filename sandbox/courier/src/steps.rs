//! Span by span: keep, override, block or execute, and report before going on.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use replayfork_client::ClientError;
use replayfork_client::fork::{BeginSpan, CloseReason, EndSpan, ReusedSnapshots};
use replayfork_core::contract::{Action, executed};
use replayfork_core::model::{Closing, Executor as Recorded, Fidelity, Opening, Output, Span, Status, Verdict};
use replayfork_core::replay::{Execution, Replay, Step};
use replayfork_core::source::Source;
use replayfork_protocol::{Denied, Ended, Run, SCRATCH, ToExecutor};
use replayfork_snapshot::{read_file, write_file};
use tokio::sync::watch;

use crate::api::Api;
use crate::executor::Executor;
use crate::volumes::Full;
use crate::workspace::ForkWorkspace;

/// Bytes of a file that a FileRead gives.
const MAX_READ: u64 = 16 << 20;

/// How long after the executor's container the courier's may be told to end.
const SIGTERM_APART: Duration = Duration::from_secs(2);

/// Why the fork is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    Canceled,
    DeadlineExceeded,
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

    fn close(self) -> (CloseReason, String) {
        match self {
            Stop::Canceled => (CloseReason::Canceled, "canceled as asked".into()),
            Stop::DeadlineExceeded => (CloseReason::DeadlineExceeded, "spec.sandbox.deadlineSeconds is over; what was done is kept".into()),
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
}

impl Finish {
    pub fn new(reason: CloseReason, message: impl Into<String>, executor: Option<Executor>) -> Self {
        Self { reason, message: message.into(), executor, unreached_from: None }
    }

    fn stopped(stop: Stop, executor: Option<Executor>) -> Self {
        let (reason, message) = stop.close();
        Self::new(reason, message, executor)
    }

    fn before(self, span: &Span) -> Self {
        Self { unreached_from: Some(span.id.clone()), ..self }
    }
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as i64)
}

/// Resolves when the fork is stopped while it waits for its executor.
pub async fn stopped_before_start(mut stopped: watch::Receiver<Option<Stop>>) -> Finish {
    match stopped.wait_for(Option::is_some).await.ok().and_then(|s| *s) {
        Some(stop) => Finish::stopped(stop, None),
        None => std::future::pending().await,
    }
}

fn closing(status: Status, verdict: Verdict, output: Option<Output>) -> Closing {
    Closing { ended: now(), status, verdict, output, error: None, input_tokens: None, output_tokens: None, cost_usd: None, blocked: vec![] }
}

/// Carries out the plan.
///
/// # Errors
/// A fault of the sandbox's: the fork is then closed as SandboxFailed.
pub async fn run(
    api: &Api,
    source: &Source,
    mut replay: Replay<'_>,
    mut workspace: ForkWorkspace,
    mut executor: Executor,
    mut stopped: watch::Receiver<Option<Stop>>,
    root: &Path,
) -> anyhow::Result<Finish> {
    let mut previous: Option<&Span> = None;
    for index in replay.units() {
        let span = &source.spans[index];
        if let Some(stop) = *stopped.borrow() {
            return Ok(Finish::stopped(stop, Some(executor)).before(span));
        }
        if let (Some(after), Some(before)) = (previous.and_then(|p| p.snapshot_after), span.snapshot_before) {
            workspace.apply(&after, &before).await?;
            replay.gap_applied(index);
        }
        for state in [span.snapshot_before, span.snapshot_after].into_iter().flatten() {
            workspace.fetch(&state).await?;
        }
        let before = workspace.now;
        match replay.step(index, &mut workspace)? {
            Step::Keep { .. } => {
                keep(span, &mut workspace, root, source).await?;
                replay.kept(index);
                report_reused(api, span, before, &workspace).await?;
            }
            Step::Override(output) => {
                keep(span, &mut workspace, root, source).await?;
                let end = EndSpan {
                    fidelity: Fidelity::Overridden,
                    opening: Opening { started: now(), ..span.opening.clone() },
                    closing: closing(Status::Completed, span.verdict(), Some(output.clone())),
                    snapshot_before: Some(before),
                    snapshot_after: Some(workspace.now),
                    input_digest: None,
                };
                api.end(&span.id, &end).await?;
                replay.overridden(index, output);
            }
            Step::Block(blocked) => {
                let closing = Closing { blocked, ..closing(Status::Blocked, Verdict::None, None) };
                let opening = Opening { started: now(), ..span.opening.clone() };
                let end = EndSpan {
                    fidelity: Fidelity::Blocked,
                    opening,
                    closing,
                    snapshot_before: None,
                    snapshot_after: None,
                    input_digest: None,
                };
                api.end(&span.id, &end).await?;
                replay.blocked(index);
            }
            Step::Execute(execution) => {
                let done = execute(api, span, &execution, &mut workspace, &mut executor, &mut stopped, root).await?;
                match done {
                    Done::Ended { status, output, undeclared: None } => replay.executed(index, status, output),
                    Done::Ended { undeclared: Some(path), .. } => {
                        let message = format!(
                            "span {:?} changed {path:?}, which is outside of the writes it declares; declare it, or declare nothing",
                            span.opening.name
                        );
                        return Ok(Finish::new(CloseReason::UndeclaredWrite, message, Some(executor)));
                    }
                    Done::Stopped(stop) => return Ok(Finish::stopped(stop, Some(executor))),
                    Done::ImageNotUsable(message) => {
                        return Ok(Finish::new(CloseReason::ImageNotUsable, message, Some(executor)));
                    }
                    Done::ExecutorGone => {
                        let message = format!(
                            "the executor's container ended while span {:?} ran; raise spec.sandbox.resources.limits.memory",
                            span.opening.name
                        );
                        return Ok(Finish::new(CloseReason::OOMKilled, message, None));
                    }
                }
            }
            Step::Inconsistent { message, .. } => {
                return Ok(Finish::new(CloseReason::WorkspaceInconsistent, message, Some(executor)).before(span));
            }
        }
        if span.snapshot_after.is_some() {
            previous = Some(span);
        }
    }
    Ok(Finish::new(CloseReason::Succeeded, "every span of the plan was executed, reused, overridden or blocked as planned", Some(executor)))
}

/// The span's recorded changes happen; a recorded write happens whatever was there.
async fn keep(span: &Span, workspace: &mut ForkWorkspace, root: &Path, source: &Source) -> anyhow::Result<()> {
    if let (Some(before), Some(after)) = (span.snapshot_before, span.snapshot_after) {
        workspace.apply(&before, &after).await?;
    }
    if let Some(Recorded::FileWrite { path, content, executable }) = &span.opening.executor
        && span.status() == Status::Completed
        && span.snapshot_after.is_some_and(|after| after.content != workspace.now.content)
    {
        let path = replayfork_core::footprint::relative(path, source.root())?;
        write_file(root, &path, content.as_bytes(), *executable)?;
        workspace.capture().await?;
    }
    Ok(())
}

/// A reused span needs a row of its own only where its workspace differs from the recorded one.
async fn report_reused(
    api: &Api,
    span: &Span,
    before: replayfork_core::model::SnapshotRef,
    workspace: &ForkWorkspace,
) -> Result<(), ClientError> {
    let as_recorded = |state: Option<replayfork_core::model::SnapshotRef>, now: &replayfork_core::model::SnapshotRef| {
        state.is_none_or(|s| s.content == now.content)
    };
    if as_recorded(span.snapshot_before, &before) && as_recorded(span.snapshot_after, &workspace.now) {
        return Ok(());
    }
    api.reused(&ReusedSnapshots { span: span.id.clone(), snapshot_before: before, snapshot_after: workspace.now }).await
}

enum Done {
    Ended { status: Status, output: Option<Output>, undeclared: Option<String> },
    Stopped(Stop),
    ImageNotUsable(String),
    ExecutorGone,
}

async fn execute(
    api: &Api,
    span: &Span,
    execution: &Execution,
    workspace: &mut ForkWorkspace,
    executor: &mut Executor,
    stopped: &mut watch::Receiver<Option<Stop>>,
    root: &Path,
) -> anyhow::Result<Done> {
    let before = workspace.now;
    let opening = executed(&span.opening, &execution.rendered, now());
    api.begin(&span.id, &BeginSpan { opening: opening.clone(), input_digest: execution.input_digest }).await?;
    tracing::info!(span = span.id, "begun");
    let mut unusable = None;
    let (mut closing, stop) = match &execution.action {
        Action::Run(command) => {
            let command = Run {
                argv: command.argv.clone(),
                cwd: root.join(&command.cwd).to_string_lossy().into_owned(),
                env: command.env.clone(),
                stdin: command.stdin.clone(),
                timeout_ms: command.timeout_ms,
            };
            match run_command(executor, command, stopped).await {
                Ok((ended, stop)) => {
                    unusable = ended.denied.as_ref().and_then(|denied| image_unusable(denied, root));
                    (command_result(ended, stop), stop)
                }
                Err(_) => {
                    // SIGTERM reaches both containers, one a little before the other; the courier's own says which end it is.
                    let told = tokio::time::timeout(SIGTERM_APART, stopped.wait_for(Option::is_some)).await;
                    let stop = told.ok().and_then(|told| told.ok().and_then(|stop| *stop));
                    return Ok(stop.map_or(Done::ExecutorGone, Done::Stopped));
                }
            }
        }
        Action::ReadFile { path } => (file_result(read_file(root, path, MAX_READ)), None),
        Action::WriteFile { path, content, executable } => {
            let written = write_file(root, path, content.as_bytes(), *executable);
            (write_result(span, written), None)
        }
    };
    let changed = workspace.capture().await?;
    closing.verdict = span.verdict();
    closing.ended = now();
    let undeclared = execution.undeclared(&changed).map(str::to_owned);
    let (status, output) = (closing.status, closing.output.clone());
    let end = EndSpan {
        fidelity: Fidelity::Reexecuted,
        opening,
        closing,
        snapshot_before: Some(before),
        snapshot_after: Some(workspace.now),
        input_digest: Some(execution.input_digest),
    };
    api.end(&span.id, &end).await?;
    Ok(match (stop, unusable) {
        (Some(stop), _) => Done::Stopped(stop),
        (None, Some(message)) => Done::ImageNotUsable(message),
        (None, None) => Done::Ended { status, output, undeclared },
    })
}

/// What to say of a refusal that lies in the image; what a run has in its own folders may be refused in any image.
fn image_unusable(denied: &Denied, root: &Path) -> Option<String> {
    let path = Path::new(&denied.path);
    let ours = path.starts_with(root) || path.starts_with(SCRATCH);
    (!ours).then(|| {
        format!(
            "the image can't be used as uid {}: it may not enter or execute {:?}; set spec.sandbox.runAsUser or spec.sandbox.image",
            denied.uid, denied.path
        )
    })
}

async fn run_command(
    executor: &mut Executor,
    command: Run,
    stopped: &mut watch::Receiver<Option<Stop>>,
) -> std::io::Result<(Ended, Option<Stop>)> {
    executor.order(ToExecutor::Run(command))?;
    tokio::select! {
        ended = executor.ended() => return Ok((ended?, None)),
        _ = stopped.wait_for(Option::is_some) => {}
    }
    let stop = *stopped.borrow();
    executor.order(ToExecutor::Stop)?;
    Ok((executor.ended().await?, stop))
}

fn command_result(ended: Ended, stop: Option<Stop>) -> Closing {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).replace('\0', "\u{fffd}");
    let (stdout, stderr) = (text(ended.stdout), text(ended.stderr));
    let mut notes = Vec::new();
    if let Some(home) = ended.home_unusable {
        notes.push(format!("HOME was {SCRATCH}, since the recorded {home:?} can't be written in the sandbox"));
    }
    if ended.left_running > 0 {
        notes.push(format!("{} background processes were killed when the step ended", ended.left_running));
    }
    if ended.oom_kills > 0 {
        notes.push(format!("{} processes were killed for memory; raise spec.sandbox.resources.limits.memory", ended.oom_kills));
    }
    if ended.dropped > 0 {
        notes.push(format!("{} bytes of output were dropped", ended.dropped));
    }
    let (status, output) = match (ended.exit_code, stop) {
        (_, Some(stop)) => {
            let (reason, why) = stop.close();
            notes.push(format!("{reason}: the step was stopped; {why}"));
            (Status::Canceled, None)
        }
        (Some(code), None) => {
            let status = if code == 0 { Status::Completed } else { Status::Failed };
            (status, Some(Output { text: stdout.clone(), stdout, stderr, exit_code: Some(code) }))
        }
        (None, None) => {
            let why = ended
                .failed_start
                .unwrap_or_else(|| if ended.timed_out { "it ran into its timeout".into() } else { "it was stopped".into() });
            notes.push(why);
            (Status::Failed, None)
        }
    };
    Closing { error: (!notes.is_empty()).then(|| notes.join("; ")), ..closing(status, Verdict::None, output) }
}

fn file_result(read: Result<Vec<u8>, replayfork_snapshot::SnapshotError>) -> Closing {
    match read {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes).replace('\0', "\u{fffd}");
            closing(Status::Completed, Verdict::None, Some(Output { text: text.clone(), stdout: text, ..Output::default() }))
        }
        Err(error) => Closing { error: Some(error.to_string()), ..closing(Status::Failed, Verdict::None, None) },
    }
}

/// A write that succeeds gives what it gave when recorded: its output says nothing about the content.
fn write_result(span: &Span, written: Result<(), replayfork_snapshot::SnapshotError>) -> Closing {
    match written {
        Ok(()) => {
            let recorded = span.output().filter(|_| span.status() == Status::Completed).cloned();
            closing(Status::Completed, Verdict::None, Some(recorded.unwrap_or_default()))
        }
        Err(error) => Closing { error: Some(error.to_string()), ..closing(Status::Failed, Verdict::None, None) },
    }
}
