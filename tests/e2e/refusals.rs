//! What is refused: with field, value and remedy, in the same words wherever it is asked.

use anyhow::{Context, Result, ensure};
use replayfork_test_cluster::command::{self, feed, output};
use replayfork_tests::fork::manifest;
use replayfork_tests::place::{AGENT, Place};
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const SCENARIOS: &[Scenario] = scenarios![
    e2e_fork_that_has_no_plan_says_field_value_and_remedy,
    e2e_wrong_or_edited_spec_is_refused_by_kubectl_apply,
    e2e_spec_that_is_nested_too_deep_is_refused_and_holds_up_no_other,
    e2e_plan_reads_yaml_as_the_cluster_does,
    e2e_several_forks_in_a_file_are_planned_each_and_text_is_what_json_says,
    e2e_no_token_and_a_foreign_namespace_are_refused_with_the_way_in,
];

fn environment() -> Value {
    json!([{"type": "EnvVarOverride", "env": [{"name": "A", "value": "1"}]}])
}

fn e2e_fork_that_has_no_plan_says_field_value_and_remedy(place: &Place) -> Result<()> {
    place.record()?;
    place.recording_account("by-hand")?;
    let span = |id: &str, started: i64| {
        json!({"id": id, "opening": {"name": "twice", "kind": "ShellCommand", "started": started, "executor": {"type": "shell", "script": "true", "env": {}}},
               "closing": {"status": "Completed", "verdict": "allow", "ended": started + 1, "output": {"text": "", "exit_code": 0}}})
    };
    place.record_spans(&place.token("by-hand")?, "two-of-a-name", &[span("first", 1_000), span("second", 2_000)])?;
    let command = json!([{"type": "CommandOverride", "command": {"script": "true"}}]);
    let output = json!([{"type": "ToolOutputOverride", "output": {"text": "x"}}]);
    // Name, run, span, patches; the reason; what the message names.
    let refused = [
        ("no-run", "no-such-run", "lint", environment(), "RunNotFound", vec!["spec.source.run", "\"no-such-run\"", "kubectl replay runs"]),
        (
            "no-span",
            AGENT,
            "no-such-span",
            environment(),
            "SpanNotFound",
            vec!["spec.source.span", "\"no-such-span\"", "kubectl replay show"],
        ),
        (
            "ambiguous",
            "two-of-a-name",
            "twice",
            environment(),
            "SpanAmbiguous",
            vec!["spec.source.span", "\"twice\"", "by its id", "first", "second"],
        ),
        (
            "not-a-command",
            AGENT,
            "gen_fix",
            command,
            "PatchRefused",
            vec!["spec.patches[0]", "CommandOverride", "gen_fix", "LlmCall", "use "],
        ),
        ("not-a-tool", AGENT, "gen_fix", output, "PatchRefused", vec!["spec.patches[0]", "ToolOutputOverride", "gen_fix", "LlmCall"]),
    ];
    for (name, run, span, patches, reason, names) in refused {
        let manifest = manifest(name, run, span, patches, json!({}));
        let planned = place.plan(&manifest).err().with_context(|| format!("{name} was planned"))?;
        let fork = place.fork(&manifest)?;
        let message = fork.ends_as(reason)?.message;
        for word in names {
            ensure!(message.contains(word), "{name}: the message does not say {word:?}: {message}");
        }
        ensure!(format!("{planned:#}").contains(&message), "{name}: the plan says\n{planned:#}\nand the condition\n{message}");
        let condition = fork.condition("Planned")?;
        ensure!(condition.status == "False" && condition.message == message, "{name}: Planned is {condition:?}");
        fork.had_no_pod()?;
    }
    Ok(())
}

