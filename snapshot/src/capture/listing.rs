//! The names of a directory, beside what the index has of them.

use std::os::fd::OwnedFd;

use rustix::fs::{FileType, RawDir};

use crate::index::{At, BodyRef, Row, Section};

/// A name in a directory, the type that the listing gave it, and what the index has of it.
pub struct Listed {
    pub name: Vec<u8>,
    pub file_type: FileType,
    pub old: Option<Old>,
}

pub enum Old {
    Leaf(Row),
    Folder(At),
}

/// Names of a directory, sorted.
pub fn list(handle: &OwnedFd, buffer: &mut Vec<u8>) -> std::io::Result<Vec<(Vec<u8>, FileType)>> {
    let mut names = Vec::new();
    let mut listing = RawDir::new(handle, buffer.spare_capacity_mut());
    while let Some(entry) = listing.next() {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push((name.to_vec(), entry.file_type()));
        }
    }
    names.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    Ok(names)
}

/// Sorted names with what the index has of each.
pub fn joined(names: Vec<(Vec<u8>, FileType)>, section: Option<Section<'_>>) -> Vec<Listed> {
    let mut rows = section.into_iter().flat_map(|s| s.rows()).peekable();
    let join = |(name, file_type): (Vec<u8>, FileType)| {
        while rows.next_if(|row| row.name < name.as_slice()).is_some() {}
        let row = rows.next_if(|row| row.name == name.as_slice());
        let old = row.and_then(|row| match row.body {
            BodyRef::Folder(at) => Some(Old::Folder(at)),
            _ => row.leaf().map(Old::Leaf),
        });
        Listed { name, file_type, old }
    };
    names.into_iter().map(join).collect()
}
