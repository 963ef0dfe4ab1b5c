//! Cutting a directory into nodes.

use replayfork_core::Digest;
use replayfork_core::digest::Hasher;
use replayfork_core::model::SnapshotRef;

use super::{Kind, MAGIC, TOP};

/// Items of one node, at least and at most, where there is more than one node of its level: a node ends before an item whose name
/// says so, which every second one does, once it has the least, and in any case when it has the most.
const LEAST: usize = 4;
const MOST: usize = 10;

/// Makes a directory of entries that come in the order of their names; in memory are about ten of them a level.
///
/// A name's digest has a bit for each level: where that is set, a node may begin with the name. Up to ten items are never cut. So an
/// edit writes one small node a level anew, and a name that comes or goes only few more.
pub struct DirectoryBuilder {
    content: Hasher,
    levels: Vec<Level>,
}

/// A node of one level that is not yet complete, and what came before it is known to be one of several.
#[derive(Default)]
struct Level {
    items: Vec<Item>,
    /// There are more items than fit into one node.
    cut: bool,
}

struct Item {
    /// Of the digest of the first name that it holds.
    bits: u64,
    bytes: Vec<u8>,
}

impl Default for DirectoryBuilder {
    fn default() -> Self {
        Self { content: Hasher::new("directory"), levels: vec![Level::default()] }
    }
}

impl DirectoryBuilder {
    /// Adds a file or symlink. `keep` gets nodes that are complete, each before the one that names it.
    ///
    /// # Errors
    /// What `keep` gives.
    pub fn add<E>(&mut self, name: &[u8], mtime: i64, kind: &Kind, keep: &mut impl FnMut(Digest, &[u8]) -> Result<(), E>) -> Result<(), E> {
        self.add_as(name, mtime, kind, kind.identity(), keep)
    }

