//! Model calls that the api-server makes for forks, to a service that the installation names.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;
use replayfork_test_cluster::command::output;
use replayfork_test_cluster::install::{Install, NAMESPACE};
use replayfork_tests::fork::{Fork, OBJECTS, manifest};
use replayfork_tests::place::{AGENT, Place};
use replayfork_tests::until;
use serde_json::{Value, json};

use crate::{Scenario, scenarios};

pub const ALONE: &[Scenario] = scenarios![e2e_endpoint_answers_through_the_api_server_and_no_pod_has_its_key];

const KEY: &str = "sk-e2e-5f1c9e";

fn e2e_endpoint_answers_through_the_api_server_and_no_pod_has_its_key(place: &Place) -> Result<()> {
    place.record()?;
    serve(place)?;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "staging-models", "namespace": NAMESPACE}, "stringData": {"api-key": format!("{KEY}\n")},
    });
    place.world.kube.apply(&secret.to_string())?;
    let url = format!("http://models.{}.svc:8080/v1", place.namespace);
    let key = json!({"name": "staging-models", "key": "api-key"});
    let plain = &place.world.install;
    let with_endpoints = Install {
        values: json!({"models": {"endpoints": {
            "staging": {"url": url, "existingSecret": key, "models": ["scripted-1"], "namespaces": [place.namespace], "timeoutSeconds": 20},
            "keyless": {"url": url},
            "gone": {"url": "http://127.0.0.1:9/v1"},
            "others": {"url": url, "namespaces": ["some-other-namespace"]},
        }}}),
        ..plain.clone()
    };
    let seen = place.world.reinstall(&with_endpoints).and_then(|()| asks(place));
    place.world.reinstall(plain)?;
    seen
}

/// Starts the service in the scenario's namespace.
fn serve(place: &Place) -> Result<()> {
    let image = place.agent()?.iter().find(|o| o["kind"] == "Pod").map(|pod| pod["spec"]["containers"][0]["image"].clone());
    let security = json!({"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}});
    let labels = json!({"app": "models"});
    let objects = [
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "models"}, "data": {"server.py": include_str!("model_server.py")}}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "models"}, "spec": {"selector": labels, "ports": [{"port": 8080}]}}),
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "models", "labels": labels}, "spec": {
            "securityContext": {"runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            "automountServiceAccountToken": false, "terminationGracePeriodSeconds": 1,
            "containers": [{"name": "server", "image": image, "command": ["python3", "/server/server.py"], "env": [{"name": "KEY", "value": KEY}],
                "securityContext": security, "volumeMounts": [{"name": "server", "mountPath": "/server"}],
                "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1}}],
            "volumes": [{"name": "server", "configMap": {"name": "models"}}]}}),
    ];
    place.apply(&objects.map(|o| o.to_string()).join("\n---\n"))?;
    until("the model service is ready", OBJECTS, || {
        let pods: Api<Pod> = place.api();
        let conditions = place.world.wait(pods.get("models"))?.status.and_then(|s| s.conditions).unwrap_or_default();
        Ok(conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True").then_some(()))
    })
}

/// Another prompt for the last step, and further patches, answered by this endpoint.
fn brief(name: &str, more: Value, endpoint: &str) -> String {
    let mut edits = vec![json!({"type": "PromptEdit", "span": "summarize", "prompt": {"system": "be brief"}})];
    edits.extend(more.as_array().cloned().unwrap_or_default());
    manifest(name, AGENT, "summarize", json!(edits), json!({"model": {"mode": "Endpoint", "endpoint": endpoint}}))
}

/// The calls that the service has seen.
fn calls(place: &Place) -> Result<Vec<Value>> {
    output(&mut place.kubectl(["logs", "models"]))?.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn closing(fork: &Fork, span: &str) -> Result<Value> {
    let closing = fork.place.span(&fork.run()?, span)?.span.closing.context("no closing")?;
    Ok(serde_json::to_value(closing)?)
}

fn asks(place: &Place) -> Result<()> {
    let whole = brief("whole", json!([]), "staging");
    let plan = place.plan(&whole)?;
    let fork = place.fork(&whole)?;
    fork.succeeds()?;
    fork.agrees_with(&plan)?;
    fork.left(&["summarize Completed Reexecuted"])?;
    let said = closing(&fork, "summarize")?;
    ensure!(said["output"]["text"] == "asked: Say in a sentence how this went: é🦀", "{said}");
    ensure!(said["input_tokens"] == 11 && said["output_tokens"] == 5 && said["cost_usd"] == 0.25, "{said}");
    let seen = calls(place)?;
    ensure!(seen.len() == 1 && seen[0]["allowed"] == true && seen[0]["request"]["messages"][0]["content"] == "be brief", "{seen:#?}");
    // The pod asks the api-server and nobody else: it neither has the key nor knows the address.
    let pod = serde_json::to_string(&fork.pods()?)?;
    ensure!(!pod.contains(KEY) && !pod.contains("models.") && !pod.contains("staging-models"), "{pod}");

    let stream = json!([{"type": "ModelConfigEdit", "span": "summarize", "modelConfig": {"parameters": {"stream": true}}}]);
    let streamed = place.fork(&brief("streamed", stream, "staging"))?;
    streamed.succeeds()?;
    let again = closing(&streamed, "summarize")?;
    ensure!(again["output"]["text"] == said["output"]["text"] && again["input_tokens"] == 11, "{again}");
    let seen = calls(place)?;
    ensure!(seen.len() == 2 && seen[1]["request"]["stream"] == true, "{seen:#?}");

    // A call without an answer is the step's failure, and says why.
    let other = json!([{"type": "ModelConfigEdit", "span": "summarize", "modelConfig": {"model": "huge-9"}}]);
    for (name, more, at, says) in [
        ("not-allowed", other, "staging", "does not allow the model \"huge-9\"; it allows: scripted-1"),
        ("no-key", json!([]), "keyless", "401 Unauthorized: {\"error\": {\"message\": \"wrong key\"}}"),
        ("nobody", json!([]), "gone", "endpoint \"gone\": it can't be reached"),
    ] {
        let fork = place.fork(&brief(name, more, at))?;
        fork.succeeds()?;
        let said = closing(&fork, "summarize")?;
        ensure!(said["status"] == "Failed" && said["error"].as_str().unwrap_or_default().contains(says), "{name}: {said}");
    }
    for (name, at) in [("unknown", "nowhere"), ("of-others", "others")] {
        let refused = place.fork(&brief(name, json!([]), at))?.ends_as("SpecInvalid")?;
        let says = format!("no endpoint {at:?} for namespace {:?}; it has: gone, keyless, staging", place.namespace);
        ensure!(refused.message.contains(&says), "{}", refused.message);
    }
    let logged =
        output(&mut place.world.kube.kubectl(["logs", "-n", NAMESPACE, "-l", "app.kubernetes.io/component=api-server", "--tail=-1"]))?;
    ensure!(!logged.contains(KEY), "the api-server logs the key");
    Ok(())
}
