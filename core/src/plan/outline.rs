//! A plan in numbers, and its words.

use std::collections::BTreeSet;

use super::reasons::{Mentioned, files_of, not_told_from, plain_words, upstream_unknown, words};
use super::{Mark, Names, Plan, PlanCounts, PlannedSpan, Prepared, View, Why};
use crate::Digest;
use crate::binding::BindingError;
use crate::contract::{Rendered, arguments_digest};
use crate::digest::Hasher;
use crate::graph::{Step, Traits};
use crate::model::Verdict;
use crate::reason::{Blocked, Cause};

/// Warnings that a plan has at most.
const MAX_WARNINGS: usize = 20;

/// A set of causes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Causes(u8);

impl Causes {
    const ALL: [Cause; 6] = [
        Cause::PatchedInput,
        Cause::UpstreamOutputChanged,
        Cause::WorkspaceChanged,
        Cause::DependencyUnknown,
        Cause::MissingReusableResult,
        Cause::PolicyForcedRerun,
    ];

    pub fn add(&mut self, cause: Cause) {
        self.0 |= 1 << cause as u8;
    }

    pub fn has(self, cause: Cause) -> bool {
        self.0 & (1 << cause as u8) != 0
    }

    pub fn iter(self) -> impl Iterator<Item = Cause> {
        Self::ALL.into_iter().filter(move |cause| self.has(*cause))
    }
}

/// One affected or overridden span.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planned {
    /// Its place in the run.
    pub span: u32,
    /// Absent where a patch gives the output, so that the span is not run.
    pub mark: Option<Mark>,
    pub causes: Causes,
    /// Its inputs are the recorded ones.
    as_recorded: bool,
    /// Of its arguments, where a gate let it through: whether they are to be told.
    gated: bool,
    triggers: u32,
    whys: u32,
}

/// What a fork will do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outline {
    pub counts: PlanCounts,
    /// A step is passed over that may have written files, so that these are not known from there on, or may not be.
    pub leaves_unknown: bool,
    /// In order.
    pub planned: Vec<Planned>,
    /// Places of the spans that each is affected through, at most 8, one after the other.
    triggers: Vec<u32>,
    whys: Vec<Why>,
    /// Words that are known only while a span's inputs are at hand.
    told: Vec<(u32, Why, Blocked)>,
    arguments: Vec<(u32, Digest)>,
}

impl Outline {
    pub(super) fn length(&self) -> (usize, usize, usize) {
        (self.planned.len(), self.triggers.len(), self.whys.len())
    }

    pub(super) fn truncate(&mut self, (planned, triggers, whys): (usize, usize, usize)) {
        self.planned.truncate(planned);
        self.triggers.truncate(triggers);
        self.whys.truncate(whys);
    }

    /// Keeps the words that need rendered inputs.
    pub(super) fn tell(
        &mut self,
        fork: &Prepared<'_>,
        step: &Step<'_>,
        record: usize,
        whys: &[Why],
        rendered: Option<&Rendered>,
        error: Option<&BindingError>,
    ) {
        let span = step.span as u32;
        for &why in whys.iter().filter(|w| w.is_in_record()) {
            self.told.push((span, why, words(fork, record, why, rendered, error)));
        }
        if let Some(rendered) = rendered.filter(|_| step.traits.has(Traits::GATED)) {
            self.arguments.push((span, arguments_digest(rendered)));
        }
    }

    pub(super) fn push(&mut self, step: &Step<'_>, mark: Option<Mark>, causes: Causes, triggers: &[u32], whys: &[Why], as_recorded: bool) {
        self.counts.count(mark);
        let from = self.whys.len();
        for &why in whys {
            if !self.whys[from..].contains(&why) {
                self.whys.push(why);
            }
        }
        self.triggers.extend_from_slice(triggers);
        self.planned.push(Planned {
            span: step.span as u32,
            mark,
            causes,
            as_recorded,
            gated: step.traits.has(Traits::GATED),
            triggers: self.triggers.len() as u32,
            whys: self.whys.len() as u32,
        });
    }

    fn triggers(&self, at: usize) -> &[u32] {
        let from = at.checked_sub(1).map_or(0, |before| self.planned[before].triggers);
        &self.triggers[from as usize..self.planned[at].triggers as usize]
    }

