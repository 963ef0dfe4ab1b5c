//! A sealed run as planning walks it: numbers only, made once from its spans, stored beside them.
//!
//! Spans are known by their place in the run's order, paths by their place in a tree of names. What a step depends on and
//! touches stands in streams of numbers, one for [`CHUNK`] spans, so that a walk reads only what comes after the fork span.
//! Nothing here is decided: [`crate::plan`] decides, and asks for a span's record where numbers can't tell.

mod build;
mod codec;
mod names;
mod traits;
mod tree;

use std::collections::BTreeMap;

use crate::concurrency::Group;

pub use crate::bytes::Broken;
pub use codec::{MAX_SPANS, PATH_PARTS, path_parts};
pub use names::{NAMES, Named, NamesBlock};
pub use traits::Traits;
pub use tree::{Pat, Tree};

/// Spans in one stream.
pub const CHUNK: usize = 4096;

/// No span, no node.
pub const NONE: u32 = u32::MAX;

/// How a step touches a path: bits of a [`Touch`].
pub mod touch {
    /// The path with all below it.
    pub const BELOW: u32 = 1;
    pub const SEES: u32 = 2;
    pub const WRITES: u32 = 4;
    /// It changed while the step ran.
    pub const DURING: u32 = 8;
    /// It changed between the step's predecessor and the step.
    pub const BEFORE: u32 = 16;
    /// It changes when the step's recorded result is kept.
    pub const KEPT: u32 = 32;
    pub(super) const SHIFT: u32 = 6;
}

/// A path and what a step does with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch(pub u32);

impl Touch {
    pub fn has(self, bits: u32) -> bool {
        self.0 & bits != 0
    }

    pub fn node(self) -> u32 {
        self.0 >> touch::SHIFT
    }

    pub fn pattern(self) -> Pat {
        Pat { node: self.node(), below: self.has(touch::BELOW) }
    }
}

/// A span that this one needs the output of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need(pub u32);

impl Need {
    const EXPLICIT: u32 = 1;
    const BOUND: u32 = 2;

    pub fn span(self) -> u32 {
        self.0 >> 2
    }

    /// Named by `depends_on`, its containers' included.
    pub fn is_explicit(self) -> bool {
        self.0 & Self::EXPLICIT != 0
    }

    /// A template uses it.
    pub fn is_bound(self) -> bool {
        self.0 & Self::BOUND != 0
    }
}

/// A span that others are in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Container {
    pub span: u32,
    /// Its own container's place among the containers, or [`NONE`].
    pub above: u32,
    /// It has an executor, so that it runs by itself.
    pub runs: bool,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    pub spans: usize,
    pub units: i64,
    /// Some workspace state was recorded.
    pub has_workspace: bool,
    pub containers: Vec<Container>,
    pub groups: Vec<Group>,
    /// Spans that run as part of a unit.
    pub inner: BTreeMap<u32, Vec<u32>>,
    /// Spans that a fork left without a result.
    pub left_out: Vec<u32>,
    /// Paths that blocked spans of forks before left unknown.
    pub unknown: Vec<(u32, Vec<Pat>)>,
    /// Units whose declaration did not hold: the first path that they changed outside of it, and how many more.
    pub outside: Vec<(u32, String, u32)>,
    pub tree: Tree,
    /// Of model calls whose recorded request is known: its digest's first half, and whether it was answered. In order of spans.
    pub requests: Vec<(u32, [u8; 16], bool)>,
    /// Distinct traits; a stream names them by place.
    traits: Vec<Traits>,
    /// One for [`CHUNK`] spans; empty where it was not loaded.
    streams: Vec<Vec<u32>>,
}

/// One span as a walk sees it.
#[derive(Clone, Copy, Debug)]
pub struct Step<'g> {
    pub span: usize,
    pub traits: Traits,
    /// Place of its container among the containers, or [`NONE`].
    pub container: u32,
    needs: &'g [u32],
    touches: &'g [u32],
}

impl<'g> Step<'g> {
    pub fn needs(&self) -> impl Iterator<Item = Need> + Clone + use<'g> {
        self.needs.iter().copied().map(Need)
    }

    pub fn touches(&self) -> impl Iterator<Item = Touch> + Clone + use<'g> {
        self.touches.iter().copied().map(Touch)
    }
}

/// The spans from one on, in order.
#[derive(Clone)]
pub struct Scan<'g> {
    graph: &'g Graph,
    span: usize,
    rest: &'g [u32],
    container: u32,
}

/// A step's first word: place of its traits, whether its container is another than that of the span before, and how many numbers
/// follow; the largest number says that the real one comes next.
mod head {
    pub const TRAITS: u32 = 20;
    pub const MOVES: u32 = 1 << TRAITS;
    pub const NEEDS: u32 = TRAITS + 1;
    pub const MOST_NEEDS: u32 = 31;
    pub const TOUCHES: u32 = NEEDS + 5;
    pub const MOST_TOUCHES: u32 = 63;
}

