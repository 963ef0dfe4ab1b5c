//! A directory, put together from its nodes.

use std::sync::Arc;

use replayfork_core::Digest;

use super::{Body, Entry, MAX_ENTRIES, Node};
use crate::error::{Hostile, SnapshotError};

/// A directory's content, and its entries sorted by the bytes of their names.
#[derive(Clone, Debug)]
pub struct Directory {
    content: Digest,
    /// Nodes with entries, in order; shared with whoever has read them before.
    leaves: Vec<Arc<Node>>,
    /// All nodes below the topmost one, each before those that it names.
    parts: Vec<Digest>,
    len: usize,
}

/// Gives nodes by their digests.
pub type Load<'a> = &'a mut dyn FnMut(&Digest) -> Result<Arc<Node>, SnapshotError>;

impl Directory {
    /// Reads a directory by its topmost node.
    ///
    /// # Errors
    /// What `load` gives; nodes that are no directory together: a part in the place of a whole or a whole in that of a part, levels that
    /// don't fall by one, entries twice or out of order, too many of them.
    pub fn read(node: &Digest, load: Load<'_>) -> Result<Self, SnapshotError> {
        let top = load(node)?;
        let content = top.directory_content(node)?;
        let mut directory = Self { content, leaves: Vec::new(), parts: Vec::new(), len: 0 };
        directory.add(top, load)?;
        Ok(directory)
    }

    /// Adds all entries of a node, whose level bounds the depth of this.
    fn add(&mut self, node: Arc<Node>, load: Load<'_>) -> Result<(), SnapshotError> {
        let Body::Parts { level, nodes } = &node.body else { return self.add_leaf(node) };
        for digest in nodes {
            let part = load(digest)?;
            let hostile = |why| Hostile { entry: digest.to_string(), why };
            if part.content.is_some() {
                return Err(hostile("is a directory in the place of a part of one").into());
            }
            if part.level() + 1 != *level {
                return Err(hostile("is a part of another level").into());
            }
            self.parts.push(*digest);
            self.add(part, load)?;
        }
        Ok(())
    }

    fn add_leaf(&mut self, leaf: Arc<Node>) -> Result<(), SnapshotError> {
        let Some(first) = leaf.entries().first() else { return Ok(()) };
        let hostile = |why| Hostile { entry: crate::path_text(&first.name), why };
        let last = self.leaves.last().and_then(|l| l.entries().last());
        if last.is_some_and(|last| last.name >= first.name) {
            return Err(hostile("stands twice or out of order").into());
        }
        self.len += leaf.entries().len();
        if self.len > MAX_ENTRIES {
            return Err(hostile("is one too many for a directory").into());
        }
        self.leaves.push(leaf);
        Ok(())
    }

    /// Names and identities of all below; modification times don't count.
    pub fn content(&self) -> Digest {
        self.content
    }

    /// Nodes that it is made of besides the topmost one, each before those that it names.
    pub fn parts(&self) -> &[Digest] {
        &self.parts
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.leaves.iter().flat_map(|leaf| leaf.entries())
    }

    pub fn get(&self, name: &[u8]) -> Option<&Entry> {
        let after = self.leaves.partition_point(|leaf| leaf.entries()[0].name.as_slice() <= name);
        let entries = self.leaves[after.checked_sub(1)?].entries();
        entries.binary_search_by(|e| e.name.as_slice().cmp(name)).ok().map(|i| &entries[i])
    }
}
