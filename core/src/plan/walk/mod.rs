//! The walk over the units: what each sees, whether that may differ, and what it leaves behind.
//!
//! It reads the graph's streams from the fork span on. A unit that nothing reaches costs a look at each number of its stream; a
//! span's record is looked at only where a patch acts on it, or gives an output that it reads.

mod exact;
mod leave;
mod reach;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use super::paths::{Level, PathState, Paths};
use super::reasons::{Why, decide};
use super::{Few, Mark, Outline, View};
use crate::binding::SpanValue;
use crate::concurrency::Group;
use crate::graph::{Scan, Step, Traits, touch};
use crate::reason::Cause;
use exact::{Acts, Exact, Inputs, Known};
use reach::Reach;

/// A span's output as known before anything runs: how surely it differs, how surely it is unknown because of a blocked span, and
/// whether a patch gives it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Out(u8);

impl Out {
    fn new(differs: Level, blocked: Level, known: bool) -> Self {
        Self(differs as u8 | (blocked as u8) << 2 | u8::from(known) << 4)
    }

    fn level(bits: u8) -> Level {
        match bits & 3 {
            0 => Level::No,
            1 => Level::Maybe,
            _ => Level::Certain,
        }
    }

    fn differs(self) -> Level {
        Self::level(self.0)
    }

    fn blocked(self) -> Level {
        Self::level(self.0 >> 2)
    }

    fn is_known(self) -> bool {
        self.0 & 16 != 0
    }

    fn is_as_recorded(self) -> bool {
        self.0 == 0
    }
}

/// The walk, and what is known at one point of it.
struct Walk<'a, 't> {
    view: &'a View<'a>,
    acts: &'a Acts,
    outs: Vec<Out>,
    known: HashMap<u32, SpanValue>,
    /// How surely any output since the walk's begin is not as recorded.
    drift: Level,
    drifted: Few<8>,
    paths: Paths<'t>,
    /// By first member: entangled groups that are not as recorded, how surely, and because of which members.
    affected: HashMap<usize, (Level, Vec<u32>)>,
    /// By member: its entangled group.
    groups: HashMap<usize, &'a Group>,
    /// Place of the next target of files or workspaces.
    target: usize,
    outline: Outline,
    /// Outputs as they were, while all is to be undone.
    log: Option<Vec<(u32, Out)>>,
    /// Records that are needed, and are not there.
    missing: BTreeSet<u32>,
}

/// Plans every unit; gives the affected and overridden ones, and the numbers.
///
/// # Errors
/// The spans whose records are needed beyond those that are there.
pub fn walk(view: &View<'_>) -> Result<Outline, BTreeSet<u32>> {
    let (fork, graph) = (view.fork, view.graph);
    let mut tree = Cow::Borrowed(&graph.tree);
    let acts = Acts::of(view, &mut tree);
    let first = view.first();
    let mut outs = vec![0u8; graph.spans];
    graph.left_out.iter().for_each(|&span| outs[span as usize] = Out::new(Level::No, Level::Certain, false).0);
    let entangled = graph.groups.iter().filter(|g| !g.separable);
    let mut walk = Walk {
        view,
        acts: &acts,
        outs: outs.into_iter().map(Out).collect(),
        known: HashMap::new(),
        drift: Level::No,
        drifted: Few::default(),
        paths: Paths::new(&tree),
        affected: HashMap::new(),
        groups: entangled.flat_map(|g| g.members.iter().map(move |&m| (m, g))).collect(),
        target: 0,
        outline: Outline::default(),
        log: None,
        missing: BTreeSet::new(),
    };
    walk.start(first);
    // What is looked at whatever lies before it.
    let always = |traits: Traits| {
        fork.check
            || traits.has(Traits::LEFT_OUT | Traits::ENTANGLED)
            || (traits.has(Traits::EXECUTOR) && (fork.image_changed || !traits.has(Traits::HAS_RESULT | Traits::DID_NOT_RUN)))
    };
    let mut stops: Vec<u32> = acts.named.iter().copied().chain(acts.before.iter().map(|(target, _)| *target)).collect();
    stops.sort_unstable();
    let mut stop = stops.iter().map(|s| *s as usize).peekable();
    let mut scan = graph.scan(first);
    while let Some(step) = scan.next() {
        if !step.traits.has(Traits::UNIT) {
            continue;
        }
        let mut look = always(step.traits);
        while stop.next_if(|s| *s <= step.span).is_some() {
            look = true;
        }
        if look || walk.may_be_reached(&step) {
            if fork.check {
                walk.check(&step);
            } else {
                walk.visit_entangled(&step, &scan);
                walk.visit(&step);
            }
        }
    }
    if !walk.missing.is_empty() {
        return Err(walk.missing);
    }
    let mut outline = walk.outline;
    outline.counts.reusable = graph.units - outline.planned.len() as i64;
    Ok(outline)
}

