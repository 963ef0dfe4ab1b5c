//! What the tests of whole forks share: workspaces in memory, a toy shell, how runs are recorded, and a driver that carries a fork
//! out as a sandbox would.

// Each test binary is compiled with all of it, and none uses all of it.
#![allow(dead_code)]

pub mod facts;
pub mod files;
pub mod product;
pub mod recorder;
pub mod shell;
