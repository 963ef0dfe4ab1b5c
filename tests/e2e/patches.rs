//! Each type of patch on a real run, forks of forks, checks, and results that another fork left.

use anyhow::{Context, Result, ensure};
use replayfork_core::model::{Fidelity, SnapshotRef, Status};
use replayfork_core::reason::Cause;
use replayfork_tests::fork::{Fork, manifest, script};
use replayfork_tests::place::{AGENT, Place};
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] = scenarios![
    e2e_file_patch_is_seen_by_the_span_and_by_those_after_it,
    e2e_file_that_no_step_reads_is_in_the_workspace_of_the_fork,
    e2e_large_content_is_uploaded_and_named_by_its_digest,
    e2e_snapshot_patch_starts_a_span_from_another_workspace,
    e2e_fork_of_a_fork_keeps_what_its_parent_changed,
    e2e_fork_without_patches_checks_whether_the_run_can_be_reproduced,
    e2e_result_of_another_fork_stands_for_an_execution,
    e2e_gated_step_needs_approval_of_its_new_arguments,
    e2e_fork_of_an_imported_run_runs_commands_again_whose_inputs_nobody_knows,
    e2e_workspace_that_a_long_step_found_is_there_when_it_ends,
];

/// The output text of a span of a fork's run.
fn said(fork: &Fork, span: &str) -> Result<String> {
    let span = fork.place.span(&fork.run()?, span)?.span;
    Ok(span.output().with_context(|| format!("{} has no output", span.opening.name))?.text.clone())
}

fn planned_and_finished<'a>(place: &'a Place<'a>, manifest: &str) -> Result<Fork<'a>> {
    let plan = place.plan(manifest)?;
    let fork = place.fork(manifest)?;
    fork.succeeds()?;
    fork.agrees_with(&plan)?;
    Ok(fork)
}

fn e2e_file_patch_is_seen_by_the_span_and_by_those_after_it(place: &Place) -> Result<()> {
    place.record()?;
    let files = json!([{"path": "auth/extra.py", "content": "import os, sys\nX = 'é🦀'\n"}, {"path": "run_tests.py", "content": "print('none')\n"}]);
    let patches = json!([
        {"type": "FileContentOverride", "span": "test_validate", "files": files},
        script("lint", "cat auth/extra.py; ls -l run_tests.py | cut -c1-10"),
    ]);
    let fork = planned_and_finished(place, &manifest("other-files", AGENT, "test_validate", patches, json!({})))?;
    fork.left(&["test_validate Completed Reexecuted", "lint Completed Reexecuted", "summarize Blocked Blocked"])?;
    ensure!(said(&fork, "test_validate")? == "none\n");
    let lint = said(&fork, "lint")?;
    ensure!(lint.starts_with("import os, sys\nX = 'é🦀'\n"), "lint saw {lint:?}");
    // The recorded file's x bit stays as it was.
    let recorded = place.span(AGENT, "test_validate")?.span.snapshot_before.context("no snapshot")?;
    let executable = place.world.sql(&format!("SELECT 1 FROM snapshots WHERE content = decode('{}', 'hex') LIMIT 1", recorded.content))?;
    ensure!(executable == "1" && (lint.contains("-rw-r--r--") || lint.contains("-rwxr-xr-x")), "lint saw {lint:?}");
    ensure!(fork.file_after("lint", "run_tests.py")? == "print('none')\n");
    Ok(())
}

fn e2e_file_that_no_step_reads_is_in_the_workspace_of_the_fork(place: &Place) -> Result<()> {
    place.record()?;
    let file = json!([{"type": "FileContentOverride", "files": [{"path": "NOTES.md", "content": "read me\n"}]}]);
    let notes = manifest("notes", AGENT, "lint", file, json!({}));
    let plan = place.plan(&notes)?;
    ensure!(plan.is_empty() && plan.sandbox, "{plan:#?}");
    let fork = place.fork(&notes)?;
    fork.succeeds()?;
    ensure!(fork.file_after("lint", "NOTES.md")? == "read me\n");
    // Nothing ran, and a fork of the fork begins with the file.
    ensure!(fork.rows()?.iter().all(|row| row.fidelity != Fidelity::Reexecuted), "{:?}", fork.lines()?);
    let patches = json!([script("lint", "cat NOTES.md")]);
    let again = place.fork(&manifest("notes-again", &fork.run()?, "lint", patches, json!({})))?;
    again.succeeds()?;
    ensure!(said(&again, "lint")? == "read me\n");
    Ok(())
}