    /// Adds a directory; otherwise as [`DirectoryBuilder::add`].
    ///
    /// # Errors
    /// What `keep` gives.
    pub fn add_directory<E>(
        &mut self,
        name: &[u8],
        mtime: i64,
        SnapshotRef { content, node }: SnapshotRef,
        keep: &mut impl FnMut(Digest, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let identity = Hasher::new("entry").part("directory", content.as_bytes()).finish();
        self.add_as(name, mtime, &Kind::Directory { node }, identity, keep)
    }

    fn add_as<E>(
        &mut self,
        name: &[u8],
        mtime: i64,
        kind: &Kind,
        identity: Digest,
        keep: &mut impl FnMut(Digest, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.content.add("name", name);
        self.content.add("is", identity.as_bytes());
        let digest = Digest::of(name);
        let bits = u64::from_le_bytes(digest.0[..8].try_into().expect("eight bytes"));
        self.push(0, Item { bits, bytes: encode(name, mtime, kind) }, keep)
    }

    fn push<E>(&mut self, level: usize, item: Item, keep: &mut impl FnMut(Digest, &[u8]) -> Result<(), E>) -> Result<(), E> {
        if level == self.levels.len() {
            self.levels.push(Level::default());
        }
        let open = &mut self.levels[level];
        if !open.cut && open.items.len() == MOST {
            open.cut = true;
            for item in std::mem::take(&mut open.items) {
                self.append(level, item, keep)?;
            }
        }
        if self.levels[level].cut {
            return self.append(level, item, keep);
        }
        self.levels[level].items.push(item);
        Ok(())
    }

    /// Adds an item to a level that has several nodes.
    fn append<E>(&mut self, level: usize, item: Item, keep: &mut impl FnMut(Digest, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let filled = self.levels[level].items.len();
        if filled == MOST || (filled >= LEAST && item.bits >> level & 1 == 1) {
            self.end(level, keep)?;
        }
        self.levels[level].items.push(item);
        Ok(())
    }

    /// Ends the open node of a level that has several.
    fn end<E>(&mut self, level: usize, keep: &mut impl FnMut(Digest, &[u8]) -> Result<(), E>) -> Result<(), E> {
        let items = std::mem::take(&mut self.levels[level].items);
        let Some(bits) = items.first().map(|i| i.bits) else { return Ok(()) };
        let node = node(level as u8, None, &items);
        let digest = Digest::of(&node);
        keep(digest, &node)?;
        self.push(level + 1, Item { bits, bytes: digest.as_bytes().to_vec() }, keep)
    }

    /// The directory's content and its topmost node.
    ///
    /// # Errors
    /// What `keep` gives.
    pub fn finish<E>(mut self, keep: &mut impl FnMut(Digest, &[u8]) -> Result<(), E>) -> Result<SnapshotRef, E> {
        let mut level = 0;
        while self.levels[level].cut {
            self.end(level, keep)?;
            level += 1;
        }
        let content = self.content.finish();
        let bytes = node(level as u8, Some(&content), &self.levels[level].items);
        let node = Digest::of(&bytes);
        keep(node, &bytes)?;
        Ok(SnapshotRef { content, node })
    }
}

fn node(level: u8, content: Option<&Digest>, items: &[Item]) -> Vec<u8> {
    let mut out = Vec::with_capacity(MAGIC.len() + 33 + items.iter().map(|i| i.bytes.len()).sum::<usize>());
    out.extend_from_slice(MAGIC);
    out.push(if content.is_some() { level | TOP } else { level });
    out.extend_from_slice(content.map_or(&[], Digest::as_bytes));
    items.iter().for_each(|item| out.extend_from_slice(&item.bytes));
    out
}

fn encode(name: &[u8], mtime: i64, kind: &Kind) -> Vec<u8> {
    let mut out = Vec::with_capacity(name.len() + 64);
    let tag = match kind {
        Kind::File { executable: true, .. } => b'x',
        Kind::File { .. } => b'f',
        Kind::Symlink { .. } => b'l',
        Kind::Directory { .. } => b'd',
    };
    out.extend_from_slice(&[tag, name.len() as u8]);
    out.extend_from_slice(name);
    out.extend_from_slice(&mtime.to_le_bytes());
    match kind {
        Kind::File { size, digest, chunks, .. } => {
            number(&mut out, *size);
            out.extend_from_slice(digest.as_bytes());
            number(&mut out, chunks.len() as u64);
            chunks.iter().for_each(|chunk| out.extend_from_slice(chunk.as_bytes()));
        }
        Kind::Symlink { target } => {
            number(&mut out, target.len() as u64);
            out.extend_from_slice(target);
        }
        Kind::Directory { node } => out.extend_from_slice(node.as_bytes()),
    }
    out
}

/// Writes a number as LEB128.
fn number(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::convert::Infallible;
    use std::sync::Arc;

    use super::*;
    use crate::error::SnapshotError;
    use crate::node::{Body, Directory, Entry, Node};

    type Kept = HashMap<Digest, Node>;

    fn link(name: String, mtime: i64) -> Entry {
        Entry { name: name.into_bytes(), mtime, kind: Kind::Symlink { target: b"t".to_vec() } }
    }

    fn links(n: usize) -> Vec<Entry> {
        (0..n).map(|n| link(format!("{n:07}"), n as i64)).collect()
    }

    fn build(entries: &[Entry], kept: &mut Kept) -> SnapshotRef {
        let mut keep = |digest, bytes: &[u8]| {
            kept.insert(digest, Node::decode(bytes).unwrap());
            Ok::<_, Infallible>(())
        };
        let mut builder = DirectoryBuilder::default();
        for entry in entries {
            builder.add(&entry.name, entry.mtime, &entry.kind, &mut keep).unwrap();
        }
        builder.finish(&mut keep).unwrap()
    }

    fn read(node: &Digest, kept: &Kept) -> Directory {
        Directory::read(node, &mut |digest| kept.get(digest).cloned().map(Arc::new).ok_or(SnapshotError::Missing(*digest))).unwrap()
    }

    #[test]
    fn times_are_stored_and_are_no_part_of_the_content() {
        let mut kept = Kept::new();
        let (a, b) = (build(&[link("a".into(), 1)], &mut kept), build(&[link("a".into(), 2)], &mut kept));
        assert_eq!(a.content, b.content);
        assert_ne!(a.node, b.node);
        assert_eq!(read(&b.node, &kept).content(), b.content);
    }

    #[test]
    fn nodes_have_four_to_ten_items_and_give_back_every_entry() {
        for n in [0, 1, 3, 4, 9, 10, 11, 12, 20, 21, 99, 100, 101, 102, 1000, 20_000] {
            let (entries, mut kept) = (links(n), Kept::new());
            let SnapshotRef { node, content } = build(&entries, &mut kept);
            let directory = read(&node, &kept);
            assert_eq!((directory.content(), directory.len()), (content, n));
            assert!(directory.entries().eq(&entries));
            assert!(entries.iter().all(|e| directory.get(&e.name) == Some(e)));
            assert!(["", "0", "9", "0000000x"].iter().all(|name| directory.get(name.as_bytes()).is_none()));
            assert_eq!(kept.len() == 1, n <= MOST, "{n} entries");
            let items = |node: &Node| match &node.body {
                Body::Entries(entries) => entries.len(),
                Body::Parts { nodes, .. } => nodes.len(),
            };
            assert!(kept.values().all(|node| items(node) <= MOST));
            // Only the last one of a level may have fewer.
            for level in 0..kept[&node].level() {
                assert!(kept.values().filter(|node| node.level() == level && items(node) < LEAST).count() <= 1);
            }
        }
    }

    #[test]
    fn an_edit_and_a_name_that_comes_or_goes_make_few_nodes() {
        let (entries, mut kept) = (links(10_000), Kept::new());
        build(&entries, &mut kept);
        let before = kept.len();
        for at in (0..entries.len()).step_by(997) {
            let (mut edited, mut less, mut more) = (entries.clone(), entries.clone(), entries.clone());
            edited[at].mtime = -1;
            less.remove(at);
            more.insert(at, link(format!("{at:07}-"), 0));
            more.sort_by(|a, b| a.name.cmp(&b.name));
            for (changed, most) in [(edited, 7), (less, 20), (more, 20)] {
                let mut kept = kept.clone();
                build(&changed, &mut kept);
                assert!(kept.len() - before <= most, "{} new nodes at {at}", kept.len() - before);
            }
        }
    }

    #[test]
    fn a_node_that_is_cut_off_is_refused() {
        let mut whole = Vec::new();
        let mut keep = |_, bytes: &[u8]| {
            whole = bytes.to_vec();
            Ok::<_, Infallible>(())
        };
        let mut builder = DirectoryBuilder::default();
        builder.add(b"a", 0, &Kind::File { size: 300, executable: true, digest: Digest::of(b""), chunks: vec![] }, &mut keep).unwrap();
        builder.finish(&mut keep).unwrap();
        let empty = MAGIC.len() + 1 + 32;
        for cut in 0..whole.len() {
            assert!(cut == empty || Node::decode(&whole[..cut]).is_err(), "cut at {cut}");
        }
    }
}
