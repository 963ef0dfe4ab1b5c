//! Trees of directories by digest: looking up, comparing, listing what they need.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use replayfork_core::Digest;
use replayfork_core::digest::Hasher;
use replayfork_core::footprint::Pattern;

use crate::error::{Hostile, SnapshotError};
use crate::node::{Directory, Entry, Kind};
use crate::store::Blobs;

/// Levels that a tree may have.
pub const MAX_DEPTH: usize = 256;
/// Symlinks that are followed for one path.
const MAX_LINKS: usize = 16;

/// Decoded directories by node digest, loaded as they are needed.
#[derive(Default)]
pub struct Nodes(HashMap<Digest, Arc<Directory>>);

impl Nodes {
    pub fn insert(&mut self, node: Digest, directory: Directory) {
        self.0.insert(node, Arc::new(directory));
    }

    pub fn contains(&self, node: &Digest) -> bool {
        self.0.contains_key(node)
    }

    /// # Errors
    /// The node is missing or hostile.
    pub fn get(&mut self, blobs: &mut dyn Blobs, node: &Digest) -> Result<Arc<Directory>, SnapshotError> {
        if let Some(directory) = self.0.get(node) {
            return Ok(directory.clone());
        }
        let directory = Arc::new(Directory::decode(&blobs.get(node)?)?);
        self.0.insert(*node, directory.clone());
        Ok(directory)
    }
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
    let mut load = |node: Option<&Digest>| node.map_or_else(|| Ok(Arc::default()), |n| nodes.get(blobs, n));
    let (left, right) = (load(a)?, load(b)?);
    let (mut l, mut r) = (left.entries.iter().peekable(), right.entries.iter().peekable());
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
            Some(Kind::Directory { node, content }) => Some((*node, *content)),
            _ => None,
        };
        let (x_dir, y_dir) = (folder(x), folder(y));
        let both = x_dir.is_some() && y_dir.is_some();
        if !both && x.map(Entry::identity) != y.map(Entry::identity) {
            changes.push(Change { path: path.clone(), before: x.cloned(), after: y.cloned() });
        }
        let same_content = both && x_dir.map(|d| d.1) == y_dir.map(|d| d.1);
        if !same_content && (x_dir.is_some() || y_dir.is_some()) {
            diff_into(nodes, blobs, path, x_dir.map(|d| d.0).as_ref(), y_dir.map(|d| d.0).as_ref(), changes, depth + 1)?;
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
        let Kind::Directory { node, .. } = &entry.kind else { return Ok(None) };
        directory = nodes.get(blobs, &node.clone())?;
    }
    Ok(None)
}

/// The content that a footprint's patterns have in a tree: existence, types, contents, x bits, link targets and what
/// links inside of the workspace lead to.
///
/// # Errors
/// A node that is missing or hostile.
pub fn footprint_content(nodes: &mut Nodes, blobs: &mut dyn Blobs, root: &Digest, patterns: &[Pattern]) -> Result<Digest, SnapshotError> {
    let mut hasher = Hasher::new("footprint");
    for pattern in patterns {
        hasher.add("pattern", pattern.to_string().as_bytes());
        let below = matches!(pattern, Pattern::Below(_));
        let mut path = crate::path_bytes(pattern.path());
        for _ in 0..MAX_LINKS {
            let (at, entry) = follow_folders(nodes, blobs, root, &path)?;
            if at.is_empty() && below {
                hasher.add("root", nodes.get(blobs, root)?.content().as_bytes());
                break;
            }
            let Some(entry) = entry else {
                hasher.add("absent", b"");
                break;
            };
            match &entry.kind {
                Kind::Directory { content, .. } if below => hasher.add("folder", content.as_bytes()),
                Kind::Directory { .. } => hasher.add("folder", b""),
                _ => hasher.add("entry", entry.identity().as_bytes()),
            }
            let Kind::Symlink { target } = &entry.kind else { break };
            let Some(next) = join(&at, target) else { break };
            path = next;
        }
    }
    Ok(hasher.finish())
}

/// The path with symlinked folders on the way resolved, and its entry.
fn follow_folders(nodes: &mut Nodes, blobs: &mut dyn Blobs, root: &Digest, path: &[u8]) -> Result<(Vec<u8>, Option<Entry>), SnapshotError> {
    let mut path = path.to_vec();
    'again: for _ in 0..MAX_LINKS {
        let parts: Vec<Vec<u8>> = path.split(|b| *b == b'/').filter(|p| !p.is_empty()).map(<[u8]>::to_vec).collect();
        for n in 1..parts.len() {
            let prefix = parts[..n].join(&b'/');
            if let Some(Entry { kind: Kind::Symlink { target }, .. }) = entry_at(nodes, blobs, root, &prefix)? {
                let Some(mut joined) = join(&prefix, &target) else { return Ok((path, None)) };
                joined.push(b'/');
                joined.extend_from_slice(&parts[n..].join(&b'/'));
                path = joined;
                continue 'again;
            }
        }
        let whole = parts.join(&b'/');
        let entry = entry_at(nodes, blobs, root, &whole)?;
        return Ok((whole, entry));
    }
    Ok((path, None))
}

/// Where a link at `path` leads, if that is in the workspace.
fn join(path: &[u8], target: &[u8]) -> Option<Vec<u8>> {
    if target.starts_with(b"/") {
        return None;
    }
    let mut parts: Vec<&[u8]> = path.split(|b| *b == b'/').filter(|p| !p.is_empty()).collect();
    parts.pop();
    for part in target.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join(&b'/'))
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
    order.push(*node);
    for entry in &nodes.get(blobs, node)?.entries {
        match &entry.kind {
            Kind::Directory { node, .. } => collect(nodes, blobs, node, seen, order, depth + 1)?,
            _ => order.extend(entry.blobs().into_iter().filter(|d| seen.insert(*d))),
        }
    }
    Ok(())
}
