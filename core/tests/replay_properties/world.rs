//! A small world: random runs, recorded as a recorder would, and the physics by which its commands work.

use std::collections::BTreeMap;

use proptest::prelude::*;
use replayfork_core::contract::{Action, Contract, action};
use replayfork_core::digest::Hasher;
use replayfork_core::footprint::{Footprint, Pattern};
use replayfork_core::model::{
    Binding, Closing, Executor, Inputs, Opening, Output, ReplayPolicy, RunEnvironment, Shell, Span, SpanKind, Status, Verdict,
    WorkspaceAccess,
};
use replayfork_core::source::Source;
use serde_json::{Value, json};

use crate::common::facts;
use crate::common::files::{Entry, Files, Reach, States, covered, set};
use crate::common::product::{Physics, value};
use crate::common::recorder::Recorder;

/// The last ones are declared by nobody.
pub const PATHS: [&str; 9] = ["f0", "f1", "f2", "d/f3", "d/f4", "e/f5", "stray", "d/other", "e/other"];
const DECLARED: usize = 6;

/// What a random step is made of.
#[derive(Clone, Debug)]
pub struct Draft {
    pub kind: u8,
    /// Which earlier steps its template uses, as offsets.
    pub binds: Vec<usize>,
    pub field: u8,
    pub reads: Vec<usize>,
    pub writes: Vec<usize>,
    pub declared: bool,
    pub reads_folder: bool,
    pub depends_on: Option<usize>,
    /// How many of the steps after it begin before it has ended.
    pub overlaps: usize,
    /// How many of the steps after it are below it: in a container, or in a unit.
    pub holds: usize,
    /// A rare trait.
    pub quirk: u8,
    /// A file that something changes before the step, outside of any span.
    pub gap: Option<usize>,
}

pub fn draft() -> impl Strategy<Value = Draft> {
    let path = 0..DECLARED;
    (
        (0u8..14, prop::collection::vec(1usize..6, 0..3), 0u8..5, prop::collection::vec(path.clone(), 0..3)),
        (prop::collection::vec(path.clone(), 0..3), prop::bool::weighted(0.75), prop::bool::weighted(0.2)),
        (prop::option::weighted(0.15, 1usize..5), prop_oneof![6 => Just(0usize), 1 => Just(1), 1 => Just(2)], 1usize..4, 0u8..40),
        prop::option::weighted(0.1, path),
    )
        .prop_map(|((kind, binds, field, reads), (writes, declared, reads_folder), (depends_on, overlaps, holds, quirk), gap)| Draft {
            kind,
            binds,
            field,
            reads,
            writes,
            declared,
            reads_folder,
            depends_on,
            overlaps,
            holds,
            quirk,
            gap,
        })
}

pub fn id(n: usize) -> String {
    format!("s{n:02}")
}

pub fn short(parts: &[&str]) -> String {
    let mut hasher = Hasher::new("step");
    for part in parts {
        hasher.add("p", part.as_bytes());
    }
    hasher.finish().to_string()[..6].to_owned()
}

/// The answer of the model that answers everything.
pub fn answer(salt: &str, request: &Value) -> String {
    short(&["model", salt, &request.to_string()])
}

/// What a command does is a function of what it can see. Gives its result and what it writes: the files are as before.
pub fn perform(action: &Action, reach: &Reach<'_>, files: &Files, salt: &str) -> (Status, Output, Files) {
    let mut after = files.clone();
    let text = |text: String| Output { text: text.clone(), stdout: text, ..Output::default() };
    match action {
        Action::Run(command) => {
            let seen: Vec<_> = files.iter().filter(|(p, _)| covered(reach.sees, p)).map(|(p, e)| format!("{p}={}", e.content())).collect();
            let said = short(&[&command.argv.join(" "), &format!("{:?}{}", command.env, command.stdin), &seen.join(","), salt]);
            let coin = |of: &str| short(&[&said, of]).as_bytes()[0] % 4;
            for path in PATHS.iter().filter(|p| covered(reach.writes, p)) {
                let exact = reach.writes.contains(&Pattern::Path((*path).to_owned()));
                match coin(&format!("w{path}")) {
                    _ if !exact && coin(path) != 0 => {}
                    0 => drop(after.remove(*path)),
                    1 => {}
                    // The same content from time to time, whatever was read.
                    2 => set(&mut after, path, Some(&Entry::file("same"))),
                    _ => set(&mut after, path, Some(&Entry::file(short(&[&said, path])))),
                }
            }
            let exit_code = i32::from(coin("exit") == 0);
            let status = if exit_code == 0 { Status::Completed } else { Status::Failed };
            (status, Output { exit_code: Some(exit_code), ..text(said) }, after)
        }
        Action::ReadFile { path } => match files.get(path) {
            Some(content) => (Status::Completed, text(content.content().to_owned()), after),
            None => (Status::Failed, text("absent".into()), after),
        },
        Action::WriteFile { path, content, executable } => {
            set(&mut after, path, Some(&Entry::File { content: content.clone(), executable: *executable }));
            (Status::Completed, text("written".into()), after)
        }
        Action::AskModel { request } => (Status::Completed, text(answer(salt, request)), after),
    }
}

