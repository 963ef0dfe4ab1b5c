//! The planner: which spans a fork affects, before anything runs.
//!
//! It walks the units in sequence order with what is known beforehand (recorded values and those that patches give) and holds for
//! every output and every path whether it may differ and whether it may be unknown because of a blocked span. The result is an
//! upper bound: what runs is in "will run" or "may run".

mod paths;
mod prepared;
mod reasons;
mod walk;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Digest;
use crate::digest::Hasher;
use crate::fork::ForkSpec;
use crate::model::{RunEnvironment, SpanKind};
use crate::patch::{Contents, Refused};
use crate::reason::{Blocked, Cause};
use crate::source::Source;

pub use paths::Level;
pub use prepared::{FactsNeeded, Prepared};
pub(crate) use prepared::{recorded_value, same_output};
pub(crate) use reasons::{cannot_tell_writes, files_unknown, own_reasons, upstream_blocked};

/// What will become of an affected span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum Mark {
    /// Its digest is known to differ, and nothing blocks it.
    WillRun,
    MayRun,
    WillBeBlocked,
    /// It never runs: it is blocked if its inputs differ.
    MayBeBlocked,
    MayRunOrBeBlocked,
}

impl Mark {
    pub fn may_run(self) -> bool {
        matches!(self, Mark::WillRun | Mark::MayRun | Mark::MayRunOrBeBlocked)
    }

    pub fn may_block(self) -> bool {
        matches!(self, Mark::WillBeBlocked | Mark::MayBeBlocked | Mark::MayRunOrBeBlocked)
    }
}

/// One affected or overridden span of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedSpan {
    pub id: String,
    pub name: String,
    pub kind: SpanKind,
    /// Absent where a patch gives the output, so that the span is not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<Mark>,
    pub causes: Vec<Cause>,
    /// Ids of the spans that it is affected through.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub triggers: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<Blocked>,
    /// Of its arguments, where they are known beforehand: what an approval names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_digest: Option<Digest>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlanCounts {
    pub will_run: i64,
    pub may_run: i64,
    pub may_run_or_block: i64,
    pub will_block: i64,
    pub may_block: i64,
    pub overridden: i64,
    pub reusable: i64,
}

impl PlanCounts {
    fn count(&mut self, mark: Option<Mark>) {
        *match mark {
            None => &mut self.overridden,
            Some(Mark::WillRun) => &mut self.will_run,
            Some(Mark::MayRun) => &mut self.may_run,
            Some(Mark::MayRunOrBeBlocked) => &mut self.may_run_or_block,
            Some(Mark::WillBeBlocked) => &mut self.will_block,
            Some(Mark::MayBeBlocked) => &mut self.may_block,
        } += 1;
    }
}

/// What a fork will do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// The same patches on the same run have the same digest, always.
    pub digest: Digest,
    /// Id of the fork span.
    pub fork_span: String,
    /// Nothing is patched: every step that can be is run on its recorded inputs, to see whether it gives what it gave.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub check: bool,
    pub counts: PlanCounts,
    /// Affected and overridden spans in order.
    pub spans: Vec<PlannedSpan>,
    /// What the sandbox is built from: the recorded values or what the fork asks for.
    pub environment: RunEnvironment,
    /// What makes the plan larger than it had to be, or surprising.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl Plan {
    /// Whether any span may be executed, so that a sandbox is needed.
    pub fn needs_sandbox(&self) -> bool {
        self.spans.iter().any(|s| s.mark.is_some_and(Mark::may_run))
    }

    /// Nothing is affected: the fork equals its source but for overridden outputs and patched files.
    pub fn is_empty(&self) -> bool {
        self.spans.iter().all(|s| s.mark.is_none())
    }
}

/// Plans a fork.
///
/// # Errors
/// An unknown or ambiguous span, a patch that does not fit, content that is not there.
pub fn plan(source: &Source, contents: &Contents, spec: &ForkSpec) -> Result<Plan, Refused> {
    Ok(of(&Prepared::new(source, contents, spec)?))
}

/// The plan of a prepared fork.
pub fn of(fork: &Prepared<'_>) -> Plan {
    let source = fork.source;
    let (spans, counts) = walk::walk(fork);
    let digest = Hasher::new("plan")
        .value("source", &fork.spec.source)
        .value("patches", &fork.spec.patches)
        .value("inherited", &source.inherited)
        .value("model", &fork.spec.model)
        .value("approvals", &fork.spec.approvals)
        .value("reuse", &fork.spec.reuse)
        .value("environment", &fork.environment)
        .value("spans", &spans)
        .finish();
    let fork_span = source.spans[fork.fork_span].id.clone();
    let mut warnings = warnings(fork);
    if spans.is_empty() && !fork.check {
        let written = fork.patches.files.values().flatten().map(|f| format!("{:?}", f.path)).next();
        let what =
            written.map_or_else(|| "its patches change nothing".to_owned(), |path| format!("no step from there on sees {path} change"));
        warnings.insert(0, format!("nothing is affected: {what}; the fork equals its source"));
    }
    Plan { digest, fork_span, check: fork.check, counts, spans, environment: fork.environment.clone(), warnings }
}

/// Warnings that a plan has at most.
const MAX_WARNINGS: usize = 20;

fn warnings(fork: &Prepared<'_>) -> Vec<String> {
    let source = fork.source;
    let mut warnings = Vec::new();
    if fork.first < fork.fork_span && !fork.check {
        warnings.push(format!(
            "the fork starts at {:?}, before the fork span {:?}: they are one unit, or ran at the same time",
            source.spans[fork.first].opening.name, source.spans[fork.fork_span].opening.name
        ));
    }
    for unit in fork.units() {
        let outside = &source.changed(unit).outside;
        if let Some(path) = outside.first() {
            warnings.push(format!(
                "{:?} changed {path:?}{} when recorded, outside of what it declares to write; its declaration is void, so it counts as reading and writing everything",
                source.spans[unit].opening.name,
                if outside.len() > 1 { format!(" and {} more", outside.len() - 1) } else { String::new() }
            ));
        }
    }
    warnings.truncate(MAX_WARNINGS);
    warnings
}
