//! Spans whose records are looked at: those that patches act on, and readers of outputs that patches give.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::answers::request_digest;
use crate::binding::{BindingError, SpanValue};
use crate::contract::{Contract, Field, IncompleteContract, Rendered, arguments_digest};
use crate::footprint::Pattern;
use crate::graph::{Graph, Pat, Tree};
use crate::plan::reasons::Rendering;
use crate::plan::{Level, Prepared, View};
use crate::reason::Cause;

/// A path that a patch gives a content, and whether that is the recorded one, where this is known.
pub(super) type Written = (Pat, Option<bool>);

/// What patches say, by place in the run.
pub(super) struct Acts {
    /// Spans whose own fields or outputs are patched, and whose records are therefore read.
    pub named: Vec<u32>,
    /// Containers and units whose variables are patched.
    pub env: Vec<u32>,
    /// Targets of files and workspaces, in order, with what is written before them: a whole workspace first.
    pub before: Vec<(u32, Vec<Written>)>,
    /// What new commands may see and write.
    pub footprints: BTreeMap<u32, (Vec<Pat>, Vec<Pat>)>,
    /// First halves of the digests of requests that the record or a fixture answers.
    pub answered: HashSet<[u8; 16]>,
}

impl Acts {
    /// Adds nodes to the tree where patches name paths that the run has not.
    pub fn of(view: &View<'_>, tree: &mut Cow<'_, Tree>) -> Self {
        let (fork, place) = (view.fork, |small: &usize| view.place(*small));
        let patches = &fork.patches;
        let mut node = |pattern: &Pattern| tree.find(pattern).unwrap_or_else(|| tree.to_mut().find_or_add(pattern));
        let keys = patches.command.keys().chain(patches.output.keys()).chain(patches.prompt.keys()).chain(patches.model_config.keys());
        let targets: BTreeSet<usize> = patches.files.keys().chain(patches.snapshot.keys()).copied().collect();
        let before = targets.iter().map(|target| {
            let mut writes = Vec::new();
            if let Some(fact) = patches.snapshot.get(target).and_then(|s| s.fact.as_ref()) {
                writes.push((Pat::ALL, fact.changed.as_ref().map(|_| true)));
                writes.extend(fact.changed.iter().flatten().map(|path| (node(&Pattern::Path(path.clone())), Some(false))));
            }
            let files = patches.files.get(target).into_iter().flatten();
            writes.extend(files.map(|file| (node(&Pattern::Path(file.path.clone())), file.same)));
            (place(target), writes)
        });
        let before = before.collect();
        let footprints = patches.command.iter().filter(|(_, command)| command.voids_footprint()).filter_map(|(target, _)| {
            let footprint = Contract::patched(fork.source, patches, *target).ok()?.footprint;
            let mut all = |patterns: &[Pattern]| patterns.iter().map(|p| if *p == Pattern::all() { Pat::ALL } else { node(p) }).collect();
            Some((place(target), (all(&footprint.sees), all(&footprint.writes))))
        });
        Self {
            footprints: footprints.collect(),
            named: keys.chain(patches.env.keys()).map(place).collect(),
            env: patches.env.keys().map(place).collect(),
            before,
            answered: answered(fork, view.graph),
        }
    }
}

fn answered(fork: &Prepared<'_>, graph: &Graph) -> HashSet<[u8; 16]> {
    let Some(answers) = fork.answers() else { return HashSet::new() };
    let recorded = graph.requests.iter().filter(|(_, _, answered)| *answered).map(|(_, digest, _)| *digest);
    recorded.chain(answers.fixtures().map(half)).collect()
}

pub(super) fn half(digest: &crate::Digest) -> [u8; 16] {
    let mut half = [0; 16];
    half.copy_from_slice(&digest.as_bytes()[..16]);
    half
}

