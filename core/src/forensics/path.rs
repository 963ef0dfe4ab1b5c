//! From the span that decides how a run ended to the root cause, upstream through everything that failed or is blocked.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{End, MAX_LISTED, SpanRef, failed};
use crate::binding::{self, Hole};
use crate::footprint::Pattern;
use crate::model::Status;
use crate::source::Source;

/// Paths of a declared folder that are looked at for who wrote them last.
const MAX_PATHS: usize = 1000;

/// How a span depends on the one before it on the path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Via {
    /// It needs that span's output: for this binding, or by `depends_on`.
    Output {
        of: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        binding: Option<String>,
    },
    /// It holds that span.
    Child { of: String },
    /// It sees a path that that span wrote or would have written.
    File {
        of: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        path: Option<String>,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Link {
    pub span: SpanRef,
    /// Absent for the root cause, and where links before it are left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub via: Option<Via>,
    /// The same in words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub because: String,
}

pub(super) struct Walk<'s> {
    source: &'s Source,
    end: End<'s>,
    recovered: &'s [bool],
    children: HashMap<usize, Vec<usize>>,
    /// Who changed a path, in order of sequence.
    writers: BTreeMap<&'s str, Vec<usize>>,
}

impl<'s> Walk<'s> {
    pub fn new(source: &'s Source, end: End<'s>, recovered: &'s [bool]) -> Self {
        let mut children: HashMap<usize, Vec<usize>> = HashMap::new();
        let mut writers: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for at in 0..source.spans.len() {
            if let Some(parent) = source.parent(at) {
                children.entry(parent).or_default().push(at);
            }
            let closing = source.spans[at].closing.as_ref();
            let unknown = closing.map_or(&[][..], |c| &c.unknown);
            for path in source.changed(at).during.iter().chain(unknown) {
                writers.entry(path.trim_end_matches('/')).or_default().push(at);
            }
        }
        Self { source, end, recovered, children, writers }
    }

    /// It failed, did not run, or never ended.
    fn troubled(&self, span: usize) -> bool {
        let record = &self.source.spans[span];
        failed(self.source, span)
            || record.verdict().refuses()
            || match record.status() {
                Status::Blocked | Status::Canceled => true,
                Status::Running => self.end.outcome.is_some(),
                Status::Completed | Status::Failed | Status::Skipped => false,
            }
    }

    /// The span that decides how the run ended; `None` where it ended well.
    pub fn end(&self) -> Option<usize> {
        let decider = self.end.decided_by.and_then(|id| self.source.index(id));
        if let Some(decider) = decider.filter(|&d| self.troubled(d)) {
            return Some(decider);
        }
        if self.end.outcome == Some(Status::Completed) {
            return None;
        }
        let counts = |&span: &usize| {
            let below = self.children.get(&span).map_or(&[][..], Vec::as_slice);
            self.troubled(span) && !self.recovered[span] && !below.iter().any(|&c| self.troubled(c) && !self.recovered[c])
        };
        let mut end = (0..self.source.spans.len()).rev().find(counts)?;
        for above in self.source.ancestors(end) {
            if !self.troubled(above) {
                break;
            }
            end = above;
        }
        Some(end)
    }

    /// Spans from the root cause to `end`, each with how it depends on the one before.
    pub fn path_to(&self, end: usize) -> Vec<(usize, Option<Via>)> {
        let mut seen = HashSet::from([end]);
        let mut downstream: HashMap<usize, (usize, Via)> = HashMap::new();
        let mut queue = VecDeque::from([(end, 0)]);
        // The deepest that depends on nothing troubled; of several the earliest.
        let mut root = (end, None);
        while let Some((at, depth)) = queue.pop_front() {
            let upstream = self.upstream(at);
            if upstream.is_empty() && root.1.is_none_or(|best| depth > best || (depth == best && at < root.0)) {
                root = (at, Some(depth));
            }
            for (next, via) in upstream {
                if seen.insert(next) {
                    downstream.insert(next, (at, via));
                    queue.push_back((next, depth + 1));
                }
            }
        }
        let (mut at, mut via) = (root.0, None);
        let mut path = Vec::new();
        loop {
            path.push((at, via.take()));
            match downstream.remove(&at) {
                Some((below, how)) => (at, via) = (below, Some(how)),
                None => return path,
            }
        }
    }

