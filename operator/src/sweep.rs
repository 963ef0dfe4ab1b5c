//! Forks whose custom resource is gone: no finalizer tells of it, so the two lists are compared.

use std::collections::HashSet;
use std::time::Duration;

use kube::ResourceExt;
use kube::api::{Api, ListParams};
use kube::core::DeserializeGuard;
use replayfork_client::fork::Fork;
use replayfork_crds::ReplayFork;

use crate::context::{Context, Error};

const EVERY: Duration = Duration::from_secs(600);
/// After a watch has told of a deletion, how often to look until it is dealt with.
const PAGE: u32 = 500;

/// At start, whenever a deletion was seen, and every ten minutes.
pub async fn run(ctx: &Context, mut deleted: tokio::sync::mpsc::Receiver<()>) {
    loop {
        if let Err(error) = sweep(ctx).await {
            tracing::warn!("deleted forks could not be looked for: {error}");
        }
        let _ = tokio::time::timeout(EVERY, deleted.recv()).await;
    }
}

async fn sweep(ctx: &Context) -> Result<(), Error> {
    // The api-server's list first: a fork that is created in between is in the second one only.
    let rows: Vec<Fork> = ctx.api.get("/api/v1/forks").await?;
    if rows.is_empty() {
        return Ok(());
    }
    let api: Api<DeserializeGuard<ReplayFork>> = Api::all(ctx.client.clone());
    let mut exist = HashSet::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = api.list(&page).await?;
        exist.extend(list.items.iter().filter_map(ResourceExt::uid));
        match list.metadata.continue_.filter(|c| !c.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => break,
        }
    }
    for row in rows.iter().filter(|row| !exist.contains(&row.uid.to_string())) {
        tracing::info!(namespace = row.namespace, fork = row.name, "its ReplayFork is gone");
        // One that can't be dealt with yet, such as a run that other forks need, holds up no other.
        if let Err(error) = ctx.api.delete(&format!("/api/v1/forks/{}", row.uid)).await {
            tracing::warn!(namespace = row.namespace, fork = row.name, "what is left of it stays for now: {error}");
        }
    }
    Ok(())
}
