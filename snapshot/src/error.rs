//! What can go wrong, with the entry named.

use std::io;

use replayfork_core::Digest;

/// A tree or pack that no capture of ours makes, and that is refused whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("refused: entry {entry:?} {why}")]
pub struct Hostile {
    pub entry: String,
    pub why: &'static str,
}

#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("{path}: {source}")]
    Io { path: String, source: io::Error },
    #[error(transparent)]
    Hostile(#[from] Hostile),
    #[error("blob {0} is not in the store")]
    Missing(Digest),
    #[error("blob {0} does not have the content that its digest names")]
    Corrupt(Digest),
    #[error("{0}")]
    Store(String),
}

impl SnapshotError {
    pub(crate) fn io(path: impl AsRef<[u8]>, source: impl Into<io::Error>) -> Self {
        Self::Io { path: crate::path_text(path.as_ref()), source: source.into() }
    }
}