    /// What failed or is blocked among all that a span depends on.
    fn upstream(&self, span: usize) -> Vec<(usize, Via)> {
        let source = self.source;
        let id = |of: usize| source.spans[of].id.clone();
        let mut found: Vec<(usize, Via)> = Vec::new();
        // What its containers are bound to is an input of its own.
        for at in std::iter::once(span).chain(source.ancestors(span)) {
            let opening = &source.spans[at].opening;
            for (field, bound) in &opening.input_bindings {
                let holes = binding::templates(bound).into_iter().filter_map(|t| binding::holes(t).ok()).flatten();
                let resolved = holes.filter_map(|hole: Hole| source.resolve(at, &hole).ok());
                found.extend(resolved.map(|of| (of, Via::Output { of: id(of), binding: Some(field.clone()) })));
            }
            let explicit = opening.depends_on.iter().filter_map(|of| source.index(of));
            found.extend(explicit.map(|of| (of, Via::Output { of: id(of), binding: None })));
        }
        let children = self.children.get(&span).map_or(&[][..], Vec::as_slice);
        let failing = |c: &&usize| self.troubled(**c);
        let last = children.iter().rev().filter(|&&c| !self.recovered[c]).find(failing).or_else(|| children.iter().rev().find(failing));
        found.extend(last.map(|&c| (c, Via::Child { of: id(c) })));
        if self.troubled(span) {
            found.extend(self.writers_of(span).into_iter().map(|(of, path)| (of, Via::File { of: id(of), path: Some(path) })));
        }
        // A blocked span says itself what it waits for; through files where nothing else leads there.
        let reasons = source.spans[span].closing.iter().flat_map(|c| &c.blocked);
        let named = reasons.filter_map(|b| source.index(b.upstream.as_deref()?));
        found.extend(named.map(|of| (of, Via::File { of: id(of), path: None })));
        let mut seen = HashSet::new();
        found.retain(|&(of, _)| of != span && self.troubled(of) && seen.insert(of));
        found
    }

    /// Who wrote last what the span declares to see. An undeclared footprint is everything, and says nothing of a cause.
    fn writers_of(&self, span: usize) -> Vec<(usize, String)> {
        let mut writers = Vec::new();
        for pattern in self.source.footprint(span).sees {
            let path = pattern.path();
            if path.is_empty() {
                continue;
            }
            let below = format!("{path}/");
            let exact = self.writers.get_key_value(path).into_iter();
            let inside = self.writers.range(below.as_str()..).take_while(|(p, _)| p.starts_with(&below)).take(MAX_PATHS);
            let inside = inside.filter(|_| matches!(pattern, Pattern::Below(_)));
            for (path, by) in exact.chain(inside) {
                let last = by[..by.partition_point(|&w| w < span)].last();
                writers.extend(last.map(|&w| (w, (*path).to_owned())));
            }
        }
        writers
    }
}

/// In words; of a very long path the beginning and the end.
pub(super) fn describe(source: &Source, mut path: Vec<(usize, Option<Via>)>) -> Vec<Link> {
    if path.len() > MAX_LISTED {
        let tail = path.split_off(path.len() - MAX_LISTED / 2);
        path.truncate(MAX_LISTED - tail.len());
        path.extend(tail);
    }
    let name = |id: &str| source.index(id).map_or_else(|| id.to_owned(), |i| source.spans[i].opening.name.clone());
    let because = |via: &Via| match via {
        Via::Output { of, binding: Some(field) } => format!("its {field} needs the output of `{}`", name(of)),
        Via::Output { of, binding: None } => format!("it depends on `{}`", name(of)),
        Via::Child { of } => format!("it holds `{}`", name(of)),
        Via::File { of, path: Some(path) } => format!("it sees {path}, which `{}` wrote or would have written", name(of)),
        Via::File { of, path: None } => format!("it sees files that `{}` would have written", name(of)),
    };
    path.into_iter()
        .map(|(at, via)| Link { span: SpanRef::of(source, at), because: via.as_ref().map(because).unwrap_or_default(), via })
        .collect()
}
