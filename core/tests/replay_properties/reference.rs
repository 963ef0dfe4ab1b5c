//! The naive reference: from the fork span on everything is executed again, in order. It knows nothing of plans, digests or reuse:
//! it renders, looks at the files, and runs.

use std::collections::{BTreeMap, BTreeSet};

use replayfork_core::binding::SpanValue;
use replayfork_core::contract::{Action, Contract, Rendered, action, arguments_digest};
use replayfork_core::footprint::{Footprint, Pattern};
use replayfork_core::fork::{ForkSpec, ModelMode};
use replayfork_core::model::{Executor, Inputs, Output, ReplayPolicy, Status, Verdict};
use replayfork_core::patch::{Contents, Patches};
use replayfork_core::source::Source;

use crate::common::files::{Entry, Reach, States, covered, set};
use crate::common::product::{End, seen, value};
use crate::world::{PATHS, perform};

fn same(a: Option<&SpanValue>, b: Option<&SpanValue>) -> bool {
    a.map(seen) == b.map(seen)
}

pub struct Reference<'a> {
    pub source: &'a Source,
    pub states: &'a States,
    pub spec: &'a ForkSpec,
    pub first: usize,
    /// Units that a result of another fork stood for.
    pub cached: &'a BTreeSet<usize>,
    /// Where early cutoff is off: the units that are affected, and so don't keep their results even if they could.
    pub forced: BTreeSet<usize>,
    /// Units that the plan says are affected or overridden: before they run, nobody knows what they give.
    pub planned: BTreeSet<usize>,
    patches: Patches,
    end: End,
    /// Has no output of its own, as it ran as part of a unit that has another one.
    left_out: BTreeSet<usize>,
    /// By first member: whether an entangled group is executed.
    groups: BTreeMap<usize, bool>,
    drifted: bool,
    /// Something has changed a file.
    touched: BTreeSet<String>,
}

impl<'a> Reference<'a> {
    pub fn new(source: &'a Source, states: &'a States, spec: &'a ForkSpec, fork_span: usize, cached: &'a BTreeSet<usize>) -> Self {
        let first = source.walk_from(fork_span);
        let patches = Patches::resolve(source, &Contents::default(), &spec.source, fork_span, first, &spec.patches).unwrap();
        let left_out = (0..source.spans.len()).filter(|&i| source.was_left_out(i)).collect();
        let (forced, planned) = (BTreeSet::new(), BTreeSet::new());
        Self {
            source,
            states,
            spec,
            first,
            cached,
            forced,
            planned,
            patches,
            end: End::default(),
            left_out,
            groups: BTreeMap::new(),
            drifted: false,
            touched: BTreeSet::new(),
        }
    }

    pub fn run(mut self, unknown: BTreeSet<String>) -> End {
        self.end.unknown = unknown;
        if let Some(start) = self.source.start_state(self.first) {
            self.end.files = self.states.0[&start.content].clone();
        }
        for n in (self.first..self.source.spans.len()).filter(|&n| self.source.is_unit(n)) {
            self.visit(n);
        }
        self.end
    }

    fn output(&self, i: usize) -> Result<SpanValue, String> {
        if self.is_blocked(i) {
            return Err("blocked".into());
        }
        match self.end.outputs.get(&i) {
            Some(given) => given.clone().ok_or_else(|| "nothing".to_owned()),
            None => value(self.source, i),
        }
    }

    fn is_blocked(&self, i: usize) -> bool {
        if self.end.blocked.contains(&i) || (self.left_out.contains(&i) && !self.end.outputs.contains_key(&i)) {
            return true;
        }
        // A container has no known output once one below it differs.
        self.source.is_container(i)
            && (self.first..self.source.spans.len()).any(|d| {
                self.source.ancestors(d).contains(&i)
                    && (self.end.blocked.contains(&d)
                        || self.end.outputs.get(&d).is_some_and(|now| !same(now.as_ref(), value(self.source, d).ok().as_ref())))
            })
    }

