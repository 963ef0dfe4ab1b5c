//! A real single-node Kubernetes on this machine, in namespaces of its own, without a container engine and without
//! pulling an image: for the end-to-end tests, the demo and a developer's shell.
//!
//! Who runs what: the program that wants a [`Cluster`] starts a keeper (what outlives a process: link, cgroups, folder),
//! the keeper starts the namespaces' first process, which reaps, and that a supervisor, which starts the components.
//! Each watches the one above by its standard input, so that whatever ends first, nothing is left behind.
//! Nothing here knows the product: [`Cluster`] is the cluster alone.

use std::path::Path;
use std::process::ExitCode;

mod addresses;
mod attached;
mod buildah;
mod cache;
mod cgroups;
mod cluster;
pub mod command;
mod components;
mod config;
mod containers;
pub mod demo;
pub mod images;
mod init;
pub mod install;
pub mod interrupt;
mod keeper;
pub mod kube;
mod mounts;
pub mod packages;
pub mod parts;
pub mod phase;
mod pki;
pub mod place;
mod postgres;
pub mod product;
mod rootfs;
mod spec;
mod supervisor;
pub mod traces;
pub mod workspace;

pub use addresses::Addresses;
pub use attached::Attached;
pub use cluster::{Cluster, Options};
pub use components::PAUSE_IMAGE;

/// Must be the first call of any program that starts a [`Cluster`]: the cluster's own processes are this same program,
/// started again with a role. Returns `None` when it was started as itself.
pub fn take_role() -> Option<ExitCode> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, role, name, state] = arguments.as_slice() else {
        return None;
    };
    if role != spec::ROLE {
        return None;
    }
    let state = Path::new(state);
    Some(match name.as_str() {
        "keep" => keeper::main(state),
        "init" => init::main(state),
        "supervise" => supervisor::main(state),
        _ => ExitCode::FAILURE,
    })
}
