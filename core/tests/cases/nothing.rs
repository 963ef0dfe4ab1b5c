//! A patch that changes nothing gives an empty plan, whatever its type.

use serde_json::{Value, json};

use crate::build::{Recorded, asks, config, documents, env, file, on, output, prompt, run, says, script_that_sees, sh, snapshot, unset};
use replayfork_core::model::SpanKind;

fn one_of_each() -> Recorded {
    run(&[("conf", "0")])
        .step("shell", sh("echo 1 > log; echo done").env("V", "0").sees(&["conf"], &["log"]))
        .step("search", says(SpanKind::Retrieval, r#"[{"text":"d"}]"#))
        .step("tool", says(SpanKind::ToolCall, "t"))
        .step("ask", asks("tell {{ tool }}"))
        .step("end", sh("echo {{ shell }} {{ search }} {{ ask }}; ls conf"))
        .recorded()
}

#[test]
fn the_recorded_value_again_reaches_nobody() {
    let run = one_of_each();
    let before_end = run.workspace_after("shell");
    let patches: [(&str, Value); 13] = [
        ("shell", script_that_sees("echo 1 > log; echo done", &["conf"], &["log"])),
        ("shell", json!({"type": "CommandOverride", "command": {"env": [{"name": "V", "value": "0"}]}})),
        ("shell", env("V", "0")),
        ("shell", unset("NEVER_SET")),
        ("ask", env("V", "1")),
        ("shell", file("conf", "0")),
        ("tool", output("t")),
        ("shell", output("done")),
        ("ask", prompt("tell {{ tool }}")),
        ("ask", config("temperature", json!(0.5))),
        ("ask", json!({"type": "ModelConfigEdit", "modelConfig": {"model": "m", "unset": ["top_p"]}})),
        ("search", documents(json!([{"text": "d"}]))),
        ("end", snapshot(&before_end)),
    ];
    for (span, patch) in patches {
        let fork = run.fork("shell", json!([on(span, patch.clone())]));
        assert!(fork.plan.spans.is_empty() && fork.plan.is_empty() && !fork.plan.sandbox, "{span} {patch}: {:?}", fork.plan.spans);
        assert_eq!(fork.plan.counts.reusable, 5, "{patch}");
        fork.tells(&[]).has("conf", "0").has("log", "1").gives("ask", "m at 0.5, user: tell t");
    }
}

#[test]
fn and_another_value_reaches_somebody() {
    let run = one_of_each();
    for (span, patch) in [
        ("shell", env("V", "1")),
        ("shell", unset("V")),
        ("shell", file("conf", "1")),
        ("tool", output("u")),
        ("ask", prompt("tell {{ search }}")),
        ("ask", config("temperature", json!(0.6))),
        ("search", documents(json!([{"text": "e"}]))),
        ("search", documents(json!([]))),
    ] {
        let fork = run.fork("shell", json!([on(span, patch.clone())]));
        assert!(!fork.plan.spans.is_empty(), "{span} {patch}");
    }
}

#[test]
fn a_command_in_other_words_that_renders_to_the_same_is_the_same() {
    let run = run(&[]).step("tool", says(SpanKind::ToolCall, "t")).step("use", sh("echo {{ tool }}").sees(&[], &[])).recorded();
    run.fork("use", json!([script_that_sees("echo t", &[], &[])])).tells(&[]);
    // What it may touch is one of its inputs.
    run.fork("use", json!([crate::build::script("echo t")])).tells(&["use: will run (PatchedInput) -> ran"]);
}

#[test]
fn a_file_that_no_step_sees_is_in_the_workspace_all_the_same_and_that_takes_a_pod() {
    let run = run(&[("conf", "0")]).step("one", sh("cat conf").sees(&["conf"], &[])).step("two", sh("echo 2").sees(&[], &[])).recorded();
    let fork = run.fork("two", json!([file("conf", "1")]));
    assert!(fork.plan.is_empty() && fork.plan.sandbox);
    fork.tells(&[]).has("conf", "1");
    assert_eq!(
        fork.warnings(),
        "nothing is affected: no step from there on sees \"conf\" change; but for its workspace the fork equals its source"
    );
}

#[test]
fn steps_that_are_passed_over_take_a_pod_where_they_may_have_written_files() {
    let run = run(&[("a", "0")]).step("ask", asks("hi")).step("make", sh("echo {{ ask }} > a").sees(&[], &["a"])).recorded();
    // Nothing runs: what forks of the fork begin with must be recorded all the same.
    let fork = run.fork("ask", json!([prompt("hello")]));
    assert!(fork.plan.counts.may_be_run() == 0 && fork.plan.sandbox, "{:?}", fork.plan);
    let reads = run_of_readers().fork("ask", json!([prompt("hello")]));
    assert!(reads.plan.counts.will_block == 2 && !reads.plan.sandbox, "{:?}", reads.plan);
}

fn run_of_readers() -> Recorded {
    run(&[("a", "0")]).step("ask", asks("hi")).step("look", sh("echo {{ ask }}; cat a").sees(&["a"], &[])).recorded()
}

#[test]
fn an_output_with_what_no_text_may_hold_is_compared_as_a_sandbox_gives_it() {
    use replayfork_core::model::Output;
    let with = |text: &str| Output { text: text.into(), stdout: text.into(), stderr: text.into(), ..Output::default() };
    assert_eq!(with("x\0y").normalised(None), with("x\u{fffd}y"));
}