    fn keep(&mut self, n: usize) {
        let patched = self.patches.files.get(&n).filter(|_| self.patches.output.contains_key(&n));
        let mut paths = self.source.kept_changes(n).to_vec();
        let members = match self.source.entangled(n) {
            None => vec![n],
            Some(group) if group.members.last() == Some(&n) => group.members.clone(),
            Some(_) => vec![],
        };
        for record in members.into_iter().map(|m| &self.source.spans[m]).filter(|r| r.status() == Status::Completed) {
            if let Some(Executor::FileWrite { path, .. }) = &record.opening.executor {
                paths.push(path.clone());
            }
        }
        let after = self.source.state_after(n).map(|s| self.states.0[&s.content].clone());
        for path in paths.iter().filter(|p| !patched.is_some_and(|files| files.iter().any(|f| f.path == **p))) {
            if let Some(after) = &after {
                set(&mut self.end.files, path, after.get(path));
                self.end.unknown.remove(path);
                self.touched.remove(path);
            }
        }
    }

    fn give(&mut self, n: usize, given: Option<SpanValue>) {
        let differs = !same(given.as_ref(), value(self.source, n).ok().as_ref());
        self.drifted |= differs;
        self.end.outputs.insert(n, given);
    }

    fn forget(&mut self, n: usize) {
        let writes = self.contract(n).map_or_else(|| vec![Pattern::all()], |c| c.footprint.writes);
        let unknown = PATHS.iter().filter(|p| covered(&writes, p)).map(|p| (*p).to_owned());
        self.end.unknown.extend(unknown.chain(self.source.changed(n).during.iter().cloned()));
    }

    fn contract(&self, n: usize) -> Option<Contract> {
        Contract::patched(self.source, &self.patches, n).ok()
    }

    fn begin(&mut self, n: usize) {
        let record = &self.source.spans[n];
        if let Some(state) = record.snapshot_before.filter(|_| n != self.first) {
            for path in &self.source.changed(n).before {
                set(&mut self.end.files, path, self.states.0[&state.content].get(path));
                self.end.unknown.remove(path);
                self.touched.remove(path);
            }
        }
        for target in self.patches.targets_before(self.source, n) {
            if let Some(snapshot) = self.patches.snapshot.get(&target) {
                let changed = snapshot.fact.as_ref().and_then(|f| f.changed.as_ref());
                // One that nobody can name stands for what is not known.
                self.touched.extend(changed.map_or_else(|| vec![String::new()], Clone::clone));
                self.end.files = self.states.0[&snapshot.content].clone();
                self.end.unknown.clear();
            }
            for file in self.patches.files.get(&target).into_iter().flatten() {
                let content = String::from_utf8(file.content.to_vec()).unwrap();
                set(&mut self.end.files, &file.path, Some(&Entry::File { content, executable: file.executable }));
                self.end.unknown.remove(&file.path);
                if file.same != Some(true) {
                    self.touched.insert(file.path.clone());
                }
            }
        }
    }

    fn visit(&mut self, n: usize) {
        let source = self.source;
        let record = &source.spans[n];
        self.begin(n);
        if let Some(group) = source.entangled(n).filter(|g| g.members[0] == n) {
            let runs = group.members.iter().any(|&m| self.forced.contains(&m) || !self.member_as_recorded(m, n));
            self.groups.insert(n, runs);
        }
        let entangled = source.entangled(n).map(|g| self.groups[&g.members[0]]);
        if let Some(output) = self.patches.output.get(&n) {
            let given = SpanValue { output: output.clone(), status: Status::Completed };
            let shows = source.shows_changes(n);
            if same(Some(&given), value(source, n).ok().as_ref()) && (entangled == Some(false) || shows) {
                self.keep(n);
                self.give(n, value(source, n).ok());
                return;
            }
            if shows {
                self.keep(n)
            } else {
                self.forget(n)
            }
            self.give(n, Some(given));
            self.left_out.extend(source.inner(n));
            return;
        }
        let contract = self.contract(n).unwrap();
        let recorded = Contract::recorded(source, n).unwrap();
        // What did not run stays so unless a patch changes it.
        let changed = self.patches.names(n) && (contract.fields != recorded.fields || contract.footprint != recorded.footprint);
        if record.did_not_run() && !changed {
            self.keep(n);
            self.give(n, value(source, n).ok());
            return;
        }
        if entangled == Some(false) {
            self.keep(n);
            self.give(n, value(source, n).ok());
            return;
        }
        let as_recorded = self.inputs_as_recorded(n, &contract);
        let can_run = self.inputs_there(n, &contract)
            && contract.render(source, &|i| self.output(i)).is_ok_and(|rendered| self.cached.contains(&n) || self.can_run(n, &rendered));
        // Where executing it again would not repeat what was recorded, or is not needed.
        let asks = matches!(record.opening.executor, Some(Executor::Model { .. }));
        let known = record.opening.inputs == Inputs::Known && source.changed(n).outside.is_empty();
        let given = record.fidelity == replayfork_core::model::Fidelity::Overridden;
        let repeats = known && !asks && !given && source.inner(n).is_empty();
        if as_recorded && entangled.is_none() && !self.forced.contains(&n) && source.has_result(n) && !(repeats && can_run) {
            self.keep(n);
            self.give(n, value(source, n).ok());
        } else if can_run {
            let rendered = contract.render(source, &|i| self.output(i)).unwrap();
            let action = action(source, &rendered, None).unwrap();
            let reach = Reach { sees: &contract.footprint.sees, writes: &contract.footprint.writes };
            let (status, output, files) = match &action {
                Action::AskModel { request } if self.spec.model.mode == ModelMode::Recorded => {
                    let text = self.recorded_answer(n, request).unwrap();
                    (Status::Completed, Output { text: text.clone(), stdout: text, ..Output::default() }, self.end.files.clone())
                }
                Action::AskModel { .. } => perform(&action, &reach, &self.end.files, "command"),
                _ => perform(&action, &reach, &self.end.files, ""),
            };
            if let Action::WriteFile { path, .. } = &action {
                self.end.unknown.remove(path);
            }
            if !as_recorded {
                self.touched.extend(crate::common::files::changed(&files, &self.end.files).into_keys());
            }
            self.end.files = files;
            self.give(n, Some(SpanValue { output, status }));
            self.left_out.extend(source.inner(n));
        } else {
            self.end.blocked.insert(n);
            self.drifted = true;
            self.left_out.extend(source.inner(n));
            self.forget(n);
        }
    }

