//! Real folders through capture, store and restore.

mod place;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use place::Place;
use replayfork_core::footprint::Pattern;
use replayfork_snapshot::{
    Blobs, LocalStore, Nodes, diff, footprint_content, parse_pack, path_text, put_file, read_file, replay_paths, restore,
};

#[test]
fn files_written_within_one_tick_of_the_clock_are_seen() {
    let mut place = Place::new();
    let file = place.work.join("f");
    let mut last = None;
    for n in 0..200u8 {
        fs::write(&file, [n]).unwrap();
        let now = place.capture().content;
        assert_ne!(Some(now), last, "write {n}");
        last = Some(now);
    }
}

#[test]
fn an_unchanged_workspace_is_not_read_again() {
    let mut place = Place::new();
    fs::write(place.work.join("a"), vec![1; 3_000_000]).unwrap();
    place.next_tick();
    place.capture();
    let mut packs = 0;
    let third = place
        .capturer
        .capture(&place.store, &mut |_| {
            packs += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!((third.read, packs, third.files), (0, 0, 1));
}

#[test]
fn what_is_no_file_folder_or_link_is_reported_and_left_out() {
    let mut place = Place::new();
    let _socket = std::os::unix::net::UnixListener::bind(place.work.join("sock")).unwrap();
    fs::write(place.work.join(".replayforkignore"), "*.log\nbuild/\n").unwrap();
    fs::write(place.work.join("x.log"), "").unwrap();
    fs::create_dir(place.work.join("build")).unwrap();
    let captured = place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap();
    assert_eq!(captured.skipped.iter().map(|s| s.path.as_str()).collect::<Vec<_>>(), ["sock"]);
    let names: Vec<_> = diff(&mut place.nodes, &mut place.store, None, Some(&captured.snapshot.node))
        .unwrap()
        .into_iter()
        .map(|c| path_text(&c.path))
        .collect();
    assert_eq!(names, [".replayforkignore"]);
}

#[test]
fn recorded_changes_happen_on_another_state_too() {
    let mut place = Place::new();
    fs::write(place.work.join("a"), "1").unwrap();
    fs::write(place.work.join("becomes"), "file").unwrap();
    let before = place.capture();
    fs::write(place.work.join("a"), "2").unwrap();
    fs::remove_file(place.work.join("becomes")).unwrap();
    fs::create_dir(place.work.join("becomes")).unwrap();
    fs::write(place.work.join("becomes/x"), "x").unwrap();
    let after = place.capture();
    place.clear();
    fs::create_dir(place.work.join("a")).unwrap();
    fs::write(place.work.join("a/inside"), "i").unwrap();
    fs::write(place.work.join("mine"), "m").unwrap();
    let current = place.capture();
    let changed = diff(&mut place.nodes, &mut place.store, Some(&before.node), Some(&after.node)).unwrap();
    let paths: Vec<_> = changed.into_iter().map(|c| c.path).collect();
    replay_paths(&place.work, &mut place.nodes, &mut place.store, &current.node, (&after.node, &paths)).unwrap();
    assert_eq!(fs::read_to_string(place.work.join("a")).unwrap(), "2");
    assert_eq!(fs::read_to_string(place.work.join("becomes/x")).unwrap(), "x");
    assert_eq!(fs::read_to_string(place.work.join("mine")).unwrap(), "m");
}

#[test]
fn a_file_takes_the_place_of_whatever_was_there() {
    let mut place = Place::new();
    fs::create_dir_all(place.work.join("folder/below")).unwrap();
    fs::write(place.work.join("folder/below/f"), "f").unwrap();
    fs::write(place.work.join("file"), "f").unwrap();
    symlink("elsewhere", place.work.join("link")).unwrap();
    for (path, executable) in [("folder", true), ("file/now/a/folder", false), ("link", false), ("new/one", false)] {
        let current = place.capture();
        put_file(&place.work, &mut place.nodes, &mut place.store, &current.node, (path, b"put", executable)).unwrap();
        let meta = fs::symlink_metadata(place.work.join(path)).unwrap();
        assert!(meta.is_file(), "{path}");
        assert_eq!(meta.permissions().mode() & 0o111 != 0, executable, "{path}");
        assert_eq!(fs::read_to_string(place.work.join(path)).unwrap(), "put");
    }
}

#[test]
fn nothing_is_written_through_a_link_that_a_workspace_holds() {
    let outside = tempfile::tempdir().unwrap();
    let mut place = Place::new();
    fs::create_dir(place.work.join("d")).unwrap();
    fs::write(place.work.join("d/f"), "f").unwrap();
    let target = place.capture();
    fs::remove_dir_all(place.work.join("d")).unwrap();
    symlink(outside.path(), place.work.join("d")).unwrap();
    // Nothing is known of the folder: what is in the way goes.
    restore(&place.work, &place.store, &mut place.nodes, None, &target.node).unwrap();
    assert_eq!(fs::read_to_string(place.work.join("d/f")).unwrap(), "f");
    fs::remove_dir_all(place.work.join("d")).unwrap();
    symlink(outside.path(), place.work.join("d")).unwrap();
    // The link is not in the captured tree either: what the tree says of the path is what is cleared away.
    let empty = target.node;
    assert!(put_file(&place.work, &mut place.nodes, &mut place.store, &empty, ("d/f", b"x", false)).is_err());
    fs::write(outside.path().join("f"), "secret").unwrap();
    let refused = read_file(&place.work, "d/f", 10).unwrap_err().to_string();
    assert!(refused.contains("d/f") && refused.contains("out of the workspace"), "{refused}");
    fs::remove_file(outside.path().join("f")).unwrap();
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
}

#[test]
fn a_file_is_read_through_links_that_stay_in_the_workspace() {
    let place = Place::new();
    fs::create_dir_all(place.work.join("releases/1")).unwrap();
    fs::write(place.work.join("releases/1/conf"), "one").unwrap();
    symlink("releases/1", place.work.join("current")).unwrap();
    symlink("current/conf", place.work.join("conf")).unwrap();
    symlink("loop", place.work.join("loop")).unwrap();
    let read = |path| read_file(&place.work, path, 3);
    assert_eq!((read("conf").unwrap(), read("current/conf").unwrap()), (b"one".to_vec(), b"one".to_vec()));
    for nothing in ["loop", "current", "current/none", "conf/x", ""] {
        assert!(read(nothing).is_err(), "{nothing}");
    }
    fs::write(place.work.join("conf"), "more").unwrap();
    assert!(read("conf").unwrap_err().to_string().contains("more than 3 bytes"));
}

#[test]
fn a_footprint_sees_what_links_lead_to_and_not_what_lies_elsewhere() {
    let mut place = Place::new();
    fs::create_dir(place.work.join("real")).unwrap();
    fs::write(place.work.join("real/f"), "1").unwrap();
    symlink("real", place.work.join("via")).unwrap();
    fs::write(place.work.join("other"), "1").unwrap();
    let patterns = [Pattern::Path("via/f".into())];
    let content = |place: &mut Place| {
        let root = place.capture().node;
        footprint_content(&mut place.nodes, &mut place.store, &root, &patterns).unwrap()
    };
    let first = content(&mut place);
    fs::write(place.work.join("other"), "2").unwrap();
    assert_eq!(content(&mut place), first);
    fs::write(place.work.join("real/f"), "2").unwrap();
    assert_ne!(content(&mut place), first);
}

#[test]
fn what_is_seen_through_links_is_told_and_counts() {
    let mut place = Place::new();
    for folder in ["real", "bin", "lib/v2", "other"] {
        fs::create_dir_all(place.work.join(folder)).unwrap();
    }
    fs::write(place.work.join("real/f"), "1").unwrap();
    fs::write(place.work.join("lib/v2/tool"), "1").unwrap();
    fs::write(place.work.join("other/x"), "1").unwrap();
    for (target, link) in [
        ("real", "via"),
        ("via/f", "file"),
        ("nothing", "dangling"),
        ("../lib/now/tool", "bin/tool"),
        ("tool", "bin/t"),
        ("v2", "lib/now"),
        ("/etc", "real/etc"),
        ("../other", "real/other"),
    ] {
        symlink(target, place.work.join(link)).unwrap();
    }
    let path = |p: &str| Pattern::Path(p.into());
    let below = |p: &str| Pattern::Below(p.into());
    let root = place.capture().node;
    let through = |place: &mut Place, pattern: &Pattern| {
        let seen =
            replayfork_snapshot::seen_through_links(&mut place.nodes, &mut place.store, &root, std::slice::from_ref(pattern)).unwrap();
        seen.iter().map(Pattern::declared).collect::<Vec<_>>()
    };
    assert_eq!(through(&mut place, &path("file")), ["real/f", "via"]);
    assert_eq!(through(&mut place, &path("via/f")), ["real/f", "via"]);
    assert_eq!(through(&mut place, &path("dangling")), ["nothing"]);
    assert_eq!(through(&mut place, &path("real/f")), [""; 0]);
    assert_eq!(through(&mut place, &below("bin")), ["lib/now", "lib/v2/tool/"]);
    assert_eq!(through(&mut place, &below("via")), ["other/", "real/"]);
    assert_eq!(through(&mut place, &Pattern::all()), [""; 0]);
    let content = |place: &mut Place| {
        let root = place.capture().node;
        footprint_content(&mut place.nodes, &mut place.store, &root, &[below("bin"), below("via")]).unwrap()
    };
    let mut last = content(&mut place);
    for file in ["lib/v2/tool", "other/x", "real/f"] {
        fs::write(place.work.join(file), "2").unwrap();
        let now = content(&mut place);
        assert_ne!(now, last, "{file}");
        last = now;
    }
    fs::write(place.work.join("nothing"), "2").unwrap();
    assert_eq!(content(&mut place), last);
}

#[test]
fn a_store_survives_being_opened_again_and_names_what_it_lacks() {
    let mut place = Place::new();
    fs::write(place.work.join("f"), vec![9; 5_000_000]).unwrap();
    let snapshot = place.capture();
    let folder = place._temporary.path().join("store");
    fs::write(folder.join("cut.tmp"), "half").unwrap();
    let mut again = LocalStore::open(&folder).unwrap();
    assert!(!folder.join("cut.tmp").exists());
    let all = replayfork_snapshot::reachable(&mut Nodes::default(), &mut again, &snapshot.node, None).unwrap();
    assert!(all.iter().all(|d| again.get(d).is_ok()) && all.len() > 2);
    let missing = replayfork_core::Digest::of(b"never stored");
    assert!(again.get(&missing).unwrap_err().to_string().contains(&missing.to_string()));
    assert!(parse_pack(b"no pack").is_err());
}
