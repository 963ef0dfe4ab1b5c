//! Recording: what the example agent does is there afterwards, and a recorder in trouble never harms the agent.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use replayfork_client::read::{Run, SpanSummary, TreeEntryKind, TreeListing};
use replayfork_core::model::{Status, Verdict};
use replayfork_test_cluster::command::{output, run};
use replayfork_tests::fork::manifest;
use replayfork_tests::place::{AGENT, Place};
use replayfork_tests::until;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const ABREAST: &[Scenario] = scenarios![
    e2e_recording_yields_nine_spans_and_the_last_snapshot_is_the_workspace,
    e2e_recorder_off_records_nothing_and_the_agent_finishes,
    e2e_loops_of_spans_are_refused_or_do_no_harm_and_files_outside_of_the_workspace_are_not_written,
    e2e_killed_recorder_loses_nothing_that_it_took,
];
pub const ALONE: &[Scenario] = scenarios![e2e_agent_finishes_without_the_api_server_and_its_run_arrives_later];

const STEPS: [(&str, Status); 9] = [
    ("plan", Status::Completed),
    ("read_src", Status::Completed),
    ("select_tests", Status::Completed),
    ("test_before", Status::Failed),
    ("gen_fix", Status::Completed),
    ("apply_fix", Status::Completed),
    ("test_validate", Status::Failed),
    ("lint", Status::Completed),
    ("summarize", Status::Completed),
];

/// What `kubectl replay show` says of a run.
#[derive(Deserialize)]
struct Shown {
    run: Run,
    spans: Vec<SpanSummary>,
}

fn nine_spans(place: &Place, name: &str) -> Result<Shown> {
    let shown: Shown = place.replay(&["show", name])?;
    let steps: Vec<_> = shown.spans.iter().map(|s| (s.name.as_str(), s.status)).collect();
    ensure!(steps == STEPS, "the spans are {steps:?}");
    ensure!(shown.spans.is_sorted_by_key(|s| s.started), "the spans are not in the order in which they began");
    ensure!(shown.run.outcome == Some(Status::Failed), "the run's outcome is {:?}", shown.run.outcome);
    Ok(shown)
}

/// Each entry of a folder: its kind, and a file's content or a link's target.
type Files = BTreeMap<String, (String, Vec<u8>)>;

/// A container that keeps the agent's pod, and so its workspace, until it is told to end.
const WITNESS: &str = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [15]); signal.sigwait([15])";

const LIST: &str = r#"
import base64, json, os
found = {}
for folder, folders, files in os.walk("/workspace"):
    for name in folders + files:
        path = os.path.join(folder, name)
        short = os.path.relpath(path, "/workspace")
        if os.path.islink(path): kind, content = "symlink", os.readlink(path).encode()
        elif os.path.isdir(path): kind, content = "directory", b""
        else: kind, content = "executable" if os.stat(path).st_mode & 0o100 else "file", open(path, "rb").read()
        found[short] = [kind, base64.b64encode(content).decode()]
print(json.dumps(found))
"#;

