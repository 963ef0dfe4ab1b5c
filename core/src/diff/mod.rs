//! The difference of two runs, span by span.
//!
//! Spans of a fork and its source correspond by their ids; those of unrelated runs are aligned. All that is shown is bounded,
//! and says what was left out.

mod align;
mod files;
mod json;
mod pair;
mod side;
mod text;

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use align::{Pair, align};
pub use files::{FileChange, FileChangeKind, FileSide};
pub use json::{JsonChange, JsonDiff, json_diff};
pub use pair::Budget;
pub(crate) use side::same_input;
pub use text::{MAX_DIFF_TEXT, MAX_LINE, MAX_UNIFIED, unified};

use crate::model::{Fidelity, Span, SpanKind, Status, Verdict};
use crate::reason::Blocked;
use pair::{Counterpart, Found, compare};

/// Pairs of spans that one diff lists.
pub const MAX_PAIRS: usize = 10_000;

/// One side of a pair of spans.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SpanSide {
    /// Id of the span in its run.
    pub span: String,
    pub status: Status,
    pub verdict: Verdict,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Nanoseconds; absent while it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ns: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
    pub fidelity: Fidelity,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<Blocked>,
}

/// Two spans that correspond to each other, and what differs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SpanDiff {
    /// Id in the first run; in the second, where only that has it.
    pub span: String,
    pub name: String,
    /// Its name in the second run, where that is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renamed: Option<String>,
    pub kind: SpanKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub a: Option<SpanSide>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub b: Option<SpanSide>,
    /// Whether anything but timing differs. A step that ran again with the same result is listed, and does not differ.
    pub differs: bool,
    /// Whether the output (text, stderr, exit code, status) differs.
    pub output_differs: bool,
    /// Whether it was asked something else: another command, request, path, or other arguments.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub input_differs: bool,
    /// Whether the workspace after it differs in a way that the spans before it don't show.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub workspace_differs: bool,
    /// It is the first divergence of the two runs.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub first: bool,
    /// The steps around it are in another order, or it is part of another step.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moved: bool,
    /// Names of environment variables that differ, at most 50.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Unified diffs of stdout (or text) and of stderr, where they differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr: Option<String>,
    /// Where both outputs are JSON objects or arrays and their texts differ: what differs in them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub json: Option<JsonDiff>,
    /// Files that differ between the two workspaces after the span, and that no earlier span shows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileChange>,
    /// Further files that are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub files_left_out: i64,
}

fn is_zero(n: &i64) -> bool {
    *n == 0
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Totals {
    pub spans: i64,
    /// Sum of the durations of all steps, nanoseconds; blocked ones took none.
    pub duration_ns: i64,
    pub tokens: i64,
    pub cost_usd: f64,
}

/// How many spans the two runs share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Counts {
    /// Nothing but timing differs.
    pub same: i64,
    pub changed: i64,
    pub only_a: i64,
    pub only_b: i64,
}

/// How the spans of the two runs were found to correspond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Matching {
    /// One is a fork of the other, or both of the same: by id.
    #[default]
    Lineage,
    /// By kind, name, rendered input and order.
    Alignment,
}

/// The difference of two runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Diff {
    pub matching: Matching,
    /// Only pairs that differ or ran again, in order of sequence.
    pub spans: Vec<SpanDiff>,
    /// Further pairs that are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub spans_left_out: i64,
    /// The earliest span in sequence whose output differs: its id in the first run, or in the second where only that has it. A
    /// container counts only where nothing in it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_divergent_span: Option<String>,
    pub counts: Counts,
    pub a: Totals,
    pub b: Totals,
}

impl Diff {
    /// To be called once files have been filled in: a pair that was listed only for its workspace, and has no file to show for
    /// it, is the same.
    pub fn settle(&mut self) {
        let counts = &mut self.counts;
        self.spans.retain_mut(|span| {
            if !span.workspace_differs || !span.files.is_empty() || span.files_left_out > 0 {
                return true;
            }
            span.workspace_differs = false;
            let paired = span.a.is_some() && span.b.is_some();
            if !paired || span.output_differs || span.input_differs || !span.env.is_empty() || span.verdict_differs() {
                return true;
            }
            span.differs = false;
            counts.changed -= 1;
            counts.same += 1;
            span.b.as_ref().is_some_and(|b| b.fidelity != Fidelity::Recorded)
        });
    }
}

impl SpanDiff {
    fn verdict_differs(&self) -> bool {
        self.a.as_ref().map(|a| a.verdict) != self.b.as_ref().map(|b| b.verdict)
    }
}

/// Compares a fork with its source, or two forks of the same: spans correspond by id.
pub fn by_lineage(a: &[Span], b: &[Span]) -> Diff {
    let pairs = lineage(a, b);
    diff(Matching::Lineage, pairs, totals(a.iter().map(Outline::of)), totals(b.iter().map(Outline::of)))
}

/// Compares two runs that need not have anything in common: spans correspond as [`align`] finds.
pub fn by_alignment(a: &[Span], b: &[Span]) -> Diff {
    let pairs = align(a, b).into_iter().map(|p| Counterpart { a: p.a.map(|i| &a[i]), b: p.b.map(|j| &b[j]), moved: p.moved });
    diff(Matching::Alignment, pairs.collect(), totals(a.iter().map(Outline::of)), totals(b.iter().map(Outline::of)))
}

