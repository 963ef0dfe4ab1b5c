//! Steps that were tried again after a failure.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use similar::TextDiff;
use utoipa::ToSchema;

use super::{MAX_LISTED, SpanRef};
use crate::diff::same_input;
use crate::model::{Executor, Span, SpanKind, Status};
use crate::source::Source;

/// How much of two inputs' words must be common for the later one to be another attempt.
const SIMILAR: f32 = 0.6;
/// Bytes of an input that are compared.
const MAX_COMPARED: usize = 2000;

/// Attempts at one step: same parent, kind and name, the same or a similar input, each begun after the one before had failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RetryGroup {
    pub name: String,
    pub kind: SpanKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// In order of sequence, at least two.
    pub attempts: Vec<SpanRef>,
    /// Attempts that are not listed.
    #[serde(default, skip_serializing_if = "super::is_zero")]
    pub left_out: i64,
    /// Id of the attempt that succeeded; absent where none did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub succeeded: Option<String>,
}

pub(super) struct Attempts {
    spans: Vec<usize>,
    succeeded: Option<usize>,
}

pub(super) fn groups(source: &Source) -> Vec<Attempts> {
    let mut last: HashMap<_, (usize, Option<usize>)> = HashMap::new();
    let mut groups: Vec<Attempts> = Vec::new();
    for (at, span) in source.spans.iter().enumerate() {
        let key = (source.parent(at), span.opening.kind, span.opening.name.as_str());
        let before = last.get(&key).copied();
        let again = before.filter(|&(before, _)| again(source, before, at));
        let group = again.map(|(before, group)| match group {
            Some(group) => group,
            None => {
                groups.push(Attempts { spans: vec![before], succeeded: None });
                groups.len() - 1
            }
        });
        if let Some(group) = group.map(|g| &mut groups[g]) {
            group.spans.push(at);
            group.succeeded = Some(at).filter(|_| span.status() == Status::Completed);
        }
        last.insert(key, (at, group));
    }
    groups.sort_by_key(|g| g.spans[0]);
    groups
}

fn again(source: &Source, before: usize, at: usize) -> bool {
    let gave_up = matches!(source.spans[before].status(), Status::Failed | Status::Canceled);
    gave_up && source.interval(before).1 <= source.interval(at).0 && similar(&source.spans[before], &source.spans[at])
}

fn similar(a: &Span, b: &Span) -> bool {
    if same_input(a, b) {
        return true;
    }
    let (x, y) = (input(a), input(b));
    let (x, y) = (&x[..x.floor_char_boundary(MAX_COMPARED)], &y[..y.floor_char_boundary(MAX_COMPARED)]);
    TextDiff::from_words(x, y).ratio() >= SIMILAR
}

fn input(span: &Span) -> String {
    match &span.opening.executor {
        Some(Executor::Shell(shell)) => shell.script.clone().or_else(|| Some(shell.argv.as_ref()?.join(" "))).unwrap_or_default(),
        Some(Executor::FileRead { path } | Executor::FileWrite { path, .. }) => path.clone(),
        Some(Executor::Model { request, .. }) => words(request),
        None => words(&span.opening.arguments),
    }
}

/// JSON with blanks around its values, so that it has words.
fn words(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

/// Spans that failed, and did so to no harm: a later attempt succeeded.
pub(super) fn recovered(groups: &[Attempts], spans: usize) -> Vec<bool> {
    let mut recovered = vec![false; spans];
    for group in groups {
        for &attempt in group.spans.iter().filter(|&&a| group.succeeded.is_some_and(|s| a < s)) {
            recovered[attempt] = true;
        }
    }
    recovered
}

impl Attempts {
    pub fn describe(&self, source: &Source) -> RetryGroup {
        let first = &source.spans[self.spans[0]].opening;
        RetryGroup {
            name: first.name.clone(),
            kind: first.kind,
            parent: first.parent.clone(),
            attempts: self.spans.iter().take(MAX_LISTED).map(|&s| SpanRef::of(source, s)).collect(),
            left_out: self.spans.len().saturating_sub(MAX_LISTED) as i64,
            succeeded: self.succeeded.map(|s| source.spans[s].id.clone()),
        }
    }
}
