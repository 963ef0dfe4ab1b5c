//! From rows to a plan: loading what the planner needs, and resolving what the sandbox is built from.

mod part;

use std::collections::BTreeMap;

use replayfork_client::BLOBS_MISSING;
use replayfork_client::fork::CloseReason;
use replayfork_client::read::RunState;
use replayfork_core::Digest;
use replayfork_core::concurrency::{recorded_changes, seen_through_links};
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::{RunEnvironment, SnapshotRef};
use replayfork_core::patch::{Contents, Patch, Refused};
use replayfork_core::plan::{FactsNeeded, Plan, Prepared};
use replayfork_core::source::{Facts, FileFact, SnapshotFact, Source};
use replayfork_snapshot::{Kind, diff, entry_at, path_bytes, path_text};

use crate::config::Config;
use crate::db::Connection;
use crate::endpoints::Endpoints;
use crate::problem::{ApiError, ApiResult};
use crate::store::blobs::{self, Loaded, Trees};
use crate::store::runs::Found;
use crate::store::{snapshots, spans};

pub use part::{Ready, ready};

/// Blocked spans that an overview shows.
pub const SHOWN: usize = 20;
/// Planned spans that a plan lists.
pub const LISTED: usize = 1000;

/// Folders that no workspace may be, or hold: the sandbox's own image lives there.
const RESERVED: [&str; 14] =
    ["/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/root", "/run", "/sbin", "/sys", "/usr"];

/// Where a run without a workspace has an empty one.
const NO_WORKSPACE: &str = "/workspace";

/// Why a spec has no plan, for ever.
#[derive(Debug)]
pub struct Refusal {
    pub reason: CloseReason,
    pub message: String,
}

/// All that a plan is made from.
pub struct Input {
    pub source: Source,
    pub contents: Contents,
}

/// Uploaded contents that the spec and inherited patches name.
pub fn named(spec: &ForkSpec, inherited: &[Patch]) -> Vec<Digest> {
    let all = spec.contents().chain(inherited.iter().flat_map(Patch::contents));
    let mut digests: Vec<Digest> = all.filter_map(|c| c.digest.parse().ok()).collect();
    digests.sort_unstable();
    digests.dedup();
    digests
}

/// Reads a run with all records, as replaying a fork of it needs it.
///
/// # Errors
/// What the database says; inside, why the spec can't be planned.
pub async fn load(client: &impl Connection, found: &Found, spec: &ForkSpec) -> ApiResult<Result<Input, Refusal>> {
    let source = source(client, found).await?;
    let contents = contents(client, found, spec, &source.inherited).await?;
    let needed = match Prepared::facts_needed(&source, &contents, spec) {
        Ok(needed) => needed,
        Err(refused) => return Ok(Err(refused.into())),
    };
    let facts = facts(client, found, &source, needed).await?;
    Ok(Ok(Input { source: source.with_facts(facts), contents }))
}

async fn contents(client: &impl Connection, found: &Found, spec: &ForkSpec, inherited: &[Patch]) -> ApiResult<Contents> {
    let mut contents = Contents::default();
    for digest in named(spec, inherited) {
        // What is not there is said by whoever needs it, with the patch that names it.
        match blobs::get(client, &found.ns, &digest).await {
            Ok(content) => contents.insert(content),
            Err(error) if error.reason == BLOBS_MISSING => {}
            Err(error) => return Err(error),
        }
    }
    Ok(contents)
}

async fn inherited(client: &impl Connection, found: &Found) -> ApiResult<Vec<Patch>> {
    let row = client.fetch_one("SELECT inherits FROM runs WHERE rid = $1", &[&found.rid]).await?;
    serde_json::from_value(row.get(0)).map_err(|e| ApiError::internal(&e))
}

/// A run with what each of its spans changed.
pub async fn source(client: &impl Connection, found: &Found) -> ApiResult<Source> {
    let spans = spans::all(client, found).await?;
    let mut trees = Trees::default();
    let states: Vec<Digest> = spans.iter().flat_map(|s| [s.snapshot_before, s.snapshot_after]).flatten().map(|s| s.node).collect();
    trees.load(client, &found.ns, states).await?;
    let bare = Source::new(found.run.environment.clone(), spans, BTreeMap::new());
    let through = seen_through_links(&bare, |state, patterns| {
        Ok::<_, ApiError>(replayfork_snapshot::seen_through_links(&mut trees.nodes, &mut Loaded, &state.node, patterns)?)
    })?;
    let bare = if through.is_empty() { bare } else { Source::new(bare.environment, bare.spans, through) };
    let changed = recorded_changes(&bare, |a, b| changed_paths(&mut trees, a, b))?;
    let Source { environment, spans, .. } = bare;
    Ok(Source::new(environment, spans, changed).with_inherited(inherited(client, found).await?))
}

