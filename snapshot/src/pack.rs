//! Packs: blobs in zstd frames, with an index in front.
//!
//! Layout: `RFP1`, the number of blobs (u32), per blob its digest (32), kind (u8), frame offset (u32), frame length (u32), offset in
//! the raw frame (u32), raw length (u32), then the frames. Offsets count from the first frame; all little-endian.

use std::collections::HashMap;

use replayfork_core::Digest;

use crate::error::{Hostile, SnapshotError};

/// Bytes at which a pack is closed.
pub const PACK_SIZE: usize = 4 << 20;
/// Raw bytes at which a frame is closed.
pub(crate) const FRAME_SIZE: usize = 256 << 10;
/// What a blob counts beside its content: about what its row, and whoever remembers it while the pack is open, take in memory.
const BLOB_WEIGHT: usize = 128;
/// Raw bytes that one frame may claim to have: a chunk is at most 4 MiB, a node may be larger.
const MAX_FRAME: usize = 256 << 20;
const MAGIC: &[u8] = b"RFP1";
/// Bytes before the index's first row, and of a row.
pub(crate) const HEAD: usize = 8;
pub(crate) const ROW: usize = 32 + 1 + 16;
/// Blobs that one pack may have.
const MAX_BLOBS: usize = 4 << 20;
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
    /// The open frame's raw bytes, and room for more behind them.
    raw: Vec<u8>,
    filled: usize,
    /// The first blob of the open frame.
    open: usize,
    compressor: Option<zstd::bulk::Compressor<'static>>,
}

impl PackBuilder {
    pub fn is_empty(&self) -> bool {
        self.blobs.is_empty()
    }

    pub fn is_full(&self) -> bool {
        self.size() >= PACK_SIZE
    }

    /// Bytes that the pack will have, about, or what it takes in memory where its blobs are tiny.
    pub(crate) fn size(&self) -> usize {
        self.frames.len() + self.filled / 2 + self.blobs.len() * BLOB_WEIGHT
    }

    /// Whether a blob of this many bytes may make the pack larger than a pack should be.
    pub(crate) fn is_too_full_for(&self, length: usize) -> bool {
        !self.is_empty() && self.size() + length > PACK_SIZE + FRAME_SIZE
    }

    /// Adds a blob. It must be no larger than a frame may be.
    pub fn add(&mut self, digest: Digest, kind: BlobKind, bytes: &[u8]) {
        if bytes.len() > FRAME_SIZE {
            self.close_frame();
            self.blobs.push(PackedBlob { digest, kind, frame: Frame { at: 0, len: 0 }, offset: 0, len: bytes.len() as u32 });
            self.compress(bytes);
            return;
        }
        self.room(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.keep(digest, kind, bytes.len());
    }

    /// Room in the open frame for a blob of up to `length` bytes, to be filled and then kept.
    pub(crate) fn room(&mut self, length: usize) -> &mut [u8] {
        if self.filled > 0 && self.filled + length > FRAME_SIZE {
            self.close_frame();
        }
        if self.raw.len() < self.filled + length {
            self.raw.resize(self.filled + length, 0);
        }
        &mut self.raw[self.filled..]
    }

    /// Makes a blob of what was put into the room's first `length` bytes.
    pub(crate) fn keep(&mut self, digest: Digest, kind: BlobKind, length: usize) {
        let offset = self.filled as u32;
        self.blobs.push(PackedBlob { digest, kind, frame: Frame { at: 0, len: 0 }, offset, len: length as u32 });
        self.filled += length;
    }

    fn close_frame(&mut self) {
        if self.open < self.blobs.len() {
            let raw = std::mem::take(&mut self.raw);
            self.compress(&raw[..self.filled]);
            self.raw = raw;
            self.filled = 0;
        }
    }

    /// Makes a frame of these bytes for all blobs that have none yet.
    fn compress(&mut self, raw: &[u8]) {
        let compressor =
            self.compressor.get_or_insert_with(|| zstd::bulk::Compressor::new(LEVEL).expect("zstd has a context's worth of memory"));
        let at = self.frames.len();
        self.frames.reserve(zstd::zstd_safe::compress_bound(raw.len()));
        let mut tail = std::io::Cursor::new(&mut self.frames);
        tail.set_position(at as u64);
        compressor.compress_to_buffer(raw, &mut tail).expect("zstd compresses memory to memory");
        let frame = Frame { at: at as u32, len: (self.frames.len() - at) as u32 };
        for blob in &mut self.blobs[self.open..] {
            blob.frame = frame;
        }
        self.open = self.blobs.len();
    }

    /// Takes what another pack holds; that one is empty afterwards.
    pub(crate) fn absorb(&mut self, other: &mut Self) {
        self.close_frame();
        other.close_frame();
        let shift = self.frames.len() as u32;
        self.frames.extend_from_slice(&other.frames);
        self.blobs.extend(other.blobs.iter().map(|b| PackedBlob { frame: Frame { at: b.frame.at + shift, ..b.frame }, ..*b }));
        self.open = self.blobs.len();
        other.clear();
    }

    /// Closes the pack: its index, and its frames, which together are its bytes. [`PackBuilder::clear`] makes it a new one.
    pub(crate) fn close(&mut self) -> (Vec<u8>, &[u8]) {
        self.close_frame();
        let mut head = Vec::with_capacity(HEAD + self.blobs.len() * ROW);
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&(self.blobs.len() as u32).to_le_bytes());
        for blob in &self.blobs {
            head.extend_from_slice(blob.digest.as_bytes());
            head.push(blob.kind as u8);
            for n in [blob.frame.at, blob.frame.len, blob.offset, blob.len] {
                head.extend_from_slice(&n.to_le_bytes());
            }
        }
        (head, &self.frames)
    }

