//! The operator is killed at its worst moments, which a gate in front of the Kubernetes API makes; another one goes on.

use std::time::Duration;

use anyhow::{Result, ensure};
use replayfork_tests::admission::{Gate, Held};
use replayfork_tests::fork::{Fork, OBJECTS, manifest, script};
use replayfork_tests::place::{AGENT, Place};
use replayfork_tests::until;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] = scenarios![
    e2e_operator_killed_before_the_job_is_created_runs_the_fork_once,
    e2e_operator_killed_after_the_job_was_created_runs_the_fork_once,
    e2e_operator_killed_before_it_writes_the_result_writes_it_later,
];

const ASKS: Duration = Duration::from_secs(60);

fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(|| anyhow::anyhow!("{pid} is no process"))?;
    Ok(kill_process(pid, signal)?)
}

fn fork<'a>(place: &'a Place<'a>, name: &str) -> Result<Fork<'a>> {
    place.fork(&manifest(name, AGENT, "lint", json!([script("lint", "echo ran >> marker")]), json!({})))
}

/// One Job, one pod, one execution, and a status that says so.
fn ran_once(fork: &Fork) -> Result<()> {
    fork.succeeds()?;
    fork.left(&["lint Completed Reexecuted"])?;
    ensure!(fork.file_after("lint", "marker")? == "ran\n", "the step did not run once");
    ensure!(fork.jobs()?.len() == 1, "the fork has {} Jobs", fork.jobs()?.len());
    fork.pod().map(drop)
}

fn e2e_operator_killed_before_the_job_is_created_runs_the_fork_once(place: &Place) -> Result<()> {
    place.record()?;
    let gate = Gate::before(place, Held::JobCreation)?;
    let fork = fork(place, "before-the-job")?;
    let creation = gate.next(ASKS)?;
    signal(place.world.working_operator()?, Signal::KILL)?;
    creation.deny();
    drop(gate);
    ran_once(&fork)
}

fn e2e_operator_killed_after_the_job_was_created_runs_the_fork_once(place: &Place) -> Result<()> {
    place.record()?;
    let gate = Gate::before(place, Held::JobCreation)?;
    let fork = fork(place, "after-the-job")?;
    let creation = gate.next(ASKS)?;
    // Were it killed now, the API server would drop the request; stopped, it is never told that the Job was made.
    let operator = place.world.working_operator()?;
    signal(operator, Signal::STOP)?;
    creation.admit();
    until("the Job is there", OBJECTS, || Ok((fork.jobs()?.len() == 1).then_some(())))?;
    signal(operator, Signal::KILL)?;
    drop(gate);
    ran_once(&fork)
}

fn e2e_operator_killed_before_it_writes_the_result_writes_it_later(place: &Place) -> Result<()> {
    place.record()?;
    let gate = Gate::before(place, Held::FinalStatus)?;
    let fork = fork(place, "before-the-status")?;
    let status = gate.next(ASKS)?;
    let state = place.world.sql(&format!("SELECT state FROM forks WHERE uid = '{}'", fork.uid))?;
    ensure!(state == "terminal", "a final status was written while the fork was {state}");
    ensure!(fork.condition("Finished")?.status == "False", "the status is there before it was let through");
    until("the Job has ended", OBJECTS, || {
        let status = fork.jobs()?.into_iter().next().and_then(|job| job.status).unwrap_or_default();
        Ok((status.succeeded == Some(1)).then_some(()))
    })?;
    signal(place.world.working_operator()?, Signal::KILL)?;
    status.deny();
    drop(gate);
    ran_once(&fork)
}
