//! The objects, by the values they follow from.

use replayfork_test_cluster::workspace::project;
use serde_json::{Value, json};

use crate::render::{DATABASE, env, find, helm, maybe, pod, rendered};

#[test]
fn it_lints() {
    let chart = project().join("charts/replayfork");
    let done = helm(&["lint", "--strict", chart.to_str().unwrap(), "--set", DATABASE]);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&[done.stdout, done.stderr].concat()));
}

#[test]
fn both_parts_satisfy_the_restricted_standard() {
    let objects = rendered(&[]);
    for deployment in ["replayfork-api-server", "replayfork-operator"] {
        let pod = pod(&objects, deployment);
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        let container = &pod["containers"][0]["securityContext"];
        assert_eq!(container["allowPrivilegeEscalation"], false);
        assert_eq!(container["readOnlyRootFilesystem"], true);
        assert_eq!(container["capabilities"]["drop"], json!(["ALL"]));
        assert!(pod["containers"][0]["resources"]["requests"]["memory"].is_string());
        assert!(pod["containers"][0]["resources"]["limits"]["memory"].is_string());
    }
}

#[test]
fn on_openshift_the_uid_can_be_left_to_the_cluster() {
    let objects = rendered(&["podSecurityContext.runAsUser=null", "podSecurityContext.runAsGroup=null"]);
    let context = pod(&objects, "replayfork-operator")["securityContext"].as_object().unwrap();
    assert!(!context.contains_key("runAsUser") && !context.contains_key("runAsGroup"), "{context:?}");
    assert_eq!(context["runAsNonRoot"], true);
}

#[test]
fn images_come_from_the_given_registry() {
    let objects = rendered(&["images.registry=registry.example/team", "images.tag=v9", "images.pullPolicy=Always"]);
    let container = &pod(&objects, "replayfork-api-server")["containers"][0];
    assert_eq!(container["image"], "registry.example/team/replayfork/api-server:v9");
    assert_eq!(container["imagePullPolicy"], "Always");
    let courier = env(&objects, "replayfork-operator", "REPLAYFORK_COURIER_IMAGE").unwrap();
    assert_eq!(courier, "registry.example/team/replayfork/sandbox:v9");
    // Without a registry the name has no leading slash.
    assert_eq!(pod(&rendered(&[]), "replayfork-operator")["containers"][0]["image"], "replayfork/operator:0.1.0");
}

#[test]
fn the_service_has_one_name_and_selects_what_the_operator_is_told() {
    let objects = rendered(&[]);
    let service = find(&objects, "Service", "replayfork-api");
    assert_eq!(service["spec"]["ports"][0], json!({"name": "http", "port": 3210, "targetPort": "http"}));
    let selector = service["spec"]["selector"].as_object().unwrap();
    let told = env(&objects, "replayfork-operator", "REPLAYFORK_API_POD_SELECTOR").unwrap();
    let mut told: Vec<_> = told.as_str().unwrap().split(',').map(String::from).collect();
    let mut selected: Vec<_> = selector.iter().map(|(key, value)| format!("{key}={}", value.as_str().unwrap())).collect();
    told.sort();
    selected.sort();
    assert_eq!(told, selected);
    let url = env(&objects, "replayfork-operator", "REPLAYFORK_API_URL").unwrap();
    assert_eq!(url, "http://replayfork-api.rf.svc:3210");
}

/// A sandbox that can't reach this port must be able to conclude that its own policy is the reason.
#[test]
fn nothing_but_a_sandboxs_policy_closes_the_probe_port() {
    let objects = rendered(&[]);
    let ingress = &find(&objects, "NetworkPolicy", "replayfork-api-server")["spec"]["ingress"];
    let open = json!([{"protocol": "TCP", "port": 3210}, {"protocol": "TCP", "port": 3212}]);
    assert_eq!(ingress, &json!([{"ports": open}]));
    assert_eq!(
        find(&objects, "Service", "replayfork-api")["spec"]["ports"][1],
        json!({"name": "probe", "port": 3212, "targetPort": "probe"})
    );
}

