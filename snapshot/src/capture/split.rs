//! A large file in pieces that are cut by content (FastCDC), so that an insertion changes few of them. Holes are not read.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use fastcdc::v2020::FastCDC;
use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Bytes of a piece: least, wanted, most.
const LEAST: usize = 256 << 10;
const WANTED: usize = 1 << 20;
const MOST: usize = 4 << 20;

/// What a hole reads as.
static ZEROS: [u8; MOST] = [0; MOST];

/// Bytes of a file, up to the next cut.
pub struct Piece<'p> {
    pub bytes: &'p [u8],
    /// It is of nothing but zeros, and all that are have the same length.
    pub is_hole: bool,
}

/// Cuts a file, from its begin to its end.
pub struct Pieces<'f> {
    file: &'f File,
    /// Where in the file the next piece begins.
    at: u64,
    /// Bytes of the file from there on: what of `buffer` is filled and not yet used.
    buffer: &'f mut Vec<u8>,
    start: usize,
    end: usize,
    holes: Holes,
}

fn cut(bytes: &[u8]) -> usize {
    FastCDC::new(bytes, LEAST, WANTED, MOST).next().map_or(0, |chunk| chunk.length)
}

/// The length of a piece in the midst of zeros.
fn cut_of_zeros() -> usize {
    static CUT: OnceLock<usize> = OnceLock::new();
    *CUT.get_or_init(|| cut(&ZEROS))
}

impl<'f> Pieces<'f> {
    /// `buffer` grows to 8 MB.
    pub fn new(file: &'f File, buffer: &'f mut Vec<u8>) -> Self {
        if buffer.len() < 2 * MOST {
            buffer.resize(2 * MOST, 0);
        }
        Self { file, at: 0, buffer, start: 0, end: 0, holes: Holes::default() }
    }

    /// The next piece; none at the end.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn next(&mut self) -> io::Result<Option<Piece<'_>>> {
        if self.holes.holds(self.file, self.at, MOST as u64) {
            let length = cut_of_zeros();
            self.at += length as u64;
            (self.start, self.end) = (0, 0);
            return Ok(Some(Piece { bytes: &ZEROS[..length], is_hole: true }));
        }
        if self.end - self.start < MOST {
            self.fill()?;
        }
        let length = cut(&self.buffer[self.start..self.end.min(self.start + MOST)]);
        if length == 0 {
            return Ok(None);
        }
        let bytes = &self.buffer[self.start..self.start + length];
        self.start += length;
        self.at += length as u64;
        Ok(Some(Piece { bytes, is_hole: false }))
    }

    /// Reads on until the buffer is full or the file ends.
    fn fill(&mut self) -> io::Result<()> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        while self.end < 2 * MOST {
            match self.file.read_at(&mut self.buffer[self.end..2 * MOST], self.at + self.end as u64) {
                Ok(0) => break,
                Ok(n) => self.end += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Where a file has holes, as far as that was looked for.
#[derive(Default)]
struct Holes {
    /// The last one that was found.
    from: u64,
    to: u64,
    /// Where to look for the next.
    next: u64,
}

impl Holes {
    /// Whether so many bytes from here on are in a hole. Places are asked for in ascending order.
    fn holds(&mut self, file: &File, at: u64, bytes: u64) -> bool {
        if at >= self.next {
            self.look(file, at);
        }
        self.from <= at && at + bytes <= self.to
    }

    fn look(&mut self, file: &File, at: u64) {
        match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) if data > at => (self.from, self.to, self.next) = (at, data, data),
            Ok(_) => self.next = rustix::fs::seek(file, SeekFrom::Hole(at)).ok().filter(|hole| *hole > at).unwrap_or(u64::MAX),
            // From here on there is nothing but a hole.
            Err(Errno::NXIO) => {
                let size = file.metadata().map_or(0, |m| m.len());
                (self.from, self.to, self.next) = (at, size, u64::MAX);
            }
            // The file system does not tell.
            Err(_) => self.next = u64::MAX,
        }
    }
}
