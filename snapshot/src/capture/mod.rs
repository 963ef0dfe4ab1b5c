//! Taking a snapshot: walk, compare with the stat index, read what is new, pack it.
//!
//! Two threads take directories off one stack, in path order. Each has a pack of its own, into whose open frame it reads small
//! files; hash and compression work on the bytes where they were read. Directories are packed apart, after what they name.

mod complete;
mod folder;
mod glance;
mod keep;
mod listing;
mod read;
mod split;
mod walk;

use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ignore::gitignore::{Gitignore, GitignoreBuilder};
use replayfork_core::Digest;
use replayfork_core::digest::Hasher;
use replayfork_core::model::SnapshotRef;

use crate::error::SnapshotError;
use crate::index::{StatIndex, boot};
use crate::node::Node;
use crate::store::LocalStore;
use keep::{Keep, Packs};
use walk::Walk;

const IGNORE_FILE: &str = ".replayforkignore";
/// Threads that look at and read files.
const THREADS: usize = 2;

/// An entry that a snapshot leaves out, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    pub path: String,
    pub why: String,
    /// It is of a kind that snapshots hold, and could not be read.
    pub unread: bool,
}

/// A snapshot that was taken.
#[derive(Clone, Debug)]
pub struct Captured {
    pub snapshot: SnapshotRef,
    pub files: u64,
    pub bytes: u64,
    /// Files that were read because the index could not vouch for them.
    pub read: u64,
    pub skipped: Vec<Skipped>,
}

/// Called with the file of every pack that a capture has stored, in the order in which they can be sent on: what a directory names
/// is in its own pack or in one before.
pub type Stored<'a> = &'a mut (dyn FnMut(&Path) -> Result<(), SnapshotError> + Send);

/// Takes snapshots of one folder, one after the other, each cheap after the first.
///
/// What it knows of the folder is kept in a file in the store's folder, so that the first snapshot after a restart is cheap too.
/// While one capturer has that file, another one of the same folder knows nothing at first and forgets at its end.
pub struct Capturer {
    root: PathBuf,
    index: Option<StatIndex>,
}

/// A folder's state that was looked at and not stored.
pub(crate) struct Scanned {
    pub snapshot: SnapshotRef,
    pub skipped: Vec<Skipped>,
    /// Nodes of its directories that the index could not vouch for, and that may be in no store.
    pub nodes: HashMap<Digest, Node>,
}

impl Capturer {
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_owned(), index: None }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Takes a snapshot into a store, each time the same one. Blobs that the store lacks are put into it in packs of about 4 MB.
    ///
    /// # Errors
    /// The root can't be read, the store can't be written, or `stored` fails. Entries that can't be read are reported as skipped.
    pub fn capture(&mut self, store: &LocalStore, stored: Stored<'_>) -> Result<Captured, SnapshotError> {
        self.run(store, &Keep::Store(Box::new(Packs::new(store, stored))))
    }

    /// Looks at the folder as a capture does, but stores nothing.
    ///
    /// # Errors
    /// The root can't be read.
    pub(crate) fn scan(&mut self, store: &LocalStore) -> Result<Scanned, SnapshotError> {
        let keep = Keep::nothing();
        let Captured { snapshot, skipped, .. } = self.run(store, &keep)?;
        Ok(Scanned { snapshot, skipped, nodes: keep.into_nodes() })
    }

    fn run(&mut self, store: &LocalStore, keep: &Keep<'_>) -> Result<Captured, SnapshotError> {
        let path = store.folder().join(format!("{}.index", Digest::of(self.root.as_os_str().as_bytes())));
        let index_error = |e| SnapshotError::io(path.as_os_str().as_bytes(), e);
        let index = match self.index.take() {
            Some(index) => index,
            None => open_index(&path, store.packs_on_disk()?).map_err(index_error)?,
        };
        let index = self.index.insert(index);
        let key = index_key(&self.root);
        let walked = Walk::new(&self.root, ignore_rules(&self.root), index, key, keep).and_then(|walk| walk.run());
        let (captured, root) = match walked.and_then(|walked| keep.finish().map(|()| walked)) {
            Ok(walked) => walked,
            Err(error) => {
                index.abandon();
                return Err(error);
            }
        };
        if keep.stores() && index.root(&key) != Some(root) {
            let packs = store.packs_on_disk()?;
            index.commit(key, root, packs).map_err(index_error)?;
            if index.is_wasteful() {
                self.index = Some(rewritten(index, &path, packs).map_err(index_error)?);
            }
        }
        Ok(captured)
    }
}

/// Opens the index, or, where another capturer has it, one that goes with this process.
fn open_index(path: &Path, packs: u64) -> std::io::Result<StatIndex> {
    if let Some(index) = StatIndex::open(path, packs)? {
        return Ok(index);
    }
    let own = temporary(path);
    let index = StatIndex::open(&own, packs)?.ok_or(std::io::ErrorKind::ResourceBusy)?;
    std::fs::remove_file(&own)?;
    Ok(index)
}

/// The index without what nobody names any more, in the place of the old one.
fn rewritten(index: &StatIndex, path: &Path, packs: u64) -> std::io::Result<StatIndex> {
    let beside = temporary(path);
    let mut fresh = StatIndex::open(&beside, packs)?.ok_or(std::io::ErrorKind::ResourceBusy)?;
    index.copy_to(&mut fresh, packs)?;
    if index.is_at(path) {
        std::fs::rename(&beside, path)?;
    } else {
        std::fs::remove_file(&beside)?;
    }
    Ok(fresh)
}

fn temporary(path: &Path) -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    path.with_extension(format!("{}-{}.tmp", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

fn ignore_rules(root: &Path) -> Gitignore {
    let mut builder = GitignoreBuilder::new(root);
    builder.add(root.join(IGNORE_FILE));
    builder.build().unwrap_or_else(|_| Gitignore::empty())
}

/// What an index's vouching depends on, besides the files.
fn index_key(root: &Path) -> Digest {
    let rules = std::fs::read(root.join(IGNORE_FILE)).unwrap_or_default();
    Hasher::new("stat index").part("boot", &boot()).part("root", root.as_os_str().as_bytes()).part("rules", &rules).finish()
}
