//! The domain of ReplayFork: runs and spans, bindings, patches, plans, digests, diffs and forensics.
//!
//! Everything here is pure. This room never does I/O, reads no clock and no environment; whoever needs bytes
//! from a workspace hands them in through [`replay::Workspace`].

pub mod answers;
pub mod binding;
mod bytes;
pub mod concurrency;
pub mod contract;
pub mod diff;
pub mod digest;
pub mod footprint;
pub mod forensics;
pub mod fork;
pub mod graph;
pub mod model;
pub mod patch;
pub mod plan;
pub mod reason;
pub mod replay;
pub mod source;

pub use digest::Digest;
