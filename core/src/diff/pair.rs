//! Two corresponding spans, compared.

use std::collections::{HashMap, HashSet};

use super::side::same_input;
use super::{Matching, SpanDiff, SpanSide, json_diff, text, unified};
use crate::Digest;
use crate::model::{Executor, Fidelity, Output, Span};

/// Names of variables that one pair lists.
const MAX_ENV: usize = 50;

/// What all texts of one diff may cost together.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Bytes that may still be shown.
    pub shown: usize,
    /// Bytes that may still be compared.
    pub compared: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self { shown: 4 << 20, compared: 64 << 20 }
    }
}

impl Budget {
    /// A unified diff, as long as the whole is not too much.
    pub fn unified(&mut self, a: &str, b: &str) -> Option<String> {
        if a == b {
            return None;
        }
        if !self.affords(a, b) {
            return Some("@@ differs; not shown, since the whole diff would be too long @@\n".to_owned());
        }
        let diff = unified(a, b)?;
        self.shown = self.shown.saturating_sub(diff.len());
        Some(diff)
    }

    fn affords(&mut self, a: &str, b: &str) -> bool {
        let bytes = a.len() + b.len();
        if self.shown == 0 || self.compared < bytes {
            return false;
        }
        // What is too long for a comparison costs none.
        if a.len().max(b.len()) <= text::MAX_DIFF_TEXT {
            self.compared -= bytes;
        }
        true
    }

    fn json(&mut self, a: &str, b: &str) -> Option<super::JsonDiff> {
        if a == b || a.len().max(b.len()) > text::MAX_DIFF_TEXT || !self.affords(a, b) {
            return None;
        }
        let diff = json_diff(a, b)?;
        let bytes: usize = diff.changes.iter().map(|c| c.path.len() + 2 * super::json::MAX_VALUE / 10).sum();
        self.shown = self.shown.saturating_sub(bytes);
        Some(diff)
    }
}

/// A pair with what it refers to; never without both.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counterpart<'s> {
    pub a: Option<&'s Span>,
    pub b: Option<&'s Span>,
    pub moved: bool,
}

/// What differs in a pair, before anything is put in words.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Found {
    output: bool,
    input: bool,
    env: bool,
    verdict: bool,
    workspace: bool,
    /// One side only.
    alone: bool,
    ran: bool,
    moved: bool,
    renamed: bool,
}

impl Found {
    pub fn differs(self) -> bool {
        self.output || self.input || self.env || self.verdict || self.workspace || self.alone || self.renamed
    }

    pub fn listed(self) -> bool {
        self.differs() || self.ran || self.moved
    }
}

/// `workspace` is the difference of the two workspaces that was seen last.
pub(super) fn compare(matching: Matching, pair: &Counterpart<'_>, workspace: &mut Option<(Digest, Digest)>) -> Found {
    let (Some(a), Some(b)) = (pair.a, pair.b) else {
        return Found { alone: true, output: true, ..Found::default() };
    };
    if std::ptr::eq(a, b) {
        return Found::default();
    }
    let mut found = Found {
        output: a.status() != b.status() || a.output() != b.output(),
        input: !same_input(a, b),
        verdict: a.verdict() != b.verdict(),
        ran: b.fidelity != Fidelity::Recorded,
        moved: pair.moved,
        renamed: a.opening.name != b.opening.name,
        ..Found::default()
    };
    // Unrelated runs have other hosts and pods in their environment, so that it alone says nothing.
    found.env = matching == Matching::Lineage && env(a) != env(b);
    if let (Some(x), Some(y)) = (a.snapshot_after, b.snapshot_after) {
        let now = (x.content, y.content);
        found.workspace = now.0 != now.1 && *workspace != Some(now);
        *workspace = (now.0 != now.1).then_some(now);
    }
    found
}

