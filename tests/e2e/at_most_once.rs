//! A step runs at most once, and one in doubt is said to be in doubt, whatever is killed in its middle.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use replayfork_test_cluster::command::run;
use replayfork_test_cluster::install::NAMESPACE;
use replayfork_tests::fork::{Fork, OBJECTS, manifest, processes, script};
use replayfork_tests::place::{AGENT, Place};
use replayfork_tests::until;
use serde_json::json;

use crate::{Scenario, scenarios};

pub const ABREAST: &[Scenario] = scenarios![
    e2e_killed_courier_leaves_the_step_in_doubt_and_never_again,
    e2e_killed_executor_leaves_the_step_in_doubt_and_never_again,
    e2e_deleted_job_interrupts_the_step,
    e2e_fork_made_again_under_its_name_is_a_new_one,
];
pub const ALONE: &[Scenario] = scenarios![e2e_postgres_and_api_server_restarted_under_a_fork_cost_it_nothing];

/// A fork whose only step leaves a mark in the workspace and then takes its time.
fn marking<'a>(place: &'a Place<'a>, name: &str, seconds: &str) -> Result<Fork<'a>> {
    let step = script("lint", &format!("echo ran >> marker; sleep {seconds}; echo ended >> marker"));
    let fork = place.fork(&manifest(name, AGENT, "lint", json!([step]), json!({})))?;
    fork.runs(&["sleep", seconds])?;
    Ok(fork)
}

/// The step was begun once and has no result; nothing of it runs any more, or again.
fn begun_once(fork: &Fork, seconds: &str) -> Result<()> {
    fork.left(&["lint Canceled Reexecuted"])?;
    let steps = fork.steps()?;
    ensure!(steps.ends_with("-lint ended") && !steps.contains(','), "the steps are {steps:?}");
    until("the step's processes are gone", OBJECTS, || Ok(processes(&["sleep", seconds]).is_empty().then_some(())))?;
    ensure!(fork.jobs()?.len() <= 1 && fork.pods()?.len() <= 1, "there is a second pod");
    Ok(())
}

/// Nobody can know how far the step came, and it says so: it shows no files, not even those of its source.
fn in_doubt(fork: &Fork, seconds: &str) -> Result<()> {
    begun_once(fork, seconds)?;
    let step = fork.place.span(&fork.run()?, "lint")?.span;
    let closing = step.closing.context("the step was not closed")?;
    let said = closing.error.unwrap_or_default();
    ensure!(closing.output.is_none() && said.contains("Interrupted") && said.contains("may have run"), "the step says {said:?}");
    ensure!(step.snapshot_after.is_none(), "a step in doubt shows a workspace");
    Ok(())
}

fn e2e_killed_courier_leaves_the_step_in_doubt_and_never_again(place: &Place) -> Result<()> {
    place.record()?;
    let fork = marking(place, "courier-killed", "62.1")?;
    place.world.kill_container(&place.namespace, &fork.pod()?, "courier")?;
    let ended = fork.ends_as("Interrupted")?;
    ensure!(ended.message.contains("courier"), "the condition says {}", ended.message);
    in_doubt(&fork, "62.1")?;
    // The executor ends by itself, and not well.
    let code = until("the executor ends", OBJECTS, || {
        let status = place.world.wait(place.api::<Pod>().get(&fork.pod()?))?.status.unwrap_or_default();
        let executor = status.container_statuses.into_iter().flatten().find(|c| c.name == "executor");
        Ok(executor.and_then(|c| c.state?.terminated).map(|ended| ended.exit_code))
    })?;
    ensure!(code == 1, "the executor ended with {code}");
    Ok(())
}

fn e2e_killed_executor_leaves_the_step_in_doubt_and_never_again(place: &Place) -> Result<()> {
    place.record()?;
    let fork = marking(place, "executor-killed", "62.2")?;
    place.world.kill_container(&place.namespace, &fork.pod()?, "executor")?;
    // Nobody but the kernel's memory killer ends an executor so, and the remedy is named.
    let ended = fork.ends_as("OOMKilled")?;
    ensure!(ended.message.contains("executor") && ended.message.contains("limits.memory"), "the condition says {}", ended.message);
    in_doubt(&fork, "62.2")
}

fn e2e_deleted_job_interrupts_the_step(place: &Place) -> Result<()> {
    place.record()?;
    let fork = marking(place, "job-deleted", "62.3")?;
    let job = fork.jobs()?.first().context("the fork has no Job")?.name_any();
    run(&mut place.kubectl(["delete", "job", &job, "--wait=false"]))?;
    let ended = fork.ends_as("Interrupted")?;
    ensure!(ended.message.contains("Job was deleted"), "the condition says {}", ended.message);
    // Courier and executor are told at the same time. If the courier hears first, the step is stopped and its files are known.
    begun_once(&fork, "62.3")?;
    let step = place.span(&fork.run()?, "lint")?.span;
    let said = step.closing.context("the step was not closed")?.error.unwrap_or_default();
    ensure!(said.contains("Interrupted") && (said.contains("may have run") || said.contains("was stopped")), "the step says {said:?}");
    if step.snapshot_after.is_some() {
        ensure!(fork.file_after("lint", "marker")? == "ran\n", "the step did not run once");
    }
    let jobs = place.world.wait(place.api::<Job>().list(&Default::default()))?.items;
    ensure!(jobs.iter().all(|j| j.metadata.deletion_timestamp.is_some()), "there is another Job");
    Ok(())
}

fn e2e_fork_made_again_under_its_name_is_a_new_one(place: &Place) -> Result<()> {
    place.record()?;
    let old = marking(place, "again", "62.4")?;
    let old_run = old.run()?;
    // At once, while the old one's pod still runs.
    run(&mut place.kubectl(["delete", "replayfork", "again"]))?;
    let new = place.fork(&manifest("again", AGENT, "lint", json!([script("lint", "echo new >> marker")]), json!({})))?;
    ensure!(new.uid != old.uid, "the new fork has the old one's uid");
    new.succeeds()?;
    ensure!(new.file_after("lint", "marker")? == "new\n", "the new fork ran something else");
    ensure!(new.run()? != old_run, "both forks have one run");
    let owner = new.jobs()?.first().map(|j| j.owner_references()[0].uid.clone());
    ensure!(owner.as_deref() == Some(&new.uid), "the new fork's Job is another one's");
    old.objects_go()?;
    until("the old fork is closed", OBJECTS, || {
        let reason = place.world.sql(&format!("SELECT reason FROM forks WHERE uid = '{}'", old.uid))?;
        Ok(matches!(reason.as_str(), "Deleted" | "Interrupted").then_some(()))
    })?;
    ensure!(old.steps()?.ends_with("-lint ended") && !old.steps()?.contains(','), "the old fork's steps are {:?}", old.steps()?);
    Ok(())
}

fn e2e_postgres_and_api_server_restarted_under_a_fork_cost_it_nothing(place: &Place) -> Result<()> {
    place.record()?;
    let fork = marking(place, "outage", "12.5")?;
    place.world.restart_postgres()?;
    let server = place.world.parts("api-server")?.first().context("there is no api-server")?.name_any();
    place.world.kill_container(NAMESPACE, &server, "api-server")?;
    fork.succeeds()?;
    fork.left(&["lint Completed Reexecuted"])?;
    ensure!(fork.file_after("lint", "marker")? == "ran\nended\n", "the step did not run once");
    fork.pod().map(drop)
}
