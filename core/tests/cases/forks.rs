//! Forks of forks: what is inherited, and what a fork leaves to fork from.

use serde_json::json;

use crate::build::{Recorded, env, file, on, output, run, says, script_that_sees, sh};
use replayfork_core::model::{Fidelity, ReplayPolicy, SpanKind};

fn chain() -> Recorded {
    run(&[("conf", "0")])
        .step("begin", sh("echo $V").env("V", "0").sees_nothing())
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("use", sh("echo {{ begin }} {{ ask }}; cat conf").sees(&["conf"], &[]))
        .step("end", sh("echo {{ use | words }} $V").env("V", "0").sees_nothing())
        .recorded()
}

#[test]
fn a_fork_is_a_run_with_its_own_results() {
    let fork = chain().fork("ask", json!([output("no")])).as_run();
    let fidelities: Vec<_> = fork.spans.iter().map(|s| s.fidelity).collect();
    assert_eq!(fidelities, [Fidelity::Recorded, Fidelity::Overridden, Fidelity::Reexecuted, Fidelity::Reexecuted]);
    // Its last step can be forked by itself, and sees the fork's outputs.
    fork.fork("end", json!([env("V", "1")])).tells(&["end: will run (PatchedInput) -> ran"]).gives("end", "0 no 0 1");
}

#[test]
fn a_fork_before_the_old_one_inherits_its_output_and_file_patches() {
    let fork = chain().fork("ask", json!([output("no"), on("use", file("conf", "1"))])).as_run();
    fork.fork("begin", json!([env("V", "1")]))
        .tells(&[
            "begin: will run (PatchedInput) -> ran",
            "use: may run (UpstreamOutputChanged) -> ran",
            "end: may run (UpstreamOutputChanged) -> ran",
        ])
        .gives("use", "1 no\n1")
        .has("conf", "1");
}

#[test]
fn an_inherited_output_stands_though_the_step_could_run_now() {
    let run = run(&[])
        .step("begin", sh("echo $V").env("V", "0").sees_nothing())
        .step("tool", sh("echo {{ begin }}").sees_nothing())
        .step("use", sh("echo {{ tool }} {{ begin }}").sees_nothing())
        .recorded();
    let fork = run.fork("tool", json!([output("mine")])).as_run();
    fork.fork("begin", json!([env("V", "1")])).gives("tool", "mine").gives("use", "mine 1");
}

#[test]
fn a_fork_after_the_old_one_needs_none_of_its_patches() {
    let fork = chain().fork("begin", json!([env("V", "1"), on("ask", output("no"))])).as_run();
    fork.fork("end", json!([env("V", "2")])).tells(&["end: will run (PatchedInput) -> ran"]).gives("end", "1 no 0 2").has("conf", "0");
}

#[test]
fn a_walk_that_begins_before_its_fork_span_inherits_from_there_on() {
    let run = run(&[("conf", "0")])
        .step("a", sh("cat conf").sees(&["conf"], &[]).through(1))
        .step("b", sh("echo $V; echo $V > b").env("V", "0").sees(&[], &["b"]))
        .step("use", sh("echo {{ a }} {{ b }}").sees_nothing())
        .recorded();
    let fork = run.fork("a", json!([file("conf", "1"), output("0")])).as_run();
    // The output that it had is given to it, so that it counts as run at the same time as the next one still. Another image would run
    // it again.
    let other = json!({"sandbox": {"image": "agent:2"}});
    fork.fork_with("b", json!([env("V", "1")]), other).gives("a", "0").gives("use", "0 1").has("b", "1");
}

#[test]
fn a_new_patch_on_the_same_field_wins_and_others_stay() {
    let fork = chain().fork("ask", json!([output("no"), on("use", file("conf", "1")), on("use", file("more", "1"))])).as_run();
    let newer = fork.fork("ask", json!([output("maybe"), on("use", file("conf", "2"))]));
    newer.gives("use", "0 maybe\n2").has("conf", "2").has("more", "1");
    // And it is what a fork of that one inherits.
    newer.as_run().fork("begin", json!([env("V", "1")])).gives("use", "1 maybe\n2").has("more", "1");
}

#[test]
fn environment_and_command_patches_are_in_the_forks_record_already() {
    let fork = chain().fork("begin", json!([env("V", "1")])).as_run();
    fork.fork("ask", json!([output("no")])).gives("use", "1 no\n0");
    fork.fork("begin", json!([env("V", "1")])).tells(&[]);
    fork.fork("begin", json!([env("V", "0")]))
        .tells(&[
            "begin: will run (PatchedInput) -> ran",
            "use: may run (UpstreamOutputChanged) -> ran",
            "end: may run (UpstreamOutputChanged) -> ran",
        ])
        .gives("use", "0 yes\n0");
}

#[test]
fn a_command_takes_the_place_of_an_inherited_output() {
    let run = run(&[]).step("make", sh("echo 1").sees_nothing()).step("use", sh("echo {{ make }}").sees_nothing()).recorded();
    let fork = run.fork("make", json!([output("2")])).as_run();
    fork.fork("make", json!([script_that_sees("echo 3", &[], &[])])).gives("make", "3").gives("use", "3");
}

