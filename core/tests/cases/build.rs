//! How a case is told: a run is recorded step by step, forked, and what became of it is asked.

use std::collections::BTreeMap;

use replayfork_core::contract::{Action, Contract, action};
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::{
    Binding, Closing, Executor, Inputs, Opening, Output, ReplayPolicy, RunEnvironment, Shell, Span, SpanKind, Status, Verdict,
    WorkspaceAccess,
};
use replayfork_core::patch::{Contents, Patch, Refused};
use replayfork_core::plan::{self, PlannedSpan, Prepared};
use replayfork_core::source::{Facts, Source};
use serde_json::{Value, json};

use crate::common::facts::{self, facts};
use crate::common::files::{Entry, Files, Reach, States};
use crate::common::product::{Cache, End, Physics, Ran, World, replayed, value};
use crate::common::recorder::Recorder;
use crate::common::shell::Toy;

const TODAY: &str = "Monday";

/// A step as it is to be recorded.
#[derive(Clone)]
pub struct Step {
    opening: Opening,
    /// What a step without executor gave.
    said: Option<String>,
    status: Option<Status>,
    verdict: Verdict,
    /// How many of the next steps have ended when it does.
    through: i64,
    snapshots: bool,
}

fn step(kind: SpanKind, executor: Option<Executor>, bindings: &[(&str, &str)]) -> Step {
    let bound = bindings.iter().filter(|(_, template)| template.contains("{{"));
    let opening = Opening {
        name: String::new(),
        kind,
        parent: None,
        started: 0,
        arguments: Value::Null,
        executor,
        input_bindings: bound.map(|(name, template)| ((*name).to_owned(), Binding::Template((*template).to_owned()))).collect(),
        depends_on: vec![],
        inputs: Inputs::Known,
        reads: None,
        writes: None,
        workspace: None,
        replay_policy: None,
        model: None,
        redacted: vec![],
        network: false,
    };
    Step { opening, said: None, status: None, verdict: Verdict::None, through: 0, snapshots: true }
}

/// A command, in the words of [`Toy`]; what is in it in braces is bound.
pub fn sh(script: &str) -> Step {
    step(SpanKind::ShellCommand, Some(Executor::Shell(Shell { script: Some(script.into()), ..Shell::default() })), &[("script", script)])
}

pub fn reads(path: &str) -> Step {
    step(SpanKind::FileRead, Some(Executor::FileRead { path: path.into() }), &[])
}

pub fn writes(path: &str, content: &str) -> Step {
    let executor = Executor::FileWrite { path: path.into(), content: content.into(), executable: false };
    step(SpanKind::FileWrite, Some(executor), &[("content", content)])
}

/// A model call that asks this.
pub fn asks(prompt: &str) -> Step {
    let request = json!({"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": prompt}]});
    step(SpanKind::LlmCall, Some(Executor::Model { provider: "p".into(), request }), &[("/messages/0/content", prompt)])
}

/// A step without executor that gave this; it sees no files.
pub fn says(kind: SpanKind, text: &str) -> Step {
    let mut step = step(kind, None, &[]);
    step.opening.workspace = Some(WorkspaceAccess::None);
    Step { said: Some(text.into()), ..step }
}

impl Step {
    /// Another name than its id.
    pub fn called(mut self, name: &str) -> Self {
        self.opening.name = name.into();
        self
    }

    pub fn sees(mut self, reads: &[&str], writes: &[&str]) -> Self {
        let owned = |paths: &[&str]| Some(paths.iter().map(|p| (*p).to_owned()).collect());
        (self.opening.reads, self.opening.writes) = (owned(reads), owned(writes));
        self
    }

    pub fn sees_nothing(mut self) -> Self {
        self.opening.workspace = Some(WorkspaceAccess::None);
        self
    }

    /// It sees the workspace, whatever its kind says.
    pub fn sees_files(mut self) -> Self {
        self.opening.workspace = None;
        self
    }

    pub fn of_kind(mut self, kind: SpanKind) -> Self {
        self.opening.kind = kind;
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        if let Some(Executor::Shell(shell)) = &mut self.opening.executor {
            shell.env.insert(name.into(), value.into());
        }
        self
    }

    pub fn executable(mut self) -> Self {
        if let Some(Executor::FileWrite { executable, .. }) = &mut self.opening.executor {
            *executable = true;
        }
        self
    }

    pub fn binds(mut self, name: &str, template: &str) -> Self {
        self.opening.input_bindings.insert(name.into(), Binding::Template(template.into()));
        self
    }

