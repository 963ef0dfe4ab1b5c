//! What went wrong in a run, and because of what: read off its record, nothing is executed or guessed.

mod blocked;
mod path;
mod retries;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use blocked::{BlockedGroup, BlockedSpan};
pub use path::{Link, Via};
pub use retries::RetryGroup;

use crate::model::{SpanKind, Status, Verdict};
use crate::source::Source;

/// Entries of one list; what lies beyond is counted.
pub const MAX_LISTED: usize = 200;

/// Bytes of an explanation that is quoted from the record.
const MAX_QUOTED: usize = 300;

/// How the run ended, as whoever finished it said.
#[derive(Clone, Copy, Debug, Default)]
pub struct End<'a> {
    /// `None` while the run is open.
    pub outcome: Option<Status>,
    /// Id of the span that decides it.
    pub decided_by: Option<&'a str>,
}

/// A span, and what is known of its failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SpanRef {
    pub span: String,
    pub name: String,
    pub kind: SpanKind,
    pub status: Status,
    pub verdict: Verdict,
    /// Place in the run's order, from 1.
    pub step: i64,
    /// Why it failed, as the record has it: the error, else the exit code and the last line of stderr.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// What a run's record says about its failures.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Forensics {
    /// All of it in a sentence.
    pub summary: String,
    /// Spans that failed; containers not counted that only hold one.
    pub failed: i64,
    pub blocked: i64,
    /// The earliest span that failed; of spans that hold each other the innermost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_failed: Option<SpanRef>,
    /// The deepest failing dependency of the span that decides how the run ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_cause: Option<SpanRef>,
    /// From the root cause to the span that decides how the run ended; empty for a run that ended well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub path: Vec<Link>,
    /// Links in the middle of the path that are not listed.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub path_left_out: i64,
    /// Blocked spans, by the one that they come from.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked_by: Vec<BlockedGroup>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub blocked_by_left_out: i64,
    /// Steps that were tried again after a failure.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub retries: Vec<RetryGroup>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub retries_left_out: i64,
}

fn is_zero(n: &i64) -> bool {
    *n == 0
}

/// Looks at a run once.
pub fn forensics(source: &Source, end: End<'_>) -> Forensics {
    let all = 0..source.spans.len();
    let innermost = innermost_failures(source);
    let tried = retries::groups(source);
    let recovered = retries::recovered(&tried, source.spans.len());
    let walk = path::Walk::new(source, end, &recovered);
    let way = walk.end().map(|end| walk.path_to(end)).unwrap_or_default();
    let (blocked_by, blocked_by_left_out) = bounded(blocked::groups(source));
    let (retries, retries_left_out) = bounded(tried.iter().map(|g| g.describe(source)).collect());
    let mut found = Forensics {
        summary: String::new(),
        failed: innermost.len() as i64,
        blocked: all.filter(|&i| source.spans[i].status() == Status::Blocked).count() as i64,
        first_failed: innermost.first().map(|&i| SpanRef::of(source, i)),
        root_cause: way.first().map(|(root, _)| SpanRef::of(source, *root)),
        path_left_out: way.len().saturating_sub(MAX_LISTED) as i64,
        path: path::describe(source, way),
        blocked_by,
        blocked_by_left_out,
        retries,
        retries_left_out,
    };
    found.summary = summary(&found, end);
    found
}

fn bounded<T>(mut list: Vec<T>) -> (Vec<T>, i64) {
    let left_out = list.len().saturating_sub(MAX_LISTED) as i64;
    list.truncate(MAX_LISTED);
    (list, left_out)
}

/// Failed by itself: its command, its call, or a guard that tripped.
fn failed(source: &Source, span: usize) -> bool {
    source.spans[span].status() == Status::Failed || source.spans[span].verdict() == Verdict::Tripped
}

