//! A workspace and a store beside it.

#![allow(dead_code)]

use std::fs;

use replayfork_core::model::SnapshotRef;
use replayfork_snapshot::{Capturer, LocalStore, Nodes, restore};

pub struct Place {
    pub _temporary: tempfile::TempDir,
    pub work: std::path::PathBuf,
    pub store: LocalStore,
    pub nodes: Nodes,
    pub capturer: Capturer,
}

impl Place {
    pub fn new() -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let work = temporary.path().join("work");
        fs::create_dir(&work).unwrap();
        let store = LocalStore::open(&temporary.path().join("store")).unwrap();
        Self { capturer: Capturer::new(&work), work, store, nodes: Nodes::default(), _temporary: temporary }
    }

    pub fn clear(&self) {
        fs::remove_dir_all(&self.work).unwrap();
        fs::create_dir(&self.work).unwrap();
    }

    pub fn capture(&mut self) -> SnapshotRef {
        self.capturer.capture(&self.store, &mut |_| Ok(())).unwrap().snapshot
    }

    pub fn restore(&mut self, current: Option<&SnapshotRef>, target: &SnapshotRef) {
        restore(&self.work, &self.store, &mut self.nodes, current.map(|s| &s.node), &target.node).unwrap();
    }

    /// Waits until the clock that stamps files has moved on: a capture does not trust files changed in its own tick.
    pub fn next_tick(&self) {
        let clock = || rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        let probe = self._temporary.path().join("tick");
        fs::write(&probe, "").unwrap();
        let stamp = rustix::fs::stat(&probe).unwrap();
        while (clock().tv_sec, clock().tv_nsec) <= (stamp.st_ctime, stamp.st_ctime_nsec as _) {
            std::thread::yield_now();
        }
    }
}
