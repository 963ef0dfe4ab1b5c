//! From apply to delete: cancel, suspend, what is cleaned up and what stays.

use anyhow::{Result, ensure};
use kube::ResourceExt;
use replayfork_test_cluster::command::{output, succeeds};
use replayfork_test_cluster::install::NAMESPACE;
use replayfork_tests::fork::{OBJECTS, manifest, script};
use replayfork_tests::place::{AGENT, Place};
use replayfork_tests::until;
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] = scenarios![
    e2e_deleting_a_fork_removes_its_objects_and_its_run_goes_only_if_asked,
    e2e_ttl_removes_job_and_policy_and_keeps_the_fork,
    e2e_cancel_stops_the_step_and_keeps_what_is_finished,
    e2e_suspend_holds_a_fork_until_it_is_resumed,
    e2e_metrics_tell_of_the_queue_of_starts_and_of_agents,
];

/// A metric's value, summed over its series.
fn sum(text: &str, metric: &str) -> f64 {
    let of_metric = text.lines().filter_map(|line| line.strip_prefix(metric)).filter(|rest| rest.starts_with(['{', ' ']));
    of_metric.filter_map(|rest| rest.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

fn e2e_metrics_tell_of_the_queue_of_starts_and_of_agents(place: &Place) -> Result<()> {
    place.record()?;
    let suspended = |name: &str| manifest(name, AGENT, "lint", json!([script("lint", "true")]), json!({"suspend": true}));
    let fork = place.fork(&suspended("measured"))?;
    let waits = |fork: &replayfork_tests::fork::Fork| Ok(fork.condition("Finished").ok().filter(|c| c.reason == "Suspended").map(drop));
    until("the fork is suspended", OBJECTS, || waits(&fork))?;
    let operators = place.world.parts("operator")?;
    let metrics = || -> Result<String> {
        let all = operators.iter().map(|pod| {
            let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/http:{}:8080/proxy/metrics", pod.name_any());
            output(&mut place.world.kube.kubectl(["get", "--raw", &path]))
        });
        all.collect::<Result<Vec<_>>>().map(|texts| texts.concat())
    };
    let before = metrics()?;
    ensure!(sum(&before, "replayfork_operator_forks_waiting{reason=\"Suspended\"}") >= 1.0, "nobody waits:\n{before}");
    fork.patch(json!({"suspend": false}))?;
    fork.succeeds()?;
    let after = metrics()?;
    for metric in ["replayfork_operator_fork_seconds_to_start_count", "replayfork_operator_fork_seconds_to_finish_count"] {
        ensure!(sum(&after, metric) > sum(&before, metric), "{metric} did not grow:\n{after}");
    }
    for kind in ["cluster", "api", "invalid"] {
        let metric = format!("replayfork_operator_reconcile_errors_total{{kind=\"{kind}\"}}");
        ensure!(after.contains(&metric), "{metric} is not told:\n{after}");
    }
    let answer = place.ask("GET", "/metrics", None, None)?;
    let text = String::from_utf8(answer.body)?;
    let runs = sum(&text, "replayfork_agent_runs_total");
    let errors = sum(&text, "replayfork_agent_errors_total");
    ensure!(runs >= 1.0 && errors >= 2.0 * runs.min(1.0), "{runs} runs with {errors} errors:\n{text}");
    ensure!(sum(&text, "replayfork_agent_tokens_total") > 0.0, "no tokens were counted:\n{text}");
    ensure!(text.contains("replayfork_agent_cost_usd_total{agent=\"scripted-agent\""), "no cost is told:\n{text}");
    Ok(())
}

fn has_run(place: &Place, run: &str) -> Result<bool> {
    let runs: Value = place.replay(&["runs"])?;
    Ok(runs["runs"].as_array().into_iter().flatten().any(|r| r["name"] == run))
}

fn e2e_deleting_a_fork_removes_its_objects_and_its_run_goes_only_if_asked(place: &Place) -> Result<()> {
    place.record()?;
    // Two commands: were they one, either could have its result from the other, and that run would be needed.
    let kept = place.fork(&manifest("kept", AGENT, "lint", json!([script("lint", "echo kept")]), json!({})))?;
    let more = json!({"deletionPolicy": "DeleteRun"});
    let gone = place.fork(&manifest("gone", AGENT, "lint", json!([script("lint", "echo gone")]), more))?;
    for fork in [&kept, &gone] {
        fork.succeeds()?;
        ensure!(fork.jobs()?.len() == 1 && fork.policies()?.len() == 1, "{} has lost its objects too early", fork.name);
    }
    let (kept_run, gone_run) = (kept.run()?, gone.run()?);
    for fork in [&kept, &gone] {
        fork.delete()?;
        fork.objects_go()?;
    }
    until("the run of the deleted fork is gone", OBJECTS, || Ok((!has_run(place, &gone_run)?).then_some(())))?;
    ensure!(has_run(place, &kept_run)? && has_run(place, AGENT)?, "a run was deleted that should stay");
    let shown: Value = place.replay(&["diff", AGENT, &kept_run])?;
    ensure!(shown["reexecuted"] == 1, "the kept run can't be compared: {shown}");
    // By hand a run goes too, for who may delete it, and once no other needs it.
    let refused = || place.told(&["delete", AGENT]).err().map(|e| format!("{e:#}")).unwrap_or_default();
    ensure!(refused().contains("may not delete runs"), "who may fork may delete: {:?}", refused());
    let account = format!("--serviceaccount={}:replayfork-user", place.namespace);
    output(&mut place.kubectl(["create", "rolebinding", "admin", "--clusterrole=admin", &account]))?;
    let needed = || Some(refused()).filter(|said| said.contains("is needed by"));
    let said = until("the run is refused for what needs it", OBJECTS, || Ok(needed()))?;
    ensure!(said.contains(&kept_run), "deleting a run that a fork needs says {said:?}");
    place.told(&["delete", &kept_run])?;
    ensure!(!has_run(place, &kept_run)? && has_run(place, AGENT)?, "the run that was to be deleted is still there");
    Ok(())
}

fn e2e_ttl_removes_job_and_policy_and_keeps_the_fork(place: &Place) -> Result<()> {
    place.record()?;
    let more = json!({"ttlSecondsAfterFinished": 1});
    let fork = place.fork(&manifest("short-lived", AGENT, "lint", json!([script("lint", "true")]), more))?;
    fork.succeeds()?;
    fork.objects_go()?;
    ensure!(fork.condition("Succeeded")?.status == "True", "the fork changed when its objects went");
    ensure!(has_run(place, &fork.run()?)?, "the forked run went with the objects");
    Ok(())
}

fn e2e_cancel_stops_the_step_and_keeps_what_is_finished(place: &Place) -> Result<()> {
    place.record()?;
    let patches = json!([script("test_validate", "echo finished"), script("lint", "exec sleep 61.1")]);
    let fork = place.fork(&manifest("canceled", AGENT, "test_validate", patches, json!({})))?;
    fork.runs(&["sleep", "61.1"])?;
    fork.patch(json!({"cancel": true}))?;
    fork.ends_as("Canceled")?;
    fork.left(&["test_validate Completed Reexecuted", "lint Canceled Reexecuted", "summarize Canceled Skipped"])?;
    // What was not reached shows nothing of the source, and the run says how its fork ended, wherever it is looked at.
    let unreached = place.span(&fork.run()?, "summarize")?.span;
    let said = unreached.closing.as_ref().and_then(|c| c.error.clone()).unwrap_or_default();
    ensure!(unreached.output().is_none() && unreached.snapshot_after.is_none(), "a step that was not reached shows a result");
    ensure!(said.contains("not reached") && said.contains("Canceled"), "the step says {said:?}");
    let shown: Value = place.replay(&["show", &fork.run()?])?;
    ensure!(shown["run"]["fork_end"]["reason"] == "Canceled" && shown["run"]["outcome"].is_null(), "the run says {}", shown["run"]);
    let listed = place.told(&["runs"])?;
    ensure!(listed.lines().any(|l| l.starts_with("canceled ") && l.contains("✗ Canceled")), "the list says\n{listed}");
    let table = place.told(&["show", &fork.run()?])?;
    ensure!(table.contains("ended as Canceled: ") && table.contains("not reached"), "the table says\n{table}");
    let diff: Value = place.replay(&["diff", &fork.name])?;
    let summary = diff["summary"].as_str().unwrap_or_default();
    ensure!(summary.contains("one step was not reached (the fork ended as Canceled)"), "the diff says {summary:?}");
    let finished = place.span(&fork.run()?, "test_validate")?.span;
    ensure!(finished.output().is_some_and(|o| o.stdout == "finished\n"), "the finished step's output is {:?}", finished.output());
    let taken_back = json!({"spec": {"cancel": false}}).to_string();
    ensure!(!succeeds(&mut place.kubectl(["patch", "replayfork", "canceled", "--type=merge", "-p", &taken_back])), "cancel was taken back");
    Ok(())
}

fn e2e_suspend_holds_a_fork_until_it_is_resumed(place: &Place) -> Result<()> {
    place.record()?;
    let fork = place.fork(&manifest("held", AGENT, "lint", json!([script("lint", "true")]), json!({"suspend": true})))?;
    until("the fork is suspended", OBJECTS, || {
        Ok(fork.condition("Finished").ok().filter(|c| c.reason == "Suspended" && c.status == "False").map(drop))
    })?;
    ensure!(fork.condition("Planned")?.status == "True" && fork.jobs()?.is_empty(), "a suspended fork has a Job");
    fork.patch(json!({"suspend": false}))?;
    fork.succeeds()?;
    fork.left(&["lint Completed Reexecuted"])
}
