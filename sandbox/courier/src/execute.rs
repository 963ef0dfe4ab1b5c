//! One step that is really executed: in the executor's container, on the workspace, or by a model.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use replayfork_core::answers::Answer;
use replayfork_core::contract::Action;
use replayfork_core::fork::{ModelMode, ModelSpec};
use replayfork_core::model::{Closing, Output, Span, Status};
use replayfork_core::plan::Prepared;
use replayfork_core::replay::Execution;
use replayfork_protocol::{Denied, Ended, Run, SCRATCH, ToExecutor};
use replayfork_snapshot::read_file;
use serde_json::Value;
use tokio::sync::watch;

use crate::executor::Executor;
use crate::steps::{Outside, Stop, now};

/// Bytes of a file that a FileRead gives.
const MAX_READ: u64 = 16 << 20;
/// Seconds that a model's command has for an answer, where the spec says nothing.
const MODEL_TIMEOUT: i64 = 60;

/// How long after the executor's container the courier's may be told to end.
const SIGTERM_APART: Duration = Duration::from_secs(2);

/// What came of it.
pub struct Attempt {
    pub closing: Closing,
    /// It was stopped.
    pub stop: Option<Stop>,
    /// The image does not let it run.
    pub unusable: Option<String>,
}

impl From<Closing> for Attempt {
    fn from(closing: Closing) -> Self {
        Self { closing, stop: None, unusable: None }
    }
}

/// Executes a step that was begun. Inside, an error is the end of the executor's container, with what it was told to stop for.
///
/// # Errors
/// The api-server refuses.
pub async fn attempt(
    fork: &Prepared<'_>,
    span: &Span,
    execution: &Execution,
    out: &mut Outside<'_>,
) -> anyhow::Result<Result<Attempt, Option<Stop>>> {
    let closing = match &execution.action {
        Action::Run(command) => {
            let command = Run {
                argv: command.argv.clone(),
                cwd: out.root.join(&command.cwd).to_string_lossy().into_owned(),
                env: command.env.clone(),
                stdin: command.stdin.clone(),
                timeout_ms: command.timeout_ms,
            };
            return Ok(in_executor(command, out).await.map(|(ended, stop)| Attempt {
                unusable: ended.denied.as_ref().and_then(|denied| image_unusable(denied, out.root)),
                closing: command_result(ended, stop),
                stop,
            }));
        }
        Action::AskModel { request } if fork.spec.model.mode == ModelMode::Command => {
            let command = model_command(&fork.spec.model, request, out.root);
            return Ok(in_executor(command, out).await.map(|(ended, stop)| Attempt {
                unusable: ended.denied.as_ref().and_then(|denied| image_unusable(denied, out.root)),
                closing: answer_of(ended, stop),
                stop,
            }));
        }
        Action::AskModel { request } => {
            let answered = out.api.ask_model(&span.id, request).await?;
            match (answered.response, answered.error) {
                (Some(response), _) => model_closing(Answer::parse(&response)),
                (None, error) => model_closing(Err(error.unwrap_or_else(|| "the endpoint gave no answer".to_owned()))),
            }
        }
        Action::ReadFile { path } => file_result(read_file(out.root, path, MAX_READ)),
        Action::WriteFile { path, content, executable } => {
            let written = out.workspace.put_file(path, content.as_bytes(), *executable);
            write_result(span, written)
        }
    };
    Ok(Ok(closing.into()))
}

async fn in_executor(command: Run, out: &mut Outside<'_>) -> Result<(Ended, Option<Stop>), Option<Stop>> {
    match run_command(&mut out.executor, command, &mut out.stopped).await {
        Ok(ended) => Ok(ended),
        Err(_) => {
            let told = tokio::time::timeout(SIGTERM_APART, out.stopped.wait_for(Option::is_some)).await;
            Err(told.ok().and_then(|told| told.ok().and_then(|stop| *stop)))
        }
    }
}

fn model_command(model: &ModelSpec, request: &Value, root: &Path) -> Run {
    let command = model.command.as_ref();
    let env = [("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"), ("HOME", SCRATCH), ("LANG", "C.UTF-8")];
    Run {
        argv: command.map(|c| c.argv.clone()).unwrap_or_default(),
        cwd: root.to_string_lossy().into_owned(),
        env: env.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect::<BTreeMap<_, _>>(),
        stdin: request.to_string(),
        timeout_ms: Some(command.and_then(|c| c.timeout_seconds).unwrap_or(MODEL_TIMEOUT).max(1) as u64 * 1000),
    }
}

/// What a model's command printed, as an answer.
fn answer_of(ended: Ended, stop: Option<Stop>) -> Closing {
    let dropped = ended.dropped;
    let ran = command_result(ended, stop);
    let Some(output) = ran.output.as_ref().filter(|_| stop.is_none()) else { return ran };
    let answer = if dropped > 0 {
        Err(format!("the model's command printed {dropped} bytes too many"))
    } else if output.exit_code != Some(0) {
        let said: String = output.stderr.trim().chars().take(500).collect();
        Err(format!("the model's command exited with {}: {said}", output.exit_code.unwrap_or(-1)))
    } else {
        serde_json::from_str::<Value>(output.stdout.trim())
            .map_err(|e| format!("the model's command printed no JSON: {e}"))
            .and_then(|response| Answer::parse(&response))
    };
    let closing = model_closing(answer);
    let notes: Vec<_> = [ran.error, closing.error.clone()].into_iter().flatten().collect();
    Closing { error: (!notes.is_empty()).then(|| notes.join("; ")), ..closing }
}

fn model_closing(answer: Result<Answer, String>) -> Closing {
    match answer {
        Ok(answer) => Closing {
            input_tokens: answer.input_tokens,
            output_tokens: answer.output_tokens,
            cost_usd: answer.cost_usd,
            ..Closing::new(now(), Status::Completed, Some(answer.output()))
        },
        Err(error) => Closing { error: Some(error), ..Closing::new(now(), Status::Failed, None) },
    }
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
            let timed_out = ended.timed_out.map(|ms| format!("it was stopped after {} s, its timeout", ms as f64 / 1000.0));
            let why = ended.failed_start.or(timed_out).unwrap_or_else(|| "it was stopped".into());
            notes.push(why);
            (Status::Failed, None)
        }
    };
    Closing { error: (!notes.is_empty()).then(|| notes.join("; ")), ..Closing::new(now(), status, output) }
}

fn file_result(read: Result<Vec<u8>, replayfork_snapshot::SnapshotError>) -> Closing {
    match read {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes).replace('\0', "\u{fffd}");
            Closing::new(now(), Status::Completed, Some(Output { text: text.clone(), stdout: text, ..Output::default() }))
        }
        Err(error) => Closing { error: Some(error.to_string()), ..Closing::new(now(), Status::Failed, None) },
    }
}

/// A write that succeeds gives what it gave when recorded: its output says nothing about the content.
fn write_result(span: &Span, written: Result<(), replayfork_snapshot::SnapshotError>) -> Closing {
    match written {
        Ok(()) => {
            let recorded = span.output().filter(|_| span.status() == Status::Completed).cloned();
            Closing::new(now(), Status::Completed, Some(recorded.unwrap_or_default()))
        }
        Err(error) => Closing { error: Some(error.to_string()), ..Closing::new(now(), Status::Failed, None) },
    }
}
