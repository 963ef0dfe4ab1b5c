//! `yaml fork=NAME`: a fork as in a ReplayFork's spec; its plan, and what a replay does, in few words.

use std::collections::BTreeMap;

use replayfork_core::Digest;
use replayfork_core::contract::{Action, executed, patched_opening};
use replayfork_core::footprint::Pattern;
use replayfork_core::fork::{ForkSpec, ModelMode};
use replayfork_core::model::{Closing, Fidelity, Output, SnapshotRef, Span, Status};
use replayfork_core::patch::{Contents, FileOverride};
use replayfork_core::plan::{self, FactsNeeded, Mark, Plan, Prepared};
use replayfork_core::reason::Blocked;
use replayfork_core::replay::{Execution, Replay, Reproduced, Step, WorkspaceChange};
use replayfork_core::source::{Facts, FileFact, SnapshotFact, Source};
use serde_json::Value;

use super::memory::{Files, Memory, States, changes, set};
use super::recording::{Recorded, perform};
use super::shell;

/// What `date` says when a fork runs.
const TODAY: &str = "Tuesday";

/// Results that forks leave for each other.
pub type Cache = BTreeMap<Digest, (Status, Output, BTreeMap<String, Option<String>>)>;

/// A fork that was carried out, in the page's words.
pub struct Forked {
    /// The spans of the plan.
    pub plan: String,
    /// What became of each span from the fork's first on.
    pub ran: String,
    /// Every message of a blocked span in the plan.
    pub blocked: String,
    /// The workspace at the end.
    pub files: String,
}

/// Plans a fork and carries it out; with the fork as a run.
///
/// # Errors
/// The refusal.
pub fn fork(recorded: &Recorded, contents: &Contents, spec: &ForkSpec, cache: &mut Cache) -> Result<(Forked, Recorded), String> {
    let bare = recorded.source();
    let needed = Prepared::facts_needed(&bare, contents, spec).map_err(|e| e.to_string())?;
    let source = bare.with_facts(facts(&recorded.source(), &recorded.states, needed));
    let fork = Prepared::new(&source, contents, spec).map_err(|e| e.to_string())?;
    let plan = plan::of(&fork);
    let said = (plan_text(&plan), blocked_text(&plan));
    let mut walk = Walk::new(&fork, recorded, cache);
    walk.all();
    let environment = fork.environment.clone();
    let run = Recorded { environment, spans: walk.spans, states: walk.memory.states, inherited: fork.to_inherit() };
    let (plan, blocked) = said;
    Ok((Forked { plan, blocked, ran: columns(&walk.ran, &walk.notes), files: files_text(&walk.memory.files) }, run))
}

fn facts(source: &Source, states: &States, needed: FactsNeeded) -> Facts {
    let mut facts = Facts::default();
    for (target, before, files) in needed.files {
        let recorded = before.map(|s| &states.0[&s.content]);
        let of_file = |f: &FileOverride| {
            let same = recorded.map(|r| r.get(&f.path).is_some_and(|c| c.as_bytes() == &*f.content));
            (f.path.clone(), FileFact { same, executable: false })
        };
        facts.files.insert(source.spans[target].id.clone(), files.iter().map(of_file).collect());
    }
    for (target, before, content) in needed.snapshots.into_iter().filter(|(_, _, content)| states.0.contains_key(content)) {
        let changed = before.map(|before| changes(&states.0[&before.content], &states.0[&content]));
        let state = SnapshotRef { content, node: content };
        facts.snapshots.insert(source.spans[target].id.clone(), SnapshotFact { state, changed });
    }
    facts
}