fn e2e_recording_yields_nine_spans_and_the_last_snapshot_is_the_workspace(place: &Place) -> Result<()> {
    let mut objects = place.agent()?;
    let pod = objects.iter_mut().find(|o| o["kind"] == "Pod").context("the example has no pod")?;
    let mut witness = pod["spec"]["containers"][0].clone();
    witness["name"] = json!("witness");
    witness["command"] = json!(["python3", "-c", WITNESS]);
    pod["spec"]["containers"].as_array_mut().context("no containers")?.push(witness);
    place.start_agent(&objects)?;
    until("the agent has ended", Duration::from_secs(120), || {
        let ended = place.agent_container("agent")?.and_then(|c| c.state?.terminated);
        Ok(ended.map(|e| e.exit_code))
    })?;
    let listed: BTreeMap<String, (String, String)> =
        serde_json::from_str(&output(&mut place.kubectl(["exec", AGENT, "-c", "witness", "--", "python3", "-c", LIST]))?)?;
    let workspace: Files =
        listed.into_iter().map(|(path, (kind, content))| Ok((path, (kind, STANDARD.decode(content)?)))).collect::<Result<_>>()?;
    // The container may end before the command in it that ends it. Whether it has is seen by the pod's end.
    let _ = run(&mut place.kubectl(["exec", AGENT, "-c", "witness", "--", "python3", "-c", "import os; os.kill(1, 15)"]));
    place.agent_ends()?;
    place.sealed(AGENT)?;

    let shown = nine_spans(place, AGENT)?;
    for span in &shown.spans {
        ensure!(span.verdict == Verdict::Allow, "{} has the verdict {}", span.name, span.verdict);
        ensure!(span.snapshot_before && span.snapshot_after, "{} lacks a snapshot", span.name);
        let whole = place.span(AGENT, &span.id)?.span;
        let out = whole.output().with_context(|| format!("{} has no output", span.name))?;
        ensure!(!out.text.is_empty(), "the output of {} is empty", span.name);
        let code = match span.name.as_str() {
            "test_before" | "test_validate" => Some(1),
            "lint" => Some(0),
            _ => None,
        };
        ensure!(out.exit_code == code, "{} has the exit code {:?}", span.name, out.exit_code);
    }
    let bound = place.span(AGENT, "test_before")?.span.opening;
    ensure!(serde_json::to_string(&bound.input_bindings)?.contains("{{ select_tests | words }}"), "{:?}", bound.input_bindings);

    let last = place.span(AGENT, "summarize")?.span.snapshot_after.context("no last snapshot")?;
    let recorded = snapshot(place, &last.node.to_string())?;
    for (path, entry) in &workspace {
        ensure!(
            recorded.get(path) == Some(entry),
            "{path}: {:?} in the workspace, {:?} in the last snapshot",
            entry.0,
            recorded.get(path).map(|r| &r.0)
        );
    }
    ensure!(
        recorded.len() == workspace.len() && workspace.contains_key("auth/pool.py"),
        "the last snapshot has files that the workspace lacks"
    );
    Ok(())
}

/// All of a recorded workspace state, read through the api-server.
fn snapshot(place: &Place, state: &str) -> Result<Files> {
    let token = place.token("replayfork-user")?;
    let ask = |what: &str, path: &str| -> Result<Vec<u8>> {
        let url = format!("/api/v1/runs/{AGENT}/snapshots/{state}/{what}?namespace={}&path={path}", place.namespace);
        let answer = place.ask("GET", &url, Some(&token), None)?;
        ensure!(answer.status == 200, "{url}: {}", String::from_utf8_lossy(&answer.body));
        Ok(answer.body)
    };
    let (mut files, mut folders) = (Files::new(), vec![String::new()]);
    while let Some(folder) = folders.pop() {
        let listing: TreeListing = serde_json::from_slice(&ask("tree", &folder)?)?;
        for entry in listing.entries {
            let path = if folder.is_empty() { entry.name.clone() } else { format!("{folder}/{}", entry.name) };
            let (kind, content) = match entry.kind {
                TreeEntryKind::Directory => {
                    folders.push(path.clone());
                    ("directory", Vec::new())
                }
                TreeEntryKind::Symlink => ("symlink", entry.target.unwrap_or_default().into_bytes()),
                TreeEntryKind::File => ("file", ask("file", &path)?),
                TreeEntryKind::Executable => ("executable", ask("file", &path)?),
            };
            files.insert(path, (kind.to_owned(), content));
        }
    }
    Ok(files)
}

