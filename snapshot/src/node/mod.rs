//! Directories as they are stored: trees of small nodes, so that a change writes few of them anew.
//!
//! A directory has two digests: its *content* (no times; equality) and its *node* (the topmost stored blob, times included). Its entries,
//! sorted by the bytes of their names, are cut into nodes of level 0, the digests of these into nodes of level 1, and so on until one
//! node is left. Where is cut depends on names alone (see [`DirectoryBuilder`]): equal directories have equal nodes, whatever they
//! were before.
//!
//! Layout of a node, little-endian, numbers as LEB128 where nothing else is said:
//!
//! - `RFT2`, its level (1 byte), with the top bit set in a directory's topmost node, and in that the directory's content (32 bytes);
//! - above level 0 the digests of the nodes below (32 bytes each);
//! - in level 0 per entry its type (1 byte), length of the name (1 byte), name, modification time (8 bytes), and: of files (`f`,
//!   executable `x`) size, digest (32), number of chunks, their digests (32 each); of symlinks (`l`) length of the target, target; of
//!   directories (`d`) the digest of the topmost node (32).

mod build;
mod decode;
mod directory;

use replayfork_core::Digest;
use replayfork_core::digest::Hasher;

use crate::error::Hostile;

pub use build::DirectoryBuilder;
pub use directory::Directory;

/// Entries that one directory may have.
pub const MAX_ENTRIES: usize = 1_000_000;
/// The highest level that a node may have; a directory of a million entries needs 10.
pub const MAX_LEVEL: u8 = 16;
const MAX_TARGET: usize = 4096;
const MAGIC: &[u8] = b"RFT2";
/// In the byte of the level: this is a directory's topmost node.
const TOP: u8 = 0x80;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `digest` is of the whole content; `chunks` are the blobs that make it up, empty where it is one blob of that digest.
    File {
        size: u64,
        executable: bool,
        digest: Digest,
        chunks: Vec<Digest>,
    },
    Symlink {
        target: Vec<u8>,
    },
    /// `node` is the topmost one; it tells the content.
    Directory {
        node: Digest,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub name: Vec<u8>,
    /// Nanoseconds since the Unix epoch.
    pub mtime: i64,
    pub kind: Kind,
}

impl Kind {
    /// What a file or symlink is, without name and time; of a directory only that it is one.
    pub fn identity(&self) -> Digest {
        let hasher = Hasher::new("entry");
        match self {
            Self::File { executable, digest, .. } => hasher.part("file", digest.as_bytes()).part("x", &[u8::from(*executable)]),
            Self::Symlink { target } => hasher.part("symlink", target),
            Self::Directory { .. } => hasher.part("directory", b""),
        }
        .finish()
    }
}

impl Entry {
    /// As [`Kind::identity`].
    pub fn identity(&self) -> Digest {
        self.kind.identity()
    }

    /// Blobs of the entry's content, without those below it.
    pub fn blobs(&self) -> Vec<Digest> {
        match &self.kind {
            Kind::File { digest, chunks, .. } if chunks.is_empty() => vec![*digest],
            Kind::File { chunks, .. } => chunks.clone(),
            Kind::Symlink { .. } => vec![],
            Kind::Directory { node } => vec![*node],
        }
    }
}

/// A stored node: a directory, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The directory's content, in its topmost node.
    content: Option<Digest>,
    body: Body,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Body {
    Entries(Vec<Entry>),
    /// Digests of nodes of the level below.
    Parts {
        level: u8,
        nodes: Vec<Digest>,
    },
}

impl Node {
    /// The directory's content, if this, the node of that digest, is the topmost one.
    ///
    /// # Errors
    /// It is not.
    pub(crate) fn directory_content(&self, digest: &Digest) -> Result<Digest, Hostile> {
        self.content.ok_or_else(|| Hostile { entry: digest.to_string(), why: "is only a part of a directory" })
    }

    /// Its entries; none where it names parts.
    pub fn entries(&self) -> &[Entry] {
        match &self.body {
            Body::Entries(entries) => entries,
            Body::Parts { .. } => &[],
        }
    }

    /// Nodes that it names: its parts, or the directories among its entries.
    pub fn nodes(&self) -> Vec<Digest> {
        let directory = |entry: &Entry| match entry.kind {
            Kind::Directory { node } => Some(node),
            _ => None,
        };
        match &self.body {
            Body::Entries(entries) => entries.iter().filter_map(directory).collect(),
            Body::Parts { nodes, .. } => nodes.clone(),
        }
    }

    /// All blobs that it names: [`Node::nodes`], and those of its entries' contents.
    pub fn blobs(&self) -> Vec<Digest> {
        match &self.body {
            Body::Entries(entries) => entries.iter().flat_map(Entry::blobs).collect(),
            Body::Parts { nodes, .. } => nodes.clone(),
        }
    }

    fn level(&self) -> u8 {
        match &self.body {
            Body::Entries(_) => 0,
            Body::Parts { level, .. } => *level,
        }
    }
}
