//! Frames of packs in a local store, read and decompressed one after the other into the same memory.

use std::os::unix::fs::FileExt;

use super::catalog::Pack;
use crate::error::SnapshotError;
use crate::pack::{Frame, Unpacker};

#[derive(Default)]
pub(crate) struct FrameReader {
    packed: Vec<u8>,
    unpacker: Unpacker,
}

impl FrameReader {
    /// A frame's raw bytes.
    ///
    /// # Errors
    /// The pack can't be read, or there is no frame of ours.
    pub fn read(&mut self, pack: &Pack, frame: Frame) -> Result<&[u8], SnapshotError> {
        self.packed.resize(frame.len as usize, 0);
        pack.file.read_exact_at(&mut self.packed, pack.place(frame)).map_err(|e| pack.io(e))?;
        Ok(self.unpacker.unpack(&self.packed)?)
    }
}
