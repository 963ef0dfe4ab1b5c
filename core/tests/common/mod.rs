//! What the tests of whole forks share: workspaces in memory, and a driver that carries a fork out as a sandbox would.
//! What commands do in them is each test's own.

// Each test binary is compiled with all of it, and none uses all of it.
#![allow(dead_code)]

pub mod facts;
pub mod files;
pub mod product;
