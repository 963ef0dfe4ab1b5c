//! Whether and how surely a unit's inputs differ from the recorded ones.

use super::exact::{Exact, Known, compare, value};
use super::{Level, Walk};
use crate::graph::{Need, Pat, Step, Traits, touch};
use crate::plan::paths::PathState;
use crate::plan::reasons::Why;
use crate::plan::{Causes, Few};
use crate::reason::Cause;

/// What the planner finds of one span's inputs.
#[derive(Default)]
pub(super) struct Reach {
    /// Whether the inputs differ for another reason than a blocked span.
    pub differs: Level,
    /// Whether an input is missing because of a blocked span.
    pub upstream: Level,
    pub causes: Causes,
    pub triggers: Few<8>,
    pub whys: Vec<Why>,
}

impl Reach {
    pub fn differs(&mut self, level: Level, cause: Cause, triggers: &[u32]) {
        if level > Level::No {
            self.differs = self.differs.max(level);
            self.cause(cause);
            self.triggers.merge(triggers);
        }
    }

    pub fn cause(&mut self, cause: Cause) {
        self.causes.add(cause);
    }

    pub fn has(&self, cause: Cause) -> bool {
        self.causes.has(cause)
    }

    pub fn level(&self) -> Level {
        self.differs.max(self.upstream)
    }
}

/// What was found; where the unit's record had to be looked at on the way, with it.
pub(super) struct Reached(pub Reach, pub Known, Option<Box<Exact>>);

impl Reached {
    pub fn with(self, exact: Option<Box<Exact>>) -> (Reach, Known, Option<Box<Exact>>) {
        let Self(reach, known, found) = self;
        (reach, known, exact.or(found))
    }
}

impl Walk<'_, '_> {
    /// Why and how surely the span's inputs differ from the recorded ones; with its rendered fields where all that they are
    /// rendered from is known.
    pub(super) fn reach(&mut self, step: &Step<'_>, exact: Option<&Exact>) -> Reached {
        let fork = self.view.fork;
        let mut reach = Reach::default();
        if fork.image_changed && step.traits.has(Traits::EXECUTOR) {
            reach.differs(Level::Certain, Cause::PatchedInput, &[]);
        }
        if step.traits.has(Traits::LEFT_OUT) {
            reach.differs(Level::Certain, Cause::MissingReusableResult, &[]);
        }
        if step.traits.has(Traits::BROKEN) || exact.is_some_and(|x| x.patched.is_err()) {
            // What it may see is not known; its own reasons say why it can't run.
            if exact.is_some_and(|x| x.named) {
                reach.differs(Level::Certain, Cause::PatchedInput, &[]);
            }
            let state = self.paths.of(Pat::ALL);
            reach.differs(state.differs.max(state.blocked).min(Level::Maybe), Cause::WorkspaceChanged, state.triggers.as_slice());
            return Reached(reach, Known::Open, None);
        }
        match exact.and_then(|x| x.patched.as_ref().ok()) {
            None => step.needs().filter(|n| n.is_explicit()).for_each(|n| self.through(&mut reach, n.span())),
            Some(patched) => patched.depends_on.iter().for_each(|&n| self.through(&mut reach, self.view.place(n))),
        }
        let (known, found) = match exact {
            Some(x) => (self.bound_by_record(&mut reach, x), None),
            None => self.bound(&mut reach, step),
        };
        let (sees, same) = self.sees(step);
        reach.differs(sees.differs, Cause::WorkspaceChanged, sees.triggers.as_slice());
        if !same && exact.is_some_and(footprint_differs) {
            reach.differs(Level::Certain, Cause::PatchedInput, &[]);
        }
        if sees.blocked > Level::No {
            reach.upstream = reach.upstream.max(sees.blocked);
            reach.triggers.merge(sees.triggers.as_slice());
            reach.whys.extend(sees.unknown_from.as_slice().iter().map(|&t| Why::Files(t)));
            reach.whys.extend(sees.unrecorded.then_some(Why::NoSnapshot));
            reach.cause(Cause::WorkspaceChanged);
        }
        if step.traits.has(Traits::INPUTS_UNKNOWN) {
            let everything = self.paths.of(Pat::ALL);
            // What is unknown since the fork span has drifted; what was so before, or was never recorded, is no sign of a change.
            let level = self.drift.max(everything.differs);
            let mut triggers = self.drifted;
            triggers.merge(everything.triggers.as_slice());
            reach.differs(level, Cause::DependencyUnknown, triggers.as_slice());
        }
        if step.traits.has(Traits::EXECUTOR) && !step.traits.has(Traits::DID_NOT_RUN | Traits::HAS_RESULT) {
            reach.differs(Level::Certain, Cause::MissingReusableResult, &[]);
        }
        if !fork.spec.reuse.early_cutoff && (reach.differs == Level::Maybe || reach.upstream == Level::Maybe) {
            reach.differs(Level::Certain, Cause::PolicyForcedRerun, &[]);
        }
        Reached(reach, known, found)
    }

