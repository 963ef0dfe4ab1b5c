//! A run as alignment sees it: a tree of keys.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::json;
use crate::model::{Executor, Span};

/// No span.
pub(super) const NONE: u32 = u32::MAX;

/// One of the two runs. Spans are numbered in order of sequence; the root is above those without a parent.
pub(super) struct Side {
    /// Place in the caller's slice.
    pub at: Vec<u32>,
    pub parent: Vec<u32>,
    children: Vec<u32>,
    /// Where the children of span `i` begin in `children`, at `i + 1`; those of the root at 0.
    begins: Vec<u32>,
    pub exact: Vec<u64>,
    pub loose: Vec<u64>,
    /// Kind and input, whatever the name; 0 for a step without input.
    pub nameless: Vec<u64>,
    /// The span with all below it.
    pub tree: Vec<u64>,
}

impl Side {
    pub fn new(spans: &[Span]) -> Self {
        let mut at: Vec<u32> = (0..spans.len() as u32).collect();
        let place = |&i: &u32| (spans[i as usize].ord, spans[i as usize].id.as_str());
        if !at.is_sorted_by_key(place) {
            at.sort_unstable_by(|x, y| place(x).cmp(&place(y)));
        }
        let spans: Vec<&Span> = at.iter().map(|&i| &spans[i as usize]).collect();
        let parent = parents(&spans);
        let (children, begins) = children(&parent);
        let mut side = Self {
            at,
            parent,
            children,
            begins,
            exact: Vec::with_capacity(spans.len()),
            loose: Vec::with_capacity(spans.len()),
            nameless: Vec::with_capacity(spans.len()),
            tree: Vec::new(),
        };
        for (i, span) in spans.iter().enumerate() {
            let input = input(span);
            let kind = span.opening.kind;
            side.exact.push(hash_of(&(kind, &span.opening.name, input)));
            side.loose.push(hash_of(&(kind, &span.opening.name)));
            let container = side.is_container(i as u32);
            side.nameless.push(if input == 0 && !container { 0 } else { hash_of(&(kind, input, container)) });
        }
        side.tree = side.trees();
        side
    }

    pub fn len(&self) -> usize {
        self.at.len()
    }

    pub fn all(&self) -> Vec<u32> {
        (0..self.len() as u32).collect()
    }

    /// Children in order of sequence; `NONE` is the root.
    pub fn children(&self, parent: u32) -> &[u32] {
        let slot = parent.wrapping_add(1) as usize;
        &self.children[self.begins[slot] as usize..self.begins[slot + 1] as usize]
    }

    pub fn is_container(&self, span: u32) -> bool {
        !self.children(span).is_empty()
    }

    /// The first leaves below a span, at most `most`.
    pub fn leaves(&self, span: u32, most: usize, leaves: &mut Vec<u32>) {
        let mut open = vec![span];
        // Bounded by steps too: containers of containers need not have a leaf near.
        for _ in 0..4 * most {
            let Some(next) = open.pop().filter(|_| leaves.len() < most) else { return };
            match self.children(next) {
                [] => leaves.push(next),
                below => open.extend(below.iter().rev().take(most)),
            }
        }
    }

    fn trees(&self) -> Vec<u64> {
        // Every span comes after its parent in it.
        let mut order: Vec<u32> = self.children(NONE).to_vec();
        let mut next = 0;
        while next < order.len() {
            order.extend_from_slice(self.children(order[next]));
            next += 1;
        }
        let mut trees = vec![0; self.len()];
        for &span in order.iter().rev() {
            let below = self.children(span);
            trees[span as usize] = match below {
                [] => self.exact[span as usize],
                _ => hash_of(&(self.exact[span as usize], below.iter().map(|&c| trees[c as usize]).collect::<Vec<u64>>())),
            };
        }
        trees
    }
}

fn hash_of(value: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// A parent that is not in the run is none, and a loop of parents ends where it closes.
fn parents(spans: &[&Span]) -> Vec<u32> {
    if spans.iter().all(|s| s.opening.parent.is_none()) {
        return vec![NONE; spans.len()];
    }
    let by_id: HashMap<&str, u32> = spans.iter().enumerate().map(|(i, s)| (s.id.as_str(), i as u32)).collect();
    let parent = |s: &&Span| s.opening.parent.as_deref().and_then(|p| by_id.get(p)).copied().unwrap_or(NONE);
    let mut parents: Vec<u32> = spans.iter().map(parent).collect();
    let mut seen = vec![NONE; spans.len()];
    for start in 0..spans.len() as u32 {
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

fn children(parent: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let mut begins = vec![0u32; parent.len() + 2];
    for &p in parent {
        begins[p.wrapping_add(1) as usize + 1] += 1;
    }
    for i in 1..begins.len() {
        begins[i] += begins[i - 1];
    }
    let mut next = begins.clone();
    let mut children = vec![0; parent.len()];
    for (i, &p) in parent.iter().enumerate() {
        let slot = &mut next[p.wrapping_add(1) as usize];
        children[*slot as usize] = i as u32;
        *slot += 1;
    }
    (children, begins)
}

/// A hash of what the step was asked, 0 for nothing. The environment is no part of it: it names pods and hosts, which no two
/// runs share.
fn input(span: &Span) -> u64 {
    let opening = &span.opening;
    if opening.executor.is_none() && opening.arguments.is_null() {
        return 0;
    }
    let mut hasher = DefaultHasher::new();
    match &opening.executor {
        None => {}
        Some(Executor::Shell(shell)) => (&shell.script, &shell.argv, &shell.cwd, &shell.stdin).hash(&mut hasher),
        Some(Executor::FileRead { path }) => path.hash(&mut hasher),
        Some(Executor::FileWrite { path, content, executable }) => (path, content, executable).hash(&mut hasher),
        Some(Executor::Model { provider, request }) => {
            provider.hash(&mut hasher);
            json::hash(request, &mut hasher);
        }
    }
    json::hash(&opening.arguments, &mut hasher);
    hasher.finish().max(1)
}

/// Whether two steps were asked the same, by what [`input`] counts.
pub(crate) fn same_input(a: &Span, b: &Span) -> bool {
    let (x, y) = (&a.opening, &b.opening);
    let asked = match (&x.executor, &y.executor) {
        (None, None) => true,
        (Some(Executor::Shell(x)), Some(Executor::Shell(y))) => {
            x.script == y.script && x.argv == y.argv && x.cwd == y.cwd && x.stdin == y.stdin
        }
        (Some(Executor::Model { provider: p, request: x }), Some(Executor::Model { provider: q, request: y })) => {
            p == q && json::same(x, y)
        }
        (x, y) => x == y,
    };
    asked && json::same(&x.arguments, &y.arguments)
}
