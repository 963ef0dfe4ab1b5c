//! From apply to delete: cancel, suspend, what is cleaned up and what stays.

use anyhow::{Result, ensure};
use replayfork_test_cluster::command::succeeds;
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
];

fn has_run(place: &Place, run: &str) -> Result<bool> {
    let runs: Value = place.replay(&["runs"])?;
    Ok(runs["runs"].as_array().into_iter().flatten().any(|r| r["name"] == run))
}

fn e2e_deleting_a_fork_removes_its_objects_and_its_run_goes_only_if_asked(place: &Place) -> Result<()> {
    place.record()?;
    let patches = json!([script("lint", "true")]);
    let kept = place.fork(&manifest("kept", AGENT, "lint", patches.clone(), json!({})))?;
    let gone = place.fork(&manifest("gone", AGENT, "lint", patches, json!({"deletionPolicy": "DeleteRun"})))?;
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
    fork.left(&["test_validate Completed Reexecuted", "lint Canceled Reexecuted"])?;
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