/// The earliest pair whose outputs differ, and of those that hold others the innermost.
pub(super) fn first_divergence(pairs: &[Counterpart<'_>], found: &[Found]) -> Option<usize> {
    let first = found.iter().position(|f| f.output)?;
    let may_hold = |p: &Counterpart<'_>| p.b.is_some() && p.a.is_some_and(|a| a.opening.executor.is_none());
    if !may_hold(&pairs[first]) {
        return Some(first);
    }
    let all: Vec<usize> = (first..pairs.len()).filter(|&at| found[at].output).collect();
    let (above_a, above_b) = (above(pairs, &all, |p| p.a), above(pairs, &all, |p| p.b));
    let holds = |p: &Counterpart<'_>| {
        may_hold(p) && (p.a.is_some_and(|a| above_a.contains(a.id.as_str())) || p.b.is_some_and(|b| above_b.contains(b.id.as_str())))
    };
    // Parents that hold each other in a loop would leave none.
    all.iter().copied().find(|&at| !holds(&pairs[at])).or(Some(first))
}

/// Ids of all spans above these.
fn above<'s>(pairs: &[Counterpart<'s>], of: &[usize], side: impl Fn(&Counterpart<'s>) -> Option<&'s Span>) -> HashSet<&'s str> {
    let parents: HashMap<&str, &str> =
        pairs.iter().filter_map(&side).filter_map(|s| Some((s.id.as_str(), s.opening.parent.as_deref()?))).collect();
    let mut above = HashSet::new();
    for span in of.iter().filter_map(|&at| side(&pairs[at])) {
        let mut at = span.id.as_str();
        while let Some(&parent) = parents.get(at) {
            if !above.insert(parent) {
                break;
            }
            at = parent;
        }
    }
    above
}

impl Counterpart<'_> {
    pub fn describe(&self, found: Found, first: bool, budget: &mut Budget) -> SpanDiff {
        let empty = Output::default();
        let x = self.a.and_then(Span::output).unwrap_or(&empty);
        let y = self.b.and_then(Span::output).unwrap_or(&empty);
        let named = self.a.or(self.b);
        let opening = named.map(|s| &s.opening);
        let renamed = self.b.map(|b| &b.opening.name).filter(|_| found.renamed).cloned();
        SpanDiff {
            span: named.map(|s| s.id.clone()).unwrap_or_default(),
            name: opening.map(|o| o.name.clone()).unwrap_or_default(),
            renamed,
            kind: opening.map_or(crate::model::SpanKind::AdapterInternal, |o| o.kind),
            a: self.a.map(side),
            b: self.b.map(side),
            differs: found.differs(),
            output_differs: found.output,
            input_differs: found.input,
            workspace_differs: found.workspace,
            first,
            moved: found.moved,
            env: self.a.zip(self.b).map(|(a, b)| env_names(a, b)).unwrap_or_default(),
            json: if self.a.is_some() && self.b.is_some() { budget.json(&x.text, &y.text) } else { None },
            text: budget.unified(&x.text, &y.text),
            stderr: budget.unified(&x.stderr, &y.stderr),
            files: Vec::new(),
            files_left_out: 0,
        }
    }
}

fn side(span: &Span) -> SpanSide {
    let closing = span.closing.as_ref();
    SpanSide {
        span: span.id.clone(),
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

pub(super) fn tokens(span: &Span) -> Option<i64> {
    let closing = span.closing.as_ref()?;
    match (closing.input_tokens, closing.output_tokens) {
        (None, None) => None,
        (i, o) => Some(i.unwrap_or(0).saturating_add(o.unwrap_or(0))),
    }
}

fn env(span: &Span) -> Option<&std::collections::BTreeMap<String, String>> {
    match &span.opening.executor {
        Some(Executor::Shell(shell)) => Some(&shell.env),
        _ => None,
    }
}

fn env_names(a: &Span, b: &Span) -> Vec<String> {
    let (Some(x), Some(y)) = (env(a), env(b)) else { return Vec::new() };
    let changed = x.iter().filter(|(name, value)| y.get(*name) != Some(value)).map(|(name, _)| name);
    let added = y.keys().filter(|name| !x.contains_key(*name));
    let mut names: Vec<String> = changed.chain(added).take(MAX_ENV).cloned().collect();
    names.sort_unstable();
    names
}
