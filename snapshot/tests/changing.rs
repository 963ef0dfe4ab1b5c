//! Folders that change between captures, or while one is taken.

mod place;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicBool, Ordering};

use place::Place;
use replayfork_snapshot::{Capturer, LocalStore, Nodes, restore};

#[test]
fn a_file_rewritten_in_place_within_one_tick_is_seen_by_the_next_process_too() {
    let mut place = Place::new();
    let file = place.work.join("d/f");
    fs::create_dir(place.work.join("d")).unwrap();
    let mut last = None;
    for n in 0..200u8 {
        // The same length, the same inode, and most times the same tick; the folder's time does not change.
        fs::write(&file, [n]).unwrap();
        place.capturer = Capturer::new(&place.work);
        let now = place.capture().content;
        assert_ne!(Some(now), last, "write {n}");
        last = Some(now);
    }
}

#[test]
fn names_that_come_and_go_within_one_tick_are_seen() {
    let mut place = Place::new();
    for n in 0..100 {
        let (file, folder) = (place.work.join(format!("f{n}")), place.work.join(format!("d{n}/e")));
        let before = place.capture().content;
        fs::write(&file, "").unwrap();
        let one = place.capture().content;
        assert_ne!(one, before, "{n}");
        fs::create_dir_all(&folder).unwrap();
        let two = place.capture().content;
        assert_ne!(two, one, "{n}");
        fs::remove_dir(&folder).unwrap();
        assert_ne!(place.capture().content, two, "{n}");
        fs::remove_dir(folder.parent().unwrap()).unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(place.capture().content, before, "{n}");
    }
}

#[test]
fn after_a_restart_only_what_changed_is_read() {
    let mut place = Place::new();
    for n in 0..600 {
        fs::create_dir_all(place.work.join(format!("{}", n % 7))).unwrap();
        fs::write(place.work.join(format!("{}/{n}", n % 7)), format!("{n}")).unwrap();
    }
    place.next_tick();
    let first = place.capture();
    fs::write(place.work.join("3/10"), "rewritten").unwrap();
    fs::remove_file(place.work.join("4/11")).unwrap();
    place.next_tick();
    let folder = place.store.folder().to_owned();
    let store = LocalStore::open(&folder).unwrap();
    place.capturer = Capturer::new(&place.work);
    let second = place.capturer.capture(&store, &mut |_| Ok(())).unwrap();
    assert_eq!((second.files, second.read), (599, 1));
    assert_ne!(second.snapshot, first);
    let third = place.capturer.capture(&store, &mut |_| Ok(())).unwrap();
    assert_eq!((third.files, third.read, third.snapshot), (599, 0, second.snapshot));
    assert_eq!(store.fsck().unwrap(), []);
    // Without its index it says the same.
    drop(std::mem::replace(&mut place.capturer, Capturer::new(&place.work)));
    for entry in fs::read_dir(&folder).unwrap().flatten().filter(|e| e.path().extension().is_some_and(|e| e == "index")) {
        fs::remove_file(entry.path()).unwrap();
    }
    let fourth = place.capturer.capture(&store, &mut |_| Ok(())).unwrap();
    assert_eq!((fourth.read, fourth.snapshot), (599, second.snapshot));
}

#[test]
fn what_takes_the_place_of_a_folder_is_seen_with_all_below_it() {
    let mut place = Place::new();
    for folder in ["a/b/c", "a/d", "e/b/c"] {
        fs::create_dir_all(place.work.join(folder)).unwrap();
        fs::write(place.work.join(folder).join("f"), folder).unwrap();
    }
    let path = |name: &str| place.work.join(name);
    let (a, b, e, moved) = (path("a"), path("a/b"), path("e"), path("moved"));
    let steps: [(&str, &dyn Fn()); 6] = [
        ("nothing", &|| {}),
        ("a link to where it went", &|| {
            fs::rename(&a, &moved).unwrap();
            std::os::unix::fs::symlink("moved", &a).unwrap();
        }),
        ("another folder of the same names", &|| {
            fs::remove_file(&a).unwrap();
            fs::rename(&e, &a).unwrap();
        }),
        ("a file far below", &|| fs::write(b.join("c/f"), "edited").unwrap()),
        ("a file", &|| {
            fs::remove_dir_all(&b).unwrap();
            fs::write(&b, "a file").unwrap();
        }),
        ("a folder again", &|| {
            fs::remove_file(&b).unwrap();
            fs::create_dir(&b).unwrap();
        }),
    ];
    place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap();
    for (what, step) in steps {
        place.next_tick();
        step();
        let other = LocalStore::open(&place._temporary.path().join(format!("store of {what}"))).unwrap();
        let fresh = Capturer::new(&place.work).capture(&other, &mut |_| Ok(())).unwrap();
        let seen = place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap();
        assert_eq!((seen.snapshot, seen.files, seen.bytes), (fresh.snapshot, fresh.files, fresh.bytes), "{what}");
    }
    assert_eq!(place.store.fsck().unwrap(), []);
}

