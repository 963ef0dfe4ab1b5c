//! Real folders through capture, store and restore.

mod place;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use place::Place;
use proptest::prelude::*;
use replayfork_core::footprint::Pattern;
use replayfork_snapshot::{Blobs, LocalStore, Nodes, diff, footprint_content, parse_pack, path_text, put_file, replay_paths, restore};

fn list(root: &Path) -> Vec<String> {
    fn walk(at: &Path, root: &Path, out: &mut Vec<String>) {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            let meta = path.symlink_metadata().unwrap();
            let name = path_text(path.strip_prefix(root).unwrap().as_os_str().as_encoded_bytes());
            if meta.is_dir() {
                out.push(format!("{name}/ {}", meta.mtime_nsec()));
                walk(&path, root, out);
            } else if meta.is_symlink() {
                out.push(format!("{name} -> {:?} {}", fs::read_link(&path).unwrap(), meta.mtime_nsec()));
            } else {
                let x = meta.permissions().mode() & 0o100;
                out.push(format!("{name} {x} {} {:?}", meta.mtime_nsec(), fs::read(&path).unwrap()));
            }
        }
    }
    let mut out = Vec::new();
    walk(root, root, &mut out);
    out.sort();
    out
}

#[derive(Clone, Debug)]
enum Node {
    File(Vec<u8>, bool),
    Link(String),
    Folder(Vec<(String, Node)>),
}

fn node() -> impl Strategy<Value = Node> {
    let name = "[a-d\u{e9}.]{1,3}".prop_filter("a name", |n| n != "." && n != "..");
    let leaf = prop_oneof![
        (prop::collection::vec(any::<u8>(), 0..40), any::<bool>()).prop_map(|(c, x)| Node::File(c, x)),
        "(\\.\\./)?[a-d]{1,3}".prop_map(Node::Link),
        Just(Node::Folder(vec![])),
    ];
    leaf.prop_recursive(3, 24, 6, move |inner| prop::collection::vec((name.clone(), inner), 0..6).prop_map(Node::Folder))
}

fn build(at: &Path, node: &Node) {
    match node {
        Node::File(content, x) => {
            fs::write(at, content).unwrap();
            fs::set_permissions(at, fs::Permissions::from_mode(if *x { 0o755 } else { 0o644 })).unwrap();
        }
        Node::Link(target) => symlink(target, at).unwrap(),
        Node::Folder(entries) => {
            if !at.exists() {
                fs::create_dir(at).unwrap();
            }
            for (name, node) in entries {
                let path = at.join(name);
                if path.symlink_metadata().is_err() {
                    build(&path, node);
                }
            }
        }
    }
}

fn clear(root: &Path) {
    fs::remove_dir_all(root).unwrap();
    fs::create_dir(root).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_comes_back_from_an_empty_folder_and_from_any_other_tree(one in node(), other in node()) {
        let mut place = Place::new();
        build(&place.work.join("t"), &one);
        let (first, then) = (place.capture(), list(&place.work));
        clear(&place.work);
        place.restore(None, &first);
        prop_assert_eq!(list(&place.work), then.clone());
        clear(&place.work);
        build(&place.work.join("t"), &other);
        let second = place.capture();
        place.restore(Some(&second), &first);
        let names = |l: Vec<String>| l.into_iter().map(|s| s.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>();
        prop_assert_eq!(names(list(&place.work)), names(then));
        prop_assert_eq!(place.capture().content, first.content);
    }
}

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
    clear(&place.work);
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
    assert!(replayfork_snapshot::read_file(&place.work, "d/f", 10).is_err());
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
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
