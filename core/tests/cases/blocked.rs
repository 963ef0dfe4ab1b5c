//! Steps that can't run: what they would have written, and who waits for it.

use serde_json::json;

use crate::build::{Recorded, Step, asks, env, file, on, output, run, says, sh, snapshot, writes};
use replayfork_core::model::{ReplayPolicy, SpanKind};

/// A run in which a person's answer decides what a command does that never runs again.
fn with_writer(writer: Step) -> Recorded {
    run(&[("a", "0"), ("b", "0")])
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("make", writer.policy(ReplayPolicy::RecordOnly))
        .step("use_a", sh("cat a").sees(&["a"], &[]))
        .step("use_b", sh("cat b").sees(&["b"], &[]))
        .step("talk", sh("echo hi").sees_nothing())
        .recorded()
}

const MAKE: &str = "make: will be blocked (UpstreamOutputChanged RecordOnly) -> blocked: RecordOnly";
const ASK: &str = "ask: overridden (PatchedInput) -> overridden";

#[test]
fn a_blocked_writer_leaves_what_it_declares_unknown_and_its_readers_blocked() {
    let run = with_writer(sh("echo {{ ask }} > a").sees(&[], &["a"]));
    let fork = run.fork("ask", json!([output("no")]));
    fork.tells(&[ASK, MAKE, "use_a: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked"])
        .leaves_unknown(&["a"])
        .has("a", "0")
        .gives("use_b", "0");
    assert!(fork.says_of("use_a").contains("write them with a FileContentOverride"));
}

#[test]
fn one_that_declares_nothing_leaves_everything_unknown() {
    let run = with_writer(sh("echo {{ ask }} > a"));
    run.fork("ask", json!([output("no")]))
        .tells(&[
            ASK,
            MAKE,
            "use_a: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
            "use_b: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
        ])
        .leaves_unknown(&["a", "b"])
        .gives("talk", "hi");
}

#[test]
fn one_that_changed_nothing_when_recorded_may_do_so_now() {
    let run = with_writer(sh("echo {{ ask }}").sees(&[], &["a"]));
    run.fork("ask", json!([output("no")]))
        .tells(&[ASK, MAKE, "use_a: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked"])
        .leaves_unknown(&["a"]);
    let run = with_writer(sh("echo {{ ask }}").sees(&["a"], &[]));
    run.fork("ask", json!([output("no")])).tells(&[ASK, MAKE]).leaves_unknown(&[]);
}

#[test]
fn a_file_that_a_patch_gives_frees_its_readers() {
    let run = with_writer(sh("echo {{ ask }} > a"));
    run.fork("ask", json!([output("no"), on("use_a", file("a", "given"))]))
        .tells(&[
            ASK,
            MAKE,
            "use_a: will run (WorkspaceChanged) -> ran",
            "use_b: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
        ])
        .gives("use_a", "given")
        .leaves_unknown(&["b"]);
}

#[test]
fn so_does_a_workspace_that_a_patch_gives() {
    let run = with_writer(sh("echo {{ ask }} > a"));
    let recorded = run.workspace_after("make");
    run.fork("ask", json!([output("no"), on("use_a", snapshot(&recorded))])).tells(&[ASK, MAKE]).has("a", "yes").leaves_unknown(&[]);
}

