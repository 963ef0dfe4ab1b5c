//! Trees of directories by digest: looking up, comparing, listing what they need.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use replayfork_core::Digest;

use crate::error::{Hostile, SnapshotError};
use crate::node::{Directory, Entry, Kind, MAX_LEVEL, Node};
use crate::store::Blobs;

/// Levels that a tree may have.
pub const MAX_DEPTH: usize = 256;
/// Nodes that may lie one below the other in a tree.
pub const MAX_NODE_DEPTH: usize = (MAX_DEPTH + 1) * (MAX_LEVEL as usize + 1);
/// Entries that a tree may have.
pub const MAX_TREE: usize = 32_000_000;

/// A symlink: its path below some folder, and where it leads.
pub type Link = (Vec<u8>, Vec<u8>);

/// Decoded nodes by digest, loaded as they are needed, and directories put together from them.
#[derive(Default)]
pub struct Nodes {
    nodes: HashMap<Digest, Arc<Node>>,
    directories: HashMap<Digest, Arc<Directory>>,
    links: HashMap<Digest, Arc<Vec<Link>>>,
}

impl Nodes {
    pub fn insert(&mut self, digest: Digest, node: Node) {
        self.nodes.insert(digest, Arc::new(node));
    }

    pub fn contains(&self, digest: &Digest) -> bool {
        self.nodes.contains_key(digest)
    }

    /// A node that was loaded before.
    pub fn at_hand(&self, digest: &Digest) -> Option<Arc<Node>> {
        self.nodes.get(digest).cloned()
    }

    /// A directory by its topmost node.
    ///
    /// # Errors
    /// A node of it is missing or hostile.
    pub fn get(&mut self, blobs: &mut dyn Blobs, node: &Digest) -> Result<Arc<Directory>, SnapshotError> {
        if let Some(directory) = self.directories.get(node) {
            return Ok(directory.clone());
        }
        let directory = Arc::new(Directory::read(node, &mut |digest| load(&mut self.nodes, blobs, digest))?);
        self.directories.insert(*node, directory.clone());
        Ok(directory)
    }

    /// A directory's content.
    ///
    /// # Errors
    /// The node is missing, or is none of a directory.
    pub fn content(&mut self, blobs: &mut dyn Blobs, node: &Digest) -> Result<Digest, SnapshotError> {
        load(&mut self.nodes, blobs, node)?.directory_content(node).map_err(Into::into)
    }

    /// All symlinks below a folder, in path order.
    ///
    /// # Errors
    /// A node that is missing or hostile.
    pub fn links(&mut self, blobs: &mut dyn Blobs, node: &Digest) -> Result<Arc<Vec<Link>>, SnapshotError> {
        self.links_at(blobs, node, 0)
    }

    fn links_at(&mut self, blobs: &mut dyn Blobs, node: &Digest, depth: usize) -> Result<Arc<Vec<Link>>, SnapshotError> {
        if depth > MAX_DEPTH {
            return Err(Hostile { entry: node.to_string(), why: "lies too deep" }.into());
        }
        if let Some(links) = self.links.get(node) {
            return Ok(links.clone());
        }
        let mut links = Vec::new();
        for entry in self.get(blobs, node)?.entries() {
            match &entry.kind {
                Kind::Symlink { target } => links.push((entry.name.clone(), target.clone())),
                Kind::Directory { node } => {
                    let below = self.links_at(blobs, node, depth + 1)?;
                    links.extend(below.iter().map(|(path, target)| ([&entry.name[..], b"/", path].concat(), target.clone())));
                }
                Kind::File { .. } => {}
            }
        }
        let links = Arc::new(links);
        self.links.insert(*node, links.clone());
        Ok(links)
    }
}

fn load(nodes: &mut HashMap<Digest, Arc<Node>>, blobs: &mut dyn Blobs, digest: &Digest) -> Result<Arc<Node>, SnapshotError> {
    if let Some(node) = nodes.get(digest) {
        return Ok(node.clone());
    }
    let node = Arc::new(Node::decode(&blobs.get(digest)?)?);
    nodes.insert(*digest, node.clone());
    Ok(node)
}

/// A path that differs between two trees. Directories stand for themselves: what is below has changes of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub path: Vec<u8>,
    pub before: Option<Entry>,
    pub after: Option<Entry>,
}

/// What differs in content from `a` to `b`, in path order. `None` is an empty tree.
///
/// # Errors
/// A node that is missing or hostile.
pub fn diff(nodes: &mut Nodes, blobs: &mut dyn Blobs, a: Option<&Digest>, b: Option<&Digest>) -> Result<Vec<Change>, SnapshotError> {
    let mut changes = Vec::new();
    diff_into(nodes, blobs, &mut Vec::new(), a, b, &mut changes, 0)?;
    Ok(changes)
}

