//! Generated trees of everything that a Linux folder can hold, there and back.

mod place;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use place::Place;
use proptest::prelude::*;
use replayfork_core::Digest;
use replayfork_snapshot::{Kind, entry_at, path_text};

/// Everything below a folder, one line an entry: type, x bit, time, target or content.
fn list(root: &Path) -> Vec<String> {
    fn walk(at: &Path, root: &Path, out: &mut Vec<String>) {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            let meta = path.symlink_metadata().unwrap();
            let name = path_text(path.strip_prefix(root).unwrap().as_os_str().as_encoded_bytes());
            let time = (meta.mtime(), meta.mtime_nsec());
            if meta.is_dir() {
                out.push(format!("{name}/ {time:?}"));
                walk(&path, root, out);
            } else if meta.is_symlink() {
                out.push(format!("{name} -> {:?} {time:?}", fs::read_link(&path).unwrap()));
            } else {
                let content = Digest::of(&fs::read(&path).unwrap());
                out.push(format!("{name} {:o} {time:?} {content} {}", meta.mode() & 0o100, meta.len()));
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
    File { content: Content, executable: bool },
    Link(Vec<u8>),
    Folder { entries: Vec<(Vec<u8>, Node)>, read_only: bool },
}

#[derive(Clone, Debug)]
enum Content {
    Bytes(Vec<u8>),
    /// So many bytes, made from a seed: compressible a little, different for each seed.
    Long(usize, u8),
    /// A hole of so many bytes between two bytes.
    Sparse(u64),
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        6 => "[a-c]{1,2}".prop_map(String::into_bytes),
        1 => "[\u{e9}\u{1f980}. \\\\\n-]{1,3}".prop_map(String::into_bytes),
        1 => prop::collection::vec(any::<u8>(), 1..5),
        1 => any::<u8>().prop_map(|b| vec![b | 0x40; 255]),
    ]
    .prop_filter("a name", |n| n != b"." && n != b".." && !n.contains(&b'/') && !n.contains(&0))
}

fn content() -> impl Strategy<Value = Content> {
    prop_oneof![
        6 => prop::collection::vec(any::<u8>(), 0..40).prop_map(Content::Bytes),
        1 => (prop_oneof![Just(262_143usize), Just(262_144), Just(262_145), Just(1_048_576), Just(1_048_577), Just(3_000_000)], any::<u8>())
            .prop_map(|(n, seed)| Content::Long(n, seed)),
        1 => (1u64..9_000_000).prop_map(Content::Sparse),
    ]
}

fn node() -> impl Strategy<Value = Node> {
    let leaf = prop_oneof![
        5 => (content(), any::<bool>()).prop_map(|(content, executable)| Node::File { content, executable }),
        1 => "(\\.\\./|/)?[a-d]{1,3}".prop_map(|t| Node::Link(t.into_bytes())),
        1 => prop::collection::vec(1u8.., 1..300).prop_map(Node::Link),
        1 => Just(Node::Folder { entries: vec![], read_only: false }),
    ];
    leaf.prop_recursive(6, 40, 6, |inner| {
        (prop::collection::vec((name(), inner), 0..6), prop::bool::weighted(0.1))
            .prop_map(|(entries, read_only)| Node::Folder { entries, read_only })
    })
}

fn build(at: &Path, node: &Node) {
    match node {
        Node::File { content, executable } => {
            match content {
                Content::Bytes(bytes) => fs::write(at, bytes).unwrap(),
                Content::Long(length, seed) => {
                    let bytes: Vec<u8> =
                        (0..*length).map(|i| seed.wrapping_mul(31).wrapping_add((i * i / 7) as u8) ^ (i >> 9) as u8).collect();
                    fs::write(at, bytes).unwrap();
                }
                Content::Sparse(hole) => {
                    use std::os::unix::fs::FileExt;
                    let file = fs::File::create(at).unwrap();
                    file.write_all_at(b"a", 0).unwrap();
                    file.write_all_at(b"b", hole + 1).unwrap();
                }
            }
            fs::set_permissions(at, fs::Permissions::from_mode(if *executable { 0o755 } else { 0o644 })).unwrap();
        }
        Node::Link(target) => symlink(OsStr::from_bytes(target), at).unwrap(),
        Node::Folder { entries, read_only } => {
            fs::create_dir_all(at).unwrap();
            for (name, node) in entries {
                let path = at.join(OsStr::from_bytes(name));
                if path.symlink_metadata().is_err() {
                    build(&path, node);
                }
            }
            if *read_only {
                fs::set_permissions(at, fs::Permissions::from_mode(0o555)).unwrap();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn any_tree_comes_back_in_an_empty_folder_and_in_place_of_any_other(one in node(), other in node()) {
        let mut place = Place::new();
        build(&place.work.join("t"), &one);
        let (first, then) = (place.capture(), list(&place.work));
        prop_assert_eq!(place.store.fsck().unwrap(), vec![]);

        place.clear();
        place.restore(None, &first);
        prop_assert_eq!(list(&place.work), then.clone(), "into an empty folder");

        place.clear();
        build(&place.work.join("t"), &other);
        place.restore(None, &first);
        prop_assert_eq!(list(&place.work), then.clone(), "in place of a tree of which nothing is known");

        place.clear();
        build(&place.work.join("t"), &other);
        let second = place.capture();
        place.restore(Some(&second), &first);
        prop_assert_eq!(list(&place.work), then.clone(), "in place of a tree that was captured");

        place.clear();
        build(&place.work.join("t"), &other);
        place.capturer.restore(&place.store, &first.node).unwrap();
        prop_assert_eq!(list(&place.work), then, "in place of a tree that is looked at first");
        prop_assert_eq!(place.capture().node, first.node);
    }
}

#[test]
fn folders_nested_deeper_than_a_path_may_be_long_come_back() {
    let mut place = Place::new();
    let name = "n".repeat(255);
    let enter = |at: &fs::File| {
        rustix::fs::mkdirat(at, name.as_str(), rustix::fs::Mode::from_raw_mode(0o755)).unwrap();
        fs::File::from(rustix::fs::openat(at, name.as_str(), rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap())
    };
    let mut at = fs::File::open(&place.work).unwrap();
    for _ in 0..40 {
        at = enter(&at);
    }
    let flags = rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CREATE;
    let file = rustix::fs::openat(&at, "deep", flags, rustix::fs::Mode::from_raw_mode(0o644)).unwrap();
    rustix::io::write(&file, b"down here").unwrap();
    let captured = place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap();
    assert_eq!((captured.files, captured.skipped), (1, vec![]));
    let first = captured.snapshot;
    let other = place._temporary.path().join("other");
    fs::create_dir(&other).unwrap();
    replayfork_snapshot::restore(&other, &place.store, &mut place.nodes, None, &first.node).unwrap();
    let again = replayfork_snapshot::Capturer::new(&other).capture(&place.store, &mut |_| Ok(())).unwrap();
    assert_eq!(again.snapshot, first);
}

#[test]
fn a_folder_too_deep_to_restore_is_reported_and_left_out() {
    let mut place = Place::new();
    let mut path = place.work.clone();
    for _ in 0..300 {
        path.push("d");
    }
    fs::create_dir_all(&path).unwrap();
    let captured = place.capturer.capture(&place.store, &mut |_| Ok(())).unwrap();
    assert_eq!(captured.skipped.len(), 1);
    assert!(captured.skipped[0].why.contains("too deep"), "{:?}", captured.skipped);
    place.clear();
    place.restore(None, &captured.snapshot);
    assert_eq!(place.capture(), captured.snapshot);
}

#[test]
fn a_hole_stays_one() {
    let mut place = Place::new();
    let file = fs::File::create(place.work.join("sparse")).unwrap();
    file.set_len(64 << 20).unwrap();
    drop(file);
    let first = place.capture();
    place.clear();
    place.restore(None, &first);
    let meta = fs::metadata(place.work.join("sparse")).unwrap();
    assert_eq!(meta.len(), 64 << 20);
    assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
}

#[test]
fn a_file_with_holes_is_the_same_as_one_with_zeros() {
    use std::os::unix::fs::FileExt;
    let mut place = Place::new();
    let noise: Vec<u8> = (0..3u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    // Data before, amid and after holes that are longer and shorter than a piece; a hole at the end.
    let parts = [(0u64, 1_500_000), (41_000_000, 700), (43_000_000, noise.len()), (90_000_001, 5)];
    let size = 130_000_000;
    let sparse = fs::File::create(place.work.join("sparse")).unwrap();
    for (at, length) in parts {
        sparse.write_all_at(&noise[..length], at).unwrap();
    }
    sparse.set_len(size).unwrap();
    let mut bytes = vec![0; size as usize];
    for (at, length) in parts {
        bytes[at as usize..][..length].copy_from_slice(&noise[..length]);
    }
    fs::write(place.work.join("zeros"), &bytes).unwrap();
    let captured = place.capture();
    let kind = |place: &mut Place, name: &[u8]| entry_at(&mut place.nodes, &mut &place.store, &captured.node, name).unwrap().unwrap().kind;
    let (one, other) = (kind(&mut place, b"sparse"), kind(&mut place, b"zeros"));
    assert_eq!(one, other);
    assert!(matches!(one, Kind::File { digest, .. } if digest == Digest::of(&bytes)));
    place.clear();
    place.restore(None, &captured);
    assert!(fs::read(place.work.join("sparse")).unwrap() == bytes);
}

#[test]
fn a_restore_touches_only_what_differs() {
    let mut place = Place::new();
    for name in ["same", "changed", "touched", "gone"] {
        fs::write(place.work.join(name), name).unwrap();
    }
    let first = place.capture();
    let inode = |name: &str| fs::metadata(place.work.join(name)).unwrap().ino();
    let before = [inode("same"), inode("touched")];
    fs::write(place.work.join("changed"), "otherwise").unwrap();
    fs::write(place.work.join("more"), "more").unwrap();
    fs::remove_file(place.work.join("gone")).unwrap();
    fs::File::open(place.work.join("touched")).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let then = list(&place.work);
    place.capturer.restore(&place.store, &first.node).unwrap();
    assert_eq!([inode("same"), inode("touched")], before);
    assert_ne!(list(&place.work), then);
    assert_eq!(place.capture(), first);
}

#[test]
fn what_no_snapshot_holds_goes_when_one_is_restored() {
    let mut place = Place::new();
    fs::create_dir(place.work.join("d")).unwrap();
    fs::write(place.work.join("d/f"), "f").unwrap();
    let (first, then) = (place.capture(), list(&place.work));
    let _socket = std::os::unix::net::UnixListener::bind(place.work.join("d/socket")).unwrap();
    place.capturer.restore(&place.store, &first.node).unwrap();
    assert_eq!(list(&place.work), then);
}
