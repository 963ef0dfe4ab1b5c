//! Plans and replays of random runs and forks, against a naive reference that executes everything anew from the fork span.
//!
//! The reference knows nothing of plans, digests or reuse: it renders, looks at the files, and runs. What it ends with, workspace,
//! outputs and blocked spans, is what the replay must end with.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use replayfork_core::Digest;
use replayfork_core::binding::SpanValue;
use replayfork_core::contract::{Action, Contract, action};
use replayfork_core::digest::Hasher;
use replayfork_core::footprint::Pattern;
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::{
    Binding, Closing, Executor, Fidelity, Opening, Output, RunEnvironment, Shell, SnapshotRef, Span, SpanKind, Status, Verdict,
};
use replayfork_core::patch::Patches;
use replayfork_core::plan::{Mark, plan};
use replayfork_core::replay::{Replay, Step, Workspace};
use replayfork_core::source::{Changed, Source};
use serde_json::{Value, json};

type Files = BTreeMap<String, String>;

const PATHS: [&str; 6] = ["f0", "f1", "f2", "d/f3", "d/f4", "e/f5"];

/// What a random step is made of.
#[derive(Clone, Debug)]
struct Draft {
    kind: u8,
    /// Which earlier steps its template uses, as offsets.
    binds: Vec<usize>,
    bind_exit_code: bool,
    reads: Vec<usize>,
    writes: Vec<usize>,
    declared: bool,
    reads_folder: bool,
    depends_on: Option<usize>,
    skipped: bool,
}

fn draft() -> impl Strategy<Value = Draft> {
    let path = 0..PATHS.len();
    (
        0u8..10,
        prop::collection::vec(1usize..6, 0..3),
        any::<bool>(),
        prop::collection::vec(path.clone(), 0..3),
        prop::collection::vec(path, 0..3),
        prop::bool::weighted(0.7),
        prop::bool::weighted(0.2),
        prop::option::weighted(0.15, 1usize..5),
        prop::bool::weighted(0.05),
    )
        .prop_map(|(kind, binds, bind_exit_code, reads, writes, declared, reads_folder, depends_on, skipped)| Draft {
            kind,
            binds,
            bind_exit_code,
            reads,
            writes,
            declared,
            reads_folder,
            depends_on,
            skipped,
        })
}

fn id(n: usize) -> String {
    format!("s{n:02}")
}

fn short(parts: &[&str]) -> String {
    let mut hasher = Hasher::new("step");
    for part in parts {
        hasher.add("p", part.as_bytes());
    }
    hasher.finish().to_string()[..6].to_owned()
}

/// The world's physics: what a command does is a function of what it can see.
fn execute(opening: &Opening, action: &Action, files: &mut Files) -> (Status, Output) {
    match action {
        Action::Run(command) => {
            let seen: Vec<String> = match &opening.reads {
                Some(reads) => {
                    let wanted = |path: &str| reads.iter().any(|r| r == path || (r.ends_with('/') && path.starts_with(r.as_str())));
                    files.iter().filter(|(p, _)| wanted(p)).map(|(p, c)| format!("{p}={c}")).collect()
                }
                None => files.iter().map(|(p, c)| format!("{p}={c}")).collect(),
            };
            let env = format!("{:?}", command.env);
            let text = short(&[&command.argv.join(" "), &env, &seen.join(",")]);
            let coin = |salt: &str| short(&[&text, salt]).as_bytes()[0] % 4;
            let writes: Vec<String> = match &opening.writes {
                Some(writes) => writes.clone(),
                None => PATHS.iter().filter(|p| coin(p) == 0).map(|p| (*p).to_owned()).collect(),
            };
            for path in writes {
                match coin(&format!("w{path}")) {
                    0 => drop(files.remove(&path)),
                    1 => {}
                    // The same content from time to time, whatever was read.
                    2 => drop(files.insert(path, "same".into())),
                    _ => drop(files.insert(path.clone(), short(&[&text, &path]))),
                }
            }
            let exit_code = i32::from(coin("exit") == 0);
            let status = if exit_code == 0 { Status::Completed } else { Status::Failed };
            (status, Output { text: text.clone(), stdout: text, stderr: String::new(), exit_code: Some(exit_code) })
        }
        Action::ReadFile { path } => match files.get(path) {
            Some(content) => (Status::Completed, Output { text: content.clone(), stdout: content.clone(), ..Output::default() }),
            None => (Status::Failed, Output { text: "absent".into(), stdout: "absent".into(), ..Output::default() }),
        },
        Action::WriteFile { path, content, .. } => {
            files.insert(path.clone(), content.clone());
            (Status::Completed, Output { text: "written".into(), stdout: "written".into(), ..Output::default() })
        }
    }
}

