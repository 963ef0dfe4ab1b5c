//! Folders whose entries lie in several nodes.

mod place;

use std::collections::BTreeSet;
use std::fs;

use place::Place;
use proptest::prelude::*;
use replayfork_snapshot::{Capturer, LocalStore, Nodes, diff, entry_at, restore};

/// Writes a file with a time that depends on its name alone.
fn write(place: &Place, name: &str) {
    let path = place.work.join(name);
    fs::write(&path, name).unwrap();
    fs::File::open(path).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
}

#[test]
fn folders_of_any_size_come_back() {
    for n in [0, 1, 10, 11, 12, 40, 101, 1500] {
        let mut place = Place::new();
        fs::create_dir(place.work.join("d")).unwrap();
        for file in 0..n {
            write(&place, &format!("d/{file}"));
        }
        let first = place.capture();
        assert_eq!(place.store.fsck().unwrap(), []);
        for file in 0..n {
            let path = format!("d/{file}");
            assert!(entry_at(&mut place.nodes, &mut place.store, &first.node, path.as_bytes()).unwrap().is_some(), "{path}");
        }
        assert!(entry_at(&mut place.nodes, &mut place.store, &first.node, b"d/x").unwrap().is_none());
        let changes = diff(&mut place.nodes, &mut place.store, None, Some(&first.node)).unwrap();
        assert_eq!(changes.len(), n + 1);
        place.clear();
        place.restore(None, &first);
        assert_eq!(place.capture(), first);
    }
}

#[test]
fn every_blob_that_a_large_folder_needs_is_listed_once_after_what_names_it() {
    let mut place = Place::new();
    for file in 0..300 {
        write(&place, &format!("{file}"));
    }
    let first = place.capture();
    write(&place, "more");
    let second = place.capture();
    let all = replayfork_snapshot::reachable(&mut place.nodes, &mut place.store, &second.node, None).unwrap();
    let more = replayfork_snapshot::reachable(&mut place.nodes, &mut place.store, &second.node, Some(&first.node)).unwrap();
    assert_eq!(all[0], second.node);
    assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    assert!(all.len() > 330, "{} blobs", all.len());
    assert!(more.len() < 20, "{} blobs", more.len());
    // Nothing else is needed.
    let other = LocalStore::open(&place._temporary.path().join("other")).unwrap();
    let mut pack = replayfork_snapshot::PackBuilder::default();
    for digest in &all {
        let kind =
            if place.nodes.contains(digest) { replayfork_snapshot::BlobKind::Directory } else { replayfork_snapshot::BlobKind::Data };
        pack.add(*digest, kind, &place.store.read(digest).unwrap());
    }
    other.put_pack(&pack.finish()).unwrap();
    assert_eq!(other.fsck().unwrap(), []);
    let target = place._temporary.path().join("target");
    fs::create_dir(&target).unwrap();
    restore(&target, &other, &mut Nodes::default(), None, &second.node).unwrap();
    assert_eq!(Capturer::new(&target).capture(&other, &mut |_| Ok(())).unwrap().snapshot.content, second.content);
}

#[test]
fn an_edit_in_a_large_folder_stores_little() {
    let mut place = Place::new();
    for file in 0..5000 {
        write(&place, &format!("{file}"));
    }
    place.capture();
    let bytes = |place: &Place| {
        let files = fs::read_dir(place.store.folder()).unwrap().flatten();
        files.filter(|e| e.path().extension().is_some_and(|e| e == "pack")).map(|e| e.metadata().unwrap().len()).sum::<u64>()
    };
    let before = bytes(&place);
    fs::write(place.work.join("77"), "edited").unwrap();
    place.capture();
    let edit = bytes(&place) - before;
    assert!(edit < 3500, "{edit} bytes");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn equal_folders_have_equal_digests_whatever_they_were_before(
        steps in prop::collection::vec(prop::collection::vec((0u32..400, any::<bool>()), 1..120), 1..6)
    ) {
        let (mut grown, mut fresh) = (Place::new(), Place::new());
        let mut names = BTreeSet::new();
        let mut last = None;
        for step in steps {
            for (name, there) in step {
                let name = name.to_string();
                if there {
                    write(&grown, &name);
                    names.insert(name);
                } else if names.remove(&name) {
                    fs::remove_file(grown.work.join(name)).unwrap();
                }
            }
            last = Some(grown.capture());
        }
        for name in names.iter().rev() {
            write(&fresh, name);
        }
        prop_assert_eq!(Some(fresh.capture()), last);
        prop_assert_eq!(grown.store.fsck().unwrap(), vec![]);
    }
}
