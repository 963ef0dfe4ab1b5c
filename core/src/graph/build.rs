//! From the recorded spans to the graph.

use std::collections::{BTreeMap, HashMap};

use super::{Container, Graph, NONE, Need, Pat, Touch, Traits, Tree, head, touch};
use crate::answers::request_digest;
use crate::contract::{Contract, Rendered};
use crate::footprint::{Footprint, Pattern, pattern, relative};
use crate::model::{Executor, Fidelity, Status};
use crate::plan::recorded_value;
use crate::source::Source;

/// Paths while the tree grows.
struct Growing {
    tree: Tree,
    known: HashMap<String, u32>,
}

impl Growing {
    fn node(&mut self, path: &str) -> u32 {
        if path.is_empty() {
            return 0;
        }
        if let Some(&node) = self.known.get(path) {
            return node;
        }
        let above = path.rsplit_once('/').map_or("", |(above, _)| above);
        self.node(above);
        let node = self.tree.find_or_add(&Pattern::Path(path.to_owned())).node;
        self.known.insert(path.to_owned(), node);
        node
    }

    fn pat(&mut self, pattern: &Pattern) -> Pat {
        Pat { node: self.node(pattern.path()), below: matches!(pattern, Pattern::Below(_)) }
    }
}

impl Graph {
    /// The graph of a run. Contracts are made, and inputs rendered, for every unit.
    pub fn of(source: &Source) -> Self {
        let mut growing = Growing { tree: Tree::default(), known: HashMap::new() };
        let spans = source.spans.len();
        let mut graph = Self {
            spans,
            units: (0..spans).filter(|&i| source.is_unit(i)).count() as i64,
            has_workspace: source.spans.iter().any(|s| s.snapshot_before.is_some() || s.snapshot_after.is_some()),
            containers: containers(source),
            groups: source.groups().to_vec(),
            left_out: (0..spans).filter(|&i| source.was_left_out(i)).map(|i| i as u32).collect(),
            ..Self::default()
        };
        let mut traits: HashMap<Traits, u32> = HashMap::new();
        let mut container = NONE;
        for i in 0..spans {
            if i.is_multiple_of(super::CHUNK) {
                graph.streams.push(Vec::new());
                container = NONE;
            }
            let inner = source.inner(i);
            if !inner.is_empty() {
                graph.inner.insert(i as u32, inner.iter().map(|&i| i as u32).collect());
            }
            let record = &source.spans[i];
            if let Some(closing) = record.closing.as_ref().filter(|c| !c.unknown.is_empty()) {
                let patterns: Vec<_> = closing.unknown.iter().filter_map(|text| pattern(text, source.root()).ok()).collect();
                graph.unknown.push((i as u32, patterns.iter().map(|p| growing.pat(p)).collect()));
            }
            let found = Found::of(source, i, &mut growing);
            graph.requests.extend(found.request.map(|(digest, answered)| (i as u32, digest, answered)));
            if source.is_unit(i)
                && let Some(path) = source.changed(i).outside.first()
            {
                graph.outside.push((i as u32, path.clone(), source.changed(i).outside.len() as u32 - 1));
            }
            let place = traits.len() as u32;
            let place = *traits.entry(found.traits).or_insert_with(|| {
                graph.traits.push(found.traits);
                place
            });
            let above = source.parent(i).and_then(|p| graph.containers.binary_search_by_key(&(p as u32), |c| c.span).ok());
            let above = above.map_or(NONE, |a| a as u32);
            let moves = above != container;
            container = above;
            if let Some(stream) = graph.streams.last_mut() {
                put(stream, place, moves.then_some(above), &found);
            }
        }
        graph.tree = growing.tree;
        graph
    }
}

fn put(stream: &mut Vec<u32>, traits: u32, moves: Option<u32>, found: &Found) {
    let (needs, touches) = (found.needs.len() as u32, found.touches.len() as u32);
    let short = (needs.min(head::MOST_NEEDS), touches.min(head::MOST_TOUCHES));
    let first = traits.min(head::MOVES - 1) | short.0 << head::NEEDS | short.1 << head::TOUCHES;
    stream.push(first | if moves.is_some() { head::MOVES } else { 0 });
    stream.extend(moves);
    if short.0 == head::MOST_NEEDS {
        stream.push(needs);
    }
    if short.1 == head::MOST_TOUCHES {
        stream.push(touches);
    }
    stream.extend(found.needs.iter().map(|n| n.0));
    stream.extend(found.touches.iter().map(|t| t.0));
}

