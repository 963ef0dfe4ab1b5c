//! Steps that ran at the same time: told apart by what they declare, or one.

use serde_json::json;

use crate::build::{Recorded, Step, asks, env, file, on, output, reads, run, says, script_that_sees, sh, writes};
use replayfork_core::model::{ReplayPolicy, SpanKind, Verdict};

/// Two commands at once that may see each other's files.
fn two() -> Recorded {
    run(&[("in", "0")])
        .step("a", sh("echo $V > a").env("V", "0").through(1))
        .step("b", sh("cat in; echo 1 > b"))
        .step("use_a", sh("cat a").sees(&["a"], &[]))
        .step("use_b", sh("cat b").sees(&["b"], &[]))
        .recorded()
}

#[test]
fn two_that_cant_be_told_apart_run_together() {
    two()
        .fork("a", json!([env("V", "1")]))
        .tells(&[
            "a: will run (PatchedInput) -> ran",
            "b: will run (WorkspaceChanged) -> ran",
            "use_a: may run (WorkspaceChanged) -> ran",
            "use_b: may run (WorkspaceChanged) -> reused",
        ])
        .has("a", "1")
        .has("b", "1");
}

#[test]
fn a_fork_in_the_middle_of_them_starts_at_the_first() {
    let fork = two().fork("b", json!([file("in", "1")]));
    fork.tells(&[
        "a: will run (WorkspaceChanged) -> ran",
        "b: will run (WorkspaceChanged) -> ran",
        "use_a: may run (WorkspaceChanged) -> reused",
        "use_b: may run (WorkspaceChanged) -> reused",
    ])
    .gives("b", "1");
    assert!(fork.warnings().contains("the fork starts at \"a\", before the fork span \"b\""), "{}", fork.warnings());
}

#[test]
fn a_fork_that_reaches_none_of_them_keeps_all_changes_once_all_are_done() {
    let fork = two().fork("b", json!([on("use_b", file("c", "new")), on("use_b", file("b", "2"))]));
    fork.tells(&["use_b: will run (WorkspaceChanged) -> ran"]).has("a", "0").has("b", "2").has("c", "new");
}

#[test]
fn what_a_kept_group_changed_is_there_after_its_last_member() {
    let run = run(&[])
        .step("a", sh("echo 1 > x").through(1))
        .step("b", sh("echo 1 > b").sees(&[], &["b"]))
        .step("use", sh("cat x").sees(&["x"], &[]))
        .recorded();
    // Nobody can tell who of them wrote it, so it stands over what a patch wrote between them.
    run.fork("a", json!([on("b", file("x", "2"))])).tells(&[]).has("x", "1").has("b", "1").gives("use", "1");
}

#[test]
fn those_that_declare_other_files_are_as_good_as_one_after_the_other() {
    let run = run(&[])
        .step("a", sh("echo $V > a").env("V", "0").sees(&[], &["a"]).through(1))
        .step("b", sh("echo 1 > b").sees(&[], &["b"]))
        .step("use", sh("cat a; cat b").sees(&["a", "b"], &[]))
        .recorded();
    run.fork("a", json!([env("V", "1")]))
        .tells(&["a: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> ran"])
        .gives("use", "1\n1");
    // In the middle as well; no snapshot shows what was there then, so the plan can't be sure.
    run.fork("b", json!([on("b", file("b", "x"))]))
        .tells(&["b: may run (WorkspaceChanged) -> ran", "use: may run (WorkspaceChanged) -> reused"])
        .has("a", "0")
        .has("b", "1");
}

#[test]
fn a_kept_member_that_is_told_apart_changes_only_what_it_declares() {
    let run = run(&[])
        .step("a", sh("echo 1 > a").sees(&[], &["a"]).through(1))
        .step("b", sh("echo $V > b").env("V", "0").sees(&[], &["b"]))
        .step("use", sh("is b").sees(&["b"], &[]))
        .recorded();
    run.fork("b", json!([script_that_sees("echo nothing", &[], &["b"])]))
        .tells(&["b: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> ran"])
        .has("a", "1")
        .has("b", "nothing");
}

