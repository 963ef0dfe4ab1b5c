//! Tables for what is decided, and assertions on the objects that are built.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::Timestamp;
use replayfork_client::fork::{CloseReason, Fork};
use replayfork_core::model::RunEnvironment;
use replayfork_crds::{ReplayFork, condition};
use serde_json::{Value, json};

use crate::config::Config;
use crate::decide::{Action, Decision, Observed, Row, Trouble, decide};
use crate::metrics::waiting_for;
use crate::sandbox::{conflicts, job, network_policy, object_name, refused_egress};
use crate::status::status;

const NOW: &str = "2026-11-30T03:00:00Z";

fn now() -> Timestamp {
    NOW.parse().unwrap()
}

fn ago(seconds: i64) -> String {
    Timestamp::from_second(now().as_second() - seconds).unwrap().to_string()
}

fn fork(spec: Value) -> ReplayFork {
    let mut whole =
        json!({"source": {"run": "r", "span": "s"}, "patches": [{"type": "EnvVarOverride", "env": [{"name": "A", "value": "1"}]}]});
    for (key, value) in spec.as_object().unwrap() {
        whole[key] = value.clone();
    }
    serde_json::from_value(json!({
        "apiVersion": "replayfork.dev/v1alpha1",
        "kind": "ReplayFork",
        "metadata": {"name": "what-if", "namespace": "agents", "uid": "u-1", "generation": 1, "creationTimestamp": ago(400)},
        "spec": whole,
    }))
    .unwrap()
}

fn row(over: Value) -> Row {
    let counts =
        json!({"will_run": 1, "may_run": 0, "may_run_or_block": 0, "will_block": 0, "may_block": 1, "overridden": 0, "reusable": 7});
    let mut row = json!({
        "uid": "00000000-0000-0000-0000-000000000001", "namespace": "agents", "name": "what-if", "state": "Registered",
        "source_run": "00000000-0000-0000-0000-000000000002", "fork_run": "00000000-0000-0000-0000-000000000003", "fork_run_name": "what-if",
        "plan": {"digest": "00".repeat(32), "counts": counts, "sandbox": true, "blocked_spans": [], "environment": {"image": "agent:1", "uid": 1000, "workspace_root": "/workspace"}},
        "deletion_policy": "Retain", "registered_at": ago(400),
    });
    for (key, value) in over.as_object().unwrap() {
        row[key] = value.clone();
    }
    Row::Registered(Box::new(serde_json::from_value::<Fork>(row).unwrap()))
}

fn terminal(reason: &str, since: i64) -> Value {
    json!({"state": "Terminal", "terminal_at": ago(since), "claimed_at": ago(since + 5), "pod_uid": "p-1",
        "result": {"reason": reason, "message": "how it ended", "outcome": "Completed", "source_outcome": "Failed", "reexecuted": 1, "reused": 7, "overridden": 0, "blocked": 1, "blocked_spans": []}})
}

fn owner() -> Value {
    json!([{"apiVersion": "replayfork.dev/v1alpha1", "kind": "ReplayFork", "name": "what-if", "uid": "u-1", "controller": true}])
}

fn a_job(over: Value) -> Job {
    let mut job = json!({"metadata": {"name": "what-if-x", "ownerReferences": owner(), "creationTimestamp": ago(5)}, "spec": {"template": {"spec": {"containers": []}}}});
    merge(&mut job, over);
    serde_json::from_value(job).unwrap()
}

fn a_pod(over: Value) -> Pod {
    let mut pod = json!({"metadata": {"name": "p", "uid": "p-1", "creationTimestamp": ago(5)}, "status": {"phase": "Running"}});
    merge(&mut pod, over);
    serde_json::from_value(pod).unwrap()
}

fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => from.into_iter().for_each(|(k, v)| merge(into.entry(k).or_insert(Value::Null), v)),
        (into, from) => *into = from,
    }
}