/// Rows in columns that are as wide as they have to be, and notes below.
fn columns(rows: &[Vec<String>], notes: &[String]) -> String {
    let width = |i: usize| rows.iter().filter(|r| r.len() > i + 1).map(|r| r[i].chars().count()).max().unwrap_or(0);
    let line = |row: &Vec<String>| {
        let last = row.iter().rposition(|c| !c.is_empty()).unwrap_or(0);
        let cells: Vec<_> = row[..=last]
            .iter()
            .enumerate()
            .map(|(i, cell)| if i == last { cell.clone() } else { format!("{cell:<w$}", w = width(i)) })
            .collect();
        cells.join("  ")
    };
    let lines: Vec<_> = rows.iter().map(line).chain(notes.iter().map(|n| format!("note: {n}"))).collect();
    if lines.is_empty() { "nothing".to_owned() } else { lines.join("\n") }
}

fn reasons(blocked: &[Blocked]) -> String {
    let one = |b: &Blocked| match &b.upstream {
        Some(upstream) => format!("{}({upstream})", b.reason),
        None => b.reason.to_string(),
    };
    let all: Vec<_> = blocked.iter().map(one).collect();
    all.join(", ")
}

fn plan_text(plan: &Plan) -> String {
    let row = |span: &plan::PlannedSpan| {
        let mark = match span.mark {
            None => "overridden",
            Some(Mark::WillRun) => "will run",
            Some(Mark::MayRun) => "may run",
            Some(Mark::WillBeBlocked) => "will be blocked",
            Some(Mark::MayBeBlocked) => "may be blocked",
            Some(Mark::MayRunOrBeBlocked) => "may run or be blocked",
        };
        let causes: Vec<_> = span.causes.iter().map(|c| format!("{c:?}")).collect();
        let mut because = causes.join(", ");
        if !span.triggers.is_empty() {
            because.push_str(&format!(" by {}", span.triggers.join(", ")));
        }
        vec![span.id.clone(), mark.to_owned(), because, reasons(&span.blocked)]
    };
    let rows: Vec<_> = plan.spans.iter().map(row).collect();
    columns(&rows, &plan.warnings)
}

fn blocked_text(plan: &Plan) -> String {
    let of_span = |s: &plan::PlannedSpan| s.blocked.iter().map(|b| format!("{}: {}: {}", s.id, b.reason, b.message)).collect::<Vec<_>>();
    let all: Vec<_> = plan.spans.iter().flat_map(of_span).collect();
    if all.is_empty() { "nothing".to_owned() } else { all.join("\n") }
}

fn files_text(files: &Files) -> String {
    let rows: Vec<_> = files.iter().map(|(path, content)| vec![path.clone(), Value::from(content.clone()).to_string()]).collect();
    columns(&rows, &[])
}

/// What a step gave and changed.
fn result(output: Option<&Output>, before: &Files, after: &Files) -> String {
    let mut said = match output {
        Some(output) => Value::from(output.text.trim_end()).to_string(),
        None => "no output".to_owned(),
    };
    if let Some(code) = output.and_then(|o| o.exit_code).filter(|code| *code != 0) {
        said.push_str(&format!(", exit {code}"));
    }
    for path in changes(before, after) {
        said.push_str(&format!(", {} {path}", if after.contains_key(&path) { "wrote" } else { "removed" }));
    }
    said
}

/// The walk over the units, as the sandbox does it.
struct Walk<'a> {
    fork: &'a Prepared<'a>,
    replay: Replay<'a>,
    memory: Memory,
    cache: &'a mut Cache,
    spans: Vec<Span>,
    ran: Vec<Vec<String>>,
    notes: Vec<String>,
}

