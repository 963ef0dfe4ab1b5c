//! A pack's index: reading all of it, and single rows.

use replayfork_core::Digest;

use super::{BlobKind, Frame, MAGIC, PackedBlob};
use crate::error::Hostile;

/// Bytes before the table of frames, of a frame in it, and of a blob's row.
pub(crate) const HEAD: usize = 12;
const FRAME_ROW: usize = 12;
pub(crate) const ROW: usize = 32 + 4;
/// Blobs that one pack may have.
const MAX_BLOBS: usize = 4 << 20;
const DIRECTORY: u32 = 1 << 31;

/// A parsed pack: its blobs, frame by frame, and its frames.
pub struct PackIndex<'a> {
    pub blobs: Vec<PackedBlob>,
    pub frames: &'a [u8],
}

/// What is known of a pack without its blobs' rows: where its frames are, and which rows belong to them.
pub(crate) struct Index {
    rows: usize,
    frames: Vec<Section>,
}

/// A frame and its blobs.
struct Section {
    frame: Frame,
    /// Bytes of the raw frame.
    raw: u32,
    /// Rows of its first blob, and after its last.
    first: u32,
    end: u32,
}

fn hostile(why: &'static str) -> Hostile {
    Hostile { entry: "pack".into(), why }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The bytes of an index.
pub(super) fn encode(blobs: &[PackedBlob], raw_len: impl Fn(&[PackedBlob]) -> u32) -> Vec<u8> {
    let sections = || blobs.chunk_by(|a, b| a.frame == b.frame);
    let mut out = Vec::with_capacity(HEAD + sections().count() * FRAME_ROW + blobs.len() * ROW);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&(blobs.len() as u32).to_le_bytes());
    out.extend_from_slice(&(sections().count() as u32).to_le_bytes());
    for section in sections() {
        for n in [section[0].frame.len, raw_len(section), section.len() as u32] {
            out.extend_from_slice(&n.to_le_bytes());
        }
    }
    for blob in blobs {
        let kind = if blob.kind == BlobKind::Directory { DIRECTORY } else { 0 };
        out.extend_from_slice(blob.digest.as_bytes());
        out.extend_from_slice(&(blob.offset | kind).to_le_bytes());
    }
    out
}

impl Index {
    /// How many bytes the table of frames has, and how many rows follow it, by a pack's first [`HEAD`] bytes.
    ///
    /// # Errors
    /// No pack.
    pub fn sizes(head: &[u8]) -> Result<(usize, usize), Hostile> {
        let head = head.get(..HEAD).filter(|h| h.starts_with(MAGIC)).ok_or_else(|| hostile("does not begin as a pack does"))?;
        let (rows, frames) = (number(head, 4) as usize, number(head, 8) as usize);
        if rows > MAX_BLOBS || frames > rows {
            return Err(hostile("claims more blobs or frames than any pack has"));
        }
        Ok((frames * FRAME_ROW, rows))
    }

    /// Reads the table of frames; `frames` is how many bytes they have.
    ///
    /// # Errors
    /// Frames that lie outside of the pack, counts that don't agree.
    pub fn parse(table: &[u8], rows: usize, frames: u64) -> Result<Self, Hostile> {
        let (mut at, mut first) = (0u64, 0u64);
        let mut sections = Vec::with_capacity(table.len() / FRAME_ROW);
        for row in table.chunks_exact(FRAME_ROW) {
            let (len, raw, blobs) = (number(row, 0), number(row, 4), number(row, 8));
            let end = first + u64::from(blobs);
            if blobs == 0 || end > rows as u64 || at + u64::from(len) > frames || at + u64::from(len) > u64::from(u32::MAX) {
                return Err(hostile("has a frame that lies outside of it"));
            }
            sections.push(Section { frame: Frame { at: at as u32, len }, raw, first: first as u32, end: end as u32 });
            (at, first) = (at + u64::from(len), end);
        }
        if first != rows as u64 {
            return Err(hostile("has blobs without a frame"));
        }
        Ok(Self { rows, frames: sections })
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes before the first frame.
    pub fn len(&self) -> usize {
        self.row_at(self.rows as u32)
    }

    /// Where a row begins in the pack.
    pub fn row_at(&self, row: u32) -> usize {
        HEAD + self.frames.len() * FRAME_ROW + row as usize * ROW
    }

    /// The blob of a row. `bytes` are those of the row and, where there is one, of the next.
    ///
    /// # Errors
    /// It ends before it begins.
    pub fn blob(&self, row: u32, bytes: &[u8]) -> Result<PackedBlob, Hostile> {
        let section = &self.frames[self.frames.partition_point(|s| s.end <= row)];
        Self::blob_of(section, row, bytes)
    }

    fn blob_of(section: &Section, row: u32, bytes: &[u8]) -> Result<PackedBlob, Hostile> {
        let digest = Digest(bytes[..32].try_into().expect("32 bytes"));
        let place = number(bytes, 32);
        let offset = place & !DIRECTORY;
        let end = if row + 1 < section.end { number(bytes, ROW + 32) & !DIRECTORY } else { section.raw };
        let len = end.checked_sub(offset).ok_or_else(|| Hostile { entry: digest.to_string(), why: "ends before it begins" })?;
        let kind = if place & DIRECTORY == 0 { BlobKind::Data } else { BlobKind::Directory };
        Ok(PackedBlob { digest, kind, frame: section.frame, offset, len })
    }

    /// All blobs, by the bytes of all rows.
    ///
    /// # Errors
    /// One that ends before it begins.
    pub fn blobs(&self, rows: &[u8]) -> Result<Vec<PackedBlob>, Hostile> {
        let mut blobs = Vec::with_capacity(self.rows);
        for section in &self.frames {
            for row in section.first..section.end {
                blobs.push(Self::blob_of(section, row, &rows[row as usize * ROW..])?);
            }
        }
        Ok(blobs)
    }
}

/// Bytes before the first frame.
///
/// # Errors
/// No pack.
pub(crate) fn head_len(bytes: &[u8]) -> Result<usize, Hostile> {
    let (table, rows) = Index::sizes(bytes)?;
    Ok(HEAD + table + rows * ROW)
}

/// Checks the two parts of a pack.
///
/// # Errors
/// As [`parse_pack`].
pub(crate) fn check_parts(head: &[u8], frames: &[u8]) -> Result<(), Hostile> {
    if head.len() == head_len(head)? { parse(head, frames).map(drop) } else { Err(hostile("is cut off in its index")) }
}

fn parse<'a>(head: &[u8], frames: &'a [u8]) -> Result<PackIndex<'a>, Hostile> {
    let (table, rows) = Index::sizes(head)?;
    let (table, bytes) = head[HEAD..].split_at(table);
    Ok(PackIndex { blobs: Index::parse(table, rows, frames.len() as u64)?.blobs(bytes)?, frames })
}

/// Reads a pack's index.
///
/// # Errors
/// Truncation, places outside of the pack.
pub fn parse_pack(bytes: &[u8]) -> Result<PackIndex<'_>, Hostile> {
    let (head, frames) = bytes.split_at_checked(head_len(bytes)?).ok_or_else(|| hostile("is cut off in its index"))?;
    parse(head, frames)
}