fn diff_into(
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    path: &mut Vec<u8>,
    a: Option<&Digest>,
    b: Option<&Digest>,
    changes: &mut Vec<Change>,
    depth: usize,
) -> Result<(), SnapshotError> {
    if a == b {
        return Ok(());
    }
    if depth > MAX_DEPTH {
        return Err(Hostile { entry: crate::path_text(path), why: "lies too deep" }.into());
    }
    let mut load = |node: Option<&Digest>| node.map(|n| nodes.get(blobs, n)).transpose();
    let (left, right) = (load(a)?, load(b)?);
    let (mut l, mut r) = (left.iter().flat_map(|d| d.entries()).peekable(), right.iter().flat_map(|d| d.entries()).peekable());
    loop {
        let (x, y) = match (l.peek(), r.peek()) {
            (None, None) => return Ok(()),
            (Some(_), None) => (l.next(), None),
            (None, Some(_)) => (None, r.next()),
            (Some(x), Some(y)) => match x.name.cmp(&y.name) {
                std::cmp::Ordering::Less => (l.next(), None),
                std::cmp::Ordering::Greater => (None, r.next()),
                std::cmp::Ordering::Equal => (l.next(), r.next()),
            },
        };
        let name = &x.or(y).expect("one side has an entry").name;
        let length = path.len();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        let folder = |e: Option<&Entry>| match e.map(|e| &e.kind) {
            Some(Kind::Directory { node }) => Some(*node),
            _ => None,
        };
        let (x_dir, y_dir) = (folder(x), folder(y));
        let both = x_dir.is_some() && y_dir.is_some();
        if changes.len() > MAX_TREE {
            return Err(Hostile { entry: crate::path_text(path), why: "is one entry too many for a tree" }.into());
        }
        if !both && x.map(Entry::identity) != y.map(Entry::identity) {
            changes.push(Change { path: path.clone(), before: x.cloned(), after: y.cloned() });
        }
        let same_content = match (x_dir, y_dir) {
            (Some(x), Some(y)) => x == y || nodes.content(blobs, &x)? == nodes.content(blobs, &y)?,
            _ => false,
        };
        if !same_content && (x_dir.is_some() || y_dir.is_some()) {
            diff_into(nodes, blobs, path, x_dir.as_ref(), y_dir.as_ref(), changes, depth + 1)?;
        }
        path.truncate(length);
    }
}

/// The entry at a path, or `None`. Symlinks on the way are not followed.
///
/// # Errors
/// A node that is missing or hostile.
pub fn entry_at(nodes: &mut Nodes, blobs: &mut dyn Blobs, root: &Digest, path: &[u8]) -> Result<Option<Entry>, SnapshotError> {
    let mut directory = nodes.get(blobs, root)?;
    let mut parts = path.split(|b| *b == b'/').filter(|p| !p.is_empty()).peekable();
    while let Some(part) = parts.next() {
        let Some(entry) = directory.get(part) else { return Ok(None) };
        if parts.peek().is_none() {
            return Ok(Some(entry.clone()));
        }
        let Kind::Directory { node } = &entry.kind else { return Ok(None) };
        directory = nodes.get(blobs, &node.clone())?;
    }
    Ok(None)
}

/// Every blob that a tree needs, nodes before what they hold, in path order, each once; those of `base` left out.
///
/// # Errors
/// A node that is missing or hostile.
pub fn reachable(nodes: &mut Nodes, blobs: &mut dyn Blobs, root: &Digest, base: Option<&Digest>) -> Result<Vec<Digest>, SnapshotError> {
    let mut seen = HashSet::new();
    if let Some(base) = base {
        collect(nodes, blobs, base, &mut seen, &mut Vec::new(), 0)?;
    }
    let mut order = Vec::new();
    collect(nodes, blobs, root, &mut seen, &mut order, 0)?;
    Ok(order)
}

fn collect(
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    node: &Digest,
    seen: &mut HashSet<Digest>,
    order: &mut Vec<Digest>,
    depth: usize,
) -> Result<(), SnapshotError> {
    if depth > MAX_DEPTH {
        return Err(Hostile { entry: node.to_string(), why: "lies too deep" }.into());
    }
    if !seen.insert(*node) {
        return Ok(());
    }
    let directory = nodes.get(blobs, node)?;
    order.push(*node);
    order.extend(directory.parts().iter().filter(|part| seen.insert(**part)));
    for entry in directory.entries() {
        match &entry.kind {
            Kind::Directory { node } => collect(nodes, blobs, node, seen, order, depth + 1)?,
            _ => order.extend(entry.blobs().into_iter().filter(|d| seen.insert(*d))),
        }
    }
    Ok(())
}
