//! Which steps of two unrelated runs correspond.
//!
//! Top down: the children of corresponding steps are matched by longest common subsequences, first of whole subtrees, then of
//! single steps with the same kind, name and rendered input. What equals nothing there was perhaps moved, and is looked for in the
//! whole run. Only then do steps with another input correspond, by kind and name, between neighbours that do; last come steps with
//! another name and the same input. So whatever both runs have in common stays matched, however much lies between.
//!
//! Near-linear: sequences are compared by `similar`, whose effort is bounded; everything else is a pass over the spans.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use similar::{Algorithm, DiffOp, capture_diff_slices};

use super::prints::{NONE, Prints};
use super::side::Side;

/// Leaves by which a container is recognised.
const LEAVES: usize = 32;

/// Two corresponding steps, or one that the other run does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pair {
    /// Place of the span in its run.
    pub a: Option<usize>,
    pub b: Option<usize>,
    /// The order differs, or it belongs to steps that don't correspond.
    pub moved: bool,
}

/// Every span of both runs exactly once, in the order of `a`; what only `b` has comes after what it follows there. The same pairs
/// come out when the runs change sides.
pub fn align(a: &Prints, b: &Prints) -> Vec<Pair> {
    let (a, b) = (Side::new(a), Side::new(b));
    // Where two matchings are equally good, the choice must not depend on which run is called `a`.
    let swapped = (&a.exact, &a.parent) > (&b.exact, &b.parent);
    let mut aligner = if swapped { Aligner::new(&b, &a) } else { Aligner::new(&a, &b) };
    aligner.run();
    let in_order = anchors(&aligner.a.all(), &aligner.b.all(), &aligner.to_b);
    let Aligner { to_a, to_b, .. } = aligner;
    if swapped {
        merged(&a, &b, &to_a, &to_b, in_order.into_iter().map(|(x, y)| (y, x)).collect())
    } else {
        merged(&a, &b, &to_b, &to_a, in_order)
    }
}

/// Pairs in order, from the partner of each span and those that are in the same order in both runs.
fn merged(a: &Side, b: &Side, to_b: &[u32], to_a: &[u32], mut anchors: Vec<(usize, usize)>) -> Vec<Pair> {
    let (all_a, all_b) = (a.all(), b.all());
    anchors.push((all_a.len(), all_b.len()));
    let pair = |i: u32, anchored: bool| {
        let j = to_b[i as usize];
        let parents = |j: u32| (a.parent[i as usize], b.parent[j as usize]);
        let together = |(p, q): (u32, u32)| if p == NONE || q == NONE { p == q } else { to_b[p as usize] == q };
        Pair { a: Some(i as usize), b: (j != NONE).then_some(j as usize), moved: j != NONE && !(anchored && together(parents(j))) }
    };
    let mut pairs = Vec::with_capacity(a.len().max(b.len()));
    let (mut i, mut j) = (0, 0);
    for (x, y) in anchors {
        pairs.extend(all_a[i..x].iter().map(|&i| pair(i, false)));
        let only = all_b[j..y].iter().filter(|&&j| to_a[j as usize] == NONE);
        pairs.extend(only.map(|&j| Pair { a: None, b: Some(j as usize), moved: false }));
        if x < all_a.len() {
            pairs.push(pair(all_a[x], true));
        }
        (i, j) = (x + 1, y + 1);
    }
    pairs
}

/// Positions of partners in two lists that are in the same order in both.
fn anchors(la: &[u32], lb: &[u32], to_b: &[u32]) -> Vec<(usize, usize)> {
    let partners = la.iter().enumerate().map(|(at, &i)| (at, to_b[i as usize])).filter(|(_, j)| *j != NONE);
    // Both lists are ascending: mostly the next partner is the next element.
    let mut next = 0;
    let place = |j: u32| {
        if lb.get(next) != Some(&j) {
            next = lb.binary_search(&j).ok()?;
        }
        next += 1;
        Some(next - 1)
    };
    let pairs: Vec<(usize, usize)> = partners.scan(place, |place, (at, j)| Some(place(j).map(|other| (at, other)))).flatten().collect();
    if pairs.is_sorted_by_key(|p| p.1) {
        return pairs;
    }
    let mut in_b: Vec<usize> = pairs.iter().map(|p| p.1).collect();
    let in_a = in_b.clone();
    in_b.sort_unstable();
    common(&in_a, &in_b).into_iter().map(|(x, _)| pairs[x]).collect()
}

