//! A recorded run as planning sees it: its spans in order, its tree, what each span changed, and which ran at the same time.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::binding::Hole;
use crate::concurrency::{self, Group};
use crate::footprint::{Footprint, pattern};
use crate::model::{RunEnvironment, SnapshotRef, Span, Status};
use crate::patch::{Patch, Refused};

/// Workspace paths that changed around a recorded span, relative to the root.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Changed {
    /// Between the predecessor's end and this span's start, outside of any span.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub before: Vec<String>,
    /// By this span; of spans whose changes can't be told apart, by any of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub during: Vec<String>,
    /// Of those, the ones outside of what it declares to write: they void its declaration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub outside: Vec<String>,
    /// Beyond what it declares, what it saw through symlinks: declared paths that they lead to, a folder with `/` at its end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub through: Vec<String>,
}

/// What the recorded workspace has at a path that a FileContentOverride writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileFact {
    /// It is a file with the patch's content and x bit already; absent where its state at that moment was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same: Option<bool>,
    /// It is a file with its x bit set.
    pub executable: bool,
}

/// The workspace that a SnapshotOverride names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotFact {
    pub state: SnapshotRef,
    /// Paths that differ in it from the recorded workspace before the span; absent where that was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<Vec<String>>,
}

/// What patches meet in the recorded workspaces; looked up by whoever has them. By id of the target span.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Facts {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, BTreeMap<String, FileFact>>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub snapshots: BTreeMap<String, SnapshotFact>,
}

