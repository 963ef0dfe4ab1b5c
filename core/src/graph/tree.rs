//! The paths of a run, as a tree of names in which a parent comes before its children.

use super::NONE;
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

/// Node 0 is the workspace itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Tree {
    pub(super) parents: Vec<u32>,
    /// Names of the nodes one after the other, and where each ends; without these nothing can be looked up.
    pub(super) names: String,
    pub(super) ends: Vec<u32>,
}

impl Default for Tree {
    fn default() -> Self {
        Self { parents: vec![NONE], names: String::new(), ends: vec![0] }
    }
}

impl Tree {
    pub fn len(&self) -> usize {
        self.parents.len()
    }

    pub fn is_empty(&self) -> bool {
        self.parents.is_empty()
    }

    /// Whether paths can be looked up.
    pub fn is_named(&self) -> bool {
        self.ends.len() == self.parents.len()
    }

    pub fn parents(&self) -> &[u32] {
        &self.parents
    }

    fn name(&self, node: u32) -> &str {
        let node = node as usize;
        let start = if node == 0 { 0 } else { self.ends[node - 1] as usize };
        &self.names[start..self.ends[node] as usize]
    }

    /// The path of a node; `None` where the names were not loaded.
    pub fn path(&self, node: u32) -> Option<String> {
        let mut parts = Vec::new();
        let mut at = node;
        while at != 0 {
            if !self.is_named() {
                return None;
            }
            parts.push(self.name(at));
            at = *self.parents.get(at as usize)?;
        }
        parts.reverse();
        Some(parts.join("/"))
    }

    pub(super) fn push(&mut self, parent: u32, name: &str) -> u32 {
        self.parents.push(parent);
        self.names.push_str(name);
        self.ends.push(self.names.len() as u32);
        self.parents.len() as u32 - 1
    }

    /// The pattern's node, added where the run has none. A pass over all nodes for each name of the path.
    pub fn find_or_add(&mut self, pattern: &Pattern) -> Pat {
        let mut at = 0;
        for name in pattern.path().split('/').filter(|name| !name.is_empty()) {
            let child = (at + 1..self.parents.len() as u32).find(|&n| self.parents[n as usize] == at && self.name(n) == name);
            at = child.unwrap_or_else(|| self.push(at, name));
        }
        Pat { node: at, below: matches!(pattern, Pattern::Below(_)) }
    }
}