impl<'a> Walk<'a, '_> {
    /// Paths that forks before this one left unknown where the walk begins, as [`super::Prepared::unknown_at_start`] says.
    fn start(&mut self, first: usize) {
        let graph = self.view.graph;
        let mut unknown = graph.unknown.iter().take_while(|(span, _)| (*span as usize) < first).peekable();
        if let Some((from, _)) = unknown.peek() {
            for step in graph.scan(*from as usize).take_while(|s| s.span < first) {
                if let Some((span, pats)) = unknown.next_if(|(span, _)| *span as usize == step.span) {
                    pats.iter().for_each(|&pat| self.paths.set(pat, PathState::unknown(*span)));
                    continue;
                }
                let reexecuted = step.traits.has(Traits::REEXECUTED);
                for touched in step.touches() {
                    // What it changed as a write stays known, whoever ran it.
                    let during = touched.has(touch::DURING) && !reexecuted;
                    let written = touched.has(touch::WRITES) && step.traits.has(Traits::FILE_WRITE) && step.traits.has(Traits::COMPLETED);
                    if touched.has(touch::BEFORE) || during || written {
                        self.paths.set(touched.pattern(), PathState::default());
                    }
                }
            }
        }
        if !self.view.starts_recorded() {
            self.paths.set(crate::graph::Pat::ALL, PathState::unrecorded(first as u32));
        }
    }

    /// Whether the unit can be another than recorded for what lies before it.
    #[inline(always)]
    fn may_be_reached(&self, step: &Step<'_>) -> bool {
        step.needs().any(|n| !self.outs[n.span() as usize].is_as_recorded())
            || (!self.paths.is_empty() && step.touches().any(|t| self.paths.is_near(t.node())))
            || (step.traits.has(Traits::INPUTS_UNKNOWN) && (self.drift > Level::No || !self.paths.is_empty()))
            || (step.traits.has(Traits::SHELL) && !self.acts.env.is_empty() && self.is_below_env(step))
    }

    /// The group that the unit is in, where its members can't be told apart.
    fn group(&self, step: &Step<'_>) -> Option<&'a Group> {
        if step.traits.has(Traits::ENTANGLED) { self.groups.get(&step.span).copied() } else { None }
    }

    fn is_below_env(&self, step: &Step<'_>) -> bool {
        self.view.graph.above(step).iter().any(|above| self.acts.env.contains(above))
    }

    /// The unit by its record, where a patch acts on it, or where a fork before left blocked what is let through a gate: nobody has
    /// approved of its inputs as they are recorded.
    fn exact(&mut self, step: &Step<'_>) -> Option<Box<Exact>> {
        let below_env = step.traits.has(Traits::SHELL) && !self.acts.env.is_empty() && self.is_below_env(step);
        let ungated = step.traits.has(Traits::LEFT_OUT) && step.traits.has(Traits::GATED);
        if !below_env && !ungated && !self.acts.named.contains(&(step.span as u32)) {
            return None;
        }
        self.by_record(step.span)
    }

    fn by_record(&mut self, span: usize) -> Option<Box<Exact>> {
        let small = self.view.record(span);
        if small.is_none() {
            self.missing.insert(span as u32);
        }
        small.map(|small| Box::new(Exact::of(self.view.fork, small)))
    }

    /// In a check every unit that can run does, on its recorded inputs.
    fn check(&mut self, step: &Step<'_>) {
        let traits = step.traits;
        if traits.has(Traits::DID_NOT_RUN) {
            return;
        }
        let known = if traits.has(Traits::RENDERS) { Known::AsRecorded } else { Known::Open };
        let mut whys: Vec<Why> = self.own(step, traits, None, &known).into_iter().map(|(why, _)| why).collect();
        if whys.is_empty() {
            whys.extend(not_reproducible(traits));
        }
        let mark = if whys.is_empty() { Mark::WillRun } else { Mark::WillBeBlocked };
        let mut reach = Reach { whys, ..Reach::default() };
        reach.cause(Cause::PolicyForcedRerun);
        self.push(step, Some(mark), &reach, None, &known);
    }

    /// At the first member of an entangled group: whether any member is reached while the others are as recorded. What began
    /// between two members is looked at on the way, and all of it undone.
    fn visit_entangled(&mut self, step: &Step<'a>, scan: &Scan<'a>) {
        let Some(group) = self.group(step).filter(|g| g.members[0] == step.span) else { return };
        let last = *group.members.last().unwrap_or(&step.span);
        let before = (self.drift, self.drifted, self.target, self.outline.length(), self.outline.counts, self.known.clone());
        self.paths.mark();
        self.log = Some(Vec::new());
        let (mut level, mut reached) = (Level::No, Vec::new());
        for unit in std::iter::once(*step).chain(scan.clone()).take_while(|s| s.span <= last).filter(|s| s.traits.has(Traits::UNIT)) {
            if !group.members.contains(&unit.span) {
                self.visit(&unit);
                continue;
            }
            self.begin(&unit);
            let exact = self.exact(&unit);
            let given = exact.as_deref().filter(|x| self.view.fork.patches.output.contains_key(&x.small));
            let of_member = match given {
                Some(x) if self.view.fork.overriding(x.small).is_some() => Level::Certain,
                Some(_) => Level::No,
                None => self.reach(&unit, exact.as_deref()).0.level(),
            };
            if of_member > Level::No {
                reached.push(unit.span as u32);
            }
            level = level.max(of_member);
            self.apply_recorded(&unit, None);
        }
        self.paths.undo();
        for (span, out) in self.log.take().into_iter().flatten().rev() {
            self.outs[span as usize] = out;
        }
        let length;
        (self.drift, self.drifted, self.target, length, self.outline.counts, self.known) = before;
        self.outline.truncate(length);
        if level > Level::No {
            self.affected.insert(step.span, (level, reached));
        }
    }

    /// What happens before the span: changes outside of any span, then workspaces and files that patches give.
    fn begin(&mut self, step: &Step<'_>) {
        if !self.paths.is_empty() {
            for touched in step.touches().filter(|t| t.has(touch::BEFORE)) {
                self.paths.set(touched.pattern(), PathState::default());
            }
        }
        let acts = self.acts;
        while let Some((target, writes)) = acts.before.get(self.target).filter(|(target, _)| *target as usize <= step.span) {
            self.target += 1;
            for (pat, same) in writes {
                let differs = match same {
                    Some(true) => Level::No,
                    Some(false) => Level::Certain,
                    None => Level::Maybe,
                };
                let state = PathState { differs, ..PathState::default() };
                let triggers = if differs == Level::No { Few::default() } else { Few::one(*target) };
                self.paths.set(*pat, PathState { triggers, ..state });
            }
        }
    }

    fn visit(&mut self, step: &Step<'_>) {
        let fork = self.view.fork;
        self.begin(step);
        let exact = self.exact(step);
        if let Some(x) = exact.as_deref().filter(|x| fork.patches.output.contains_key(&x.small)) {
            self.visit_overridden(step, x);
            return;
        }
        if step.traits.has(Traits::DID_NOT_RUN) && exact.as_deref().is_none_or(|x| fork.stays_out(x.small)) {
            self.apply_recorded(step, None);
            return;
        }
        let (mut reach, known, exact) = self.reach(step, exact.as_deref()).with(exact);
        let alone = reach.level();
        let group = self.group(step).and_then(|g| self.affected.get(&g.members[0]));
        if let Some((level, reached)) = group {
            let others: Vec<_> = reached.iter().copied().filter(|&m| m as usize != step.span).collect();
            if reach.differs < *level {
                reach.differs(*level, Cause::WorkspaceChanged, &others);
            }
        }
        let in_group = group.is_some();
        if reach.level() == Level::No {
            self.apply_recorded(step, None);
            return;
        }
        let traits = self.traits(step, exact.as_deref());
        let mut own = self.own(step, traits, exact.as_deref(), &known);
        if matches!(known, Known::Failing | Known::Failed(_)) {
            own.retain(|(_, level)| *level == Level::Certain);
            if own.is_empty() {
                own.push((Why::Failed, Level::Certain));
            }
        }
        let surely_alone = alone == Level::Certain && !reach.has(Cause::PolicyForcedRerun);
        if !surely_alone && in_group && own.iter().any(|(_, level)| *level == Level::Certain) {
            // Where only the others differ, it is blocked for another reason.
            let instead = (Why::CannotTell, Level::Certain);
            if alone == Level::No { own = vec![instead] } else { own.push(instead) }
        }
        let blocks = own.iter().map(|(_, level)| *level).max().unwrap_or(Level::No);
        if reach.upstream < Level::Certain {
            reach.whys.extend(own.into_iter().map(|(why, _)| why));
        }
        let may_run = reach.differs > Level::No && reach.upstream < Level::Certain && blocks < Level::Certain;
        let may_block = reach.upstream > Level::No || blocks > Level::No;
        let certain = reach.level() == Level::Certain;
        let mark = match (may_run, may_block, certain) {
            (true, true, _) => Mark::MayRunOrBeBlocked,
            (true, false, true) => Mark::WillRun,
            (true, false, false) => Mark::MayRun,
            (false, _, true) => Mark::WillBeBlocked,
            (false, _, false) => Mark::MayBeBlocked,
        };
        self.after(step, exact.as_deref(), mark, &known);
        self.push(step, Some(mark), &reach, exact.as_deref(), &known);
    }

    /// What the unit's contract says after patches.
    fn traits(&self, step: &Step<'_>, exact: Option<&Exact>) -> Traits {
        let Some(x) = exact else { return step.traits };
        let patched = Traits::of_contract(self.view.fork.source, x.small, x.patched.as_ref(), Some(&self.view.fork.patches));
        Traits(step.traits.0 & !Traits::OF_CONTRACT.0) | patched
    }

    /// Why the unit itself can't run once its inputs differ.
    fn own(&self, step: &Step<'_>, traits: Traits, exact: Option<&Exact>, known: &Known) -> Vec<(Why, Level)> {
        let (fork, graph, answered, span) = (self.view.fork, self.view.graph, &self.acts.answered, step.span);
        let rendered = match known {
            Known::Rendered(rendered) => exact.map(|x| (x.small, rendered)),
            _ => None,
        };
        let inputs = Inputs { fork, graph, answered, span, rendered };
        let is_known = matches!(known, Known::AsRecorded | Known::Rendered(_));
        decide(fork, traits, if is_known { Some(&inputs) } else { None })
    }

    fn push(&mut self, step: &Step<'_>, mark: Option<Mark>, reach: &Reach, exact: Option<&Exact>, known: &Known) {
        if let (Some(x), None) = (exact, &self.log) {
            match known {
                Known::Rendered(rendered) => self.outline.tell(self.view.fork, step, x.small, &reach.whys, Some(rendered), None),
                Known::Failed(error) => self.outline.tell(self.view.fork, step, x.small, &reach.whys, None, Some(error)),
                _ => {}
            }
        }
        let as_recorded = matches!(known, Known::AsRecorded | Known::Failing);
        self.outline.push(step, mark, reach.causes, reach.triggers.as_slice(), &reach.whys, as_recorded);
    }
}

/// What keeps a step of a check from being run on its recorded inputs, beyond its own reasons.
fn not_reproducible(traits: Traits) -> Option<Why> {
    if traits.has(Traits::LEFT_OUT) || !traits.has(Traits::HAS_OUTPUT) {
        Some(Why::NotCompared)
    } else if traits.has(Traits::ENTANGLED) {
        Some(Why::CannotTell)
    } else if !traits.has(Traits::RENDERS) {
        Some(Why::CannotRender)
    } else {
        traits.has(Traits::NOT_CAPTURED).then_some(Why::NotCaptured)
    }
}