/// The physics of a fork; `salt` makes its commands give something else than when recorded.
pub struct Salted<'a>(pub &'a str);

impl Physics for Salted<'_> {
    fn perform(&mut self, action: &Action, reach: &Reach<'_>, files: &Files) -> (Status, Option<Output>, Files) {
        let salt = if matches!(action, Action::AskModel { .. }) { "command" } else { self.0 };
        let (status, output, files) = perform(action, reach, files, salt);
        (status, Some(output), files)
    }
}

fn template(n: usize, draft: &Draft, spans: &[Span], now: i64) -> String {
    // Few different texts, so that several calls of a model ask the same.
    let mut text = format!("do {}", draft.kind % 3);
    for back in &draft.binds {
        let Some(span) = n.checked_sub(*back).and_then(|i| spans.get(i)) else { continue };
        let Some(closing) = span.closing.as_ref().filter(|c| c.ended <= now && c.output.is_some()) else { continue };
        let has_code = closing.output.as_ref().is_some_and(|o| o.exit_code.is_some());
        let field = match draft.field {
            0 if has_code => ".exit_code",
            1 => ".status",
            2 => ".text[:3]",
            _ => ".text",
        };
        text.push_str(&format!(" {{{{ spans[\"{}\"]{field} }}}}", span.id));
    }
    text
}

fn opening(n: usize, draft: &Draft, spans: &[Span], parent: Option<usize>, started: i64) -> Opening {
    use SpanKind::*;
    let kind = match draft.kind {
        0..=2 => ShellCommand,
        3 | 9 | 10 => ToolCall,
        4 => FileRead,
        5 | 6 => FileWrite,
        7 | 8 => LlmCall,
        11 => Retrieval,
        12 => Subgraph,
        _ => PlannerStep,
    };
    let text = template(n, draft, spans, started);
    let bound = |field: &str| BTreeMap::from([(field.to_owned(), Binding::Template(text.clone()))]);
    let path = |list: &[usize]| PATHS[list.first().copied().unwrap_or(n % DECLARED)].to_owned();
    let env = BTreeMap::from([("V".to_owned(), "0".to_owned())]);
    let (executor, input_bindings) = match draft.kind {
        0..=3 | 10 => (Some(Executor::Shell(Shell { script: Some(String::new()), env, ..Shell::default() })), bound("script")),
        4 => (Some(Executor::FileRead { path: path(&draft.reads) }), BTreeMap::new()),
        5 | 6 => (
            Some(Executor::FileWrite { path: path(&draft.writes), content: String::new(), executable: draft.quirk == 19 }),
            bound("content"),
        ),
        7 | 8 => {
            let request = json!({"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": ""}]});
            (Some(Executor::Model { provider: "p".into(), request }), bound("/messages/0/content"))
        }
        12 => (None, BTreeMap::new()),
        _ => (None, bound("prompt")),
    };
    let names = |list: &[usize]| list.iter().map(|i| PATHS[*i].to_owned()).collect::<Vec<_>>();
    let mut reads = names(&draft.reads);
    if draft.reads_folder {
        reads.push("d/".to_owned());
    }
    let shell = matches!(executor, Some(Executor::Shell(_)));
    let model = matches!(executor, Some(Executor::Model { .. }));
    let earlier =
        |back: usize| n.checked_sub(back).filter(|&i| spans.get(i).and_then(|s| s.closing.as_ref()).is_some_and(|c| c.ended <= started));
    Opening {
        name: format!("n{n}"),
        kind,
        parent: parent.map(id),
        started,
        arguments: Value::Null,
        executor,
        input_bindings,
        depends_on: draft.depends_on.and_then(earlier).map(id).into_iter().collect(),
        inputs: if (shell || model) && draft.quirk == 1 { Inputs::Unknown } else { Inputs::Known },
        reads: (shell && draft.declared).then_some(reads),
        writes: (shell && draft.declared).then(|| names(&draft.writes)),
        // A tool without a command sees no files, or its result could not be told apart.
        workspace: matches!(draft.kind, 9 | 12).then_some(WorkspaceAccess::None),
        replay_policy: match draft.quirk {
            2 => Some(ReplayPolicy::RecordOnly),
            3..=8 if shell || model => Some(ReplayPolicy::Cacheable),
            9 if shell && draft.kind != 10 => Some(ReplayPolicy::Pure),
            _ => None,
        },
        model: None,
        redacted: if draft.quirk == 10 { vec!["key".into()] } else { vec![] },
        network: draft.quirk == 11,
    }
}

