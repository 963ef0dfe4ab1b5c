//! Helm, and what it renders.

use std::process::{Command, Output};

use replayfork_test_cluster::parts::Part;
use replayfork_test_cluster::workspace::project;
use serde::Deserialize;
use serde_json::Value;

pub const DATABASE: &str = "database.existingSecret=replayfork-database";

pub fn helm(arguments: &[&str]) -> Output {
    let home = tempfile::tempdir().unwrap();
    let mut helm = Command::new(Part::Helm.build().unwrap().join("helm"));
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        helm.env(variable, home.path());
    }
    helm.args(arguments).output().unwrap()
}

pub fn template(settings: &[&str], kubernetes: &str) -> Output {
    let chart = project().join("charts/replayfork");
    let mut arguments = vec!["template", "my-release", chart.to_str().unwrap(), "--namespace", "rf", "--kube-version", kubernetes];
    for setting in settings {
        // `--set-json` keeps null, numbers and lists what they are.
        arguments.extend([
            if ["=null", "=[", "={\""].iter().any(|literal| setting.contains(literal)) { "--set-json" } else { "--set" },
            setting,
        ]);
    }
    helm(&arguments)
}

/// The objects that a release with these values consists of.
pub fn rendered(settings: &[&str]) -> Vec<Value> {
    let done = template(&[&[DATABASE], settings].concat(), "1.33.0");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let text = String::from_utf8(done.stdout).unwrap();
    let documents = serde_yaml_ng::Deserializer::from_str(&text).map(|document| Value::deserialize(document).unwrap());
    documents.filter(|document| !document.is_null()).collect()
}

/// Helm's words when it refuses these values.
pub fn refused(settings: &[&str]) -> String {
    let done = template(settings, "1.33.0");
    assert!(!done.status.success(), "these values were taken: {settings:?}");
    String::from_utf8(done.stderr).unwrap()
}

pub fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    maybe(objects, kind, name).unwrap_or_else(|| panic!("no {kind} {name}"))
}

pub fn maybe<'a>(objects: &'a [Value], kind: &str, name: &str) -> Option<&'a Value> {
    objects.iter().find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
}

pub fn pod<'a>(objects: &'a [Value], deployment: &str) -> &'a Value {
    &find(objects, "Deployment", deployment)["spec"]["template"]["spec"]
}

pub fn env(objects: &[Value], deployment: &str, name: &str) -> Option<Value> {
    let env = pod(objects, deployment)["containers"][0]["env"].as_array().unwrap();
    env.iter().find(|variable| variable["name"] == name).map(|variable| variable["value"].clone())
}
