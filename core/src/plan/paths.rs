//! What is known of the workspace before anything runs: per path whether it may differ, and whether it may be unknown.

use crate::footprint::Pattern;

/// How sure something is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    #[default]
    No,
    Maybe,
    Certain,
}

/// A path's or a set of paths' state before a span.
#[derive(Clone, Debug, Default)]
pub struct PathState {
    pub differs: Level,
    pub blocked: Level,
    /// Spans that it is so because of.
    pub triggers: Vec<usize>,
    /// Of those, the blocked ones that would have written it.
    pub unknown_from: Vec<usize>,
}

impl PathState {
    /// Nobody knows it, because of this span.
    pub fn unknown(span: usize) -> Self {
        Self { differs: Level::No, blocked: Level::Certain, triggers: vec![span], unknown_from: vec![span] }
    }

    fn join(&mut self, other: &PathState, at_most: Level) {
        self.differs = self.differs.max(other.differs.min(at_most));
        self.blocked = self.blocked.max(other.blocked);
        merge(&mut self.triggers, &other.triggers);
        merge(&mut self.unknown_from, &other.unknown_from);
    }
}

pub fn merge(into: &mut Vec<usize>, from: &[usize]) {
    for span in from {
        if !into.contains(span) {
            into.push(*span);
        }
    }
}

/// What is known of the workspace: for paths not mentioned, as recorded. Later entries win over earlier ones.
#[derive(Clone, Default)]
pub struct Paths(Vec<(Pattern, PathState)>);

impl Paths {
    pub fn of(&self, pattern: &Pattern) -> PathState {
        let mut state = PathState::default();
        let mut seen: Vec<&Pattern> = Vec::new();
        for (entry, is) in self.0.iter().rev() {
            if !entry.overlaps(pattern) || seen.iter().any(|s| s.covers(entry)) {
                continue;
            }
            // What lies above or below may differ without this one seeing it.
            state.join(is, if pattern.covers(entry) { Level::Certain } else { Level::Maybe });
            if entry.covers(pattern) {
                break;
            }
            seen.push(entry);
        }
        state
    }

    pub fn of_all(&self, patterns: &[Pattern]) -> PathState {
        let mut state = PathState::default();
        for pattern in patterns {
            state.join(&self.of(pattern), Level::Certain);
        }
        state
    }

    pub fn set(&mut self, pattern: Pattern, state: PathState) {
        self.0.retain(|(old, _)| !pattern.covers(old));
        let recorded = state.differs == Level::No && state.blocked == Level::No;
        if !(recorded && self.0.iter().all(|(old, _)| !old.overlaps(&pattern))) {
            self.0.push((pattern, state));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differs(level: Level) -> PathState {
        PathState { differs: level, ..PathState::default() }
    }

    fn path(text: &str) -> Pattern {
        Pattern::Path(text.into())
    }

    #[test]
    fn the_latest_word_on_a_path_counts_and_others_stay() {
        let mut paths = Paths::default();
        paths.set(path("a/b"), differs(Level::Certain));
        assert_eq!(paths.of(&path("a/b")).differs, Level::Certain);
        assert_eq!(paths.of(&Pattern::Below("a".into())).differs, Level::Certain);
        assert_eq!(paths.of(&path("a/c")).differs, Level::No);
        paths.set(Pattern::Below("a".into()), differs(Level::Maybe));
        assert_eq!(paths.of(&path("a/b")).differs, Level::Maybe, "a later write of the folder may have changed it again");
        paths.set(path("a/b"), PathState::default());
        assert_eq!(paths.of(&path("a/b")).differs, Level::No, "as recorded again");
        assert_eq!(paths.of(&path("a/c")).differs, Level::Maybe);
    }
}