/// Positions of a long common subsequence.
fn common<T: Eq + std::hash::Hash + Ord + Clone>(a: &[T], b: &[T]) -> Vec<(usize, usize)> {
    let head = a.iter().zip(b).take_while(|(x, y)| x == y).count();
    let (ra, rb) = (&a[head..], &b[head..]);
    let tail = ra.iter().rev().zip(rb.iter().rev()).take_while(|(x, y)| x == y).count();
    let (ra, rb) = (&ra[..ra.len() - tail], &rb[..rb.len() - tail]);
    let mut found: Vec<(usize, usize)> = (0..head).map(|i| (i, i)).collect();
    if !ra.is_empty() && !rb.is_empty() {
        for op in capture_diff_slices(Algorithm::Patience, ra, rb) {
            if let DiffOp::Equal { old_index, new_index, len } = op {
                found.extend((0..len).map(|k| (head + old_index + k, head + new_index + k)));
            }
        }
    }
    found.extend((0..tail).map(|k| (a.len() - tail + k, b.len() - tail + k)));
    found
}

/// Takes a key that is mixed well as its own hash.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

type Left = HashMap<u64, (u32, u32), BuildHasherDefault<AsItIs>>;

struct Aligner<'s> {
    a: &'s Side,
    b: &'s Side,
    to_b: Vec<u32>,
    to_a: Vec<u32>,
    /// How many spans with an exact key have no partner yet, in `a` and in `b`.
    left: Left,
    /// Pairs whose children have not been looked at.
    open: Vec<(u32, u32)>,
}

impl<'s> Aligner<'s> {
    fn new(a: &'s Side, b: &'s Side) -> Self {
        let mut left = Left::with_capacity_and_hasher(a.len().max(b.len()), BuildHasherDefault::default());
        a.exact.iter().for_each(|&key| left.entry(key).or_default().0 += 1);
        b.exact.iter().for_each(|&key| left.entry(key).or_default().1 += 1);
        Self { a, b, to_b: vec![NONE; a.len()], to_a: vec![NONE; b.len()], left, open: vec![(NONE, NONE)] }
    }

    fn run(&mut self) {
        while let Some((p, q)) = self.open.pop() {
            self.exactly(p, q);
        }
        self.moved();
        self.open = self.unfinished();
        while let Some((p, q)) = self.open.pop() {
            self.loosely(p, q);
        }
        self.loosely_anywhere();
        while let Some((p, q)) = self.open.pop() {
            self.loosely(p, q);
        }
    }

    fn pair(&mut self, i: u32, j: u32) {
        self.to_b[i as usize] = j;
        self.to_a[j as usize] = i;
        if let Some(left) = self.left.get_mut(&self.a.exact[i as usize]) {
            left.0 -= 1;
        }
        if let Some(left) = self.left.get_mut(&self.b.exact[j as usize]) {
            left.1 -= 1;
        }
        if self.a.is_container(i) && self.b.is_container(j) {
            self.open.push((i, j));
        }
    }

    /// Whether the two are equal, or neither can still find its equal anywhere.
    fn may_pair(&self, i: u32, j: u32) -> bool {
        let (x, y) = (self.a.exact[i as usize], self.b.exact[j as usize]);
        x == y || (self.left.get(&x).is_none_or(|l| l.1 == 0) && self.left.get(&y).is_none_or(|l| l.0 == 0))
    }

    fn free(&self, p: u32, q: u32) -> (Vec<u32>, Vec<u32>) {
        let free_a = self.a.children(p).iter().copied().filter(|&i| self.to_b[i as usize] == NONE);
        let free_b = self.b.children(q).iter().copied().filter(|&j| self.to_a[j as usize] == NONE);
        (free_a.collect(), free_b.collect())
    }