    /// The state of what it sees; and whether that is what it saw when recorded.
    fn sees(&self, step: &Step<'_>) -> (PathState, bool) {
        let mut state = PathState::default();
        if let Some((sees, _)) = self.acts.footprints.get(&(step.span as u32)) {
            sees.iter().for_each(|&pat| state.join(&self.paths.of(pat), Level::Certain));
            return (state, false);
        }
        if !self.paths.is_empty() {
            for seen in step.touches().filter(|t| t.has(touch::SEES)) {
                if self.paths.is_near(seen.node()) {
                    state.join(&self.paths.of(seen.pattern()), Level::Certain);
                }
            }
        }
        (state, true)
    }

    fn through(&self, reach: &mut Reach, upstream: u32) {
        let out = self.outs[upstream as usize];
        if out.is_as_recorded() {
            return;
        }
        reach.differs(out.differs(), Cause::UpstreamOutputChanged, &[upstream]);
        if out.blocked() > Level::No {
            reach.upstream = reach.upstream.max(out.blocked());
            reach.triggers.add(upstream);
            reach.whys.push(Why::Upstream(upstream));
            reach.cause(Cause::UpstreamOutputChanged);
        }
    }

    /// What lies in the outputs that templates use: whether any is blocked, whether any is not known, and which differ.
    fn upstreams(&self, reach: &mut Reach, bound: impl Iterator<Item = u32> + Clone) -> (bool, Few<8>, bool) {
        let out = |upstream: u32| self.outs[upstream as usize];
        bound.clone().filter(|&u| out(u).blocked() > Level::No).for_each(|u| self.through(reach, u));
        let (mut open, mut changed, mut given) = (false, Few::default(), false);
        for upstream in bound {
            let out = out(upstream);
            open |= !out.is_known() && !out.is_as_recorded();
            given |= out.is_known();
            if out.differs() > Level::No {
                changed.add(upstream);
            }
        }
        (open, changed, given)
    }

    /// The outputs that recorded templates use.
    fn bound(&mut self, reach: &mut Reach, step: &Step<'_>) -> (Known, Option<Box<Exact>>) {
        if step.traits.has(Traits::UNBOUND) {
            return (Known::Open, None);
        }
        let (open, changed, given) = self.upstreams(reach, step.needs().filter(|n| n.is_bound()).map(Need::span));
        if open {
            if !changed.is_empty() {
                reach.differs(Level::Maybe, Cause::UpstreamOutputChanged, changed.as_slice());
            }
            return (Known::Open, None);
        }
        if given {
            let found = self.by_record(step.span);
            let known = found.as_deref().map_or(Known::Open, |x| self.bound_by_record(reach, x));
            return (known, found);
        }
        (if step.traits.has(Traits::RENDERS) { Known::AsRecorded } else { Known::Failing }, None)
    }

    /// The same by the unit's record: its templates may be patched, or outputs that they use are given.
    fn bound_by_record(&self, reach: &mut Reach, x: &Exact) -> Known {
        let (fork, source) = (self.view.fork, self.view.fork.source);
        let (Ok(recorded), Ok(patched)) = (&x.recorded, &x.patched) else { return Known::Open };
        let Ok(bound) = patched.bound_spans(source) else {
            if x.named {
                reach.differs(Level::Certain, Cause::PatchedInput, &[]);
            }
            return Known::Open;
        };
        let (open, changed, _) = self.upstreams(reach, bound.iter().map(|&small| self.view.place(small)));
        let output = |small: usize| value(fork, self.known.get(&self.view.place(small)), small);
        let rendered = if open { None } else { Some(patched.render(source, &output)) };
        if matches!(rendered, Some(Err(_))) && x.named {
            reach.differs(Level::Certain, Cause::PatchedInput, &[]);
        }
        if matches!(rendered, Some(Err(_))) && !changed.is_empty() {
            reach.differs(Level::Certain, Cause::UpstreamOutputChanged, changed.as_slice());
        }
        for (level, cause) in compare(fork, x.small, recorded, patched, rendered.as_ref().and_then(|r| r.as_ref().ok())) {
            reach.differs(level, cause, if cause == Cause::UpstreamOutputChanged { changed.as_slice() } else { &[] });
        }
        if open && !changed.is_empty() {
            reach.differs(Level::Maybe, Cause::UpstreamOutputChanged, changed.as_slice());
        }
        match rendered {
            None => Known::Open,
            Some(Ok(rendered)) => Known::Rendered(rendered),
            Some(Err(error)) => Known::Failed(Box::new(error)),
        }
    }
}

fn footprint_differs(x: &Exact) -> bool {
    match (&x.recorded, &x.patched) {
        (Ok(recorded), Ok(patched)) => recorded.footprint.sees != patched.footprint.sees,
        _ => false,
    }
}
