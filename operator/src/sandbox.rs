//! The objects of a sandbox: a Job and the NetworkPolicy before it. Pure: from inputs to objects.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::{Resource, ResourceExt};
use replayfork_core::model::RunEnvironment;
use replayfork_crds::{NetworkIsolation, ReplayFork, SandboxSpec};
use serde_json::{Value, json};

use crate::config::Config;

/// Label with the fork's uid on Job, pod and policy.
pub const UID_LABEL: &str = "replayfork.dev/fork-uid";
/// Label with the fork's name on the pod, as far as it fits.
pub const NAME_LABEL: &str = "replayfork.dev/fork";
const KUEUE_LABELS: [&str; 2] = ["kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"];
pub const DEADLINE_SECONDS: i64 = 900;
pub const START_DEADLINE_SECONDS: i64 = 300;
/// Seconds by which the Job's own deadline is behind both of the fork's: only a backstop.
const BACKSTOP_SECONDS: i64 = 120;
const GRACE_SECONDS: i64 = 60;
const SCRATCH: &str = "2Gi";
const TOKEN_SECONDS: i64 = 600;

const BIN: &str = "/replayfork/bin";
const CONTROL: &str = "/replayfork/control";
const VOLUME: &str = "/replayfork/volume";
const COURIER_SCRATCH: &str = "/replayfork/scratch";
const COURIER_TMP: &str = "/replayfork/tmp";
const TOKEN: &str = "/var/run/secrets/replayfork";

/// Name of Job, pod prefix and policy: the first 40 characters of the fork's name and ten hex digits of its uid's hash.
pub fn object_name(fork: &ReplayFork) -> String {
    let stem: String = fork.name_any().chars().take(40).collect();
    let hash = blake3::hash(fork.uid().unwrap_or_default().as_bytes());
    format!("{}-{}", stem.trim_end_matches(['-', '.']).replace('.', "-"), &hex::encode(hash.as_bytes())[..10])
}

pub fn sandbox_spec(fork: &ReplayFork) -> SandboxSpec {
    fork.spec.sandbox.clone().unwrap_or_default()
}

/// Seconds that a fork may take to start.
pub fn start_deadline(fork: &ReplayFork) -> i64 {
    sandbox_spec(fork).start_deadline_seconds.unwrap_or(START_DEADLINE_SECONDS)
}

/// Seconds of execution that a fork may take.
pub fn deadline(fork: &ReplayFork) -> i64 {
    sandbox_spec(fork).deadline_seconds.unwrap_or(DEADLINE_SECONDS)
}

fn labels(fork: &ReplayFork) -> BTreeMap<String, String> {
    let name: String = fork.name_any().chars().take(63).collect();
    BTreeMap::from([
        ("app.kubernetes.io/name".to_owned(), "replayfork-sandbox".to_owned()),
        ("app.kubernetes.io/managed-by".to_owned(), "replayfork-operator".to_owned()),
        (UID_LABEL.to_owned(), fork.uid().unwrap_or_default()),
        (NAME_LABEL.to_owned(), name.trim_end_matches(['-', '.', '_']).to_owned()),
    ])
}

fn metadata(fork: &ReplayFork) -> Value {
    json!({
        "name": object_name(fork),
        "namespace": fork.namespace(),
        "labels": labels(fork),
        "ownerReferences": fork.controller_owner_ref(&()).into_iter().collect::<Vec<_>>(),
    })
}

/// Whether an object of our name is ours.
pub fn is_ours<K: Resource>(fork: &ReplayFork, object: &K) -> bool {
    let uid = fork.uid().unwrap_or_default();
    object.meta().owner_references.iter().flatten().any(|o| o.uid == uid)
}

/// Egress to the api-server's pods and to what the spec names; ingress from nowhere.
///
/// # Errors
/// The object can't be built from these values: a fault of ours, named.
pub fn network_policy(config: &Config, fork: &ReplayFork) -> Result<NetworkPolicy, serde_json::Error> {
    let mut egress = vec![json!({
        "to": [{
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": config.api_namespace}},
            "podSelector": {"matchLabels": config.api_pod_selector},
        }],
        "ports": [{"protocol": "TCP", "port": config.api_target_port}],
    })];
    for rule in sandbox_spec(fork).egress.unwrap_or_default() {
        let ports: Vec<_> =
            rule.ports.iter().map(|p| json!({"port": p.port, "protocol": p.protocol.as_deref().unwrap_or("TCP")})).collect();
        egress.push(json!({"to": [{"ipBlock": {"cidr": rule.cidr}}], "ports": ports}));
    }
    serde_json::from_value(json!({
        "metadata": metadata(fork),
        "spec": {
            "podSelector": {"matchLabels": {UID_LABEL: fork.uid()}},
            "policyTypes": ["Ingress", "Egress"],
            "egress": egress,
        },
    }))
}

