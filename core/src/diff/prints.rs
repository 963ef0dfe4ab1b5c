//! What comparing two runs needs of their spans: digests of what each was asked, gave and left, and what totals are made of.
//!
//! They are made once for a sealed run and stored beside it, so that a diff reads the records of no spans but those that it lists.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::Totals;
use super::json;
use crate::Digest;
use crate::bytes::{Broken, Reader, Writer};
use crate::digest::Hasher;
use crate::model::{Executor, Fidelity, SnapshotRef, Span, SpanKind, Status, Verdict};

/// No span.
pub const NONE: u32 = u32::MAX;

/// The first half of a digest; zero where there is nothing to be digested.
pub type Half = [u8; 16];

/// Spans in one stored part.
pub const PART: usize = 4096;

/// One span's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Print {
    /// Place of its parent in the run, or [`NONE`]: a parent that the run has not is none, and a loop of parents ends where it closes.
    pub parent: u32,
    pub kind: SpanKind,
    pub status: Status,
    pub verdict: Verdict,
    pub fidelity: Fidelity,
    pub has_executor: bool,
    pub name: u64,
    /// Command, path and content, or request; and arguments. The environment is no part of it: it names pods and hosts, which no
    /// two runs share.
    pub asked: Half,
    /// Status and output.
    pub gave: Half,
    pub env: Half,
    /// The workspace's content after it.
    pub workspace: Half,
    /// Nanoseconds; absent while it is not known.
    pub duration_ns: Option<i64>,
    pub tokens: Option<i64>,
    pub cost_usd: Option<f64>,
}

/// Those of a run's spans, in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prints {
    ids: String,
    /// Where in `ids` each one ends.
    ends: Vec<u32>,
    pub spans: Vec<Print>,
}

fn half(digest: &Digest) -> Half {
    let mut half = [0; 16];
    half.copy_from_slice(&digest.as_bytes()[..16]);
    half
}

/// Of a workspace state, as [`Print::workspace`] has it.
pub fn workspace(state: Option<&SnapshotRef>) -> Half {
    state.map_or([0; 16], |state| half(&state.content))
}

/// What the step was asked; zero for nothing.
fn asked(span: &Span) -> Half {
    let opening = &span.opening;
    let executor = match &opening.executor {
        None if opening.arguments.is_null() => return [0; 16],
        None => Value::Null,
        Some(Executor::Shell(shell)) => json!(["shell", shell.script, shell.argv, shell.cwd, shell.stdin]),
        Some(Executor::FileRead { path }) => json!(["read", path]),
        Some(Executor::FileWrite { path, content, executable }) => json!(["write", path, content, executable]),
        Some(Executor::Model { provider, request }) => json!(["model", provider, request]),
    };
    let hasher = Hasher::new("asked").json("executor", &json::normal(&executor));
    half(&hasher.json("arguments", &json::normal(&opening.arguments)).finish())
}

/// Whether two steps were asked the same.
pub(crate) fn same_input(a: &Span, b: &Span) -> bool {
    asked(a) == asked(b)
}

fn gave(span: &Span) -> Half {
    let hasher = Hasher::new("gave").part("status", &span.status().code().to_le_bytes());
    let Some(output) = span.output() else { return half(&hasher.finish()) };
    let exit_code = output.exit_code.map_or_else(Vec::new, |code| code.to_le_bytes().to_vec());
    let hasher = hasher.part("text", output.text.as_bytes()).part("stdout", output.stdout.as_bytes());
    half(&hasher.part("stderr", output.stderr.as_bytes()).part("exit code", &exit_code).finish())
}

fn env(span: &Span) -> Half {
    let Some(Executor::Shell(shell)) = &span.opening.executor else { return [0; 16] };
    let mut hasher = Hasher::new("env");
    shell.env.iter().for_each(|(name, value)| hasher.add(name, value.as_bytes()));
    half(&hasher.finish())
}

