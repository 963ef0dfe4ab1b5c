//! A recorded run as planning sees it: its spans in order, its tree, and what each span changed.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::binding::Hole;
use crate::model::{RunEnvironment, Span};
use crate::patch::Refused;

/// Workspace paths that changed around a recorded span, relative to the root.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Changed {
    /// Between the predecessor's end and this span's start, outside of any span.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<String>,
    /// Between this span's start and end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub during: Vec<String>,
}

/// The record that a fork starts from.
pub struct Source {
    pub environment: RunEnvironment,
    /// In order of (ord, id).
    pub spans: Vec<Span>,
    pub changed: BTreeMap<String, Changed>,
    by_id: HashMap<String, usize>,
    by_name: HashMap<String, Vec<usize>>,
    parent: Vec<Option<usize>>,
    has_children: Vec<bool>,
}

impl Source {
    pub fn new(environment: RunEnvironment, mut spans: Vec<Span>, changed: BTreeMap<String, Changed>) -> Self {
        spans.sort_by(|a, b| (a.ord, &a.id).cmp(&(b.ord, &b.id)));
        let by_id: HashMap<_, _> = spans.iter().enumerate().map(|(i, s)| (s.id.clone(), i)).collect();
        let mut by_name: HashMap<String, Vec<usize>> = HashMap::new();
        for (i, span) in spans.iter().enumerate() {
            by_name.entry(span.opening.name.clone()).or_default().push(i);
        }
        let parent: Vec<_> = spans.iter().map(|s| s.opening.parent.as_ref().and_then(|p| by_id.get(p)).copied()).collect();
        let mut has_children = vec![false; spans.len()];
        for p in parent.iter().flatten() {
            has_children[*p] = true;
        }
        Self { environment, spans, changed, by_id, by_name, parent, has_children }
    }

    pub fn root(&self) -> Option<&str> {
        self.environment.workspace_root.as_deref()
    }

    pub fn index(&self, id: &str) -> Option<usize> {
        self.by_id.get(id).copied()
    }

    /// The span with this id, or the only one with this name.
    ///
    /// # Errors
    /// None or several; `field` says where the user wrote it.
    pub fn find(&self, field: &str, run: &str, span: &str) -> Result<usize, Refused> {
        if let Some(i) = self.index(span) {
            return Ok(i);
        }
        let (field, run, span) = (field.to_owned(), run.to_owned(), span.to_owned());
        match self.by_name.get(&span).map_or(&[][..], Vec::as_slice) {
            [one] => Ok(*one),
            [] => Err(Refused::SpanNotFound { field, run, span }),
            many => {
                let ids: Vec<_> = many.iter().take(5).map(|&i| self.spans[i].id.as_str()).collect();
                let more = if many.len() > 5 { ", …" } else { "" };
                Err(Refused::SpanAmbiguous { field, run, span, count: many.len(), ids: ids.join(", ") + more })
            }
        }
    }

    /// Parents of a span, innermost first. A loop of parents ends where it closes.
    pub fn ancestors(&self, span: usize) -> Vec<usize> {
        let mut chain = Vec::new();
        let mut at = self.parent[span];
        while let Some(p) = at {
            if p == span || chain.contains(&p) {
                break;
            }
            chain.push(p);
            at = self.parent[p];
        }
        chain
    }

    /// No executor, but children: it only holds others together.
    pub fn is_container(&self, span: usize) -> bool {
        self.spans[span].opening.executor.is_none() && self.has_children[span]
    }

    /// The outermost ancestor with an executor: the unit that runs instead of this span.
    pub fn unit_above(&self, span: usize) -> Option<usize> {
        self.ancestors(span).into_iter().rev().find(|&a| self.spans[a].opening.executor.is_some())
    }

    /// Whether the span is one that plans and replays treat by itself.
    pub fn is_unit(&self, span: usize) -> bool {
        !self.is_container(span) && self.unit_above(span).is_none()
    }

    /// What a hole in a binding of `span` refers to: the nearest earlier span that had ended when this one started.
    ///
    /// # Errors
    /// No such span, in words.
    pub fn resolve(&self, span: usize, hole: &Hole) -> Result<usize, String> {
        let started = self.spans[span].opening.started;
        let earlier = |&i: &usize| i < span && self.spans[i].closing.as_ref().is_some_and(|c| c.ended <= started);
        match hole {
            Hole::Name(name) => {
                let named = self.by_name.get(name).map_or(&[][..], Vec::as_slice);
                named
                    .iter()
                    .rev()
                    .copied()
                    .find(|i| earlier(i))
                    .ok_or_else(|| format!("no span called {name:?} had ended when {:?} started", self.spans[span].opening.name))
            }
            Hole::Id(id) => self
                .index(id)
                .filter(earlier)
                .ok_or_else(|| format!("no span with the id {id:?} had ended when {:?} started", self.spans[span].opening.name)),
        }
    }

    pub fn changed(&self, span: usize) -> &Changed {
        static NOTHING: Changed = Changed { before: Vec::new(), during: Vec::new() };
        self.changed.get(&self.spans[span].id).unwrap_or(&NOTHING)
    }
}
