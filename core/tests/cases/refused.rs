//! What a fork refuses, and in which words: every patch on every kind of span, and patches that don't go together.

use serde_json::{Value, json};

use crate::build::{
    Recorded, Step, asks, config, documents, env, file, on, output, prompt, reads, run, says, script, sh, snapshot, writes,
};
use replayfork_core::model::{ReplayPolicy, SpanKind};

/// A span of each kind, without and with what runs it.
fn kinds() -> Recorded {
    use SpanKind::*;
    let bare = |kind| says(kind, "x");
    let command = |kind| sh("echo x").of_kind(kind).sees(&[], &[]);
    let seeing = Step::sees_files;
    run(&[("in", "0")])
        .step("run", seeing(bare(Run)))
        .step("planner", bare(PlannerStep))
        .step("llm", bare(LlmCall))
        .step("llm_asks", asks("hi"))
        .step("tool", bare(ToolCall))
        .step("tool_sees", seeing(bare(ToolCall)))
        .step("tool_runs", command(ToolCall))
        .step("tool_asks", asks("hi").of_kind(ToolCall).sees_nothing())
        .step("shell", seeing(bare(ShellCommand)))
        .step("shell_runs", command(ShellCommand))
        .step("shell_once", command(ShellCommand).policy(ReplayPolicy::RecordOnly))
        .step("read", seeing(bare(FileRead)))
        .step("read_runs", reads("in"))
        .step("write", seeing(bare(FileWrite)))
        .step("write_runs", writes("out", "x"))
        .step("browser", seeing(bare(BrowserAction)))
        .step("retrieval", bare(Retrieval))
        .step("memory", bare(MemoryLookup))
        .step("human", bare(HumanInput))
        .step("guard", bare(GuardrailCheck))
        .step("internal", seeing(bare(AdapterInternal)))
        .hold("box", seeing(bare(Subgraph)))
        .step("inside", command(ShellCommand))
        .end()
        .recorded()
}

const SPANS: [(&str, &str); 23] = [
    ("run", "Run"),
    ("planner", "PlannerStep"),
    ("llm", "LlmCall"),
    ("llm_asks", "LlmCall"),
    ("tool", "ToolCall"),
    ("tool_sees", "ToolCall"),
    ("tool_runs", "ToolCall"),
    ("tool_asks", "ToolCall"),
    ("shell", "ShellCommand"),
    ("shell_runs", "ShellCommand"),
    ("shell_once", "ShellCommand"),
    ("read", "FileRead"),
    ("read_runs", "FileRead"),
    ("write", "FileWrite"),
    ("write_runs", "FileWrite"),
    ("browser", "BrowserAction"),
    ("retrieval", "Retrieval"),
    ("memory", "MemoryLookup"),
    ("human", "HumanInput"),
    ("guard", "GuardrailCheck"),
    ("internal", "AdapterInternal"),
    ("box", "Subgraph"),
    ("inside", "ShellCommand"),
];

/// Of one patch type: the spans that it fits, and what all others hear. `{what}` is the span.
struct Row {
    patch: fn() -> Value,
    fits: &'static [&'static str],
    /// Words for some spans, before those for all others.
    but: &'static [(&'static str, &'static str)],
    others: &'static str,
}

