//! What a step's readers see when it fails, or ends without an output.

use serde_json::json;

use crate::build::{asks, env, on, output, run, says, script_that_sees, sh};
use replayfork_core::model::SpanKind;

#[test]
fn a_command_that_fails_has_an_output_and_its_readers_run() {
    let run = run(&[])
        .step("test", sh("echo fine").sees_nothing())
        .step("report", sh("echo {{ test }} {{ test.exit_code }} {{ test.status }}").sees_nothing())
        .recorded();
    run.fork("test", json!([script_that_sees("echo broken; exit 3", &[], &[])]))
        .tells(&["test: will run (PatchedInput) -> ran", "report: may run (UpstreamOutputChanged) -> ran"])
        .gives("report", "broken 3 Failed");
}

#[test]
fn one_that_ends_without_an_output_blocks_who_needs_it_and_nobody_else() {
    let run = run(&[])
        .step("test", sh("echo fine; echo 1 > log").sees(&[], &["log"]))
        .step("report", sh("echo {{ test }}").sees_nothing())
        .step("after", sh("echo next").after("test").sees_nothing())
        .step("read", sh("cat log").sees(&["log"], &[]))
        .recorded();
    let fork = run.fork("test", json!([script_that_sees("echo 2 > log; hang", &[], &["log"])]));
    // Any command may hang, so the plan does not say it of each: the one reason that it does not foresee.
    fork.tells(&[
        "test: will run (PatchedInput) -> ran",
        "report: may run (UpstreamOutputChanged) -> blocked: UpstreamEnded",
        "after: may run (UpstreamOutputChanged) -> ran",
        "read: may run (WorkspaceChanged) -> ran",
    ]);
    fork.gives("read", "2");
}

#[test]
fn an_output_that_is_overridden_with_the_recorded_one_reaches_nobody() {
    let run = run(&[]).step("ask", says(SpanKind::ToolCall, "yes")).step("use", sh("echo {{ ask }}").sees_nothing()).recorded();
    run.fork("ask", json!([output("yes")])).tells(&[]);
    run.fork("ask", json!([{"type": "ToolOutputOverride", "output": {"text": "yes", "exitCode": 1}}]))
        .tells(&["ask: overridden (PatchedInput) -> overridden"])
        .gives("use", "yes");
}

#[test]
fn what_counts_of_a_bound_output_is_what_it_renders_to() {
    let run = run(&[])
        .step("pick", says(SpanKind::ToolCall, "a b"))
        .step("words", sh("echo {{ pick | words }}").sees_nothing())
        .step("all", sh("echo {{ pick }}").sees_nothing())
        .step("edge", sh("echo x").after("pick").sees_nothing())
        .recorded();
    run.fork("pick", json!([output("a  b")])).tells(&[
        "pick: overridden (PatchedInput) -> overridden",
        "all: will run (UpstreamOutputChanged) -> ran",
        "edge: will run (UpstreamOutputChanged) -> ran",
    ]);
}

#[test]
fn a_name_means_the_nearest_earlier_span_that_had_ended() {
    let run = run(&[])
        .step("first", sh("echo $V").env("V", "old").sees_nothing().called("pick"))
        .step("second", sh("echo $V").env("V", "slow").sees_nothing().called("pick").through(1))
        .step("use", sh("echo {{ pick }}").sees_nothing())
        .recorded();
    run.fork("first", json!([on("second", env("V", "new"))])).tells(&["second: will run (PatchedInput) -> ran"]);
    run.fork("first", json!([env("V", "new")]))
        .tells(&["first: will run (PatchedInput) -> ran", "use: may run (UpstreamOutputChanged) -> ran"])
        .gives("use", "new");
}

#[test]
fn an_exit_code_is_a_part_of_an_output() {
    let run = run(&[]).step("make", sh("echo same").sees_nothing()).step("after", sh("echo x").after("make").sees_nothing()).recorded();
    run.fork("make", json!([script_that_sees("echo same; exit 1", &[], &[])]))
        .tells(&["make: will run (PatchedInput) -> ran", "after: may run (UpstreamOutputChanged) -> ran"]);
}

#[test]
fn a_template_that_no_longer_renders_blocks_its_step() {
    let run = run(&[])
        .step("pick", says(SpanKind::ToolCall, r#"{"n": [1]}"#))
        .step("use", sh("echo {{ pick.json.n[0] }}").sees_nothing())
        .step("then", sh("echo {{ use }}").sees_nothing())
        .recorded();
    run.fork("pick", json!([output(r#"{"n": [2]}"#)])).gives("then", "2");
    let fork = run.fork("pick", json!([output("no json")]));
    fork.tells(&[
        "pick: overridden (PatchedInput) -> overridden",
        "use: will be blocked (UpstreamOutputChanged BindingFailed) -> blocked: BindingFailed",
        "then: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
    assert!(fork.says_of("use").contains("a binding of \"use\" can't be rendered"), "{}", fork.says_of("use"));
}

#[test]
fn a_template_that_may_turn_out_not_to_fit_is_a_may() {
    let run = run(&[])
        .step("make", sh("echo $V").env("V", "1").sees_nothing())
        .step("use", sh("echo {{ make.exit_code + 1 }} {{ (make | lines)[0] }}").sees_nothing())
        .recorded();
    run.fork("make", json!([env("V", "2")]))
        .tells(&["make: will run (PatchedInput) -> ran", "use: may run or be blocked (UpstreamOutputChanged BindingFailed) -> ran"])
        .gives("use", "1 2");
}

#[test]
fn a_step_whose_inputs_are_not_known_is_reused_only_while_all_is_as_recorded() {
    let run = run(&[])
        .step("make", sh("echo $V").env("V", "1").sees_nothing())
        .step("agent", sh("echo work").inputs_unknown().sees_nothing())
        .step("ask", asks("hi").inputs_unknown())
        .recorded();
    let fork = run.fork_with("make", json!([env("V", "2")]), json!({"model": {"mode": "Command", "command": {"argv": ["answer"]}}}));
    fork.tells(&[
        "make: will run (PatchedInput) -> ran",
        "agent: may run (DependencyUnknown) -> ran",
        "ask: may be blocked (DependencyUnknown IncompleteContract) -> blocked: IncompleteContract",
    ]);
    assert!(fork.says_of("ask").starts_with("IncompleteContract(input_bindings)"), "{}", fork.says_of("ask"));
    run.fork("make", json!([script_that_sees("echo 1", &[], &[])])).tells(&[
        "make: will run (PatchedInput) -> ran",
        "agent: may run (DependencyUnknown) -> reused",
        "ask: may be blocked (DependencyUnknown ModelBlocked) -> reused",
    ]);
}

#[test]
fn a_name_is_the_text_of_a_span_in_whatever_is_asked_of_it() {
    let run = run(&[])
        .step("mode", says(SpanKind::ToolCall, "prod"))
        .step("deploy", sh("echo {{ 'all' if mode == 'prod' and mode | length < 5 else 'one' }}").sees_nothing())
        .recorded();
    run.fork("deploy", json!([env("V", "1")])).gives("deploy", "all");
    run.fork("mode", json!([output("staging")]))
        .tells(&["mode: overridden (PatchedInput) -> overridden", "deploy: will run (UpstreamOutputChanged) -> ran"])
        .gives("deploy", "one");
}