/// A span by its record, as recorded and as patched.
pub(super) struct Exact {
    pub small: usize,
    /// A patch acts on its own inputs.
    pub named: bool,
    pub recorded: Result<Contract, IncompleteContract>,
    pub patched: Result<Contract, IncompleteContract>,
}

impl Exact {
    pub fn of(fork: &Prepared<'_>, small: usize) -> Self {
        Self {
            small,
            named: fork.patches.names(small),
            recorded: Contract::recorded(fork.source, small),
            patched: Contract::patched(fork.source, &fork.patches, small),
        }
    }
}

/// Field by field: certainly different, or different if an upstream output is. Fields that can't be rendered yet are left out.
pub(super) fn compare(
    fork: &Prepared<'_>,
    span: usize,
    recorded: &Contract,
    patched: &Contract,
    rendered: Option<&Rendered>,
) -> Vec<(Level, Cause)> {
    let mut found = Vec::new();
    let then = fork.recorded_inputs(span);
    let names: BTreeSet<_> = recorded.fields.keys().chain(patched.fields.keys()).collect();
    for name in names {
        let (before, after) = (recorded.fields.get(name), patched.fields.get(name));
        let template_patched = before != after;
        let now = match (rendered, after) {
            (Some(rendered), _) => rendered.get(name),
            (None, Some(Field::Literal(value))) => Some(value),
            (None, Some(Field::Bound { .. } | Field::Request { .. })) => {
                if template_patched {
                    found.push((Level::Maybe, Cause::PatchedInput));
                }
                continue;
            }
            (None, None) => None,
        };
        let was = match (&then, before) {
            (Some(then), _) => then.get(name),
            (None, Some(Field::Literal(value))) => Some(value),
            _ => None,
        };
        if now != was {
            let cause = if template_patched { Cause::PatchedInput } else { Cause::UpstreamOutputChanged };
            found.push((Level::Certain, cause));
        }
    }
    found
}

/// How much is known of a unit's inputs before anything runs.
pub(super) enum Known {
    /// Some output that they are rendered from is not known.
    Open,
    AsRecorded,
    /// As recorded, and they can't be rendered.
    Failing,
    Rendered(Rendered),
    Failed(Box<BindingError>),
}

/// Inputs that are known, for the reasons that need them.
pub(super) struct Inputs<'a> {
    pub fork: &'a Prepared<'a>,
    pub graph: &'a Graph,
    pub answered: &'a HashSet<[u8; 16]>,
    pub span: usize,
    /// Absent: as recorded.
    pub rendered: Option<(usize, &'a Rendered)>,
}

impl Rendering for Inputs<'_> {
    fn is_approved(&self) -> bool {
        self.rendered.is_none_or(|(small, rendered)| {
            let now = arguments_digest(rendered);
            // What a fork before this one left blocked, nobody has let through with the arguments that it has since.
            let then = self.fork.recorded_inputs(small).filter(|_| !self.fork.source.was_left_out(small)).map(|r| arguments_digest(&r));
            then == Some(now) || self.fork.is_approved(small, &now)
        })
    }

    fn differing_binding(&self) -> bool {
        self.rendered.is_some_and(|(small, rendered)| crate::plan::reasons::differing_binding(self.fork, small, rendered).is_some())
    }

    fn is_answered(&self) -> bool {
        match self.rendered {
            Some((_, rendered)) => rendered.get("request").is_some_and(|r| self.answered.contains(&half(&request_digest(r)))),
            None => {
                let requests = &self.graph.requests;
                let own = requests.binary_search_by_key(&(self.span as u32), |(span, _, _)| *span);
                own.is_ok_and(|at| self.answered.contains(&requests[at].1))
            }
        }
    }
}

/// A value that a patch gives, or the recorded one.
pub(super) fn value(fork: &Prepared<'_>, known: Option<&SpanValue>, small: usize) -> Result<SpanValue, String> {
    known.map_or_else(|| crate::plan::recorded_value(fork.source, small), |value| Ok(value.clone()))
}
