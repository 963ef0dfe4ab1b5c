//! The difference of two runs, computed when it is read.

mod files;
mod words;

use std::collections::HashMap;

use replayfork_client::read::RunDiff;
use replayfork_core::diff::{Compared, Diff, Matching, Prints};
use replayfork_core::model::{Fidelity, Span, SpanKind};

use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::runs::Found;
use crate::store::{prints, spans};

pub use files::not_in_tree;

/// Compares two runs of a namespace: by lineage where one is a fork of the other, or both come from the same; else as aligned.
///
/// # Errors
/// What the database says.
pub async fn run_diff(client: &impl Connection, a: &Found, b: &Found) -> ApiResult<RunDiff> {
    let (of_a, of_b, compared) = compare(client, a, b).await?;
    let left = records(client, a, &of_a, compared.listed().filter_map(|pair| pair.a)).await?;
    let right = records(client, b, &of_b, compared.listed().filter_map(|pair| pair.b)).await?;
    let mut diff = compared.describe(|place| &left[&place], |place| &right[&place]);
    let notes = files::add(client, &a.ns, &by_id(&left), &by_id(&right), &mut diff).await?;
    let fates = compared.fates(&of_a, &of_b);
    Ok(describe(a, b, root(a) == root(b), diff, &fates, notes))
}

fn root(found: &Found) -> i64 {
    found.base_rid.unwrap_or(found.rid)
}

/// What corresponds and what differs, with the prints of both runs; no record is read.
///
/// # Errors
/// What the database says.
pub async fn compare(client: &impl Connection, a: &Found, b: &Found) -> ApiResult<(Prints, Prints, Compared)> {
    let (of_a, of_b) = (prints::of(client, a).await?, prints::of(client, b).await?);
    let matching = if root(a) == root(b) { Matching::Lineage } else { Matching::Alignment };
    let compared = Compared::of(matching, &of_a, &of_b);
    Ok((of_a, of_b, compared))
}

/// The records at all of these places.
async fn records(
    client: &impl Connection,
    found: &Found,
    prints: &Prints,
    places: impl Iterator<Item = usize>,
) -> ApiResult<HashMap<usize, Span>> {
    let wanted: HashMap<&str, usize> = places.map(|place| (prints.id(place), place)).collect();
    let ids: Vec<String> = wanted.keys().map(|id| (*id).to_owned()).collect();
    let read = spans::of_ids(client, found, &ids).await?;
    let read: HashMap<usize, Span> = read.into_iter().filter_map(|s| Some((*wanted.get(s.id.as_str())?, s))).collect();
    let whole = read.len() == wanted.len();
    if whole { Ok(read) } else { Err(ApiError::internal(&format!("steps of run {} are gone", found.run.name))) }
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
type ById<'s> = HashMap<&'s str, &'s Span>;

fn by_id(spans: &HashMap<usize, Span>) -> ById<'_> {
    spans.values().map(|s| (s.id.as_str(), s)).collect()
}
