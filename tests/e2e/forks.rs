//! The example forks: what ran again, what was reused, what was blocked, and that the plan said so.

use anyhow::{Context, Result, ensure};
use replayfork_core::model::{Fidelity, Status};
use replayfork_core::reason::BlockedReason;
use replayfork_tests::fork::{Fork, manifest};
use replayfork_tests::place::{AGENT, Place};
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] = scenarios![
    e2e_env_fork_runs_one_command_and_blocks_its_reader,
    e2e_override_that_still_fails_reuses_the_fix,
    e2e_override_that_passes_blocks_the_model_and_all_that_needs_its_answer,
    e2e_override_that_nothing_can_follow_is_blocked_and_a_fork_of_it_writes_anew,
    e2e_override_that_only_readers_follow_is_blocked_without_a_pod,
    e2e_override_with_the_recorded_output_succeeds_without_a_pod,
    e2e_command_that_declares_its_reads_affects_nothing_else,
    e2e_outcome_stays_where_the_deciding_step_is_as_it_was,
];

/// Records the agent, applies a fork of its run, and gives it when it has ended as planned, with the source as it was.
fn carried_out<'a>(place: &'a Place<'a>, manifest: &str, check: impl Fn(&Fork) -> Result<()>) -> Result<()> {
    let run = place.record()?;
    let before = place.fingerprint(&run)?;
    let plan = place.plan(manifest)?;
    let fork = place.fork(manifest)?;
    check(&fork)?;
    fork.agrees_with(&plan)?;
    let after = place.fingerprint(&run)?;
    ensure!(before == after, "the source run was written to:\n{before}\n{after}");
    Ok(())
}

/// How a span of a fork's run stands to its source, as a reader sees it.
fn fidelity(fork: &Fork, span: &str) -> Result<Fidelity> {
    let shown: Value = fork.place.replay(&["show", &fork.run()?])?;
    let spans = shown["spans"].as_array().context("no spans")?;
    let span = spans.iter().find(|s| s["name"] == span).with_context(|| format!("no span {span}"))?;
    Ok(serde_json::from_value(span["fidelity"].clone())?)
}

fn blocked_by(fork: &Fork, span: &str) -> Result<Vec<BlockedReason>> {
    let row = fork.rows()?.into_iter().find(|row| row.name == span);
    Ok(row.with_context(|| format!("{span} has no row"))?.blocked)
}

/// What the status says came out, of the source and of the fork.
fn outcomes(fork: &Fork) -> Result<(String, String)> {
    let result = fork.object()?.status.and_then(|s| s.result).context("the status has no result")?;
    Ok((result.source_outcome.unwrap_or_default(), result.outcome.unwrap_or_default()))
}

fn e2e_env_fork_runs_one_command_and_blocks_its_reader(place: &Place) -> Result<()> {
    carried_out(place, &place.example("shorter-wait")?, |fork| {
        fork.succeeds()?;
        fork.left(&["test_validate Completed Reexecuted", "summarize Blocked Blocked"])?;
        ensure!(blocked_by(fork, "summarize")? == [BlockedReason::ModelBlocked]);
        ensure!(outcomes(fork)? == ("Failed".into(), "Completed".into()), "{:?}", outcomes(fork)?);
        let span = place.span(&fork.run()?, "test_validate")?.span;
        let environment = serde_json::to_value(&span.opening.executor)?["env"].clone();
        ensure!(environment["AUTH_POOL_TIMEOUT"] == "0.05", "it ran with {environment}");
        ensure!(span.output().and_then(|o| o.exit_code) == Some(0));
        let source = place.span(AGENT, "test_validate")?.span;
        ensure!(source.status() == Status::Failed && span.opening.started > source.opening.started);
        let diff: Value = place.replay(&["diff", &fork.name])?;
        ensure!(diff["diff"]["first_divergent_span"] == span.id, "the first divergence is {}", diff["diff"]["first_divergent_span"]);
        Ok(())
    })
}

fn e2e_override_that_still_fails_reuses_the_fix(place: &Place) -> Result<()> {
    carried_out(place, &place.example("one-test")?, |fork| {
        fork.succeeds()?;
        fork.left(&[
            "select_tests Completed Overridden",
            "test_before Failed Reexecuted",
            "test_validate Failed Reexecuted",
            "summarize Blocked Blocked",
        ])?;
        for span in ["gen_fix", "apply_fix", "lint"] {
            ensure!(matches!(fidelity(fork, span)?, Fidelity::Reused | Fidelity::Recorded), "{span} is {:?}", fidelity(fork, span)?);
        }
        for span in ["test_before", "test_validate"] {
            let executor = serde_json::to_value(&place.span(&fork.run()?, span)?.span.opening.executor)?;
            ensure!(executor["script"] == "python3 run_tests.py test_exhausted", "{span} was rendered as {executor}");
        }
        Ok(())
    })
}