fn containers(source: &Source) -> Vec<Container> {
    let mut spans: Vec<u32> = (0..source.spans.len()).filter_map(|i| source.parent(i)).map(|p| p as u32).collect();
    spans.sort_unstable();
    spans.dedup();
    let place = |span: usize| spans.binary_search(&(span as u32)).map_or(NONE, |at| at as u32);
    let container = |&span: &u32| Container {
        span,
        above: source.parent(span as usize).map_or(NONE, place),
        runs: source.spans[span as usize].opening.executor.is_some(),
    };
    spans.iter().map(container).collect()
}

/// What is found of one span.
#[derive(Default)]
struct Found {
    traits: Traits,
    needs: Vec<Need>,
    touches: Vec<Touch>,
    request: Option<([u8; 16], bool)>,
}

impl Found {
    fn of(source: &Source, span: usize, growing: &mut Growing) -> Self {
        let record = &source.spans[span];
        let mut found = Self { traits: Traits::of_record(record), ..Self::default() };
        found.traits.set(Traits::LEFT_OUT, source.was_left_out(span));
        let asks = matches!(record.opening.executor, Some(Executor::Model { .. }));
        if !source.is_unit(span) {
            // A walk that begins later knows what it wrote.
            if let Some(path) = written(source, span) {
                found.add(Pat { node: growing.node(&path), below: false }, touch::WRITES);
            }
        }
        if !source.is_unit(span) && !asks {
            return found;
        }
        let contract = Contract::recorded(source, span);
        let bound = contract.as_ref().ok().and_then(|c| c.bound_spans(source).ok());
        let rendered = contract.as_ref().ok().and_then(|contract| {
            let surely = !asks && bound.as_ref().is_some_and(|bound| surely_renders(source, contract, bound));
            if surely { Some(Rendered::new()) } else { contract.render(source, &|i| recorded_value(source, i)).ok() }
        });
        if let Some(request) = rendered.as_ref().and_then(|r| r.get("request")) {
            let mut half = [0; 16];
            half.copy_from_slice(&request_digest(request).as_bytes()[..16]);
            found.request = Some((half, record.fidelity != Fidelity::Overridden && record.output().is_some()));
        }
        if !source.is_unit(span) {
            return found;
        }
        let footprint = source.footprint(span);
        found.traits = found.traits | Traits::UNIT | Traits::of_contract(source, span, contract.as_ref(), None);
        found.traits.set(Traits::RENDERS, rendered.is_some());
        found.traits.set(Traits::HAS_RESULT, source.has_result(span));
        found.traits.set(Traits::ENTANGLED, source.entangled(span).is_some());
        found.traits.set(Traits::SHOWS_CHANGES, source.shows_changes(span));
        let captured = footprint.is_none() || (record.snapshot_before.is_some() && source.has_result(span));
        found.traits.set(Traits::NOT_CAPTURED, !captured);
        let mut needs: BTreeMap<usize, u32> = BTreeMap::new();
        contract.iter().flat_map(|c| &c.depends_on).for_each(|&n| *needs.entry(n).or_default() |= Need::EXPLICIT);
        bound.iter().flatten().for_each(|&n| *needs.entry(n).or_default() |= Need::BOUND);
        found.needs = needs.into_iter().map(|(span, how)| Need((span as u32) << 2 | how)).collect();
        match &contract {
            Ok(contract) => found.add_footprint(&contract.footprint, growing),
            // What it may see is not known.
            Err(_) => found.add(Pat::ALL, touch::WRITES),
        }
        found.add_changes(source, span, growing);
        found
    }