    /// Why the span at this place of the plan is, or may be, blocked.
    pub fn whys(&self, at: usize) -> &[Why] {
        let from = at.checked_sub(1).map_or(0, |before| self.planned[before].whys);
        &self.whys[from as usize..self.planned[at].whys as usize]
    }

    /// The same patches on the same run have the same digest, always.
    pub fn digest(&self, view: &View<'_>) -> Digest {
        let fork = view.fork;
        let hasher = Hasher::new("plan")
            .value("source", &fork.spec.source)
            .value("patches", &fork.spec.patches)
            .value("inherited", &fork.source.inherited)
            .value("model", &fork.spec.model)
            .value("approvals", &fork.spec.approvals)
            .value("reuse", &fork.spec.reuse)
            .value("environment", &fork.environment);
        let mut bytes = Vec::with_capacity(16 * self.planned.len());
        for planned in &self.planned {
            bytes.extend_from_slice(&planned.span.to_le_bytes());
            bytes.extend_from_slice(&planned.triggers.to_le_bytes());
            bytes.extend_from_slice(&planned.whys.to_le_bytes());
            bytes.extend_from_slice(&[planned.mark.map_or(0, |m| m as u8 + 1), planned.causes.0, u8::from(planned.as_recorded), 0]);
        }
        let triggers: Vec<u8> = self.triggers.iter().flat_map(|t| t.to_le_bytes()).collect();
        let whys: Vec<u8> = self.whys.iter().flat_map(|w| w.code().to_le_bytes()).collect();
        let mut hasher = hasher.part("spans", &bytes).part("triggers", &triggers).part("whys", &whys);
        for (span, arguments) in &self.arguments {
            hasher = hasher.part("arguments", &[&span.to_le_bytes()[..], arguments.as_bytes()].concat());
        }
        hasher.finish()
    }

    /// The spans whose names the words of these places of the plan, and of its warnings, need.
    pub fn mentions(&self, view: &View<'_>, places: &[usize]) -> BTreeSet<u32> {
        let graph = view.graph;
        let mut spans = BTreeSet::from([view.fork_span() as u32, view.first() as u32]);
        for &at in places {
            spans.insert(self.planned[at].span);
            spans.extend(self.triggers(at));
            for why in self.whys(at) {
                spans.extend(why.from());
                spans.extend(why.from().and_then(|from| graph.unit_above(from)));
                spans.extend((*why == Why::CannotTell).then(|| other(view, self.planned[at].span)).flatten());
            }
        }
        spans.extend(outside(view).map(|(span, _, _)| *span));
        spans
    }

    /// The spans whose records the words of these places need, and that are not there.
    pub fn records(&self, view: &View<'_>, places: &[usize]) -> BTreeSet<u32> {
        let needs = |at: usize| {
            let planned = &self.planned[at];
            self.whys(at).iter().any(|w| w.is_in_record()) || (planned.gated && planned.as_recorded)
        };
        let spans = places.iter().filter(|at| needs(**at)).map(|at| self.planned[*at].span);
        spans.filter(|span| view.record(*span as usize).is_none()).collect()
    }

    /// Places of the first planned spans that are, or may be, blocked.
    pub fn blocked(&self, most: usize) -> Vec<usize> {
        (0..self.planned.len()).filter(|at| !self.whys(*at).is_empty()).take(most).collect()
    }

    /// In words: the first `most` planned spans.
    pub fn plan(&self, view: &View<'_>, names: &dyn Names, most: usize) -> Plan {
        let fork = view.fork;
        let spans: Vec<_> = (0..self.planned.len().min(most)).map(|at| self.span(view, names, at)).collect();
        Plan {
            digest: self.digest(view),
            fork_span: names.of(view.fork_span() as u32).0.to_owned(),
            check: fork.check,
            counts: self.counts,
            sandbox: self.counts.may_be_run() > 0 || view.graph.has_workspace && (self.leaves_unknown || view.fork.changes_workspace()),
            spans_left_out: (self.planned.len() - spans.len()) as i64,
            spans,
            environment: fork.environment.clone(),
            warnings: self.warnings(view, names),
        }
    }

