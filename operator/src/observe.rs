//! The state of the world around one fork, read from where it is kept: never from a watch cache.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{Api, ListParams};
use kube::{Resource, ResourceExt};
use replayfork_client::fork::{Fork, ForkState, RegisterFork};
use replayfork_crds::ReplayFork;

use crate::context::{Context, Error};
use crate::decide::{Observed, Row, Trouble};
use crate::sandbox::{UID_LABEL, object_name};

/// Registers the fork, or reads its row: the same idempotent request.
///
/// # Errors
/// The api-server can't be reached, or refuses.
pub async fn register(ctx: &Context, fork: &ReplayFork, give_up: bool) -> Result<Row, Error> {
    let spec = serde_json::to_value(&fork.spec).map_err(|e| Error::Build("the spec", e))?;
    let request = RegisterFork { namespace: fork.namespace().unwrap_or_default(), name: fork.name_any(), spec, give_up };
    let path = format!("/api/v1/forks/{}", fork.uid().unwrap_or_default());
    match ctx.api.put::<Fork>(&path, &request).await {
        Ok(row) => Ok(Row::Registered(Box::new(row))),
        Err(error) if error.reason() == Some("RunNotSealed") => Ok(Row::NotSealed(match error {
            replayfork_client::ClientError::Problem(problem) => problem.detail,
            other => other.to_string(),
        })),
        Err(error) => Err(error.into()),
    }
}

/// # Errors
/// The api-server or the Kubernetes API can't be reached.
pub async fn observe(ctx: &Context, fork: &ReplayFork) -> Result<Observed, Error> {
    let namespace = fork.namespace().unwrap_or_default();
    let row = register(ctx, fork, false).await?;
    let name = object_name(fork);
    let jobs: Api<Job> = Api::namespaced(ctx.client.clone(), &namespace);
    let pods: Api<Pod> = Api::namespaced(ctx.client.clone(), &namespace);
    let policies: Api<NetworkPolicy> = Api::namespaced(ctx.client.clone(), &namespace);
    let of_fork = ListParams::default().labels(&format!("{UID_LABEL}={}", fork.uid().unwrap_or_default()));
    let (job, found, policy) = futures::try_join!(jobs.get_opt(&name), pods.list(&of_fork), policies.get_opt(&name))?;
    let (claimed_by, state) = match &row {
        Row::Registered(row) => (row.pod_uid.clone(), Some(row.state)),
        Row::NotSealed(_) => (None, None),
    };
    // A claimed fork is about the pod that claimed it; else about the newest.
    let claimed = state != Some(ForkState::Registered);
    let pod = found
        .items
        .iter()
        .find(|p| claimed && p.uid() == claimed_by && claimed_by.is_some())
        .or_else(|| found.items.iter().max_by_key(|p| (p.metadata.deletion_timestamp.is_none(), p.creation_timestamp().map(|t| t.0))));
    let pod = pod.cloned();
    let starting = state == Some(ForkState::Registered);
    let others = if starting && job.is_none() { policies.list(&ListParams::default()).await?.items } else { Vec::new() };
    let troubles = if starting && job.is_some() { troubles(ctx, &namespace, job.as_ref(), pod.as_ref()).await? } else { Vec::new() };
    let cluster_addresses = std::env::var("KUBERNETES_SERVICE_HOST").ok().and_then(|h| h.parse().ok()).into_iter().collect();
    Ok(Observed { fork: fork.clone(), row, job, pod, policy, policies: others, troubles, cluster_addresses })
}

/// Warnings about a pod that does not start, or about a Job that gets none.
async fn troubles(ctx: &Context, namespace: &str, job: Option<&Job>, pod: Option<&Pod>) -> Result<Vec<Trouble>, Error> {
    let running = pod.and_then(|p| p.status.as_ref()?.phase.as_deref()) == Some("Running");
    let uid = pod.map_or_else(|| job.and_then(Uid::meta_uid), Uid::meta_uid);
    let Some(uid) = uid.filter(|_| !running) else { return Ok(Vec::new()) };
    let events: Api<Event> = Api::namespaced(ctx.client.clone(), namespace);
    let about = ListParams::default().fields(&format!("involvedObject.uid={uid},type=Warning"));
    let mut found = events.list(&about).await?.items;
    found.sort_by_key(|e| e.last_timestamp.as_ref().map(|t| t.0));
    Ok(found.into_iter().map(|e| Trouble { reason: e.reason.unwrap_or_default(), message: e.message.unwrap_or_default() }).collect())
}

trait Uid {
    fn meta_uid(&self) -> Option<String>;
}

impl<K: Resource> Uid for K {
    fn meta_uid(&self) -> Option<String> {
        self.meta().uid.clone()
    }
}