/// The policy with the pod as a second owner, so that it goes only when fork and pod are both gone.
pub fn policy_owned_by(policy: &NetworkPolicy, pod: &Pod) -> Value {
    let mut owners = policy.owner_references().to_vec();
    owners.extend(pod.owner_ref(&()));
    json!({"metadata": {"resourceVersion": policy.resource_version(), "ownerReferences": owners}})
}

/// Whether another policy of the namespace selects the sandbox and lets it reach something: policies add up.
pub fn conflicts(fork: &ReplayFork, policy: &NetworkPolicy) -> bool {
    if policy.name_any() == object_name(fork) {
        return false;
    }
    let Some(spec) = &policy.spec else { return false };
    let labels = labels(fork);
    let egress = spec.egress.as_deref().unwrap_or_default();
    let governs = spec.policy_types.as_ref().map_or(!egress.is_empty(), |types| types.iter().any(|t| t == "Egress"));
    governs && !egress.is_empty() && spec.pod_selector.as_ref().is_none_or(|s| selects(s, &labels))
}

fn selects(selector: &k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let exact = selector.match_labels.iter().flatten().all(|(k, v)| labels.get(k) == Some(v));
    let expressions = selector.match_expressions.iter().flatten().all(|e| {
        let value = labels.get(&e.key);
        let listed = value.is_some_and(|v| e.values.iter().flatten().any(|w| w == v));
        match e.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            _ => true,
        }
    });
    exact && expressions
}

/// The Job. `environment` is what the api-server resolved; `api` is the Service's address, since the sandbox has no DNS, and
/// `authorities` are those of its certificate.
///
/// # Errors
/// The object can't be built from these values: a fault of ours, named.
pub fn job(
    config: &Config,
    fork: &ReplayFork,
    environment: &RunEnvironment,
    api: SocketAddr,
    authorities: Option<&str>,
) -> Result<Job, serde_json::Error> {
    let sandbox = sandbox_spec(fork);
    let root = environment.workspace_root.as_deref().unwrap_or("/workspace");
    let size = sandbox.scratch_size.as_deref().unwrap_or(SCRATCH);
    let container_security = json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "runAsNonRoot": true,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    });
    let workspace_mount = json!({"name": "workspace", "mountPath": root, "subPath": "workspace"});
    let init = json!({
        "name": "init",
        "image": config.courier_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/usr/bin/replayfork-courier", "init", "--to", format!("{BIN}/replayfork-executor"), "--workspace", format!("{VOLUME}/workspace")],
        "securityContext": container_security,
        "resources": {"requests": {"cpu": "50m", "memory": "32Mi"}, "limits": {"cpu": "1", "memory": "128Mi"}},
        "volumeMounts": [{"name": "bin", "mountPath": BIN}, {"name": "workspace", "mountPath": VOLUME}],
    });
    let isolation = match sandbox.network_isolation.unwrap_or_default() {
        NetworkIsolation::Enforced => "Enforced",
        NetworkIsolation::BestEffort => "BestEffort",
    };
    let mut courier = json!({
        "name": "courier",
        "image": config.courier_image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/usr/bin/replayfork-courier", "run"],
        "env": [
            {"name": "REPLAYFORK_FORK_UID", "value": fork.uid()},
            {"name": "REPLAYFORK_API_URL", "value": config.api_url},
            {"name": "REPLAYFORK_API_ADDRESS", "value": api},
            {"name": "REPLAYFORK_TOKEN_FILE", "value": format!("{TOKEN}/token")},
            {"name": "REPLAYFORK_WORKSPACE", "value": root},
            {"name": "REPLAYFORK_CONTROL_DIR", "value": CONTROL},
            {"name": "REPLAYFORK_SCRATCH_DIR", "value": COURIER_SCRATCH},
            {"name": "REPLAYFORK_TMP_DIR", "value": COURIER_TMP},
            {"name": "REPLAYFORK_VOLUME_LIMIT", "value": size},
            {"name": "REPLAYFORK_NETWORK_ISOLATION", "value": isolation},
        ],
        "securityContext": container_security,
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        "volumeMounts": [
            workspace_mount,
            {"name": "control", "mountPath": CONTROL},
            {"name": "scratch", "mountPath": COURIER_SCRATCH},
            // To measure it: a step can fill it.
            {"name": "tmp", "mountPath": COURIER_TMP, "readOnly": true},
            {"name": "token", "mountPath": TOKEN, "readOnly": true},
        ],
    });
    if let (Some(pem), Some(env)) = (authorities, courier["env"].as_array_mut()) {
        env.push(json!({"name": "REPLAYFORK_API_CA", "value": pem}));
    }
    let executor = json!({
        "name": "executor",
        "image": environment.image,
        "imagePullPolicy": "IfNotPresent",
        "command": [format!("{BIN}/replayfork-executor"), CONTROL],
        "workingDir": "/",
        "securityContext": container_security,
        "resources": resources(&sandbox),
        "volumeMounts": [
            {"name": "bin", "mountPath": BIN, "readOnly": true},
            workspace_mount,
            {"name": "control", "mountPath": CONTROL, "readOnly": true},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    });
    let uid = environment.uid;
    let mut pod_spec = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": uid,
            "runAsGroup": uid,
            "fsGroup": uid,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [init],
        "containers": [courier, executor],
        "volumes": [
            {"name": "bin", "emptyDir": {"sizeLimit": "64Mi"}},
            {"name": "control", "emptyDir": {"sizeLimit": "1Mi"}},
            {"name": "workspace", "emptyDir": {"sizeLimit": size}},
            {"name": "scratch", "emptyDir": {"sizeLimit": size}},
            {"name": "tmp", "emptyDir": {"sizeLimit": size}},
            {"name": "token", "projected": {"sources": [{"serviceAccountToken": {
                "audience": format!("replayfork/{}", fork.uid().unwrap_or_default()), "expirationSeconds": TOKEN_SECONDS, "path": "token",
            }}]}},
        ],
    });
    let optional = [
        ("runtimeClassName", json!(sandbox.runtime_class_name)),
        ("nodeSelector", json!(sandbox.node_selector)),
        ("tolerations", json!(sandbox.tolerations)),
        ("serviceAccountName", json!(sandbox.service_account_name)),
        ("imagePullSecrets", json!(sandbox.image_pull_secrets.map(|names| names.iter().map(|n| json!({"name": n})).collect::<Vec<_>>()))),
        ("hostUsers", json!(config.host_users)),
    ];
    for (field, value) in optional {
        if !value.is_null() {
            pod_spec[field] = value;
        }
    }
    let mut meta = metadata(fork);
    let queued = KUEUE_LABELS.iter().filter_map(|l| Some((*l, fork.labels().get(*l)?))).collect::<Vec<_>>();
    for (label, value) in &queued {
        meta["labels"][*label] = json!(value);
    }
    let suspend = if queued.is_empty() { Value::Null } else { json!(true) };
    serde_json::from_value(json!({
        "metadata": meta,
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            // So that an eviction's reason outlives the pod.
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]},
            "activeDeadlineSeconds": deadline(fork) + start_deadline(fork) + BACKSTOP_SECONDS,
            "suspend": suspend,
            "template": {"metadata": {"labels": labels(fork)}, "spec": pod_spec},
        },
    }))
}

