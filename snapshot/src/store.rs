//! Where blobs are: the trait, and a store in a local folder.

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use replayfork_core::Digest;

use crate::error::SnapshotError;
use crate::pack::{PackedBlob, parse_pack, read_frame, slice};

/// Gives blobs by digest, verified.
pub trait Blobs {
    /// # Errors
    /// The blob is missing or broken.
    fn get(&mut self, digest: &Digest) -> Result<Vec<u8>, SnapshotError>;
}

/// Packs in a folder, with their index in memory. A pack is a file named by the digest of its bytes.
pub struct LocalStore {
    folder: PathBuf,
    index: HashMap<Digest, (PathBuf, u64, PackedBlob)>,
    /// The frame read last: blobs of a frame are asked for one after the other.
    last: Option<(PathBuf, u32, Vec<u8>)>,
}

impl LocalStore {
    /// Opens a folder, made if it is missing; packs cut off by a crash are removed.
    ///
    /// # Errors
    /// The folder can't be read or made.
    pub fn open(folder: &Path) -> Result<Self, SnapshotError> {
        let io = |e| SnapshotError::io(folder.as_os_str().as_encoded_bytes(), e);
        fs::create_dir_all(folder).map_err(io)?;
        let mut store = Self { folder: folder.to_owned(), index: HashMap::new(), last: None };
        for entry in fs::read_dir(folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            match path.extension().and_then(|e| e.to_str()) {
                Some("pack") => {
                    let bytes = fs::read(&path).map_err(io)?;
                    store.add_index(&path, &bytes)?;
                }
                Some("tmp") => fs::remove_file(&path).map_err(io)?,
                _ => {}
            }
        }
        Ok(store)
    }

    fn add_index(&mut self, path: &Path, bytes: &[u8]) -> Result<(), SnapshotError> {
        let pack = parse_pack(bytes)?;
        let head = (bytes.len() - pack.frames.len()) as u64;
        for blob in pack.blobs {
            self.index.entry(blob.digest).or_insert_with(|| (path.to_owned(), head, blob));
        }
        Ok(())
    }

    pub fn contains(&self, digest: &Digest) -> bool {
        self.index.contains_key(digest)
    }

    /// Stores a pack and makes it durable; returns its file.
    ///
    /// # Errors
    /// No space, or no pack.
    pub fn put_pack(&mut self, bytes: &[u8]) -> Result<PathBuf, SnapshotError> {
        let path = self.folder.join(format!("{}.pack", Digest::of(bytes)));
        let io = |e| SnapshotError::io(path.as_os_str().as_encoded_bytes(), e);
        if !path.exists() {
            let temporary = path.with_extension("tmp");
            let mut file = fs::File::create(&temporary).map_err(io)?;
            file.write_all(bytes).and_then(|()| file.sync_data()).map_err(io)?;
            fs::rename(&temporary, &path).map_err(io)?;
        }
        self.add_index(&path, bytes)?;
        Ok(path)
    }
}

impl Blobs for LocalStore {
    fn get(&mut self, digest: &Digest) -> Result<Vec<u8>, SnapshotError> {
        let (path, head, blob) = self.index.get(digest).ok_or(SnapshotError::Missing(*digest))?;
        let cached = matches!(&self.last, Some((p, at, _)) if p == path && *at == blob.frame.at);
        if !cached {
            let io = |e| SnapshotError::io(path.as_os_str().as_encoded_bytes(), e);
            let mut file = fs::File::open(path).map_err(io)?;
            file.seek(SeekFrom::Start(head + u64::from(blob.frame.at))).map_err(io)?;
            let mut frame = vec![0; blob.frame.len as usize];
            file.read_exact(&mut frame).map_err(io)?;
            self.last = Some((path.clone(), blob.frame.at, read_frame(&frame)?));
        }
        let raw = self.last.as_ref().map_or(&[][..], |(_, _, raw)| raw);
        let content = slice(raw, blob).filter(|c| Digest::of(c) == *digest).ok_or(SnapshotError::Corrupt(*digest))?;
        Ok(content.to_vec())
    }
}
