//! Writing the status, only when it differs, and Events when something happened.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::events::{Event, EventType};
use kube::{Resource, ResourceExt};
use replayfork_client::fork::ForkState;
use replayfork_client::read::RunDiff;
use replayfork_crds::{ReplayFork, ReplayForkStatus, condition, conditions_differ};
use serde_json::json;

use crate::context::{Context, Error};
use crate::decide::{Observed, Row};
use crate::metrics::{ForkLabels, Metrics};
use crate::status::SANDBOX_ENDED;

const MANAGER: &str = "replayfork-operator";

/// The difference of a terminal fork from its source, where the status lacks it. If it can't be had the fork is finished all
/// the same, and it follows.
pub async fn diff(ctx: &Context, observed: &Observed) -> Option<RunDiff> {
    let Row::Registered(row) = &observed.row else { return None };
    let known = observed.fork.status.as_ref().and_then(|s| s.result.as_ref()?.summary.as_ref()).is_some();
    if row.state != ForkState::Terminal || known {
        return None;
    }
    let (source, fork) = (row.source_run?, row.fork_run?);
    let path = format!("/api/v1/diffs/{source}/{fork}?namespace={}", row.namespace);
    match ctx.api.get(&path).await {
        Ok(diff) => Some(diff),
        Err(error) => {
            tracing::warn!(fork = row.name, "no diff yet: {error}");
            None
        }
    }
}

/// # Errors
/// The Kubernetes API can't be reached.
pub async fn publish_status(ctx: &Context, fork: &ReplayFork, wanted: ReplayForkStatus) -> Result<(), Error> {
    let old = fork.status.clone().unwrap_or_default();
    let same = ReplayForkStatus { conditions: vec![], ..old.clone() } == ReplayForkStatus { conditions: vec![], ..wanted.clone() };
    if same && !conditions_differ(&old.conditions, &wanted.conditions) {
        return Ok(());
    }
    let api: Api<ReplayFork> = Api::namespaced(ctx.client.clone(), &fork.namespace().unwrap_or_default());
    let patch = json!({
        "apiVersion": ReplayFork::api_version(&()),
        "kind": ReplayFork::kind(&()),
        "metadata": {"name": fork.name_any(), "uid": fork.uid()},
        "status": wanted,
    });
    match api.patch_status(&fork.name_any(), &PatchParams::apply(MANAGER).force(), &Patch::Apply(&patch)).await {
        Ok(_) => {}
        // Deleted meanwhile, or another one of that name by now.
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    tell(ctx, fork, &old, &wanted).await;
    Ok(())
}

/// Seconds since the fork's creation, both as whole ones.
fn seconds_until(fork: &ReplayFork, then: Option<&Time>) -> Option<f64> {
    Some((then?.0.as_second() - fork.creation_timestamp()?.0.as_second()).max(0) as f64)
}

/// Measures a fork's start, which may be seen only when it has ended, and its end.
fn measure(metrics: &Metrics, fork: &ReplayFork, old: &ReplayForkStatus, new: &ReplayForkStatus) {
    let is = |status: &ReplayForkStatus, kind: &str| condition(&status.conditions, kind).is_some_and(|c| c.status == "True");
    let started = |status: &ReplayForkStatus| {
        is(status, "SandboxReady") || condition(&status.conditions, "SandboxReady").is_some_and(|c| c.reason == SANDBOX_ENDED)
    };
    if started(new) && !started(old) {
        seconds_until(fork, new.start_time.as_ref()).into_iter().for_each(|s| metrics.seconds_to_start.observe(s));
    }
    if is(new, "Finished") && !is(old, "Finished") {
        seconds_until(fork, new.completion_time.as_ref()).into_iter().for_each(|s| metrics.seconds_to_finish.observe(s));
    }
}

/// Events and metrics for conditions that became true.
async fn tell(ctx: &Context, fork: &ReplayFork, old: &ReplayForkStatus, new: &ReplayForkStatus) {
    measure(&ctx.metrics, fork, old, new);
    let was = |kind: &str| condition(&old.conditions, kind).is_some_and(|c| c.status == "True");
    for kind in ["Planned", "SandboxReady", "Finished"] {
        let Some(now) = condition(&new.conditions, kind).filter(|c| c.status == "True" && !was(kind)) else { continue };
        let failed = kind == "Finished" && condition(&new.conditions, "Succeeded").is_none_or(|c| c.status != "True");
        if kind == "Finished" {
            let outcome = new.result.as_ref().and_then(|r| r.outcome.clone()).unwrap_or_else(|| "none".into());
            ctx.metrics.finished.get_or_create(&ForkLabels { reason: now.reason.clone(), outcome }).inc();
        }
        let event = Event {
            type_: if failed { EventType::Warning } else { EventType::Normal },
            reason: if kind == "Finished" { now.reason.clone() } else { kind.to_owned() },
            note: Some(now.message.chars().take(1000).collect()),
            action: "Reconcile".into(),
            secondary: None,
        };
        if let Err(error) = ctx.events.publish(&event, &fork.object_ref(&())).await {
            tracing::warn!("an Event could not be written: {error}");
        }
    }
}
