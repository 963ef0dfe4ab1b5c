//! What a unit leaves behind: its output and its files.

use super::exact::{Exact, Known};
use super::reach::Reach;
use super::{Level, Out, Walk};
use crate::binding::SpanValue;
use crate::graph::{Pat, Step, Traits, touch};
use crate::plan::paths::PathState;
use crate::plan::{Few, Mark};
use crate::reason::Cause;

/// Containers in containers that are walked up.
const MAX_DEPTH: usize = 1000;

impl Walk<'_, '_> {
    pub(super) fn visit_overridden(&mut self, step: &Step<'_>, x: &Exact) {
        let overriding = self.view.fork.overriding(x.small);
        let group = self.group(step).map(|g| self.affected.get(&g.members[0]).map(|(level, _)| *level));
        let shows = step.traits.has(Traits::SHOWS_CHANGES);
        let kept = match group {
            Some(affected) => affected.is_none(),
            None => shows,
        };
        if kept || shows {
            self.apply_recorded(step, Some(x));
            self.keep_patched_files(step);
            if overriding.is_none() && kept {
                return;
            }
        } else {
            // Which changes were its own is not recorded, so none happen, and what it may write is not known; unless the group turns
            // out to be as recorded.
            let blocked = group.flatten().filter(|_| overriding.is_none()).unwrap_or(Level::Certain);
            for pat in self.may_write(step, Some(x)) {
                self.outline.leaves_unknown |= self.log.is_none();
                let differs = self.paths.of(pat).differs.min(Level::Maybe);
                self.paths.set(pat, PathState { blocked, differs, ..self.unknown(step) });
            }
        }
        let differs = if overriding.is_some() { Level::Certain } else { Level::No };
        self.set_output(step, differs, Level::No, overriding);
        self.leave_out_inner(step, Level::Certain);
        let mut reach = Reach::default();
        reach.cause(Cause::PatchedInput);
        self.push(step, None, &reach, None, &Known::Open);
    }

    /// Nobody knows what the step would have written. Where nothing was recorded before the first one, that is why.
    fn unknown(&self, step: &Step<'_>) -> PathState {
        let span = step.span as u32;
        let unrecorded = step.span == self.view.first() && !self.view.starts_recorded();
        if unrecorded { PathState::unrecorded(span) } else { PathState::unknown(span) }
    }

    /// The step's changes are those of the record, as far as it is the one that shows them.
    fn shows_kept(&self, step: &Step<'_>) -> bool {
        self.group(step).is_none_or(|g| g.members.last() == Some(&step.span))
    }

    /// Files that patches write on a span whose output is given stand, where it changed them when recorded.
    fn keep_patched_files(&mut self, step: &Step<'_>) {
        let shows = self.shows_kept(step);
        for (pat, same) in self.patched_files(step) {
            let changed = shows && step.touches().any(|t| t.has(touch::DURING) && t.pattern() == pat);
            if changed {
                let differs = if same == Some(true) { Level::Certain } else { Level::Maybe };
                let triggers = Few::one(step.span as u32);
                self.paths.set(pat, PathState { differs, triggers, ..PathState::default() });
            }
        }
    }

    /// Files that a patch on this very span writes.
    fn patched_files(&self, step: &Step<'_>) -> Vec<(Pat, Option<bool>)> {
        let Some(small) = self.view.small(step.span) else { return Vec::new() };
        let files = self.view.fork.patches.files.get(&small).map_or(0, Vec::len);
        let of_target = self.acts.before.iter().find(|(target, _)| *target as usize == step.span);
        // They come last.
        of_target.map_or_else(Vec::new, |(_, writes)| writes[writes.len() - files..].to_vec())
    }

    /// The span's recorded changes happen: the paths are as recorded from here on. Of one whose output is given, files that a patch
    /// writes on the same span stand.
    pub(super) fn apply_recorded(&mut self, step: &Step<'_>, given: Option<&Exact>) {
        if self.paths.is_empty() {
            return;
        }
        let outputs = &self.view.fork.patches.output;
        let given = given.is_some() || (!outputs.is_empty() && self.view.small(step.span).is_some_and(|s| outputs.contains_key(&s)));
        let patched = if given { self.patched_files(step) } else { Vec::new() };
        for kept in step.touches().filter(|t| t.has(touch::KEPT)) {
            if patched.iter().all(|(pat, _)| *pat != kept.pattern()) {
                self.paths.set(kept.pattern(), PathState::default());
            }
        }
    }

    /// What the span may leave behind when it runs, or leave unknown when it is blocked: what it declares to write, and what it changed
    /// when recorded.
    fn may_write(&self, step: &Step<'_>, exact: Option<&Exact>) -> Vec<Pat> {
        let written = |bits| step.touches().filter(move |t| t.has(bits)).map(|t| t.pattern());
        let mut pats: Vec<Pat> = match self.acts.footprints.get(&(step.span as u32)) {
            Some((_, writes)) => writes.clone(),
            None if exact.is_some_and(|x| x.patched.is_err()) => vec![Pat::ALL],
            None => return written(touch::WRITES | touch::DURING).collect(),
        };
        pats.extend(written(touch::DURING));
        pats
    }