    /// No input is missing because of a blocked span, or one without an output.
    fn inputs_there(&self, n: usize, contract: &Contract) -> bool {
        let bound = contract.bound_spans(self.source).unwrap();
        let sees = |path: &String| contract.footprint.sees.iter().any(|s| s.overlaps(&Pattern::Path(path.clone())));
        let _ = n;
        !bound.iter().chain(&contract.depends_on).any(|&u| self.is_blocked(u))
            && !bound.iter().any(|&u| self.end.outputs.get(&u).is_some_and(Option::is_none))
            && !self.end.unknown.iter().any(sees)
    }

    fn inputs_as_recorded(&self, n: usize, contract: &Contract) -> bool {
        let source = self.source;
        let recorded = Contract::recorded(source, n).unwrap();
        let then = recorded.render(source, &|i| value(source, i)).ok();
        if !self.inputs_there(n, contract) || then.is_none() || then != contract.render(source, &|i| self.output(i)).ok() {
            return false;
        }
        let value_of = |i: usize| if self.is_blocked(i) { None } else { self.output(i).ok() };
        let dependencies = contract.depends_on.iter().all(|&d| same(value_of(d).as_ref(), value(source, d).ok().as_ref()));
        let unknown_inputs = source.spans[n].opening.inputs == Inputs::Unknown;
        let everything = Footprint::whole();
        let footprint = if unknown_inputs { &everything } else { &contract.footprint };
        let before = if unknown_inputs { source.state_for_patches(n) } else { source.state_before(n) };
        let files = match before {
            _ if footprint.sees.is_empty() => true,
            Some(before) => {
                let before = &self.states.0[&before.content];
                PATHS.iter().filter(|p| covered(&footprint.sees, p)).all(|p| before.get(*p) == self.end.files.get(*p))
            }
            None => unknown_inputs && self.touched.is_empty(),
        };
        contract.footprint.sees == recorded.footprint.sees
            && contract.depends_on == recorded.depends_on
            && dependencies
            && files
            && !(unknown_inputs && self.drifted)
            && !source.was_left_out(n)
    }

