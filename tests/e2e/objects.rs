//! Packs of blobs in an object store instead of in Postgres.

use anyhow::{Context, Result, ensure};
use replayfork_test_cluster::install::{Install, NAMESPACE};
use replayfork_tests::fork::{manifest, script};
use replayfork_tests::place::{AGENT, Place};
use replayfork_tests::s3;
use serde_json::{Map, json};

use crate::{Scenario, scenarios};

/// The api-server keeps the store that it was given: packs lie there from now on.
pub const LAST: &[Scenario] = scenarios![e2e_workspaces_lie_in_s3_and_forks_are_restored_from_there];

const SECRET: &str = "blobs";

fn e2e_workspaces_lie_in_s3_and_forks_are_restored_from_there(place: &Place) -> Result<()> {
    let world = place.world;
    let address = world.addresses().host_ip().parse().context("the host's address")?;
    let store = world.wait(s3::Server::start(address))?;
    let settings: Map<_, _> = store.settings().into_iter().map(|(name, value)| (name, json!(value))).collect();
    let secret =
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, "namespace": NAMESPACE}, "stringData": settings});
    world.kube.apply(&secret.to_string())?;
    let values = json!({"blobs": {"collectIntervalSeconds": 1, "store": {"url": store.url(), "existingSecret": SECRET}}});
    world.reinstall(&Install { values, ..world.install.clone() })?;

    place.record()?;
    let in_objects = format!(
        "SELECT count(*) FILTER (WHERE object IS NOT NULL) > 0 AND count(data) = 0 FROM packs JOIN namespaces USING (ns) WHERE name = '{}'",
        place.namespace
    );
    ensure!(world.sql(&in_objects)? == "t", "packs of the recorded run are in Postgres");
    let fork = place.fork(&manifest("restored", AGENT, "lint", json!([script("lint", "ls > listed; echo from S3")]), json!({})))?;
    fork.succeeds()?;
    fork.left(&["lint Completed Reexecuted"])?;
    let listed = fork.file_after("lint", "listed")?;
    ensure!(listed.contains("run_tests.py"), "the fork's workspace has\n{listed}");
    let said = place.told(&["diff", AGENT, &fork.run()?])?;
    ensure!(said.contains("listed"), "the diff says\n{said}");
    Ok(())
}
