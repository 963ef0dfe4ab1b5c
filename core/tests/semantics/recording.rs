//! `yaml run=NAME`: a run in few words, recorded as a recorder would.

use std::collections::BTreeMap;

use replayfork_core::contract::{Contract, action};
use replayfork_core::model::{
    Binding, Closing, Executor, Inputs, Opening, Output, ReplayPolicy, RunEnvironment, Shell, Span, SpanKind, Status, Verdict,
    WorkspaceAccess,
};
use replayfork_core::source::Source;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::common::facts;
use crate::common::files::{Files, Reach, States};
use crate::common::product::{Physics, value};
use crate::common::recorder::Recorder;
use crate::common::shell::Toy;

/// What `date` says when a run is recorded.
pub const TODAY: &str = "Monday";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Run {
    image: Option<String>,
    /// The workspace as the agent finds it.
    #[serde(default)]
    files: Files,
    steps: Vec<Step>,
}

/// A step: the fields of a span as a recorder takes them, and a few short forms.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    name: String,
    /// Default: the name.
    id: Option<String>,
    /// Default: by what the step does.
    kind: Option<SpanKind>,
    /// Name of the step that it lies in.
    parent: Option<String>,

    script: Option<String>,
    argv: Option<Vec<String>>,
    cwd: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    stdin: Option<String>,
    /// FileRead of this path.
    read: Option<String>,
    /// FileWrite of this path.
    write: Option<String>,
    content: Option<String>,
    /// LlmCall with this message of the user's.
    ask: Option<String>,
    system: Option<String>,

    #[serde(default)]
    input_bindings: BTreeMap<String, Binding>,
    #[serde(default)]
    depends_on: Vec<String>,
    #[serde(default)]
    inputs: Inputs,
    reads: Option<Vec<String>>,
    writes: Option<Vec<String>>,
    workspace: Option<WorkspaceAccess>,
    replay_policy: Option<ReplayPolicy>,
    #[serde(default)]
    redacted: Vec<String>,
    #[serde(default)]
    network: bool,

    /// What it gave, where it is not what its command gives.
    gave: Option<String>,
    verdict: Option<Verdict>,
    status: Option<Status>,
    #[serde(default)]
    timed_out: bool,
    /// It goes on until this later step has begun.
    until: Option<String>,
    /// What something changes right before it, outside of any step.
    #[serde(default)]
    changed_before: Files,
    #[serde(default = "yes")]
    snapshots: bool,
}

fn yes() -> bool {
    true
}

/// A run that forks can start from.
pub struct Recorded {
    pub environment: RunEnvironment,
    pub spans: Vec<Span>,
    pub states: States,
    pub inherited: Vec<replayfork_core::patch::Patch>,
}

impl Recorded {
    pub fn source(&self) -> Source {
        facts::source(&self.environment, self.spans.clone(), &self.states).with_inherited(self.inherited.clone())
    }
}

/// A template is a binding; other text is what it is.
fn bind(bindings: &mut BTreeMap<String, Binding>, field: &str, text: Option<&String>) {
    if let Some(text) = text.filter(|t| t.contains("{{")) {
        bindings.insert(field.to_owned(), Binding::Template(text.clone()));
    }
}

impl Step {
    fn id(&self) -> String {
        self.id.clone().unwrap_or_else(|| self.name.clone())
    }

