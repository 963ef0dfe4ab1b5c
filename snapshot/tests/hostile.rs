//! Trees and packs that no capture of ours makes are refused, with the entry named.

mod place;

use std::fs;

use place::Place;
use replayfork_core::Digest;
use replayfork_core::model::SnapshotRef;
use replayfork_snapshot::{BlobKind, DirectoryBuilder, Kind, Nodes, PackBuilder, SnapshotError, parse_pack, restore};

/// Stores blobs as any uploader could; their digests.
fn put(place: &Place, blobs: &[(BlobKind, &[u8])]) -> Vec<Digest> {
    let mut pack = PackBuilder::default();
    for (kind, bytes) in blobs {
        pack.add(Digest::of(bytes), *kind, bytes);
    }
    place.store.put_pack(&pack.finish()).unwrap();
    blobs.iter().map(|(_, bytes)| Digest::of(bytes)).collect()
}

type Entry = (Vec<u8>, Kind);

fn entry(name: &[u8], kind: Kind) -> Entry {
    (name.to_vec(), kind)
}

fn file(size: u64, digest: Digest, chunks: Vec<Digest>) -> Kind {
    Kind::File { size, executable: false, digest, chunks }
}

/// Stores a directory; its topmost node.
fn directory(place: &Place, entries: &[Entry]) -> Digest {
    let mut pack = PackBuilder::default();
    let mut keep = |digest, bytes: &[u8]| {
        pack.add(digest, BlobKind::Directory, bytes);
        Ok::<_, SnapshotError>(())
    };
    let mut builder = DirectoryBuilder::default();
    for (name, kind) in entries {
        match kind {
            Kind::Directory { node } => builder.add_directory(name, 0, SnapshotRef { content: *node, node: *node }, &mut keep),
            kind => builder.add(name, 0, kind, &mut keep),
        }
        .unwrap();
    }
    let node = builder.finish(&mut keep).unwrap().node;
    place.store.put_pack(&pack.finish()).unwrap();
    node
}

/// What restoring a tree of these entries says.
fn refused(place: &mut Place, entries: Vec<Entry>) -> String {
    let node = directory(place, &entries);
    restore(&place.work, &place.store, &mut Nodes::default(), None, &node).unwrap_err().to_string()
}

#[test]
fn names_that_lead_out_are_refused() {
    for name in [&b".."[..], b".", b"../up", b"/etc/passwd", b"a/b", b"nul\0", b""] {
        let mut place = Place::new();
        let said = refused(&mut place, vec![entry(name, Kind::Symlink { target: b"t".to_vec() })]);
        let named = name.is_empty() || said.contains(&format!("{:?}", replayfork_snapshot::path_text(name)));
        assert!(said.contains("refused") && named, "{said}");
        assert_eq!(fs::read_dir(&place.work).unwrap().count(), 0);
    }
}

#[test]
fn sizes_that_are_not_those_of_the_contents_are_refused() {
    let mut place = Place::new();
    let content = put(&place, &[(BlobKind::Data, b"five!")])[0];
    for (size, chunks) in [(4, vec![]), (6, vec![]), (4, vec![content]), (11, vec![content, content])] {
        let said = refused(&mut place, vec![entry(b"liar", file(size, content, chunks))]);
        assert!(said.contains("liar"), "{said}");
    }
}

#[test]
fn a_blob_that_is_missing_is_named() {
    let mut place = Place::new();
    let missing = Digest::of(b"never stored");
    for chunks in [vec![], vec![missing]] {
        let said = refused(&mut place, vec![entry(b"f", file(12, missing, chunks))]);
        assert!(said.contains(&missing.to_string()), "{said}");
    }
}

#[test]
fn a_tree_that_claims_any_number_of_entries_is_refused() {
    let mut place = Place::new();
    let mut below = directory(&place, &[]);
    // Each level names the one below sixty thousand times.
    for _ in 0..3 {
        let entries: Vec<_> = (0..60_000).map(|n| entry(format!("{n:05}").as_bytes(), Kind::Directory { node: below })).collect();
        below = directory(&place, &entries);
    }
    let said = restore(&place.work, &place.store, &mut place.nodes, None, &below).unwrap_err().to_string();
    assert!(said.contains("too many"), "{said}");
    assert_eq!(fs::read_dir(&place.work).unwrap().count(), 0);
}

/// A node's bytes; `top`: it is a directory's topmost.
fn node(level: u8, top: bool, body: &[u8]) -> Vec<u8> {
    let content: &[u8] = if top { &[7; 32] } else { &[] };
    [b"RFT2", &[if top { level | 0x80 } else { level }][..], content, body].concat()
}