impl Print {
    fn of(span: &Span, parent: u32) -> Self {
        let (opening, closing) = (&span.opening, span.closing.as_ref());
        let tokens = closing.map_or((None, None), |c| (c.input_tokens, c.output_tokens));
        let [name @ .., _, _, _, _, _, _, _, _] = half(&Digest::of(opening.name.as_bytes()));
        Self {
            parent,
            kind: opening.kind,
            status: span.status(),
            verdict: span.verdict(),
            fidelity: span.fidelity,
            has_executor: opening.executor.is_some(),
            name: u64::from_le_bytes(name),
            asked: asked(span),
            gave: gave(span),
            env: env(span),
            workspace: workspace(span.snapshot_after.as_ref()),
            duration_ns: closing.map(|c| c.ended.saturating_sub(opening.started)),
            tokens: match tokens {
                (None, None) => None,
                (i, o) => Some(i.unwrap_or(0).saturating_add(o.unwrap_or(0))),
            },
            cost_usd: closing.and_then(|c| c.cost_usd),
        }
    }
}

impl Print {
    /// A fork took this over from the other run as it is: it did not do it itself.
    pub(super) fn is_taken_from(&self, other: &Self) -> bool {
        self == other
    }

    fn codes(&self) -> u32 {
        let codes = [self.kind.code(), self.status.code(), self.verdict.code(), self.fidelity.code()];
        u32::from_le_bytes(codes.map(|code| code as u8))
    }

    fn has(&self, env: Half, workspace: Half) -> u32 {
        let bits = [
            (EXECUTOR, self.has_executor),
            (ASKED, self.asked != [0; 16]),
            (ENV, self.env != env),
            (WORKSPACE, self.workspace != workspace),
            (DURATION, self.duration_ns.is_some()),
            (TOKENS, self.tokens.is_some()),
            (COST, self.cost_usd.is_some()),
        ];
        bits.iter().filter(|(_, is)| *is).map(|(bit, _)| bit).sum()
    }
}

