//! What is made once of a sealed run, as stored bytes.

use crate::model::CONTRACT_VERSION;

/// Of the forms of all that is stored so; bytes of another one are made anew.
const FORM: u32 = 4;

/// Bytes that were stored by no program of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("what is stored of a run can't be read")]
pub struct Broken;

/// Numbers are little-endian, 32 bits; lists and texts come after their length.
#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub fn number(&mut self, n: u32) {
        self.0.extend_from_slice(&n.to_le_bytes());
    }

    pub fn numbers(&mut self, all: &[u32]) {
        self.number(all.len() as u32);
        self.0.reserve(all.len() * 4);
        all.iter().for_each(|n| self.0.extend_from_slice(&n.to_le_bytes()));
    }

    pub fn text(&mut self, text: &str) {
        self.number(text.len() as u32);
        self.0.extend_from_slice(text.as_bytes());
    }

    pub fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub fn finish(self) -> Vec<u8> {
        [&FORM.to_le_bytes()[..], &CONTRACT_VERSION.to_le_bytes(), &self.0].concat()
    }
}

pub(crate) struct Reader<'b>(&'b [u8]);

impl<'b> Reader<'b> {
    pub fn new(bytes: &'b [u8]) -> Result<Self, Broken> {
        let mut reader = Self(bytes);
        let version = (reader.number()?, reader.number()?);
        if version == (FORM, CONTRACT_VERSION) { Ok(reader) } else { Err(Broken) }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Broken> {
        let (array, rest) = self.0.split_first_chunk().ok_or(Broken)?;
        self.0 = rest;
        Ok(*array)
    }

    fn bytes(&mut self, n: usize) -> Result<&'b [u8], Broken> {
        let (bytes, rest) = self.0.split_at_checked(n).ok_or(Broken)?;
        self.0 = rest;
        Ok(bytes)
    }

    pub fn number(&mut self) -> Result<u32, Broken> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn numbers(&mut self) -> Result<Vec<u32>, Broken> {
        let n = self.number()? as usize;
        Ok(numbers(self.bytes(n.checked_mul(4).ok_or(Broken)?)?))
    }

    pub fn text(&mut self) -> Result<&'b str, Broken> {
        let n = self.number()? as usize;
        std::str::from_utf8(self.bytes(n)?).map_err(|_| Broken)
    }
}

/// The numbers in bytes.
pub(crate) fn numbers(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