/// Symlinks' part of a node.
fn links(names: &[&str]) -> Vec<u8> {
    names.iter().flat_map(|name| [b"l", &[name.len() as u8][..], name.as_bytes(), &[0; 8], b"\x01t"].concat()).collect()
}

#[test]
fn parts_that_are_no_directory_together_are_refused() {
    let mut place = Place::new();
    let leaf = |names: &[&str]| node(0, false, &links(names));
    let blobs = [leaf(&["a", "c"]), leaf(&["b", "d"]), leaf(&["c", "d"]), leaf(&["e", "f"]), node(0, true, &links(&["e"]))];
    let blobs: Vec<_> = blobs.iter().map(|b| (BlobKind::Directory, b.as_slice())).collect();
    let [ac, bd, cd, ef, whole] = put(&place, &blobs)[..] else { panic!("five blobs") };
    let of = |level, top, digests: &[Digest]| node(level, top, &digests.iter().flat_map(|d| d.0).collect::<Vec<u8>>());
    let inner = put(&place, &[(BlobKind::Directory, &of(1, false, &[ac, ef]))])[0];
    let missing = Digest::of(b"never stored");
    for (top, entry, why) in [
        (of(1, true, &[ac, bd]), "b".into(), "out of order"),
        (of(1, true, &[ef, ac]), "a".into(), "out of order"),
        (of(1, true, &[ac, cd]), "c".into(), "twice"),
        (of(1, true, &[ac, ac]), "a".into(), "twice"),
        (of(2, true, &[inner, inner]), "a".into(), "twice"),
        (of(1, true, &[ac, whole]), whole.to_string(), "in the place of a part"),
        (of(2, true, &[ac, ef]), ac.to_string(), "another level"),
        (of(1, true, &[inner]), inner.to_string(), "another level"),
        (of(17, true, &[inner]), String::new(), "too high a level"),
        (of(1, true, &[]), String::new(), "nothing in it"),
        (of(1, false, &[ac, ef]), String::new(), "only a part"),
        (leaf(&["a"]), String::new(), "only a part"),
        (of(1, true, &[ac, missing]), missing.to_string(), "not in the store"),
        (node(1, true, &[1; 40]), String::new(), "cut off"),
        (node(0, true, &links(&["b", "a"])), "a".into(), "out of order"),
        (node(0, true, b"l\x01a\0\0\0\0\0\0\0\0\x81\x00t"), "a".into(), "another way"),
        (node(0, true, b"?\x01a\0\0\0\0\0\0\0\0"), "a".into(), "unknown type"),
    ] {
        let digest = put(&place, &[(BlobKind::Directory, &top)])[0];
        let entry = if entry.is_empty() { digest.to_string() } else { entry };
        let said = restore(&place.work, &place.store, &mut Nodes::default(), None, &digest).unwrap_err().to_string();
        assert!(said.contains(&entry) && said.contains(why), "{why}, {entry}: {said}");
        place.nodes.get(&mut place.store, &digest).unwrap_err();
    }
    // A part is no directory for another entry either.
    let said = refused(&mut place, vec![entry(b"d", Kind::Directory { node: ef })]);
    assert!(said.contains(&ef.to_string()) && said.contains("only a part"), "{said}");
    assert_eq!(fs::read_dir(&place.work).unwrap().count(), 0);
}

#[test]
fn broken_packs_are_refused_or_found() {
    let mut place = Place::new();
    fs::write(place.work.join("a"), "content of a").unwrap();
    fs::write(place.work.join("b"), vec![7; 400_000]).unwrap();
    let snapshot = place.capture();
    let folder = place.store.folder().to_owned();
    let packs = || fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).filter(|p| p.extension().is_some_and(|e| e == "pack"));
    let path = packs().next().unwrap();
    let whole = fs::read(&path).unwrap();
    let frames = parse_pack(&whole).unwrap().frames.len();
    // A bit of a frame, the end of the frames, the end of the index.
    for broken in [
        {
            let mut bytes = whole.clone();
            *bytes.last_mut().unwrap() ^= 1;
            bytes
        },
        whole[..whole.len() - 3].to_vec(),
        whole[..whole.len() - frames - 3].to_vec(),
        b"no pack at all".to_vec(),
        vec![],
    ] {
        fs::write(&path, &broken).unwrap();
        let store = replayfork_snapshot::LocalStore::open(&folder).unwrap();
        assert!(!store.fsck().unwrap().is_empty());
        fs::remove_dir_all(&place.work).unwrap();
        fs::create_dir(&place.work).unwrap();
        restore(&place.work, &store, &mut place.nodes, None, &snapshot.node).unwrap_err();
    }
}
