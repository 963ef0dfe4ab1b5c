//! Results that stand for an execution: the recorded one, and those of other forks.

use serde_json::{Value, json};

use crate::build::{Recorded, env, file, on, output, run, says, script_that_sees, sh};
use crate::common::product::Cache;
use replayfork_core::model::{ReplayPolicy, SpanKind};

#[test]
fn without_early_cutoff_what_may_run_runs() {
    let run = run(&[])
        .step("make", sh("echo same > a; echo $V").env("V", "0").sees(&[], &["a"]))
        .step("use", sh("cat a").sees(&["a"], &[]))
        .step("other", sh("echo x").sees_nothing())
        .recorded();
    run.fork_with("make", json!([env("V", "1")]), json!({"reuse": {"earlyCutoff": false}}))
        .tells(&["make: will run (PatchedInput) -> ran", "use: will run (WorkspaceChanged PolicyForcedRerun) -> ran"]);
}

#[test]
fn without_early_cutoff_what_the_planner_finds_as_recorded_is_still_not_reached() {
    let run = run(&[]).step("ask", says(SpanKind::ToolCall, "a")).step("use", sh("echo {{ ask | trim }}").sees_nothing()).recorded();
    run.fork_with("ask", json!([output(" a")]), json!({"reuse": {"earlyCutoff": false}}))
        .tells(&["ask: overridden (PatchedInput) -> overridden"]);
}

fn with_policy(policy: ReplayPolicy) -> Recorded {
    run(&[("in", "0")])
        .step("make", sh("cat in; echo $V; echo $V > out").env("V", "0").policy(policy).sees(&["in"], &["out"]))
        .step("use", sh("cat out").sees(&["out"], &[]))
        .recorded()
}

const RAN: [&str; 2] = ["make: will run (PatchedInput) -> ran", "use: may run (WorkspaceChanged) -> ran"];
const CACHED: [&str; 2] = ["make: will run (PatchedInput) -> cached", "use: may run (WorkspaceChanged) -> ran"];

#[test]
fn another_forks_result_stands_for_a_cacheable_step_with_its_files() {
    let (run, mut cache) = (with_policy(ReplayPolicy::Cacheable), Cache::new());
    let mut fork = |patches: Value, more: Value| run.fork_cached("make", patches, more, &mut cache);
    fork(json!([env("V", "1")]), json!({})).tells(&RAN);
    fork(json!([env("V", "1")]), json!({})).tells(&CACHED).gives("make", "0\n1").has("out", "1").gives("use", "1");
    // Not for other inputs, nor in another sandbox, nor where the fork does not want it.
    fork(json!([env("V", "2")]), json!({})).tells(&RAN);
    fork(json!([env("V", "1")]), json!({"reuse": {"resultCache": false}})).tells(&RAN);
    fork(json!([env("V", "1")]), json!({"sandbox": {"runAsUser": 1000}})).tells(&RAN);
    fork(json!([env("V", "1"), file("in", "1")]), json!({})).gives("make", "1\n1");
}

#[test]
fn no_other_forks_result_stands_for_a_step_that_is_not_cacheable() {
    let (run, mut cache) = (with_policy(ReplayPolicy::Rerunnable), Cache::new());
    for _ in 0..2 {
        run.fork_cached("make", json!([env("V", "1")]), json!({}), &mut cache).tells(&RAN);
    }
}

#[test]
fn a_result_is_left_only_by_a_step_that_ended_by_itself() {
    let run = run(&[])
        .step("make", sh("echo $V").env("V", "0").policy(ReplayPolicy::Cacheable).sees(&[], &[]))
        .step("use", sh("echo {{ make }}").sees_nothing())
        .recorded();
    let mut cache = Cache::new();
    run.fork_cached("make", json!([output("given")]), json!({}), &mut cache);
    run.fork_cached("make", json!([script_that_sees("hang", &[], &[])]), json!({}), &mut cache);
    run.fork_cached("make", json!([]), json!({}), &mut cache);
    assert!(cache.is_empty());
}

#[test]
fn a_step_whose_inputs_are_not_known_takes_no_other_forks_result() {
    let run = run(&[]).step("make", sh("echo $V").env("V", "0").policy(ReplayPolicy::Cacheable).inputs_unknown().sees_nothing()).recorded();
    let mut cache = Cache::new();
    for _ in 0..2 {
        run.fork_cached("make", json!([env("V", "1")]), json!({}), &mut cache).tells(&["make: will run (PatchedInput) -> ran"]);
    }
}

#[test]
fn a_cached_result_spares_what_could_not_run() {
    let run = run(&[]).step("get", sh("echo $V").env("V", "0").policy(ReplayPolicy::Cacheable).network().sees_nothing()).recorded();
    let (mut cache, open) = (Cache::new(), json!({"sandbox": {"egress": [{"cidr": "192.0.2.0/24"}]}}));
    let patches = json!([env("V", "1")]);
    let told = |became: &str| format!("get: may run or be blocked (PatchedInput NetworkNeeded) -> {became}");
    run.fork_cached("get", patches.clone(), json!({}), &mut cache).tells(&[&told("blocked: NetworkNeeded")]);
    run.fork_cached("get", patches.clone(), open, &mut cache).tells(&["get: will run (PatchedInput) -> ran"]);
    run.fork_cached("get", patches, json!({}), &mut cache).tells(&[&told("cached")]).gives("get", "1");
}

#[test]
fn a_pure_step_sees_no_files() {
    let run = run(&[("in", "0")])
        .step("begin", sh("echo x").sees(&[], &[]))
        .step("pure", sh("echo p").policy(ReplayPolicy::Pure))
        .step("any", sh("echo q"))
        .recorded();
    run.fork("begin", json!([file("in", "1")])).tells(&["any: will run (WorkspaceChanged) -> ran"]);
}

#[test]
fn another_image_runs_every_command_and_nothing_else() {
    let run = run(&[])
        .step("ask", says(SpanKind::ToolCall, "1"))
        .step("make", sh("echo $V").env("V", "0").sees_nothing())
        .step("end", says(SpanKind::PlannerStep, "done").after("ask"))
        .recorded();
    let same = json!({"sandbox": {"image": "agent:1"}});
    run.fork_with("ask", json!([output("2")]), same).tells(&[
        "ask: overridden (PatchedInput) -> overridden",
        "end: will be blocked (UpstreamOutputChanged NoExecutor) -> blocked: NoExecutor",
    ]);
    let other = json!({"sandbox": {"image": "agent:2"}});
    run.fork_with("make", json!([on("make", env("V", "0"))]), other).tells(&["make: will run (PatchedInput) -> ran"]);
}

#[test]
fn a_step_without_a_recorded_result_runs_though_nothing_reaches_it() {
    let run = run(&[])
        .step("begin", sh("echo x").sees(&[], &[]))
        .step("hung", sh("hang").sees_nothing())
        .step("lacks", sh("echo 1 > b").sees(&[], &["b"]).without_snapshots())
        .step("end", sh("echo $V").env("V", "0").sees_nothing())
        .recorded();
    run.fork("hung", json!([on("end", env("V", "1"))])).tells(&[
        "hung: will run (MissingReusableResult) -> ran",
        "lacks: will run (MissingReusableResult) -> ran",
        "end: will run (PatchedInput) -> ran",
    ]);
}
