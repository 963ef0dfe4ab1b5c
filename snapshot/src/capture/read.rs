//! Reading one file.

use std::fs::File;
use std::io::Read;
use std::os::fd::AsFd;

use replayfork_core::Digest;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::keep::Keep;
use super::split::Pieces;
use crate::error::SnapshotError;
use crate::node::Kind;
use crate::pack::FRAME_SIZE;
use crate::stat::{Stamp, look_at, open_file};

/// Files above this size are split by content.
const SPLIT_ABOVE: u64 = 1 << 20;
/// How often a file that changes while it is read is read again.
const TRIES: usize = 3;

/// What became of a file.
pub enum Outcome {
    Read(Stamp, Kind),
    /// It is gone.
    Vanished,
    /// It can't be recorded, for this reason.
    Unreadable(String),
}

/// Reads a file of a folder and keeps its content.
///
/// # Errors
/// What the store says. What the file system says of the file is an outcome.
pub fn read(keep: &Keep<'_>, lane: usize, buffer: &mut Vec<u8>, folder: impl AsFd, name: &[u8]) -> Result<Outcome, SnapshotError> {
    for _ in 0..TRIES {
        let opened = open_file(&folder, name).and_then(|file| Ok((look_at(&file)?, file)));
        let (before, file) = match opened {
            Ok(opened) => opened,
            Err(Errno::NOENT) => return Ok(Outcome::Vanished),
            Err(error) => return Ok(Outcome::Unreadable(std::io::Error::from(error).to_string())),
        };
        if before.file_type != FileType::RegularFile {
            return Ok(Outcome::Unreadable("it became something else while it was looked at".into()));
        }
        let size = before.stamp.size;
        let content = match read_content(keep, lane, buffer, &file, size) {
            Ok(content) => content,
            Err(Fault::File(error)) => return Ok(Outcome::Unreadable(error.to_string())),
            Err(Fault::Store(error)) => return Err(error),
        };
        let after = match look_at(&file) {
            Ok(after) => after,
            Err(error) => return Ok(Outcome::Unreadable(std::io::Error::from(error).to_string())),
        };
        if let Content { length, digest, chunks } = content
            && length == size
            && before.stamp == after.stamp
        {
            let kind = Kind::File { size, executable: after.executable, digest, chunks };
            return Ok(Outcome::Read(after.stamp, kind));
        }
    }
    Ok(Outcome::Unreadable("it kept changing while it was read".into()))
}

struct Content {
    length: u64,
    digest: Digest,
    chunks: Vec<Digest>,
}

enum Fault {
    File(std::io::Error),
    Store(SnapshotError),
}

fn read_content(keep: &Keep<'_>, lane: usize, buffer: &mut Vec<u8>, file: &File, size: u64) -> Result<Content, Fault> {
    // One byte more than the file has, so that one that grows shows.
    let room = size as usize + 1;
    if size < FRAME_SIZE as u64 {
        let mut fault = None;
        let kept = keep.content(lane, room, buffer, |place| {
            Ok(fill(file, place, size).unwrap_or_else(|error| {
                fault = Some(error);
                0
            }))
        });
        let (digest, length) = kept.map_err(Fault::Store)?;
        return match fault {
            Some(error) => Err(Fault::File(error)),
            None => Ok(Content { length: length as u64, digest, chunks: vec![] }),
        };
    }
    if size > SPLIT_ABOVE {
        return split(keep, lane, buffer, file, size);
    }
    if buffer.len() < room {
        buffer.resize(room, 0);
    }
    let length = fill(file, &mut buffer[..room], size).map_err(Fault::File)?;
    let digest = keep.large(lane, &buffer[..length]).map_err(Fault::Store)?;
    Ok(Content { length: length as u64, digest, chunks: vec![] })
}

/// Reads until the file or the place ends, or as many bytes as the file is known to have: one that grows shows by its times.
fn fill(mut file: &File, place: &mut [u8], size: u64) -> std::io::Result<usize> {
    let mut length = 0;
    while length < place.len() {
        match file.read(&mut place[length..]) {
            Ok(0) => break,
            Ok(n) => length += n,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if length as u64 == size {
            break;
        }
    }
    Ok(length)
}

fn split(keep: &Keep<'_>, lane: usize, buffer: &mut Vec<u8>, file: &File, size: u64) -> Result<Content, Fault> {
    let (mut whole, mut length, mut chunks) = (blake3::Hasher::new(), 0, Vec::new());
    let (mut pieces, mut hole) = (Pieces::new(file, buffer), None);
    // One that grows is not followed.
    while length <= size
        && let Some(piece) = pieces.next().map_err(Fault::File)?
    {
        whole.update(piece.bytes);
        length += piece.bytes.len() as u64;
        let digest = match hole.filter(|_| piece.is_hole) {
            Some(digest) => digest,
            None => keep.large(lane, piece.bytes).map_err(Fault::Store)?,
        };
        hole = hole.or(piece.is_hole.then_some(digest));
        chunks.push(digest);
    }
    Ok(Content { length, digest: Digest(*whole.finalize().as_bytes()), chunks })
}
