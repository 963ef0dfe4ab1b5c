//! How a file differs between two workspaces.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Digest;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileChangeKind {
    Added,
    Removed,
    Modified,
}

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FileSide {
    File {
        /// Bytes.
        size: i64,
        digest: Digest,
        executable: bool,
    },
    Symlink {
        target: String,
    },
    Directory,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileChange {
    pub path: String,
    pub change: FileChangeKind,
    /// Absent where the path did not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<FileSide>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<FileSide>,
    /// Unified diff of the contents; absent where they are equal, binary, large, or no files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unified: Option<String>,
}

impl FileChange {
    /// `None` where the path is the same on both sides, or on neither.
    pub fn new(path: String, before: Option<FileSide>, after: Option<FileSide>) -> Option<Self> {
        let change = match (&before, &after) {
            (None, Some(_)) => FileChangeKind::Added,
            (Some(_), None) => FileChangeKind::Removed,
            (x, y) if x == y => return None,
            _ => FileChangeKind::Modified,
        };
        Some(Self { path, change, before, after, unified: None })
    }

    /// Whether a diff of the contents would say something: one side is a file, and its bytes are not the other's.
    pub fn content_differs(&self) -> bool {
        let content = |side: &Option<FileSide>| match side {
            Some(FileSide::File { digest, .. }) => Some(*digest),
            _ => None,
        };
        content(&self.before) != content(&self.after)
    }

    /// What a diff of the contents does not show: another type, the x bit, a symlink's target, and of contents that are not
    /// compared line by line their sizes.
    pub fn remarks(&self) -> Vec<String> {
        use FileSide::{Directory, File, Symlink};
        let mut remarks = Vec::new();
        match (&self.before, &self.after) {
            (Some(File { executable: true, .. }), Some(File { executable: false, .. })) => {
                remarks.push("is no longer executable".to_owned())
            }
            (Some(File { executable: false, .. }), Some(File { executable: true, .. })) => remarks.push("became executable".to_owned()),
            (Some(File { .. }), Some(File { .. })) => {}
            (Some(Symlink { target: x }), Some(Symlink { target: y })) => remarks.push(format!("led to {x}, leads to {y}")),
            (Some(before), Some(after)) => remarks.push(format!("was {}, is {}", before.noun(), after.noun())),
            (None, Some(side @ (Symlink { .. } | Directory))) | (Some(side @ (Symlink { .. } | Directory)), None) => {
                remarks.push(side.noun())
            }
            (None, Some(File { executable: true, .. })) => remarks.push("executable".to_owned()),
            _ => {}
        }
        if self.unified.is_none() && self.content_differs() {
            let size = |side: &Option<FileSide>| match side {
                Some(File { size, digest, .. }) => Some(format!("{size} bytes ({:.8})", digest.to_string())),
                _ => None,
            };
            let sizes: Vec<_> = [size(&self.before), size(&self.after)].into_iter().flatten().collect();
            remarks.push(sizes.join(" → "));
        }
        remarks
    }
}

impl FileSide {
    fn noun(&self) -> String {
        match self {
            FileSide::File { .. } => "a file".to_owned(),
            FileSide::Symlink { target } => format!("a symlink to {target}"),
            FileSide::Directory => "a folder".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(content: &str, executable: bool) -> Option<FileSide> {
        Some(FileSide::File { size: content.len() as i64, digest: Digest::of(content.as_bytes()), executable })
    }

    fn said(before: Option<FileSide>, after: Option<FileSide>) -> String {
        FileChange::new("p".into(), before, after).map_or_else(|| "the same".to_owned(), |c| c.remarks().join(", "))
    }

    #[test]
    fn what_a_text_diff_does_not_show_is_said() {
        let link = |target: &str| Some(FileSide::Symlink { target: target.to_owned() });
        assert_eq!(said(file("x", false), file("x", true)), "became executable");
        assert_eq!(said(file("x", true), file("x", false)), "is no longer executable");
        assert_eq!(said(file("x", false), file("x", false)), "the same");
        assert_eq!(said(link("a"), link("b")), "led to a, leads to b");
        assert_eq!(said(Some(FileSide::Directory), link("b")), "was a folder, is a symlink to b");
        assert_eq!(said(None, Some(FileSide::Directory)), "a folder");
        assert!(said(file("x", false), Some(FileSide::Directory)).starts_with("was a file, is a folder, 1 bytes ("));
        let binary = said(file("old", false), file("newer", true));
        assert!(binary.starts_with("became executable, 3 bytes (") && binary.contains(") → 5 bytes ("), "{binary}");
    }

    #[test]
    fn a_content_that_is_shown_needs_no_size() {
        let mut change = FileChange::new("p".into(), file("a\n", false), file("b\n", false)).unwrap();
        change.unified = crate::diff::unified("a\n", "b\n");
        assert!(change.remarks().is_empty());
    }
}
