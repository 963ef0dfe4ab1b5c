//! Checking a whole store.

use std::collections::HashSet;
use std::fs;

use replayfork_core::Digest;

use super::LocalStore;
use crate::error::SnapshotError;
use crate::node::Node;
use crate::pack::{BlobKind, parse_pack};

/// Something that is wrong with a store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("pack {pack}: {why}")]
    Pack { pack: String, why: String },
    #[error("node {node} names blob {blob}, which is in no pack")]
    Dangling { node: Digest, blob: Digest },
}

impl LocalStore {
    /// Reads every pack, verifies every blob, decodes every node and looks for everything that these name.
    /// In memory are 32 bytes a blob.
    ///
    /// # Errors
    /// The folder can't be read.
    pub fn fsck(&self) -> Result<Vec<Fault>, SnapshotError> {
        let io = |e| SnapshotError::io(self.folder().as_os_str().as_encoded_bytes(), e);
        let mut faults = Vec::new();
        let (mut present, mut named) = (HashSet::new(), Vec::new());
        for entry in fs::read_dir(self.folder()).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_none_or(|e| e != "pack") {
                continue;
            }
            let bytes = fs::read(&path).map_err(io)?;
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            if let Err(error) = check_pack(&name, &bytes, &mut present, &mut named) {
                faults.push(Fault::Pack { pack: name, why: error.to_string() });
            }
        }
        named.retain(|(_, blob)| !present.contains(blob));
        faults.extend(named.into_iter().map(|(node, blob)| Fault::Dangling { node, blob }));
        Ok(faults)
    }
}

fn check_pack(name: &str, bytes: &[u8], present: &mut HashSet<Digest>, named: &mut Vec<(Digest, Digest)>) -> Result<(), SnapshotError> {
    let pack = parse_pack(bytes)?;
    let head = &bytes[..bytes.len() - pack.frames.len()];
    if Digest::of(head).to_string() != name {
        return Err(SnapshotError::Store("its name is not the digest of its index".into()));
    }
    pack.each::<SnapshotError>(|blob, content| {
        present.insert(blob.digest);
        if blob.kind == BlobKind::Directory {
            named.extend(Node::decode(content)?.blobs().into_iter().filter(|b| !present.contains(b)).map(|b| (blob.digest, b)));
        }
        Ok(())
    })
}