    pub fn after(mut self, span: &str) -> Self {
        self.opening.depends_on.push(span.into());
        self
    }

    pub fn policy(mut self, policy: ReplayPolicy) -> Self {
        self.opening.replay_policy = Some(policy);
        self
    }

    pub fn verdict(mut self, verdict: Verdict) -> Self {
        self.verdict = verdict;
        self
    }

    pub fn skipped(mut self) -> Self {
        self.status = Some(Status::Skipped);
        self
    }

    pub fn redacted(mut self, name: &str) -> Self {
        self.opening.redacted.push(name.into());
        self
    }

    pub fn network(mut self) -> Self {
        self.opening.network = true;
        self
    }

    pub fn inputs_unknown(mut self) -> Self {
        self.opening.inputs = Inputs::Unknown;
        self
    }

    /// It ends after the next `steps` steps have begun and ended.
    pub fn through(mut self, steps: i64) -> Self {
        self.through = steps;
        self
    }

    pub fn without_snapshots(mut self) -> Self {
        self.snapshots = false;
        self
    }
}

/// A run that is being recorded.
pub struct Recording {
    recorder: Recorder,
    open: Vec<String>,
}

/// Begins a run with these files; `-> PATH` is a link.
pub fn run(files: &[(&str, &str)]) -> Recording {
    let entry = |content: &str| content.strip_prefix("-> ").map_or_else(|| Entry::file(content), |target| Entry::Link(target.into()));
    let files = files.iter().map(|(path, content)| ((*path).to_owned(), entry(content))).collect();
    let environment = RunEnvironment { image: Some("agent:1".into()), ..RunEnvironment::default() };
    Recording { recorder: Recorder::new(environment, files), open: vec![] }
}

impl Recording {
    fn steps(&self) -> i64 {
        self.recorder.spans.len() as i64
    }

    /// Something that is no span changes files.
    pub fn meanwhile(mut self, script: &str) -> Self {
        self.recorder.settle(self.steps() * 100 + 90);
        let argv = ["/bin/sh", "-c", script].map(str::to_owned);
        self.recorder.files = Toy::new(TODAY).run(&argv, &BTreeMap::new(), "", &self.recorder.files).2;
        self
    }

    pub fn step(mut self, name: &str, step: Step) -> Self {
        let started = self.steps() * 100 + 100;
        self.recorder.settle(started);
        let called = if step.opening.name.is_empty() { name } else { &step.opening.name };
        let opening = Opening { name: called.into(), started, parent: self.open.last().cloned(), ..step.opening.clone() };
        let source = self.recorder.begin(name.into(), opening, step.snapshots);
        let at = source.spans.len() - 1;
        let did_not_run = step.status == Some(Status::Skipped) || step.verdict.refuses();
        let files = &self.recorder.files;
        let (status, output, after) = match (&step.said, did_not_run) {
            (_, true) => (Status::Skipped, Some(Output::default()), files.clone()),
            (Some(text), _) => {
                (Status::Completed, Some(Output { text: text.clone(), stdout: text.clone(), ..Output::default() }), files.clone())
            }
            (None, _) => {
                let contract = Contract::recorded(&source, at).expect("the case is a whole record");
                let rendered = contract.render(&source, &|i| value(&source, i)).expect("the case's bindings render");
                let action = action(&source, &rendered, None).expect("the case's steps can run");
                Toy::new(TODAY).perform(&action, &Reach { sees: &[], writes: &[] }, files)
            }
        };
        let ends = started + 50 + step.through * 100;
        let closing = Closing { verdict: step.verdict, ..Closing::new(ends, step.status.unwrap_or(status), output) };
        self.recorder.ends(closing, &after);
        self
    }

    /// What follows is below this step, up to [`Recording::end`].
    pub fn hold(mut self, name: &str, step: Step) -> Self {
        let through = step.through;
        self = self.step(name, Step { through: i64::from(i32::MAX), ..step });
        self.open.push(name.into());
        assert_eq!(through, 0, "a holder ends with what it holds");
        self
    }

    pub fn end(mut self) -> Self {
        let name = self.open.pop().expect("something is held");
        let at = self.recorder.spans.iter().position(|s| s.id == name).expect("it has begun");
        self.recorder.ends_at(at, self.steps() * 100 + 80);
        self
    }

    pub fn recorded(mut self) -> Recorded {
        self.recorder.settle(i64::MAX);
        let Recorder { environment, spans, states, .. } = self.recorder;
        Recorded { environment, spans, inherited: vec![], states }
    }
}

