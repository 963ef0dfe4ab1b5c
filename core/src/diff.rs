//! The difference of two runs, span by span.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use similar::TextDiff;
use utoipa::ToSchema;

use crate::model::{Fidelity, Output, Span, SpanKind, Status, Verdict};
use crate::reason::Blocked;

/// Bytes of output above which a diff says only that they differ.
pub const MAX_DIFF_TEXT: usize = 1 << 20;

/// How a file differs between two workspaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileChangeKind {
    Added,
    Removed,
    Modified,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileChange {
    pub path: String,
    pub change: FileChangeKind,
    /// Unified diff of the contents; absent for binary or large files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unified: Option<String>,
}

/// One side of a pair of spans.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SpanSide {
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
    pub span: String,
    pub name: String,
    pub kind: SpanKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub a: Option<SpanSide>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub b: Option<SpanSide>,
    /// Whether anything but timing differs.
    pub differs: bool,
    /// Whether the output (text, stderr, exit code, status) differs.
    pub output_differs: bool,
    /// Unified diffs of stdout (or text) and of stderr, where they differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr: Option<String>,
    /// Files that differ between the two workspaces after the span.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileChange>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Totals {
    pub spans: i64,
    /// Sum of the durations of all steps, nanoseconds; blocked ones took none.
    pub duration_ns: i64,
    pub tokens: i64,
    pub cost_usd: f64,
}

/// The difference of two runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Diff {
    /// Only pairs where something but timing differs, in order of sequence.
    pub spans: Vec<SpanDiff>,
    /// The earliest span in sequence whose output differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_divergent_span: Option<String>,
    pub a: Totals,
    pub b: Totals,
}

/// A unified diff with three lines of context; `None` where the texts are equal.
pub fn unified(a: &str, b: &str) -> Option<String> {
    if a == b {
        return None;
    }
    if a.len().max(b.len()) > MAX_DIFF_TEXT {
        return Some(format!("@@ too long to compare line by line: {} and {} bytes @@\n", a.len(), b.len()));
    }
    Some(TextDiff::from_lines(a, b).unified_diff().context_radius(3).to_string())
}

/// Compares a fork with its source: spans correspond by id.
pub fn by_lineage(a: &[Span], b: &[Span]) -> Diff {
    let of_b: HashMap<&str, &Span> = b.iter().map(|s| (s.id.as_str(), s)).collect();
    let of_a: HashMap<&str, &Span> = a.iter().map(|s| (s.id.as_str(), s)).collect();
    let mut order: Vec<&Span> = a.iter().collect();
    order.extend(b.iter().filter(|s| !of_a.contains_key(s.id.as_str())));
    order.sort_by(|x, y| (x.ord, &x.id).cmp(&(y.ord, &y.id)));
    let spans: Vec<_> =
        order.iter().map(|s| pair(of_a.get(s.id.as_str()).copied(), of_b.get(s.id.as_str()).copied())).filter(|d| d.differs).collect();
    let first_divergent_span = spans.iter().find(|d| d.output_differs).map(|d| d.span.clone());
    Diff { spans, first_divergent_span, a: totals(a), b: totals(b) }
}

fn pair(a: Option<&Span>, b: Option<&Span>) -> SpanDiff {
    let of = a.or(b).expect("a pair has a side");
    let empty = Output::default();
    let outputs = (a.and_then(Span::output), b.and_then(Span::output));
    let (x, y) = (outputs.0.unwrap_or(&empty), outputs.1.unwrap_or(&empty));
    let output_differs = outputs.0 != outputs.1 || a.map(Span::status) != b.map(Span::status);
    let inputs_differ = match (a, b) {
        (Some(a), Some(b)) => a.opening.executor != b.opening.executor,
        _ => true,
    };
    let verdicts_differ = a.map(Span::verdict) != b.map(Span::verdict);
    let files_differ = a.and_then(|s| s.snapshot_after).map(|s| s.content) != b.and_then(|s| s.snapshot_after).map(|s| s.content);
    let ran_again = b.is_some_and(|b| b.fidelity != Fidelity::Recorded);
    SpanDiff {
        span: of.id.clone(),
        name: of.opening.name.clone(),
        kind: of.opening.kind,
        a: a.map(side),
        b: b.map(side),
        differs: output_differs || inputs_differ || verdicts_differ || files_differ || ran_again,
        output_differs,
        text: unified(&x.text, &y.text),
        stderr: unified(&x.stderr, &y.stderr),
        files: Vec::new(),
    }
}