fn rows() -> Vec<Row> {
    vec![
        Row {
            patch: || script("echo y"),
            fits: &["tool_runs", "shell_runs", "inside"],
            but: &[(
                "shell_once",
                "CommandOverride names {what}, which was recorded as RecordOnly and is never run again; use ToolOutputOverride for its output",
            )],
            others: "CommandOverride needs a ShellCommand, or a ToolCall that was recorded with a command; {what} is none; {instead}",
        },
        Row {
            patch: || env("V", "1"),
            fits: &[
                "run",
                "planner",
                "llm",
                "llm_asks",
                "tool",
                "tool_sees",
                "tool_runs",
                "tool_asks",
                "shell",
                "shell_runs",
                "shell_once",
                "read",
                "read_runs",
                "write",
                "write_runs",
                "browser",
                "retrieval",
                "memory",
                "human",
                "guard",
                "internal",
                "box",
                "inside",
            ],
            but: &[],
            others: "",
        },
        Row {
            patch: || file("in", "1"),
            fits: &[
                "run",
                "tool_sees",
                "tool_runs",
                "shell",
                "shell_runs",
                "shell_once",
                "read",
                "read_runs",
                "write",
                "write_runs",
                "browser",
                "internal",
                "box",
                "inside",
            ],
            but: &[],
            others: "FileContentOverride needs a span that sees the workspace; {what} does not; name the first span after it that does",
        },
        Row {
            patch: || output("y"),
            fits: &[
                "tool",
                "tool_sees",
                "tool_runs",
                "tool_asks",
                "shell",
                "shell_runs",
                "shell_once",
                "read",
                "read_runs",
                "retrieval",
                "inside",
            ],
            but: &[],
            others: "ToolOutputOverride needs a ToolCall, ShellCommand, Retrieval or FileRead; {what} is none of these; {instead}",
        },
        Row {
            patch: || prompt("y"),
            fits: &["llm_asks", "tool_asks"],
            but: &[],
            others: "PromptEdit needs a model call that was recorded with its request; {what} is none; {instead}",
        },
        Row {
            patch: || config("temperature", json!(1)),
            fits: &["llm_asks", "tool_asks"],
            but: &[],
            others: "ModelConfigEdit needs a model call that was recorded with its request; {what} is none; {instead}",
        },
        Row {
            patch: || documents(json!(["d"])),
            fits: &["retrieval"],
            but: &[],
            others: "RetrievalContextOverride needs a Retrieval; {what} is none; {instead}",
        },
    ]
}

#[test]
fn every_patch_type_fits_a_span_or_says_why_not() {
    let run = kinds();
    let state = run.workspace_after("read_runs");
    for (name, kind) in SPANS {
        let what = format!("span {name:?} ({kind})");
        for row in rows() {
            let patch = (row.patch)();
            let expected = match row.but.iter().find(|(span, _)| *span == name) {
                _ if row.fits.contains(&name) => "planned".to_owned(),
                Some((_, words)) => format!("spec.patches[0]: {words}"),
                None => format!("spec.patches[0]: {}", row.others),
            };
            let expected = expected.replace("{what}", &what).replace("{instead}", instead(name));
            assert_eq!(run.refused("run", json!([on(name, patch.clone())])), expected, "{patch}");
        }
        assert_eq!(run.refused("run", json!([on(name, snapshot(&state))])), "planned", "{name}");
    }
}

/// The way out: what can be patched about a span, when a patch does not fit it.
fn instead(name: &str) -> &'static str {
    match name {
        "tool" | "tool_sees" | "shell" | "shell_once" | "read" | "read_runs" => "use ToolOutputOverride for its output",
        "tool_runs" | "shell_runs" | "inside" => "use CommandOverride for its command, or ToolOutputOverride for its output",
        "llm_asks" => "use PromptEdit or ModelConfigEdit for its request",
        "tool_asks" => "use PromptEdit or ModelConfigEdit for its request, or ToolOutputOverride for its output",
        "retrieval" => "use RetrievalContextOverride for its documents",
        "box" => "use a patch on a span that it holds",
        "write" | "write_runs" => "use FileContentOverride on the span after it",
        _ => "use a patch on a span that reads its output",
    }
}

