//! Making a folder equal a snapshot, touching only what differs, never outside of its root.
//!
//! Two threads walk the trees, remove what is too many and make folders and symlinks; files are collected, and then written by two
//! threads, in the order in which packs hold them. Times of folders come last, because writing into a folder changes them.

pub(crate) mod disk;
mod walk;
mod write;

use std::path::Path;

use replayfork_core::Digest;
use replayfork_core::model::SnapshotRef;

use crate::capture::Capturer;
use crate::error::SnapshotError;
use crate::store::LocalStore;
use crate::tree::{Nodes, entry_at};
use disk::{open_root, parent, set_time_of};

/// Makes the folder equal the tree `target`, given that it now equals `current`. `None`: nothing is known of it, and everything in it
/// that is no folder of the target is written anew.
///
/// What the tree lacks is removed; types, contents, x bits, link targets and modification times are set. Only what differs is
/// touched. Nothing is ever written outside of the root, or through a symlink.
///
/// # Errors
/// A missing or hostile node or blob, or what the file system says; the entry is named. The folder is then something between.
pub fn restore(root: &Path, store: &LocalStore, nodes: &mut Nodes, current: Option<&Digest>, target: &Digest) -> Result<(), SnapshotError> {
    if current == Some(target) {
        return Ok(());
    }
    walk::make(&open_root(root)?, store, nodes, current, target)
}

impl Capturer {
    /// Makes the folder equal a snapshot, whatever is in it now: looks at it as a capture does, by the stat index where that can
    /// vouch for files, and touches what differs. Returns what it was before; of that nothing is stored.
    ///
    /// # Errors
    /// As [`restore`], and as [`Capturer::capture`] where the folder can't be read.
    pub fn restore(&mut self, store: &LocalStore, target: &Digest) -> Result<SnapshotRef, SnapshotError> {
        let scanned = self.scan(store)?;
        let mut nodes = Nodes::default();
        for (digest, node) in scanned.nodes {
            nodes.insert(digest, node);
        }
        restore(self.root(), store, &mut nodes, Some(&scanned.snapshot.node), target)?;
        for skipped in &scanned.skipped {
            remove_skipped(self.root(), store, &mut nodes, target, &crate::path_bytes(&skipped.path))?;
        }
        Ok(scanned.snapshot)
    }
}

/// Removes what no snapshot holds, if it is still there.
fn remove_skipped(root: &Path, mut store: &LocalStore, nodes: &mut Nodes, target: &Digest, path: &[u8]) -> Result<(), SnapshotError> {
    if entry_at(nodes, &mut store, target, path)?.is_some() {
        return Ok(());
    }
    let top = open_root(root)?;
    // Its folder may be gone with it.
    let Ok((folder, name)) = parent(&top, path) else { return Ok(()) };
    disk::remove(&folder, name).map_err(|e| SnapshotError::io(path, e))?;
    let above = path.len().saturating_sub(name.len() + 1);
    match entry_at(nodes, &mut store, target, &path[..above])? {
        Some(above) => set_time_of(&folder, above.mtime).map_err(|e| SnapshotError::io(path, e)),
        None => Ok(()),
    }
}
