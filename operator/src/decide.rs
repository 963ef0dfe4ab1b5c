//! What is to be done about a fork: a total function of what was observed. No client, no clock of its own.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use replayfork_client::fork::{CloseReason, Fork, ForkState};
use replayfork_crds::ReplayFork;

use crate::sandbox::{self, conflicts, deadline, is_ours, object_name, refused_egress, start_deadline};

/// Seconds until an image that can't be pulled ends the fork.
const PULL_PATIENCE: i64 = 120;
/// Seconds until a pod or its sandbox that can't be created ends the fork.
const CREATE_PATIENCE: i64 = 30;
/// Seconds that a courier has to stop by itself.
const STOP_PATIENCE: i64 = 60;
/// Seconds that the rest of a pod has to end after its courier.
const END_PATIENCE: i64 = 10;
/// Seconds by which the operator is behind the courier in ending a fork that takes too long.
const DEADLINE_SLACK: i64 = 120;
const DEFAULT_TTL: i64 = 86_400;

/// The fork's row, or why there is none.
#[derive(Clone, Debug)]
pub enum Row {
    Registered(Box<Fork>),
    /// The run is still being recorded.
    NotSealed(String),
}

/// A message of an Event about an object.
#[derive(Clone, Debug)]
pub struct Trouble {
    pub reason: String,
    pub message: String,
}

/// All that a decision rests on.
pub struct Observed {
    pub fork: ReplayFork,
    pub row: Row,
    pub job: Option<Job>,
    pub pod: Option<Pod>,
    pub policy: Option<NetworkPolicy>,
    /// Other policies of the namespace.
    pub policies: Vec<NetworkPolicy>,
    /// Warnings about Job and pod, newest last; looked for only when there is no running pod.
    pub troubles: Vec<Trouble>,
    /// Addresses of the cluster's own that no egress rule may open.
    pub cluster_addresses: Vec<std::net::IpAddr>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Register anew, giving up on a run that is not sealed.
    GiveUp,
    CreatePolicy,
    CreateJob,
    /// The pod becomes a second owner of the policy, and is then named to the api-server.
    NamePod {
        uid: String,
    },
    RequestCancel,
    Close {
        reason: CloseReason,
        message: String,
    },
    DeleteJob,
    DeletePolicy,
}

/// What to do, and after how many seconds to look again if nothing happens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub actions: Vec<Action>,
    pub look_again: Option<i64>,
}

fn act(actions: impl IntoIterator<Item = Action>, look_again: i64) -> Decision {
    Decision { actions: actions.into_iter().collect(), look_again: Some(look_again) }
}

fn close(reason: CloseReason, message: impl Into<String>) -> Decision {
    act([Action::Close { reason, message: message.into() }], 0)
}

fn seconds_since(now: Timestamp, then: Option<Timestamp>) -> i64 {
    then.map_or(0, |then| now.as_second() - then.as_second())
}

fn parsed(text: Option<&String>) -> Option<Timestamp> {
    text.and_then(|t| t.parse().ok())
}

pub fn decide(observed: &Observed, now: Timestamp) -> Decision {
    let fork = match &observed.row {
        Row::NotSealed(_) => return not_sealed(observed, now),
        Row::Registered(row) => row,
    };
    match fork.state {
        ForkState::Terminal => terminal(observed, fork, now),
        ForkState::Registered => registered(observed, fork, now),
        ForkState::Claimed => claimed(observed, fork, now),
    }
}

fn not_sealed(observed: &Observed, now: Timestamp) -> Decision {
    let age = seconds_since(now, observed.fork.creation_timestamp().map(|t| t.0));
    if age >= start_deadline(&observed.fork) { act([Action::GiveUp], 0) } else { act([], 2) }
}