fn observed(row: Row) -> Observed {
    Observed {
        fork: fork(json!({})),
        row,
        job: None,
        pod: None,
        policy: None,
        policies: vec![],
        troubles: vec![],
        cluster_addresses: vec!["10.96.0.1".parse().unwrap()],
    }
}

fn policy() -> NetworkPolicy {
    serde_json::from_value(json!({"metadata": {"name": "what-if-x", "ownerReferences": owner()}})).unwrap()
}

fn waiting(reason: &str) -> Value {
    json!({"metadata": {"creationTimestamp": ago(200)}, "status": {"phase": "Pending", "containerStatuses": [{
        "name": "executor", "image": "agent:1", "imageID": "", "ready": false, "restartCount": 0, "state": {"waiting": {"reason": reason, "message": "why"}}}]}})
}

fn ended(container: &str, reason: &str) -> Value {
    json!({"status": {"phase": "Failed", "containerStatuses": [{
        "name": container, "image": "i", "imageID": "", "ready": false, "restartCount": 0, "state": {"terminated": {"exitCode": 137, "reason": reason}}}]}})
}

fn closes(decision: &Decision) -> Option<(CloseReason, &str)> {
    match decision.actions.as_slice() {
        [Action::Close { reason, message }] => Some((*reason, message)),
        _ => None,
    }
}

#[test]
fn a_registered_fork_gets_its_policy_before_its_job_and_its_pod_named_once() {
    let mut o = observed(row(json!({})));
    assert_eq!(decide(&o, now()).actions, [Action::CreatePolicy, Action::CreateJob]);
    o.policy = Some(policy());
    assert_eq!(decide(&o, now()).actions, [Action::CreateJob]);
    o.job = Some(a_job(json!({})));
    assert_eq!(decide(&o, now()).actions, []);
    o.pod = Some(a_pod(json!({})));
    assert_eq!(decide(&o, now()).actions, [Action::NamePod { uid: "p-1".into() }]);
    o.row = row(json!({"pod_uid": "p-1"}));
    assert_eq!(decide(&o, now()).actions, []);
}

#[test]
fn a_job_is_created_only_while_the_row_is_registered() {
    for over in [terminal("Succeeded", 10), json!({"state": "Claimed", "pod_uid": "p-1", "claimed_at": ago(3)})] {
        let decision = decide(&observed(row(over)), now());
        assert!(!decision.actions.contains(&Action::CreateJob), "{decision:?}");
    }
    let not_sealed = observed(Row::NotSealed("still recording".into()));
    assert_eq!(decide(&not_sealed, now()).actions, [Action::GiveUp], "after the start deadline");
}

