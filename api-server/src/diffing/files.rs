//! Files that differ between the workspaces of two runs, each told once: at the first span after which it does.

use std::collections::HashSet;

use replayfork_core::diff::{Budget, Diff, FileChange, FileSide};
use replayfork_snapshot::{Change, Entry, Kind, diff, path_text};

use super::ById;
use crate::db::Connection;
use crate::problem::{ApiError, ApiResult};
use crate::store::Namespace;
use crate::store::blobs::{self, Loaded, Trees};

/// Files of one span that are listed.
const MAX_FILES: usize = 100;
/// Bytes up to which a file's content is compared.
const MAX_FILE: u64 = 256 << 10;
/// Files of one diff whose contents are read.
const MAX_READ: usize = 500;
/// Paths that are looked at for one diff: two workspaces with nothing in common differ in all of them, after each step.
const MAX_PATHS: usize = 200_000;

/// Fills in files. Says what was left out.
///
/// # Errors
/// What the database says; a tree that is broken.
pub async fn add(client: &impl Connection, ns: &Namespace, of_a: &ById<'_>, of_b: &ById<'_>, whole: &mut Diff) -> ApiResult<Vec<String>> {
    let mut trees = Trees::default();
    let mut told: HashSet<(Vec<u8>, Option<FileSide>, Option<FileSide>)> = HashSet::new();
    let (mut budget, mut read, mut paths, mut unread, mut unlooked) = (Budget::default(), 0, 0, 0, 0);
    for span in whole.spans.iter_mut().filter(|s| s.workspace_differs) {
        let (Some(a), Some(b)) = (&span.a, &span.b) else { continue };
        let after = |spans: &ById<'_>, id: &str| spans.get(id).and_then(|s| s.snapshot_after);
        let (Some(a), Some(b)) = (after(of_a, &a.span), after(of_b, &b.span)) else { continue };
        if paths >= MAX_PATHS {
            unlooked += 1;
            // It may have none that are new; nobody knows.
            span.files_left_out = 1;
            continue;
        }
        trees.load(client, ns, [a.node, b.node]).await?;
        for change in diff(&mut trees.nodes, &mut Loaded, Some(&a.node), Some(&b.node))? {
            paths += 1;
            let Change { path, before, after } = change;
            let sides = (before.as_ref().map(side), after.as_ref().map(side));
            if !told.insert((path.clone(), sides.0.clone(), sides.1.clone())) {
                continue;
            }
            let Some(mut file) = FileChange::new(path_text(&path), sides.0, sides.1) else { continue };
            if span.files.len() >= MAX_FILES {
                span.files_left_out += 1;
                continue;
            }
            if file.content_differs() {
                if read < MAX_READ {
                    read += 1;
                    if let (Some(x), Some(y)) = (text(client, ns, before.as_ref()).await?, text(client, ns, after.as_ref()).await?) {
                        file.unified = budget.unified(&x, &y);
                    }
                } else {
                    unread += 1;
                }
            }
            span.files.push(file);
        }
    }
    whole.settle();
    let mut notes = Vec::new();
    if unread > 0 {
        notes.push(format!("{unread} further files differ whose contents are not compared; {MAX_READ} are"));
    }
    if unlooked > 0 {
        notes.push(format!("the files after {unlooked} further steps are not compared: {MAX_PATHS} paths were looked at by then"));
    }
    Ok(notes)
}

fn side(entry: &Entry) -> FileSide {
    match &entry.kind {
        Kind::File { size, executable, digest, .. } => FileSide::File { size: *size as i64, digest: *digest, executable: *executable },
        Kind::Symlink { target } => FileSide::Symlink { target: path_text(target) },
        Kind::Directory { .. } => FileSide::Directory,
    }
}

/// A small text file's content; nothing for what is no file, `None` for what is not compared line by line.
async fn text(client: &impl Connection, ns: &Namespace, entry: Option<&Entry>) -> ApiResult<Option<String>> {
    match entry.map(|e| &e.kind) {
        Some(Kind::File { size, digest, chunks, .. }) if *size <= MAX_FILE && chunks.is_empty() => {
            let bytes = blobs::get(client, ns, digest).await?;
            Ok(String::from_utf8(bytes).ok().filter(|t| !t.contains('\0')))
        }
        Some(Kind::File { .. }) => Ok(None),
        None | Some(Kind::Symlink { .. } | Kind::Directory { .. }) => Ok(Some(String::new())),
    }
}

/// # Errors
/// 404 for a path that the tree does not have.
pub fn not_in_tree(path: &str) -> ApiError {
    ApiError::not_found("PathNotFound", format!("the workspace state has no {path:?}"))
}