fn e2e_wrong_or_edited_spec_is_refused_by_kubectl_apply(place: &Place) -> Result<()> {
    let refused = |manifest: &str, words: &[&str]| -> Result<()> {
        let mut apply = place.kubectl(["apply", "-f", "-"]);
        let mut plan = place.world.kube.kubectl(["replay", "plan", "-f", "-", "-n", &place.namespace]);
        for (what, command) in [("kubectl apply", &mut apply), ("kubectl replay plan", &mut plan)] {
            let error = feed(command, manifest).err().with_context(|| format!("{what} took {manifest}"))?;
            for word in words {
                ensure!(format!("{error:#}").contains(word), "{what} does not say {word:?}:\n{error:#}");
            }
        }
        Ok(())
    };
    let with = |patch: Value| manifest("wrong", AGENT, "lint", json!([patch]), json!({}));
    refused(&with(json!({"type": "EnvVarOverride", "command": {"script": "true"}})), &["each patch takes exactly the member of its type"])?;
    refused(&with(json!({"type": "NoSuchOverride"})), &["spec.patches[0].type", "NoSuchOverride", "EnvVarOverride"])?;
    refused(&with(json!({"type": "EnvVarOverride", "env": [{"name": "1A"}]})), &["spec.patches[0].env[0].name", "1A"])?;
    refused(&with(json!({"type": "CommandOverride", "command": {"script": "true", "reads": ["a"]}})), &["reads and writes together"])?;
    let many = manifest("wrong", AGENT, "lint", json!(vec![environment()[0].clone(); 17]), json!({}));
    refused(&many, &["spec.patches", "must have at most 16 items"])?;
    for (patch, says) in [
        (
            json!({"type": "FileContentOverride", "files": [{"path": "a", "content": "b", "contentFrom": {"digest": "c"}}]}),
            "either content or contentFrom",
        ),
        (json!({"type": "ToolOutputOverride", "output": {"exitCode": 1}}), "either text or contentFrom"),
        (
            json!({"type": "PromptEdit", "prompt": {"system": "a", "messages": []}}),
            "exactly one of system, message, messages and contentFrom",
        ),
        (json!({"type": "SnapshotOverride", "files": [{"path": "a", "content": "b"}]}), "snapshot for SnapshotOverride"),
    ] {
        refused(&with(patch), &[says])?;
    }
    for (model, says) in [
        (json!({"mode": "Endpoint"}), "model.endpoint belongs to mode Endpoint"),
        (json!({"mode": "Blocked", "command": {"argv": ["model"]}}), "model.command belongs to mode Command"),
        (json!({"mode": "Recorded", "fixtures": {}}), "either inline or contentFrom"),
    ] {
        refused(&manifest("wrong", AGENT, "lint", environment(), json!({"model": model})), &[says])?;
    }
    let misspelt = manifest("wrong", AGENT, "lint", environment(), json!({"modell": {}}));
    refused(&misspelt, &["unknown field \"spec.modell\""])?;
    let sandbox = |sandbox: Value| manifest("wrong", AGENT, "lint", environment(), json!({"sandbox": sandbox}));
    for (value, words) in [
        (json!({"resources": {"limits": {"cpu": "lots"}}}), ["spec.sandbox.resources.limits.cpu", "should match"]),
        (json!({"resources": {"requests": {"memory": "-1Gi"}}}), ["spec.sandbox.resources.requests.memory", "should match"]),
        (json!({"scratchSize": "1.5Gi"}), ["spec.sandbox.scratchSize", "should match"]),
        (json!({"image": "not an image"}), ["spec.sandbox.image", "should match"]),
        (json!({"egress": [{"cidr": "10.0.0.1", "ports": [{"port": 443}]}]}), ["spec.sandbox.egress[0].cidr", "no CIDR, like"]),
        (json!({"egress": [{"cidr": "10.0.0.0/8", "ports": [{"port": 443}]}]}), ["spec.sandbox.egress[0].cidr", "too wide; at least /16"]),
        (json!({"egress": [{"cidr": "2001:db8::/31", "ports": [{"port": 443}]}]}), ["spec.sandbox.egress[0].cidr", "/32 for IPv6"]),
    ] {
        refused(&sandbox(value), &words)?;
    }
    refused(&manifest("Not_A_Name", AGENT, "lint", environment(), json!({})), &["metadata.name", "Not_A_Name", "RFC 1123 subdomain"])?;
    let elsewhere = manifest("wrong", AGENT, "lint", environment(), json!({}))
        .replace("\"name\":\"wrong\"", "\"name\":\"wrong\",\"namespace\":\"default\"");
    refused(&elsewhere, &["the namespace from the provided object \"default\" does not match the namespace"])?;

    let fork = place.fork(&manifest("edited", AGENT, "lint", environment(), json!({"suspend": true})))?;
    let edited = [
        ("spec.source", manifest("edited", AGENT, "plan", environment(), json!({"suspend": true}))),
        (
            "spec.patches",
            manifest("edited", AGENT, "lint", json!([{"type": "ToolOutputOverride", "output": {"text": "x"}}]), json!({"suspend": true})),
        ),
        ("spec.sandbox", manifest("edited", AGENT, "lint", environment(), json!({"suspend": true, "sandbox": {"runAsUser": 7}}))),
    ];
    for (field, manifest) in edited {
        refused(&manifest, &[&format!("{field} can't be changed; create a new ReplayFork")])?;
    }
    // What may change is changed.
    fork.patch(json!({"ttlSecondsAfterFinished": 7, "deletionPolicy": "DeleteRun", "suspend": false}))
}

