//! TLS on every connection of the product's own: to the api-server, and from it to Postgres.

use anyhow::{Context, Result, ensure};
use replayfork_test_cluster::command::{output, succeeds};
use replayfork_test_cluster::install::{Install, NAMESPACE};
use replayfork_tests::certificate::Certificate;
use replayfork_tests::fork::{OBJECTS, manifest, script};
use replayfork_tests::place::{AGENT, Place};
use replayfork_tests::until;
use serde_json::json;

use crate::{Scenario, scenarios};

pub const ALONE: &[Scenario] = scenarios![e2e_fork_runs_over_tls_and_the_database_is_asked_over_tls];

const SECRET: &str = "replayfork-tls";

fn e2e_fork_runs_over_tls_and_the_database_is_asked_over_tls(place: &Place) -> Result<()> {
    place.record()?;
    let Certificate { certificate, key } = Certificate::for_server(&format!("DNS:replayfork-api.{NAMESPACE}.svc"))?;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": {"name": SECRET, "namespace": NAMESPACE},
        "stringData": {"tls.crt": certificate, "tls.key": key, "ca.crt": certificate},
    });
    place.world.kube.apply(&secret.to_string())?;
    let plain = &place.world.install;
    let authority = output(&mut place.kubectl(["get", "configmap", "kube-root-ca.crt", "-o", "jsonpath={.data.ca\\.crt}"]))?;
    let encrypted = Install {
        database_url: format!("{}?sslmode=require", plain.database_url),
        database_ca: Some(authority),
        values: json!({"tls": {"existingSecret": SECRET}}),
        ..plain.clone()
    };
    let seen = place.world.reinstall(&encrypted).and_then(|()| over_tls(place));
    place.world.reinstall(plain)?;
    seen
}

fn over_tls(place: &Place) -> Result<()> {
    let connections = "SELECT coalesce(bool_and(ssl), false) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE application_name = 'replayfork-api-server'";
    until("all connections to Postgres are encrypted", OBJECTS, || Ok((place.world.sql(connections)? == "t").then_some(())))?;
    let fork = place.fork(&manifest("over-tls", AGENT, "lint", json!([script("lint", "echo over TLS")]), json!({})))?;
    fork.succeeds()?;
    fork.left(&["lint Completed Reexecuted"])?;
    let pod = fork.pods()?.into_iter().next().and_then(|pod| pod.spec).context("the fork has no pod")?;
    let courier = pod.containers.iter().find(|c| c.name == "courier").and_then(|c| c.env.as_ref()).context("no courier")?;
    let url = courier.iter().find(|v| v.name == "REPLAYFORK_API_URL").and_then(|v| v.value.as_deref()).unwrap_or_default();
    ensure!(url.starts_with("https://"), "the courier asks {url}");
    let replay = |api: &str| place.world.kube.kubectl(["replay", "show", "over-tls", "lint", "-n", &place.namespace, "--api", api]);
    let shown = output(&mut replay("replayfork-system/https:replayfork-api"))?;
    ensure!(shown.contains("over TLS"), "kubectl replay shows\n{shown}");
    ensure!(!succeeds(&mut replay("replayfork-system/http:replayfork-api")), "the api-server still speaks plain HTTP");
    Ok(())
}
