//! A run as alignment sees it: a tree of keys.

use super::prints::{NONE, Prints};

/// One of the two runs. The root is above those without a parent.
pub(super) struct Side {
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
    pub fn new(prints: &Prints) -> Self {
        let parent: Vec<u32> = prints.spans.iter().map(|s| s.parent).collect();
        let (children, begins) = children(&parent);
        let keys = || Vec::with_capacity(parent.len());
        let (exact, loose, nameless) = (keys(), keys(), keys());
        let mut side = Self { parent, children, begins, exact, loose, nameless, tree: Vec::new() };
        for (i, span) in prints.spans.iter().enumerate() {
            let [low @ .., _, _, _, _, _, _, _, _] = span.asked;
            let (asked, kind) = (u64::from_le_bytes(low), span.kind.code() as u64 + 1);
            let loose = mixed(kind, span.name);
            side.loose.push(loose);
            side.exact.push(mixed(loose, asked));
            let container = side.is_container(i as u32);
            let nothing = span.asked == [0; 16] && !container;
            side.nameless.push(if nothing { 0 } else { mixed(mixed(kind, asked), u64::from(container)).max(1) });
        }
        side.tree = side.trees();
        side
    }

    pub fn len(&self) -> usize {
        self.parent.len()
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
                _ => below.iter().fold(mixed(self.exact[span as usize], below.len() as u64), |tree, &c| mixed(tree, trees[c as usize])),
            };
        }
        trees
    }
}

/// A key of two; both, or what they are made of, come out of digests.
fn mixed(a: u64, b: u64) -> u64 {
    (a.rotate_left(23) ^ b).wrapping_mul(0x9e37_79b9_7f4a_7c15)
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