    /// Children that are the same, and containers that hold the same.
    fn exactly(&mut self, p: u32, q: u32) {
        let (a, b) = (self.a, self.b);
        let mut lists = Lists::new(a.children(p), b.children(q));
        lists.in_order(self, |i| Some(a.tree[i as usize]), |j| Some(b.tree[j as usize]));
        if lists.done() {
            return;
        }
        let held = self.held(p, q);
        let token = |side: &Side, partner: Option<u64>, span: u32| match side.is_container(span) {
            true => partner,
            false => Some(side.exact[span as usize]),
        };
        let of_a = |i: u32| token(a, held.get(&i).map(|j| u64::from(*j)), i);
        let wanted: HashMap<u32, u64> = held.values().map(|&j| (j, u64::from(j))).collect();
        let of_b = |j: u32| token(b, wanted.get(&j).copied(), j);
        lists.in_order(self, of_a, of_b);
        lists.in_any_order(self, of_a, of_b);
        lists.in_order(self, |i| Some(a.exact[i as usize]), |j| Some(b.exact[j as usize]));
        let container = |side: &Side, keys: &[u64], span: u32| side.is_container(span).then(|| keys[span as usize]);
        lists.in_order(self, |i| container(a, &a.loose, i), |j| container(b, &b.loose, j));
        lists.in_order(self, |i| container(a, &a.nameless, i), |j| container(b, &b.nameless, j));
    }

    /// Containers among the children that share steps which nobody else there has: each with the one it shares most with.
    fn held(&self, p: u32, q: u32) -> HashMap<u32, u32> {
        let (free_a, free_b) = self.free(p, q);
        let mut holder: HashMap<u64, (u32, u32)> = HashMap::new();
        const SEVERAL: u32 = NONE - 1;
        let note = |slot: &mut u32, holder: u32| *slot = if *slot == NONE || *slot == holder { holder } else { SEVERAL };
        let mut leaves = Vec::new();
        for &i in free_a.iter().filter(|&&i| self.a.is_container(i)) {
            leaves.clear();
            self.a.leaves(i, LEAVES, &mut leaves);
            leaves.iter().for_each(|&l| note(&mut holder.entry(self.a.exact[l as usize]).or_insert((NONE, NONE)).0, i));
        }
        for &j in free_b.iter().filter(|&&j| self.b.is_container(j)) {
            leaves.clear();
            self.b.leaves(j, LEAVES, &mut leaves);
            leaves.iter().for_each(|&l| note(&mut holder.entry(self.b.exact[l as usize]).or_insert((NONE, NONE)).1, j));
        }
        let mut votes: HashMap<(u32, u32), u32> = HashMap::new();
        for &(i, j) in holder.values().filter(|(i, j)| *i < SEVERAL && *j < SEVERAL) {
            *votes.entry((i, j)).or_default() += 1;
        }
        // Most votes first; among equals the earliest.
        let mut ranked: Vec<_> = votes.into_iter().filter(|&((i, j), _)| self.may_pair(i, j)).collect();
        ranked.sort_unstable_by_key(|&(pair, votes)| (std::cmp::Reverse(votes), pair));
        let (mut held, mut taken) = (HashMap::new(), std::collections::HashSet::new());
        for ((i, j), _) in ranked {
            if !held.contains_key(&i) && taken.insert(j) {
                held.insert(i, j);
            }
        }
        held
    }

    /// What equals something anywhere in the other run.
    fn moved(&mut self) {
        let (a, b) = (self.a, self.b);
        let (all_a, all_b) = self.leftover();
        let mut lists = Lists::new(&all_a, &all_b);
        lists.in_order(self, |i| Some(a.exact[i as usize]), |j| Some(b.exact[j as usize]));
        lists.in_any_order(self, |i| Some(a.exact[i as usize]), |j| Some(b.exact[j as usize]));
    }

    fn leftover(&self) -> (Vec<u32>, Vec<u32>) {
        let free = |to: &[u32]| (0..to.len() as u32).filter(|&i| to[i as usize] == NONE).collect();
        (free(&self.to_b), free(&self.to_a))
    }

    /// Corresponding parents of which both have children without a partner.
    fn unfinished(&self) -> Vec<(u32, u32)> {
        let parents = |i: u32| match self.a.parent[i as usize] {
            NONE => Some((NONE, NONE)),
            p => Some((p, self.to_b[p as usize])).filter(|(_, q)| *q != NONE),
        };
        let mut pairs: Vec<_> = self.leftover().0.into_iter().filter_map(parents).collect();
        pairs.sort_unstable();
        pairs.dedup();
        pairs
    }