fn e2e_large_content_is_uploaded_and_named_by_its_digest(place: &Place) -> Result<()> {
    place.record()?;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("large.bin");
    let content: Vec<u8> = (0..10_000_000u32).flat_map(|i| (i.wrapping_mul(2_654_435_761) as u8).to_le_bytes()).collect();
    std::fs::write(&file, &content)?;
    let uploaded: Value = place.replay(&["upload", &file.to_string_lossy()])?;
    let digest = uploaded["digest"].as_str().context("no digest")?;
    ensure!(uploaded["size"] == 10_000_000 && digest == replayfork_core::Digest::of(&content).to_string(), "uploaded {uploaded}");
    let patches = json!([
        {"type": "FileContentOverride", "files": [{"path": "large.bin", "contentFrom": {"digest": digest}}]},
        script("lint", "wc -c < large.bin; cksum < large.bin"),
    ]);
    let fork = planned_and_finished(place, &manifest("large", AGENT, "lint", patches, json!({})))?;
    let lint = said(&fork, "lint")?;
    ensure!(lint.starts_with("10000000\n"), "lint saw {lint:?}");
    let unknown = "0".repeat(64);
    let patches = json!([{"type": "FileContentOverride", "files": [{"path": "x", "contentFrom": {"digest": unknown}}]}]);
    let refused = place.fork(&manifest("never-sent", AGENT, "lint", patches, json!({})))?.ends_as("PatchRefused")?;
    ensure!(refused.message.contains(&unknown) && refused.message.contains("kubectl replay upload"), "{}", refused.message);
    Ok(())
}

fn e2e_snapshot_patch_starts_a_span_from_another_workspace(place: &Place) -> Result<()> {
    place.record()?;
    // The workspace as it was before the fix: the tests must fail in another way than with it.
    let unfixed = place.span(AGENT, "test_before")?.span.snapshot_before.context("no snapshot")?;
    let patches = json!([
        {"type": "SnapshotOverride", "snapshot": {"digest": unfixed.content}},
        {"type": "EnvVarOverride", "env": [{"name": "AUTH_POOL_TIMEOUT", "value": "0.05"}]},
    ]);
    let fork = planned_and_finished(place, &manifest("unfixed", AGENT, "test_validate", patches, json!({})))?;
    fork.left(&["test_validate Failed Reexecuted", "lint Completed Reexecuted", "summarize Blocked Blocked"])?;
    let before = place.span(&fork.run()?, "test_validate")?.span.snapshot_before.context("no snapshot")?;
    ensure!(before.content == unfixed.content);
    let unknown = "1".repeat(64);
    let patches = json!([{"type": "SnapshotOverride", "snapshot": {"digest": unknown}}]);
    let refused = place.fork(&manifest("no-such-state", AGENT, "lint", patches, json!({})))?.ends_as("PatchRefused")?;
    ensure!(refused.message.contains(&unknown), "{}", refused.message);
    Ok(())
}

fn e2e_fork_of_a_fork_keeps_what_its_parent_changed(place: &Place) -> Result<()> {
    place.record()?;
    let parent = planned_and_finished(place, &place.example("shorter-wait")?)?;
    let parent_run = parent.run()?;
    let before = place.fingerprint(&parent_run)?;
    // After the fork span: nothing of the parent's is done again.
    let patches = json!([script("lint", "echo linted")]);
    let later = planned_and_finished(place, &manifest("later", &parent_run, "lint", patches, json!({})))?;
    ensure!(said(&later, "test_validate")? == said(&parent, "test_validate")?);
    ensure!(said(&later, "lint")? == "linted\n");
    let status = place.span(&later.run()?, "test_validate")?.span.status();
    ensure!(status == Status::Completed, "test_validate is {status} in the fork of the fork");
    // Before it: the parent's variable still holds, its command is run again on other tests.
    let patches = json!([{"type": "ToolOutputOverride", "output": {"text": "test_release"}}]);
    let model = json!({"model": {"mode": "Command", "command": {"argv": ["python3", "/opt/agent/model.py"]}}});
    let earlier = planned_and_finished(place, &manifest("earlier", &parent_run, "select_tests", patches, model))?;
    let executor = serde_json::to_value(&place.span(&earlier.run()?, "test_validate")?.span.opening.executor)?;
    ensure!(executor["env"]["AUTH_POOL_TIMEOUT"] == "0.05" && executor["script"] == "python3 run_tests.py test_release", "{executor}");
    // A third generation, from the second; what was given stays given.
    let patches = json!([{"type": "EnvVarOverride", "env": [{"name": "LANG", "value": "C"}]}]);
    let model = json!({"model": {"mode": "Command", "command": {"argv": ["python3", "/opt/agent/model.py"]}}});
    let third = planned_and_finished(place, &manifest("third", &earlier.run()?, "test_before", patches, model))?;
    ensure!(said(&third, "select_tests")? == "test_release");
    ensure!(place.fingerprint(&parent_run)? == before, "the parent was written to");
    Ok(())
}