    /// Whether a member of a group sees what it saw, given that the other members give what they gave.
    fn member_as_recorded(&mut self, member: usize, first: usize) -> bool {
        let source = self.source;
        let members = source.entangled(member).unwrap().members.clone();
        if let Some(output) = self.patches.output.get(&member) {
            let given = SpanValue { output: output.clone(), status: Status::Completed };
            return same(Some(&given), value(source, member).ok().as_ref());
        }
        let contract = self.contract(member).unwrap();
        // Where the plan reaches none of them, what is known before it runs is as recorded for all: the trial below says whether.
        let reached = members.iter().any(|m| self.planned.contains(m));
        if reached
            && (first + 1..member).any(|n| self.planned.contains(&n) && !members.contains(&n) && self.may_reach(n, member, &contract))
        {
            return false;
        }
        // What begins between two members is not known yet: looked at on a copy, with the group as recorded.
        let mut trial = Reference {
            patches: self.patches.clone(),
            end: self.end.clone(),
            left_out: self.left_out.clone(),
            groups: self.groups.clone(),
            forced: self.forced.clone(),
            planned: self.planned.clone(),
            touched: self.touched.clone(),
            ..*self
        };
        for n in (first..member).filter(|&n| source.is_unit(n)) {
            if members.contains(&n) {
                if n != first {
                    trial.begin(n);
                }
                trial.end.outputs.insert(n, value(source, n).ok());
                trial.keep(n);
            } else {
                trial.visit(n);
            }
        }
        if member != first {
            trial.begin(member);
        }
        trial.inputs_as_recorded(member, &contract) && source.has_result(member)
    }

    /// Whether a unit gives something that another one's inputs are made from.
    fn may_reach(&self, n: usize, reader: usize, contract: &Contract) -> bool {
        let source = self.source;
        let mut inputs = contract.bound_spans(source).unwrap();
        inputs.extend(&contract.depends_on);
        let writes = self.contract(n).map_or_else(|| vec![Pattern::all()], |c| c.footprint.writes);
        let changed = source.changed(n).during.iter().cloned().map(Pattern::Path);
        let sees = |w: Pattern| contract.footprint.sees.iter().any(|s| s.overlaps(&w));
        // Where the record shows what it changed, a given output leaves it at that.
        let as_recorded = self.patches.output.contains_key(&n) && source.shows_changes(n);
        source.spans[reader].opening.inputs == Inputs::Unknown
            || (!as_recorded && writes.into_iter().chain(changed).any(sees))
            || std::iter::once(&n).chain(&source.ancestors(n)).chain(source.inner(n)).any(|i| inputs.contains(i))
    }

    fn recorded_answer(&self, n: usize, request: &serde_json::Value) -> Option<String> {
        let asked = |i: usize| {
            let span = &self.source.spans[i];
            let is_call = matches!(span.opening.executor, Some(Executor::Model { .. }))
                && span.fidelity != replayfork_core::model::Fidelity::Overridden;
            let contract = Contract::recorded(self.source, i).ok().filter(|_| is_call)?;
            let mut rendered = contract.render(self.source, &|i| value(self.source, i)).ok()?;
            let output = span.output()?;
            (rendered.remove("request").as_ref() == Some(request)).then(|| output.text.clone())
        };
        let recorded = asked(n).or_else(|| (0..self.source.spans.len()).find_map(asked));
        recorded.or_else(|| {
            let fixtures = self.spec.model.fixtures.as_ref()?.inline.as_ref()?;
            let fixture = fixtures.iter().find(|f| f.request.as_ref() == Some(request))?;
            fixture.response.as_str().map(str::to_owned)
        })
    }

    fn can_run(&self, n: usize, rendered: &Rendered) -> bool {
        let record = &self.source.spans[n];
        let opening = &record.opening;
        if record.verdict().refuses() || !opening.redacted.is_empty() || opening.executor.is_none() {
            return false;
        }
        if opening.policy() == ReplayPolicy::RecordOnly || (opening.network && self.spec.sandbox.egress.is_empty()) {
            return false;
        }
        if record.verdict() == Verdict::GateAllow {
            let then = Contract::recorded(self.source, n).unwrap().render(self.source, &|i| value(self.source, i)).ok();
            let approved = |digest: &str| digest == arguments_digest(rendered).to_string();
            let consent = self.spec.approvals.iter().any(|a| a.span == record.id && approved(&a.input_digest));
            if (then.as_ref() != Some(rendered) || self.source.was_left_out(n)) && !consent {
                return false;
            }
        }
        if let Some(Executor::Model { .. }) = opening.executor {
            let request = &rendered["request"];
            return opening.inputs == Inputs::Known
                && match self.spec.model.mode {
                    ModelMode::Blocked => false,
                    ModelMode::Recorded => self.recorded_answer(n, request).is_some(),
                    ModelMode::Command | ModelMode::Endpoint => true,
                };
        }
        true
    }
}