/// A recorded run, to be forked.
#[derive(Clone)]
pub struct Recorded {
    pub environment: RunEnvironment,
    pub spans: Vec<Span>,
    inherited: Vec<Patch>,
    pub states: States,
}

impl Recorded {
    pub fn source(&self) -> Source {
        facts::source(&self.environment, self.spans.clone(), &self.states).with_inherited(self.inherited.clone())
    }

    fn span(&self, name: &str) -> &Span {
        self.spans.iter().find(|s| s.id == name).unwrap_or_else(|| panic!("no span {name:?}"))
    }

    /// The digest of the workspace after a span, as a SnapshotOverride names it.
    pub fn workspace_after(&self, name: &str) -> String {
        self.span(name).snapshot_after.expect("it has a snapshot").content.to_string()
    }

    fn facts(&self, spec: &ForkSpec) -> Result<Facts, Refused> {
        let source = self.source();
        let needed = Prepared::facts_needed(&source, &Contents::default(), spec)?;
        Ok(facts(&source, &self.states, needed))
    }

    pub fn fork(&self, span: &str, patches: Value) -> Fork {
        self.fork_with(span, patches, json!({}))
    }

    /// `more`: other members of the spec.
    pub fn fork_with(&self, span: &str, patches: Value, more: Value) -> Fork {
        self.fork_cached(span, patches, more, &mut Cache::new())
    }

    pub fn fork_cached(&self, span: &str, patches: Value, more: Value, cache: &mut Cache) -> Fork {
        self.carried_out(&spec(span, patches, more), cache, &mut Toy::new(TODAY))
    }

    /// A fork in whose workspace something that is no step writes a file after each command.
    pub fn fork_meddled_with(&self, span: &str, patches: Value, path: &str) -> Fork {
        struct Meddler(Toy, String);
        impl Physics for Meddler {
            fn perform(&mut self, action: &Action, reach: &Reach<'_>, files: &Files) -> (Status, Option<Output>, Files) {
                self.0.perform(action, reach, files)
            }

            fn meddle(&mut self, files: &mut Files) {
                files.insert(self.1.clone(), Entry::file("meddled with"));
            }
        }
        let mut meddler = Meddler(Toy::new(TODAY), path.to_owned());
        self.carried_out(&spec(span, patches, json!({})), &mut Cache::new(), &mut meddler)
    }

    fn carried_out(&self, spec: &ForkSpec, cache: &mut Cache, physics: &mut dyn Physics) -> Fork {
        let source = self.source().with_facts(self.facts(spec).unwrap_or_else(|e| panic!("{e}")));
        let contents = Contents::default();
        let fork = Prepared::new(&source, &contents, spec).unwrap_or_else(|e| panic!("{e}"));
        let plan = plan::of(&fork);
        let paths = self.states.paths();
        let world = World { states: &self.states, paths: &paths, cache, physics };
        let result = replayed(&fork, world);
        let inherited = fork.to_inherit();
        Fork { plan, run: self.clone(), inherited, result }
    }

    /// Why the fork can't be planned.
    pub fn refused(&self, span: &str, patches: Value) -> String {
        self.refused_with(span, patches, json!({}))
    }

    pub fn refused_with(&self, span: &str, patches: Value, more: Value) -> String {
        let spec = spec(span, patches, more);
        let planned = self.facts(&spec).and_then(|facts| plan::plan(&self.source().with_facts(facts), &Contents::default(), &spec));
        planned.map_or_else(|e| e.to_string(), |_| "planned".into())
    }
}

fn spec(span: &str, patches: Value, more: Value) -> ForkSpec {
    let mut spec = json!({"source": {"run": "r", "span": span}, "patches": patches});
    for (name, member) in more.as_object().into_iter().flatten() {
        spec[name] = member.clone();
    }
    serde_json::from_value(spec).expect("the case's spec is one")
}

/// A fork that was planned and carried out.
pub struct Fork {
    pub plan: plan::Plan,
    run: Recorded,
    inherited: Vec<Patch>,
    result: (End, Ran, States),
}

impl Fork {
    fn ran(&self) -> &(End, Ran, States) {
        assert_eq!(self.result.1.early, None, "the fork ended early");
        &self.result
    }