fn e2e_fork_without_patches_checks_whether_the_run_can_be_reproduced(place: &Place) -> Result<()> {
    place.record()?;
    let fork = planned_and_finished(place, &place.example("reproduce")?)?;
    let result = place.world.sql_json(&format!("SELECT result FROM forks WHERE uid = '{}'", fork.uid))?;
    // Read, two tests, write, lint are run again; the model calls and the tool without a command can't be.
    ensure!(
        result["reproducibility"] == json!({"identical": 5, "differs": 0, "not_executable": 3}),
        "the check found {}",
        result["reproducibility"]
    );
    let after = |run: &str| -> Result<_> { Ok(place.span(run, "lint")?.span.snapshot_after.context("no snapshot")?.content) };
    ensure!(after(&fork.run()?)? == after(AGENT)?, "the check left another workspace");
    let closing = place.span(&fork.run()?, "test_before")?.span.closing.context("no closing")?;
    ensure!(closing.reproduced == Some(true), "{closing:?}");
    // What a person reads.
    let report = place.told(&["show", &fork.run()?])?;
    ensure!(report.contains("a check: 5 identical, 0 different, 3 not executable"), "{report}");
    let line = |span: &str| report.lines().find(|l| l.contains(&format!(" {span} "))).unwrap_or_default().to_owned();
    ensure!(line("test_before").contains("identical") && line("gen_fix").contains("not executable"), "{report}");
    // A step that gives something else each time is told as such.
    place.recorded_by(&[json!({"id": "dice", "opening": {"name": "dice", "kind": "ShellCommand", "workspace": "none",
        "executor": {"type": "shell", "script": "date +%s%N"}}, "closing": {"status": "Completed", "output": {"text": "4\n", "exit_code": 0}}})])?;
    let again = place.fork(&manifest("dice", "by-hand", "dice", json!([]), json!({})))?;
    again.succeeds()?;
    let closing = place.span(&again.run()?, "dice")?.span.closing.context("no closing")?;
    let error = closing.error.unwrap_or_default();
    ensure!(closing.reproduced == Some(false) && error.contains("not as recorded: output"), "{error}");
    Ok(())
}

fn e2e_result_of_another_fork_stands_for_an_execution(place: &Place) -> Result<()> {
    place.record()?;
    let linting = |name: &str, more: Value| {
        let command = json!({"script": "date +%s%N; echo made > made.txt", "reads": ["lint.py"], "writes": ["made.txt"]});
        manifest(name, AGENT, "lint", json!([{"type": "CommandOverride", "command": command}]), more)
    };
    let first = planned_and_finished(place, &linting("first", json!({})))?;
    first.left(&["lint Completed Reexecuted"])?;
    let second = place.fork(&linting("second", json!({})))?;
    second.succeeds()?;
    second.left(&["lint Completed Reused"])?;
    ensure!(said(&second, "lint")? == said(&first, "lint")?, "it was executed again");
    ensure!(second.file_after("lint", "made.txt")? == "made\n");
    ensure!(second.steps()?.is_empty(), "steps were begun: {}", second.steps()?);
    let third = planned_and_finished(place, &linting("third", json!({"reuse": {"resultCache": false}})))?;
    third.left(&["lint Completed Reexecuted"])?;
    ensure!(said(&third, "lint")? != said(&first, "lint")?, "it was not executed again");
    // What stands for another run's step keeps that run.
    let needed = place.world.sql(&format!(
        "SELECT count(*) FROM forks a, forks b, run_deps d WHERE a.uid = '{}' AND b.uid = '{}' AND d.rid = b.fork_rid AND d.needs = a.fork_rid",
        first.uid, second.uid
    ))?;
    ensure!(needed == "1");
    let row = second.rows()?.into_iter().next().context("no row")?;
    ensure!(row.fidelity == Fidelity::Reused);
    Ok(())
}