fn e2e_several_forks_in_a_file_are_planned_each_and_text_is_what_json_says(place: &Place) -> Result<()> {
    place.record()?;
    let output = |text: &str| json!([{"type": "ToolOutputOverride", "output": {"text": text}}]);
    let two = [manifest("one", AGENT, "lint", output("fine"), json!({})), manifest("other", AGENT, "gen_fix", environment(), json!({}))];
    let both = format!("{}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: beside}}\n---\n{}\n", two[0], two[1]);
    let plan = |arguments: &[&str], text: &str| {
        let mut plan = place.world.kube.kubectl(["replay", "plan", "-f", "-", "-n", &place.namespace]);
        feed(plan.args(arguments), text)
    };
    let shown: Value = serde_json::from_str(&plan(&["-o", "json"], &both)?)?;
    let names: Vec<_> = shown["plans"].as_array().into_iter().flatten().map(|p| p["fork"].as_str().unwrap_or_default()).collect();
    ensure!(names == ["one", "other"], "{shown}");
    let table = plan(&[], &both)?;
    ensure!(table.contains("replayfork/one\n") && table.contains("replayfork/other\n"), "the tables don't say whose they are:\n{table}");
    let bad = format!("{}\n---\n{}", two[0], manifest("bad", AGENT, "no-such-span", environment(), json!({})));
    let error = format!("{:#}", plan(&[], &bad).err().context("a bad one beside a good one was planned")?);
    ensure!(error.contains("replayfork/bad: spec.source.span") && error.contains("1 of 2 forks"), "{error}");

    // What blocks is told with what it is about.
    let blocked = plan(&[], &manifest("blocked", AGENT, "read_src", output("another file"), json!({})))?;
    ensure!(blocked.contains("ModelBlocked: "), "the reason stands alone:\n{blocked}");

    let smile = manifest("smile", AGENT, "lint", output("smile"), json!({})).replace("smile\"}}", "\\ud83d\\ude00\"}}");
    ensure!(smile.contains("\\ud83d"), "{smile}");
    place.plan(&smile)?;

    // NUL is no character of any name, and no reason to fail.
    let nul = manifest("nul", AGENT, "lint", output("a\0b"), json!({}));
    let planned = format!("{:#}", place.plan(&nul).err().context("a NUL was planned")?);
    let fork = place.fork(&nul)?;
    let message = fork.ends_as("SpecInvalid")?.message;
    ensure!(message.contains("NUL") && planned.contains(&message), "the plan says\n{planned}\nand the condition\n{message}");
    let token = place.token("replayfork-user")?;
    for path in ["/api/v1/runs?q=%00", "/api/v1/runs?agent=a%00b", "/api/v1/runs/%00", "/api/v1/runs/scripted-agent/spans/%00"] {
        let path = format!("{path}{}namespace={}", if path.contains('?') { '&' } else { '?' }, place.namespace);
        let answer = place.ask("GET", &path, Some(&token), None)?;
        let said = answer.json()?;
        ensure!(answer.status == 400 && said["reason"] == "NulCharacter", "{path}: {} {said}", answer.status);
    }
    // What is refused before anybody here has seen it is refused in the same form.
    for (method, path, status) in [("GET", "/api/v1/runs?limit=abc", 400), ("GET", "/api/v1/runs/%ff", 400), ("PUT", "/api/v1/runs", 405)] {
        let answer = place.ask(method, path, Some(&token), None)?;
        let said = answer.json()?;
        ensure!(answer.status == status && said["status"] == status && said["detail"] != "", "{method} {path}: {} {said}", answer.status);
    }
    Ok(())
}

fn e2e_no_token_and_a_foreign_namespace_are_refused_with_the_way_in(place: &Place) -> Result<()> {
    let runs = format!("/api/v1/runs?namespace={}", place.namespace);
    let detail = |status: u16, path: &str, token: Option<&str>| -> Result<String> {
        let answer = place.ask("GET", path, token, None)?;
        ensure!(answer.status == status, "{path}: {} {}", answer.status, String::from_utf8_lossy(&answer.body));
        Ok(answer.json()?["detail"].as_str().unwrap_or_default().to_owned())
    };
    for token in [None, Some("not-a-token")] {
        let said = detail(401, &runs, token)?;
        ensure!(said.contains("kubectl replay") && said.contains("kubectl create token"), "a 401 shows no way in: {said}");
    }
    let token = place.token("replayfork-user")?;
    ensure!(place.ask("GET", &runs, Some(&token), None)?.status == 200, "the namespace's own user is refused");
    let said = detail(403, "/api/v1/runs?namespace=default", Some(&token))?;
    for word in ["replayfork-user", "list runs", "\"default\"", "replayfork-view"] {
        ensure!(said.contains(word), "a 403 does not say {word:?}: {said}");
    }
    // Who may read may not record; and what belongs to the operator is nobody's.
    let refused = place.ask("POST", "/v1/runs", Some(&token), Some(json!({"name": "x", "agent": "x"})))?;
    ensure!(refused.status == 403, "a reader may record: {}", refused.status);
    ensure!(place.ask("GET", "/api/v1/forks", Some(&token), None)?.status == 403, "a user may operate forks");
    Ok(())
}