#[test]
fn an_index_never_vouches_for_a_store_that_was_emptied() {
    let mut place = Place::new();
    fs::write(place.work.join("f"), "f").unwrap();
    place.next_tick();
    let first = place.capture();
    place.capturer = Capturer::new(&place.work);
    for entry in fs::read_dir(place.store.folder()).unwrap().flatten().filter(|e| e.path().extension().is_some_and(|e| e == "pack")) {
        fs::remove_file(entry.path()).unwrap();
    }
    place.store = LocalStore::open(place.store.folder()).unwrap();
    assert_eq!(place.capture(), first);
    assert!(place.store.contains(&first.node));
    assert_eq!(place.store.fsck().unwrap(), []);
}

#[test]
fn new_rules_for_what_is_ignored_hold_at_once() {
    let mut place = Place::new();
    fs::create_dir(place.work.join("d")).unwrap();
    fs::write(place.work.join("d/x.log"), "").unwrap();
    fs::write(place.work.join("d/y"), "").unwrap();
    place.next_tick();
    assert_eq!(place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap().files, 2);
    fs::write(place.work.join(".replayforkignore"), "*.log\n").unwrap();
    assert_eq!(place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap().files, 2);
    fs::write(place.work.join(".replayforkignore"), "*.nothing\n").unwrap();
    assert_eq!(place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap().files, 3);
}

#[test]
fn the_index_does_not_grow_with_every_capture() {
    let mut place = Place::new();
    for n in 0..2000 {
        fs::write(place.work.join(format!("{n}")), "").unwrap();
    }
    let size = |place: &Place| {
        let files = fs::read_dir(place.store.folder()).unwrap().flatten();
        files.filter(|e| e.path().extension().is_some_and(|e| e == "index")).map(|e| e.metadata().unwrap().len()).sum::<u64>()
    };
    place.capture();
    let first = size(&place);
    for n in 0..60 {
        fs::write(place.work.join("7"), format!("{n}")).unwrap();
        place.capture();
    }
    assert!(size(&place) < 3 * first + (2 << 20), "{first} became {}", size(&place));
    assert_eq!(place.store.fsck().unwrap(), []);
}

#[test]
fn whatever_changes_while_it_is_read_a_snapshot_is_whole() {
    let mut place = Place::new();
    let growing = place.work.join("growing");
    for n in 0..50 {
        fs::create_dir_all(place.work.join(format!("d{n}"))).unwrap();
    }
    let over = AtomicBool::new(false);
    let (reported, last) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 0u64;
            while !over.load(Ordering::Relaxed) {
                n += 1;
                let at = place.work.join(format!("d{}", n % 50));
                fs::write(&growing, vec![n as u8; (n % 40) as usize * 50_000]).unwrap();
                let _ = fs::write(at.join("f"), n.to_string());
                let _ = fs::remove_dir_all(place.work.join(format!("d{}", (n + 25) % 50)));
                fs::create_dir_all(at).unwrap();
            }
        });
        let mut capturer = Capturer::new(&place.work);
        let mut reported = Vec::new();
        let mut last = None;
        for _ in 0..40 {
            let captured = capturer.capture(&place.store, &mut |_| Ok(())).unwrap();
            reported.extend(captured.skipped);
            last = Some(captured.snapshot);
        }
        over.store(true, Ordering::Relaxed);
        (reported, last.unwrap())
    });
    assert!(reported.iter().all(|s| s.path == "growing" && s.why.contains("changing")), "{reported:?}");
    assert_eq!(place.store.fsck().unwrap(), []);
    let other = place._temporary.path().join("other");
    fs::create_dir(&other).unwrap();
    restore(&other, &place.store, &mut Nodes::default(), None, &last.node).unwrap();
    // At rest, the same capturer sees what is really there.
    let at_rest = place.capture();
    place.capturer = Capturer::new(&other);
    restore(&other, &place.store, &mut place.nodes, None, &at_rest.node).unwrap();
    assert_eq!(place.capture(), at_rest);
}

#[test]
fn captures_at_the_same_time_share_a_store() {
    let place = Place::new();
    let roots: Vec<_> = (0..4).map(|n| place._temporary.path().join(format!("root{n}"))).collect();
    for root in &roots {
        fs::create_dir(root).unwrap();
        for n in 0..300 {
            let file = root.join(format!("{n}"));
            fs::write(&file, format!("{n}").repeat(200)).unwrap();
            fs::File::open(&file).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        }
    }
    let snapshots: Vec<_> = std::thread::scope(|scope| {
        let capture = |root| Capturer::new(root).capture(&place.store, &mut |_| Ok(())).unwrap().snapshot;
        let threads: Vec<_> = roots.iter().map(|root| scope.spawn(move || capture(root))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(snapshots.iter().all(|s| *s == snapshots[0]));
    assert_eq!(place.store.fsck().unwrap(), []);
    let mut packs = 0;
    let mut capturer = Capturer::new(&roots[0]);
    let again = capturer.capture(&place.store, &mut |_| {
        packs += 1;
        Ok(())
    });
    assert_eq!((again.unwrap().snapshot, packs), (snapshots[0], 0));
}

#[test]
fn a_file_that_may_not_be_read_is_reported_until_it_may() {
    // Root reads everything.
    if rustix::process::geteuid().is_root() {
        return;
    }
    let mut place = Place::new();
    let file = place.work.join("secret");
    fs::write(&file, "s").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
    place.next_tick();
    for _ in 0..2 {
        let captured = place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap();
        assert_eq!(captured.skipped.iter().map(|s| s.path.as_str()).collect::<Vec<_>>(), ["secret"]);
    }
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap().files, 1);
}