/// Every workspace state that was recorded, by digest.
#[derive(Default)]
struct States(BTreeMap<Digest, Files>);

impl States {
    fn record(&mut self, files: &Files) -> SnapshotRef {
        let digest = Digest::of_json(&json!(files));
        self.0.insert(digest, files.clone());
        SnapshotRef { content: digest, node: digest }
    }
}

fn content(files: &Files, patterns: &[Pattern]) -> Digest {
    let mut hasher = Hasher::new("footprint");
    for pattern in patterns {
        hasher.add("pattern", pattern.to_string().as_bytes());
        for (path, content) in files.iter().filter(|(p, _)| pattern.covers(&Pattern::Path((*p).clone()))) {
            hasher.add(path, content.as_bytes());
        }
    }
    hasher.finish()
}

fn template(n: usize, draft: &Draft, spans: &[Span]) -> String {
    let mut text = format!("run {n}");
    for back in &draft.binds {
        if let Some(span) = n.checked_sub(*back).and_then(|i| spans.get(i)) {
            let field = if draft.bind_exit_code && span.output().is_some_and(|o| o.exit_code.is_some()) { ".exit_code" } else { ".text" };
            text.push_str(&format!(" {{{{ spans[\"{}\"]{field} }}}}", span.id));
        }
    }
    text
}

fn opening(n: usize, draft: &Draft, spans: &[Span]) -> Opening {
    use SpanKind::*;
    let kind = [ShellCommand, ShellCommand, ShellCommand, ToolCall, FileRead, FileWrite, FileWrite, LlmCall, ToolCall, PlannerStep]
        [draft.kind as usize];
    let bound = |field: &str| BTreeMap::from([(field.to_owned(), Binding::Template(template(n, draft, spans)))]);
    let path = |list: &[usize]| PATHS[list.first().copied().unwrap_or(n % PATHS.len())].to_owned();
    let env = BTreeMap::from([("V".to_owned(), "0".to_owned())]);
    let (executor, input_bindings) = match (kind, draft.kind) {
        (ShellCommand, _) | (ToolCall, 3) => {
            (Some(Executor::Shell(Shell { script: Some(String::new()), env, ..Shell::default() })), bound("script"))
        }
        (FileRead, _) => (Some(Executor::FileRead { path: path(&draft.reads) }), BTreeMap::new()),
        (FileWrite, _) => {
            (Some(Executor::FileWrite { path: path(&draft.writes), content: String::new(), executable: false }), bound("content"))
        }
        _ => (None, bound("prompt")),
    };
    let names = |list: &[usize]| list.iter().map(|i| PATHS[*i].to_owned()).collect::<Vec<_>>();
    let mut reads = names(&draft.reads);
    if draft.reads_folder {
        reads.push("d/".to_owned());
    }
    let shell = matches!(executor, Some(Executor::Shell(_)));
    Opening {
        name: format!("n{n}"),
        kind,
        parent: None,
        started: n as i64 * 100 + 1,
        arguments: Value::Null,
        executor,
        input_bindings,
        depends_on: draft.depends_on.and_then(|back| n.checked_sub(back)).map(id).into_iter().collect(),
        inputs: Default::default(),
        reads: (shell && draft.declared).then_some(reads),
        writes: (shell && draft.declared).then(|| names(&draft.writes)),
        // A tool without a command sees no files, or its result could not be told apart.
        workspace: (draft.kind == 8).then_some(replayfork_core::model::WorkspaceAccess::None),
        replay_policy: None,
        model: None,
        redacted: vec![],
    }
}

fn closing(n: usize, status: Status, output: Option<Output>) -> Closing {
    Closing {
        ended: n as i64 * 100 + 50,
        status,
        verdict: Verdict::None,
        output,
        error: None,
        input_tokens: None,
        output_tokens: None,
        cost_usd: None,
        blocked: vec![],
    }
}