#[test]
fn with_tls_every_address_speaks_it_and_the_operator_gets_no_key() {
    let objects = rendered(&["tls.existingSecret=replayfork-tls"]);
    let probe = &pod(&objects, "replayfork-api-server")["containers"][0]["readinessProbe"]["httpGet"];
    assert_eq!(probe["scheme"], "HTTPS");
    assert_eq!(env(&objects, "replayfork-api-server", "REPLAYFORK_TLS_CERT").unwrap(), "/etc/replayfork/tls/tls.crt");
    let url = env(&objects, "replayfork-operator", "REPLAYFORK_API_URL").unwrap();
    assert_eq!(url, "https://replayfork-api.rf.svc:3210");
    let volumes = pod(&objects, "replayfork-operator")["volumes"].as_array().unwrap();
    let secrets: Vec<_> = volumes.iter().filter(|volume| volume["secret"].is_object()).collect();
    assert_eq!(secrets.len(), 1);
    assert_eq!(secrets[0]["secret"]["items"], json!([{"key": "ca.crt", "path": "ca.crt"}]));
}

#[test]
fn user_namespaces_are_asked_for_only_when_said() {
    assert_eq!(env(&rendered(&[]), "replayfork-operator", "REPLAYFORK_HOST_USERS"), None);
    let said = env(&rendered(&["sandbox.hostUsers=false"]), "replayfork-operator", "REPLAYFORK_HOST_USERS");
    assert_eq!(said, Some(json!("false")));
}

#[test]
fn the_definition_is_kept_unless_told_otherwise() {
    let name = "replayforks.replayfork.dev";
    let policy =
        |objects: &[Value]| find(objects, "CustomResourceDefinition", name)["metadata"]["annotations"]["helm.sh/resource-policy"].clone();
    assert_eq!(policy(&rendered(&[])), "keep");
    assert_eq!(policy(&rendered(&["crds.keep=false"])), Value::Null);
    assert!(maybe(&rendered(&["crds.enabled=false"]), "CustomResourceDefinition", name).is_none());
}

#[test]
fn the_definition_is_the_generated_one() {
    let objects = rendered(&[]);
    let file = project().join("charts/replayfork/files/replayforks.yaml");
    let generated: Value = serde_yaml_ng::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let name = "replayforks.replayfork.dev";
    let spec = &find(&objects, "CustomResourceDefinition", name)["spec"];
    assert_eq!(whole(spec), whole(&generated["spec"]));
}

/// Helm writes 1.0 as 1.
fn whole(value: &Value) -> Value {
    match value {
        Value::Number(number) => json!(number.as_f64()),
        Value::Array(items) => items.iter().map(whole).collect(),
        Value::Object(members) => {
            let members = members.iter().map(|(key, value)| (key.clone(), whole(value)));
            Value::Object(members.collect())
        }
        other => other.clone(),
    }
}

#[test]
fn only_what_has_several_replicas_gets_a_disruption_budget() {
    let objects = rendered(&[]);
    assert!(maybe(&objects, "PodDisruptionBudget", "replayfork-operator").is_some());
    // One replica with a budget could never be drained.
    assert!(maybe(&objects, "PodDisruptionBudget", "replayfork-api-server").is_none());
    let objects = rendered(&["apiServer.replicas=2"]);
    assert!(maybe(&objects, "PodDisruptionBudget", "replayfork-api-server").is_some());
}

#[test]
fn monitors_exist_only_when_asked_for() {
    assert!(!rendered(&[]).iter().any(|object| object["kind"] == "ServiceMonitor"));
    let objects = rendered(&["metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.labels.release=prometheus"]);
    for name in ["replayfork-api-server", "replayfork-operator"] {
        let monitor = find(&objects, "ServiceMonitor", name);
        assert_eq!(monitor["metadata"]["labels"]["release"], "prometheus");
        let port = monitor["spec"]["endpoints"][0]["port"].clone();
        let selector = monitor["spec"]["selector"]["matchLabels"].as_object().unwrap();
        let serves = objects.iter().filter(|object| object["kind"] == "Service").any(|service| {
            let labels = &service["metadata"]["labels"];
            selector.iter().all(|(key, value)| &labels[key] == value)
                && service["spec"]["ports"].as_array().unwrap().iter().any(|has| has["name"] == port)
        });
        assert!(serves, "no Service with a port {port} is selected by the monitor {name}");
    }
}

