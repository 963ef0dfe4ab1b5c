//! Two corresponding spans, compared.

use super::align::Pair;
use super::prints::{Half, NONE, Prints};
use super::{Matching, SpanDiff, SpanSide, json_diff, text, unified};
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
pub(super) fn compare(matching: Matching, pair: &Pair, a: &Prints, b: &Prints, workspace: &mut Option<(Half, Half)>) -> Found {
    let (Some(i), Some(j)) = (pair.a, pair.b) else {
        return Found { alone: true, output: true, ..Found::default() };
    };
    let (x, y) = (&a.spans[i], &b.spans[j]);
    let mut found = Found {
        output: x.gave != y.gave,
        input: x.asked != y.asked,
        // Unrelated runs have other hosts and pods in their environment, so that it alone says nothing.
        env: matching == Matching::Lineage && x.env != y.env,
        verdict: x.verdict != y.verdict,
        ran: y.fidelity != Fidelity::Recorded && !y.is_taken_from(x),
        moved: pair.moved,
        renamed: x.name != y.name,
        ..Found::default()
    };
    if x.workspace != [0; 16] && y.workspace != [0; 16] {
        let now = (x.workspace, y.workspace);
        found.workspace = now.0 != now.1 && *workspace != Some(now);
        *workspace = (now.0 != now.1).then_some(now);
    }
    found
}

/// The earliest pair whose outputs differ, and of those that hold others the innermost.
pub(super) fn first_divergence(pairs: &[Pair], found: &[Found], a: &Prints, b: &Prints) -> Option<usize> {
    let first = found.iter().position(|f| f.output)?;
    let may_hold = |p: &Pair| p.b.is_some() && p.a.is_some_and(|i| !a.spans[i].has_executor);
    if !may_hold(&pairs[first]) {
        return Some(first);
    }
    let differing = || (first..pairs.len()).filter(|&at| found[at].output);
    let above_a = above(a, differing().filter_map(|at| pairs[at].a));
    let above_b = above(b, differing().filter_map(|at| pairs[at].b));
    let holds = |p: &Pair| may_hold(p) && (p.a.is_some_and(|i| above_a[i]) || p.b.is_some_and(|j| above_b[j]));
    // Parents that hold each other in a loop would leave none.
    differing().find(|&at| !holds(&pairs[at])).or(Some(first))
}

/// Of each span, whether it is above any of these.
fn above(prints: &Prints, of: impl Iterator<Item = usize>) -> Vec<bool> {
    let mut above = vec![false; prints.len()];
    for span in of {
        let mut at = prints.spans[span].parent;
        while at != NONE && !std::mem::replace(&mut above[at as usize], true) {
            at = prints.spans[at as usize].parent;
        }
    }
    above
}

/// The records of a pair; never without both.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counterpart<'s> {
    pub a: Option<&'s Span>,
    pub b: Option<&'s Span>,
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

fn tokens(span: &Span) -> Option<i64> {
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