    /// Blobs that it has, in the order in which they were added.
    pub(crate) fn digests(&self) -> impl Iterator<Item = &Digest> {
        self.blobs.iter().map(|b| &b.digest)
    }

    /// Empties the builder and keeps its memory.
    pub(crate) fn clear(&mut self) {
        self.blobs.clear();
        self.frames.clear();
        (self.filled, self.open) = (0, 0);
    }

    /// The pack's bytes; the builder is empty afterwards.
    pub fn finish(&mut self) -> Vec<u8> {
        let (mut out, frames) = self.close();
        out.extend_from_slice(frames);
        self.clear();
        out
    }
}

/// Reads a pack's index.
///
/// # Errors
/// Truncation, places outside of the pack, unknown kinds.
pub fn parse_pack(bytes: &[u8]) -> Result<PackIndex<'_>, Hostile> {
    let rows = head_rows(bytes)?;
    let head = HEAD + rows * ROW;
    let cut = || Hostile { entry: "pack".into(), why: "is cut off in its index" };
    let frames = bytes.get(head..).ok_or_else(cut)?;
    Ok(PackIndex { blobs: parse_rows(&bytes[HEAD..head], frames.len() as u64)?, frames })
}

/// Checks the two parts of a pack.
pub(crate) fn parse_pack_parts(head: &[u8], frames: &[u8]) -> Result<(), Hostile> {
    if head.len() != HEAD + head_rows(head)? * ROW {
        return Err(Hostile { entry: "pack".into(), why: "is cut off in its index" });
    }
    parse_rows(&head[HEAD..], frames.len() as u64).map(drop)
}

/// How many blobs a pack says it has, by its first bytes.
pub(crate) fn head_rows(bytes: &[u8]) -> Result<usize, Hostile> {
    let hostile = |why| Hostile { entry: "pack".into(), why };
    let head = bytes.get(..HEAD).filter(|h| h.starts_with(MAGIC)).ok_or_else(|| hostile("does not begin as a pack does"))?;
    let rows = u32::from_le_bytes(head[4..8].try_into().expect("four bytes")) as usize;
    if rows > MAX_BLOBS { Err(hostile("claims more blobs than any pack has")) } else { Ok(rows) }
}

/// Reads the rows of a pack's index; `frames` bytes follow them.
pub(crate) fn parse_rows(rows: &[u8], frames: u64) -> Result<Vec<PackedBlob>, Hostile> {
    rows.chunks_exact(ROW)
        .map(|row| {
            let digest = Digest(row[..32].try_into().expect("32 bytes"));
            let number = |i: usize| u32::from_le_bytes(row[33 + 4 * i..37 + 4 * i].try_into().expect("four bytes"));
            let hostile = |why| Hostile { entry: digest.to_string(), why };
            let kind = match row[32] {
                0 => BlobKind::Data,
                1 => BlobKind::Directory,
                _ => return Err(hostile("is of an unknown kind")),
            };
            let frame = Frame { at: number(0), len: number(1) };
            if u64::from(frame.at) + u64::from(frame.len) > frames {
                return Err(hostile("lies outside of its pack"));
            }
            Ok(PackedBlob { digest, kind, frame, offset: number(2), len: number(3) })
        })
        .collect()
}

/// Decompresses one frame.
///
/// # Errors
/// No zstd frame, or one larger than any of ours.
pub fn read_frame(bytes: &[u8]) -> Result<Vec<u8>, Hostile> {
    let size = frame_size(bytes)?;
    zstd::bulk::decompress(bytes, size).map_err(|_| broken_frame())
}

/// How many raw bytes a frame says it has.
pub(crate) fn frame_size(bytes: &[u8]) -> Result<usize, Hostile> {
    let hostile = |why| Hostile { entry: "frame".into(), why };
    let size = zstd::zstd_safe::get_frame_content_size(bytes).ok().flatten().ok_or_else(|| hostile("does not say its size"))?;
    if size > MAX_FRAME as u64 { Err(hostile("claims to be larger than any frame is")) } else { Ok(size as usize) }
}

pub(crate) fn broken_frame() -> Hostile {
    Hostile { entry: "frame".into(), why: "can't be decompressed" }
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
