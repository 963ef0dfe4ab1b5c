//! A directory on its way from names to digests.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};

use crate::index::{At, Body, Row};
use crate::stat::{Seen, Stamp};

/// A directory that is being looked at.
pub struct Folder {
    pub parent: Option<(Arc<Folder>, usize)>,
    pub name: Vec<u8>,
    pub depth: usize,
    pub handle: OwnedFd,
    pub stamp: Stamp,
    /// Its section, where it is as the index says but for what is below.
    pub unchanged: Option<At>,
    /// The section as it was, for comparison.
    pub old: Option<At>,
    /// Nothing is known of what lies below.
    pub replaced: bool,
    /// Something below is not as the index says.
    pub changed: AtomicBool,
    /// Entries by position; of an unchanged directory only those subdirectories that were looked at.
    pub rows: Mutex<Vec<(usize, Row)>>,
    /// Tasks that still add to it.
    pub left: AtomicUsize,
}

impl Folder {
    /// The path of an entry of it.
    pub fn path_of(&self, name: &[u8]) -> Vec<u8> {
        let mut names = vec![name, &self.name];
        let mut at = &self.parent;
        while let Some((folder, _)) = at {
            names.push(&folder.name);
            at = &folder.parent;
        }
        names.retain(|n| !n.is_empty());
        names.reverse();
        names.join(&b'/')
    }
}

/// Whether the index can vouch for a file or symlink.
pub fn holds(row: &Row, now: &Seen) -> bool {
    matches!(&row.body, Body::Leaf { stamp, .. } if !row.racy && *stamp == now.stamp)
}