impl<'g> Scan<'g> {
    #[inline(always)]
    fn word(&mut self) -> u32 {
        let (first, rest) = self.rest.split_first().map_or((0, self.rest), |(first, rest)| (*first, rest));
        self.rest = rest;
        first
    }

    #[inline(always)]
    fn words(&mut self, n: usize) -> &'g [u32] {
        let (words, rest) = self.rest.split_at(n.min(self.rest.len()));
        self.rest = rest;
        words
    }
}

impl<'g> Iterator for Scan<'g> {
    type Item = Step<'g>;

    #[inline(always)]
    fn next(&mut self) -> Option<Step<'g>> {
        if self.span >= self.graph.spans {
            return None;
        }
        if self.span.is_multiple_of(CHUNK) {
            self.rest = self.graph.streams.get(self.span / CHUNK).map_or(&[][..], Vec::as_slice);
            self.container = NONE;
        }
        let word = self.word();
        if word & head::MOVES != 0 {
            self.container = self.word();
        }
        let mut needs = (word >> head::NEEDS) & head::MOST_NEEDS;
        if needs == head::MOST_NEEDS {
            needs = self.word();
        }
        let mut touches = word >> head::TOUCHES;
        if touches == head::MOST_TOUCHES {
            touches = self.word();
        }
        let traits = self.graph.traits.get((word & (head::MOVES - 1)) as usize).copied().unwrap_or_default();
        let (needs, touches) = (self.words(needs as usize), self.words(touches as usize));
        let step = Step { span: self.span, traits, container: self.container, needs, touches };
        self.span += 1;
        Some(step)
    }
}

impl Graph {
    /// The spans from this one on. Those whose stream was not loaded have no traits.
    pub fn scan(&self, from: usize) -> Scan<'_> {
        let mut scan = Scan { graph: self, span: from / CHUNK * CHUNK, rest: &[], container: NONE };
        while scan.span < from && scan.next().is_some() {}
        scan
    }

    /// One span; `None` beyond the last one.
    pub fn step(&self, span: usize) -> Option<Step<'_>> {
        self.scan(span).next()
    }

    /// Spans that this one is in, innermost first. A loop of parents ends where it closes.
    pub fn above(&self, step: &Step<'_>) -> Vec<u32> {
        let mut chain: Vec<u32> = Vec::new();
        let mut at = step.container;
        while let Some(container) = self.containers.get(at as usize) {
            if container.span as usize == step.span || chain.contains(&container.span) {
                break;
            }
            chain.push(container.span);
            at = container.above;
        }
        chain
    }

    /// The span with all that it is in, all that is in it, and all that they need: what its contract is made from. Its stream, and
    /// those of what it is in, must be there.
    pub fn around(&self, span: u32) -> Vec<u32> {
        let Some(step) = self.step(span as usize) else { return Vec::new() };
        let mut spans = vec![span];
        spans.extend(self.above(&step));
        spans.extend(self.inner(span as usize));
        spans.extend(step.needs().map(Need::span));
        let held: Vec<u32> = spans.iter().filter_map(|s| self.unit_above(*s)).collect();
        spans.extend(held);
        spans.sort_unstable();
        spans.dedup();
        spans
    }

    pub fn inner(&self, unit: usize) -> &[u32] {
        self.inner.get(&(unit as u32)).map_or(&[], Vec::as_slice)
    }

    /// The outermost span with an executor that this one is in.
    pub fn unit_above(&self, span: u32) -> Option<u32> {
        self.inner.iter().find(|(_, inner)| inner.binary_search(&span).is_ok()).map(|(unit, _)| *unit)
    }

    /// Without an executor, but with children: it only holds others together.
    pub fn is_container(&self, span: u32) -> bool {
        self.containers.binary_search_by_key(&span, |c| c.span).is_ok_and(|at| !self.containers[at].runs)
    }

    /// Where the walk of a fork begins, as [`crate::source::Source::walk_from`] says.
    pub fn walk_from(&self, fork_span: usize) -> usize {
        let unit = self.unit_above(fork_span as u32).map_or(fork_span, |u| u as usize);
        let spanning = self.groups.iter().filter(|g| g.members.iter().any(|&m| m >= unit) && g.members[0] < unit);
        spanning.map(|g| g.members[0]).min().unwrap_or(unit)
    }

    /// The recorded workspace before a unit, as [`crate::source::Source::state_for_patches`] finds it: of which span, and whether
    /// after it. `start` is what the unit's [`Named`] says.
    pub fn state_for_patches(&self, unit: usize, start: Option<(u32, bool)>) -> Option<(u32, bool)> {
        let amid = self.groups.iter().find(|g| g.members[0] < unit && g.members.last().is_some_and(|&last| unit <= last));
        match amid {
            Some(group) if group.separable => None,
            Some(group) => Some((group.members[0] as u32, false)),
            None => start,
        }
    }

    /// The first span whose stream a walk from `first` on reads.
    pub fn reads_from(&self, first: usize) -> usize {
        let unknown = self.unknown.first().map_or(first, |(span, _)| *span as usize);
        first.min(unknown)
    }
}