    /// The affected spans: what the plan says of each, and what became of it.
    #[track_caller]
    pub fn tells(&self, expected: &[&str]) -> &Self {
        let became = |name: &str| {
            let at = self.run.spans.iter().position(|s| s.id == name).expect("it is a span of the run");
            self.ran().1.became.get(&at).map_or_else(|| "nothing".to_owned(), ToString::to_string)
        };
        let story: Vec<_> = self.plan.spans.iter().map(|p| format!("{}: {} -> {}", p.id, says_plan(p), became(&p.id))).collect();
        assert_eq!(story, expected, "\n{}", story.join("\n"));
        self
    }

    /// What is at a path in the end.
    #[track_caller]
    pub fn has(&self, path: &str, expected: &str) -> &Self {
        let found = self.ran().0.files.get(path).map_or_else(|| "nothing".to_owned(), ToString::to_string);
        assert_eq!(found, expected, "{path}");
        self
    }

    /// What a span gave.
    #[track_caller]
    pub fn gives(&self, name: &str, expected: &str) -> &Self {
        let at = self.run.spans.iter().position(|s| s.id == name).expect("it is a span of the run");
        let text = self.ran().0.outputs.get(&at).cloned().flatten().map_or_else(|| "nothing".to_owned(), |v| v.output.text);
        assert_eq!(text, expected, "the output of {name}");
        self
    }

    /// The paths that nobody knows in the end.
    #[track_caller]
    pub fn leaves_unknown(&self, expected: &[&str]) -> &Self {
        let unknown: Vec<_> = self.ran().0.unknown.iter().map(String::as_str).collect();
        assert_eq!(unknown, expected);
        self
    }

    /// Why the fork ended before its last span.
    pub fn ended(&self) -> String {
        self.result.1.early.as_ref().map_or_else(|| "it did not end early".into(), ToString::to_string)
    }

    /// What the user is told of why a span is blocked.
    pub fn says_of(&self, name: &str) -> String {
        let planned = self.plan.spans.iter().find(|p| p.id == name);
        planned.map_or_else(|| "nothing".into(), |p| p.blocked.iter().map(|b| b.message.clone()).collect::<Vec<_>>().join("\n"))
    }

    pub fn warnings(&self) -> String {
        self.plan.warnings.iter().chain(&self.ran().1.warnings).cloned().collect::<Vec<_>>().join("\n")
    }

    /// The fork as a run of its own.
    pub fn as_run(&self) -> Recorded {
        let (_, ran, states) = self.ran();
        Recorded {
            environment: self.run.environment.clone(),
            spans: ran.spans.clone(),
            inherited: self.inherited.clone(),
            states: states.clone(),
        }
    }
}

fn says_plan(planned: &PlannedSpan) -> String {
    let mark = planned.fate();
    let mut reasons: Vec<String> = planned.causes.iter().map(|c| format!("{c:?}")).collect();
    for blocked in &planned.blocked {
        let reason = blocked.reason.to_string();
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    format!("{mark} ({})", reasons.join(" "))
}

/// `patch` on another span than the fork span.
pub fn on(span: &str, mut patch: Value) -> Value {
    patch["span"] = json!(span);
    patch
}

pub fn env(name: &str, value: &str) -> Value {
    json!({"type": "EnvVarOverride", "env": [{"name": name, "value": value}]})
}

pub fn unset(name: &str) -> Value {
    json!({"type": "EnvVarOverride", "env": [{"name": name}]})
}

pub fn script(script: &str) -> Value {
    json!({"type": "CommandOverride", "command": {"script": script}})
}

/// A command that says what it sees.
pub fn script_that_sees(script: &str, reads: &[&str], writes: &[&str]) -> Value {
    json!({"type": "CommandOverride", "command": {"script": script, "reads": reads, "writes": writes}})
}

pub fn file(path: &str, content: &str) -> Value {
    json!({"type": "FileContentOverride", "files": [{"path": path, "content": content}]})
}

pub fn output(text: &str) -> Value {
    json!({"type": "ToolOutputOverride", "output": {"text": text}})
}

pub fn prompt(text: &str) -> Value {
    json!({"type": "PromptEdit", "prompt": {"message": {"index": 0, "content": text}}})
}

pub fn config(member: &str, value: Value) -> Value {
    json!({"type": "ModelConfigEdit", "modelConfig": {"parameters": {member: value}}})
}

pub fn documents(documents: Value) -> Value {
    json!({"type": "RetrievalContextOverride", "retrieval": {"documents": documents}})
}

pub fn snapshot(digest: &str) -> Value {
    json!({"type": "SnapshotOverride", "snapshot": {"digest": digest}})
}
