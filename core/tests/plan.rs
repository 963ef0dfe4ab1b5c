//! Plans of the example agent's nine spans: what a user sees for each kind of fork.

use std::collections::BTreeMap;

use replayfork_core::Digest;
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::{
    Binding, Closing, Executor, Fidelity, Opening, Output, RunEnvironment, Shell, SnapshotRef, Span, SpanKind, Status, Verdict,
};
use replayfork_core::patch::{Contents, Refused};
use replayfork_core::plan::{Mark, Plan, plan};
use replayfork_core::reason::BlockedReason;
use replayfork_core::source::{Changed, Source};
use serde_json::{Value, json};

fn span(n: i64, name: &str, kind: SpanKind, executor: Option<Executor>, output: Output) -> Span {
    let snapshot = |n: i64| Some(SnapshotRef { content: Digest::of(&n.to_le_bytes()), node: Digest::of(b"node") });
    let written = n > 6;
    Span {
        id: format!("s{n}"),
        ord: n * 100,
        opening: Opening {
            name: name.into(),
            kind,
            parent: None,
            started: n * 100,
            arguments: Value::Null,
            executor,
            input_bindings: BTreeMap::new(),
            depends_on: vec![],
            inputs: Default::default(),
            reads: None,
            writes: None,
            workspace: None,
            replay_policy: None,
            model: None,
            redacted: vec![],
            network: false,
        },
        closing: Some(Closing {
            verdict: Verdict::Allow,
            ..Closing::new(n * 100 + 50, if output.exit_code.unwrap_or(0) == 0 { Status::Completed } else { Status::Failed }, Some(output))
        }),
        fidelity: Fidelity::Recorded,
        snapshot_before: snapshot(written as i64),
        snapshot_after: snapshot((n >= 6) as i64),
        first_recorded: None,
        input_digest: None,
    }
}

fn bind(mut span: Span, bindings: &[(&str, &str)]) -> Span {
    span.opening.input_bindings = bindings.iter().map(|(k, v)| ((*k).to_owned(), Binding::Template((*v).to_owned()))).collect();
    span
}

fn declare(mut span: Span, reads: &[&str]) -> Span {
    span.opening.reads = Some(reads.iter().map(|s| (*s).to_owned()).collect());
    span.opening.writes = Some(vec![]);
    span
}

fn shell(script: &str) -> Option<Executor> {
    let env = [("AUTH_POOL_TIMEOUT".to_owned(), "5".to_owned())].into();
    Some(Executor::Shell(Shell { script: Some(script.into()), env, ..Shell::default() }))
}

fn agent() -> Source {
    use SpanKind::*;
    let text = |t: &str| Output { text: t.into(), stdout: t.into(), ..Output::default() };
    let ran = |t: &str, code| Output { exit_code: Some(code), ..text(t) };
    let tests = "python3 run_tests.py {{ select_tests | words }}";
    let run = "python3 run_tests.py pool login";
    let write = Executor::FileWrite { path: "auth/pool.py".into(), content: "fixed".into(), executable: false };
    let spans = vec![
        span(1, "plan", PlannerStep, None, text("fix it")),
        span(2, "read_src", FileRead, Some(Executor::FileRead { path: "auth/pool.py".into() }), text("source")),
        span(3, "select_tests", ToolCall, None, text("pool login")),
        declare(
            bind(span(4, "test_before", ShellCommand, shell(run), ran("1 failed", 1)), &[("script", tests)]),
            &["auth/", "run_tests.py"],
        ),
        bind(span(5, "gen_fix", LlmCall, None, text("fixed")), &[("source", "{{ read_src }}"), ("exit", "{{ test_before.exit_code }}")]),
        bind(span(6, "apply_fix", FileWrite, Some(write), text("")), &[("content", "{{ gen_fix }}")]),
        declare(
            bind(span(7, "test_validate", ShellCommand, shell(run), ran("too slow", 1)), &[("script", tests)]),
            &["auth/", "run_tests.py"],
        ),
        declare(span(8, "lint", ShellCommand, shell("python3 lint.py auth"), ran("ok", 0)), &["auth/", "lint.py"]),
        bind(span(9, "summarize", LlmCall, None, text("sum")), &[("result", "{{ test_validate }}")]),
    ];
    let changed = [("s6".to_owned(), Changed { during: vec!["auth/pool.py".into()], ..Changed::default() })].into();
    let environment = RunEnvironment { workspace_root: Some("/workspace".into()), ..RunEnvironment::default() };
    Source::new(environment, spans, changed)
}

