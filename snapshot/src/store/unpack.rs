//! Frames of packs, decompressed one after the other into the same memory.

use std::os::unix::fs::FileExt;

use super::catalog::Pack;
use crate::error::SnapshotError;
use crate::pack::{Frame, frame_size};

#[derive(Default)]
pub(crate) struct Unpacker {
    decompressor: Option<zstd::bulk::Decompressor<'static>>,
    packed: Vec<u8>,
    raw: Vec<u8>,
}

impl Unpacker {
    /// A frame's raw bytes.
    ///
    /// # Errors
    /// The pack can't be read, or there is no frame of ours.
    pub fn unpack(&mut self, pack: &Pack, frame: Frame) -> Result<&[u8], SnapshotError> {
        self.packed.resize(frame.len as usize, 0);
        pack.file.read_exact_at(&mut self.packed, pack.place(frame)).map_err(|e| pack.io(e))?;
        let size = frame_size(&self.packed)?;
        let decompressor = match &mut self.decompressor {
            Some(decompressor) => decompressor,
            none => none.insert(zstd::bulk::Decompressor::new().map_err(|e| pack.io(e))?),
        };
        self.raw.clear();
        self.raw.reserve(size);
        decompressor.decompress_to_buffer(&self.packed, &mut self.raw).map_err(|_| crate::pack::broken_frame())?;
        Ok(&self.raw)
    }
}