#[test]
fn one_that_reads_what_the_other_writes_is_not_told_apart() {
    let run = run(&[("a", "old")])
        .step("a", sh("echo $V > a").env("V", "0").sees(&[], &["a"]).through(1))
        .step("b", sh("cat a; echo 1 > b").sees(&["a"], &["b"]))
        .recorded();
    run.fork("a", json!([env("V", "1")]))
        .tells(&["a: will run (PatchedInput) -> ran", "b: will run (WorkspaceChanged) -> ran"])
        .gives("b", "1");
}

#[test]
fn a_chain_is_one_group_though_its_ends_never_met() {
    let run = run(&[])
        .step("a", sh("echo $V > a").env("V", "0").through(1))
        .step("b", sh("echo 1 > b").through(1))
        .step("c", sh("echo 1 > c"))
        .step("alone", sh("echo d").sees_nothing())
        .recorded();
    run.fork("a", json!([env("V", "1")])).tells(&[
        "a: will run (PatchedInput) -> ran",
        "b: will run (WorkspaceChanged) -> ran",
        "c: will run (WorkspaceChanged) -> ran",
    ]);
    run.fork("c", json!([env("V", "1")])).tells(&[
        "a: will run (WorkspaceChanged) -> ran",
        "b: will run (WorkspaceChanged) -> ran",
        "c: will run (PatchedInput WorkspaceChanged) -> ran",
    ]);
}

