//! What the chart refuses, and in which words.

use crate::render::{DATABASE, refused, template};

#[test]
fn without_a_database_it_says_how_to_give_one() {
    let words = refused(&[]);
    assert!(words.contains("database.existingSecret is not set"), "{words}");
    assert!(words.contains("kubectl -n rf create secret generic replayfork-database"), "{words}");
}

#[test]
fn an_old_cluster_is_refused() {
    let done = template(&[DATABASE], "1.31.9");
    assert!(!done.status.success());
    let words = String::from_utf8(done.stderr).unwrap();
    assert!(words.contains("1.32.0"), "{words}");
    // Providers add a suffix to the version.
    assert!(template(&[DATABASE], "1.32.4-gke.100").status.success());
}

#[test]
fn mistakes_in_values_are_refused_by_name() {
    for (setting, place) in [
        ("images.registri=x", "registri"),
        ("images.registry=host/path/", "registry"),
        ("auth.mode=none", "mode"),
        ("sandbox.defaultRunAsUser=0", "defaultRunAsUser"),
        ("apiServer.replicas=0", "replicas"),
        ("namespaces=[\"Agents\"]", "namespaces"),
        ("viewer.url=replay.example", "url"),
        ("log.format=yaml", "format"),
        ("limits.contentBytes=12", "contentBytes"),
        ("blobs.collectIntervalSeconds=0", "collectIntervalSeconds"),
        ("blobs.store.url=http://store", "blobs"),
        ("blobs.store.url=file:///blobs", "blobs.store.existingClaim"),
        ("blobs.store.existingClaim=blobs", "blobs.store.existingClaim"),
        ("blobs.store.existingSecret=blobs", "blobs.store.existingSecret"),
        ("models.endpoints={\"a\": {\"url\": \"models.example\"}}", "url"),
        ("models.endpoints={\"a\": {\"url\": \"http://m/v1\", \"key\": \"sk-1\"}}", "key"),
        ("models.endpoints={\"A b\": {\"url\": \"http://m/v1\"}}", "A b"),
    ] {
        let words = refused(&[DATABASE, setting]);
        assert!(words.contains(place), "{setting}: {words}");
    }
}
