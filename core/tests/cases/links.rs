//! What symlinks lead to is seen by whoever declares the link.

use serde_json::{Value, json};

use crate::build::{env, file, on, output, reads, run, says, script_that_sees, sh, writes};
use replayfork_core::model::{ReplayPolicy, SpanKind};

#[test]
fn a_link_that_leads_elsewhere_is_another_file() {
    let run = run(&[("v1", "one"), ("v2", "two")])
        .step("choose", sh("ln -s v1 current").sees(&[], &["current"]))
        .step("use", sh("cat current").sees(&["current"], &[]))
        .recorded();
    run.fork("choose", json!([script_that_sees("ln -s v2 current", &[], &["current"])]))
        .tells(&["choose: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> ran"])
        .gives("use", "two")
        .has("current", "-> v2");
    // The same link again.
    run.fork("choose", json!([script_that_sees("rm current; ln -s v1 current", &[], &["current"])]))
        .tells(&["choose: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> reused"]);
}

#[test]
fn a_patch_of_the_file_that_a_link_leads_to_reaches_who_declares_the_link() {
    let run = run(&[("v2", "two")])
        .step("write", writes("v1", "one"))
        .step("choose", sh("ln -s v1 current").sees(&[], &["current"]))
        .step("use", sh("cat current").sees(&["current"], &[]))
        .step("read", reads("current"))
        .recorded();
    run.fork("write", json!([on("choose", file("v1", "other"))]))
        .tells(&["use: will run (WorkspaceChanged) -> ran", "read: will run (WorkspaceChanged) -> ran"])
        .gives("use", "other")
        .gives("read", "other")
        .has("current", "-> v1");
    run.fork("write", json!([on("choose", file("v1", "one"))])).tells(&[]);
    run.fork("write", json!([on("choose", file("v2", "other"))])).tells(&[]);
}

#[test]
fn so_does_a_step_that_changes_it() {
    let run = run(&[("current", "-> v1")])
        .step("make", sh("echo one > v1; echo $V").env("V", "0").sees(&[], &["v1"]))
        .step("use", sh("cat current").sees(&["current"], &[]))
        .recorded();
    run.fork("make", json!([script_that_sees("echo two > v1", &[], &["v1"])]))
        .tells(&["make: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> ran"])
        .gives("use", "two");
    run.fork("make", json!([env("V", "1")]))
        .tells(&["make: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> reused"])
        .gives("use", "one");
}