fn verdict(draft: &Draft) -> (Verdict, bool) {
    match draft.quirk {
        12 => (Verdict::Deny, true),
        13 => (Verdict::None, true),
        14..=16 => (Verdict::GateAllow, false),
        _ => (Verdict::None, false),
    }
}

/// Records a run. A step reads when it begins and writes when it ends.
pub fn record(drafts: &[Draft]) -> (Source, States) {
    let files = PATHS[..4].iter().map(|p| ((*p).to_owned(), Entry::file(format!("initial {p}")))).collect();
    let mut recorder = Recorder::new(RunEnvironment::default(), files);
    let parents = parents(drafts);
    for (n, draft) in drafts.iter().enumerate() {
        let started = n as i64 * 100 + 1;
        recorder.settle(started);
        if let Some(gap) = draft.gap.filter(|_| !recorder.is_busy()) {
            recorder.files.insert(PATHS[gap].to_owned(), Entry::file(format!("gap {n}")));
        }
        let opening = opening(n, draft, &recorder.spans, parents[n], started);
        let below = |i: usize| std::iter::successors(parents[i], |&p| parents[p]).any(|p| p == n);
        let holds = (0..parents.len()).rfind(|&i| below(i));
        let so_far = recorder.begin(id(n), opening.clone(), true);
        let files = &recorder.files;
        let ends = match holds {
            Some(last) => last as i64 * 100 + 90,
            None if parents[n].is_none() && draft.overlaps > 0 => (n + draft.overlaps) as i64 * 100 + 60,
            None => started + 49,
        };
        let (verdict, out) = verdict(draft);
        let (status, output, after) = if out {
            (Status::Skipped, Output::default(), files.clone())
        } else if opening.executor.is_some() {
            let contract = Contract::recorded(&so_far, n).unwrap();
            let rendered = contract.render(&so_far, &|i| value(&so_far, i)).unwrap();
            let mut footprint = so_far.footprint(n);
            for below in (0..drafts.len()).filter(|&i| parents[i] == Some(n)) {
                let inner = self::opening(below, &drafts[below], &recorder.spans, None, i64::MIN);
                footprint = footprint.with(Footprint::of(&inner, inner.executor.as_ref(), None).unwrap());
            }
            let reach = Reach { sees: &footprint.sees, writes: &footprint.writes };
            // A model that is asked the same twice need not say the same.
            let salt = if matches!(opening.executor, Some(Executor::Model { .. })) { ["", "again"][n % 2] } else { "" };
            let (status, output, mut after) = perform(&action(&so_far, &rendered, None).unwrap(), &reach, files, salt);
            if draft.quirk == 17
                && !recorder.is_busy()
                && draft.overlaps == 0
                && opening.reads.is_some()
                && matches!(opening.executor, Some(Executor::Shell(_)))
            {
                // It writes what it does not declare.
                after.insert(PATHS[DECLARED].to_owned(), Entry::file(format!("stray {n}")));
            }
            (status, output, after)
        } else {
            let text = short(&["given", &format!("{:?}", opening.input_bindings), &n.to_string()]);
            (Status::Completed, Output { stdout: text.clone(), text, ..Output::default() }, files.clone())
        };
        let timed_out = draft.quirk == 18 && matches!(opening.executor, Some(Executor::Shell(_)));
        let output = (!timed_out).then_some(output);
        let closing = Closing { verdict, ..Closing::new(ends, if timed_out { Status::Failed } else { status }, output) };
        recorder.ends(closing, &after);
    }
    recorder.settle(i64::MAX);
    let Recorder { environment, spans, states, .. } = recorder;
    (facts::source(&environment, spans, &states), states)
}

/// Who holds whom: containers and units hold the steps right after them; a container may hold another one.
fn parents(drafts: &[Draft]) -> Vec<Option<usize>> {
    let mut parents = vec![None; drafts.len()];
    let mut n = 0;
    while n < drafts.len() {
        let holds = match drafts[n].kind {
            12 => drafts[n].holds,
            10 if verdict(&drafts[n]) == (Verdict::None, false) => drafts[n].holds.min(2),
            _ => 0,
        };
        let mut holder = n;
        for i in (n + 1..drafts.len()).take(holds) {
            parents[i] = Some(holder);
            if drafts[n].kind == 12 && drafts[i].kind == 12 {
                holder = i;
            }
        }
        n += holds + 1;
    }
    parents
}