#[test]
fn what_a_fork_left_blocked_stays_so_until_something_frees_it() {
    let run = run(&[("a", "0")])
        .step("begin", sh("echo x").sees(&[], &[]))
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("make", sh("echo {{ ask }} > a").policy(ReplayPolicy::RecordOnly).sees(&[], &["a"]))
        .step("use", sh("cat a").sees(&["a"], &[]))
        .step("end", sh("echo $V").env("V", "0").sees_nothing())
        .recorded();
    let fork = run.fork("ask", json!([output("no")])).as_run();
    fork.fork("use", json!([on("end", env("V", "1"))]))
        .tells(&[
            "use: will be blocked (WorkspaceChanged MissingReusableResult UpstreamBlocked) -> blocked: UpstreamBlocked",
            "end: will run (PatchedInput) -> ran",
        ])
        .leaves_unknown(&["a"]);
    fork.fork("use", json!([file("a", "given")]))
        .tells(&["use: will run (WorkspaceChanged MissingReusableResult) -> ran"])
        .gives("use", "given")
        .leaves_unknown(&[]);
}

#[test]
fn a_file_that_something_else_wrote_is_known_again_where_the_next_fork_starts() {
    let run = run(&[])
        .step("begin", sh("echo x > b").sees(&[], &["b"]))
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("make", sh("echo {{ ask }} > a").policy(ReplayPolicy::RecordOnly).sees(&[], &["a"]))
        .meanwhile("echo 2 > a")
        .step("use", sh("cat a; echo $V").env("V", "0").sees(&["a"], &[]))
        .step("end", sh("cat a; echo $V").env("V", "0"))
        .recorded();
    let fork = run.fork("ask", json!([output("no")]));
    fork.tells(&[
        "ask: overridden (PatchedInput) -> overridden",
        "make: will be blocked (UpstreamOutputChanged RecordOnly) -> blocked: RecordOnly",
    ]);
    for next in ["use", "end"] {
        fork.as_run()
            .fork(next, json!([env("V", "1")]))
            .tells(&[&format!("{next}: will run (PatchedInput) -> ran")])
            .gives(next, "2\n1")
            .leaves_unknown(&[]);
    }
}

#[test]
fn what_came_right_before_a_blocked_step_is_there_when_a_fork_begins_at_it() {
    let run = run(&[])
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .meanwhile("echo 2 > gap")
        .step("make", sh("echo {{ ask }} > a").policy(ReplayPolicy::RecordOnly).sees(&[], &["a"]))
        .meanwhile("echo 3 > later")
        .step("use", sh("cat gap; cat later; cat a").sees(&["gap", "later", "a"], &[]))
        .recorded();
    let fork = run.fork("ask", json!([output("no")])).as_run();
    fork.fork("make", json!([output("given"), on("use", file("a", "1"))])).gives("use", "2\n3\n1").has("gap", "2").has("later", "3");
    fork.fork("use", json!([file("a", "1")])).gives("use", "2\n3\n1").has("gap", "2");
}

#[test]
fn a_check_runs_what_can_run_on_its_recorded_inputs_and_says_what_differs() {
    let recorded = run(&[("conf", "0")])
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("make", sh("echo {{ ask }} > conf; echo made").sees(&["conf"], &["conf"]))
        .step("once", sh("echo {{ ask }}! > conf").policy(ReplayPolicy::RecordOnly).sees(&[], &["conf"]))
        .step("use", sh("cat conf").sees(&["conf"], &[]))
        .recorded();
    recorded.fork("ask", json!([])).tells(&[
        "ask: will be blocked (PolicyForcedRerun NoExecutor) -> not executable: NoExecutor",
        "make: will run (PolicyForcedRerun) -> identical",
        "once: will be blocked (PolicyForcedRerun RecordOnly) -> not executable: RecordOnly",
        "use: will run (PolicyForcedRerun) -> identical",
    ]);
    // A record of something that was not so.
    let mut other = recorded.clone();
    for span in other.spans.iter_mut().filter(|s| s.id == "use") {
        let output = span.closing.as_mut().and_then(|c| c.output.as_mut()).unwrap();
        (output.text, output.stdout) = ("never".into(), "never".into());
    }
    other.fork("use", json!([])).tells(&["use: will run (PolicyForcedRerun) -> differs: output"]);
}

#[test]
fn files_that_a_fork_before_left_unknown_are_no_change_to_whom_anything_may_be_an_input() {
    let run = run(&[("a", "0")])
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("make", sh("echo {{ ask }} > a").policy(ReplayPolicy::RecordOnly).sees(&[], &["a"]))
        .step("guess", sh("echo $V").env("V", "0").sees_nothing().inputs_unknown())
        .step("end", sh("echo $V").env("V", "0").sees_nothing())
        .recorded();
    let fork = run.fork("ask", json!([output("no")])).as_run();
    // They were unknown when it ran, too.
    fork.fork("guess", json!([on("end", env("V", "1"))])).tells(&["end: will run (PatchedInput) -> ran"]).leaves_unknown(&["a"]);
    fork.fork("make", json!([output("given")]))
        .tells(&["make: overridden (PatchedInput) -> overridden", "guess: will run (DependencyUnknown) -> ran"]);
}

#[test]
fn a_change_after_a_step_that_was_passed_over_is_not_lost_to_a_fork_of_the_fork() {
    let run = run(&[("a", "0"), ("d/b", "0")])
        .step("one", sh("echo 1 > a").env("V", "0").sees(&[], &["a"]).through(1))
        .step("two", sh("echo 2 > a").sees(&[], &["a"]))
        .meanwhile("echo 1 > d/b")
        .step("look", sh("cat d/b").sees(&["d/"], &[]))
        .recorded();
    // Which of both wrote the file is not recorded, so what the other one did is not known.
    let fork = run.fork("two", json!([output("given")]));
    fork.leaves_unknown(&["a"]);
    fork.as_run().fork("one", json!([env("V", "0")])).gives("look", "1").has("d/b", "1");
}