fn e2e_override_that_passes_blocks_the_model_and_all_that_needs_its_answer(place: &Place) -> Result<()> {
    carried_out(place, &place.example("passing-test")?, |fork| {
        fork.succeeds()?;
        fork.left(&[
            "select_tests Completed Overridden",
            "test_before Completed Reexecuted",
            "gen_fix Blocked Blocked",
            "apply_fix Blocked Blocked",
            "test_validate Blocked Blocked",
            "lint Blocked Blocked",
            "summarize Blocked Blocked",
        ])?;
        ensure!(blocked_by(fork, "gen_fix")? == [BlockedReason::ModelBlocked]);
        for span in ["apply_fix", "test_validate", "lint", "summarize"] {
            let reasons = blocked_by(fork, span)?;
            ensure!(reasons.contains(&BlockedReason::UpstreamBlocked), "{span} is blocked by {reasons:?}");
        }
        Ok(())
    })
}

fn e2e_override_that_nothing_can_follow_is_blocked_and_a_fork_of_it_writes_anew(place: &Place) -> Result<()> {
    carried_out(place, &place.example("other-source")?, |fork| {
        fork.ends_as("Blocked")?;
        ensure!(fork.steps()?.is_empty(), "steps were begun: {}", fork.steps()?);
        // The fix that was not written is not there, and the one that a fork of this one writes stays.
        let command = json!({"type": "CommandOverride", "span": "lint", "command": {"script": "head -c 9 auth/pool.py", "reads": ["auth/"], "writes": []}});
        let answer = json!({"model": {"mode": "Command", "command": {"argv": ["printf", "\"%s\"", "# ANOTHER"]}}});
        let again = place.fork(&manifest("written-anew", &fork.run()?, "gen_fix", json!([command]), answer))?;
        again.succeeds()?;
        let lint = place.span(&again.run()?, "lint")?.span;
        ensure!(lint.output().is_some_and(|o| o.text == "# ANOTHER"), "lint saw {:?}", lint.output());
        Ok(())
    })
}

fn e2e_override_that_only_readers_follow_is_blocked_without_a_pod(place: &Place) -> Result<()> {
    let patch = json!([{"type": "PromptEdit", "prompt": {"system": "Be brief."}}]);
    carried_out(place, &manifest("briefly", AGENT, "summarize", patch, json!({})), |fork| {
        fork.ends_as("Blocked")?;
        fork.had_no_pod()?;
        ensure!(fork.steps()?.is_empty(), "steps were begun: {}", fork.steps()?);
        Ok(())
    })
}

fn e2e_override_with_the_recorded_output_succeeds_without_a_pod(place: &Place) -> Result<()> {
    let patch = json!([{"type": "ToolOutputOverride", "output": {"text": "test_release test_exhausted\n"}}]);
    let manifest = manifest("as-recorded", AGENT, "select_tests", patch, json!({}));
    carried_out(place, &manifest, |fork| {
        let plan = place.plan(&manifest)?;
        ensure!(plan.is_empty(), "the plan is not empty: {:?}", plan.spans);
        fork.succeeds()?;
        fork.had_no_pod()?;
        fork.left(&[])?;
        ensure!(outcomes(fork)? == ("Failed".into(), "Failed".into()), "{:?}", outcomes(fork)?);
        Ok(())
    })
}

fn e2e_command_that_declares_its_reads_affects_nothing_else(place: &Place) -> Result<()> {
    carried_out(place, &place.example("verbose-lint")?, |fork| {
        fork.succeeds()?;
        fork.left(&["lint Completed Reexecuted"])
    })
}

/// A judge completed, and judged that the run failed.
fn e2e_outcome_stays_where_the_deciding_step_is_as_it_was(place: &Place) -> Result<()> {
    place.recording_account("by-hand")?;
    let span = |id: &str, kind: &str, started: i64, text: &str| {
        json!({"id": id, "opening": {"name": id, "kind": kind, "started": started},
               "closing": {"status": "Completed", "verdict": "allow", "ended": started + 1, "output": {"text": text}}})
    };
    let spans = [span("work", "ToolCall", 1_000, "done"), span("judge", "GuardrailCheck", 2_000, "the answer is wrong")];
    // An end without a beginning is no step.
    let lone = json!({"id": "lone", "closing": {"status": "Completed", "verdict": "allow", "ended": 3_000}});
    let finish = json!({"outcome": "Failed", "decided_by": "judge"});
    place.record_ending(&place.token("by-hand")?, "judged", &[&spans[..], &[lone]].concat(), finish)?;
    for (name, text) in [("other", "undone"), ("same", "done")] {
        let output = json!([{"type": "ToolOutputOverride", "output": {"text": text}}]);
        let fork = place.fork(&manifest(name, "judged", "work", output, json!({})))?;
        fork.succeeds()?;
        ensure!(outcomes(&fork)? == ("Failed".into(), "Failed".into()), "{name}: {:?}", outcomes(&fork)?);
        let result = fork.object()?.status.unwrap_or_default().result.context("no result")?;
        ensure!(result.overridden + result.reused == 2, "{name}: {result:?}");
    }
    let runs: Value = place.replay(&["runs"])?;
    let judged = runs["runs"].as_array().into_iter().flatten().find(|run| run["name"] == "judged").context("no run")?;
    ensure!(judged["spans"] == 2, "{judged}");
    Ok(())
}