fn terminal(observed: &Observed, row: &Fork, now: Timestamp) -> Decision {
    let since = seconds_since(now, parsed(row.terminal_at.as_ref()));
    let ttl = observed.fork.spec.ttl_seconds_after_finished.unwrap_or(DEFAULT_TTL);
    let ours = observed.job.as_ref().filter(|job| is_ours(&observed.fork, *job));
    let stuck = ours.is_some_and(|job| !finished(job)) && (row.claimed_at.is_none() || since >= STOP_PATIENCE);
    let mut actions = Vec::new();
    if ours.is_some_and(|job| job.metadata.deletion_timestamp.is_none()) && (since >= ttl || stuck) {
        actions.push(Action::DeleteJob);
    }
    // The policy goes after the pod that it confines.
    let confines = observed.job.is_some() || observed.pod.is_some();
    if since >= ttl && !confines && observed.policy.as_ref().is_some_and(|p| is_ours(&observed.fork, p)) {
        actions.push(Action::DeletePolicy);
    }
    let has_objects = observed.job.is_some() || observed.pod.is_some() || observed.policy.is_some();
    let look_again = if !has_objects {
        None
    } else if since < ttl {
        let stop = if ours.is_some_and(|job| !finished(job)) { (STOP_PATIENCE - since).max(1) } else { i64::MAX };
        Some((ttl - since).min(stop))
    } else {
        Some(1)
    };
    Decision { actions, look_again }
}

fn finished(job: &Job) -> bool {
    let conditions = job.status.iter().flat_map(|s| s.conditions.iter().flatten());
    conditions.into_iter().any(|c| (c.type_ == "Complete" || c.type_ == "Failed") && c.status == "True")
}

fn registered(observed: &Observed, row: &Fork, now: Timestamp) -> Decision {
    let fork = &observed.fork;
    if fork.spec.cancel == Some(true) {
        return close(CloseReason::Canceled, "canceled before anything ran");
    }
    let Some(job) = &observed.job else { return without_job(observed) };
    if !is_ours(fork, job) {
        let message = format!(
            "a Job {:?} that is not this fork's stands in the way; delete it, or create the fork under another name",
            object_name(fork)
        );
        return close(CloseReason::CreateFailed, message);
    }
    if fork.spec.suspend == Some(true) {
        let deleting = job.metadata.deletion_timestamp.is_some();
        return act((!deleting).then_some(Action::DeleteJob), 5);
    }
    let age = seconds_since(now, job.creation_timestamp().map(|t| t.0));
    if finished(job) {
        return close(CloseReason::SandboxFailed, format!("the sandbox's pod ended before it claimed the fork{}", job_story(observed)));
    }
    // A Job that a queue holds has no pod, and its time does not run.
    if job.spec.as_ref().and_then(|s| s.suspend) == Some(true) {
        return act([], 15);
    }
    let Some(pod) = &observed.pod else { return without_pod(observed, age, fork) };
    let uid = pod.uid().unwrap_or_default();
    if row.pod_uid.as_deref() != Some(uid.as_str()) {
        return act([Action::NamePod { uid }], 2);
    }
    if let Some(decision) = pod_trouble(observed, pod, now) {
        return decision;
    }
    if age >= start_deadline(fork) {
        return start_deadline_over(fork, unschedulable(pod));
    }
    act([], 2)
}

fn without_job(observed: &Observed) -> Decision {
    let fork = &observed.fork;
    if fork.spec.suspend == Some(true) {
        return Decision { actions: vec![], look_again: None };
    }
    if let Some(policy) = observed.policies.iter().find(|p| conflicts(fork, p)) {
        let message = format!(
            "NetworkPolicy {:?} also selects the sandbox and lets it reach more; policies add up. Exclude pods with the label app.kubernetes.io/name=replayfork-sandbox from it",
            policy.name_any()
        );
        return close(CloseReason::NetworkPolicyConflict, message);
    }
    if let Some(message) = refused_egress(fork, &observed.cluster_addresses) {
        return close(CloseReason::SpecInvalid, message);
    }
    match &observed.policy {
        Some(policy) if !is_ours(fork, policy) => {
            let message = format!("a NetworkPolicy {:?} that is not this fork's stands in the way; delete it", object_name(fork));
            close(CloseReason::CreateFailed, message)
        }
        Some(_) => act([Action::CreateJob], 2),
        None => act([Action::CreatePolicy, Action::CreateJob], 2),
    }
}

