//! Directories that are complete: their digests and their sections in the index.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use replayfork_core::model::SnapshotRef;

use super::folder::Folder;
use super::walk::{Walk, lock};
use crate::error::SnapshotError;
use crate::index::{At, Body, BodyRef, Row, Section};
use crate::node::DirectoryBuilder;
use crate::stat::Stamp;

/// In the place of a section that is not written.
const NOWHERE: At = At { offset: u64::MAX, len: 0 };

impl Walk<'_, '_> {
    /// Adds rows that one task has made to a directory, and ends each one that is complete now, from here to the root.
    pub(super) fn add(&self, mut folder: Arc<Folder>, mut rows: Vec<(usize, Row)>) -> Result<(), SnapshotError> {
        loop {
            lock(&folder.rows).append(&mut rows);
            if folder.left.fetch_sub(1, Ordering::AcqRel) > 1 {
                return Ok(());
            }
            let (at, SnapshotRef { content, node }, same) = self.complete(&folder)?;
            let Some((parent, position)) = &folder.parent else {
                *lock(&self.result) = Some((SnapshotRef { content, node }, at));
                return Ok(());
            };
            if !same {
                parent.changed.store(true, Ordering::Release);
            }
            let body = Body::Folder { at, mtime: folder.stamp.mtime, content, node };
            rows.push((*position, Row { name: folder.name.clone(), racy: false, body }));
            folder = parent.clone();
        }
    }

    /// A directory's section and digests, and whether it is just as the index says.
    fn complete(&self, folder: &Folder) -> Result<(At, SnapshotRef, bool), SnapshotError> {
        let mut rows = std::mem::take(&mut *lock(&folder.rows));
        let old = folder.old.and_then(|at| self.index.read(at));
        let section = old.as_deref().and_then(Section::parse);
        if let Some(at) = folder.unchanged {
            let section = section.ok_or_else(broken)?;
            if !folder.changed.load(Ordering::Acquire) {
                let (content, node) = section.digests();
                return Ok((at, SnapshotRef { content, node }, true));
            }
            for (position, row) in section.rows().enumerate() {
                match row.body {
                    BodyRef::Folder(at) if self.touched(Some(folder), Some(at)).is_none() => {
                        rows.push((position, self.vouched_row(row.name.to_vec(), at)?));
                    }
                    _ => rows.extend(row.leaf().map(|leaf| (position, leaf))),
                }
            }
        }
        rows.sort_unstable_by_key(|(position, _)| *position);
        let rows: Vec<Row> = rows.into_iter().map(|(_, row)| row).collect();
        let snapshot = self.directory(&rows)?;
        if !self.keep.stores() {
            return Ok((NOWHERE, snapshot, false));
        }
        let stamp = Stamp { size: 0, ..folder.stamp };
        let fresh = Section::encode((stamp, stamp.is_racy(self.started)), (snapshot.content, snapshot.node), &rows);
        match folder.old {
            Some(at) if old.as_deref() == Some(&fresh) => Ok((at, snapshot, true)),
            _ => Ok((self.index.append(&fresh).map_err(index_error)?, snapshot, false)),
        }
    }

    /// Keeps the nodes of a directory.
    fn directory(&self, rows: &[Row]) -> Result<SnapshotRef, SnapshotError> {
        let mut builder = DirectoryBuilder::default();
        let mut keep = |digest, bytes: &[u8]| self.keep.node(digest, bytes);
        for row in rows {
            match &row.body {
                Body::Leaf { stamp, kind } => builder.add(&row.name, stamp.mtime, kind, &mut keep)?,
                Body::Folder { mtime, content, node, .. } => {
                    let snapshot = SnapshotRef { content: *content, node: *node };
                    builder.add_directory(&row.name, *mtime, snapshot, &mut keep)?;
                }
                Body::Skipped => {}
            }
        }
        builder.finish(&mut keep)
    }

    /// A directory's time, content and node by its section.
    pub(super) fn vouched(&self, at: At) -> Result<(i64, SnapshotRef), SnapshotError> {
        let bytes = self.index.read(Section::head(at));
        let section = bytes.as_deref().and_then(Section::parse).ok_or_else(broken)?;
        let (content, node) = section.digests();
        Ok((section.stamp().0.mtime, SnapshotRef { content, node }))
    }

    pub(super) fn vouched_row(&self, name: Vec<u8>, at: At) -> Result<Row, SnapshotError> {
        let (mtime, SnapshotRef { content, node }) = self.vouched(at)?;
        Ok(Row { name, racy: false, body: Body::Folder { at, mtime, content, node } })
    }
}

fn index_error(error: std::io::Error) -> SnapshotError {
    SnapshotError::io(b"the stat index", error)
}

pub(super) fn broken() -> SnapshotError {
    index_error(std::io::Error::new(std::io::ErrorKind::InvalidData, "it is broken"))
}