fn diff(matching: Matching, pairs: Vec<Counterpart<'_>>, a: Totals, b: Totals) -> Diff {
    let mut diff = Diff { matching, a, b, ..Diff::default() };
    let mut budget = Budget::default();
    let mut workspace = None;
    let found: Vec<Found> = pairs.iter().map(|pair| compare(matching, pair, &mut workspace)).collect();
    let first = pair::first_divergence(&pairs, &found);
    for (at, (pair, found)) in pairs.iter().zip(found).enumerate() {
        match (pair.a.is_some(), pair.b.is_some()) {
            (true, false) => diff.counts.only_a += 1,
            (false, true) => diff.counts.only_b += 1,
            _ if found.differs() => diff.counts.changed += 1,
            _ => diff.counts.same += 1,
        }
        let is_first = first == Some(at);
        if !found.listed() {
            continue;
        }
        if diff.spans.len() >= MAX_PAIRS && !is_first {
            diff.spans_left_out += 1;
            continue;
        }
        let span = pair.describe(found, is_first, &mut budget);
        if is_first {
            diff.first_divergent_span = Some(span.span.clone());
        }
        diff.spans.push(span);
    }
    diff
}

/// Pairs of the same id, in order. A fork keeps the place of what it takes from its source, so one pass over both finds them;
/// what has another place is looked up.
fn lineage<'s>(a: &'s [Span], b: &'s [Span]) -> Vec<Counterpart<'s>> {
    let (a, b) = (ordered(a), ordered(b));
    let place = |s: &'s Span| (s.ord, s.id.as_str());
    let mut pairs = Vec::with_capacity(a.len().max(b.len()));
    let (mut x, mut y) = (a.iter().copied().peekable(), b.iter().copied().peekable());
    let mut displaced: HashMap<&str, usize> = HashMap::new();
    loop {
        let order = match (x.peek(), y.peek()) {
            (None, None) => break,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some(x), Some(y)) => place(x).cmp(&place(y)),
        };
        let a = if order.is_le() { x.next() } else { None };
        let b = if order.is_ge() { y.next() } else { None };
        if let (None, Some(b)) = (a, b) {
            displaced.insert(b.id.as_str(), pairs.len());
        }
        pairs.push(Counterpart { a, b, moved: false });
    }
    if displaced.is_empty() || displaced.len() == pairs.len() {
        return pairs;
    }
    for at in 0..pairs.len() {
        if let (Some(a), None) = (pairs[at].a, pairs[at].b)
            && let Some(from) = displaced.remove(a.id.as_str())
        {
            pairs[at].b = pairs[from].b.take();
        }
    }
    pairs.retain(|p| p.a.is_some() || p.b.is_some());
    pairs
}

fn ordered(spans: &[Span]) -> Vec<&Span> {
    let mut ordered: Vec<&Span> = spans.iter().collect();
    if !ordered.is_sorted_by_key(|s| (s.ord, &s.id)) {
        ordered.sort_unstable_by(|x, y| (x.ord, &x.id).cmp(&(y.ord, &y.id)));
    }
    ordered
}

/// What a run's totals are made of; known without any payload.
#[derive(Clone, Copy, Debug)]
pub struct Outline<'s> {
    pub id: &'s str,
    pub parent: Option<&'s str>,
    pub status: Status,
    pub started: i64,
    pub ended: Option<i64>,
    pub tokens: Option<i64>,
    pub cost_usd: Option<f64>,
}

impl<'s> Outline<'s> {
    pub fn of(span: &'s Span) -> Self {
        let closing = span.closing.as_ref();
        Self {
            id: &span.id,
            parent: span.opening.parent.as_deref(),
            status: span.status(),
            started: span.opening.started,
            ended: closing.map(|c| c.ended),
            tokens: pair::tokens(span),
            cost_usd: closing.and_then(|c| c.cost_usd),
        }
    }
}

/// A fork's steps ran at other times than those that it reuses, so durations are added up rather than measured from first to last.
pub fn totals<'s>(spans: impl Iterator<Item = Outline<'s>>) -> Totals {
    let spans: Vec<Outline<'_>> = spans.collect();
    let mut parents: HashSet<&str> = HashSet::new();
    let mut last = None;
    for span in &spans {
        // Siblings follow each other: most need no look-up.
        if span.parent.is_some() && span.parent != last {
            parents.extend(span.parent);
            last = span.parent;
        }
    }
    let mut totals = Totals::default();
    for span in spans {
        totals.spans += 1;
        totals.tokens = totals.tokens.saturating_add(span.tokens.unwrap_or(0));
        totals.cost_usd += span.cost_usd.unwrap_or(0.0);
        if let Some(ended) = span.ended
            && span.status != Status::Blocked
            && !parents.contains(span.id)
        {
            totals.duration_ns = totals.duration_ns.saturating_add(ended.saturating_sub(span.started));
        }
    }
    totals
}

#[cfg(test)]
mod tests;
