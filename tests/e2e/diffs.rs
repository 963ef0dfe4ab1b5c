//! Diffs of runs that are no forks of each other, and what a run's record says of its failures.

use anyhow::{Context, Result, ensure};
use replayfork_tests::place::{AGENT, Place};
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] =
    scenarios![e2e_unrelated_runs_are_aligned_step_by_step, e2e_a_run_says_what_it_failed_of_and_because_of_what];

fn step(n: i64, name: &str, script: &str, code: i64, text: &str) -> Value {
    let started = 1_700_000_000_000_000_000 + n * 2_000_000;
    json!({
        "id": format!("{n}-{name}"),
        "opening": {"name": name, "kind": "ShellCommand", "started": started, "executor": {"type": "shell", "script": script, "env": {"HOSTNAME": name}}},
        "closing": {"ended": started + 1_000_000, "status": if code == 0 { "Completed" } else { "Failed" }, "verdict": "allow",
            "output": {"text": text, "stdout": text, "exit_code": code}},
    })
}

fn e2e_unrelated_runs_are_aligned_step_by_step(place: &Place) -> Result<()> {
    place.recording_account("by-hand")?;
    let token = place.token("by-hand")?;
    let monday = [
        step(1, "plan", "plan", 0, "1. test\n"),
        step(2, "test", "run-tests --all", 1, r#"{"failed": 2, "cases": ["a", "b"], "seconds": 1.0}"#),
        step(3, "fix", "edit pool.py", 0, "done\n"),
        step(4, "send", "git push", 0, "pushed\n"),
    ];
    // The same agent on another day: another step before the test, another result of it.
    let tuesday = [
        step(1, "plan", "plan", 0, "1. test\n"),
        step(2, "look", "git log", 0, "a commit\n"),
        step(3, "test", "run-tests --all", 1, r#"{"seconds": 1, "failed": 1, "cases": ["b"]}"#),
        step(4, "fix", "edit pool.py", 0, "done\n"),
        step(5, "send", "git push", 0, "pushed\n"),
    ];
    place.record_spans(&token, "monday", &monday)?;
    place.record_spans(&token, "tuesday", &tuesday)?;
    let found: Value = place.replay(&["diff", "monday", "tuesday"])?;
    let diff = &found["diff"];
    ensure!(diff["matching"] == "alignment", "{diff}");
    ensure!(diff["counts"] == json!({"same": 3, "changed": 1, "only_a": 0, "only_b": 1}), "{}", diff["counts"]);
    ensure!(diff["first_divergent_span"] == "2-look", "{}", diff["first_divergent_span"]);
    let test = diff["spans"].as_array().into_iter().flatten().find(|s| s["name"] == "test").context("the test is not listed")?;
    let changes = json!([{"path": "/failed", "before": 2, "after": 1}, {"path": "/cases/0", "before": "a"}]);
    ensure!(test["a"]["span"] == "2-test" && test["b"]["span"] == "3-test" && test["json"]["changes"] == changes, "{test}");

    // The other way round the same pairs, and in a terminal's words.
    let back: Value = place.replay(&["diff", "tuesday", "monday"])?;
    ensure!(back["diff"]["counts"] == json!({"same": 3, "changed": 1, "only_a": 1, "only_b": 0}), "{}", back["diff"]["counts"]);
    let told = place.told(&["diff", "monday", "tuesday"])?;
    for line in [
        "monday → tuesday",
        "steps             3 the same, 1 changed, 1 only in tuesday, aligned",
        "first divergence  ⚑ look",
        "  /failed",
        "  - 2",
        "  + 1",
    ] {
        ensure!(told.lines().any(|l| l.starts_with(line)), "no line {line:?} in\n{told}");
    }
    let itself: Value = place.replay(&["diff", "monday", "monday"])?;
    ensure!(itself["diff"]["spans"] == json!([]) && itself["diff"]["counts"]["same"] == 4, "{}", itself["diff"]);
    Ok(())
}

fn e2e_a_run_says_what_it_failed_of_and_because_of_what(place: &Place) -> Result<()> {
    let run = place.record()?;
    let found: Value = place.replay(&["forensics", &run])?;
    ensure!(found["first_failed"]["name"] == "test_before" && found["root_cause"]["name"] == "test_validate", "{found}");
    ensure!(found["failed"] == 2 && found["blocked"] == 0 && found["path"].as_array().is_some_and(|p| p.len() == 1), "{found}");
    let shown = place.told(&["show", AGENT])?;
    ensure!(shown.contains("`test_validate` failed (exit code 1"), "{shown}");

    let fork = place.fork(&place.example("passing-test")?)?;
    fork.succeeds()?;
    let found: Value = place.replay(&["forensics", &fork.run()?])?;
    let groups = found["blocked_by"].as_array().context("nothing is blocked")?;
    let waiting: Vec<&str> =
        groups.iter().flat_map(|g| g["spans"].as_array().into_iter().flatten()).filter_map(|s| s["span"]["name"].as_str()).collect();
    ensure!(groups.len() == 1 && groups[0]["root"]["name"] == "gen_fix" && groups[0]["reasons"][0]["reason"] == "ModelBlocked", "{found}");
    ensure!(waiting == ["apply_fix", "test_validate", "lint", "summarize"], "{waiting:?}");
    let told = place.told(&["forensics", &fork.run()?])?;
    ensure!(told.contains("gen_fix") && told.contains("ModelBlocked") && told.contains("because of it (UpstreamBlocked)"), "{told}");
    Ok(())
}
