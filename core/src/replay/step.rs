//! What becomes of one span.

use super::{Execution, Outcome, Replay, Step, Workspace};
use crate::contract::{Action, Contract, Rendered, action};
use crate::footprint::Pattern;
use crate::fork::ModelMode;
use crate::model::Inputs;
use crate::plan::{Level, cannot_tell_writes, files_unknown, own_reasons, upstream_blocked};
use crate::reason::{Blocked, BlockedReason};

impl Replay<'_> {
    /// Decides about a span, after the changes that [`Replay::before`] gave have been applied.
    ///
    /// # Errors
    /// What the workspace gives.
    pub fn step<W: Workspace>(&mut self, span: usize, workspace: &mut W) -> Result<Step, W::Error> {
        let (fork, record) = (self.fork, &self.source.spans[span]);
        if fork.check {
            return self.step_of_check(span, workspace);
        }
        self.decide_entangled(span, workspace)?;
        if let Some(value) = fork.given(span) {
            let kept = match self.source.entangled(span) {
                Some(group) => self.groups.get(&group.members[0]) == Some(&false),
                None => self.source.shows_changes(span),
            };
            let changes = if kept || self.source.shows_changes(span) { self.kept_changes(span) } else { Vec::new() };
            return Ok(match fork.overriding(span) {
                None if kept => Step::Keep { reused: false, changes },
                _ => Step::Override { output: value.output, changes },
            });
        }
        if !self.planned.contains_key(&span) {
            return self.unaffected(span, workspace);
        }
        let runs_with_group = match self.source.entangled(span) {
            Some(group) if self.groups.get(&group.members[0]) == Some(&false) => {
                return Ok(Step::Keep { reused: true, changes: self.kept_changes(span) });
            }
            group => group.is_some(),
        };
        let Ok(contract) = Contract::patched(self.source, &fork.patches, span) else { return Ok(self.block(span, self.own(span, None))) };
        let blocked = self.inputs_missing(span, &contract);
        if !blocked.is_empty() {
            return Ok(self.block(span, blocked));
        }
        let rendered = match contract.render(self.source, &|i| self.value(i)) {
            Ok(rendered) => rendered,
            Err(error) => {
                let own = self.own(span, None);
                let failed = Blocked::new(
                    BlockedReason::BindingFailed,
                    format!("a binding of {:?} can't be rendered: {error}", record.opening.name),
                );
                return Ok(self.block(span, if own.is_empty() { vec![failed] } else { own }));
            }
        };
        let digest = self.digest(&contract, &rendered, workspace)?;
        let as_recorded = self.source.has_result(span)
            && !self.source.was_left_out(span)
            && self.recorded_digest(span, workspace)? == Some(digest)
            && (record.opening.inputs == Inputs::Known || self.all_as_recorded(span, workspace)?);
        if as_recorded && fork.spec.reuse.early_cutoff && !runs_with_group {
            return Ok(Step::Keep { reused: true, changes: self.kept_changes(span) });
        }
        let mut own = self.own(span, Some(&rendered));
        if as_recorded && runs_with_group && !own.is_empty() {
            own = vec![cannot_tell_writes(self.source, span)];
        }
        let key = self.cache_key(span, digest);
        let step = if own.is_empty() { self.execute(span, contract, rendered, digest) } else { self.block(span, own) };
        Ok(match key {
            Some(key) => Step::Cached { key, otherwise: Box::new(step) },
            None => step,
        })
    }

    fn execute(&self, span: usize, contract: Contract, rendered: Rendered, input_digest: crate::Digest) -> Step {
        let action = match action(self.source, &rendered, contract.timeout_ms) {
            Ok(action) => action,
            Err(message) => return self.block(span, vec![Blocked::new(BlockedReason::IncompleteContract, message)]),
        };
        let answer = match &action {
            Action::AskModel { request } if self.fork.spec.model.mode == ModelMode::Recorded => {
                self.fork.answers().and_then(|a| a.find(span, request)).cloned()
            }
            _ => None,
        };
        let cache_key = self.cache_key(span, input_digest);
        let execution = Box::new(Execution { action, rendered, input_digest, writes: contract.footprint.writes, cache_key });
        match answer {
            Some(answer) => Step::Serve(execution, answer),
            None => Step::Execute(execution),
        }
    }

    fn block(&self, span: usize, blocked: Vec<Blocked>) -> Step {
        Step::Block { blocked, unknown: self.fork.leaves_unknown(span) }
    }

    /// Inputs that are not known because of a blocked span, or one that ended without an output.
    fn inputs_missing(&self, span: usize, contract: &Contract) -> Vec<Blocked> {
        let mut blocked = self.outputs_missing(contract);
        blocked.extend(self.files_missing(span, contract));
        blocked
    }

    pub(super) fn outputs_missing(&self, contract: &Contract) -> Vec<Blocked> {
        let mut blocked = Vec::new();
        let bound = contract.bound_spans(self.source).unwrap_or_default();
        let mut upstreams: Vec<_> = contract.depends_on.iter().chain(&bound).copied().collect();
        upstreams.sort_unstable();
        upstreams.dedup();
        for upstream in upstreams {
            if self.is_blocked(upstream) {
                blocked.push(upstream_blocked(self.source, upstream));
            } else if bound.contains(&upstream) && matches!(self.results.get(&upstream), Some(Outcome::Nothing)) {
                let upstream = &self.source.spans[upstream];
                let message = format!(
                    "it needs the output of {:?}, which ended without one (`kubectl replay show RUN {}` says why); override that output, or whatever reads it",
                    upstream.opening.name, upstream.id
                );
                blocked.push(Blocked::upstream(BlockedReason::UpstreamEnded, &upstream.id, message));
            }
        }
        blocked
    }

    pub(super) fn files_missing(&self, span: usize, contract: &Contract) -> Vec<Blocked> {
        let mut triggers: Vec<usize> = contract.footprint.sees.iter().flat_map(|p| self.unknown(p)).collect();
        triggers.sort_unstable();
        triggers.dedup();
        triggers.into_iter().map(|t| files_unknown(self.fork, t, span)).collect()
    }

    fn own(&self, span: usize, rendered: Option<&Rendered>) -> Vec<Blocked> {
        let reasons = own_reasons(self.fork, span, rendered);
        // Without its rendered inputs a reason that needs them stands all the same: nothing will run.
        let certain = |level: &Level| *level == Level::Certain || rendered.is_some();
        reasons.into_iter().filter(|(_, level)| certain(level)).map(|(blocked, _)| blocked).collect()
    }

    /// Every output and the workspace are what they were when the span was recorded.
    pub(super) fn all_as_recorded<W: Workspace>(&self, span: usize, workspace: &mut W) -> Result<bool, W::Error> {
        if self.drifted {
            return Ok(false);
        }
        let everything = [Pattern::all()];
        match self.source.state_for_patches(span) {
            Some(before) => Ok(workspace.now(&everything)? == workspace.recorded(&before, &everything)?),
            None => Ok(self.touched.is_empty()),
        }
    }

    fn unaffected<W: Workspace>(&self, span: usize, workspace: &mut W) -> Result<Step, W::Error> {
        let record = &self.source.spans[span];
        let keep = Step::Keep { reused: false, changes: self.kept_changes(span) };
        let before = self.source.state_before(span).filter(|_| record.opening.executor.is_some() && !record.did_not_run());
        let (Some(before), Ok(contract)) = (before, Contract::recorded(self.source, span)) else { return Ok(keep) };
        for pattern in &contract.footprint.sees {
            let one = std::slice::from_ref(pattern);
            if workspace.now(one)? != workspace.recorded(&before, one)? {
                return Ok(Step::Inconsistent {
                    span: record.id.clone(),
                    message: format!(
                        "span {:?} should see {pattern} as recorded, and it is not; a span before it wrote outside of what it declared",
                        record.opening.name
                    ),
                });
            }
        }
        Ok(keep)
    }

    fn step_of_check<W: Workspace>(&self, span: usize, workspace: &mut W) -> Result<Step, W::Error> {
        let stays = Step::Keep { reused: false, changes: Vec::new() };
        let Some(planned) = self.planned.get(&span).map(|&n| &self.plan.spans[n]) else { return Ok(stays) };
        if !planned.mark.is_some_and(crate::plan::Mark::may_run) {
            return Ok(Step::NotExecutable(planned.blocked.clone()));
        }
        let contract = Contract::recorded(self.source, span).ok();
        let (Some(contract), Some(rendered)) = (contract, self.fork.recorded_inputs(span)) else { return Ok(stays) };
        let digest = match self.recorded_digest(span, workspace)? {
            Some(digest) => digest,
            None => self.digest(&contract, &rendered, workspace)?,
        };
        Ok(self.execute(span, contract, (*rendered).clone(), digest))
    }
}
