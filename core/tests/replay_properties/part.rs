//! A plan made from a run's stored graph and the few records that it needs is the plan made from all records.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use proptest::prelude::*;
use replayfork_core::graph::{Graph, NamesBlock};
use replayfork_core::patch::Contents;
use replayfork_core::plan::{self, Outline, Prepared, Records, View};
use replayfork_core::source::{Changed, Source};

/// As who has stored it reads it.
fn stored(source: &Source) -> Graph {
    let graph = Graph::of(source);
    let mut read = Graph::decode_head(&graph.encode_head()).unwrap();
    for (n, stream) in graph.encode_streams().enumerate() {
        read.take_stream(n, &stream).unwrap();
    }
    graph.encode_paths().iter().for_each(|part| read.take_paths(part).unwrap());
    read.take_requests(&graph.encode_requests()).unwrap();
    assert_eq!(graph, read);
    read
}

pub fn plans_the_same(fork: &Prepared<'_>, contents: &Contents) -> Result<(), TestCaseError> {
    let (source, spec) = (fork.source, fork.spec);
    let graph = stored(source);
    let whole = View::whole(fork, &graph);
    let want: Outline = plan::outline(&whole).unwrap();
    let named: Vec<_> = NamesBlock::all(source).into_iter().flat_map(|block| NamesBlock::decode(&block.encode()).unwrap().spans).collect();
    for (i, span) in named.iter().enumerate() {
        let of = |(span, after): (u32, bool)| {
            let record = &source.spans[span as usize];
            if after { record.snapshot_after } else { record.snapshot_before }
        };
        prop_assert_eq!(span.state.and_then(of), source.start_state(i), "state before {}", span.id);
        let unit = source.is_unit(i);
        prop_assert!(!unit || graph.state_for_patches(i, span.state).and_then(of) == source.state_for_patches(i), "state at {}", span.id);
    }
    let index = |id: &Option<String>| id.as_ref().and_then(|id| source.index(id));
    let targets = spec.patches.iter().chain(&source.inherited).filter_map(|p| index(&p.span)).chain([fork.fork_span]);
    let approved = spec.approvals.iter().filter_map(|a| source.index(&a.span));
    let mut asked: BTreeSet<u32> = targets.chain(approved).map(|t| t as u32).collect();
    for _ in 0..10 {
        let places: BTreeSet<u32> = asked.iter().flat_map(|&t| graph.around(t)).collect();
        let changed: BTreeMap<String, Changed> = graph
            .outside
            .iter()
            .map(|(span, path, _)| (named[*span as usize].id.clone(), Changed { outside: vec![path.clone()], ..Changed::default() }))
            .collect();
        let containers: HashSet<String> = graph.containers.iter().map(|c| named[c.span as usize].id.clone()).collect();
        let records = places.iter().map(|p| source.spans[*p as usize].clone()).collect();
        let at: Vec<u32> = places.iter().copied().collect();
        let begin = at.partition_point(|&place| (place as usize) < whole.first());
        let part = Source::part(source.environment.clone(), records, changed, &containers, begin)
            .with_inherited(source.inherited.clone())
            .with_facts(source.facts.clone());
        let fork = Prepared::new(&part, contents, spec).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let first = View::first_of(&graph, at[fork.fork_span] as usize, fork.check);
        let view = View::part(&fork, &graph, &at, &asked, named[first].state.is_some());
        match plan::outline(&view) {
            Ok(got) => {
                prop_assert_eq!(&got, &want);
                let all: Vec<usize> = (0..got.planned.len()).collect();
                prop_assert_eq!(got.digest(&view), want.digest(&whole));
                let lacking = got.records(&view, &all);
                if lacking.is_empty() {
                    prop_assert_eq!(got.plan(&view, &Records(source), usize::MAX), want.plan(&whole, &Records(source), usize::MAX));
                    return Ok(());
                }
                asked.extend(lacking);
            }
            Err(missing) => asked.extend(missing),
        }
    }
    Err(TestCaseError::fail("records are missing for ever"))
}