/// In order of sequence.
fn innermost_failures(source: &Source) -> Vec<usize> {
    let mut holds_one = vec![false; source.spans.len()];
    let failures: Vec<usize> = (0..source.spans.len()).filter(|&i| failed(source, i)).collect();
    for &span in &failures {
        let mut at = source.parent(span);
        while let Some(parent) = at.filter(|&p| !holds_one[p]) {
            holds_one[parent] = true;
            at = source.parent(parent);
        }
    }
    let innermost: Vec<usize> = failures.iter().copied().filter(|&i| !holds_one[i]).collect();
    // Parents that hold each other in a loop would leave none.
    if innermost.is_empty() { failures } else { innermost }
}

impl SpanRef {
    fn of(source: &Source, at: usize) -> Self {
        let span = &source.spans[at];
        Self {
            span: span.id.clone(),
            name: span.opening.name.clone(),
            kind: span.opening.kind,
            status: span.status(),
            verdict: span.verdict(),
            step: at as i64 + 1,
            why: why(source, at),
        }
    }
}

fn why(source: &Source, at: usize) -> Option<String> {
    let span = &source.spans[at];
    let closing = span.closing.as_ref()?;
    let quoted = |text: &str| {
        let line = text.trim();
        let to = line.floor_char_boundary(MAX_QUOTED);
        if to < line.len() { format!("{}…", &line[..to]) } else { line.to_owned() }
    };
    if let Some(blocked) = closing.blocked.first() {
        return Some(format!("{}: {}", blocked.reason, quoted(blocked.message.lines().next().unwrap_or_default())));
    }
    match closing.verdict {
        Verdict::Deny | Verdict::GateDeny => return Some(format!("verdict {}", closing.verdict)),
        Verdict::None | Verdict::Allow | Verdict::GateAllow | Verdict::Tripped | Verdict::Route => {}
    }
    if !matches!(closing.status, Status::Failed | Status::Canceled) && closing.verdict != Verdict::Tripped {
        return None;
    }
    if let Some(error) = closing.error.as_deref().filter(|e| !e.trim().is_empty()) {
        return Some(quoted(error.trim().lines().next().unwrap_or_default()));
    }
    let output = closing.output.as_ref()?;
    let last = output.stderr.trim_end().lines().last().map(quoted).filter(|l| !l.is_empty());
    match (output.exit_code.filter(|&code| code != 0), last) {
        (Some(code), Some(line)) => Some(format!("exit code {code}: {line}")),
        (Some(code), None) => Some(format!("exit code {code}")),
        (None, line) => line,
    }
}

fn summary(found: &Forensics, end: End<'_>) -> String {
    let because = |span: &SpanRef| span.why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
    let fate = |span: &SpanRef| match span.status {
        _ if span.verdict == Verdict::Tripped => "tripped",
        _ if span.verdict.refuses() => "was refused",
        Status::Blocked => "is blocked",
        Status::Canceled => "was interrupted",
        Status::Running => "never ended",
        _ => "failed",
    };
    match (&found.root_cause, found.path.last()) {
        (Some(root), Some(last)) if root.span == last.span.span => format!("`{}` {}{}.", root.name, fate(root), because(root)),
        (Some(root), Some(last)) => {
            let last = &last.span;
            format!("`{}` {} because `{}` {}{}.", last.name, fate(last), root.name, fate(root), because(root))
        }
        _ => match &found.first_failed {
            Some(first) if end.outcome == Some(Status::Completed) => {
                format!("`{}` failed{}, and the run still ended well.", first.name, because(first))
            }
            Some(first) => format!("`{}` failed{}.", first.name, because(first)),
            None if end.outcome.is_some_and(|o| o != Status::Completed) => "The run did not end well, and no span of it failed.".to_owned(),
            None => match found.blocked {
                0 => "Nothing failed and nothing is blocked.".to_owned(),
                1 => "Nothing failed; one span is blocked.".to_owned(),
                n => format!("Nothing failed; {n} spans are blocked."),
            },
        },
    }
}