#[test]
fn packs_go_to_a_bucket_with_its_secret_or_to_a_folder_with_its_claim() {
    assert_eq!(env(&rendered(&[]), "replayfork-api-server", "REPLAYFORK_BLOB_STORE").unwrap(), "postgres");
    let objects = rendered(&["blobs.store.url=s3://recorded/here", "blobs.store.existingSecret=blobs"]);
    assert_eq!(env(&objects, "replayfork-api-server", "REPLAYFORK_BLOB_STORE").unwrap(), "s3://recorded/here");
    let container = &pod(&objects, "replayfork-api-server")["containers"][0];
    assert_eq!(container["envFrom"], json!([{"secretRef": {"name": "blobs"}}]));
    let objects = rendered(&["blobs.store.url=file:///var/lib/replayfork", "blobs.store.existingClaim=blobs"]);
    let pod = pod(&objects, "replayfork-api-server");
    let named = |list: &Value| list.as_array().unwrap().iter().find(|v| v["name"] == "blobs").cloned().unwrap();
    assert_eq!(named(&pod["containers"][0]["volumeMounts"])["mountPath"], "/var/lib/replayfork");
    assert_eq!(named(&pod["volumes"])["persistentVolumeClaim"]["claimName"], "blobs");
    assert!(pod["containers"][0]["envFrom"].is_null());
}

#[test]
fn endpoints_reach_the_api_server_as_a_file_and_their_keys_as_files_of_their_own() {
    let endpoints = json!({
        "staging": {"url": "https://models.example/v1", "existingSecret": {"name": "keys", "key": "staging"}, "models": ["m-1"], "timeoutSeconds": 30},
        "open": {"url": "http://models.local/v1"},
    });
    let objects = rendered(&[&format!("models.endpoints={endpoints}")]);
    let told: Value =
        serde_json::from_str(find(&objects, "ConfigMap", "replayfork-endpoints")["data"]["endpoints.json"].as_str().unwrap()).unwrap();
    let key_file = "/etc/replayfork/endpoints/keys/staging";
    assert_eq!(told["staging"], json!({"url": "https://models.example/v1", "keyFile": key_file, "models": ["m-1"], "timeoutSeconds": 30}));
    assert_eq!(told["open"], json!({"url": "http://models.local/v1"}));
    assert_eq!(env(&objects, "replayfork-api-server", "REPLAYFORK_ENDPOINTS_FILE").unwrap(), "/etc/replayfork/endpoints/endpoints.json");
    let pod = pod(&objects, "replayfork-api-server");
    let sources = pod["volumes"].as_array().unwrap().iter().find(|v| v["name"] == "endpoints").unwrap()["projected"]["sources"].clone();
    let key = json!({"secret": {"name": "keys", "items": [{"key": "staging", "path": "keys/staging"}]}});
    assert_eq!(sources, json!([{"configMap": {"name": "replayfork-endpoints"}}, key]));
    let mounts = pod["containers"][0]["volumeMounts"].as_array().unwrap();
    assert!(mounts.iter().any(|m| m["name"] == "endpoints" && m["mountPath"] == "/etc/replayfork/endpoints"), "{mounts:?}");
    // Another file is another pod, since it is read at the start.
    let sum =
        |objects: &[Value]| find(objects, "Deployment", "replayfork-api-server")["spec"]["template"]["metadata"]["annotations"].clone();
    assert!(sum(&objects)["replayfork.dev/endpoints-checksum"].is_string());
    let none = rendered(&[]);
    assert!(maybe(&none, "ConfigMap", "replayfork-endpoints").is_none() && sum(&none).is_null());
    assert!(env(&none, "replayfork-api-server", "REPLAYFORK_ENDPOINTS_FILE").is_none());
}
