//! Units whose changes can't be told apart: reused together, or executed together.

use std::ops::Bound;

use super::{Replay, Workspace};
use crate::contract::Contract;
use crate::footprint::Pattern;
use crate::model::Inputs;
use crate::plan::recorded_value;

impl Replay<'_> {
    /// At the first member of a group: whether the group is executed. It is, unless every member's inputs are as recorded.
    pub(super) fn decide_entangled<W: Workspace>(&mut self, span: usize, workspace: &mut W) -> Result<(), W::Error> {
        let Some(group) = self.source.entangled(span).filter(|g| g.members[0] == span) else { return Ok(()) };
        let planned = group.members.iter().any(|m| self.planned.contains_key(m));
        let mut runs = planned && !self.fork.spec.reuse.early_cutoff;
        for &member in group.members.iter().filter(|_| planned) {
            runs = runs || self.member_differs(member, &group.members, workspace)?;
        }
        self.groups.insert(span, runs);
        Ok(())
    }

    fn member_differs<W: Workspace>(&self, member: usize, members: &[usize], workspace: &mut W) -> Result<bool, W::Error> {
        let (fork, source) = (self.fork, self.source);
        let first = members[0];
        if fork.patches.output.contains_key(&member) {
            return Ok(fork.overriding(member).is_some());
        }
        let Ok(contract) = Contract::patched(source, &fork.patches, member) else { return Ok(true) };
        // What patches write before the first member is there already; what they write after it is not.
        let after_first = (Bound::Excluded(first), Bound::Included(member));
        let unknown_inputs = source.spans[member].opening.inputs == Inputs::Unknown;
        let sees = |path: &str| unknown_inputs || contract.footprint.sees.iter().any(|s| s.overlaps(&Pattern::Path(path.to_owned())));
        let mut files = fork.patches.files.range(after_first).flat_map(|(_, files)| files);
        let mut snapshots = fork.patches.snapshot.range(after_first).filter_map(|(_, s)| s.fact.as_ref());
        if files.any(|f| f.same != Some(true) && sees(&f.path))
            || snapshots.any(|f| f.changed.as_ref().is_none_or(|changed| changed.iter().any(|path| sees(path))))
        {
            return Ok(true);
        }
        let amid = (first + 1..member).filter(|u| !members.contains(u) && source.is_unit(*u) && self.planned.contains_key(u));
        // Where the record shows what a step changed, a given output leaves it at that.
        let as_recorded = |u: usize| fork.patches.output.contains_key(&u) && source.shows_changes(u);
        let writes_seen = |u: usize| fork.may_write(u).iter().any(|w| contract.footprint.sees.iter().any(|s| s.overlaps(w)));
        let may_write = |u: usize| unknown_inputs || (!as_recorded(u) && writes_seen(u));
        if amid.into_iter().any(may_write) {
            return Ok(true);
        }
        let bound = contract.bound_spans(source).unwrap_or_default();
        let undecided = |&u: &usize| u > first && !members.contains(&u) && (!source.is_unit(u) || self.planned.contains_key(&u));
        if contract.depends_on.iter().chain(&bound).any(undecided) || !self.outputs_missing(&contract).is_empty() {
            return Ok(true);
        }
        // A workspace that a patch gives after the first member is, for what this one sees, the recorded one: that was looked at above.
        let given = fork.patches.snapshot.range(after_first).next().is_some();
        if !given && !self.files_missing(member, &contract).is_empty() {
            return Ok(true);
        }
        if !source.has_result(member) || source.was_left_out(member) {
            return Ok(true);
        }
        let Ok(rendered) = contract.render(source, &|i| self.value(i)) else { return Ok(true) };
        if given {
            let value = |i: &usize| self.value(*i).ok().map(|v| (v.output, v.status));
            let recorded = |i: &usize| recorded_value(source, *i).ok().map(|v| (v.output, v.status));
            let as_recorded = fork.recorded_inputs(member).is_some_and(|then| *then == rendered)
                && contract.depends_on.iter().all(|i| value(i) == recorded(i))
                && Contract::recorded(source, member).is_ok_and(|then| then.footprint.sees == contract.footprint.sees);
            return Ok(!as_recorded || fork.image_changed || (unknown_inputs && self.drifted));
        }
        let digest = self.digest(&contract, &rendered, workspace)?;
        if self.recorded_digest(member, workspace)? != Some(digest) {
            return Ok(true);
        }
        Ok(unknown_inputs && !self.all_as_recorded(member, workspace)?)
    }
}
