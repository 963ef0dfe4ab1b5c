//! What a sandbox gives a step, and what it says when it can't: room, a home, programs of the image.

use anyhow::{Result, ensure};
use replayfork_core::model::Closing;
use replayfork_tests::fork::{Fork, manifest, script};
use replayfork_tests::place::{AGENT, Place};
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] = scenarios![
    e2e_full_tmp_stops_the_step_and_names_volume_limit_and_field,
    e2e_home_that_cant_be_written_is_replaced_and_the_run_says_so,
    e2e_what_the_uid_may_not_execute_ends_the_fork_with_path_and_uid,
    e2e_sandbox_that_the_cluster_refuses_ends_the_fork_in_its_words,
    e2e_file_that_cant_be_read_is_named_by_the_step,
];

fn ended(fork: &Fork, span: &str) -> Result<Closing> {
    let closing = fork.place.span(&fork.run()?, span)?.span.closing;
    closing.ok_or_else(|| anyhow::anyhow!("{span} has not ended"))
}

fn says(text: &str, words: &[&str]) -> Result<()> {
    words.iter().try_for_each(|word| {
        ensure!(text.contains(word), "{text:?} does not say {word:?}");
        Ok(())
    })
}

fn e2e_full_tmp_stops_the_step_and_names_volume_limit_and_field(place: &Place) -> Result<()> {
    place.record()?;
    // More than nine tenths of the limit, and less than what kubelet evicts for.
    let fill = script("lint", "echo filling; head -c 62000000 /dev/zero > /tmp/fill; exec sleep 65.1");
    let fork = place.fork(&manifest("full", AGENT, "lint", json!([fill]), json!({"sandbox": {"scratchSize": "64Mi"}})))?;
    let words = ["\"tmp\"", "64Mi", "spec.sandbox.scratchSize"];
    says(&fork.ends_as("WorkspaceFull")?.message, &words)?;
    fork.left(&["lint Canceled Reexecuted"])?;
    let said = ended(&fork, "lint")?.error.unwrap_or_default();
    says(&said, &["WorkspaceFull", "the step was stopped"])?;
    says(&said, &words)?;
    // At once and by far: whether courier or kubelet sees it first, it is told as the same.
    let burst = script("lint", "head -c 300000000 /dev/zero > /tmp/fill; exec sleep 65.2");
    let fork = place.fork(&manifest("burst", AGENT, "lint", json!([burst]), json!({"sandbox": {"scratchSize": "64Mi"}})))?;
    says(&fork.ends_as("WorkspaceFull")?.message, &words)?;
    fork.left(&["lint Canceled Reexecuted"])
}

fn e2e_home_that_cant_be_written_is_replaced_and_the_run_says_so(place: &Place) -> Result<()> {
    place.record()?;
    let home = |name: &str, home: &str| -> Result<Closing> {
        let env = json!({"type": "EnvVarOverride", "env": [{"name": "HOME", "value": home}]});
        let patches = json!([env, script("lint", "touch \"$HOME/mine\" && echo \"$HOME\"")]);
        let fork = place.fork(&manifest(name, AGENT, "lint", patches, json!({})))?;
        fork.succeeds()?;
        ended(&fork, "lint")
    };
    let there = home("home-there", "/workspace")?;
    ensure!(there.output.is_some_and(|o| o.stdout == "/workspace\n") && there.error.is_none(), "the step says {:?}", there.error);
    let not = home("home-not-there", "/root")?;
    ensure!(not.output.as_ref().is_some_and(|o| o.stdout == "/tmp\n"), "the step had {:?}", not.output);
    says(&not.error.unwrap_or_default(), &["HOME was /tmp", "\"/root\""])
}

fn e2e_what_the_uid_may_not_execute_ends_the_fork_with_path_and_uid(place: &Place) -> Result<()> {
    place.record()?;
    let tool = json!([{"type": "CommandOverride", "command": {"argv": ["/usr/lib/os-release", "x"]}}]);
    let fork = place.fork(&manifest("no-tool", AGENT, "lint", tool, json!({})))?;
    says(&fork.ends_as("ImageNotUsable")?.message, &["\"/usr/lib/os-release\"", "uid 1000", "spec.sandbox.image"])?;
    fork.left(&["lint Failed Reexecuted"])?;
    // A file of the run's own is the run's own matter.
    let own = json!([{"type": "CommandOverride", "command": {"script": "touch tool; ./tool; exec /workspace/tool"}}]);
    let fork = place.fork(&manifest("own-tool", AGENT, "lint", own, json!({})))?;
    fork.succeeds()?;
    let own = json!([{"type": "CommandOverride", "command": {"argv": ["./run_tests.py"]}}]);
    let fork = place.fork(&manifest("own-file", AGENT, "lint", own, json!({})))?;
    fork.succeeds()?;
    fork.left(&["lint Failed Reexecuted"])
}

fn e2e_sandbox_that_the_cluster_refuses_ends_the_fork_in_its_words(place: &Place) -> Result<()> {
    place.record()?;
    let patches = || json!([script("lint", "true")]);
    let limits = json!({"sandbox": {"resources": {"limits": {"memory": "64Mi"}, "requests": {"memory": "128Mi"}}}});
    let fork = place.fork(&manifest("contradiction", AGENT, "lint", patches(), limits))?;
    says(&fork.ends_as("CreateFailed")?.message, &["refuses the sandbox's Job", "128Mi", "memory limit"])?;
    fork.had_no_pod()?;
    let account = json!({"sandbox": {"serviceAccountName": "not a name"}});
    let fork = place.fork(&manifest("bad-account", AGENT, "lint", patches(), account))?;
    says(&fork.ends_as("CreateFailed")?.message, &["serviceAccountName", "not a name"])?;
    fork.left(&["lint Canceled Skipped"])?;
    says(&ended(&fork, "lint")?.error.unwrap_or_default(), &["not reached", "CreateFailed"])?;
    let diff: Value = place.replay(&["diff", &fork.name])?;
    says(diff["summary"].as_str().unwrap_or_default(), &["Nothing differs in what the fork came to", "one step was not reached"])
}

fn e2e_file_that_cant_be_read_is_named_by_the_step(place: &Place) -> Result<()> {
    place.record()?;
    let fork = place.fork(&manifest("unread", AGENT, "lint", json!([script("lint", "chmod 000 auth/pool.py; echo done")]), json!({})))?;
    fork.succeeds()?;
    says(&ended(&fork, "lint")?.error.unwrap_or_default(), &["\"auth/pool.py\"", "can't be read", "the recorded workspace lacks it"])
}
