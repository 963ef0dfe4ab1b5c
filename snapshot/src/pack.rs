//! Packs: blobs in zstd frames, with an index in front.
//!
//! Layout: `RFP1`, the number of blobs (u32), per blob its digest (32), kind (u8), frame offset (u32), frame length (u32), offset in
//! the raw frame (u32), raw length (u32), then the frames. Offsets count from the first frame; all little-endian.

use std::collections::HashMap;

use replayfork_core::Digest;

use crate::error::{Hostile, SnapshotError};

/// Bytes of frames at which a pack is closed.
pub const PACK_SIZE: usize = 4 << 20;
/// Raw bytes at which a frame is closed.
const FRAME_SIZE: usize = 256 << 10;
/// Raw bytes that one frame may claim to have: a chunk is at most 4 MiB, a node may be larger.
const MAX_FRAME: usize = 256 << 20;
const MAGIC: &[u8] = b"RFP1";
const ROW: usize = 32 + 1 + 16;
const LEVEL: i32 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlobKind {
    Data = 0,
    Directory = 1,
}

/// Where a frame lies in its pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Frame {
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

/// A parsed pack: its blobs and its frames.
pub struct PackIndex<'a> {
    pub blobs: Vec<PackedBlob>,
    pub frames: &'a [u8],
}

/// Collects blobs into one pack.
#[derive(Default)]
pub struct PackBuilder {
    blobs: Vec<PackedBlob>,
    frames: Vec<u8>,
    raw: Vec<u8>,
    open: usize,
}

impl PackBuilder {
    pub fn is_empty(&self) -> bool {
        self.blobs.is_empty()
    }

    pub fn is_full(&self) -> bool {
        self.frames.len() + self.raw.len() / 2 >= PACK_SIZE
    }

    /// Adds a blob. It must be no larger than a frame may be.
    pub fn add(&mut self, digest: Digest, kind: BlobKind, bytes: &[u8]) {
        if !self.raw.is_empty() && self.raw.len() + bytes.len() > FRAME_SIZE {
            self.close_frame();
        }
        let offset = self.raw.len() as u32;
        self.raw.extend_from_slice(bytes);
        self.blobs.push(PackedBlob { digest, kind, frame: Frame { at: 0, len: 0 }, offset, len: bytes.len() as u32 });
    }

    fn close_frame(&mut self) {
        if self.open == self.blobs.len() {
            return;
        }
        let frame = zstd::bulk::compress(&self.raw, LEVEL).expect("zstd compresses memory to memory");
        let place = Frame { at: self.frames.len() as u32, len: frame.len() as u32 };
        for blob in &mut self.blobs[self.open..] {
            blob.frame = place;
        }
        self.frames.extend_from_slice(&frame);
        self.raw.clear();
        self.open = self.blobs.len();
    }

    /// The pack's bytes; the builder is empty afterwards.
    pub fn finish(&mut self) -> Vec<u8> {
        self.close_frame();
        let mut out = Vec::with_capacity(8 + self.blobs.len() * ROW + self.frames.len());
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(self.blobs.len() as u32).to_le_bytes());
        for blob in &self.blobs {
            out.extend_from_slice(blob.digest.as_bytes());
            out.push(blob.kind as u8);
            for n in [blob.frame.at, blob.frame.len, blob.offset, blob.len] {
                out.extend_from_slice(&n.to_le_bytes());
            }
        }
        out.extend_from_slice(&self.frames);
        *self = Self::default();
        out
    }
}

/// Reads a pack's index.
///
/// # Errors
/// Truncation, places outside of the pack, unknown kinds.
pub fn parse_pack(bytes: &[u8]) -> Result<PackIndex<'_>, Hostile> {
    let hostile = |entry: String, why| Hostile { entry, why };
    let head = bytes.get(..8).filter(|h| h.starts_with(MAGIC)).ok_or_else(|| hostile("pack".into(), "does not begin as a pack does"))?;
    let count = u32::from_le_bytes(head[4..8].try_into().expect("four bytes")) as usize;
    let rows = count.checked_mul(ROW).and_then(|n| bytes.get(8..8 + n)).ok_or_else(|| hostile("pack".into(), "is cut off in its index"))?;
    let frames = &bytes[8 + rows.len()..];
    let mut blobs = Vec::with_capacity(count);
    for row in rows.chunks_exact(ROW) {
        let digest = Digest(row[..32].try_into().expect("32 bytes"));
        let number = |i: usize| u32::from_le_bytes(row[33 + 4 * i..37 + 4 * i].try_into().expect("four bytes"));
        let kind = match row[32] {
            0 => BlobKind::Data,
            1 => BlobKind::Directory,
            _ => return Err(hostile(digest.to_string(), "is of an unknown kind")),
        };
        let frame = Frame { at: number(0), len: number(1) };
        if (frame.at as usize).checked_add(frame.len as usize).is_none_or(|end| end > frames.len()) {
            return Err(hostile(digest.to_string(), "lies outside of its pack"));
        }
        blobs.push(PackedBlob { digest, kind, frame, offset: number(2), len: number(3) });
    }
    Ok(PackIndex { blobs, frames })
}

/// Decompresses one frame.
///
/// # Errors
/// No zstd frame, or one larger than any of ours.
pub fn read_frame(bytes: &[u8]) -> Result<Vec<u8>, Hostile> {
    let hostile = |why| Hostile { entry: "frame".into(), why };
    let size = zstd::zstd_safe::get_frame_content_size(bytes).ok().flatten().ok_or_else(|| hostile("does not say its size"))?;
    if size > MAX_FRAME as u64 {
        return Err(hostile("claims to be larger than any frame is"));
    }
    zstd::bulk::decompress(bytes, size as usize).map_err(|_| hostile("can't be decompressed"))
}

impl PackIndex<'_> {
    /// Calls `f` with every blob and its verified content, frame by frame.
    ///
    /// # Errors
    /// A broken frame, or a blob whose content is not what its digest names; what `f` gives.
    pub fn each<E: From<SnapshotError>>(&self, mut f: impl FnMut(&PackedBlob, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let mut by_frame: HashMap<Frame, Vec<&PackedBlob>> = HashMap::new();
        let mut order = Vec::new();
        for blob in &self.blobs {
            let of_frame = by_frame.entry(blob.frame).or_default();
            if of_frame.is_empty() {
                order.push(blob.frame);
            }
            of_frame.push(blob);
        }
        for frame in order {
            let bytes = &self.frames[frame.at as usize..(frame.at + frame.len) as usize];
            let raw = read_frame(bytes).map_err(SnapshotError::from)?;
            for blob in &by_frame[&frame] {
                let content = slice(&raw, blob).ok_or(SnapshotError::Corrupt(blob.digest))?;
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
    let start = blob.offset as usize;
    raw.get(start..start.checked_add(blob.len as usize)?)
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
        for at in 0..bytes.len() {
            let mut broken = bytes.clone();
            broken[at] ^= 1;
            let Ok(index) = parse_pack(&broken) else { continue };
            let whole: Vec<_> = index.blobs.iter().map(|b| (b.digest, b.kind, b.len)).collect();
            let original: Vec<_> = parse_pack(&bytes).unwrap().blobs.iter().map(|b| (b.digest, b.kind, b.len)).collect();
            let read = index.each::<SnapshotError>(|_, _| Ok(()));
            assert!(read.is_err() || whole == original || at == 8 + 32 || at == 8 + ROW + 32 || at == 8 + 2 * ROW + 32, "bit at {at}");
        }
    }
}