#[test]
fn an_overridden_output_frees_who_waits_for_it_and_keeps_its_recorded_files() {
    let run = run(&[("a", "0")])
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("make", sh("echo {{ ask }} > a; echo made").policy(ReplayPolicy::RecordOnly).sees(&[], &["a"]))
        .step("use", sh("cat a").sees(&["a"], &[]))
        .step("tell", sh("echo {{ make }}").sees_nothing())
        .recorded();
    run.fork("ask", json!([output("no")])).tells(&[
        ASK,
        MAKE,
        "use: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
        "tell: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
    run.fork("ask", json!([output("no"), on("make", output("done"))]))
        .tells(&[ASK, "make: overridden (PatchedInput) -> overridden", "tell: will run (UpstreamOutputChanged) -> ran"])
        .gives("tell", "done")
        .has("a", "yes");
    // A file that a patch gives on the same step stands.
    run.fork("ask", json!([output("no"), on("make", output("done")), on("make", file("a", "mine"))])).has("a", "mine").gives("use", "mine");
}

#[test]
fn a_write_and_a_kept_change_make_a_path_known_again() {
    let run = run(&[])
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("make", sh("echo {{ ask }} > a; echo 1 > b").policy(ReplayPolicy::RecordOnly).sees(&[], &["a", "b"]))
        .step("write", writes("a", "fixed"))
        .step("use_a", sh("cat a").sees(&["a"], &[]))
        .step("use_b", sh("cat b").sees(&["b"], &[]))
        .meanwhile("echo 2 > b")
        .step("again", sh("cat b").sees(&["b"], &[]))
        .recorded();
    run.fork("ask", json!([output("no")]))
        .tells(&[ASK, MAKE, "use_b: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked"])
        .has("a", "fixed")
        .has("b", "2")
        .leaves_unknown(&[]);
    // Known is known, for who runs too.
    run.fork("ask", json!([output("no"), on("use_a", env("V", "1")), on("again", env("V", "1"))]))
        .gives("use_a", "fixed")
        .gives("again", "2");
}

#[test]
fn so_does_a_write_that_runs() {
    let run = run(&[])
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("make", sh("echo {{ ask }} > a").policy(ReplayPolicy::RecordOnly).sees(&[], &["a"]))
        .step("text", says(SpanKind::ToolCall, "old"))
        .step("write", writes("a", "{{ text }}"))
        .step("use", sh("cat a").sees(&["a"], &[]))
        .recorded();
    run.fork("ask", json!([output("no"), on("text", output("new"))]))
        .tells(&[
            ASK,
            MAKE,
            "text: overridden (PatchedInput) -> overridden",
            "write: will run (UpstreamOutputChanged) -> ran",
            "use: will run (WorkspaceChanged) -> ran",
        ])
        .gives("use", "new")
        .leaves_unknown(&[]);
}

#[test]
fn what_blocks_is_named_in_the_order_in_which_a_user_can_do_something() {
    let cases = [
        (says(SpanKind::ToolCall, "x").after("ask"), "NoExecutor"),
        (says(SpanKind::HumanInput, "x").after("ask"), "HumanInputNeeded"),
        (asks("{{ ask }}"), "ModelBlocked"),
        (says(SpanKind::LlmCall, "x").after("ask"), "ModelBlocked"),
        (sh("echo {{ ask }}").redacted("key").sees_nothing(), "RedactedInput"),
        (sh("echo {{ ask }}").network().sees_nothing(), "NetworkNeeded"),
        (sh("echo {{ ask }}").policy(ReplayPolicy::RecordOnly).sees_nothing(), "RecordOnly"),
    ];
    for (step, reason) in cases {
        let run = run(&[]).step("ask", says(SpanKind::ToolCall, "yes")).step("make", step).recorded();
        let told = format!("make: will be blocked (UpstreamOutputChanged {reason}) -> blocked: {reason}");
        run.fork("ask", json!([output("no")])).tells(&[ASK, &told]);
    }
}

#[test]
fn the_network_that_a_step_needs_can_be_opened() {
    let run = run(&[]).step("ask", says(SpanKind::ToolCall, "yes")).step("get", sh("echo {{ ask }}").network().sees_nothing()).recorded();
    run.fork_with("ask", json!([output("no")]), json!({"sandbox": {"egress": [{"cidr": "192.0.2.0/24"}]}})).gives("get", "no");
}

#[test]
fn a_step_that_only_may_be_blocked_runs_when_its_inputs_turn_out_as_recorded() {
    let run = run(&[])
        .step("make", sh("echo same > a; echo $V").env("V", "0").sees(&[], &["a"]))
        .step("human", says(SpanKind::HumanInput, "fine").binds("seen", "{{ make.exit_code }}"))
        .step("use", sh("echo {{ human }}").sees_nothing())
        .recorded();
    run.fork("make", json!([env("V", "1")])).tells(&[
        "make: will run (PatchedInput) -> ran",
        "human: may be blocked (UpstreamOutputChanged HumanInputNeeded) -> reused",
        "use: may be blocked (UpstreamOutputChanged UpstreamBlocked) -> reused",
    ]);
}

#[test]
fn without_a_recorded_workspace_what_sees_files_is_blocked() {
    let run = run(&[("a", "0")])
        .step("first", sh("cat a").env("V", "0").sees(&["a"], &[]).without_snapshots())
        .step("talk", sh("echo $V").env("V", "0").sees_nothing())
        .recorded();
    run.fork("first", json!([env("V", "1"), on("talk", env("V", "1"))])).tells(&[
        "first: will be blocked (PatchedInput WorkspaceChanged SnapshotMissing) -> blocked: SnapshotMissing",
        "talk: will run (PatchedInput) -> ran",
    ]);
}
