//! Workspace trees to and from a content-addressed store.
//!
//! A snapshot is a tree of directories by digest, as in git: an unchanged folder costs nothing. This room knows
//! files, trees, blobs and packs; it knows no HTTP route and no database.

mod apply;
mod capture;
mod error;
mod index;
mod node;
mod pack;
mod queue;
mod restore;
mod seen;
mod stat;
mod store;
mod tree;

pub use apply::{put_file, read_file, replay_paths};
pub use capture::{Captured, Capturer, Skipped, Stored};
pub use error::{Hostile, SnapshotError};
pub use node::{Directory, DirectoryBuilder, Entry, Kind, MAX_ENTRIES, Node};
pub use pack::{BlobKind, Frame, PACK_SIZE, PackBuilder, PackIndex, PackedBlob, parse_pack, read_frame};
pub use restore::restore;
pub use seen::{footprint_content, seen_through_links};
pub use store::{Blobs, Fault, LocalStore};
pub use tree::{Change, MAX_DEPTH, MAX_NODE_DEPTH, Nodes, diff, entry_at, reachable};

/// A path as text: UTF-8 stays as it is, other bytes and backslashes become `\xNN`, so that it can be read back.
pub fn path_text(path: &[u8]) -> String {
    let mut text = String::with_capacity(path.len());
    for chunk in path.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => text.push_str("\\x5c"),
                c => text.push(c),
            }
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    text
}

/// The bytes of a path written by [`path_text`].
pub fn path_bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("\\x") {
        let (before, after) = rest.split_at(at);
        bytes.extend_from_slice(before.as_bytes());
        match after.get(2..4).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[4..];
            }
            None => {
                bytes.extend_from_slice(b"\\x");
                rest = &after[2..];
            }
        }
    }
    bytes.extend_from_slice(rest.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_bytes_survive_the_text_form_of_a_path() {
        for path in [&b"a/b c"[..], b"\xff\xfe", b"back\\slash", b"\\x41", "\u{e9}\u{1f980}".as_bytes(), b"mixed\xc3"] {
            assert_eq!(super::path_bytes(&super::path_text(path)), path);
        }
    }
}