#[test]
fn two_patches_on_one_field_are_refused_with_both_named() {
    let run = kinds();
    let shell = r#"span "shell_runs" (ShellCommand)"#;
    let asks = r#"span "llm_asks" (LlmCall)"#;
    let search = r#"span "retrieval" (Retrieval)"#;
    let cleared = || json!({"type": "CommandOverride", "command": {"env": []}});
    let system = || json!({"type": "PromptEdit", "prompt": {"system": "s"}});
    let all = || json!({"type": "PromptEdit", "prompt": {"messages": [{"role": "user", "content": "m"}]}});
    let model = || json!({"type": "ModelConfigEdit", "modelConfig": {"model": "n"}});
    let remove = || json!({"type": "ModelConfigEdit", "modelConfig": {"unset": ["temperature"]}});
    let set = || config("temperature", json!(1));
    let state = run.workspace_after("read_runs");
    let both =
        |a: &str, b: &str, what: &str| format!("spec.patches[1]: {a} and {b} both change the same field of {what}; keep one of them");
    let twice = |member: &str, thing: &str, what: &str| {
        format!("spec.patches[1].{member}: the {thing} of {what} is given twice, here and in spec.patches[0]; keep one of them")
    };
    for (span, first, second, expected) in [
        ("shell_runs", script("a"), script("b"), both("CommandOverride", "spec.patches[0], another CommandOverride,", shell)),
        ("shell_runs", script("a"), output("b"), both("ToolOutputOverride", "spec.patches[0], a CommandOverride,", shell)),
        ("shell_runs", output("a"), script("b"), both("CommandOverride", "spec.patches[0], a ToolOutputOverride,", shell)),
        ("shell_runs", output("a"), output("b"), both("ToolOutputOverride", "spec.patches[0], another ToolOutputOverride,", shell)),
        ("shell_runs", cleared(), env("V", "1"), both("EnvVarOverride", "spec.patches[0], a CommandOverride,", shell).replace("the same field", "the environment")),
        ("shell_runs", env("V", "1"), cleared(), both("CommandOverride", "spec.patches[0], an EnvVarOverride,", shell).replace("the same field", "the environment")),
        ("shell_runs", env("V", "1"), env("V", "1"), twice("env", "variable \"V\"", shell)),
        ("retrieval", output("a"), documents(json!([])), both("RetrievalContextOverride", "spec.patches[0], a ToolOutputOverride,", search)),
        ("retrieval", documents(json!([])), output("a"), both("ToolOutputOverride", "spec.patches[0], a RetrievalContextOverride,", search)),
        ("llm_asks", prompt("a"), prompt("b"), both("PromptEdit", "spec.patches[0], another PromptEdit,", asks)),
        ("llm_asks", system(), system(), both("PromptEdit", "spec.patches[0], another PromptEdit,", asks)),
        ("llm_asks", all(), prompt("b"), both("PromptEdit", "spec.patches[0], another PromptEdit,", asks)),
        ("llm_asks", prompt("a"), all(), both("PromptEdit", "spec.patches[0], another PromptEdit,", asks)),
        ("llm_asks", model(), model(), both("ModelConfigEdit", "spec.patches[0], another ModelConfigEdit,", asks)),
        ("llm_asks", set(), set(), twice("modelConfig", "parameter \"temperature\"", asks)),
        ("llm_asks", set(), remove(), twice("modelConfig", "parameter \"temperature\"", asks)),
        ("run", snapshot(&state), snapshot(&state), both("SnapshotOverride", "spec.patches[0], another SnapshotOverride,", r#"span "run" (Run)"#)),
        (
            "run",
            file("a/b", "1"),
            file("a", "2"),
            r#"spec.patches[1].files[0].path: "a" and "a/b" (spec.patches[0]) of span "run" (Run) are the same file, or one lies in the other; keep one of them"#.into(),
        ),
        ("shell_runs", script("a"), env("V", "1"), "planned".into()),
        ("shell_runs", script("a"), file("in", "1"), "planned".into()),
        ("shell_runs", output("a"), file("in", "1"), "planned".into()),
        ("llm_asks", system(), prompt("b"), "planned".into()),
        ("llm_asks", model(), set(), "planned".into()),
        ("run", file("a", "1"), file("b", "2"), "planned".into()),
    ] {
        assert_eq!(run.refused("run", json!([on(span, first.clone()), on(span, second.clone())])), expected, "{first} {second}");
    }
}

/// A unit that holds another span, one span after it, and three of the same name.
fn nested() -> Recorded {
    run(&[("in", "0")])
        .step("before", sh("echo x").sees(&[], &[]))
        .hold("early", says(SpanKind::Subgraph, ""))
        .hold("agent", sh("echo all").sees(&[], &[]))
        .step("part", sh("echo part").sees(&[], &[]))
        .end()
        .step("after", sh("echo x").sees(&[], &[]))
        .end()
        .recorded()
}

#[test]
fn what_runs_as_part_of_a_unit_is_refused_with_the_unit_named() {
    for (patch, kind) in [
        (script("y"), "CommandOverride"),
        (env("V", "1"), "EnvVarOverride"),
        (file("in", "1"), "FileContentOverride"),
        (output("y"), "ToolOutputOverride"),
        (snapshot(&nested().workspace_after("before")), "SnapshotOverride"),
    ] {
        let words = format!(
            r#"spec.patches[0]: {kind} names span "part" (ShellCommand), which runs as part of span "agent" (ShellCommand); patch that span instead"#
        );
        assert_eq!(nested().refused("before", json!([on("part", patch)])), words);
    }
}

#[test]
fn a_target_before_the_fork_span_is_refused_unless_it_holds_the_rest() {
    for (patch, kind) in [
        (script("y"), "CommandOverride"),
        (env("V", "1"), "EnvVarOverride"),
        (file("in", "1"), "FileContentOverride"),
        (output("y"), "ToolOutputOverride"),
    ] {
        let words = format!(
            r#"spec.patches[0]: {kind} names span "before" (ShellCommand), which began before the fork span, span "after" (ShellCommand); fork at it or at an earlier span"#
        );
        assert_eq!(nested().refused("after", json!([on("before", patch)])), words);
    }
    assert_eq!(nested().refused("after", json!([on("early", env("V", "1"))])), "planned");
}

#[test]
fn what_a_patch_says_of_itself_is_checked_before_anything_else() {
    let run = kinds();
    let command = |command: Value| json!({"type": "CommandOverride", "command": command});
    let state = "0".repeat(64);
    for (span, patch, expected) in [
        ("nobody", env("V", "1"), r#"spec.patches[0].span: no span of run "r" has the id or name "nobody"; `kubectl replay show r` lists its spans"#.to_owned()),
        (
            "shell_runs",
            json!({"type": "EnvVarOverride"}),
            "spec.patches[0]: EnvVarOverride takes the member `env` and no other; `env` is missing".into(),
        ),
        (
            "shell_runs",
            json!({"type": "EnvVarOverride", "env": [{"name": "V"}], "output": {"text": ""}}),
            "spec.patches[0]: EnvVarOverride takes the member `env` and no other; `output` must go".into(),
        ),
        (
            "shell_runs",
            command(json!({"script": "a", "argv": ["b"]})),
            "spec.patches[0].command: CommandOverride takes `script` or `argv`, not both; keep one of them".into(),
        ),
        (
            "shell_runs",
            command(json!({})),
            "spec.patches[0].command: CommandOverride changes nothing: give at least one of script, argv, cwd, env, stdin".into(),
        ),
        (
            "shell_runs",
            command(json!({"script": "a", "reads": ["in"]})),
            "spec.patches[0].command: `reads` and `writes` are declared together or not at all; `writes` is missing".into(),
        ),
        (
            "shell_runs",
            command(json!({"cwd": "../up"})),
            r#"spec.patches[0].command: "../up" is not a path of the workspace: it contains `..`; name one of the workspace"#.into(),
        ),
        (
            "shell_runs",
            command(json!({"script": "a", "reads": ["/etc/"], "writes": []})),
            r#"spec.patches[0].command: "/etc/" is not a path of the workspace: it is absolute, and the run has no recorded workspace root; name one of the workspace"#.into(),
        ),
        (
            "shell_runs",
            file("../x", "1"),
            r#"spec.patches[0].files[0].path: "../x" is not a path of the workspace: it contains `..`; name one of the workspace"#.into(),
        ),
        (
            "shell_runs",
            file("./", "1"),
            r#"spec.patches[0].files[0].path: "./" is the workspace itself, and no file; name a file in it"#.into(),
        ),
        (
            "shell_runs",
            json!({"type": "FileContentOverride", "files": [{"path": "a"}]}),
            "spec.patches[0].files[0]: it has no content; give it inline or by `contentFrom`".into(),
        ),
        (
            "shell_runs",
            json!({"type": "ToolOutputOverride", "output": {"text": "a", "contentFrom": {"digest": state}}}),
            "spec.patches[0].output: its content is given inline and by `contentFrom`; keep one of them".into(),
        ),
        (
            "shell_runs",
            json!({"type": "ToolOutputOverride", "output": {"text": "a\u{0}b"}}),
            "spec.patches[0].output: its content holds a NUL character, which no output may have; remove it".into(),
        ),
        (
            "shell_runs",
            json!({"type": "ToolOutputOverride", "output": {"contentFrom": {"digest": state}}}),
            format!(
                "spec.patches[0].output: contentFrom.digest: {state} is not among the contents of this namespace; `kubectl replay upload FILE` sends it (it is kept for 24 hours until a fork uses it)"
            ),
        ),
        (
            "shell_runs",
            snapshot("abc"),
            r#"spec.patches[0].snapshot.digest: "abc" is no digest: expected 64 hex digits (BLAKE3)"#.into(),
        ),
        (
            "shell_runs",
            snapshot(&state),
            format!(
                r#"spec.patches[0].snapshot.digest: no run of this namespace was recorded with a workspace whose content digest is {state}, which span "shell_runs" (ShellCommand) is to start from; `kubectl replay show RUN SPAN -o json` has those around a span"#
            ),
        ),
        (
            "llm_asks",
            json!({"type": "PromptEdit", "prompt": {"system": "a", "messages": [{"role": "user", "content": "b"}]}}),
            "spec.patches[0].prompt: PromptEdit takes exactly one of `system`, `message`, `messages` and `contentFrom`".into(),
        ),
        (
            "llm_asks",
            json!({"type": "PromptEdit", "prompt": {"message": {"index": 1, "content": "b"}}}),
            r#"spec.patches[0].prompt.message.index: 1 is no message of span "llm_asks" (LlmCall), which has 1 (from 0)"#.into(),
        ),
        (
            "llm_asks",
            json!({"type": "ModelConfigEdit", "modelConfig": {}}),
            "spec.patches[0].modelConfig: ModelConfigEdit changes nothing: give at least one of model, parameters, unset".into(),
        ),
        (
            "llm_asks",
            config("messages", json!([])),
            "spec.patches[0].modelConfig: ModelConfigEdit can't change `messages`; use PromptEdit, or `modelConfig.model`".into(),
        ),
        (
            "llm_asks",
            json!({"type": "ModelConfigEdit", "modelConfig": {"parameters": {"top_p": 1}, "unset": ["top_p"]}}),
            r#"spec.patches[0].modelConfig: the parameter "top_p" of span "llm_asks" (LlmCall) is both set and removed; keep one of them"#.into(),
        ),
    ] {
        assert_eq!(run.refused("run", json!([on(span, patch.clone())])), expected, "{patch}");
    }
}

#[test]
fn what_the_rest_of_a_fork_says_is_checked_too() {
    let run = kinds();
    let patches = || json!([output("y")]);
    for (more, expected) in [
        (json!({"model": {"mode": "Command"}}), "spec.model: mode Command needs `command`".to_owned()),
        (
            json!({"model": {"mode": "Blocked", "endpoint": "e"}}),
            "spec.model: `endpoint` belongs to mode Endpoint, and the mode is Blocked; remove it, or set the mode".into(),
        ),
        (
            json!({"model": {"mode": "Recorded", "fixtures": {"inline": [{"response": "a"}]}}}),
            "spec.model.fixtures: fixture 0: give either `request` or `requestDigest`".into(),
        ),
        (
            json!({"model": {"mode": "Recorded", "fixtures": {"inline": [{"request": 1, "response": "a"}, {"request": 1, "response": "b"}]}}}),
            "spec.model.fixtures: fixture 1: another one answers the same request; keep one of them".into(),
        ),
        (
            json!({"approvals": [{"span": "nobody", "inputDigest": "0".repeat(64)}]}),
            r#"spec.approvals[0].span: no span of run "r" has the id or name "nobody"; `kubectl replay show r` lists its spans"#.into(),
        ),
        (
            json!({"approvals": [{"span": "tool", "inputDigest": "x"}]}),
            r#"spec.approvals[0].inputDigest: "x" is no digest: expected 64 hex digits (BLAKE3)"#.into(),
        ),
    ] {
        assert_eq!(run.refused_with("tool", patches(), more.clone()), expected, "{more}");
    }
    assert_eq!(
        run.refused("nobody", patches()),
        r#"spec.source.span: no span of run "r" has the id or name "nobody"; `kubectl replay show r` lists its spans"#
    );
}

#[test]
fn a_name_that_several_spans_have_is_refused_with_their_ids() {
    let mut run = nested();
    for span in run.spans.iter_mut().filter(|s| s.id != "before") {
        span.opening.name = "same".into();
    }
    assert_eq!(
        run.refused("before", json!([on("same", output("y"))])),
        r#"spec.patches[0].span: 4 spans of run "r" are called "same"; name one by its id: early, agent, part, after"#
    );
    assert_eq!(run.refused("before", json!([on("after", output("y"))])), "planned");
}
