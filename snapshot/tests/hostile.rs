//! Trees and packs that no capture of ours makes are refused, with the entry named.

mod place;

use std::fs;

use place::Place;
use replayfork_core::Digest;
use replayfork_snapshot::{BlobKind, Directory, Entry, Kind, PackBuilder, parse_pack, restore};

/// Stores blobs as any uploader could; their digests.
fn put(place: &Place, blobs: &[(BlobKind, &[u8])]) -> Vec<Digest> {
    let mut pack = PackBuilder::default();
    for (kind, bytes) in blobs {
        pack.add(Digest::of(bytes), *kind, bytes);
    }
    place.store.put_pack(&pack.finish()).unwrap();
    blobs.iter().map(|(_, bytes)| Digest::of(bytes)).collect()
}

fn entry(name: &[u8], kind: Kind) -> Entry {
    Entry { name: name.to_vec(), mtime: 0, kind }
}

fn file(size: u64, digest: Digest, chunks: Vec<Digest>) -> Kind {
    Kind::File { size, executable: false, digest, chunks }
}

/// What restoring a tree of these entries says.
fn refused(place: &mut Place, entries: Vec<Entry>) -> String {
    let node = put(place, &[(BlobKind::Directory, &Directory { entries }.encode())])[0];
    restore(&place.work, &place.store, &mut place.nodes, None, &node).unwrap_err().to_string()
}

#[test]
fn names_that_lead_out_are_refused() {
    for name in [&b".."[..], b".", b"../up", b"/etc/passwd", b"a/b", b"nul\0", b"", &[b'n'; 256]] {
        let mut place = Place::new();
        let said = refused(&mut place, vec![entry(name, Kind::Symlink { target: b"t".to_vec() })]);
        assert!(said.contains("refused") && said.contains(&format!("{:?}", replayfork_snapshot::path_text(name))), "{said}");
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
    let mut below = put(&place, &[(BlobKind::Directory, &Directory::default().encode())])[0];
    // Each level names the one below sixty thousand times.
    for _ in 0..3 {
        let kind = Kind::Directory { content: below, node: below };
        let entries = (0..60_000).map(|n| entry(format!("{n:05}").as_bytes(), kind.clone())).collect();
        below = put(&place, &[(BlobKind::Directory, &Directory { entries }.encode())])[0];
    }
    let said = restore(&place.work, &place.store, &mut place.nodes, None, &below).unwrap_err().to_string();
    assert!(said.contains("too many"), "{said}");
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
