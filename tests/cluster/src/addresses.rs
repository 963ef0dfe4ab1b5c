//! Which addresses and names one cluster uses. Everything follows from a small index, so that several clusters can
//! run on one machine; the index is held by an abstract socket, which the kernel gives back whatever way its holder ends.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::Command;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::command::output;

/// How many clusters one machine can run at the same time.
const CLUSTERS: u8 = 16;

/// The addresses and the names of one cluster.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Addresses {
    /// Below [`CLUSTERS`].
    pub index: u8,
}

impl Addresses {
    /// This machine's end of the link into the cluster.
    pub fn host_ip(self) -> String {
        format!("10.89.{}.1", self.index)
    }

    /// The only node: API server (6443), DNS (53), Postgres (5432).
    pub fn node_ip(self) -> String {
        format!("10.89.{}.2", self.index)
    }

    pub fn node_cidr(self) -> String {
        format!("10.89.{}.0/24", self.index)
    }

    pub fn pod_cidr(self) -> String {
        format!("10.88.{}.0/24", self.index)
    }

    pub(crate) fn pod_first(self) -> String {
        format!("10.88.{}.10", self.index)
    }

    pub fn service_cidr(self) -> String {
        format!("10.96.{}.0/24", self.index)
    }

    pub(crate) fn api_service_ip(self) -> String {
        format!("10.96.{}.1", self.index)
    }

    pub(crate) fn dns_ip(self) -> String {
        format!("10.96.{}.10", self.index)
    }

    pub fn api_server(self) -> String {
        format!("https://{}:6443", self.node_ip())
    }

    /// The name of the link's end on this machine.
    pub fn link(self) -> String {
        format!("rfcluster{}", self.index)
    }

    /// The cgroup below which kubelet puts all pods, in every hierarchy.
    pub fn cgroup(self) -> String {
        format!("replayfork-test-{}", self.index)
    }
}

/// An index that no other cluster of this machine uses while this value lives.
pub(crate) struct Claim {
    pub addresses: Addresses,
    _held: UnixListener,
}

impl Claim {
    /// Takes the lowest free index whose link addresses this machine doesn't route elsewhere.
    pub fn take() -> Result<Self> {
        let routes = output(Command::new("ip").args(["-4", "route", "show", "table", "all"]))?;
        for index in 0..CLUSTERS {
            let addresses = Addresses { index };
            // A route through our own link name is a leftover of a cluster that was killed, and is removed with it.
            let foreign = routes.lines().filter(|line| !line.contains(&addresses.link()));
            if foreign.filter_map(|line| line.split_whitespace().next()).any(|route| covers(route, addresses)) {
                continue;
            }
            let name = SocketAddr::from_abstract_name(format!("replayfork-test-cluster-{index}"))?;
            if let Ok(held) = UnixListener::bind_addr(&name) {
                return Ok(Self { addresses, _held: held });
            }
        }
        bail!("all {CLUSTERS} cluster addresses (10.89.0.0/24 …) are in use on this machine: stop a cluster, or a VPN that routes them")
    }
}

/// Whether a route (`10.89.3.0/24`, `10.0.0.0/8`, `10.89.3.2`) would take the link's packets.
fn covers(route: &str, addresses: Addresses) -> bool {
    let (ip, length) = route.split_once('/').unwrap_or((route, "32"));
    let (Ok(ip), Ok(length)) = (ip.parse::<std::net::Ipv4Addr>(), length.parse::<u32>()) else {
        return false;
    };
    // A shorter prefix than ours (a site's 10.0.0.0/8) loses to our more specific route, so only an equal or longer one counts.
    let ours = u32::from(std::net::Ipv4Addr::new(10, 89, addresses.index, 0));
    length >= 24 && u32::from(ip) & 0xffff_ff00 == ours
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_equal_or_longer_route_is_in_the_way() {
        let third = Addresses { index: 3 };
        assert!(covers("10.89.3.0/24", third));
        assert!(covers("10.89.3.7", third));
        assert!(!covers("10.0.0.0/8", third));
        assert!(!covers("default", third));
        assert!(!covers("10.89.4.0/24", third));
    }
}
