//! What courier and executor say to each other, over one loopback connection that is accepted once.
//!
//! A message is its length (u32, little-endian) and JSON. Neither side waits for an answer while it has something to say.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// File in the control volume with the courier's port and nonce, a line each.
pub const ENDPOINT_FILE: &str = "endpoint";
/// The scratch volume in the executor's container: HOME of commands whose own can't be written.
pub const SCRATCH: &str = "/tmp";
/// Bytes that one message may have.
const MAX_MESSAGE: u32 = 64 << 20;
/// Bytes of stdout and of stderr that are kept; the rest is counted.
pub const MAX_OUTPUT: usize = 8 << 20;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToExecutor {
    Run(Run),
    /// Stop the command that runs, and all that it started.
    Stop,
    /// The api-server has the terminal result: exit with 0.
    Done,
}

/// A command to run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub argv: Vec<String>,
    /// Absolute.
    pub cwd: String,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    pub stdin: String,
    pub timeout_ms: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromExecutor {
    /// The nonce from the endpoint file.
    Hello(String),
    Ended(Ended),
}

/// What came of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// 128 + signal for a command that a signal ended, as shells count. `None`: it did not start, or was stopped.
    pub exit_code: Option<i32>,
    #[serde(with = "hex")]
    pub stdout: Vec<u8>,
    #[serde(with = "hex")]
    pub stderr: Vec<u8>,
    /// Bytes beyond [`MAX_OUTPUT`] that were dropped.
    pub dropped: u64,
    /// Milliseconds after which it was stopped, as it had been told.
    pub timed_out: Option<u64>,
    pub stopped: bool,
    /// Why it did not start.
    pub failed_start: Option<String>,
    /// What its user may not enter or execute, where that is why.
    pub denied: Option<Denied>,
    /// The HOME that it was to have and that can't be written; it had [`SCRATCH`].
    pub home_unusable: Option<String>,
    /// Processes that the command left running, which were killed.
    pub left_running: u32,
    /// Processes of the container that were killed for memory meanwhile.
    pub oom_kills: u64,
}

/// A path that a user may not enter or execute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Denied {
    pub path: String,
    pub uid: u32,
}

/// # Errors
/// The connection broke, or the message is too large.
pub fn send(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let length = u32::try_from(bytes.len()).ok().filter(|n| *n <= MAX_MESSAGE);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the message is too large"))?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend(bytes);
    stream.write_all(&frame)?;
    stream.flush()
}

/// # Errors
/// The connection broke or ended, or what came is no message.
pub fn receive<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    stream.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too large"));
    }
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_result_fits_into_a_message() {
        let ended = Ended { stdout: vec![0; MAX_OUTPUT], stderr: vec![0xff; MAX_OUTPUT], ..Ended::default() };
        let mut wire = Vec::new();
        send(&mut wire, &FromExecutor::Ended(ended.clone())).unwrap();
        let back: FromExecutor = receive(&mut wire.as_slice()).unwrap();
        assert!(matches!(back, FromExecutor::Ended(e) if e == ended));
    }

    #[test]
    fn a_message_that_claims_too_much_is_refused_before_it_is_read() {
        let wire = u32::MAX.to_le_bytes();
        assert!(receive::<ToExecutor>(&mut wire.as_slice()).unwrap_err().to_string().contains("too large"));
    }
}