/// The record that a fork starts from.
pub struct Source {
    pub environment: RunEnvironment,
    /// In order of (ord, id).
    pub spans: Vec<Span>,
    pub changed: BTreeMap<String, Changed>,
    pub facts: Facts,
    /// Output, file and snapshot patches of the forks that this run comes from, each with its target's id.
    pub inherited: Vec<Patch>,
    by_id: HashMap<String, usize>,
    by_name: HashMap<String, Vec<usize>>,
    parent: Vec<Option<usize>>,
    has_children: Vec<bool>,
    /// The outermost ancestor with an executor.
    unit_above: Vec<Option<usize>>,
    inner: BTreeMap<usize, Vec<usize>>,
    groups: Vec<Group>,
    group_of: HashMap<usize, usize>,
    /// From here on a fork has walked the run, one step after the other.
    walked_from: usize,
    /// Of a part of a run: its first span that a walk comes to.
    begin: Option<usize>,
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
        let mut source = Self {
            environment,
            unit_above: vec![None; spans.len()],
            spans,
            changed,
            facts: Facts::default(),
            inherited: Vec::new(),
            by_id,
            by_name,
            parent,
            has_children,
            inner: BTreeMap::new(),
            groups: Vec::new(),
            group_of: HashMap::new(),
            walked_from: usize::MAX,
            begin: None,
        };
        source.walked_from = source.spans.iter().position(|s| s.first_recorded.is_some()).unwrap_or(usize::MAX);
        for i in 0..source.spans.len() {
            let unit = source.ancestors(i).into_iter().rev().find(|&a| source.spans[a].opening.executor.is_some());
            source.unit_above[i] = unit;
            if let Some(unit) = unit {
                source.inner.entry(unit).or_default().push(i);
            }
        }
        source.groups = concurrency::groups(&source);
        source.group_of = source.groups.iter().enumerate().flat_map(|(g, group)| group.members.iter().map(move |&m| (m, g))).collect();
        source
    }

    /// Some spans of a run, with all that each is in, all that is in it and all that it needs; `containers` are those that hold
    /// others, whether these are there or not; `begin` is the index of the first one that the walk comes to. What ran at the same
    /// time, and the workspace's states, are not known to it.
    pub fn part(
        environment: RunEnvironment,
        spans: Vec<Span>,
        changed: BTreeMap<String, Changed>,
        containers: &HashSet<String>,
        begin: usize,
    ) -> Self {
        let mut source = Self::new(environment, spans, changed);
        source.begin = Some(begin);
        for (i, span) in source.spans.iter().enumerate() {
            source.has_children[i] |= containers.contains(&span.id);
        }
        source
    }

    #[must_use]
    pub fn with_facts(mut self, facts: Facts) -> Self {
        self.facts = facts;
        self
    }

    #[must_use]
    pub fn with_inherited(mut self, inherited: Vec<Patch>) -> Self {
        self.inherited = inherited;
        self
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

    /// The span that holds this one.
    pub fn parent(&self, span: usize) -> Option<usize> {
        self.parent[span].filter(|&p| p != span)
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
        self.unit_above[span]
    }

    /// Whether the span is one that plans and replays treat by itself.
    pub fn is_unit(&self, span: usize) -> bool {
        !self.is_container(span) && self.unit_above[span].is_none()
    }

    /// The spans below a unit, which never run by themselves.
    pub fn inner(&self, unit: usize) -> &[usize] {
        self.inner.get(&unit).map_or(&[], Vec::as_slice)
    }

    /// What a hole in a binding of `span` refers to: the nearest earlier span that had ended when this one started.
    ///
    /// # Errors
    /// No such span, in words.
    pub fn resolve(&self, span: usize, hole: &Hole) -> Result<usize, String> {
        let started = self.interval(span).0;
        let earlier = |&i: &usize| i < span && self.interval(i).1 <= started;
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

    /// When the step began and ended; one whose end was not recorded may have gone on for ever.
    pub fn interval(&self, span: usize) -> (i64, i64) {
        let record = &self.spans[span];
        if let Some(first) = record.first_recorded {
            return first;
        }
        let started = record.opening.started;
        (started, record.closing.as_ref().map_or(i64::MAX, |c| c.ended.max(started)))
    }

    /// Whether a fork has walked this part of the run: its states of the workspace then follow the sequence.
    pub fn is_walked(&self, span: usize) -> bool {
        span >= self.walked_from
    }

    pub fn changed(&self, span: usize) -> &Changed {
        static NOTHING: Changed = Changed { before: Vec::new(), during: Vec::new(), outside: Vec::new(), through: Vec::new() };
        self.changed.get(&self.spans[span].id).unwrap_or(&NOTHING)
    }

    /// The recorded footprint of a unit with all below it. A path that is none of the workspace, or a change outside of what
    /// is declared, makes it everything.
    pub fn footprint(&self, unit: usize) -> Footprint {
        let of = |span: usize| {
            let opening = &self.spans[span].opening;
            Footprint::of(opening, opening.executor.as_ref(), self.root()).unwrap_or_else(|_| Footprint::whole())
        };
        let mut footprint = of(unit);
        for &inner in self.inner(unit) {
            footprint = footprint.with(of(inner));
        }
        let changed = self.changed(unit);
        if !changed.outside.is_empty() {
            return Footprint::whole();
        }
        if changed.through.is_empty() {
            return footprint;
        }
        let sees = changed.through.iter().filter_map(|path| pattern(path, None).ok()).collect();
        footprint.with(Footprint { sees, writes: Vec::new() })
    }

    /// Units that ran at the same time.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The units that ran at the same time as this one and whose changes can't be told from its own.
    pub fn entangled(&self, span: usize) -> Option<&Group> {
        self.group_of.get(&span).map(|&g| &self.groups[g]).filter(|g| !g.separable)
    }

    /// Whether the changes of two units can't be told apart.
    pub fn tangled(&self, a: usize, b: usize) -> bool {
        self.entangled(a).is_some_and(|g| g.members.contains(&b))
    }

    /// Where the walk of a fork begins: at the unit that the span is part of, or at the first unit of a group that spans it.
    pub fn walk_from(&self, fork_span: usize) -> usize {
        let unit = self.unit_above[fork_span].unwrap_or(fork_span);
        let spanning = self.groups.iter().filter(|g| g.members.iter().any(|&m| m >= unit) && g.members[0] < unit);
        spanning.map(|g| g.members[0]).min().unwrap_or(unit)
    }

    /// Where a fork begins to walk: [`Self::walk_from`]; a check only looks at the unit that the span is part of, and what follows.
    pub fn first_of(&self, fork_span: usize, check: bool) -> usize {
        match self.begin {
            Some(begin) => begin,
            None if check => self.unit_above[fork_span].unwrap_or(fork_span),
            None => self.walk_from(fork_span),
        }
    }

    /// The recorded workspace before the walk begins; `None` where none was recorded.
    pub fn start_state(&self, first: usize) -> Option<SnapshotRef> {
        let record = &self.spans[first];
        if let Some(state) = record.snapshot_before.filter(|_| !record.did_not_run()) {
            return Some(state);
        }
        let units = |range: std::ops::Range<usize>| range.filter(|&i| self.is_unit(i) && !self.spans[i].did_not_run());
        // A step that writes nothing and has no snapshots left what was there; so did one of a fork that only left paths unknown.
        let tells = |&i: &usize| self.left(i).is_some() || (!self.footprint(i).writes.is_empty() && !self.left_unknown(i));
        let ended = |i: usize| if self.is_walked(i) { i64::MAX } else { self.interval(i).1 };
        match units(0..first).filter(tells).max_by_key(|&i| (ended(i), i)) {
            Some(last) => self.left(last).map(|(state, _)| state),
            // Nothing has changed it yet: it is what the last step to see it found, or the next one will.
            None => self.spans[..=first].iter().rev().find_map(|s| s.snapshot_before).or_else(|| {
                let decides = |&i: &usize| {
                    let writes = self.is_unit(i) && !self.spans[i].did_not_run() && !self.footprint(i).writes.is_empty();
                    self.spans[i].snapshot_before.is_some() || writes
                };
                (first..self.spans.len()).find(decides).and_then(|i| self.spans[i].snapshot_before)
            }),
        }
    }

    /// Whether a fork left paths unknown that the unit may have written.
    pub(crate) fn left_unknown(&self, unit: usize) -> bool {
        self.spans[unit].closing.as_ref().is_some_and(|c| c.status == Status::Blocked || !c.unknown.is_empty())
    }

    /// The recorded workspace that a unit left, and whether it is the one after it: one that left paths unknown left what was there
    /// before, but for these.
    pub(crate) fn left(&self, unit: usize) -> Option<(SnapshotRef, bool)> {
        let record = &self.spans[unit];
        let before = || record.snapshot_before.filter(|_| self.left_unknown(unit));
        record.snapshot_after.map(|state| (state, true)).or_else(|| Some((before()?, false)))
    }

    /// The recorded workspace as a replay that keeps everything would have it right before a unit. `None` where no snapshot shows
    /// it: between steps that ran at the same time, and which are replayed one after the other.
    pub fn state_for_patches(&self, unit: usize) -> Option<SnapshotRef> {
        let amid = self.groups.iter().find(|g| g.members[0] < unit && g.members.last().is_some_and(|&last| unit <= last));
        match amid {
            Some(group) if group.separable => None,
            Some(group) => self.spans[group.members[0]].snapshot_before,
            None => self.start_state(unit),
        }
    }

    /// The recorded workspace that a unit's inputs are compared with.
    pub fn state_before(&self, span: usize) -> Option<SnapshotRef> {
        match self.entangled(span) {
            Some(group) => self.spans[group.members[0]].snapshot_before,
            None => self.spans[span].snapshot_before,
        }
    }

    /// The recorded workspace once a unit's changes, and those that can't be told from them, are in it.
    pub fn state_after(&self, span: usize) -> Option<SnapshotRef> {
        match self.entangled(span) {
            Some(group) => group.last_ended.and_then(|m| self.spans[m].snapshot_after),
            None => self.spans[span].snapshot_after,
        }
    }

    /// The paths that change when a unit's recorded result is kept: those of units that can't be told apart all with the last one.
    pub fn kept_changes(&self, span: usize) -> &[String] {
        match self.entangled(span) {
            Some(group) if group.members.last() != Some(&span) => &[],
            _ => &self.changed(span).during,
        }
    }

    /// Whether the record shows what the span by itself changed in the workspace.
    pub fn shows_changes(&self, span: usize) -> bool {
        let record = &self.spans[span];
        let captured = record.snapshot_before.is_some() && record.snapshot_after.is_some();
        self.entangled(span).is_none() && (captured || self.footprint(span).writes.is_empty())
    }

    /// Whether there is a result to reuse: an output, and the workspace around a step that may write.
    pub fn has_result(&self, span: usize) -> bool {
        let record = &self.spans[span];
        let writes = !self.footprint(span).writes.is_empty();
        record.output().is_some() && (!writes || (record.snapshot_before.is_some() && record.snapshot_after.is_some()))
    }

    /// Whether the span has no result because a fork left it so.
    pub fn was_left_out(&self, span: usize) -> bool {
        let record = &self.spans[span];
        record.status() == Status::Blocked || record.fidelity == crate::model::Fidelity::Skipped
    }
}
