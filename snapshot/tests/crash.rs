//! A process that dies while it captures leaves a store that can be read, and an index that tells the truth.

mod place;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use place::Place;
use replayfork_core::Digest;
use replayfork_snapshot::{Capturer, LocalStore, Nodes, restore};

const PLACE: &str = "REPLAYFORK_TEST_CRASH_PLACE";

/// Not a test of its own: what the other one starts and kills.
#[test]
fn the_process_that_dies() {
    let Some(place) = std::env::var_os(PLACE).map(PathBuf::from) else { return };
    let (work, store) = (place.join("work"), LocalStore::open(&place.join("store")).unwrap());
    let mut capturer = Capturer::new(&work);
    for round in 0u32.. {
        for n in 0..40u32 {
            fs::create_dir_all(work.join(format!("{}/{}", n % 4, n % 3))).unwrap();
            let content: Vec<u8> = (0..30_000u32).map(|i| (i.wrapping_mul(round * 40 + n + 7) >> 5) as u8).collect();
            fs::write(work.join(format!("{}/{}/{n}", n % 4, n % 3)), content).unwrap();
        }
        fs::write(work.join("large"), vec![round as u8; 1_500_000 + round as usize]).unwrap();
        println!("at work");
        let captured = capturer.capture(&store, &mut |_| {
            println!("pack");
            Ok(())
        });
        println!("done {}", captured.unwrap().snapshot.node);
    }
}

fn same(one: &Path, other: &Path) -> bool {
    Command::new("diff").args(["-r", "--no-dereference"]).args([one, other]).status().unwrap().success()
}

#[test]
fn a_store_survives_kill_9_at_any_point() {
    let place = Place::new();
    let folder = place.store.folder().to_owned();
    let mut last: Option<Digest> = None;
    for lines in 1..=24 {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "the_process_that_dies", "--nocapture"]).env(PLACE, place._temporary.path()).stdout(Stdio::piped());
        let mut child = child.spawn().unwrap();
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        for line in said.by_ref().filter(|l| ["at work", "pack", "done"].iter().any(|w| l.contains(w))).take(lines) {
            last = line.split_once("done ").map_or(last, |(_, node)| node.trim().parse().ok());
        }
        child.kill().unwrap();
        child.wait().unwrap();

        let store = LocalStore::open(&folder).unwrap();
        assert_eq!(store.fsck().unwrap(), [], "after {lines} lines");
        assert!(fs::read_dir(&folder).unwrap().flatten().all(|e| e.path().extension().is_some_and(|e| e != "tmp")));
        let target = place._temporary.path().join("target");
        fs::create_dir(&target).unwrap();
        if let Some(last) = &last {
            restore(&target, &store, &mut Nodes::default(), None, last).unwrap();
        }
        // What the index that was left vouches for is what is there.
        let now = Capturer::new(&place.work).capture(&store, &mut |_| Ok(())).unwrap().snapshot;
        restore(&target, &store, &mut Nodes::default(), None, &now.node).unwrap();
        assert!(same(&place.work, &target), "after {lines} lines");
        fs::remove_dir_all(&target).unwrap();
    }
    assert!(last.is_some());
}