#[test]
fn one_that_cant_run_while_the_others_do_is_blocked_and_told_why() {
    let with = |b: Step| {
        run(&[])
            .step("a", sh("echo $V > a").env("V", "0").through(1))
            .step("b", b.policy(ReplayPolicy::RecordOnly))
            .step("use", sh("cat b").sees(&["b"], &[]))
            .recorded()
    };
    let run = with(sh("echo 1 > b").sees(&[], &["b"]));
    let fork = run.fork("a", json!([env("V", "1")]));
    fork.tells(&[
        "a: will run (PatchedInput) -> ran",
        "b: will be blocked (WorkspaceChanged RecordOnly IncompleteContract) -> blocked: IncompleteContract",
        "use: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
    assert!(fork.says_of("b").contains("IncompleteContract(writes): its file changes can't be told from those of \"a\""));
    // Where its own inputs differ too, its own reason counts.
    with(sh("echo 1 > b")).fork("a", json!([env("V", "1")])).tells(&[
        "a: will run (PatchedInput) -> ran",
        "b: will be blocked (WorkspaceChanged RecordOnly IncompleteContract) -> blocked: RecordOnly",
        "use: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
}

#[test]
fn a_skipped_step_between_them_that_a_patch_lets_run_makes_them_run_if_it_may_write_what_they_see() {
    let run = run(&[])
        .step("a", sh("echo 1 > x").through(2))
        .step("between", sh("echo 1").skipped())
        .step("b", sh("echo 1 > b").policy(ReplayPolicy::RecordOnly).sees(&[], &["b"]))
        .recorded();
    let between = |patch| run.fork("between", json!([patch]));
    between(script_that_sees("echo 1 > c", &[], &["c"])).tells(&["between: will run (PatchedInput) -> ran"]).has("b", "1");
    // Whether they run is settled before any of them does, and so before anyone knows what it writes.
    between(script_that_sees("echo 1 > c", &[], &["b", "c"])).tells(&[
        "a: may run (WorkspaceChanged) -> ran",
        "between: will run (PatchedInput WorkspaceChanged) -> ran",
        "b: may be blocked (WorkspaceChanged RecordOnly IncompleteContract) -> blocked: IncompleteContract",
    ]);
}

#[test]
fn a_write_at_the_same_time_as_another_step_is_one_of_them() {
    let run = run(&[])
        .step("a", sh("echo $V > a").env("V", "0").sees(&[], &["a", "b"]).through(1))
        .step("write", writes("b", "1"))
        .step("use", sh("cat b").sees(&["b"], &[]))
        .recorded();
    run.fork("a", json!([env("V", "1")])).tells(&[
        "a: will run (PatchedInput) -> ran",
        "write: will run (WorkspaceChanged) -> ran",
        "use: may run (WorkspaceChanged) -> reused",
    ]);
}

#[test]
fn one_whose_output_is_given_makes_the_others_run_if_it_is_another_output() {
    let run = run(&[])
        .step("a", sh("echo 1 > a; echo x").through(1))
        .step("b", sh("echo 1 > b"))
        .step("use", sh("cat a").sees(&["a"], &[]))
        .recorded();
    run.fork("a", json!([output("x")])).tells(&[]).has("a", "1").has("b", "1");
    // Which of the changes were its own is not recorded, so nobody knows its files.
    run.fork("a", json!([output("y")])).tells(&[
        "a: overridden (PatchedInput) -> overridden",
        "b: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
        "use: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
}

#[test]
fn the_recorded_output_given_to_one_that_the_others_run_with_is_no_other_output() {
    let run = run(&[("in", "0")])
        .step("a", sh("echo $V > a").env("V", "0").through(1))
        .step("look", reads("in"))
        .step("use", sh("echo {{ a }}").sees_nothing().after("look"))
        .recorded();
    // A read has no exit code, and the output that a patch gives has 0.
    run.fork("a", json!([env("V", "1"), on("look", output("0"))])).tells(&[
        "a: will run (PatchedInput) -> ran",
        "look: overridden (PatchedInput) -> overridden",
        "use: may run (UpstreamOutputChanged) -> reused",
    ]);
}

#[test]
fn steps_that_see_no_files_overlap_without_being_a_group() {
    let run = run(&[])
        .step("ask", says(SpanKind::ToolCall, "1").through(2))
        .step("a", sh("echo $V").env("V", "0").sees_nothing().through(1))
        .step("b", sh("echo 1 > b"))
        .recorded();
    run.fork("a", json!([env("V", "1")])).tells(&["a: will run (PatchedInput) -> ran"]).has("b", "1");
}

#[test]
fn a_file_patch_of_what_is_there_already_is_no_change_amid_them_either() {
    let run = run(&[("in", "0")])
        .step("first", sh("cat in").env("V", "0").sees(&["in"], &[]))
        .step("a", sh("echo 1 > a").sees(&[], &["a"]).through(2))
        .step("ask", asks("hi").inputs_unknown())
        .step("b", sh("echo 1 > b").sees(&[], &["b"]))
        .recorded();
    run.fork("first", json!([file("in", "0"), env("V", "1")]))
        .tells(&["first: will run (PatchedInput) -> ran", "ask: may be blocked (DependencyUnknown ModelBlocked) -> reused"]);
}

#[test]
fn an_output_that_is_given_amid_them_changes_no_more_files_than_were_recorded() {
    let run = run(&[("in", "0")])
        .step("a", sh("echo 1 > x").sees(&[], &["x"]).through(2))
        .step("denied", sh("echo 2 > x").verdict(Verdict::Deny))
        .step("look", reads("x"))
        .recorded();
    run.fork("a", json!([on("denied", output("given"))])).tells(&["denied: overridden (PatchedInput) -> overridden"]).has("x", "1");
}

#[test]
fn another_output_amid_them_of_which_nobody_reads_what_differs_reaches_none_of_them() {
    let run = run(&[])
        .step("a", sh("echo 1 > a").through(2))
        .step("pure", sh("echo 1").policy(ReplayPolicy::Pure))
        .step("once", sh("echo {{ spans[\"pure\"].exit_code }}").policy(ReplayPolicy::RecordOnly))
        .recorded();
    run.fork("a", json!([on("pure", output("2"))])).tells(&["pure: overridden (PatchedInput) -> overridden"]).has("a", "1");
}
