//! The difference of two runs, span by span.
//!
//! Spans of a fork and its source correspond by their ids; those of unrelated runs are aligned. All that is shown is bounded,
//! and says what was left out.

mod align;
mod files;
mod json;
mod pair;
mod prints;
mod side;
mod text;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use align::{Pair, align};
pub use files::{FileChange, FileChangeKind, FileSide};
pub use json::{JsonChange, JsonDiff, json_diff};
pub use pair::Budget;
pub(crate) use prints::same_input;
pub use prints::{PART, Print, Prints, workspace};
pub use text::{MAX_DIFF_TEXT, MAX_LINE, MAX_UNIFIED, unified};

use crate::model::{Fidelity, Span, SpanKind, Status, Verdict};
use crate::reason::Blocked;
use pair::{Counterpart, Found, compare, first_divergence};

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

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
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
    by_records(Matching::Lineage, a, b)
}

/// Compares two runs that need not have anything in common: spans correspond as [`align`] finds.
pub fn by_alignment(a: &[Span], b: &[Span]) -> Diff {
    by_records(Matching::Alignment, a, b)
}

fn by_records(matching: Matching, a: &[Span], b: &[Span]) -> Diff {
    let (a, b) = (ordered(a), ordered(b));
    let (of_a, of_b) = (Prints::of(a.iter().copied()), Prints::of(b.iter().copied()));
    Compared::of(matching, &of_a, &of_b).describe(|place| a[place], |place| b[place])
}

fn ordered(spans: &[Span]) -> Vec<&Span> {
    let mut ordered: Vec<&Span> = spans.iter().collect();
    if !ordered.is_sorted_by_key(|s| (s.ord, &s.id)) {
        ordered.sort_unstable_by(|x, y| (x.ord, &x.id).cmp(&(y.ord, &y.id)));
    }
    ordered
}

/// Two runs compared by their prints: what corresponds, what differs, and which pairs a diff lists.
pub struct Compared {
    matching: Matching,
    pairs: Vec<Pair>,
    found: Vec<Found>,
    first: Option<usize>,
    /// Places among the pairs.
    listed: Vec<usize>,
    left_out: i64,
    counts: Counts,
    totals: (Totals, Totals),
}

impl Compared {
    pub fn of(matching: Matching, a: &Prints, b: &Prints) -> Self {
        let pairs = match matching {
            Matching::Lineage => lineage(a, b),
            Matching::Alignment => align(a, b),
        };
        let mut workspace = None;
        let found: Vec<Found> = pairs.iter().map(|pair| compare(matching, pair, a, b, &mut workspace)).collect();
        let first = first_divergence(&pairs, &found, a, b);
        let (mut counts, mut listed, mut left_out) = (Counts::default(), Vec::new(), 0);
        for (at, (pair, found)) in pairs.iter().zip(&found).enumerate() {
            match (pair.a.is_some(), pair.b.is_some()) {
                (true, false) => counts.only_a += 1,
                (false, true) => counts.only_b += 1,
                _ if found.differs() => counts.changed += 1,
                _ => counts.same += 1,
            }
            if found.listed() && (listed.len() < MAX_PAIRS || first == Some(at)) {
                listed.push(at);
            } else if found.listed() {
                left_out += 1;
            }
        }
        Self { matching, pairs, found, first, listed, left_out, counts, totals: (a.totals(), b.totals()) }
    }

    /// The pairs whose records the diff's words need.
    pub fn listed(&self) -> impl Iterator<Item = Pair> + '_ {
        self.listed.iter().map(|&at| self.pairs[at])
    }

    /// Where each result of the second run is from, with its kind; what that run took over from the first counts as recorded.
    pub fn fates(&self, a: &Prints, b: &Prints) -> Vec<(Fidelity, SpanKind)> {
        let of_pair = |pair: &Pair| {
            let y = &b.spans[pair.b?];
            let taken = self.matching == Matching::Lineage && pair.a.is_some_and(|i| y.is_taken_from(&a.spans[i]));
            Some((if taken { Fidelity::Recorded } else { y.fidelity }, y.kind))
        };
        self.pairs.iter().filter_map(of_pair).collect()
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// In words; the two give the records of [`Compared::listed`] by place.
    pub fn describe<'s>(&self, a: impl Fn(usize) -> &'s Span, b: impl Fn(usize) -> &'s Span) -> Diff {
        let mut budget = Budget::default();
        let (of_a, of_b) = self.totals;
        let mut diff =
            Diff { matching: self.matching, spans_left_out: self.left_out, counts: self.counts, a: of_a, b: of_b, ..Diff::default() };
        for &at in &self.listed {
            let pair = Counterpart { a: self.pairs[at].a.map(&a), b: self.pairs[at].b.map(&b) };
            let is_first = self.first == Some(at);
            let span = pair.describe(self.found[at], is_first, &mut budget);
            if is_first {
                diff.first_divergent_span = Some(span.span.clone());
            }
            diff.spans.push(span);
        }
        diff
    }
}

/// Pairs of the same id, in order of `a`; what only `b` has comes after what it follows there.
fn lineage(a: &Prints, b: &Prints) -> Vec<Pair> {
    let pair = |a, b| Pair { a, b, moved: false };
    if a.same_ids(b) {
        return (0..a.len()).map(|place| pair(Some(place), Some(place))).collect();
    }
    let (in_a, in_b) = (a.places(), b.places());
    let only_b = |place: &usize| !in_a.contains_key(b.id(*place));
    let (mut pairs, mut next) = (Vec::with_capacity(a.len().max(b.len())), 0);
    for place in 0..a.len() {
        let other = in_b.get(a.id(place)).copied();
        if let Some(other) = other.filter(|other| *other >= next) {
            pairs.extend((next..other).filter(only_b).map(|place| pair(None, Some(place))));
            next = other + 1;
        }
        pairs.push(pair(Some(place), other));
    }
    pairs.extend((next..b.len()).filter(only_b).map(|place| pair(None, Some(place))));
    pairs
}

#[cfg(test)]
mod tests;