fn spec(span: &str, patches: Value) -> ForkSpec {
    serde_json::from_value(json!({"source": {"run": "scripted-agent", "span": span}, "patches": patches})).unwrap()
}

fn planned(span: &str, patches: Value) -> Result<Plan, Refused> {
    plan(&agent(), &Contents::default(), &spec(span, patches))
}

fn marks(plan: &Plan) -> Vec<(&str, Option<Mark>, Option<BlockedReason>)> {
    plan.spans.iter().map(|s| (s.name.as_str(), s.mark, s.blocked.first().map(|b| b.reason))).collect()
}

fn output(text: &str) -> Value {
    json!([{"type": "ToolOutputOverride", "output": {"text": text}}])
}

#[test]
fn a_changed_variable_runs_one_command_and_may_block_its_reader() {
    let plan =
        planned("test_validate", json!([{"type": "EnvVarOverride", "env": [{"name": "AUTH_POOL_TIMEOUT", "value": "0.05"}]}])).unwrap();
    assert_eq!(
        marks(&plan),
        [("test_validate", Some(Mark::WillRun), None), ("summarize", Some(Mark::MayBeBlocked), Some(BlockedReason::ModelBlocked)),]
    );
    assert_eq!((plan.counts.will_run, plan.counts.may_block, plan.counts.reusable), (1, 1, 7));
}

#[test]
fn another_selection_of_tests_reaches_its_readers_and_the_files_behind_them() {
    let plan = planned("select_tests", output("pool")).unwrap();
    assert_eq!(
        marks(&plan),
        [
            ("select_tests", None, None),
            ("test_before", Some(Mark::WillRun), None),
            ("gen_fix", Some(Mark::MayBeBlocked), Some(BlockedReason::ModelBlocked)),
            ("apply_fix", Some(Mark::MayBeBlocked), Some(BlockedReason::UpstreamBlocked)),
            ("test_validate", Some(Mark::MayRunOrBeBlocked), Some(BlockedReason::UpstreamBlocked)),
            ("lint", Some(Mark::MayBeBlocked), Some(BlockedReason::UpstreamBlocked)),
            ("summarize", Some(Mark::MayBeBlocked), Some(BlockedReason::UpstreamBlocked)),
        ]
    );
}

#[test]
fn another_source_text_blocks_everything_behind_the_model_call() {
    let plan = planned("read_src", output("other source")).unwrap();
    assert!(plan.counts.may_be_run() == 0 && !plan.is_empty());
    let blocked: Vec<_> =
        marks(&plan).into_iter().filter(|(_, mark, _)| *mark == Some(Mark::WillBeBlocked)).map(|(n, _, r)| (n, r.unwrap())).collect();
    assert_eq!(
        blocked,
        [
            ("gen_fix", BlockedReason::ModelBlocked),
            ("apply_fix", BlockedReason::UpstreamBlocked),
            ("test_validate", BlockedReason::UpstreamBlocked),
            ("lint", BlockedReason::UpstreamBlocked),
            ("summarize", BlockedReason::UpstreamBlocked),
        ]
    );
}

#[test]
fn patches_that_change_nothing_give_an_empty_plan() {
    for (span, patches) in [
        ("select_tests", output("pool login")),
        ("test_validate", json!([{"type": "EnvVarOverride", "env": [{"name": "AUTH_POOL_TIMEOUT", "value": "5"}]}])),
        ("test_validate", json!([{"type": "EnvVarOverride", "env": [{"name": "NEVER_SET"}]}])),
        ("summarize", json!([{"type": "EnvVarOverride", "env": [{"name": "X", "value": "1"}]}])),
        (
            "lint",
            json!([{"type": "CommandOverride", "command": {"script": "python3 lint.py auth", "reads": ["auth/", "lint.py"], "writes": []}}]),
        ),
    ] {
        let plan = planned(span, patches.clone()).unwrap();
        assert!(plan.spans.is_empty(), "{span} {patches}: {:?}", marks(&plan));
        assert_eq!(plan.counts.reusable, 9);
    }
}