    fn opening(&self, started: i64) -> Opening {
        let mut bindings = self.input_bindings.clone();
        let (executor, kind) = if self.script.is_some() || self.argv.is_some() {
            bind(&mut bindings, "script", self.script.as_ref());
            bind(&mut bindings, "stdin", self.stdin.as_ref());
            if let Some(argv) = self.argv.as_ref().filter(|argv| argv.iter().any(|a| a.contains("{{"))) {
                bindings.insert("argv".into(), Binding::Argv(argv.clone()));
            }
            let shell = Shell {
                script: self.script.clone(),
                argv: self.argv.clone(),
                cwd: self.cwd.clone(),
                env: self.env.clone(),
                stdin: self.stdin.clone(),
                timeout_ms: None,
            };
            (Some(Executor::Shell(shell)), SpanKind::ShellCommand)
        } else if let Some(path) = &self.read {
            (Some(Executor::FileRead { path: path.clone() }), SpanKind::FileRead)
        } else if let Some(path) = &self.write {
            bind(&mut bindings, "content", self.content.as_ref());
            let content = self.content.clone().unwrap_or_default();
            (Some(Executor::FileWrite { path: path.clone(), content, executable: false }), SpanKind::FileWrite)
        } else if let Some(ask) = &self.ask {
            let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
            let messages: Vec<_> = system.chain([json!({"role": "user", "content": ask})]).collect();
            bind(&mut bindings, &format!("/messages/{}/content", messages.len() - 1), Some(ask));
            let request = json!({"model": "small-1", "temperature": 0.5, "messages": messages});
            (Some(Executor::Model { provider: "examples".into(), request }), SpanKind::LlmCall)
        } else {
            (None, SpanKind::ToolCall)
        };
        Opening {
            name: self.name.clone(),
            kind: self.kind.unwrap_or(kind),
            parent: self.parent.clone(),
            started,
            arguments: Value::Null,
            executor,
            input_bindings: bindings,
            depends_on: self.depends_on.clone(),
            inputs: self.inputs,
            reads: self.reads.clone(),
            writes: self.writes.clone(),
            workspace: self.workspace,
            replay_policy: self.replay_policy,
            model: None,
            redacted: self.redacted.clone(),
            network: self.network,
        }
    }
}

/// Records a run.
///
/// # Errors
/// What a recorder would refuse.
pub fn record(yaml: &str) -> Result<Recorded, String> {
    let run: Run = serde_yaml_ng::from_str(yaml).map_err(|e| e.to_string())?;
    let environment = RunEnvironment { image: run.image, workspace_root: Some("/workspace".into()), ..RunEnvironment::default() };
    let mut recorder = Recorder::new(environment, run.files);
    let place = |name: &String| run.steps.iter().position(|s| s.id() == *name).ok_or_else(|| format!("no step {name}"));
    for (n, step) in run.steps.iter().enumerate() {
        let started = n as i64 * 100 + 1;
        recorder.settle(started);
        recorder.files.extend(step.changed_before.clone());
        let id = step.id();
        let last_child = run.steps.iter().rposition(|s| s.parent.as_ref() == Some(&id));
        let ends = match (&step.until, last_child) {
            (Some(later), _) => place(later)? as i64 * 100 + 60,
            (None, Some(last)) => last as i64 * 100 + 90,
            (None, None) => started + 49,
        };
        let so_far = recorder.begin(id, step.opening(started), step.snapshots);
        let (closing, after) = closing(step, n, &so_far, &recorder.files, ends)?;
        recorder.ends(closing, &after);
    }
    recorder.settle(i64::MAX);
    let Recorder { environment, spans, states, .. } = recorder;
    Ok(Recorded { environment, spans, states, inherited: vec![] })
}

fn closing(step: &Step, n: usize, so_far: &Source, files: &Files, ends: i64) -> Result<(Closing, Files), String> {
    let verdict = step.verdict.unwrap_or(Verdict::None);
    let told = |status: Status, output: Option<Output>| Closing { verdict, ..Closing::new(ends, step.status.unwrap_or(status), output) };
    let contract = Contract::recorded(so_far, n).ok();
    if let Some(contract) = &contract {
        contract.bound_spans(so_far).map_err(|e| e.to_string())?;
    }
    if verdict.refuses() || step.status == Some(Status::Skipped) {
        return Ok((told(Status::Skipped, None), files.clone()));
    }
    if step.timed_out {
        return Ok((told(Status::Failed, None), files.clone()));
    }
    let said = |text: &str| Output { text: text.to_owned(), stdout: text.to_owned(), ..Output::default() };
    let Some(contract) = contract.filter(|_| so_far.spans[n].opening.executor.is_some() && step.ask.is_none()) else {
        return Ok((told(Status::Completed, Some(said(step.gave.as_deref().unwrap_or("")))), files.clone()));
    };
    let rendered = contract.render(so_far, &|i| value(so_far, i)).map_err(|e| e.to_string())?;
    let (status, mut output, after) = Toy::new(TODAY).perform(&action(so_far, &rendered, None)?, &Reach { sees: &[], writes: &[] }, files);
    if let Some(text) = &step.gave {
        output = output.map(|output| Output { exit_code: output.exit_code, ..said(text) });
    }
    Ok((told(status, output), after))
}