    /// Children of the same kind and name, or of the same kind and input, between neighbours that correspond.
    fn loosely(&mut self, p: u32, q: u32) {
        let (a, b) = (self.a, self.b);
        let mut lists = Lists::new(a.children(p), b.children(q));
        lists.anchors = anchors(lists.a, lists.b, &self.to_b);
        lists.in_order(self, |i| Some(a.loose[i as usize]), |j| Some(b.loose[j as usize]));
        let named = |key: u64| Some(key).filter(|&key| key != 0);
        lists.in_order(self, |i| named(a.nameless[i as usize]), |j| named(b.nameless[j as usize]));
    }

    /// Steps of the same kind and name that other steps hold now, where the run as a whole has them in the same place.
    fn loosely_anywhere(&mut self) {
        let (a, b) = (self.a, self.b);
        let (left_a, left_b) = self.leftover();
        if left_a.is_empty() || left_b.is_empty() {
            return;
        }
        let (all_a, all_b) = (a.all(), b.all());
        let mut lists = Lists::new(&all_a, &all_b);
        lists.anchors = anchors(&all_a, &all_b, &self.to_b);
        lists.in_order(self, |i| Some(a.loose[i as usize]), |j| Some(b.loose[j as usize]));
    }
}

/// Two lists of siblings with the positions where they are already known to correspond, in order.
struct Lists<'l> {
    a: &'l [u32],
    b: &'l [u32],
    anchors: Vec<(usize, usize)>,
}

impl<'l> Lists<'l> {
    fn new(a: &'l [u32], b: &'l [u32]) -> Self {
        Self { a, b, anchors: Vec::new() }
    }

    /// Every element of one of the lists has its place.
    fn done(&self) -> bool {
        self.anchors.len() == self.a.len().min(self.b.len())
    }

    /// Pairs what has the same key in the same order, between the anchors; `None` is no key.
    fn in_order(&mut self, aligner: &mut Aligner<'_>, key_a: impl Fn(u32) -> Option<u64>, key_b: impl Fn(u32) -> Option<u64>) {
        if self.done() {
            return;
        }
        let mut found = Vec::with_capacity(self.anchors.len());
        let (mut x, mut y) = (0, 0);
        let mut ends = std::mem::take(&mut self.anchors);
        ends.push((self.a.len(), self.b.len()));
        let (mut at_a, mut at_b, mut keys_a, mut keys_b) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (end_x, end_y) in ends {
            [&mut at_a, &mut at_b].into_iter().for_each(Vec::clear);
            [&mut keys_a, &mut keys_b].into_iter().for_each(Vec::clear);
            for at in x..end_x {
                let i = self.a[at];
                if let Some(key) = key_a(i).filter(|_| aligner.to_b[i as usize] == NONE) {
                    at_a.push(at);
                    keys_a.push(key);
                }
            }
            if !at_a.is_empty() {
                for at in y..end_y {
                    let j = self.b[at];
                    if let Some(key) = key_b(j).filter(|_| aligner.to_a[j as usize] == NONE) {
                        at_b.push(at);
                        keys_b.push(key);
                    }
                }
            }
            for (k, l) in common(&keys_a, &keys_b) {
                let (i, j) = (self.a[at_a[k]], self.b[at_b[l]]);
                if aligner.may_pair(i, j) {
                    aligner.pair(i, j);
                    found.push((at_a[k], at_b[l]));
                }
            }
            if end_x < self.a.len() {
                found.push((end_x, end_y));
            }
            (x, y) = (end_x + 1, end_y + 1);
        }
        self.anchors = found;
    }

    /// Pairs what has the same key, the first with the first. They are no anchors.
    fn in_any_order(&self, aligner: &mut Aligner<'_>, key_a: impl Fn(u32) -> Option<u64>, key_b: impl Fn(u32) -> Option<u64>) {
        let free_b = || self.b.iter().rev().copied().filter(|&j| aligner.to_a[j as usize] == NONE);
        let mut waiting: HashMap<u64, Vec<u32>> = HashMap::new();
        for j in free_b() {
            if let Some(key) = key_b(j) {
                waiting.entry(key).or_default().push(j);
            }
        }
        if waiting.is_empty() {
            return;
        }
        for &i in self.a {
            if aligner.to_b[i as usize] == NONE
                && let Some(j) = key_a(i).and_then(|key| waiting.get_mut(&key)?.pop())
            {
                aligner.pair(i, j);
            }
        }
    }
}