fn resources(sandbox: &SandboxSpec) -> Value {
    let given = sandbox.resources.clone().unwrap_or_default();
    let (requests, limits) = (given.requests.unwrap_or_default(), given.limits.unwrap_or_default());
    let or = |value: Option<_>, default: &str| {
        value.map_or_else(
            || json!(default),
            |v: k8s_openapi::apimachinery::pkg::util::intstr::IntOrString| match v {
                k8s_openapi::apimachinery::pkg::util::intstr::IntOrString::Int(n) => json!(n.to_string()),
                k8s_openapi::apimachinery::pkg::util::intstr::IntOrString::String(s) => json!(s),
            },
        )
    };
    json!({
        "requests": {"cpu": or(requests.cpu, "100m"), "memory": or(requests.memory, "128Mi")},
        "limits": {"cpu": or(limits.cpu, "1"), "memory": or(limits.memory, "1Gi")},
    })
}

/// An egress rule that would open what no sandbox may reach. The words are the user's.
pub fn refused_egress(fork: &ReplayFork, cluster_addresses: &[std::net::IpAddr]) -> Option<String> {
    for (i, rule) in sandbox_spec(fork).egress.unwrap_or_default().iter().enumerate() {
        let field = format!("spec.sandbox.egress[{i}].cidr");
        let parsed = rule.cidr.split_once('/').and_then(|(a, n)| Some((a.parse::<std::net::IpAddr>().ok()?, n.parse::<u32>().ok()?)));
        let Some((network, prefix)) = parsed else { return Some(format!("{field}: {:?} is no CIDR, like 203.0.113.0/24", rule.cidr)) };
        let least = if network.is_ipv4() { 16 } else { 32 };
        if prefix < least || prefix > if network.is_ipv4() { 32 } else { 128 } {
            return Some(format!("{field}: {:?} is too wide; at least /{least} is needed", rule.cidr));
        }
        if let Some(address) = cluster_addresses.iter().find(|a| contains(network, prefix, **a)) {
            return Some(format!("{field}: {:?} contains {address}, which belongs to the cluster; sandboxes never reach it", rule.cidr));
        }
    }
    None
}

fn contains(network: std::net::IpAddr, prefix: u32, address: std::net::IpAddr) -> bool {
    use std::net::IpAddr::{V4, V6};
    match (network, address) {
        (V4(n), V4(a)) => prefix == 0 || (n.to_bits() ^ a.to_bits()) >> (32 - prefix) == 0,
        (V6(n), V6(a)) => prefix == 0 || (n.to_bits() ^ a.to_bits()) >> (128 - prefix) == 0,
        _ => false,
    }
}