    /// The span at this place of the plan, in words.
    pub fn span(&self, view: &View<'_>, names: &dyn Names, at: usize) -> PlannedSpan {
        let planned = &self.planned[at];
        let (id, name, kind) = names.of(planned.span);
        let record = view.record(planned.span as usize);
        let as_recorded = record.filter(|_| planned.as_recorded && (planned.gated || self.whys(at).iter().any(|w| w.is_in_record())));
        let rendered = as_recorded.and_then(|record| view.fork.recorded_inputs(record));
        let told = |why: Why| self.told.iter().find(|(span, of, _)| *span == planned.span && *of == why).map(|(_, _, told)| told.clone());
        let blocked = self.whys(at).iter().map(|&why| {
            told(why).unwrap_or_else(|| match (why, record) {
                (Why::Upstream(from), _) => {
                    let (id, name, kind) = names.of(from);
                    let unit = view.graph.unit_above(from).map(|unit| names.of(unit).1);
                    upstream_unknown(&Mentioned { id, name, kind }, unit, view.graph.is_container(from))
                }
                (Why::Files(from), _) => {
                    let (id, name, kind) = names.of(from);
                    files_of(&Mentioned { id, name, kind })
                }
                (Why::CannotTell, _) => not_told_from(other(view, planned.span).map_or("", |other| names.of(other).1)),
                (why, Some(record)) => words(view.fork, record, why, rendered.as_deref(), None),
                (why, None) => plain_words(name, kind, why),
            })
        });
        let blocked = blocked.collect();
        let arguments = self.arguments.iter().find(|(span, _)| *span == planned.span).map(|(_, digest)| *digest);
        PlannedSpan {
            id: id.to_owned(),
            name: name.to_owned(),
            kind,
            mark: planned.mark,
            causes: planned.causes.iter().collect(),
            triggers: self.triggers(at).iter().map(|&t| names.of(t).0.to_owned()).collect(),
            blocked,
            input_digest: arguments.or_else(|| rendered.filter(|_| planned.gated).map(|r| arguments_digest(&r))),
        }
    }

    fn warnings(&self, view: &View<'_>, names: &dyn Names) -> Vec<String> {
        let mut warnings = Vec::new();
        if view.first() < view.fork_span() && !view.fork.check {
            warnings.push(format!(
                "the fork starts at {:?}, before the fork span {:?}: they are one unit, or ran at the same time",
                names.of(view.first() as u32).1,
                names.of(view.fork_span() as u32).1
            ));
        }
        for (n, span) in view.fork.approved() {
            let span = &view.fork.source.spans[span];
            if span.verdict() != Verdict::GateAllow {
                let name = &span.opening.name;
                warnings.push(format!(
                    "spec.approvals[{n}] is of no use: {name:?} was not let through a gate, so nothing asks for its approval"
                ));
            }
        }
        for (span, path, more) in outside(view) {
            warnings.push(format!(
                "{:?} changed {path:?}{} when recorded, outside of what it declares to write; its declaration is void, so it counts as reading and writing everything",
                names.of(*span).1,
                if *more > 0 { format!(" and {more} more") } else { String::new() }
            ));
        }
        if self.planned.is_empty() && !view.fork.check {
            let written = view.fork.patches.files.values().flatten().next();
            let what = written.map_or_else(
                || "its patches change nothing".to_owned(),
                |file| format!("no step from there on sees {:?} change", file.path),
            );
            let equal = if view.graph.has_workspace && view.fork.changes_workspace() {
                "but for its workspace the fork equals"
            } else {
                "the fork equals"
            };
            warnings.push(format!("nothing is affected: {what}; {equal} its source"));
        }
        warnings.truncate(MAX_WARNINGS);
        warnings
    }
}

/// Units from the first one on whose declaration did not hold.
fn outside<'v>(view: &'v View<'_>) -> impl Iterator<Item = &'v (u32, String, u32)> + use<'v> {
    let first = view.first() as u32;
    view.graph.outside.iter().filter(move |(span, _, _)| *span >= first).take(MAX_WARNINGS)
}

/// Another one that ran at the same time as this member of an entangled group.
fn other(view: &View<'_>, span: u32) -> Option<u32> {
    let group = view.graph.groups.iter().find(|g| !g.separable && g.members.contains(&(span as usize)))?;
    group.members.iter().find(|m| **m != span as usize).map(|m| *m as u32)
}
