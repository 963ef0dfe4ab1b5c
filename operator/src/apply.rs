//! Carrying out what was decided.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, PropagationPolicy};
use replayfork_client::fork::{CloseFork, CloseReason, Fork, ForkResult, NamePod};
use replayfork_crds::ReplayFork;

use crate::context::{Context, Error};
use crate::decide::{Action, Observed, Row};
use crate::observe::register;
use crate::sandbox::{is_ours, job, network_policy, object_name, policy_owned_by};

/// Carries out the actions in order; the first that fails ends it, and the next reconcile sees how far it came.
///
/// # Errors
/// What the api-server or the Kubernetes API says.
pub async fn apply(ctx: &Context, observed: &Observed, actions: Vec<Action>) -> Result<(), Error> {
    let fork = &observed.fork;
    let namespace = fork.namespace().unwrap_or_default();
    let path = format!("/api/v1/forks/{}", fork.uid().unwrap_or_default());
    let jobs: Api<Job> = Api::namespaced(ctx.client.clone(), &namespace);
    let policies: Api<NetworkPolicy> = Api::namespaced(ctx.client.clone(), &namespace);
    for action in actions {
        tracing::info!(namespace, fork = fork.name_any(), ?action, "acting");
        match action {
            Action::GiveUp => drop(register(ctx, fork, true).await?),
            Action::CreatePolicy => {
                let policy = network_policy(&ctx.config, fork).map_err(|e| Error::Build("the NetworkPolicy", e))?;
                already_there(policies.create(&PostParams::default(), &policy).await)?;
            }
            Action::CreateJob => create_job(ctx, observed, &jobs).await?,
            Action::NamePod { uid } => {
                own_policy(ctx, fork, &policies, &uid).await?;
                let _: Fork = ctx.api.put(&format!("{path}/pod"), &NamePod { pod_uid: uid }).await?;
            }
            Action::RequestCancel => {
                let _: Fork = ctx.api.post(&format!("{path}/cancel"), &()).await?;
            }
            Action::Close { reason, message } => {
                let _: ForkResult = ctx.api.post(&format!("{path}/close"), &CloseFork::new(reason, message)).await?;
            }
            Action::DeleteJob => {
                let background = DeleteParams { propagation_policy: Some(PropagationPolicy::Background), ..DeleteParams::default() };
                gone_already(jobs.delete(&object_name(fork), &background).await)?;
            }
            Action::DeletePolicy => gone_already(policies.delete(&object_name(fork), &DeleteParams::default()).await)?,
        }
    }
    Ok(())
}

async fn create_job(ctx: &Context, observed: &Observed, jobs: &Api<Job>) -> Result<(), Error> {
    let Row::Registered(row) = &observed.row else { return Ok(()) };
    let Some(plan) = &row.plan else { return Ok(()) };
    let address = api_address(ctx).await?;
    let job =
        job(&ctx.config, &observed.fork, &plan.environment, address, ctx.authorities.as_deref()).map_err(|e| Error::Build("the Job", e))?;
    match jobs.create(&PostParams::default(), &job).await {
        // Whose it is, the next look will tell.
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(kube::Error::Api(status)) if matches!(status.code, 400 | 403 | 422) => {
            let message = format!("the cluster refuses the sandbox's Job: {}", status.message);
            let path = format!("/api/v1/forks/{}/close", observed.fork.uid().unwrap_or_default());
            let _: ForkResult = ctx.api.post(&path, &CloseFork::new(CloseReason::CreateFailed, message)).await?;
            Ok(())
        }
        other => Ok(other.map(drop)?),
    }
}

/// The Service's address: the sandbox has no DNS.
async fn api_address(ctx: &Context) -> Result<std::net::SocketAddr, Error> {
    let host = format!("{}.{}.svc", ctx.config.api_service, ctx.config.api_namespace);
    let authority = ctx.config.api_url.split_once("://").map_or(ctx.config.api_url.as_str(), |(_, rest)| rest).trim_end_matches('/');
    let port = authority.rsplit_once(':').and_then(|(_, p)| p.parse::<u16>().ok()).unwrap_or(3210);
    let found = tokio::net::lookup_host((host.as_str(), port)).await;
    found.and_then(|mut found| found.next().ok_or_else(|| std::io::Error::other("no address"))).map_err(|e| Error::Address(host, e))
}

/// The pod owns the policy too, before it is named: from then on it may claim, and run commands.
async fn own_policy(ctx: &Context, fork: &ReplayFork, policies: &Api<NetworkPolicy>, pod_uid: &str) -> Result<(), Error> {
    let name = object_name(fork);
    let pods: Api<Pod> = Api::namespaced(ctx.client.clone(), &fork.namespace().unwrap_or_default());
    let of_fork = kube::api::ListParams::default().labels(&format!("{}={}", crate::sandbox::UID_LABEL, fork.uid().unwrap_or_default()));
    let Some(pod) = pods.list(&of_fork).await?.items.into_iter().find(|p| p.uid().as_deref() == Some(pod_uid)) else { return Ok(()) };
    let policy = policies.get(&name).await?;
    if !is_ours(fork, &policy) {
        return Err(Error::Invalid(format!("NetworkPolicy {name} is not this fork's")));
    }
    if policy.owner_references().iter().any(|o| o.uid == pod_uid) {
        return Ok(());
    }
    policies.patch(&name, &PatchParams::default(), &Patch::Merge(policy_owned_by(&policy, &pod))).await?;
    Ok(())
}

fn already_there<T>(result: kube::Result<T>) -> Result<(), Error> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

fn gone_already<T>(result: kube::Result<T>) -> Result<(), Error> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other.map(drop)?),
    }
}