/// The cluster stores what no reader can follow.
fn e2e_spec_that_is_nested_too_deep_is_refused_and_holds_up_no_other(place: &Place) -> Result<()> {
    let request = json!({"model": "m", "messages": [{"role": "user", "content": "well?"}]});
    let run = place.recorded_by(&[
        json!({"id": "find", "opening": {"name": "find", "kind": "Retrieval"}, "closing": {"status": "Completed", "output": {"text": "[]"}}}),
        json!({"id": "use", "opening": {"name": "use", "kind": "ShellCommand", "workspace": "none", "executor": {"type": "shell", "script": "echo []"},
            "input_bindings": {"script": "echo {{ find | quote }}"}}, "closing": {"status": "Completed", "output": {"text": "[]\n", "exit_code": 0}}}),
        json!({"id": "ask", "opening": {"name": "ask", "kind": "LlmCall", "executor": {"type": "model", "provider": "p", "request": request}},
            "closing": {"status": "Completed", "output": {"text": "well."}}}),
    ])?;
    let edit = json!([{"type": "ModelConfigEdit", "modelConfig": {"parameters": {"a": "DEEP"}}}]);
    let deep = manifest("deep", &run, "ask", edit, json!({})).replace("\"DEEP\"", &format!("{}1{}", "[".repeat(1000), "]".repeat(1000)));
    place.apply(&deep)?;
    command::run(&mut place.kubectl(["wait", "--for=condition=Finished", "--timeout=60s", "replayfork/deep"]))?;
    let path = "jsonpath={.status.conditions[?(@.type==\"Succeeded\")].message}";
    let said = output(&mut place.kubectl(["get", "replayfork", "deep", "-o", path]))?;
    ensure!(said.contains("spec.patches[0].modelConfig.parameters.a: it is nested deeper than 64 levels"), "{said}");
    // Nulls are JSON too. This fork is seen beside the other one, and ends.
    let documents = json!([{"type": "RetrievalContextOverride", "retrieval": {"documents": [1.5, null, {"a": [null], "é": "🦀"}]}}]);
    let fork = place.fork(&manifest("nulls", &run, "find", documents, json!({})))?;
    fork.succeeds()?;
    let used = place.span(&fork.run()?, "use")?.span.output().map(|o| o.stdout.clone()).unwrap_or_default();
    ensure!(used == "[1.5,null,{\"a\":[null],\"é\":\"🦀\"}]\n", "{used:?}");
    Ok(())
}

/// YAML 1.1: `010` is eight, and `yes` is true.
fn e2e_plan_reads_yaml_as_the_cluster_does(place: &Place) -> Result<()> {
    let request = json!({"model": "m", "messages": [{"role": "user", "content": "well?"}]});
    let run = place.recorded_by(&[
        json!({"id": "ask", "opening": {"name": "ask", "kind": "LlmCall", "executor": {"type": "model", "provider": "p", "request": request}},
            "closing": {"status": "Completed", "output": {"text": "well."}}}),
    ])?;
    let edit = json!([{"type": "ModelConfigEdit", "modelConfig": {"parameters": {"seed": "SEED", "stop": "STOP"}}}]);
    let fork = |name: &str, seed: &str, stop: &str| {
        manifest(name, &run, "ask", edit.clone(), json!({})).replace("\"SEED\"", seed).replace("\"STOP\"", stop)
    };
    let plain = place.plan(&fork("plain", "8", "true"))?;
    for (seed, stop) in [("010", "yes"), ("0x8", "on")] {
        let told = place.plan(&fork("plain", seed, stop))?;
        ensure!(told.digest == plain.digest, "{seed} and {stop} are planned as something else than 8 and true");
    }
    let made = place.fork(&fork("made", "010", "yes"))?;
    made.ends_as("Blocked")?;
    made.agrees_with(&plain)
}
