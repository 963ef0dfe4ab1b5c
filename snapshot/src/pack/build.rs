//! Putting blobs into a pack.

use replayfork_core::Digest;

use super::index::encode;
use super::{BlobKind, FRAME_SIZE, Frame, PACK_SIZE, PackedBlob};

/// What a blob counts beside its content: about what its row, and whoever remembers it while the pack is open, take in memory.
const BLOB_WEIGHT: usize = 128;
const LEVEL: i32 = 1;

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
        let raw_len = |section: &[PackedBlob]| section.last().map_or(0, |last| last.offset + last.len);
        let head = encode(&self.blobs, raw_len);
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