impl<'a> Walk<'a> {
    fn new(fork: &'a Prepared<'a>, recorded: &Recorded, cache: &'a mut Cache) -> Self {
        let start = fork.source.start_state(fork.first).map(|s| recorded.states.0[&s.content].clone()).unwrap_or_default();
        Self {
            fork,
            replay: Replay::new(fork),
            memory: Memory { states: recorded.states.clone(), files: start },
            cache,
            spans: fork.source.spans.clone(),
            ran: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn all(&mut self) {
        for n in self.fork.units() {
            if let Some(end) = self.visit(n) {
                self.notes.push(format!("the fork ends here: {end}"));
                return;
            }
        }
        self.notes.append(&mut self.replay.warnings);
    }

    fn say(&mut self, n: usize, what: &str, more: String) {
        self.ran.push(vec![self.fork.source.spans[n].id.clone(), what.to_owned(), more]);
    }

    fn apply(&mut self, all: &[WorkspaceChange]) {
        let Memory { states, files } = &mut self.memory;
        for change in all {
            match change {
                WorkspaceChange::Restore(state) => files.clone_from(&states.0[&state.content]),
                WorkspaceChange::Recorded { state, paths } => {
                    let from = &states.0[&state.content];
                    paths.iter().for_each(|path| set(files, path, from.get(path)));
                }
                WorkspaceChange::File { path, content, .. } => {
                    files.insert(path.clone(), String::from_utf8_lossy(content).into_owned());
                }
            }
        }
    }

    /// What ends the fork, if anything does.
    fn visit(&mut self, n: usize) -> Option<String> {
        let before = self.replay.before(n);
        self.apply(&before);
        let start = self.memory.files.clone();
        let Ok(mut step) = self.replay.step(n, &mut self.memory);
        if let Step::Cached { key, otherwise } = step {
            if let Some((status, output, writes)) = self.cache.get(&key).cloned() {
                writes.iter().for_each(|(path, content)| set(&mut self.memory.files, path, content.as_ref()));
                let changed: Vec<_> = writes.into_keys().collect();
                self.say(n, "from another fork", result(Some(&output), &start, &self.memory.files));
                self.replay.executed(n, status, Some(output.clone()), &changed);
                self.store(n, &start, Fidelity::Reused, Closing::new(0, status, Some(output)), None);
                return None;
            }
            step = *otherwise;
        }
        match step {
            Step::Keep { reused, changes } => {
                self.apply(&changes);
                self.replay.kept(n);
                self.say(n, if reused { "reused" } else { "as recorded" }, String::new());
                self.keep(n, &start);
            }
            Step::Override { output, changes } => {
                self.apply(&changes);
                self.say(n, "overridden", result(Some(&output), &start, &self.memory.files));
                self.replay.overridden(n, output.clone());
                self.store(n, &start, Fidelity::Overridden, Closing::new(0, Status::Completed, Some(output)), None);
            }
            Step::Block { blocked, unknown } => {
                self.say(n, "blocked", reasons(&blocked));
                self.replay.blocked(n);
                self.store(n, &start, Fidelity::Blocked, Closing { unknown, ..Closing::new(0, Status::Blocked, None) }, None);
            }
            Step::Serve(execution, answer) => {
                let output = answer.output();
                self.say(n, "from the record", result(Some(&output), &start, &start));
                self.replay.executed(n, Status::Completed, Some(output.clone()), &[]);
                let closing = Closing::new(0, Status::Completed, Some(output));
                self.store(n, &start, Fidelity::ServedFromRecording, closing, Some(&execution));
            }
            Step::Execute(execution) => return self.execute(n, &start, &execution),
            Step::NotExecutable(blocked) => self.say(n, "not executable", reasons(&blocked)),
            Step::Inconsistent { message, .. } => return Some(format!("WorkspaceInconsistent: {message}")),
            Step::Cached { .. } => unreachable!("a cached result stands for another one"),
        }
        None
    }

    fn execute(&mut self, n: usize, start: &Files, execution: &Execution) -> Option<String> {
        let (status, output) = match &execution.action {
            Action::AskModel { request } => self.ask(request),
            action => {
                let (status, output) = perform(action, &mut self.memory.files, TODAY);
                (status, Some(output))
            }
        };
        let said = result(output.as_ref(), start, &self.memory.files);
        if self.fork.check {
            let Ok(reproduced) = self.replay.reproduced(n, status, output.as_ref(), &mut self.memory);
            let what = match reproduced {
                Reproduced::Identical => "identical".to_owned(),
                Reproduced::Differs(respects) => format!("differs: {}", respects.join(", ")),
            };
            self.say(n, &what, said);
        } else {
            self.say(n, "ran", said);
        }
        let changed = changes(start, &self.memory.files);
        if let Some(path) = execution.undeclared(&changed).filter(|_| !self.fork.check) {
            return Some(format!("UndeclaredWrite: {path}"));
        }
        if let (Some(key), Some(output)) = (execution.cache_key, &output) {
            let writes = changed.iter().map(|p| (p.clone(), self.memory.files.get(p).cloned())).collect();
            self.cache.insert(key, (status, output.clone(), writes));
        }
        self.replay.executed(n, status, output.clone(), &changed);
        self.store(n, start, Fidelity::Reexecuted, Closing::new(0, status, output), Some(execution));
        None
    }

    /// A command answers as it does; the endpoint of the examples repeats what it was asked.
    fn ask(&mut self, request: &Value) -> (Status, Option<Output>) {
        let model = &self.fork.spec.model;
        let response = match (&model.command, model.mode) {
            (Some(command), ModelMode::Command) => {
                let ran = shell::run(&command.argv, &BTreeMap::new(), &request.to_string(), &mut self.memory.files, TODAY);
                serde_json::from_str(&ran.stdout).ok()
            }
            _ => {
                let text = |v: &Value| v.as_str().unwrap_or_default().trim_end().to_owned();
                let said = |m: &Value| format!("{}: {}", text(&m["role"]), text(&m["content"]));
                let messages: Vec<_> = request["messages"].as_array().into_iter().flatten().map(said).collect();
                Some(Value::from(format!("{} at {}, {}", text(&request["model"]), request["temperature"], messages.join("; "))))
            }
        };
        match response.and_then(|r: Value| replayfork_core::answers::Answer::parse(&r).ok()) {
            Some(answer) => (Status::Completed, Some(answer.output())),
            None => (Status::Failed, None),
        }
    }

    /// What was kept has other states around it where an earlier step left other files.
    fn keep(&mut self, n: usize, start: &Files) {
        if self.fork.check {
            return;
        }
        let (before, after) = (self.memory.states.record(start), self.memory.states.record(&self.memory.files));
        let times = self.fork.source.interval(n);
        let span = &mut self.spans[n];
        let differs = |state: Option<SnapshotRef>, now: SnapshotRef| state.is_some_and(|s| s.content != now.content);
        if differs(span.snapshot_before, before) || differs(span.snapshot_after, after) {
            span.snapshot_before = span.snapshot_before.map(|_| before);
            span.snapshot_after = span.snapshot_after.map(|_| after);
            span.first_recorded = Some(times);
        }
    }

    /// The span as the fork's run has it.
    fn store(&mut self, n: usize, start: &Files, fidelity: Fidelity, closing: Closing, execution: Option<&Execution>) {
        let source = self.fork.source;
        let record = &source.spans[n];
        let times = source.interval(n);
        let (before, after) = (self.memory.states.record(start), self.memory.states.record(&self.memory.files));
        let mut opening = patched_opening(source, &self.fork.patches, n, record.opening.started);
        if let Some(execution) = execution {
            opening = executed(opening, &execution.rendered);
        }
        let lost = fidelity == Fidelity::Overridden && !source.shows_changes(n);
        let captured = record.snapshot_before.is_some() && fidelity != Fidelity::Blocked && !lost;
        let unknown = if lost { self.fork.may_write(n).iter().map(Pattern::declared).collect() } else { closing.unknown.clone() };
        self.spans[n] = Span {
            opening,
            closing: Some(Closing { verdict: record.verdict(), ended: times.1.min(i64::MAX - 1), unknown, ..closing }),
            fidelity,
            first_recorded: Some(times),
            snapshot_before: captured.then_some(before),
            snapshot_after: captured.then_some(after),
            ..record.clone()
        };
        for &inner in source.inner(n) {
            let (started, ended) = source.interval(inner);
            self.spans[inner].closing = Some(Closing::new(ended.max(started), Status::Skipped, None));
            self.spans[inner].fidelity = Fidelity::Skipped;
            self.spans[inner].first_recorded = Some((started, ended));
        }
    }
}
