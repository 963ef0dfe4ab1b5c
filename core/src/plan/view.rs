//! A fork before its run: the run's graph, and records of all its spans or of those that a walk needs.

use std::collections::BTreeSet;

use super::Prepared;
use crate::graph::Graph;
use crate::model::SpanKind;
use crate::source::Source;

/// What a walk is made over.
pub struct View<'a> {
    pub fork: &'a Prepared<'a>,
    pub graph: &'a Graph,
    /// By place among the fork's records, in ascending order: place in the run. `None`: every record is there.
    places: Option<&'a [u32]>,
    /// Spans whose records are there with those of all that they need.
    asked: Option<&'a BTreeSet<u32>>,
    first: usize,
    starts_recorded: bool,
}

impl<'a> View<'a> {
    /// Of a fork that has every record.
    pub fn whole(fork: &'a Prepared<'a>, graph: &'a Graph) -> Self {
        let starts_recorded = fork.source.start_state(fork.first).is_some();
        Self { fork, graph, places: None, asked: None, first: fork.first, starts_recorded }
    }

    /// Of a fork that has the records at `places`: those of the spans that were `asked` for, the fork span and every patch's target
    /// among them, and those around them ([`Graph::around`]). `starts_recorded`: whether the workspace before [`View::first_of`] was
    /// recorded.
    pub fn part(fork: &'a Prepared<'a>, graph: &'a Graph, places: &'a [u32], asked: &'a BTreeSet<u32>, starts_recorded: bool) -> Self {
        let first = Self::first_of(graph, places[fork.fork_span] as usize, fork.check);
        Self { fork, graph, places: Some(places), asked: Some(asked), first, starts_recorded }
    }

    /// Where the walk of a fork begins.
    pub fn first_of(graph: &Graph, fork_span: usize, check: bool) -> usize {
        if check { graph.unit_above(fork_span as u32).map_or(fork_span, |unit| unit as usize) } else { graph.walk_from(fork_span) }
    }

    pub fn first(&self) -> usize {
        self.first
    }

    /// Place in the run of the span that the fork names.
    pub fn fork_span(&self) -> usize {
        self.place(self.fork.fork_span) as usize
    }

    pub(super) fn starts_recorded(&self) -> bool {
        self.starts_recorded
    }

    /// Place in the run of a record.
    pub(super) fn place(&self, record: usize) -> u32 {
        self.places.map_or(record as u32, |places| places[record])
    }

    /// The record of a span, if it is there with all that its contract is made from.
    pub(super) fn record(&self, span: usize) -> Option<usize> {
        self.small(span).filter(|_| self.asked.is_none_or(|asked| asked.contains(&(span as u32))))
    }

    /// The record of a span, if it is there.
    pub(super) fn small(&self, span: usize) -> Option<usize> {
        match self.places {
            None => Some(span),
            Some(places) => places.binary_search(&(span as u32)).ok(),
        }
    }
}

/// What a plan's words call spans.
pub trait Names {
    /// Id, name and kind of the span at this place of the run.
    fn of(&self, span: u32) -> (&str, &str, SpanKind);
}

/// Names by the records of a whole run.
pub struct Records<'a>(pub &'a Source);

impl Names for Records<'_> {
    fn of(&self, span: u32) -> (&str, &str, SpanKind) {
        let record = &self.0.spans[span as usize];
        (&record.id, &record.opening.name, record.opening.kind)
    }
}
