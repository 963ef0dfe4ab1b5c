//! The Debian packages that parts, images and tests need, installed where this may be done.

use std::process::Command;

use anyhow::{Result, bail};
use clap::ValueEnum;

use crate::cache;
use crate::command::{output, run_logged};
use crate::phase::{note, phase_with_log};

/// What the cluster and its images need.
const CLUSTER: [&str; 14] = [
    "binutils",
    "buildah",
    "conntrack",
    "gcc",
    "ipset",
    "iproute2",
    "iptables",
    "libc6-dev",
    "mmdebstrap",
    "nftables",
    "openssl",
    "postgresql",
    "runc",
    "util-linux",
];

/// What the end-to-end tests need besides: the viewer in a browser.
const TESTS: [&str; 2] = ["chromium", "git"];

/// What the packages are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Purpose {
    Cluster,
    Tests,
}

/// Installs what is missing, or says what to install.
pub fn ensure(purpose: Purpose) -> Result<()> {
    let wanted = match purpose {
        Purpose::Cluster => CLUSTER.to_vec(),
        Purpose::Tests => [CLUSTER.as_slice(), &TESTS].concat(),
    };
    let missing: Vec<_> = wanted.into_iter().filter(|package| !installed(package)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let names = missing.join(" ");
    if !rustix::process::geteuid().is_root() {
        bail!(
            "needed and not installed: {names}\n  apt-get install --no-install-recommends {names}\nThe cluster itself is made of namespaces, so run this as root."
        );
    }
    note(&format!("installing Debian packages: {names}"));
    let log = cache::root()?.join("log/packages.log");
    phase_with_log("installing Debian packages", &log, || {
        run_logged(apt().arg("update"), &log)?;
        run_logged(apt().args(["install", "--yes", "--no-install-recommends"]).args(&missing), &log)
    })
}

fn apt() -> Command {
    let mut apt = Command::new("apt-get");
    apt.env("DEBIAN_FRONTEND", "noninteractive");
    apt
}

fn installed(package: &str) -> bool {
    // dpkg also remembers packages that were removed, so it must be asked for the state.
    let mut query = Command::new("dpkg-query");
    query.args(["--show", "--showformat=${db:Status-Status}", package]);
    output(&mut query).is_ok_and(|state| state == "installed")
}