    fn add_footprint(&mut self, footprint: &Footprint, growing: &mut Growing) {
        for (patterns, bit) in [(&footprint.writes, touch::WRITES), (&footprint.sees, touch::SEES)] {
            for pattern in patterns {
                self.add(growing.pat(pattern), bit);
            }
        }
    }

    fn add_changes(&mut self, source: &Source, span: usize, growing: &mut Growing) {
        let changed = source.changed(span);
        for (paths, bit) in [(&changed.during, touch::DURING), (&changed.before, touch::BEFORE)] {
            for path in paths {
                self.add(Pat { node: growing.node(path), below: false }, bit);
            }
        }
        for path in kept(source, span) {
            self.add(Pat { node: growing.node(&path), below: false }, touch::KEPT);
        }
    }

    fn add(&mut self, pat: Pat, bit: u32) {
        let key = pat.node << touch::SHIFT | u32::from(pat.below);
        let same =
            |t: &&mut Touch| t.0 & !(touch::BELOW | ((1 << touch::SHIFT) - 1)) == key & !touch::BELOW && t.has(touch::BELOW) == pat.below;
        match self.touches.iter_mut().find(same) {
            Some(touch) => touch.0 |= bit,
            None => self.touches.push(Touch(key | bit)),
        }
    }
}

/// The path that a FileWrite set when recorded.
fn written(source: &Source, span: usize) -> Option<String> {
    match &source.spans[span].opening.executor {
        Some(Executor::FileWrite { path, .. }) if source.spans[span].status() == Status::Completed => relative(path, source.root()).ok(),
        _ => None,
    }
}

/// The paths that change when a unit's recorded result is kept.
fn kept(source: &Source, span: usize) -> Vec<String> {
    let mut paths = source.kept_changes(span).to_vec();
    match source.entangled(span) {
        None => paths.extend(written(source, span)),
        Some(group) if group.members.last() == Some(&span) => paths.extend(group.members.iter().filter_map(|&m| written(source, m))),
        Some(_) => {}
    }
    paths
}

/// Whether the templates can't fail with the recorded outputs: they take any, every one is there, and together they are far from
/// any limit.
fn surely_renders(source: &Source, contract: &Contract, bound: &[usize]) -> bool {
    let mut bytes = 0;
    for &upstream in bound {
        let Some(output) = source.spans[upstream].output() else { return false };
        bytes += output.text.len() + output.stderr.len();
    }
    bound.is_empty() && contract.has_no_template() || contract.always_renders() && bytes < 64 << 10 && contract.template_bytes() < 1 << 10
}

/// For every span the workspace that a walk from it starts with, as [`Source::start_state`] finds it: before or after which span.
pub(super) fn states(source: &Source) -> Vec<Option<(u32, bool)>> {
    let spans = &source.spans;
    let ran = |i: usize| source.is_unit(i) && !spans[i].did_not_run();
    let writes: Vec<bool> = (0..spans.len()).map(|i| ran(i) && !source.footprint(i).writes.is_empty()).collect();
    // The next span that tells what nothing before has changed.
    let mut next: Vec<Option<u32>> = vec![None; spans.len() + 1];
    for i in (0..spans.len()).rev() {
        let decides = spans[i].snapshot_before.is_some() || writes[i];
        next[i] = if decides { spans[i].snapshot_before.map(|_| i as u32) } else { next[i + 1] };
    }
    let ended = |i: usize| if source.is_walked(i) { i64::MAX } else { source.interval(i).1 };
    let mut last: Option<(i64, usize)> = None;
    let mut seen: Option<u32> = None;
    let mut states = Vec::with_capacity(spans.len());
    for i in 0..spans.len() {
        let here = spans[i].snapshot_before.map(|_| i as u32);
        seen = here.or(seen);
        states.push(match (here.filter(|_| !spans[i].did_not_run()), last) {
            (Some(here), _) => Some((here, false)),
            (None, Some((_, last))) => source.left(last).map(|(_, after)| (last as u32, after)),
            (None, None) => seen.or(next[i]).map(|i| (i, false)),
        });
        if ran(i) && (source.left(i).is_some() || (writes[i] && !source.left_unknown(i))) {
            last = last.max(Some((ended(i), i)));
        }
    }
    states
}