/// Records a run: the same physics, with everything as it is.
fn record(drafts: &[Draft]) -> (Source, States) {
    let mut files: Files = PATHS[..4].iter().map(|p| ((*p).to_owned(), format!("initial {p}"))).collect();
    let (mut states, mut spans, mut changed) = (States::default(), Vec::<Span>::new(), BTreeMap::new());
    for (n, draft) in drafts.iter().enumerate() {
        let before = files.clone();
        let snapshot_before = Some(states.record(&files));
        let opening = opening(n, draft, &spans);
        spans.push(Span {
            id: id(n),
            ord: n as i64,
            opening: opening.clone(),
            closing: None,
            fidelity: Fidelity::Recorded,
            snapshot_before,
            snapshot_after: None,
            input_digest: None,
        });
        let so_far = Source::new(RunEnvironment::default(), spans.clone(), BTreeMap::new());
        let contract = Contract::recorded(&so_far, n).unwrap();
        let rendered = contract.render(&so_far, &|i| value(&so_far, i)).unwrap();
        let (status, output) = if draft.skipped {
            (Status::Skipped, Output::default())
        } else if opening.executor.is_some() {
            execute(&opening, &action(&so_far, &rendered, None).unwrap(), &mut files)
        } else {
            let text = short(&["model", &rendered["binding.prompt"].to_string()]);
            (Status::Completed, Output { stdout: text.clone(), text, ..Output::default() })
        };
        let span = spans.last_mut().unwrap();
        span.closing = Some(closing(n, status, Some(output)));
        span.snapshot_after = Some(states.record(&files));
        let paths: BTreeSet<_> = before.keys().chain(files.keys()).filter(|p| before.get(*p) != files.get(*p)).cloned().collect();
        if !paths.is_empty() {
            changed.insert(id(n), Changed { before: vec![], during: paths.into_iter().collect() });
        }
    }
    (Source::new(RunEnvironment::default(), spans, changed), states)
}

fn value(source: &Source, i: usize) -> Result<SpanValue, String> {
    let span = &source.spans[i];
    span.output().map(|o| SpanValue { output: o.clone(), status: span.status() }).ok_or_else(|| "nothing".to_owned())
}

/// Why spans were blocked, by span.
type Reasons = BTreeMap<usize, Vec<String>>;

/// How a fork ended.
#[derive(Debug, Default, PartialEq)]
struct End {
    files: Files,
    unknown: BTreeSet<String>,
    outputs: BTreeMap<usize, Output>,
    blocked: BTreeSet<usize>,
}

/// The naive reference: from the fork span on everything is executed again, in order.
fn reference(source: &Source, states: &States, spec: &ForkSpec, fork_span: usize) -> End {
    let patches = Patches::resolve(source, &spec.source, fork_span, &spec.patches).unwrap();
    let mut files = states.0[&source.spans[fork_span].snapshot_before.unwrap().content].clone();
    let mut end = End::default();
    for n in fork_span..source.spans.len() {
        let span = &source.spans[n];
        let replay_changes = |files: &mut Files, unknown: &mut BTreeSet<String>| {
            let after = &states.0[&span.snapshot_after.unwrap().content];
            for path in &source.changed(n).during {
                match after.get(path) {
                    Some(content) => files.insert(path.clone(), content.clone()),
                    None => files.remove(path),
                };
                unknown.remove(path);
            }
        };
        if let Some(output) = patches.output.get(&n) {
            replay_changes(&mut files, &mut end.unknown);
            let given = Output::overridden(&output.text, output.exit_code.unwrap_or(0));
            // No exit code is one of 0; giving what was recorded gives the record.
            let recorded = span.output().unwrap();
            let same = recorded.text == given.text && recorded.exit_code.unwrap_or(0) == 0 && span.status() == Status::Completed;
            end.outputs.insert(n, if same { recorded.clone() } else { given });
            continue;
        }
        let contract = Contract::patched(source, &patches, n).unwrap();
        let recorded = Contract::recorded(source, n).unwrap();
        // What did not run stays so unless a patch changes it.
        if span.did_not_run() && contract.fields == recorded.fields && contract.footprint == recorded.footprint {
            end.outputs.insert(n, span.output().unwrap().clone());
            continue;
        }
        let needs: Vec<_> = contract.bound_spans(source).unwrap().into_iter().chain(contract.depends_on.iter().copied()).collect();
        let sees = |path: &String| contract.footprint.sees.iter().any(|s| s.overlaps(&Pattern::Path(path.clone())));
        let mut blocked = needs.iter().any(|u| end.blocked.contains(u)) || end.unknown.iter().any(sees);
        if !blocked {
            let output = |i: usize| match end.outputs.get(&i) {
                Some(output) => {
                    let status = if patches.output.contains_key(&i) || output.exit_code.is_none() {
                        source.spans[i].status()
                    } else if output.exit_code == Some(0) {
                        Status::Completed
                    } else {
                        Status::Failed
                    };
                    Ok(SpanValue { output: output.clone(), status })
                }
                None => value(source, i),
            };
            let rendered = contract.render(source, &output).unwrap();
            if span.opening.executor.is_some() {
                let (_, output) = execute(&opening_of(source, &patches, n), &action(source, &rendered, None).unwrap(), &mut files);
                if let Action::WriteFile { path, .. } = action(source, &rendered, None).unwrap() {
                    end.unknown.remove(&path);
                }
                end.outputs.insert(n, output);
            } else {
                let same = rendered == recorded.render(source, &|i| value(source, i)).unwrap()
                    && contract.depends_on.iter().all(|&d| output(d).unwrap().output == value(source, d).unwrap().output);
                if same {
                    end.outputs.insert(n, span.output().unwrap().clone());
                } else {
                    blocked = true;
                }
            }
        }
        if blocked {
            end.blocked.insert(n);
            let writes = contract.footprint.writes;
            end.unknown
                .extend(PATHS.iter().map(|p| (*p).to_owned()).filter(|p| writes.iter().any(|w| w.covers(&Pattern::Path(p.clone())))));
            end.unknown.extend(source.changed(n).during.iter().cloned());
        }
    }
    end.files = files;
    end
}