    /// What an affected span leaves behind.
    pub(super) fn after(&mut self, step: &Step<'_>, exact: Option<&Exact>, mark: Mark, known: &Known) {
        let blocked = match mark {
            Mark::WillBeBlocked => Level::Certain,
            mark if mark.may_block() => Level::Maybe,
            _ => Level::No,
        };
        let is_write = step.traits.has(Traits::FILE_WRITE);
        let gives_as_recorded = is_write && step.traits.has(Traits::COMPLETED) && step.traits.has(Traits::HAS_OUTPUT);
        let differs = if mark.may_run() && !gives_as_recorded { Level::Maybe } else { Level::No };
        self.set_output(step, differs, blocked, None);
        self.leave_out_inner(step, if matches!(mark, Mark::WillRun | Mark::WillBeBlocked) { Level::Certain } else { Level::Maybe });
        if exact.is_none() {
            for touched in step.touches().filter(|t| t.has(touch::WRITES | touch::DURING)) {
                self.leave(step, None, touched.pattern(), mark, known, blocked);
            }
        } else {
            for pat in self.may_write(step, exact) {
                self.leave(step, exact, pat, mark, known, blocked);
            }
        }
    }

    /// What an affected span leaves at one of the places that it may write.
    fn leave(&mut self, step: &Step<'_>, exact: Option<&Exact>, pat: Pat, mark: Mark, known: &Known, blocked: Level) {
        let span = step.span as u32;
        let alone = !step.traits.has(Traits::ENTANGLED);
        // A FileWrite declares one path; where it can't be read, none.
        let is_write =
            step.traits.has(Traits::FILE_WRITE) && !pat.below && step.touches().any(|t| t.has(touch::WRITES) && t.pattern() == pat);
        let before = self.paths.of(pat);
        let exactly = !pat.below;
        // A write that happens makes its path known again.
        let stays = exactly && !(is_write && mark.may_run());
        let left = if stays { before.blocked } else { before.blocked.min(Level::Maybe) };
        let differs = match mark {
            // It sets its path to a content that is known: the recorded one, or certainly another; unless another step wrote it
            // at the same time.
            mark if is_write && !mark.may_block() && exactly && alone && matches!(known, Known::AsRecorded | Known::Rendered(_)) => {
                match self.writes_as_recorded(step, exact, known) {
                    true => Level::No,
                    false if mark == Mark::WillRun => Level::Certain,
                    false => Level::Maybe,
                }
            }
            mark if mark.may_run() => Level::Maybe,
            _ if exactly => before.differs,
            _ => before.differs.min(Level::Maybe),
        };
        let blocked = if is_write && !mark.may_block() { Level::No } else { blocked.max(left) };
        let mut state = if blocked > Level::No && mark.may_block() { self.unknown(step) } else { PathState::default() };
        (state.differs, state.blocked, state.triggers) = (differs, blocked, Few::one(span));
        if blocked == Level::No || before.blocked > Level::No {
            state.triggers.merge(before.triggers.as_slice());
        }
        if blocked > Level::No && before.blocked > Level::No && mark != Mark::WillBeBlocked {
            state.unknown_from.merge(before.unknown_from.as_slice());
            state.unrecorded |= before.unrecorded;
        }
        self.outline.leaves_unknown |= state.blocked > Level::No && self.log.is_none();
        self.paths.set(pat, state);
    }

    /// Whether a write, whose inputs are known, writes what it wrote when recorded.
    fn writes_as_recorded(&self, step: &Step<'_>, exact: Option<&Exact>, known: &Known) -> bool {
        let same = match (exact, known) {
            (Some(x), Known::Rendered(rendered)) => {
                let then = self.view.fork.recorded_inputs(x.small);
                ["path", "content", "executable"].iter().all(|name| then.as_ref().and_then(|t| t.get(*name)) == rendered.get(*name))
            }
            _ => true,
        };
        step.traits.has(Traits::COMPLETED) && same
    }

    fn set_out(&mut self, span: u32, out: Out) {
        if let Some(log) = &mut self.log {
            log.push((span, self.outs[span as usize]));
        }
        self.outs[span as usize] = out;
    }

    /// A container's output differs, and is not known, when that of any descendant does.
    fn set_output(&mut self, step: &Step<'_>, differs: Level, blocked: Level, known: Option<SpanValue>) {
        let span = step.span as u32;
        if differs > Level::No || blocked > Level::No {
            self.drift = self.drift.max(differs).max(blocked);
            self.drifted.add(span);
            let level = if blocked == Level::Certain || known.is_some() { Level::Certain } else { Level::Maybe };
            let containers = &self.view.graph.containers;
            let mut at = step.container;
            // A loop of parents would never end.
            for _ in 0..MAX_DEPTH {
                let Some(container) = containers.get(at as usize).filter(|c| c.span != span) else { break };
                let out = self.outs[container.span as usize];
                self.set_out(container.span, Out::new(out.differs(), out.blocked().max(level), out.is_known()));
                at = container.above;
            }
        }
        let is_known = known.is_some();
        self.known.extend(known.map(|value| (span, value)));
        self.set_out(span, Out::new(differs, blocked, is_known));
    }

    /// What runs as part of a unit has no result of its own once the unit has not its recorded one.
    fn leave_out_inner(&mut self, step: &Step<'_>, level: Level) {
        if self.view.graph.inner.is_empty() {
            return;
        }
        for &inner in self.view.graph.inner(step.span) {
            self.set_out(inner, Out::new(Level::No, level, false));
        }
    }
}
