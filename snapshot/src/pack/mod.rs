//! Packs: blobs in zstd frames, with an index in front.
//!
//! Layout, little-endian:
//!
//! - `RFP2`, the number of blobs (u32), the number of frames (u32);
//! - per frame its stored length, its raw length and how many blobs it has (u32 each);
//! - per blob, frame by frame, its digest (32 bytes) and its offset in the raw frame (u32), with the top bit set where it is a node of
//!   a directory; it ends where the next blob of the frame begins, or with the frame;
//! - the frames.

mod build;
mod index;

use replayfork_core::Digest;

use crate::error::{Hostile, SnapshotError};

pub use build::PackBuilder;
pub(crate) use index::{HEAD, Index, ROW, check_parts, head_len};
pub use index::{PackIndex, parse_pack};

/// Bytes at which a pack is closed.
pub const PACK_SIZE: usize = 4 << 20;
/// Raw bytes at which a frame is closed.
pub(crate) const FRAME_SIZE: usize = 256 << 10;
/// Raw bytes that one frame may claim to have: a chunk is at most 4 MiB, a node of a file in very many chunks may be larger.
const MAX_FRAME: usize = 256 << 20;
const MAGIC: &[u8] = b"RFP2";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobKind {
    Data = 0,
    /// A node of a directory.
    Directory = 1,
}

/// Where a frame lies in its pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frame {
    /// Offset from the first frame.
    pub at: u32,
    pub len: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedBlob {
    pub digest: Digest,
    pub kind: BlobKind,
    pub frame: Frame,
    /// Offset in the raw frame.
    pub offset: u32,
    pub len: u32,
}

/// Decompresses frames, one after the other into the same memory.
#[derive(Default)]
pub(crate) struct Unpacker {
    decompressor: zstd::bulk::Decompressor<'static>,
    raw: Vec<u8>,
}

impl Unpacker {
    /// A frame's raw bytes.
    ///
    /// # Errors
    /// No zstd frame, or one larger than any of ours.
    pub fn unpack(&mut self, frame: &[u8]) -> Result<&[u8], Hostile> {
        let hostile = |why| Hostile { entry: "frame".into(), why };
        let size = zstd::zstd_safe::get_frame_content_size(frame).ok().flatten().ok_or_else(|| hostile("does not say its size"))?;
        if size > MAX_FRAME as u64 {
            return Err(hostile("claims to be larger than any frame is"));
        }
        self.raw.clear();
        self.raw.reserve(size as usize);
        self.decompressor.decompress_to_buffer(frame, &mut self.raw).map_err(|_| hostile("can't be decompressed"))?;
        Ok(&self.raw)
    }
}

/// Decompresses one frame.
///
/// # Errors
/// No zstd frame, or one larger than any of ours.
pub fn read_frame(bytes: &[u8]) -> Result<Vec<u8>, Hostile> {
    let mut unpacker = Unpacker::default();
    unpacker.unpack(bytes)?;
    Ok(unpacker.raw)
}

impl PackIndex<'_> {
    pub fn digests(&self) -> impl Iterator<Item = Digest> {
        self.blobs.iter().map(|blob| blob.digest)
    }

    /// Whether it has nodes of directories, which name other blobs.
    pub fn has_directories(&self) -> bool {
        self.blobs.iter().any(|blob| blob.kind == BlobKind::Directory)
    }

    /// Calls `f` with every blob and its verified content, frame by frame.
    ///
    /// # Errors
    /// A broken frame, or a blob whose content is not what its digest names; what `f` gives.
    pub fn each<E: From<SnapshotError>>(&self, mut f: impl FnMut(&PackedBlob, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut unpacker = Unpacker::default();
        for of_frame in self.blobs.chunk_by(|a, b| a.frame == b.frame) {
            let frame = of_frame[0].frame;
            let bytes = &self.frames[frame.at as usize..(frame.at + frame.len) as usize];
            let raw = unpacker.unpack(bytes).map_err(SnapshotError::from)?;
            for blob in of_frame {
                let content = slice(raw, blob).ok_or(SnapshotError::Corrupt(blob.digest))?;
                if Digest::of(content) != blob.digest {
                    return Err(SnapshotError::Corrupt(blob.digest).into());
                }
                f(blob, content)?;
            }
        }
        Ok(())
    }
}

pub(crate) fn slice<'a>(raw: &'a [u8], blob: &PackedBlob) -> Option<&'a [u8]> {
    slice_of(raw, blob.offset, blob.len)
}

pub(crate) fn slice_of(raw: &[u8], offset: u32, len: u32) -> Option<&[u8]> {
    let start = offset as usize;
    raw.get(start..start.checked_add(len as usize)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pack() -> Vec<u8> {
        let mut builder = PackBuilder::default();
        for content in [&b"one"[..], b"", &[7; 300_000]] {
            builder.add(Digest::of(content), BlobKind::Data, content);
        }
        builder.finish()
    }

    #[test]
    fn blobs_come_back_as_they_went_in() {
        let bytes = pack();
        let mut lengths = Vec::new();
        parse_pack(&bytes)
            .unwrap()
            .each::<SnapshotError>(|_, content| {
                lengths.push(content.len());
                Ok(())
            })
            .unwrap();
        assert_eq!(lengths, [3, 0, 300_000]);
    }

    #[test]
    fn no_flipped_bit_goes_unnoticed() {
        let bytes = pack();
        let seen = |index: &PackIndex<'_>| index.blobs.iter().map(|b| (b.digest, b.len)).collect::<Vec<_>>();
        let original = seen(&parse_pack(&bytes).unwrap());
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 1;
            let Ok(index) = parse_pack(&broken) else { continue };
            assert!(index.each::<SnapshotError>(|_, _| Ok(())).is_err() || seen(&index) == original, "bit at {at}");
        }
    }
}