fn changed_paths(trees: &mut Trees, a: &SnapshotRef, b: &SnapshotRef) -> ApiResult<Vec<String>> {
    Ok(diff(&mut trees.nodes, &mut Loaded, Some(&a.node), Some(&b.node))?.into_iter().map(|c| path_text(&c.path)).collect())
}

/// What patches meet in the recorded workspaces.
async fn facts(client: &impl Connection, found: &Found, source: &Source, needed: FactsNeeded) -> ApiResult<Facts> {
    let mut facts = Facts::default();
    let mut trees = Trees::default();
    let befores = needed.files.iter().map(|(_, before, _)| before).chain(needed.snapshots.iter().map(|(_, before, _)| before));
    let roots: Vec<Digest> = befores.flatten().map(|s| s.node).collect();
    trees.load(client, &found.ns, roots).await?;
    for (target, before, files) in needed.files {
        let of_target = facts.files.entry(source.spans[target].id.clone()).or_default();
        for file in files {
            let mut fact = FileFact::default();
            if let Some(before) = before {
                let entry = entry_at(&mut trees.nodes, &mut Loaded, &before.node, &path_bytes(&file.path))?;
                fact.same = Some(false);
                if let Some(Kind::File { executable, digest, .. }) = entry.map(|e| e.kind) {
                    fact = FileFact { same: Some(digest == Digest::of(&file.content)), executable };
                }
            }
            of_target.insert(file.path, fact);
        }
    }
    for (target, before, content) in needed.snapshots {
        let Some((state, _)) = snapshots::by_content(client, found.ns.number, &content).await? else { continue };
        trees.load(client, &found.ns, [state.node]).await?;
        let changed = before.map(|before| changed_paths(&mut trees, &before, &state)).transpose()?;
        facts.snapshots.insert(source.spans[target].id.clone(), SnapshotFact { state, changed });
    }
    Ok(facts)
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        let reason = match refused.reason() {
            "SpanNotFound" => CloseReason::SpanNotFound,
            "SpanAmbiguous" => CloseReason::SpanAmbiguous,
            "SpecInvalid" => CloseReason::SpecInvalid,
            _ => CloseReason::PatchRefused,
        };
        Self { reason, message: refused.to_string() }
    }
}

/// Whether the installation has the endpoint that the spec names.
fn check_endpoint(endpoints: &Endpoints, found: &Found, spec: &ForkSpec) -> Result<(), Refusal> {
    let Some(endpoint) = &spec.model.endpoint else { return Ok(()) };
    endpoints.check(endpoint, &found.run.namespace).map_err(|message| Refusal { reason: CloseReason::SpecInvalid, message })
}

/// What the sandbox is built from.
fn resolve(config: &Config, has_workspace: bool, plan: &Plan) -> Result<RunEnvironment, Refusal> {
    let mut recorded = plan.environment.clone();
    if !plan.sandbox {
        return Ok(recorded);
    }
    if recorded.workspace_root.is_none() && !has_workspace {
        recorded.workspace_root = Some(NO_WORKSPACE.to_owned());
    }
    let mut environment = recorded.clone();
    let Some(root) = recorded.workspace_root.as_deref() else {
        let message =
            "the run recorded no workspace root, so its workspace can't be restored; record it with REPLAYFORK_WORKSPACE set".to_owned();
        return Err(Refusal { reason: CloseReason::WorkspacePathUnsupported, message });
    };
    let trimmed = root.trim_end_matches('/');
    if !root.starts_with('/') || RESERVED.contains(&if trimmed.is_empty() { "/" } else { trimmed }) || trimmed.split('/').any(|p| p == "..")
    {
        let message = format!(
            "the recorded workspace root {root:?} can't be mounted in a sandbox: it is or holds a folder of the system; record the agent with a folder of its own"
        );
        return Err(Refusal { reason: CloseReason::WorkspacePathUnsupported, message });
    }
    environment.workspace_root = Some(trimmed.to_owned());
    environment.image = recorded.image.clone().or_else(|| config.sandbox_default_image.clone());
    if environment.image.is_none() {
        let message =
            "the run recorded no image, and the installation has no default; set spec.sandbox.image, or sandbox.defaultImage in the chart"
                .to_owned();
        return Err(Refusal { reason: CloseReason::ImageNotUsable, message });
    }
    environment.uid = Some(recorded.uid.filter(|uid| *uid > 0).unwrap_or(config.sandbox_default_uid));
    Ok(environment)
}

/// Only sealed runs can be forked.
///
/// # Errors
/// 409 RunNotSealed.
pub fn check_sealed(found: &Found) -> ApiResult<()> {
    if found.run.state == RunState::Sealed {
        return Ok(());
    }
    Err(ApiError::conflict(
        "RunNotSealed",
        format!("run {:?} is still being recorded; it can be forked once its recorder has finished it", found.run.name),
    ))
}
