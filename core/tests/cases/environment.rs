//! Variables: of a step, of the containers that hold it, and of those that began before the fork.

use serde_json::json;

use crate::build::{Recorded, env, file, on, output, run, says, sh, unset};
use replayfork_core::model::SpanKind;

fn nested() -> Recorded {
    let show = || sh("echo $V $W").env("V", "v").env("W", "w").sees_nothing();
    run(&[])
        .hold("outer", says(SpanKind::Subgraph, ""))
        .step("early", show())
        .hold("inner", says(SpanKind::Subgraph, ""))
        .step("child", show())
        .end()
        .step("sibling", show())
        .end()
        .step("outside", show())
        .recorded()
}

const CHILD: &str = "child: will run (PatchedInput) -> ran";

#[test]
fn a_containers_variable_reaches_what_it_holds_and_nothing_else() {
    nested().fork("inner", json!([env("V", "new")])).tells(&[CHILD]).gives("child", "new w");
}

#[test]
fn of_two_containers_the_inner_one_has_the_last_word_and_the_step_itself_the_very_last() {
    let patches = json!([env("V", "outer"), on("inner", env("V", "inner"))]);
    nested()
        .fork("outer", patches)
        .tells(&["early: will run (PatchedInput) -> ran", CHILD, "sibling: will run (PatchedInput) -> ran"])
        .gives("early", "outer w")
        .gives("child", "inner w")
        .gives("sibling", "outer w");
    let patches = json!([on("child", env("V", "own")), env("V", "outer"), on("inner", env("V", "inner"))]);
    nested().fork("outer", patches).gives("child", "own w");
}

#[test]
fn a_variable_can_be_unset_and_only_where_it_says_so() {
    let patches = json!([on("inner", unset("V")), env("W", "x")]);
    nested().fork("outer", patches).gives("early", "v x").gives("child", " x").gives("sibling", "v x");
    // Unset outside and set again inside.
    nested()
        .fork("outer", json!([unset("V"), on("child", env("V", "v"))]))
        .tells(&["early: will run (PatchedInput) -> ran", "sibling: will run (PatchedInput) -> ran"]);
}

#[test]
fn a_container_that_began_before_the_fork_counts_from_the_fork_span_on() {
    nested()
        .fork("child", json!([on("outer", env("V", "late"))]))
        .tells(&[CHILD, "sibling: will run (PatchedInput) -> ran"])
        .gives("sibling", "late w");
}

#[test]
fn a_commands_own_environment_replaces_all_of_it() {
    let replaced = json!({"type": "CommandOverride", "span": "child", "command": {"env": [{"name": "W", "value": "only"}]}});
    nested().fork("inner", json!([env("V", "new"), replaced])).tells(&[CHILD]).gives("child", " only");
}

#[test]
fn what_a_container_gives_is_not_known_once_what_it_holds_differs() {
    let run = run(&[])
        .hold("box", says(SpanKind::Subgraph, "sum"))
        .step("tool", says(SpanKind::ToolCall, "1"))
        .step("quiet", sh("echo same; echo $V > log").env("V", "0").sees(&[], &["log"]))
        .end()
        .step("use", sh("echo {{ spans['box'] }}").sees_nothing())
        .recorded();
    let fork = run.fork("box", json!([on("tool", output("2"))]));
    fork.tells(&[
        "tool: overridden (PatchedInput) -> overridden",
        "use: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
    assert!(fork.says_of("use").contains("\"box\", which only holds other spans together"), "{}", fork.says_of("use"));
    // It ran, and gave what it gave when recorded.
    run.fork("box", json!([env("V", "1")]))
        .tells(&["quiet: will run (PatchedInput) -> ran", "use: may be blocked (UpstreamOutputChanged UpstreamBlocked) -> reused"]);
}

#[test]
fn what_a_container_needs_all_that_it_holds_needs() {
    let run = run(&[])
        .step("ask", says(SpanKind::ToolCall, "1"))
        .hold("box", says(SpanKind::Subgraph, "").after("ask"))
        .step("a", sh("echo a").sees_nothing())
        .end()
        .hold("bound", says(SpanKind::Subgraph, "").binds("task", "{{ ask | trim }}"))
        .step("b", sh("echo b").sees_nothing())
        .end()
        .recorded();
    run.fork("ask", json!([output("2")])).tells(&[
        "ask: overridden (PatchedInput) -> overridden",
        "a: will run (UpstreamOutputChanged) -> ran",
        "b: will run (UpstreamOutputChanged) -> ran",
    ]);
    run.fork("ask", json!([output("1 ")]))
        .tells(&["ask: overridden (PatchedInput) -> overridden", "a: will run (UpstreamOutputChanged) -> ran"]);
}

#[test]
fn a_unit_runs_instead_of_what_is_below_it() {
    let run = run(&[("a", "0")])
        .step("ask", says(SpanKind::ToolCall, "1"))
        .hold("agent", sh("echo all; echo {{ ask }} > a").sees(&[], &["a"]))
        .step("part", says(SpanKind::LlmCall, "thought"))
        .end()
        .step("whole", sh("echo {{ agent }}").sees_nothing())
        .step("use", sh("echo {{ part }}").sees_nothing())
        .recorded();
    let fork = run.fork("ask", json!([output("2")]));
    fork.tells(&[
        "ask: overridden (PatchedInput) -> overridden",
        "agent: will run (UpstreamOutputChanged) -> ran",
        "whole: may run (UpstreamOutputChanged) -> reused",
        "use: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ])
    .has("a", "2");
    assert!(fork.says_of("use").contains("\"part\", which runs as part of \"agent\""), "{}", fork.says_of("use"));
}

#[test]
fn a_unit_is_reached_by_what_is_below_it() {
    let run = run(&[("in", "0")])
        .step("ask", says(SpanKind::ToolCall, "1"))
        .step("begin", sh("echo x").sees(&[], &[]))
        .hold("agent", sh("echo all").sees(&[], &[]))
        .step("part", sh("cat in").sees(&["in"], &[]))
        .step("other", says(SpanKind::PlannerStep, "plan").binds("prompt", "{{ ask }}"))
        .end()
        .recorded();
    run.fork("begin", json!([file("in", "1")])).tells(&["agent: will run (WorkspaceChanged) -> ran"]);
    run.fork("ask", json!([output("2")]))
        .tells(&["ask: overridden (PatchedInput) -> overridden", "agent: will run (UpstreamOutputChanged) -> ran"]);
}

#[test]
fn a_fork_at_a_span_below_a_unit_starts_at_the_unit() {
    let run = run(&[("in", "0")])
        .hold("agent", sh("cat in; echo $V").env("V", "0").sees(&["in"], &[]))
        .step("part", says(SpanKind::LlmCall, "thought"))
        .end()
        .step("next", sh("echo $V").env("V", "0").sees_nothing())
        .recorded();
    let fork = run.fork("part", json!([on("next", env("V", "1"))]));
    fork.tells(&["next: will run (PatchedInput) -> ran"]);
    assert!(fork.warnings().contains("the fork starts at \"agent\", before the fork span \"part\""), "{}", fork.warnings());
}
