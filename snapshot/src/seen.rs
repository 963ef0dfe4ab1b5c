//! What a footprint sees of a tree: its paths, and what symlinks on them and below them lead to.

use replayfork_core::Digest;
use replayfork_core::digest::Hasher;
use replayfork_core::footprint::Pattern;

use crate::error::SnapshotError;
use crate::node::{Entry, Kind};
use crate::path_text;
use crate::store::Blobs;
use crate::tree::{Nodes, entry_at};

/// Symlinks that are followed from one path, as Linux does (path_resolution(7)).
const MAX_LINKS: usize = 40;

/// One tree that is looked at.
struct View<'a> {
    nodes: &'a mut Nodes,
    blobs: &'a mut dyn Blobs,
    root: &'a Digest,
}

/// A path, what is there, and the paths that were gone through to get to it.
struct Stop {
    at: Vec<u8>,
    entry: Option<Entry>,
}

/// The content that a footprint's patterns have in a tree: existence, types, contents, x bits, link targets and what
/// links lead to inside of the workspace.
///
/// # Errors
/// A node that is missing or hostile.
pub fn footprint_content(nodes: &mut Nodes, blobs: &mut dyn Blobs, root: &Digest, patterns: &[Pattern]) -> Result<Digest, SnapshotError> {
    let mut view = View { nodes, blobs, root };
    let mut hasher = Hasher::new("footprint");
    for pattern in patterns {
        hasher.add("pattern", pattern.to_string().as_bytes());
        let below = matches!(pattern, Pattern::Below(_));
        for stop in view.follow(crate::path_bytes(pattern.path()), &mut Vec::new())? {
            view.hash(&mut hasher, &stop, below)?;
            for inner in view.below(&stop, below)? {
                hasher.add("link", &inner);
                for stop in view.follow(inner, &mut Vec::new())?.into_iter().skip(1) {
                    view.hash(&mut hasher, &stop, true)?;
                }
            }
        }
    }
    Ok(hasher.finish())
}

/// What of a tree is seen through symlinks by a footprint, beyond its own patterns: where they lead, and the links on the way.
///
/// # Errors
/// A node that is missing or hostile.
pub fn seen_through_links(
    nodes: &mut Nodes,
    blobs: &mut dyn Blobs,
    root: &Digest,
    patterns: &[Pattern],
) -> Result<Vec<Pattern>, SnapshotError> {
    let mut view = View { nodes, blobs, root };
    let mut seen = Vec::new();
    for pattern in patterns {
        let below = matches!(pattern, Pattern::Below(_));
        let mut through = Vec::new();
        let stops = view.follow(crate::path_bytes(pattern.path()), &mut through)?;
        let mut ends: Vec<Vec<u8>> = stops.iter().map(|s| s.at.clone()).collect();
        for stop in &stops {
            for inner in view.below(stop, below)? {
                ends.extend(view.follow(inner, &mut through)?.into_iter().skip(1).map(|s| s.at));
            }
        }
        let patterns_at =
            |path: Vec<u8>, below: bool| if below { Pattern::Below(path_text(&path)) } else { Pattern::Path(path_text(&path)) };
        seen.extend(ends.into_iter().map(|end| patterns_at(end, below)));
        seen.extend(through.into_iter().map(|link| patterns_at(link, false)));
    }
    seen.retain(|one| !patterns.iter().any(|pattern| pattern.covers(one)));
    seen.sort();
    seen.dedup();
    Ok(seen)
}

impl View<'_> {
    /// What is at a path, and, while that is a symlink, at where it leads. `through` gets the paths with links on their way.
    fn follow(&mut self, mut path: Vec<u8>, through: &mut Vec<Vec<u8>>) -> Result<Vec<Stop>, SnapshotError> {
        let mut stops = Vec::new();
        for _ in 0..MAX_LINKS {
            let (at, entry) = self.enter_folders(&path, through)?;
            let next = match entry.as_ref().map(|e| &e.kind) {
                Some(Kind::Symlink { target }) => join(&at, target),
                _ => None,
            };
            stops.push(Stop { at, entry });
            match next {
                Some(next) => path = next,
                None => break,
            }
        }
        Ok(stops)
    }

    /// The path with symlinked folders on the way resolved, and its entry.
    fn enter_folders(&mut self, path: &[u8], through: &mut Vec<Vec<u8>>) -> Result<(Vec<u8>, Option<Entry>), SnapshotError> {
        let mut path = path.to_vec();
        'again: for _ in 0..MAX_LINKS {
            let parts: Vec<Vec<u8>> = path.split(|b| *b == b'/').filter(|p| !p.is_empty()).map(<[u8]>::to_vec).collect();
            for n in 1..parts.len() {
                let prefix = parts[..n].join(&b'/');
                if let Some(Entry { kind: Kind::Symlink { target }, .. }) = entry_at(self.nodes, self.blobs, self.root, &prefix)? {
                    through.push(prefix.clone());
                    let Some(mut joined) = join(&prefix, &target) else { return Ok((path, None)) };
                    joined.push(b'/');
                    joined.extend_from_slice(&parts[n..].join(&b'/'));
                    path = joined;
                    continue 'again;
                }
            }
            let whole = parts.join(&b'/');
            let entry = entry_at(self.nodes, self.blobs, self.root, &whole)?;
            return Ok((whole, entry));
        }
        Ok((path, None))
    }

    /// The symlinks below a folder.
    fn below(&mut self, stop: &Stop, below: bool) -> Result<Vec<Vec<u8>>, SnapshotError> {
        let node = match stop.entry.as_ref().map(|e| &e.kind) {
            _ if !below => return Ok(Vec::new()),
            // Of the whole workspace nothing leads out.
            Some(Kind::Directory { node }) => *node,
            _ => return Ok(Vec::new()),
        };
        let links = self.nodes.links(self.blobs, &node)?;
        // Where one leads back into the folder, the folder's own content tells.
        let folder = Pattern::Below(path_text(&stop.at));
        let leads_out = |path: &[u8], target: &[u8]| join(path, target).is_some_and(|end| !folder.covers(&Pattern::Path(path_text(&end))));
        let placed = links.iter().map(|(path, target)| ([&stop.at[..], b"/", path].concat(), target));
        Ok(placed.filter(|(path, target)| leads_out(path, target)).map(|(path, _)| path).collect())
    }

    fn hash(&mut self, hasher: &mut Hasher, stop: &Stop, below: bool) -> Result<(), SnapshotError> {
        match stop.entry.as_ref() {
            None if stop.at.is_empty() && below => hasher.add("root", self.nodes.content(self.blobs, self.root)?.as_bytes()),
            None if stop.at.is_empty() => hasher.add("folder", b""),
            None => hasher.add("absent", b""),
            Some(entry) => match &entry.kind {
                Kind::Directory { node } if below => hasher.add("folder", self.nodes.content(self.blobs, node)?.as_bytes()),
                Kind::Directory { .. } => hasher.add("folder", b""),
                _ => hasher.add("entry", entry.identity().as_bytes()),
            },
        }
        Ok(())
    }
}

/// Where a link at `path` leads, if that is in the workspace. An absolute one is the image's.
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