#[test]
fn the_same_words_in_another_layout_reach_no_further_than_rendering() {
    let plan = planned("select_tests", output("pool\n login")).unwrap();
    assert_eq!(marks(&plan), [("select_tests", None, None)]);
    assert!(plan.is_empty());
}

#[test]
fn a_new_command_may_touch_everything_unless_it_says_what() {
    let undeclared = planned("test_before", json!([{"type": "CommandOverride", "command": {"script": "true"}}])).unwrap();
    let names: Vec<_> = undeclared.spans.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["test_before", "gen_fix", "apply_fix", "test_validate", "lint", "summarize"]);
    let declared = planned("lint", json!([{"type": "CommandOverride", "command": {"script": "true", "reads": [], "writes": []}}])).unwrap();
    assert_eq!(marks(&declared), [("lint", Some(Mark::WillRun), None)]);
}

#[test]
fn refusals_name_field_value_and_remedy() {
    let env = |name: &str| json!({"type": "EnvVarOverride", "env": [{"name": name, "value": "1"}]});
    for (span, patches, field, says) in [
        ("nobody", json!([env("A")]), "spec.source.span", vec!["\"nobody\"", "kubectl replay show scripted-agent"]),
        (
            "lint",
            json!([{"type": "CommandOverride", "span": "plan", "command": {"script": "x"}}]),
            "spec.patches[0]",
            vec!["\"plan\"", "before the fork span"],
        ),
        (
            "plan",
            json!([{"type": "CommandOverride", "command": {"script": "x"}}]),
            "spec.patches[0]",
            vec!["CommandOverride", "PlannerStep", "use a patch on a span that reads its output"],
        ),
        ("gen_fix", output("x"), "spec.patches[0]", vec!["ToolOutputOverride", "LlmCall"]),
        ("lint", json!([env("A"), env("A")]), "spec.patches[1]", vec!["\"A\"", "twice"]),
        (
            "lint",
            json!([{"type": "CommandOverride", "command": {"env": []}}, env("A")]),
            "spec.patches[1]",
            vec!["EnvVarOverride", "spec.patches[0], a CommandOverride", "the environment"],
        ),
        ("lint", json!([{"type": "CommandOverride", "command": {"script": "a", "argv": ["b"]}}]), "spec.patches[0]", vec!["not both"]),
        ("lint", json!([{"type": "EnvVarOverride", "output": {"text": ""}}]), "spec.patches[0]", vec!["`env`"]),
        (
            "lint",
            json!([{"type": "CommandOverride", "command": {"script": "ls", "cwd": "../../etc"}}]),
            "spec.patches[0]",
            vec!["../../etc", "`..`"],
        ),
        (
            "lint",
            json!([{"type": "CommandOverride", "command": {"script": "ls", "reads": ["/etc/"], "writes": []}}]),
            "spec.patches[0]",
            vec!["/etc/", "outside"],
        ),
    ] {
        let error = planned(span, patches.clone()).unwrap_err().to_string();
        assert!(error.starts_with(field), "{error}");
        for word in says {
            assert!(error.contains(word), "{error} should say {word}");
        }
    }
}

#[test]
fn the_digest_is_the_same_for_the_same_fork_and_another_for_another() {
    let digest = |text: &str| planned("select_tests", output(text)).unwrap().digest;
    assert_eq!(digest("pool"), digest("pool"));
    assert_ne!(digest("pool"), digest("login"));
}

#[test]
fn without_a_snapshot_to_start_from_what_sees_files_is_blocked() {
    let source = agent();
    let mut spans = source.spans.clone();
    for span in &mut spans {
        span.snapshot_before = None;
        span.snapshot_after = None;
    }
    let source = Source::new(source.environment.clone(), spans, source.changed.clone());
    let patches = json!([{"type": "EnvVarOverride", "env": [{"name": "AUTH_POOL_TIMEOUT", "value": "1"}]}]);
    let plan = plan(&source, &Contents::default(), &spec("lint", patches)).unwrap();
    assert_eq!(marks(&plan)[0], ("lint", Some(Mark::WillBeBlocked), Some(BlockedReason::SnapshotMissing)));
    assert!(source.start_state(7).is_none());
}
