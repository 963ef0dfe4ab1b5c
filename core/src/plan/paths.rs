//! What is known of the workspace before anything runs: per path whether it may differ, and whether it may be unknown.

use crate::graph::{NONE, Pat, Tree};

/// How sure something is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    #[default]
    No,
    Maybe,
    Certain,
}

/// Spans, each once, the first `N` that were added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Few<const N: usize = 4> {
    len: u8,
    spans: [u32; N],
}

impl<const N: usize> Default for Few<N> {
    fn default() -> Self {
        Self { len: 0, spans: [0; N] }
    }
}

impl<const N: usize> Few<N> {
    pub fn one(span: u32) -> Self {
        let mut few = Self::default();
        few.add(span);
        few
    }

    pub fn as_slice(&self) -> &[u32] {
        &self.spans[..self.len as usize]
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    pub fn add(&mut self, span: u32) {
        if (self.len as usize) < N && !self.as_slice().contains(&span) {
            self.spans[self.len as usize] = span;
            self.len += 1;
        }
    }

    #[inline]
    pub fn merge(&mut self, from: &[u32]) {
        from.iter().for_each(|&span| self.add(span));
    }
}

/// A path's or a set of paths' state before a span.
#[derive(Clone, Copy, Debug, Default)]
pub struct PathState {
    pub differs: Level,
    pub blocked: Level,
    /// Nobody knows it, since no workspace was recorded that the walk could begin with.
    pub unrecorded: bool,
    /// Spans that it is so because of.
    pub triggers: Few,
    /// Of those, the blocked ones that would have written it.
    pub unknown_from: Few,
}

impl PathState {
    /// Nobody knows it, because of this span.
    pub fn unknown(span: u32) -> Self {
        Self { blocked: Level::Certain, triggers: Few::one(span), unknown_from: Few::one(span), ..Self::default() }
    }

    /// Nobody knows it, and the walk begins at this span.
    pub fn unrecorded(first: u32) -> Self {
        Self { blocked: Level::Certain, unrecorded: true, triggers: Few::one(first), ..Self::default() }
    }

    fn is_recorded(&self) -> bool {
        self.differs == Level::No && self.blocked == Level::No
    }

    #[inline]
    pub fn join(&mut self, other: &PathState, at_most: Level) {
        self.differs = self.differs.max(other.differs.min(at_most));
        self.blocked = self.blocked.max(other.blocked);
        self.unrecorded |= other.unrecorded;
        self.triggers.merge(other.triggers.as_slice());
        self.unknown_from.merge(other.unknown_from.as_slice());
    }
}

#[derive(Clone, Copy)]
struct Entry {
    pat: Pat,
    live: bool,
    state: PathState,
}

enum Undo {
    Pushed,
    Killed(u32),
}

/// What is known of the workspace: for paths not mentioned, as recorded. Later entries win over earlier ones.
///
/// Bounds: a look at a path costs its depth, where something below it is known the number of entries; so does setting a folder
/// below which something is known.
pub struct Paths<'t> {
    parents: &'t [u32],
    /// By node, place of its entry and one more; 0 for none.
    exact: Vec<u32>,
    below: Vec<u32>,
    /// By node, how many entries live there or below it.
    near: Vec<u32>,
    /// By node, whether others are below it.
    inner: Vec<bool>,
    entries: Vec<Entry>,
    live: usize,
    /// Live entries that are seen from other nodes than their own and those above it.
    wide: usize,
    /// What has happened since [`Paths::mark`], while it is to be undone.
    log: Option<Vec<Undo>>,
}

impl<'t> Paths<'t> {
    pub fn new(tree: &'t Tree) -> Self {
        let parents = tree.parents();
        let mut inner = vec![false; parents.len()];
        parents.iter().filter(|p| **p != NONE).for_each(|&p| inner[p as usize] = true);
        let slots = || vec![0; parents.len()];
        Self { parents, exact: slots(), below: slots(), near: slots(), inner, entries: Vec::new(), live: 0, wide: 0, log: None }
    }

    /// Whether everything is as recorded, and nothing was said of any path.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    /// Whether anything that is known may be seen through the node.
    #[inline]
    pub fn is_near(&self, node: u32) -> bool {
        self.live > 0 && (self.wide > 0 || self.near[node as usize] > 0)
    }

    /// From here on, until [`Paths::undo`].
    pub fn mark(&mut self) {
        self.log = Some(Vec::new());
    }

    pub fn undo(&mut self) {
        for undo in self.log.take().into_iter().flatten().rev() {
            match undo {
                Undo::Pushed => {
                    let place = self.entries.len() as u32;
                    self.count(place, false);
                    self.entries.pop();
                }
                Undo::Killed(place) => self.count(place, true),
            }
        }
    }

    /// Takes an entry, named by its place and one more, into account, or out of it.
    fn count(&mut self, place: u32, live: bool) {
        let entry = &mut self.entries[place as usize - 1];
        entry.live = live;
        let Pat { node, below } = entry.pat;
        let slot = if below { &mut self.below } else { &mut self.exact };
        slot[node as usize] = if live { place } else { 0 };
        let wide = usize::from(below || self.inner[node as usize]);
        let mut at = node;
        if live {
            (self.live, self.wide) = (self.live + 1, self.wide + wide);
        } else {
            (self.live, self.wide) = (self.live - 1, self.wide - wide);
        }
        while at != NONE {
            let near = &mut self.near[at as usize];
            *near = if live { *near + 1 } else { *near - 1 };
            at = self.parents[at as usize];
        }
    }

