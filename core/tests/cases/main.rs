//! Forks by hand, each a story of a few lines: what the plan says, what ran, and what is there in the end.
//! Random ones are in `replay_properties`; what both share is in `common`.

mod blocked;
mod build;
#[path = "../common/mod.rs"]
mod common;
mod environment;
mod files;
mod forks;
mod groups;
mod links;
mod models;
mod nothing;
mod refused;
mod reuse;
mod upstream;
mod verdicts;