#[test]
fn what_keeps_a_pod_from_running_has_its_own_reason_and_a_remedy() {
    let registered = || row(json!({"pod_uid": "p-1"}));
    let with_pod = |over: Value| Observed { job: Some(a_job(json!({}))), pod: Some(a_pod(over)), ..observed(registered()) };
    let old_job = a_job(json!({"metadata": {"creationTimestamp": ago(40)}}));
    let trouble = |reason: &str| vec![Trouble { reason: reason.into(), message: "exceeded quota".into() }];
    for (o, reason, says) in [
        (with_pod(waiting("ImagePullBackOff")), CloseReason::ImagePullFailed, "imagePullSecrets"),
        (with_pod(waiting("CreateContainerError")), CloseReason::ImageNotUsable, "agent:1"),
        (
            Observed { job: Some(old_job.clone()), troubles: trouble("FailedCreate"), ..observed(registered()) },
            CloseReason::CreateFailed,
            "exceeded quota",
        ),
        (
            Observed {
                troubles: trouble("FailedCreatePodSandBox"),
                ..with_pod(json!({"metadata": {"creationTimestamp": ago(40)}, "status": {"phase": "Pending"}}))
            },
            CloseReason::PodSandboxFailed,
            "exceeded quota",
        ),
        (
            Observed { job: Some(a_job(json!({"metadata": {"creationTimestamp": ago(301)}}))), ..observed(registered()) },
            CloseReason::StartDeadlineExceeded,
            "startDeadlineSeconds",
        ),
        (
            Observed { job: Some(a_job(json!({"metadata": {"ownerReferences": []}}))), ..observed(registered()) },
            CloseReason::CreateFailed,
            "not this fork's",
        ),
        (
            Observed {
                job: Some(a_job(
                    json!({"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}}),
                )),
                ..observed(registered())
            },
            CloseReason::SandboxFailed,
            "BackoffLimitExceeded",
        ),
    ] {
        let decision = decide(&o, now());
        let (got, message) = closes(&decision).unwrap_or_else(|| panic!("{reason}: {decision:?}"));
        assert_eq!(got, reason);
        assert!(message.contains(says), "{message} should say {says}");
    }
    let patient = with_pod(json!({"metadata": {"creationTimestamp": ago(10)}, "status": waiting("ErrImagePull")["status"]}));
    assert_eq!(decide(&patient, now()).actions, []);
}

#[test]
fn a_claimed_fork_ends_with_its_pod() {
    let claimed = |over: Value| {
        let mut base = json!({"state": "Claimed", "pod_uid": "p-1", "claimed_at": ago(10)});
        merge(&mut base, over);
        row(base)
    };
    let job = || Some(a_job(json!({})));
    let gone = Observed { job: job(), ..observed(claimed(json!({}))) };
    assert_eq!(closes(&decide(&gone, now())).unwrap().0, CloseReason::Interrupted);
    let another = Observed { pod: Some(a_pod(json!({"metadata": {"uid": "p-2"}}))), ..observed(claimed(json!({}))) };
    assert_eq!(closes(&decide(&another, now())).unwrap().0, CloseReason::Interrupted, "another pod is not the one that claimed");
    let courier = Observed { pod: Some(a_pod(ended("courier", "Error"))), job: job(), ..observed(claimed(json!({}))) };
    assert_eq!(closes(&decide(&courier, now())).unwrap().0, CloseReason::Interrupted);
    let mut alone = ended("courier", "Error");
    merge(&mut alone, json!({"status": {"phase": "Running"}}));
    for (since, closed) in [(3, false), (11, true)] {
        alone["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = json!(ago(since));
        let o = Observed { pod: Some(a_pod(alone.clone())), job: job(), ..observed(claimed(json!({}))) };
        assert_eq!(closes(&decide(&o, now())).is_some(), closed, "the rest of the pod may still say why it ended");
    }
    let mut evicted = ended("courier", "Error");
    let said = "Usage of EmptyDir volume \"tmp\" exceeds the limit \"64Mi\". ";
    merge(&mut evicted, json!({"status": {"phase": "Failed", "reason": "Evicted", "message": said}}));
    let evicted = Observed { pod: Some(a_pod(evicted)), job: job(), ..observed(claimed(json!({}))) };
    let (decision, words) = (decide(&evicted, now()), ["\"tmp\"", "\"64Mi\"", "spec.sandbox.scratchSize"]);
    let (reason, message) = closes(&decision).unwrap();
    assert!(reason == CloseReason::WorkspaceFull && words.iter().all(|w| message.contains(w)), "{message}");
    let running = Observed { pod: Some(a_pod(json!({}))), job: job(), ..observed(claimed(json!({}))) };
    assert_eq!(decide(&running, now()).actions, []);
    let mut nameless = waiting("InvalidImageName");
    merge(&mut nameless, json!({"metadata": {"creationTimestamp": ago(1)}}));
    let bad_image = Observed { pod: Some(a_pod(nameless)), job: job(), ..observed(claimed(json!({}))) };
    assert_eq!(
        closes(&decide(&bad_image, now())).unwrap().0,
        CloseReason::ImagePullFailed,
        "the courier claims while the image can't be had"
    );
    let slow = Observed { pod: Some(a_pod(json!({}))), job: job(), ..observed(claimed(json!({"claimed_at": ago(900 + 121)}))) };
    assert_eq!(closes(&decide(&slow, now())).unwrap().0, CloseReason::DeadlineExceeded);
}

#[test]
fn cancel_asks_the_courier_first_and_waits_a_minute() {
    let cancel = || fork(json!({"cancel": true}));
    let pod = || Some(a_pod(json!({})));
    let unclaimed = Observed { fork: cancel(), ..observed(row(json!({}))) };
    assert_eq!(closes(&decide(&unclaimed, now())).unwrap().0, CloseReason::Canceled);
    let claimed = |over: Value| {
        let mut base = json!({"state": "Claimed", "pod_uid": "p-1", "claimed_at": ago(10)});
        merge(&mut base, over);
        Observed { fork: cancel(), pod: pod(), ..observed(row(base)) }
    };
    assert_eq!(decide(&claimed(json!({})), now()).actions, [Action::RequestCancel]);
    assert_eq!(decide(&claimed(json!({"cancel_requested_at": ago(30)})), now()).actions, []);
    assert_eq!(closes(&decide(&claimed(json!({"cancel_requested_at": ago(61)})), now())).unwrap().0, CloseReason::Canceled);
}

#[test]
fn an_ended_fork_keeps_its_objects_until_their_time_is_over_and_its_policy_longest() {
    let done = || Some(a_job(json!({"status": {"conditions": [{"type": "Complete", "status": "True"}]}})));
    let with_ttl = |since: i64, job: Option<Job>, pod: Option<Pod>| Observed {
        fork: fork(json!({"ttlSecondsAfterFinished": 60})),
        job,
        pod,
        policy: Some(policy()),
        ..observed(row(terminal("Succeeded", since)))
    };
    assert_eq!(decide(&with_ttl(10, done(), None), now()), Decision { actions: vec![], look_again: Some(50) });
    assert_eq!(decide(&with_ttl(61, done(), None), now()).actions, [Action::DeleteJob]);
    assert_eq!(decide(&with_ttl(61, None, Some(a_pod(json!({})))), now()).actions, [], "the policy outlives the pod");
    assert_eq!(decide(&with_ttl(61, None, None), now()).actions, [Action::DeletePolicy]);
    let nothing = observed(row(terminal("Succeeded", 10)));
    assert_eq!(decide(&nothing, now()), Decision { actions: vec![], look_again: None });
    let stuck = with_ttl(61, Some(a_job(json!({}))), Some(a_pod(json!({}))));
    assert_eq!(decide(&stuck, now()).actions, [Action::DeleteJob], "a Job that runs on after the end is stopped");
}

#[test]
fn a_fork_waits_until_its_sandbox_has_claimed_it_and_says_for_what() {
    let published = |o: Observed| {
        let mut fork = o.fork.clone();
        fork.status = Some(status(&o, None, None, now()));
        waiting_for(&fork)
    };
    assert_eq!(waiting_for(&fork(json!({}))).as_deref(), Some("Unobserved"));
    assert_eq!(published(observed(row(json!({})))).as_deref(), Some("Pending"));
    assert_eq!(published(observed(Row::NotSealed("still recording".into()))).as_deref(), Some("RunNotSealed"));
    assert_eq!(published(Observed { job: Some(a_job(json!({}))), ..observed(row(json!({}))) }).as_deref(), Some("Starting"));
    assert_eq!(published(observed(row(json!({"state": "Claimed", "pod_uid": "p-1", "claimed_at": ago(3)})))), None);
    assert_eq!(published(observed(row(terminal("Succeeded", 10)))), None);
}

#[test]
fn suspend_holds_what_is_not_claimed() {
    let held = |job: Option<Job>| Observed { fork: fork(json!({"suspend": true})), job, ..observed(row(json!({}))) };
    assert_eq!(decide(&held(None), now()), Decision { actions: vec![], look_again: None });
    assert_eq!(decide(&held(Some(a_job(json!({})))), now()).actions, [Action::DeleteJob]);
    let queued = Observed {
        job: Some(a_job(json!({"metadata": {"creationTimestamp": ago(9999)}, "spec": {"suspend": true}}))),
        ..observed(row(json!({})))
    };
    assert_eq!(decide(&queued, now()).actions, [], "a queue may hold a Job for as long as it likes");
}

#[test]
fn a_policy_that_lets_the_sandbox_reach_more_ends_the_fork() {
    let other = |spec: Value| serde_json::from_value::<NetworkPolicy>(json!({"metadata": {"name": "other"}, "spec": spec})).unwrap();
    let fork = fork(json!({}));
    for (spec, conflict) in [
        (json!({"podSelector": {}, "egress": [{}]}), true),
        (json!({"podSelector": {}, "policyTypes": ["Egress"]}), false),
        (json!({"podSelector": {}, "ingress": [{}]}), false),
        (json!({"podSelector": {"matchLabels": {"app": "web"}}, "egress": [{}]}), false),
        (
            json!({"podSelector": {"matchExpressions": [{"key": "app.kubernetes.io/name", "operator": "NotIn", "values": ["replayfork-sandbox"]}]}, "egress": [{}]}),
            false,
        ),
        (json!({"podSelector": {"matchExpressions": [{"key": "replayfork.dev/fork-uid", "operator": "Exists"}]}, "egress": [{}]}), true),
    ] {
        assert_eq!(conflicts(&fork, &other(spec.clone())), conflict, "{spec}");
    }
    let o = Observed { policies: vec![other(json!({"podSelector": {}, "egress": [{}]}))], ..observed(row(json!({}))) };
    let decision = decide(&o, now());
    let (reason, message) = closes(&decision).unwrap();
    assert!(reason == CloseReason::NetworkPolicyConflict && message.contains("\"other\""), "{message}");
}

#[test]
fn egress_never_opens_the_cluster_itself() {
    let addresses = ["10.96.0.1".parse().unwrap()];
    for (cidr, says) in
        [("10.0.0.0/8", Some("too wide")), ("10.96.0.0/16", Some("10.96.0.1")), ("x", Some("no CIDR")), ("203.0.113.0/24", None)]
    {
        let fork = fork(json!({"sandbox": {"egress": [{"cidr": cidr, "ports": [{"port": 443}]}]}}));
        let refused = refused_egress(&fork, &addresses);
        assert_eq!(refused.is_some(), says.is_some(), "{cidr}: {refused:?}");
        assert!(
            refused.zip(says).is_none_or(|(message, says)| message.contains(says) && message.starts_with("spec.sandbox.egress[0].cidr"))
        );
    }
}

fn config() -> Config {
    use clap::Parser;
    Config::parse_from([
        "operator",
        "--api-url",
        "http://replayfork-api.replayfork-system.svc:3210",
        "--api-namespace",
        "replayfork-system",
        "--api-pod-selector",
        "a=b",
        "--token-file",
        "/t",
        "--courier-image",
        "courier:1",
        "--pod-name",
        "p",
        "--pod-namespace",
        "replayfork-system",
    ])
}

#[test]
fn the_executors_container_has_no_token_and_the_courier_alone_may_write_the_control_volume() {
    let environment =
        RunEnvironment { image: Some("agent:1".into()), uid: Some(1000), workspace_root: Some("/workspace".into()), home: None };
    let built =
        job(&config(), &fork(json!({"sandbox": {"runtimeClassName": "gvisor"}})), &environment, "10.96.0.7:3210".parse().unwrap(), None)
            .unwrap();
    let spec = built.spec.unwrap();
    assert_eq!((spec.backoff_limit, spec.completions, spec.ttl_seconds_after_finished), (Some(0), Some(1), None));
    let pod = spec.template.spec.unwrap();
    assert_eq!(
        (pod.automount_service_account_token, pod.enable_service_links, pod.restart_policy.as_deref()),
        (Some(false), Some(false), Some("Never"))
    );
    assert_eq!((pod.runtime_class_name.as_deref(), pod.host_users), (Some("gvisor"), None));
    let [courier, executor] = pod.containers.as_slice() else { panic!("two containers") };
    assert_eq!((courier.image.as_deref(), executor.image.as_deref()), (Some("courier:1"), Some("agent:1")));
    let mounts = |c: &k8s_openapi::api::core::v1::Container| {
        c.volume_mounts.iter().flatten().map(|m| (m.name.clone(), m.read_only == Some(true))).collect::<Vec<_>>()
    };
    assert!(mounts(executor).iter().all(|(name, _)| name != "token" && name != "scratch"));
    assert!(mounts(courier).contains(&("tmp".into(), true)) && mounts(executor).contains(&("tmp".into(), false)));
    assert!(mounts(executor).contains(&("control".into(), true)) && mounts(courier).contains(&("control".into(), false)));
    assert!(executor.env.is_none() && executor.env_from.is_none());
    for container in pod.containers.iter().chain(pod.init_containers.iter().flatten()) {
        let security = container.security_context.as_ref().unwrap();
        assert_eq!(security.read_only_root_filesystem, Some(true), "{}", container.name);
        assert!(container.resources.as_ref().is_some_and(|r| r.limits.is_some() && r.requests.is_some()), "{}", container.name);
    }
}

#[test]
fn names_fit_and_depend_on_the_uid_alone_for_their_difference() {
    let mut long = fork(json!({}));
    long.metadata.name = Some("a.very-long-name-".repeat(14));
    let name = object_name(&long);
    assert!(name.len() <= 51 && !name.contains('.'), "{name}");
    let mut again = long.clone();
    again.metadata.uid = Some("u-2".into());
    assert_ne!(object_name(&again), name);
}

#[test]
fn the_sandbox_reaches_the_api_server_and_what_the_spec_names_and_nothing_else() {
    let built =
        network_policy(&config(), &fork(json!({"sandbox": {"egress": [{"cidr": "203.0.113.0/24", "ports": [{"port": 443}]}]}}))).unwrap();
    let spec = built.spec.unwrap();
    assert_eq!(spec.policy_types, Some(vec!["Ingress".to_owned(), "Egress".to_owned()]));
    assert!(spec.ingress.is_none());
    let egress = spec.egress.unwrap();
    assert_eq!(egress.len(), 2);
    assert!(
        egress.iter().all(|rule| rule.to.as_ref().is_some_and(|to| !to.is_empty()) && rule.ports.as_ref().is_some_and(|p| !p.is_empty()))
    );
}

#[test]
fn conditions_tell_one_story_and_keep_their_times() {
    let succeeded = status(&observed(row(terminal("Succeeded", 10))), None, Some("https://viewer.example/"), now());
    let is = |kind: &str| condition(&succeeded.conditions, kind).map(|c| (c.status.as_str(), c.reason.as_str()));
    assert_eq!(is("Finished"), Some(("True", "Succeeded")));
    assert_eq!((is("Ready"), is("Stalled")), (is("Succeeded"), None));
    assert_eq!(succeeded.viewer_url.as_deref(), Some("https://viewer.example/replay/what-if?namespace=agents"));
    assert_eq!(succeeded.result.as_ref().unwrap().outcome.as_deref(), Some("Completed"));

    let failed = status(&observed(row(terminal("Interrupted", 10))), None, None, now());
    let stalled = condition(&failed.conditions, "Stalled").unwrap();
    assert_eq!((stalled.status.as_str(), stalled.reason.as_str(), stalled.message.as_str()), ("True", "Interrupted", "how it ended"));
    assert_eq!(condition(&failed.conditions, "Ready").unwrap().status, "False");

    let mut later = observed(row(terminal("Succeeded", 10)));
    later.fork.status = Some(succeeded.clone());
    later.fork.metadata.generation = Some(2);
    let again = status(&later, None, Some("https://viewer.example/"), Timestamp::from_second(now().as_second() + 60).unwrap());
    assert_eq!(again.observed_generation, 2);
    for kind in ["Planned", "Finished", "Succeeded", "Ready"] {
        let time = |s: &replayfork_crds::ReplayForkStatus| condition(&s.conditions, kind).unwrap().last_transition_time.clone();
        assert_eq!(time(&again), time(&succeeded), "{kind} did not flip");
    }
}