/// A command's declared reads and writes after patches, as the physics needs them.
fn opening_of(source: &Source, patches: &Patches, n: usize) -> Opening {
    let mut opening = source.spans[n].opening.clone();
    if let Some(command) = patches.command.get(&n)
        && (command.script.is_some() || command.reads.is_some())
    {
        opening.reads = command.reads.clone();
        opening.writes = command.writes.clone();
    }
    opening
}

struct Memory<'a> {
    states: &'a States,
    files: Files,
}

impl Workspace for Memory<'_> {
    type Error = std::convert::Infallible;

    fn now(&mut self, patterns: &[Pattern]) -> Result<Digest, Self::Error> {
        Ok(content(&self.files, patterns))
    }

    fn recorded(&mut self, snapshot: &SnapshotRef, patterns: &[Pattern]) -> Result<Digest, Self::Error> {
        Ok(content(&self.states.0[&snapshot.content], patterns))
    }
}

/// The product's way: plan, then only what the replay asks for.
fn replayed(source: &Source, states: &States, spec: &ForkSpec, fork_span: usize) -> Result<(End, BTreeSet<usize>, Reasons), TestCaseError> {
    let mut replay = Replay::new(source, spec).unwrap();
    let patches = Patches::resolve(source, &spec.source, fork_span, &spec.patches).unwrap();
    let mut memory = Memory { states, files: states.0[&source.spans[fork_span].snapshot_before.unwrap().content].clone() };
    let (mut end, mut executed, mut reasons) = (End::default(), BTreeSet::new(), BTreeMap::new());
    for n in replay.units() {
        let span = &source.spans[n];
        let keep = |memory: &mut Memory<'_>, end: &mut End| {
            let after = &states.0[&span.snapshot_after.unwrap().content];
            let written = match (&span.opening.executor, span.status()) {
                (Some(Executor::FileWrite { path, .. }), Status::Completed) => Some(path.clone()),
                _ => None,
            };
            for path in source.changed(n).during.iter().chain(&written) {
                match after.get(path) {
                    Some(content) => memory.files.insert(path.clone(), content.clone()),
                    None => memory.files.remove(path),
                };
                end.unknown.remove(path);
            }
        };
        match replay.step(n, &mut memory).unwrap() {
            Step::Keep { .. } => {
                keep(&mut memory, &mut end);
                replay.kept(n);
                end.outputs.insert(n, span.output().unwrap().clone());
            }
            Step::Override(output) => {
                keep(&mut memory, &mut end);
                replay.overridden(n, output.clone());
                end.outputs.insert(n, output);
            }
            Step::Block(blocked) => {
                reasons.insert(n, blocked.iter().map(|b| b.reason.to_string()).collect());
                end.blocked.insert(n);
                let writes = Contract::patched(source, &patches, n).unwrap().footprint.writes;
                end.unknown
                    .extend(PATHS.iter().map(|p| (*p).to_owned()).filter(|p| writes.iter().any(|w| w.covers(&Pattern::Path(p.clone())))));
                end.unknown.extend(source.changed(n).during.iter().cloned());
                replay.blocked(n);
            }
            Step::Execute(execution) => {
                executed.insert(n);
                let (status, output) = execute(&opening_of(source, &patches, n), &execution.action, &mut memory.files);
                if let Action::WriteFile { path, .. } = &execution.action {
                    end.unknown.remove(path);
                }
                end.outputs.insert(n, output.clone());
                replay.executed(n, status, Some(output));
            }
            Step::Inconsistent { message, .. } => return Err(TestCaseError::fail(message)),
        }
    }
    end.files = memory.files;
    Ok((end, executed, reasons))
}