fn e2e_loops_of_spans_are_refused_or_do_no_harm_and_files_outside_of_the_workspace_are_not_written(place: &Place) -> Result<()> {
    place.recording_account("by-hand")?;
    let token = place.token("by-hand")?;
    let send = |path: &str, body: Value| place.ask("POST", path, Some(&token), Some(body));
    let run = send("/v1/runs", json!({"name": "loops", "agent": "by-hand", "environment": {"workspace_root": "/workspace"}}))?.json()?;
    let id = run["id"].as_str().context("the run has no id")?.to_owned();
    let span = |id: &str, started: i64, more: Value| {
        let mut opening =
            json!({"name": id, "kind": "ShellCommand", "started": started, "executor": {"type": "shell", "script": "true", "env": {}}});
        for (member, value) in more.as_object().into_iter().flatten() {
            opening[member] = value.clone();
        }
        json!({"id": id, "opening": opening, "closing": {"status": "Completed", "ended": started + 1, "output": {"text": ""}}})
    };
    let spans = |spans: Value| send(&format!("/v1/runs/{id}/spans"), json!({"spans": spans}));
    for (loops, words) in [
        (json!([span("a", 1_000, json!({"parent": "b"})), span("b", 2_000, json!({"parent": "a"}))]), ["\"a\"", "\"b\"", "parent"]),
        (
            json!([span("a", 1_000, json!({"depends_on": ["b"]})), span("b", 2_000, json!({"depends_on": ["a"]}))]),
            ["\"a\"", "\"b\"", "depends_on"],
        ),
        (
            json!([span("w", 1_000, json!({"kind": "FileWrite", "executor": {"type": "file_write", "path": "/etc/passwd"}}))]),
            ["\"w\"", "/etc/passwd", "/workspace"],
        ),
    ] {
        let answer = spans(loops)?;
        let said = answer.json()?["detail"].to_string().replace("\\\"", "\"");
        ensure!(answer.status == 400 && words.iter().all(|w| said.contains(w)), "{} {said}", answer.status);
    }
    // One after the other nobody sees the loop coming; what a span refers to may come later, or never.
    for one in [
        span("a", 1_000, json!({"parent": "b"})),
        span("b", 2_000, json!({"parent": "a", "depends_on": ["c"]})),
        span("c", 3_000, json!({"depends_on": ["b", "never"]})),
        span("d", 4_000, json!({"parent": "never"})),
    ] {
        let answer = spans(json!([one]))?;
        ensure!(answer.status == 200, "{} {}", answer.status, String::from_utf8_lossy(&answer.body));
    }
    let finished = send(&format!("/v1/runs/{id}/finish"), json!({"outcome": "Completed"}))?;
    ensure!(finished.status == 200, "{}", String::from_utf8_lossy(&finished.body));
    let command = |span: &str| json!([{"type": "CommandOverride", "span": span, "command": {"script": "echo"}}]);
    for span in ["c", "d"] {
        place.plan(&manifest("planned", "loops", span, command(span), json!({})))?;
    }
    let shown: Value = place.replay(&["show", "loops"])?;
    ensure!(shown["spans"].as_array().is_some_and(|s| s.len() == 4), "{shown}");
    Ok(())
}

fn e2e_recorder_off_records_nothing_and_the_agent_finishes(place: &Place) -> Result<()> {
    let mut objects = place.agent()?;
    let pod = objects.iter_mut().find(|o| o["kind"] == "Pod").context("the example has no pod")?;
    let recorder = pod["spec"]["initContainers"].as_array_mut().into_iter().flatten().find(|c| c["name"] == "recorder");
    let environment = recorder.context("the example has no recorder")?["env"].as_array_mut().context("it has no env")?;
    environment.push(json!({"name": "RECORDER", "value": "off"}));
    place.start_agent(&objects)?;
    let log = place.agent_ends()?;
    ensure!(log.contains("the agent gives up: the tests still fail"), "the agent did not come to its end:\n{log}");
    let runs: Value = place.replay(&["runs"])?;
    ensure!(runs["runs"] == json!([]), "something was recorded: {runs}");
    Ok(())
}

fn e2e_killed_recorder_loses_nothing_that_it_took(place: &Place) -> Result<()> {
    place.start_agent(&place.agent()?)?;
    // The test that now runs takes three seconds: its begin was taken by the old process, its end goes to the new one.
    place.agent_says("select_tests: Completed")?;
    place.world.kill_container(&place.namespace, AGENT, "recorder")?;
    let log = place.agent_ends()?;
    ensure!(!log.contains("not recorded"), "the agent was refused:\n{log}");
    let restarts = place.agent_container("recorder")?.context("no recorder")?.restart_count;
    ensure!(restarts == 1, "the recorder was started again {restarts} times");
    place.sealed(AGENT)?;
    nine_spans(place, AGENT).map(drop)
}

fn e2e_agent_finishes_without_the_api_server_and_its_run_arrives_later(place: &Place) -> Result<()> {
    place.world.scale_api_server(0)?;
    let ended = (|| {
        place.start_agent(&place.agent()?)?;
        until("the agent has ended", Duration::from_secs(120), || {
            Ok(place.agent_container("agent")?.and_then(|c| c.state?.terminated).map(|ended| ended.exit_code))
        })
    })();
    place.world.scale_api_server(1)?;
    ensure!(ended? == 0, "the agent failed");
    place.agent_ends()?;
    place.sealed(AGENT)?;
    nine_spans(place, AGENT).map(drop)
}
