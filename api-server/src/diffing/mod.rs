//! The difference of two runs, computed when it is read.

mod files;
mod words;

use deadpool_postgres::GenericClient;
use replayfork_client::read::RunDiff;
use replayfork_core::diff::{Diff, by_alignment, by_lineage};
use replayfork_core::model::{Fidelity, Span, SpanKind};

use crate::problem::ApiResult;
use crate::store::runs::Found;
use crate::store::{lineage, spans};

pub use files::not_in_tree;

/// Compares two runs of a namespace: by lineage where one is a fork of the other, or both come from the same; else as aligned.
///
/// # Errors
/// What the database says.
pub async fn run_diff(client: &impl GenericClient, a: &Found, b: &Found) -> ApiResult<RunDiff> {
    let root = |f: &Found| f.base_rid.unwrap_or(f.rid);
    let related = root(a) == root(b);
    let (left, right, mut diff, fates);
    if related {
        let both = lineage::differing(client, a, b).await?;
        (left, right) = (both.a.spans, both.b.spans);
        diff = by_lineage(&left, &right);
        // What both take from the same row was not even read.
        diff.counts.same += both.same;
        (diff.a, diff.b, fates) = (both.a.totals, both.b.totals, both.b.fates);
    } else {
        (left, right) = (spans::all(client, a).await?, spans::all(client, b).await?);
        diff = by_alignment(&left, &right);
        fates = right.iter().map(|s| (s.fidelity, s.opening.kind)).collect();
    }
    let notes = files::add(client, a.ns, &left, &right, &mut diff).await?;
    Ok(describe(a, b, related, diff, &fates, notes))
}

fn describe(a: &Found, b: &Found, related: bool, diff: Diff, fates: &[(Fidelity, SpanKind)], notes: Vec<String>) -> RunDiff {
    let count = |fidelity| fates.iter().filter(|(f, _)| *f == fidelity).count() as i64;
    let (reexecuted, overridden, blocked) = (count(Fidelity::Reexecuted), count(Fidelity::Overridden), count(Fidelity::Blocked));
    // A run that has nothing to do with the first takes nothing from it.
    let reused = if related { fates.len() as i64 - reexecuted - overridden - blocked - count(Fidelity::Skipped) } else { 0 };
    let summary = if related { words::of_fork(&diff, &b.run, fates, reused) } else { words::of_unrelated(&diff, &a.run, &b.run) };
    let outcome_changed = a.run.outcome != b.run.outcome;
    RunDiff { a: a.run.clone(), b: b.run.clone(), summary, outcome_changed, reexecuted, reused, overridden, blocked, notes, diff }
}

/// The spans of a diff's side by id.
type ById<'s> = std::collections::HashMap<&'s str, &'s Span>;

fn by_id(spans: &[Span]) -> ById<'_> {
    spans.iter().map(|s| (s.id.as_str(), s)).collect()
}