#[test]
fn a_file_that_a_blocked_step_would_have_written_is_unknown_behind_a_link_too() {
    let run = run(&[("current", "-> v1"), ("v1", "zero")])
        .step("ask", says(SpanKind::ToolCall, "one"))
        .step("make", sh("echo {{ ask }} > v1").sees(&[], &["v1"]).policy(ReplayPolicy::RecordOnly))
        .step("use", sh("cat current").sees(&["current"], &[]))
        .recorded();
    run.fork("ask", json!([output("two")])).tells(&[
        "ask: overridden (PatchedInput) -> overridden",
        "make: will be blocked (UpstreamOutputChanged RecordOnly) -> blocked: RecordOnly",
        "use: will be blocked (WorkspaceChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
}

#[test]
fn a_link_in_a_declared_folder_may_lead_out_of_it() {
    let run = run(&[
        ("bin/own", "mine"),
        ("bin/alias", "-> own"),
        ("bin/tool", "-> ../lib/tool"),
        ("bin/data", "-> ../share/data"),
        ("lib/tool", "code"),
        ("lib/other", "code"),
        ("share/data/a", "1"),
    ])
    .step("begin", sh("echo x").sees(&[], &[]))
    .step("use", sh("cat bin/tool bin/alias; ls bin/data").sees(&["bin/"], &[]))
    .step("test", sh("is bin/tool").sees(&["bin"], &[]))
    .recorded();
    let reached = ["use: will run (WorkspaceChanged) -> ran"];
    run.fork("begin", json!([file("lib/tool", "new")])).tells(&reached).gives("use", "new\nmine\na");
    run.fork("begin", json!([file("share/data/b", "2")])).tells(&reached).gives("use", "code\nmine\na b");
    run.fork("begin", json!([file("bin/own", "other")])).gives("use", "code\nother\na");
    run.fork("begin", json!([file("lib/other", "new"), on("use", file("share/more", "2"))])).tells(&[]);
}

#[test]
fn a_link_to_a_link_leads_on() {
    let run = run(&[("current", "-> stable"), ("stable", "-> v1"), ("v1", "one"), ("v2", "two")])
        .step("choose", sh("echo $V").env("V", "0").sees(&[], &["stable"]))
        .step("use", sh("cat current").sees(&["current"], &[]))
        .recorded();
    run.fork("use", json!([file("v1", "other")])).tells(&["use: will run (WorkspaceChanged) -> ran"]).gives("use", "other");
    run.fork("choose", json!([script_that_sees("ln -s v2 stable", &[], &["stable"])]))
        .tells(&["choose: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> ran"])
        .gives("use", "two");
    run.fork("use", json!([file("stable", "a file")])).gives("use", "a file");
    // A fork of the fork knows where it leads now.
    let fork = run.fork("choose", json!([script_that_sees("ln -s v2 stable", &[], &["stable"])])).as_run();
    fork.fork("use", json!([file("v2", "other")])).tells(&["use: will run (WorkspaceChanged) -> ran"]).gives("use", "other");
    fork.fork("use", json!([file("v1", "other")])).tells(&[]);
}

#[test]
fn a_folder_on_the_way_may_be_a_link() {
    let run = run(&[("now", "-> releases/2"), ("releases/1/conf", "a"), ("releases/2/conf", "b")])
        .step("switch", sh("echo x").sees(&[], &["now"]))
        .step("use", sh("cat now/conf").sees(&["now/conf"], &[]))
        .recorded();
    run.fork("use", json!([file("releases/2/conf", "c")])).tells(&["use: will run (WorkspaceChanged) -> ran"]).gives("use", "c");
    run.fork("use", json!([file("releases/1/conf", "c")])).tells(&[]);
    run.fork("switch", json!([script_that_sees("ln -s releases/1 now", &[], &["now"])]))
        .tells(&["switch: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> ran"])
        .gives("use", "a");
}

#[test]
fn a_link_to_nothing_is_reached_by_what_comes_there_and_one_out_of_the_workspace_by_nothing() {
    let run = run(&[("later", "-> v1"), ("etc", "-> /etc"), ("up", "-> ../../etc"), ("loop", "-> loop")])
        .step("begin", sh("echo x").sees(&[], &[]))
        .step("test", sh("test -f later && echo there || echo not there").sees(&["later"], &[]))
        .step("look", sh("is etc; is up; is loop").sees(&["etc", "up", "loop"], &[]))
        .recorded();
    run.fork("begin", json!([file("v1", "1")])).tells(&["test: will run (WorkspaceChanged) -> ran"]).gives("test", "there");
    run.fork("begin", json!([on("look", file("v1", "1"))])).tells(&[]);
}

#[test]
fn who_writes_through_a_link_declares_the_file_that_it_leads_to() {
    let run = run(&[("current", "-> v1"), ("v1", "one")])
        .step("make", sh("echo made").sees(&[], &[]))
        .step("use", sh("cat v1").sees(&["v1"], &[]))
        .recorded();
    let through = |writes: &str| -> Value { json!([script_that_sees("echo two > current", &[], &[writes])]) };
    assert_eq!(run.fork("make", through("current")).ended(), "\"make\" changed \"v1\", which it does not declare");
    run.fork("make", through("v1")).gives("use", "two").has("current", "-> v1");
}

#[test]
fn a_step_without_snapshots_saw_what_the_last_one_with_some_left() {
    let run = run(&[("v1", "one")])
        .step("choose", sh("ln -s v1 current").sees(&[], &["current"]))
        .step("use", sh("cat current").sees(&["current"], &[]).without_snapshots())
        .recorded();
    run.fork("use", json!([file("v1", "other")])).tells(&["use: will run (WorkspaceChanged) -> ran"]).gives("use", "other");
}