    fn kill(&mut self, place: u32) {
        if place != 0 {
            self.count(place, false);
            if let Some(log) = &mut self.log {
                log.push(Undo::Killed(place));
            }
        }
    }

    fn is_inside(&self, mut node: u32, of: u32) -> bool {
        // A parent comes before its children.
        while node > of {
            node = self.parents[node as usize];
        }
        node == of
    }

    fn is_overlapped(&self, node: u32) -> bool {
        if self.near[node as usize] > 0 {
            return true;
        }
        let mut at = if self.wide > 0 { node } else { NONE };
        while at != NONE {
            if self.exact[at as usize] != 0 || self.below[at as usize] != 0 {
                return true;
            }
            at = self.parents[at as usize];
        }
        false
    }

    pub fn set(&mut self, pat: Pat, state: PathState) {
        let node = pat.node as usize;
        self.kill(self.exact[node]);
        if pat.below {
            self.kill(self.below[node]);
            let mut place = self.entries.len() as u32;
            while self.near[node] > 0 && place > 0 {
                let entry = &self.entries[place as usize - 1];
                if entry.live && self.is_inside(entry.pat.node, pat.node) {
                    self.kill(place);
                }
                place -= 1;
            }
        }
        if state.is_recorded() && !self.is_overlapped(pat.node) {
            return;
        }
        self.forget_the_dead();
        self.entries.push(Entry { pat, live: false, state });
        self.count(self.entries.len() as u32, true);
        if let Some(log) = &mut self.log {
            log.push(Undo::Pushed);
        }
    }

    fn forget_the_dead(&mut self) {
        if self.log.is_some() || self.entries.len() < 64 + 2 * self.live {
            return;
        }
        self.entries.retain(|e| e.live);
        for (place, entry) in self.entries.iter().enumerate() {
            let slot = if entry.pat.below { &mut self.below } else { &mut self.exact };
            slot[entry.pat.node as usize] = place as u32 + 1;
        }
    }

    /// The state of a pattern. What lies above it, and below what is no folder, may differ without being seen through it.
    pub fn of(&self, pat: Pat) -> PathState {
        let mut state = PathState::default();
        let node = pat.node as usize;
        if self.wide == 0 && self.near[node] <= 1 && (self.exact[node] != 0 || self.near[node] == 0) {
            if self.exact[node] != 0 {
                state.join(&self.entries[self.exact[node] as usize - 1].state, Level::Certain);
            }
            return state;
        }
        // Places of what overlaps, and whether the pattern covers it; nothing before `covered` is seen.
        let mut seen: Vec<(u32, bool)> = Vec::new();
        let mut covered = 0;
        let (exact, below) = (self.exact[node], self.below[node]);
        seen.extend((exact != 0).then_some((exact, true)));
        seen.extend((below != 0).then_some((below, pat.below)));
        if !pat.below {
            covered = exact;
        }
        covered = covered.max(below);
        let mut at = self.parents[node];
        while at != NONE {
            let (exact, below) = (self.exact[at as usize], self.below[at as usize]);
            seen.extend((exact != 0).then_some((exact, false)));
            seen.extend((below != 0).then_some((below, false)));
            covered = covered.max(below);
            at = self.parents[at as usize];
        }
        let mut inside = self.near[node] - u32::from(exact != 0) - u32::from(below != 0);
        let mut place = self.entries.len() as u32;
        while inside > 0 && place > covered {
            let entry = &self.entries[place as usize - 1];
            if entry.live && entry.pat.node != pat.node && self.is_inside(entry.pat.node, pat.node) {
                seen.push((place, pat.below));
                inside -= 1;
            }
            place -= 1;
        }
        seen.retain(|(place, _)| *place >= covered);
        seen.sort_unstable_by(|x, y| y.cmp(x));
        for (place, covers) in seen {
            state.join(&self.entries[place as usize - 1].state, if covers { Level::Certain } else { Level::Maybe });
        }
        state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::footprint::Pattern;

    fn differs(level: Level) -> PathState {
        PathState { differs: level, ..PathState::default() }
    }

    #[test]
    fn the_latest_word_on_a_path_counts_and_others_stay_and_all_can_be_undone() {
        let mut tree = Tree::default();
        let mut path = |text: &str| tree.find_or_add(&Pattern::Path(text.into()));
        let (b, c, other) = (path("a/b"), path("a/c"), path("x"));
        let folder = tree.find_or_add(&Pattern::Below("a".into()));
        let mut paths = Paths::new(&tree);
        paths.set(b, differs(Level::Certain));
        assert_eq!(paths.of(b).differs, Level::Certain);
        assert_eq!(paths.of(folder).differs, Level::Certain);
        assert_eq!(paths.of(c).differs, Level::No);
        assert!(!paths.is_near(other.node));
        paths.mark();
        paths.set(folder, differs(Level::Maybe));
        assert_eq!(paths.of(b).differs, Level::Maybe, "a later write of the folder may have changed it again");
        paths.set(b, PathState::default());
        assert_eq!(paths.of(b).differs, Level::No, "as recorded again");
        assert_eq!(paths.of(c).differs, Level::Maybe);
        assert_eq!(paths.of(Pat::ALL).differs, Level::Maybe);
        paths.undo();
        assert_eq!((paths.of(b).differs, paths.of(c).differs), (Level::Certain, Level::No));
    }
}