fn without_pod(observed: &Observed, age: i64, fork: &ReplayFork) -> Decision {
    let failed = observed.troubles.iter().rev().find(|t| t.reason == "FailedCreate");
    match failed {
        Some(trouble) if age >= CREATE_PATIENCE => close(
            CloseReason::CreateFailed,
            format!(
                "the cluster refuses the sandbox's pod: {}; change the quota, the policy or the webhook that it names",
                trouble.message
            ),
        ),
        _ if age >= start_deadline(fork) => start_deadline_over(fork, None),
        _ => act([], 2),
    }
}

fn start_deadline_over(fork: &ReplayFork, why: Option<String>) -> Decision {
    let why = why.map_or_else(String::new, |w| format!(": {w}"));
    close(
        CloseReason::StartDeadlineExceeded,
        format!("the sandbox did not start within {} s{why}; make room, or raise spec.sandbox.startDeadlineSeconds", start_deadline(fork)),
    )
}

fn unschedulable(pod: &Pod) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|c| c.type_ == "PodScheduled" && c.status == "False").and_then(|c| c.message.clone())
}

fn statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    pod.status.iter().flat_map(|s| s.init_container_statuses.iter().flatten().chain(s.container_statuses.iter().flatten()))
}

/// A container whose image can't be had or used, once patience is over; a name that is none heals never.
fn image_trouble(pod: &Pod, now: Timestamp) -> Option<Decision> {
    let age = seconds_since(now, pod.creation_timestamp().map(|t| t.0));
    for status in statuses(pod) {
        let Some(waiting) = status.state.as_ref().and_then(|s| s.waiting.as_ref()) else { continue };
        let message = waiting.message.clone().unwrap_or_default();
        match waiting.reason.as_deref().unwrap_or_default() {
            reason @ ("ErrImagePull" | "ImagePullBackOff" | "InvalidImageName" | "ErrImageNeverPull")
                if age >= PULL_PATIENCE || reason == "InvalidImageName" =>
            {
                let message =
                    format!("image {:?} can't be pulled: {message}; check the name, or set spec.sandbox.imagePullSecrets", status.image);
                return Some(close(CloseReason::ImagePullFailed, message));
            }
            "CreateContainerConfigError" | "CreateContainerError" | "RunContainerError" if age >= CREATE_PATIENCE => {
                let uid = pod.spec.as_ref().and_then(|s| s.security_context.as_ref()).and_then(|c| c.run_as_user);
                let message = format!(
                    "image {:?} can't be used as uid {}: {message}",
                    status.image,
                    uid.map_or_else(|| "?".into(), |u| u.to_string())
                );
                return Some(close(CloseReason::ImageNotUsable, message));
            }
            _ => {}
        }
    }
    None
}

/// What keeps a pod from running, once patience is over.
fn pod_trouble(observed: &Observed, pod: &Pod, now: Timestamp) -> Option<Decision> {
    if let Some(decision) = image_trouble(pod, now) {
        return Some(decision);
    }
    let age = seconds_since(now, pod.creation_timestamp().map(|t| t.0));
    let failed = observed.troubles.iter().rev().find(|t| t.reason == "FailedCreatePodSandBox");
    if let Some(trouble) = failed
        && age >= CREATE_PATIENCE
        && statuses(pod).all(|s| s.state.as_ref().is_none_or(|s| s.running.is_none() && s.terminated.is_none()))
    {
        return Some(close(CloseReason::PodSandboxFailed, format!("the node can't make the pod's sandbox: {}", trouble.message)));
    }
    let executor = statuses(pod).find(|s| s.name == "executor").and_then(|s| s.state.as_ref()?.terminated.as_ref());
    if let Some(ended) = executor {
        let why = ended.message.clone().or_else(|| ended.reason.clone()).unwrap_or_default();
        return Some(close(
            CloseReason::ImageNotUsable,
            format!("the executor ended with {} before the fork was claimed: {why}", ended.exit_code),
        ));
    }
    None
}

