//! The planner: which spans a fork affects, before anything runs.
//!
//! It walks the units in sequence order with what is known beforehand (recorded values and those that patches give) and holds for
//! every output and every path whether it may differ and whether it may be unknown because of a blocked span. The result is an
//! upper bound: what runs is in "will run" or "may run".

mod outline;
mod paths;
mod prepared;
mod reasons;
mod view;
mod walk;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Digest;
use crate::fork::ForkSpec;
use crate::graph::Graph;
use crate::model::{RunEnvironment, SpanKind};
use crate::patch::{Contents, Refused};
use crate::reason::{Blocked, Cause};
use crate::source::Source;

pub use outline::{Causes, Outline, Planned};
pub use paths::{Few, Level};
pub use prepared::{FactsNeeded, Prepared};
pub(crate) use prepared::{recorded_value, same_output};
pub use reasons::Why;
pub use view::{Names, Records, View};

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
    /// Ids of the spans that it is affected through, at most 8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub triggers: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<Blocked>,
    /// Of its arguments, where they are known beforehand: what an approval names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_digest: Option<Digest>,
}

impl PlannedSpan {
    /// What will become of it, in the words of people.
    pub fn fate(&self) -> &'static str {
        match self.mark {
            None => "overridden",
            Some(Mark::WillRun) => "will run",
            Some(Mark::MayRun) => "may run",
            Some(Mark::WillBeBlocked) => "will be blocked",
            Some(Mark::MayBeBlocked) => "may be blocked",
            Some(Mark::MayRunOrBeBlocked) => "may run or be blocked",
        }
    }
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

fn is_zero(n: &i64) -> bool {
    *n == 0
}

impl PlanCounts {
    /// Spans that may be executed.
    pub fn may_be_run(&self) -> i64 {
        self.will_run + self.may_run + self.may_run_or_block
    }

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
    /// Whether a pod is needed: a step may be executed, a patch changes the workspace, or one that is passed over leaves files of it
    /// unknown.
    pub sandbox: bool,
    /// Affected and overridden spans in order; an api-server lists the first 1,000.
    pub spans: Vec<PlannedSpan>,
    /// Further ones that are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spans_left_out: i64,
    /// What the sandbox is built from: the recorded values or what the fork asks for.
    pub environment: RunEnvironment,
    /// What makes the plan larger than it had to be, or surprising.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

impl Plan {
    /// Nothing is affected: the fork equals its source but for overridden outputs and patched files.
    pub fn is_empty(&self) -> bool {
        self.counts.may_be_run() + self.counts.will_block + self.counts.may_block == 0
    }
}

/// Plans a fork.
///
/// # Errors
/// An unknown or ambiguous span, a patch that does not fit, content that is not there.
pub fn plan(source: &Source, contents: &Contents, spec: &ForkSpec) -> Result<Plan, Refused> {
    Ok(of(&Prepared::new(source, contents, spec)?))
}

/// The plan of a prepared fork, of which all records are there.
pub fn of(fork: &Prepared<'_>) -> Plan {
    let graph = Graph::of(fork.source);
    let view = View::whole(fork, &graph);
    // No record is missing.
    let outline = outline(&view).unwrap_or_default();
    outline.plan(&view, &Records(fork.source), usize::MAX)
}

/// The outline of a plan: all that is decided, without the words.
///
/// # Errors
/// The spans whose records are needed beyond those that are there.
pub fn outline(view: &View<'_>) -> Result<Outline, BTreeSet<u32>> {
    walk::walk(view)
}
