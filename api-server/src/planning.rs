//! From rows to a plan: loading what the planner needs, and resolving what the sandbox is built from.

use std::collections::BTreeMap;

use deadpool_postgres::GenericClient;
use replayfork_client::fork::{BlockedSpan, CloseReason, PlanOverview};
use replayfork_client::read::{RunKind, RunState};
use replayfork_core::fork::ForkSpec;
use replayfork_core::model::{RunEnvironment, Span};
use replayfork_core::plan::{Plan, plan};
use replayfork_core::source::{Changed, Source};
use replayfork_snapshot::{diff, path_text};

use crate::config::Config;
use crate::problem::{ApiError, ApiResult};
use crate::store::blobs::{Loaded, Trees};
use crate::store::runs::Found;
use crate::store::spans;

/// Blocked spans that an overview shows.
pub const SHOWN: usize = 20;

/// Folders that no workspace may be, or hold: the sandbox's own image lives there.
const RESERVED: [&str; 14] =
    ["/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/opt", "/proc", "/root", "/run", "/sbin", "/sys", "/usr"];

/// Why a spec has no plan, for ever.
#[derive(Debug)]
pub struct Refusal {
    pub reason: CloseReason,
    pub message: String,
}

/// Reads a run as planning sees it.
///
/// # Errors
/// What the database says.
pub async fn load(client: &impl GenericClient, found: &Found) -> ApiResult<Source> {
    let spans = spans::all(client, found).await?;
    let bare = Source::new(found.run.environment.clone(), spans, BTreeMap::new());
    let changed = changed(client, found.ns, &bare).await?;
    let Source { environment, spans, .. } = bare;
    Ok(Source::new(environment, spans, changed))
}

/// Which paths changed during each unit, and between it and the unit before.
async fn changed(client: &impl GenericClient, ns: i32, source: &Source) -> ApiResult<BTreeMap<String, Changed>> {
    let mut pairs = Vec::new();
    let mut last: Option<&Span> = None;
    for (i, span) in source.spans.iter().enumerate().filter(|(i, _)| source.is_unit(*i)) {
        if let (Some(before), Some(previous)) = (span.snapshot_before, last.and_then(|s| s.snapshot_after))
            && before.content != previous.content
        {
            pairs.push((i, true, previous.node, before.node));
        }
        if let (Some(before), Some(after)) = (span.snapshot_before, span.snapshot_after)
            && before.content != after.content
        {
            pairs.push((i, false, before.node, after.node));
        }
        if span.snapshot_after.is_some() {
            last = Some(span);
        }
    }
    let mut trees = Trees::default();
    trees.load(client, ns, pairs.iter().flat_map(|(_, _, a, b)| [*a, *b])).await?;
    let mut changed: BTreeMap<String, Changed> = BTreeMap::new();
    for (i, gap, a, b) in pairs {
        let paths = diff(&mut trees.nodes, &mut Loaded, Some(&a), Some(&b))?.into_iter().map(|c| path_text(&c.path)).collect();
        let of_span = changed.entry(source.spans[i].id.clone()).or_default();
        if gap {
            of_span.before = paths;
        } else {
            of_span.during = paths;
        }
    }
    Ok(changed)
}

/// Plans a spec against a run, and resolves what the sandbox gets.
///
/// # Errors
/// The refusal that ends the fork, in the user's words.
pub fn plan_fork(config: &Config, found: &Found, source: &Source, spec: &ForkSpec) -> Result<(Plan, PlanOverview), Refusal> {
    let refuse = |reason, message| Err(Refusal { reason, message });
    if found.run.kind == RunKind::Fork {
        let message = format!(
            "spec.source.run: {:?} is itself a fork; fork the run it comes from ({:?}) with the patches of both",
            found.run.name,
            found.run.forked_from.as_ref().map_or("", |f| f.run_name.as_str())
        );
        return refuse(CloseReason::SpecInvalid, message);
    }
    if spec.patches.is_empty() {
        return refuse(CloseReason::SpecInvalid, "spec.patches: at least one patch is needed".into());
    }
    let plan = plan(source, spec).map_err(|refused| Refusal {
        reason: match refused.reason() {
            "SpanNotFound" => CloseReason::SpanNotFound,
            "SpanAmbiguous" => CloseReason::SpanAmbiguous,
            _ => CloseReason::PatchRefused,
        },
        message: refused.to_string(),
    })?;
    let environment = resolve(config, &plan)?;
    let blocked_spans = plan
        .spans
        .iter()
        .filter_map(|s| {
            s.blocked.first().map(|b| BlockedSpan { span: s.id.clone(), name: s.name.clone(), kind: s.kind, blocked: b.clone() })
        })
        .take(SHOWN)
        .collect();
    let overview = PlanOverview { digest: plan.digest, counts: plan.counts, blocked_spans, environment };
    Ok((plan, overview))
}

fn resolve(config: &Config, plan: &Plan) -> Result<RunEnvironment, Refusal> {
    let recorded = &plan.environment;
    let mut environment = recorded.clone();
    if !plan.needs_sandbox() {
        return Ok(environment);
    }
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