fn e2e_gated_step_needs_approval_of_its_new_arguments(place: &Place) -> Result<()> {
    let run = place.recorded_by(&[
        json!({"id": "ask", "opening": {"name": "ask", "kind": "ToolCall", "workspace": "none"},
            "closing": {"status": "Completed", "output": {"text": "staging"}}}),
        json!({"id": "deploy", "opening": {"name": "deploy", "kind": "ShellCommand", "reads": [], "writes": [],
            "executor": {"type": "shell", "script": "echo to staging", "env": {"PATH": "/usr/bin:/bin"}},
            "input_bindings": {"script": "echo to {{ ask }}"}},
            "closing": {"status": "Completed", "verdict": "gate:allow", "output": {"text": "to staging\n", "exit_code": 0}}}),
    ])?;
    let patches = || json!([{"type": "ToolOutputOverride", "output": {"text": "production"}}]);
    let asked = manifest("not-approved", &run, "ask", patches(), json!({}));
    let plan = place.plan(&asked)?;
    let digest = plan.spans.iter().find_map(|s| s.input_digest).context("the plan names no digest to approve")?;
    let refused = place.fork(&asked)?;
    refused.ends_as("Blocked")?;
    let blocked = refused.object()?.status.context("no status")?.blocked_spans;
    ensure!(blocked[0].reason == "ApprovalNeeded" && blocked[0].message.contains(&digest.to_string()), "{blocked:?}");
    let approvals = json!({"approvals": [{"span": "deploy", "inputDigest": digest}]});
    let approved = planned_and_finished(place, &manifest("approved", &run, "ask", patches(), approvals))?;
    ensure!(said(&approved, "deploy")? == "to production\n");
    let stale = json!({"approvals": [{"span": "deploy", "inputDigest": "2".repeat(64)}]});
    place.fork(&manifest("stale", &run, "ask", patches(), stale))?.ends_as("Blocked")?;
    // Nor is a fork of the fork a way around the gate.
    let same = json!([{"type": "EnvVarOverride", "env": [{"name": "PATH", "value": "/usr/bin:/bin"}]}]);
    let around = place.fork(&manifest("around", &refused.run()?, "deploy", same, json!({})))?;
    around.ends_as("Blocked")?;
    let blocked = around.object()?.status.context("no status")?.blocked_spans;
    ensure!(blocked[0].reason == "ApprovalNeeded", "{blocked:?}");
    Ok(())
}

/// What an importer knows: commands and answers in order, but no bindings, and no workspace.
fn e2e_fork_of_an_imported_run_runs_commands_again_whose_inputs_nobody_knows(place: &Place) -> Result<()> {
    let span = |id: &str, kind: &str, executor: Value, output: &str| {
        json!({"id": id, "opening": {"name": id, "kind": kind, "inputs": "unknown", "workspace": "none", "executor": executor},
            "closing": {"status": "Completed", "output": {"text": output, "exit_code": 0}}})
    };
    let shell = |script: &str| json!({"type": "shell", "script": script});
    let request = json!({"model": "m", "messages": [{"role": "user", "content": "well?"}]});
    let run = place.recorded_by(&[
        span("look", "ToolCall", Value::Null, "found nothing"),
        span("count", "ShellCommand", shell("echo 1"), "1\n"),
        span("ask", "LlmCall", json!({"type": "model", "provider": "p", "request": request}), "well."),
        span("say", "ShellCommand", shell("echo 1; echo said"), "1\nsaid\n"),
    ])?;
    let patch = |text: &str| json!([{"type": "ToolOutputOverride", "span": "look", "output": {"text": text}}]);
    let same = manifest("same", &run, "look", patch("found nothing"), json!({}));
    ensure!(place.plan(&same)?.is_empty(), "a patch that changes nothing affects {:#?}", place.plan(&same)?.spans);
    let other = manifest("other", &run, "look", patch("found something"), json!({"model": {"mode": "Recorded"}}));
    let plan = place.plan(&other)?;
    let causes = &plan.spans.iter().find(|s| s.name == "count").context("count is not affected")?.causes;
    ensure!(causes.contains(&Cause::DependencyUnknown), "count is affected by {causes:?}");
    let fork = place.fork(&other)?;
    fork.succeeds()?;
    fork.agrees_with(&plan)?;
    let rows = fork.lines()?;
    ensure!(rows[..3] == ["look Completed Overridden", "count Completed Reexecuted", "ask Blocked Blocked"], "{rows:?}");
    ensure!(said(&fork, "count")? == "1\n");
    let asked = place.span(&fork.run()?, "ask")?.span.closing.context("no closing")?;
    ensure!(asked.blocked.iter().any(|b| b.message.contains("IncompleteContract(input_bindings)")), "{asked:?}");
    Ok(())
}

/// While the step runs no row names the patched workspace, and several collections pass.
fn e2e_workspace_that_a_long_step_found_is_there_when_it_ends(place: &Place) -> Result<()> {
    place.record()?;
    let file = json!({"type": "FileContentOverride", "files": [{"path": "only-here", "content": "patched\n"}]});
    let patches = json!([file, script("lint", "sleep 6; cat only-here; echo more >> only-here")]);
    let fork = place.fork(&manifest("long", AGENT, "lint", patches, json!({})))?;
    fork.succeeds()?;
    let span = place.span(&fork.run()?, "lint")?.span;
    let (before, after) = (span.snapshot_before.context("no state before")?, span.snapshot_after.context("no state after")?);
    let read = |state: &SnapshotRef| place.file(&fork.run()?, &state.node.to_string(), "only-here");
    ensure!(read(&before)? == b"patched\n" && read(&after)? == b"patched\nmore\n", "the workspaces around the step are others");
    Ok(())
}