fn claimed(observed: &Observed, row: &Fork, now: Timestamp) -> Decision {
    if observed.fork.spec.cancel == Some(true) {
        match parsed(row.cancel_requested_at.as_ref()) {
            None => return act([Action::RequestCancel], 2),
            Some(asked) if seconds_since(now, Some(asked)) >= STOP_PATIENCE => {
                return close(CloseReason::Canceled, "canceled as asked; the sandbox did not stop by itself");
            }
            Some(_) => {}
        }
    }
    let pod = observed.pod.as_ref().filter(|p| p.uid() == row.pod_uid);
    let Some(pod) = pod else {
        return close(CloseReason::Interrupted, format!("the fork's pod is gone{}", job_story(observed)));
    };
    // The courier may run, and claim, while the executor's image can't be had.
    if let Some(decision) = image_trouble(pod, now) {
        return decision;
    }
    if let Some((reason, message)) = pod_ended(pod, now) {
        return close(reason, format!("{message}{}", job_story(observed)));
    }
    let leaving = seconds_since(now, pod.metadata.deletion_timestamp.as_ref().map(|t| t.0));
    if leaving >= STOP_PATIENCE {
        return close(CloseReason::Interrupted, "the fork's pod is being deleted, and its node does not answer");
    }
    let age = seconds_since(now, parsed(row.claimed_at.as_ref()));
    if age >= deadline(&observed.fork) + DEADLINE_SLACK {
        return close(CloseReason::DeadlineExceeded, "spec.sandbox.deadlineSeconds is over, and the sandbox did not stop by itself");
    }
    act([], 2)
}

/// How the pod of a claimed fork ended without a result: the courier says so itself where it can.
fn pod_ended(pod: &Pod, now: Timestamp) -> Option<(CloseReason, String)> {
    let terminated = |name: &str| statuses(pod).find(|s| s.name == name).and_then(|s| s.state.as_ref()?.terminated.clone());
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or_default();
    if phase == "Failed"
        && let Some(full) = full_volume(pod)
    {
        return Some((CloseReason::WorkspaceFull, full));
    }
    if terminated("executor").is_some_and(|t| t.reason.as_deref() == Some("OOMKilled")) && terminated("courier").is_some() {
        return Some((
            CloseReason::OOMKilled,
            "the executor's container was killed for memory; raise spec.sandbox.resources.limits.memory".into(),
        ));
    }
    let ended = phase == "Failed" || phase == "Succeeded";
    if let Some(courier) = terminated("courier") {
        // kubelet says why it ended a pod only when all of it has ended.
        if !ended && seconds_since(now, courier.finished_at.map(|t| t.0)) < END_PATIENCE {
            return None;
        }
        let why = courier.reason.unwrap_or_default();
        return Some((CloseReason::Interrupted, format!("the courier ended with {} ({why}) and left no result", courier.exit_code)));
    }
    if ended {
        let status = pod.status.as_ref();
        let why = status.and_then(|s| s.message.clone().or_else(|| s.reason.clone())).unwrap_or_default();
        return Some((CloseReason::Interrupted, format!("the fork's pod ended without a result: {why}")));
    }
    None
}

/// That kubelet evicted the pod because a volume outgrew its limit: faster than the courier could look.
fn full_volume(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref().filter(|s| s.reason.as_deref() == Some("Evicted"))?;
    let said = status.message.as_deref()?;
    // kubelet's own words (pkg/kubelet/eviction/helpers.go), which name volume and limit.
    said.contains("Usage of EmptyDir volume").then(|| format!("{}; raise spec.sandbox.scratchSize", said.trim_end_matches([' ', '.'])))
}

/// What the Job says of its end, for a message.
fn job_story(observed: &Observed) -> String {
    let conditions = observed.job.iter().flat_map(|j| j.status.iter()).flat_map(|s| s.conditions.iter().flatten());
    let failed = conditions.into_iter().find(|c| c.type_ == "Failed" && c.status == "True");
    failed.map_or_else(String::new, |c| {
        format!(
            " (Job {}: {} {})",
            sandbox::object_name(&observed.fork),
            c.reason.as_deref().unwrap_or_default(),
            c.message.as_deref().unwrap_or_default()
        )
    })
}