/// Files whose content is unknown can't be compared.
fn known(mut end: End) -> End {
    end.files.retain(|path, _| !end.unknown.contains(path));
    end
}

fn patch(source: &Source, at: usize, choice: u8, salt: u8) -> Option<Value> {
    let span = &source.spans[at];
    let shell = matches!(span.opening.executor, Some(Executor::Shell(_)));
    let overridable = matches!(span.opening.kind, SpanKind::ToolCall | SpanKind::ShellCommand | SpanKind::FileRead);
    let recorded = span.output().map(|o| o.text.clone()).unwrap_or_default();
    Some(match choice {
        0 if shell => json!({"type": "EnvVarOverride", "span": span.id, "env": [{"name": "V", "value": (salt % 3).to_string()}]}),
        1 if overridable => {
            json!({"type": "ToolOutputOverride", "span": span.id, "output": {"text": if salt.is_multiple_of(3) { recorded } else { format!("o{salt}") }}})
        }
        2 if shell => {
            json!({"type": "CommandOverride", "span": span.id, "command": {"script": format!("new {}", salt % 2), "reads": ["f0", "d/"], "writes": ["f1"]}})
        }
        3 if shell => json!({"type": "CommandOverride", "span": span.id, "command": {"script": format!("free {}", salt % 2)}}),
        _ => return None,
    })
}

fn cases() -> u32 {
    std::env::var("REPLAYFORK_PROPERTY_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(4000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_global_rejects: 1_000_000, ..ProptestConfig::default() })]

    #[test]
    fn a_replay_ends_as_a_full_execution_would(
        drafts in prop::collection::vec(draft(), 3..12),
        fork_at in any::<prop::sample::Index>(),
        wishes in prop::collection::vec((any::<prop::sample::Index>(), 0u8..4, any::<u8>()), 1..4),
    ) {
        let (source, states) = record(&drafts);
        let fork_span = fork_at.index(source.spans.len());
        let mut targets = BTreeSet::new();
        let patches: Vec<Value> = wishes
            .iter()
            .filter_map(|(at, choice, salt)| {
                let at = fork_span + at.index(source.spans.len() - fork_span);
                if targets.insert(at) { patch(&source, at, *choice, *salt) } else { None }
            })
            .collect();
        prop_assume!(!patches.is_empty());
        let spec: ForkSpec = serde_json::from_value(json!({"source": {"run": "r", "span": id(fork_span)}, "patches": patches})).unwrap();
        let planned = plan(&source, &spec).unwrap();
        let want = reference(&source, &states, &spec, fork_span);
        let (got, executed, reasons) = replayed(&source, &states, &spec, fork_span)?;
        let mark = |n: usize| planned.spans.iter().find(|p| p.id == id(n)).and_then(|p| p.mark);
        for n in fork_span..source.spans.len() {
            let (ran, blocked) = (executed.contains(&n), got.blocked.contains(&n));
            prop_assert!(!ran || mark(n).is_some_and(Mark::may_run), "{} ran, and the plan says {:?}", id(n), mark(n));
            prop_assert!(!blocked || mark(n).is_some_and(Mark::may_block), "{} was blocked, and the plan says {:?}", id(n), mark(n));
            prop_assert!(ran || mark(n) != Some(Mark::WillRun), "{} should have run", id(n));
            prop_assert!(blocked || mark(n) != Some(Mark::WillBeBlocked), "{} should have been blocked", id(n));
            for reason in reasons.get(&n).into_iter().flatten() {
                let foreseen = planned.spans.iter().find(|p| p.id == id(n)).is_some_and(|p| p.blocked.iter().any(|b| b.reason.as_str() == reason));
                prop_assert!(foreseen, "{} was blocked by {reason}, which the plan does not name", id(n));
            }
        }
        prop_assert_eq!(&got.blocked, &want.blocked);
        let (got, want) = (known(got), known(want));
        prop_assert_eq!(&got.files, &want.files);
        for (n, output) in &want.outputs {
            let seen = |o: &Output| (o.text.clone(), o.exit_code.unwrap_or(0));
            prop_assert_eq!(got.outputs.get(n).map(seen), Some(seen(output)), "output of {}", id(*n));
        }
    }
}
