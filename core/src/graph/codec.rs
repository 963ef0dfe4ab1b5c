//! A graph as bytes, in parts that are stored and read apart.

use std::collections::BTreeSet;

use super::{CHUNK, Container, Graph, NONE, Pat, Traits, Tree, tree};
use crate::bytes::{Broken, Reader, Writer, numbers};
use crate::concurrency::Group;
use crate::footprint::Pattern;

/// Spans that a run may have to be planned.
pub const MAX_SPANS: usize = 1 << 30;

/// The bytes of four numbers.
fn sixteen(words: &[u32]) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes.iter_mut().zip(words.iter().flat_map(|w| w.to_le_bytes())).for_each(|(to, byte)| *to = byte);
    bytes
}

/// Parts of the list of paths.
pub const PATH_PARTS: usize = 256;

/// The parts of the list of paths in which these and the folders that they lie in are.
pub fn path_parts<'p>(patterns: impl IntoIterator<Item = &'p Pattern>) -> BTreeSet<usize> {
    let paths = patterns.into_iter().flat_map(|pattern| Tree::chain(pattern.path()));
    paths.map(|path| tree::key(path)[0] as usize).collect()
}

impl Graph {
    /// What every walk reads.
    pub fn encode_head(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.number(self.spans as u32);
        out.number(self.units as u32);
        out.number(u32::from(self.has_workspace));
        out.numbers(&self.traits.iter().map(|t| t.0).collect::<Vec<_>>());
        out.numbers(&self.containers.iter().flat_map(|c| [c.span, c.above, u32::from(c.runs)]).collect::<Vec<_>>());
        out.numbers(&self.tree.parents);
        let index = |member: &usize| *member as u32;
        let group = |g: &Group| {
            let last = g.last_ended.map_or(NONE, |l| l as u32);
            [g.members.len() as u32, u32::from(g.separable), last].into_iter().chain(g.members.iter().map(index)).collect::<Vec<_>>()
        };
        out.numbers(&self.groups.iter().flat_map(group).collect::<Vec<_>>());
        let inner = |(unit, inner): (&u32, &Vec<u32>)| [&[*unit, inner.len() as u32][..], inner].concat();
        out.numbers(&self.inner.iter().flat_map(inner).collect::<Vec<_>>());
        out.numbers(&self.left_out);
        let unknown = |(span, pats): &(u32, Vec<Pat>)| {
            let pats = pats.iter().map(|p| p.node << 1 | u32::from(p.below));
            [*span, pats.len() as u32].into_iter().chain(pats).collect::<Vec<_>>()
        };
        out.numbers(&self.unknown.iter().flat_map(unknown).collect::<Vec<_>>());
        out.number(self.outside.len() as u32);
        for (span, path, more) in &self.outside {
            out.number(*span);
            out.text(path);
            out.number(*more);
        }
        out.finish()
    }

    /// A graph without streams, names of paths, and requests.
    ///
    /// # Errors
    /// Bytes that [`Graph::encode_head`] of this version did not write.
    pub fn decode_head(bytes: &[u8]) -> Result<Self, Broken> {
        let mut input = Reader::new(bytes)?;
        let mut graph = Self { spans: input.number()? as usize, units: i64::from(input.number()?), ..Self::default() };
        graph.has_workspace = input.number()? == 1;
        graph.traits = input.numbers()?.into_iter().map(Traits).collect();
        let containers = input.numbers()?;
        graph.containers = containers.chunks_exact(3).map(|c| Container { span: c[0], above: c[1], runs: c[2] == 1 }).collect();
        graph.tree = Tree { parents: input.numbers()?, known: Default::default() };
        let groups = input.numbers()?;
        let mut rest = &groups[..];
        while let [members, separable, last, more @ ..] = rest {
            let (members, more) = more.split_at_checked(*members as usize).ok_or(Broken)?;
            let last_ended = Some(*last).filter(|l| *l != NONE).map(|l| l as usize);
            graph.groups.push(Group { members: members.iter().map(|m| *m as usize).collect(), separable: *separable == 1, last_ended });
            rest = more;
        }
        let inner = input.numbers()?;
        let mut rest = &inner[..];
        while let [unit, n, more @ ..] = rest {
            let (inner, more) = more.split_at_checked(*n as usize).ok_or(Broken)?;
            graph.inner.insert(*unit, inner.to_vec());
            rest = more;
        }
        graph.left_out = input.numbers()?;
        let unknown = input.numbers()?;
        let mut rest = &unknown[..];
        while let [span, n, more @ ..] = rest {
            let (pats, more) = more.split_at_checked(*n as usize).ok_or(Broken)?;
            graph.unknown.push((*span, pats.iter().map(|p| Pat { node: p >> 1, below: p & 1 == 1 }).collect()));
            rest = more;
        }
        for _ in 0..input.number()? {
            graph.outside.push((input.number()?, input.text()?.to_owned(), input.number()?));
        }
        graph.streams = vec![Vec::new(); graph.spans.div_ceil(CHUNK)];
        Ok(graph)
    }

    /// Streams by place, each of [`CHUNK`] spans.
    pub fn encode_streams(&self) -> impl Iterator<Item = Vec<u8>> + '_ {
        self.streams.iter().map(|stream| stream.iter().flat_map(|n| n.to_le_bytes()).collect())
    }

    /// # Errors
    /// A place that the run does not have.
    pub fn take_stream(&mut self, place: usize, bytes: &[u8]) -> Result<(), Broken> {
        *self.streams.get_mut(place).ok_or(Broken)? = numbers(bytes);
        Ok(())
    }

    /// Where a patch names paths, the parts of this list at [`path_parts`] are needed.
    pub fn encode_paths(&self) -> Vec<Vec<u8>> {
        let mut parts = vec![Vec::new(); PATH_PARTS];
        for (key, node) in &self.tree.known {
            parts[key[0] as usize].extend(numbers(key).into_iter().chain([*node]));
        }
        let part = |part: Vec<u32>| {
            let mut out = Writer::default();
            out.numbers(&part);
            out.finish()
        };
        parts.into_iter().map(part).collect()
    }

    /// # Errors
    /// Bytes that [`Graph::encode_paths`] did not write.
    pub fn take_paths(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        for entry in Reader::new(bytes)?.numbers()?.chunks_exact(5) {
            if entry[4] as usize >= self.tree.parents.len() {
                return Err(Broken);
            }
            self.tree.known.insert(sixteen(entry), entry[4]);
        }
        Ok(())
    }

    /// Requests of model calls: needed where the record answers them.
    pub fn encode_requests(&self) -> Vec<u8> {
        let mut out = Writer::default();
        let digest = |d: &[u8; 16]| numbers(d);
        let request = |(span, request, answered): &(u32, [u8; 16], bool)| [vec![*span, u32::from(*answered)], digest(request)].concat();
        out.numbers(&self.requests.iter().flat_map(request).collect::<Vec<_>>());
        out.finish()
    }

    /// # Errors
    /// Bytes that [`Graph::encode_requests`] did not write.
    pub fn take_requests(&mut self, bytes: &[u8]) -> Result<(), Broken> {
        let all = Reader::new(bytes)?.numbers()?;
        self.requests = all.chunks_exact(6).map(|r| (r[0], sixteen(&r[2..]), r[1] == 1)).collect();
        Ok(())
    }
}
