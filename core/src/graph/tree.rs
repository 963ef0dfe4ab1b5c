//! The paths of a run, as a tree of numbers in which a parent comes before its children.

use std::collections::HashMap;

use super::NONE;
use crate::Digest;
use crate::footprint::Pattern;

/// A [`Pattern`] in numbers: a node of the tree, or it and all below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pat {
    pub node: u32,
    pub below: bool,
}

impl Pat {
    /// The whole workspace.
    pub const ALL: Pat = Pat { node: 0, below: true };
}

/// A path as it is looked up.
pub(super) type Key = [u8; 16];

pub(super) fn key(path: &str) -> Key {
    let mut key = [0; 16];
    key.copy_from_slice(&Digest::of(path.as_bytes()).as_bytes()[..16]);
    key
}

/// Node 0 is the workspace itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Tree {
    pub(super) parents: Vec<u32>,
    /// Nodes by the digest of their path; of a stored tree those that were loaded.
    pub(super) known: HashMap<Key, u32>,
}

impl Default for Tree {
    fn default() -> Self {
        Self { parents: vec![NONE], known: HashMap::new() }
    }
}

impl Tree {
    pub fn parents(&self) -> &[u32] {
        &self.parents
    }

    /// The folders that a path lies in, and itself, outermost first; not the workspace.
    pub(super) fn chain(path: &str) -> impl Iterator<Item = &str> {
        let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]);
        ends.map(|end| &path[..end]).filter(|path| !path.is_empty())
    }

    /// The pattern's node, if the run has it.
    pub fn find(&self, pattern: &Pattern) -> Option<Pat> {
        let node = if pattern.path().is_empty() { 0 } else { *self.known.get(&key(pattern.path()))? };
        Some(Pat { node, below: matches!(pattern, Pattern::Below(_)) })
    }

    /// The pattern's node, added where the run has none.
    pub fn find_or_add(&mut self, pattern: &Pattern) -> Pat {
        let mut node = 0;
        for path in Self::chain(pattern.path()) {
            let next = self.parents.len() as u32;
            let parent = std::mem::replace(&mut node, *self.known.entry(key(path)).or_insert(next));
            if node == next {
                self.parents.push(parent);
            }
        }
        Pat { node, below: matches!(pattern, Pattern::Below(_)) }
    }
}