impl Prints {
    /// Of all spans of a run, in order.
    pub fn of<'s>(spans: impl ExactSizeIterator<Item = &'s Span> + Clone) -> Self {
        let mut prints = Self::default();
        for (span, parent) in spans.clone().zip(parents(spans)) {
            prints.push(&span.id, Print::of(span, parent));
        }
        prints
    }

    fn push(&mut self, id: &str, print: Print) {
        self.ids.push_str(id);
        self.ends.push(self.ids.len() as u32);
        self.spans.push(print);
    }

    /// Puts another record of the span in its place.
    pub fn replace(&mut self, place: usize, span: &Span) {
        self.spans[place] = Print::of(span, self.spans[place].parent);
    }

    pub fn len(&self) -> usize {
        self.spans.len()
    }

    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    pub fn id(&self, place: usize) -> &str {
        let from = place.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.ids[from as usize..self.ends[place] as usize]
    }

    /// Places of spans by id.
    pub fn places(&self) -> HashMap<&str, usize> {
        (0..self.len()).map(|place| (self.id(place), place)).collect()
    }

    pub(super) fn same_ids(&self, other: &Self) -> bool {
        self.ends == other.ends && self.ids == other.ids
    }

    /// A fork's steps ran at other times than those that it reuses, so durations are added up rather than measured from first to
    /// last.
    pub fn totals(&self) -> Totals {
        let mut holds = vec![false; self.len()];
        self.spans.iter().filter(|s| s.parent != NONE).for_each(|s| holds[s.parent as usize] = true);
        let mut totals = Totals { spans: self.len() as i64, ..Totals::default() };
        for (span, holds) in self.spans.iter().zip(holds) {
            totals.tokens = totals.tokens.saturating_add(span.tokens.unwrap_or(0));
            totals.cost_usd += span.cost_usd.unwrap_or(0.0);
            if span.status != Status::Blocked && !holds {
                totals.duration_ns = totals.duration_ns.saturating_add(span.duration_ns.unwrap_or(0));
            }
        }
        totals
    }

    /// As they are stored: parts of [`PART`] spans, to be read in order.
    pub fn encode(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        (0..self.len()).step_by(PART).map(|first| {
            let mut out = Writer::default();
            let (mut env, mut workspace) = ([0; 16], [0; 16]);
            for place in first..self.len().min(first + PART) {
                let span = &self.spans[place];
                out.text(self.id(place));
                out.number(span.parent);
                out.number(span.codes());
                out.number(span.has(env, workspace));
                out.raw(&span.name.to_le_bytes());
                out.raw(&span.gave);
                let halves = [(span.asked, [0; 16]), (span.env, env), (span.workspace, workspace)];
                halves.iter().filter(|(half, before)| half != before).for_each(|(half, _)| out.raw(half));
                (env, workspace) = (span.env, span.workspace);
                span.duration_ns.into_iter().chain(span.tokens).for_each(|n| out.raw(&n.to_le_bytes()));
                span.cost_usd.into_iter().for_each(|cost| out.raw(&cost.to_le_bytes()));
            }
            out.finish()
        })
    }

    /// Adds a stored part.
    ///
    /// # Errors
    /// Bytes that [`Prints::encode`] did not write.
    pub fn take(&mut self, part: &[u8]) -> Result<(), Broken> {
        let mut input = Reader::new(part)?;
        let (mut env, mut workspace) = ([0; 16], [0; 16]);
        while !input.is_empty() {
            let id = input.text()?;
            let parent = input.number()?;
            let codes = input.array::<4>()?.map(i16::from);
            let has = input.number()?;
            let name = u64::from_le_bytes(input.array()?);
            let gave = input.array()?;
            let mut or = |bit, before| if has & bit == 0 { Ok(before) } else { input.array() };
            let asked = or(ASKED, [0; 16])?;
            (env, workspace) = (or(ENV, env)?, or(WORKSPACE, workspace)?);
            let mut if_has = |bit| if has & bit == 0 { Ok(None) } else { input.array::<8>().map(Some) };
            let (duration, tokens, cost) = (if_has(DURATION)?, if_has(TOKENS)?, if_has(COST)?);
            let print = Print {
                parent,
                kind: SpanKind::from_code(codes[0]).ok_or(Broken)?,
                status: Status::from_code(codes[1]).ok_or(Broken)?,
                verdict: Verdict::from_code(codes[2]).ok_or(Broken)?,
                fidelity: Fidelity::from_code(codes[3]).ok_or(Broken)?,
                has_executor: has & EXECUTOR != 0,
                name,
                asked,
                gave,
                env,
                workspace,
                duration_ns: duration.map(i64::from_le_bytes),
                tokens: tokens.map(i64::from_le_bytes),
                cost_usd: cost.map(f64::from_le_bytes),
            };
            self.push(id, print);
        }
        Ok(())
    }
}

/// What is stored of a span, as bits.
const EXECUTOR: u32 = 1;
const ASKED: u32 = 2;
/// Another one than the span before has.
const ENV: u32 = 4;
const WORKSPACE: u32 = 8;
const DURATION: u32 = 16;
const TOKENS: u32 = 32;
const COST: u32 = 64;

fn parents<'s>(spans: impl ExactSizeIterator<Item = &'s Span> + Clone) -> Vec<u32> {
    if spans.clone().all(|s| s.opening.parent.is_none()) {
        return vec![NONE; spans.len()];
    }
    let by_id: HashMap<&str, u32> = spans.clone().enumerate().map(|(i, s)| (s.id.as_str(), i as u32)).collect();
    let parent = |s: &Span| s.opening.parent.as_deref().and_then(|p| by_id.get(p)).copied().unwrap_or(NONE);
    let mut parents: Vec<u32> = spans.map(parent).collect();
    let mut seen = vec![NONE; parents.len()];
    for start in 0..parents.len() as u32 {
        let mut at = start;
        while at != NONE && seen[at as usize] == NONE {
            seen[at as usize] = start;
            let above = parents[at as usize];
            if above != NONE && seen[above as usize] == start {
                parents[at as usize] = NONE;
            }
            at = parents[at as usize];
        }
    }
    parents
}