fn side(span: &Span) -> SpanSide {
    let closing = span.closing.as_ref();
    SpanSide {
        status: span.status(),
        verdict: span.verdict(),
        exit_code: span.output().and_then(|o| o.exit_code),
        duration_ns: closing.map(|c| c.ended.saturating_sub(span.opening.started)),
        tokens: tokens(span),
        cost_usd: closing.and_then(|c| c.cost_usd),
        fidelity: span.fidelity,
        blocked: closing.map(|c| c.blocked.clone()).unwrap_or_default(),
    }
}

fn tokens(span: &Span) -> Option<i64> {
    let closing = span.closing.as_ref()?;
    match (closing.input_tokens, closing.output_tokens) {
        (None, None) => None,
        (i, o) => Some(i.unwrap_or(0) + o.unwrap_or(0)),
    }
}

/// A fork's steps ran at other times than those that it reuses, so durations are added up rather than measured from first to last.
fn totals(spans: &[Span]) -> Totals {
    let parents: HashSet<&str> = spans.iter().filter_map(|s| s.opening.parent.as_deref()).collect();
    let steps = spans.iter().filter(|s| !parents.contains(s.id.as_str()) && s.status() != Status::Blocked);
    Totals {
        spans: spans.len() as i64,
        duration_ns: steps.filter_map(|s| Some(s.closing.as_ref()?.ended.saturating_sub(s.opening.started))).sum(),
        tokens: spans.iter().filter_map(tokens).sum(),
        cost_usd: spans.iter().filter_map(|s| s.closing.as_ref()?.cost_usd).sum(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn span(id: &str, started: i64, ended: i64, over: serde_json::Value) -> Span {
        let mut span = json!({
            "id": id, "ord": started, "opening": {"name": id, "kind": "ShellCommand", "started": started},
            "closing": {"ended": ended, "status": "Completed", "output": {"text": "out", "exit_code": 0}, "input_tokens": 3, "output_tokens": 4},
        });
        for (path, value) in over.as_object().unwrap() {
            *span.pointer_mut(path).unwrap() = value.clone();
        }
        serde_json::from_value(span).unwrap()
    }

    #[test]
    fn a_forks_duration_is_that_of_its_steps_and_not_of_the_time_between() {
        let source = [span("a", 0, 10, json!({})), span("b", 10, 40, json!({}))];
        let ran = span("b", 9_000, 9_002, json!({"/closing/output/text": "other"}));
        let fork = [source[0].clone(), Span { fidelity: Fidelity::Reexecuted, ord: 10, ..ran }];
        let diff = by_lineage(&source, &fork);
        assert_eq!((diff.a.duration_ns, diff.b.duration_ns), (40, 12));
        assert_eq!((diff.a.tokens, diff.b.tokens), (14, 14));
        assert_eq!(diff.first_divergent_span.as_deref(), Some("b"));
        assert_eq!(diff.spans.len(), 1);
        assert_eq!(
            diff.spans[0].text.as_deref(),
            Some("@@ -1 +1 @@\n-out\n\\ No newline at end of file\n+other\n\\ No newline at end of file\n")
        );
    }

    #[test]
    fn timing_alone_is_no_difference() {
        let a = [span("a", 0, 10, json!({}))];
        let b = [span("a", 5, 500, json!({}))];
        let diff = by_lineage(&a, &b);
        assert!(diff.spans.is_empty() && diff.first_divergent_span.is_none());
    }

    #[test]
    fn a_blocked_span_diverges_and_took_no_time() {
        let a = [span("a", 0, 10, json!({}))];
        let b = [span("a", 90, 95, json!({"/closing/status": "Blocked", "/closing/output": null}))];
        let diff = by_lineage(&a, &b);
        assert!(diff.spans[0].output_differs);
        assert_eq!(diff.b.duration_ns, 0);
    }
}
