//! Why a span can't be executed: one function for the plan and for the run.

use super::{Level, Prepared};
use crate::answers::request_digest;
use crate::binding::BindingError;
use crate::contract::{Contract, Rendered, arguments_digest};
use crate::fork::ModelMode;
use crate::graph::Traits;
use crate::model::SpanKind;
use crate::patch::kind_takes_output;
use crate::reason::{Blocked, BlockedReason};
use crate::source::Source;

/// A span in the words of another one's reason.
pub(crate) struct Mentioned<'a> {
    pub id: &'a str,
    pub name: &'a str,
    pub kind: SpanKind,
}

/// The output of an upstream span is not known.
pub(crate) fn upstream_unknown(upstream: &Mentioned<'_>, unit: Option<&str>, is_container: bool) -> Blocked {
    let name = upstream.name;
    let message = match unit {
        Some(unit) => format!(
            "it needs the output of {name:?}, which runs as part of {unit:?} and is not recorded anew by itself; override the input that uses it"
        ),
        None if is_container => {
            format!(
                "it needs the output of {name:?}, which only holds other spans together, and one of those differs; override the input that uses it"
            )
        }
        None => {
            let instead = match upstream.kind {
                SpanKind::LlmCall => "say in spec.model who answers it, override the output of a step that reads it",
                kind if kind_takes_output(kind) => "override that output with a ToolOutputOverride",
                _ => "override the output of a step that reads it",
            };
            format!("it needs the output of {name:?}, which is blocked; {instead}, or fork later")
        }
    };
    Blocked::upstream(BlockedReason::UpstreamBlocked, upstream.id, message)
}

/// Files that a blocked span would have written are not known.
pub(crate) fn files_of(trigger: &Mentioned<'_>) -> Blocked {
    let message =
        format!("it may see files that {:?} would have written, which is blocked; write them with a FileContentOverride", trigger.name);
    Blocked::upstream(BlockedReason::UpstreamBlocked, trigger.id, message)
}

/// A member of an entangled group whose inputs are as recorded, and which can't run with the others.
pub(crate) fn not_told_from(other: &str) -> Blocked {
    Blocked::new(
        BlockedReason::IncompleteContract,
        format!(
            "IncompleteContract(writes): its file changes can't be told from those of {other:?}, which ran at the same time and differs; record what each of them reads and writes"
        ),
    )
}

fn mentioned(source: &Source, span: usize) -> Mentioned<'_> {
    let record = &source.spans[span];
    Mentioned { id: &record.id, name: &record.opening.name, kind: record.opening.kind }
}

/// [`upstream_unknown`] by the record.
pub fn upstream_blocked(source: &Source, upstream: usize) -> Blocked {
    let unit = source.unit_above(upstream).map(|unit| source.spans[unit].opening.name.as_str());
    upstream_unknown(&mentioned(source, upstream), unit, source.is_container(upstream))
}

/// [`files_of`] by the record; without a workspace to begin with, nobody would have written them.
pub fn files_unknown(fork: &Prepared<'_>, trigger: usize, span: usize) -> Blocked {
    let source = fork.source;
    if trigger == span || (trigger == fork.first && source.start_state(fork.first).is_none()) {
        return plain_words("", SpanKind::AdapterInternal, Why::NoSnapshot);
    }
    files_of(&mentioned(source, trigger))
}

/// [`not_told_from`] by the record.
pub fn cannot_tell_writes(source: &Source, span: usize) -> Blocked {
    let others = source.entangled(span).map_or(&[][..], |g| &g.members);
    let other = others.iter().find(|&&m| m != span).map_or("", |&m| source.spans[m].opening.name.as_str());
    not_told_from(other)
}

/// Why a span is blocked, in numbers; its words are found when they are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Why {
    /// The output of this span is not known.
    Upstream(u32),
    /// Files that this span would have written are not known.
    Files(u32),
    NoSnapshot,
    CannotTell,
    Denied,
    Redacted,
    Human,
    ModelBlocked,
    NoExecutor,
    Overridden,
    RecordOnly,
    Network,
    ModelInputs,
    Broken,
    Unbound,
    MayNotRender,
    Failed,
    Approval,
    MayNeedApproval,
    Binding,
    MayHaveBinding,
    NoAnswer,
    MayHaveNoAnswer,
    NotCompared,
    CannotRender,
    NotCaptured,
}

impl Why {
    pub fn reason(self) -> BlockedReason {
        use BlockedReason::*;
        match self {
            Why::Upstream(_) | Why::Files(_) => UpstreamBlocked,
            Why::NoSnapshot | Why::NotCaptured => SnapshotMissing,
            Why::CannotTell | Why::ModelInputs | Why::Broken | Why::Binding | Why::MayHaveBinding | Why::NotCompared => IncompleteContract,
            Why::Denied => VerdictDenied,
            Why::Redacted => RedactedInput,
            Why::Human => HumanInputNeeded,
            Why::ModelBlocked => BlockedReason::ModelBlocked,
            Why::NoExecutor => BlockedReason::NoExecutor,
            Why::Overridden | Why::RecordOnly => BlockedReason::RecordOnly,
            Why::Network => NetworkNeeded,
            Why::Unbound | Why::MayNotRender | Why::Failed | Why::CannotRender => BindingFailed,
            Why::Approval | Why::MayNeedApproval => ApprovalNeeded,
            Why::NoAnswer | Why::MayHaveNoAnswer => NoRecordedResponse,
        }
    }

    /// The span that it comes from.
    pub fn from(self) -> Option<u32> {
        match self {
            Why::Upstream(span) | Why::Files(span) => Some(span),
            _ => None,
        }
    }

    /// Whether its words are in the record, beyond name and kind.
    pub fn is_in_record(self) -> bool {
        use Why::*;
        matches!(self, Denied | Redacted | Broken | Unbound | Failed | Approval | Binding | NoAnswer | MayHaveBinding)
    }

    /// As a number that no other reason has.
    pub(crate) fn code(self) -> u64 {
        let from = self.from().map_or(0, |span| u64::from(span) + 1);
        let tag = match self {
            Why::Upstream(_) => 0,
            Why::Files(_) => 1,
            Why::NoSnapshot => 2,
            Why::CannotTell => 3,
            Why::Denied => 4,
            Why::Redacted => 5,
            Why::Human => 6,
            Why::ModelBlocked => 7,
            Why::NoExecutor => 8,
            Why::Overridden => 9,
            Why::RecordOnly => 10,
            Why::Network => 11,
            Why::ModelInputs => 12,
            Why::Broken => 13,
            Why::Unbound => 14,
            Why::MayNotRender => 15,
            Why::Failed => 16,
            Why::Approval => 17,
            Why::MayNeedApproval => 18,
            Why::Binding => 19,
            Why::MayHaveBinding => 20,
            Why::NoAnswer => 21,
            Why::MayHaveNoAnswer => 22,
            Why::NotCompared => 23,
            Why::CannotRender => 24,
            Why::NotCaptured => 25,
        };
        from << 8 | tag
    }
}

/// Inputs of a span that are known.
pub(crate) trait Rendering {
    /// Its arguments are the recorded ones, or approved.
    fn is_approved(&self) -> bool;
    /// A binding of a model call that is in no place of its request has another value.
    fn differing_binding(&self) -> bool;
    /// The record or a fixture answers its request.
    fn is_answered(&self) -> bool;
}

/// Why a span itself can't be executed once its inputs differ: one function for the plan and for the run. `rendered` is absent while
/// an input is not known; a reason that needs it is then a "maybe", and so is one that a result of another fork may spare it.
pub(crate) fn decide(fork: &Prepared<'_>, traits: Traits, rendered: Option<&dyn Rendering>) -> Vec<(Why, Level)> {
    let mut whys = without_cache(fork, traits, rendered);
    if !whys.is_empty() && fork.may_use_cache(traits) {
        let spared = |why| matches!(why, Why::NoExecutor | Why::Approval | Why::MayNeedApproval | Why::Network);
        for (_, level) in whys.iter_mut().filter(|(why, _)| spared(*why)) {
            *level = Level::Maybe;
        }
    }
    whys
}

fn without_cache(fork: &Prepared<'_>, traits: Traits, rendered: Option<&dyn Rendering>) -> Vec<(Why, Level)> {
    let asks = traits.has(Traits::MODEL);
    let certain = [
        (Why::Denied, traits.has(Traits::REFUSED)),
        (Why::Redacted, traits.has(Traits::REDACTED)),
        (Why::Human, traits.has(Traits::HUMAN)),
        (Why::ModelBlocked, fork.spec.model.mode == ModelMode::Blocked && traits.has(Traits::MODEL | Traits::LLM_CALL)),
        (Why::NoExecutor, !traits.has(Traits::EXECUTOR)),
        (Why::Overridden, fork.check && traits.has(Traits::OVERRIDDEN)),
        (Why::RecordOnly, traits.has(Traits::RECORD_ONLY)),
        (Why::Network, traits.has(Traits::NETWORK) && fork.spec.sandbox.egress.is_empty()),
        (Why::ModelInputs, asks && traits.has(Traits::INPUTS_UNKNOWN)),
        (Why::Broken, traits.has(Traits::BROKEN)),
        (Why::Unbound, traits.has(Traits::UNBOUND)),
    ];
    if let Some((why, _)) = certain.into_iter().find(|(_, is)| *is) {
        return vec![(why, Level::Certain)];
    }
    let mut whys = Vec::new();
    if rendered.is_none() && !traits.has(Traits::ALWAYS_RENDERS) {
        whys.push((Why::MayNotRender, Level::Maybe));
    }
    if traits.has(Traits::GATED) {
        // A verdict was given for the arguments that it was given for.
        match rendered {
            None => whys.push((Why::MayNeedApproval, Level::Maybe)),
            Some(inputs) if inputs.is_approved() => {}
            Some(_) => whys.push((Why::Approval, Level::Certain)),
        }
    }
    if asks {
        whys.extend(of_model(fork, traits, rendered));
    }
    whys
}

fn of_model(fork: &Prepared<'_>, traits: Traits, rendered: Option<&dyn Rendering>) -> Vec<(Why, Level)> {
    let mut whys = Vec::new();
    if traits.has(Traits::PLAIN) {
        match rendered {
            Some(inputs) if inputs.differing_binding() => return vec![(Why::Binding, Level::Certain)],
            Some(_) => {}
            None => whys.push((Why::MayHaveBinding, Level::Maybe)),
        }
    }
    if fork.spec.model.mode == ModelMode::Recorded {
        match rendered {
            Some(inputs) if inputs.is_answered() => {}
            Some(_) => whys.push((Why::NoAnswer, Level::Certain)),
            None => whys.push((Why::MayHaveNoAnswer, Level::Maybe)),
        }
    }
    whys
}

/// The first binding in no place of a model call's request that has another value than recorded.
pub(crate) fn differing_binding(fork: &Prepared<'_>, span: usize, rendered: &Rendered) -> Option<String> {
    let contract = Contract::patched(fork.source, &fork.patches, span).ok()?;
    let then = fork.recorded_inputs(span);
    let mut differing = contract.plain().filter(|f| then.as_ref().and_then(|t| t.get(*f)) != rendered.get(*f));
    differing.next().cloned()
}

/// A span of a run with all its records, and what it is rendered to.
struct InRun<'a>(&'a Prepared<'a>, usize, &'a Rendered);

impl Rendering for InRun<'_> {
    fn is_approved(&self) -> bool {
        let Self(fork, span, rendered) = self;
        let now = arguments_digest(rendered);
        // What a fork before this one left blocked, nobody has let through with the arguments that it has since.
        let then = fork.recorded_inputs(*span).filter(|_| !fork.source.was_left_out(*span)).map(|r| arguments_digest(&r));
        then == Some(now) || fork.is_approved(*span, &now)
    }

    fn differing_binding(&self) -> bool {
        differing_binding(self.0, self.1, self.2).is_some()
    }

    fn is_answered(&self) -> bool {
        let Self(fork, span, rendered) = self;
        rendered.get("request").is_some_and(|request| fork.answers().and_then(|a| a.find(*span, request)).is_some())
    }
}

/// As [`decide`], by the span's record, in words.
pub fn own_reasons(fork: &Prepared<'_>, span: usize, rendered: Option<&Rendered>) -> Vec<(Blocked, Level)> {
    let contract = Contract::patched(fork.source, &fork.patches, span);
    let traits =
        Traits::of_record(&fork.source.spans[span]) | Traits::of_contract(fork.source, span, contract.as_ref(), Some(&fork.patches));
    let inputs = rendered.map(|rendered| InRun(fork, span, rendered));
    let whys = decide(fork, traits, inputs.as_ref().map(|i| i as &dyn Rendering));
    whys.into_iter().map(|(why, level)| (words(fork, span, why, rendered, None), level)).collect()
}

/// The words of a reason that is the span's own.
pub(crate) fn words(fork: &Prepared<'_>, span: usize, why: Why, rendered: Option<&Rendered>, error: Option<&BindingError>) -> Blocked {
    let record = &fork.source.spans[span];
    let name = &record.opening.name;
    let contract = || Contract::patched(fork.source, &fork.patches, span);
    let message = match why {
        Why::Denied => format!("{name:?} was denied ({}) when recorded, and stays so", record.verdict()),
        Why::Redacted => format!("inputs of {name:?} were redacted when recorded: {}", record.opening.redacted.join(", ")),
        Why::Broken => match contract() {
            Err(error) => format!("IncompleteContract({}): {name:?} can't be run: {error}", error.field()),
            Ok(_) => format!("IncompleteContract: {name:?} can't be run"),
        },
        Why::Unbound => {
            let error = contract().ok().and_then(|c| c.bound_spans(fork.source).err());
            format!("a binding of {name:?} can't be rendered: {}", error.map(|e| e.to_string()).unwrap_or_default())
        }
        Why::Failed => {
            let again = || contract().ok()?.render(fork.source, &|i| super::recorded_value(fork.source, i)).err();
            let error = error.cloned().or_else(again);
            format!("a binding of {name:?} can't be rendered: {}", error.map(|e| e.to_string()).unwrap_or_default())
        }
        Why::Approval => {
            let now = rendered.map(|r| arguments_digest(r).to_string()).unwrap_or_default();
            format!(
                "{name:?} was let through a gate with other arguments; to approve these, add {{span: {:?}, inputDigest: {now}}} to spec.approvals",
                record.id
            )
        }
        Why::Binding | Why::MayHaveBinding => {
            let differing = rendered.and_then(|r| differing_binding(fork, span, r));
            let field = differing.or_else(|| contract().ok()?.plain().next().cloned()).unwrap_or_default();
            let field = field.rsplit('.').next().unwrap_or(&field);
            format!(
                "IncompleteContract(request): the binding {field:?} of {name:?} has another value, and is recorded in no place of the request; record it under the place's JSON pointer, or replace all messages with a PromptEdit"
            )
        }
        Why::NoAnswer => {
            let digest = rendered.and_then(|r| r.get("request")).map(|r| request_digest(r).to_string()).unwrap_or_default();
            format!(
                "neither the run nor spec.model.fixtures has an answer to the request of {name:?}; a fixture for it has the requestDigest {digest}"
            )
        }
        why => return plain_words(name, record.opening.kind, why),
    };
    Blocked::new(why.reason(), message)
}

/// The words of a reason for which name and kind are enough.
pub(crate) fn plain_words(name: &str, kind: SpanKind, why: Why) -> Blocked {
    let message = match why {
        Why::Human => format!("{name:?} needs a person's answer; override its readers' inputs, or fork after it"),
        Why::ModelBlocked => {
            format!("{name:?} is a model call, and spec.model.mode is Blocked; Recorded, Command or Endpoint can answer it")
        }
        Why::NoExecutor => format!("{name:?} ({kind}) was recorded without an executor, so nothing can run it"),
        Why::Overridden => format!("the output of {name:?} was given by a patch, so there is nothing to reproduce"),
        Why::RecordOnly => format!("{name:?} was recorded with the policy RecordOnly"),
        Why::Network => format!("{name:?} needs the network, and spec.sandbox.egress opens none of it"),
        Why::ModelInputs => {
            format!("IncompleteContract(input_bindings): what {name:?} was asked depends on inputs that were not recorded")
        }
        Why::MayNotRender => format!("a binding of {name:?} may turn out not to fit the output that it is rendered with"),
        Why::MayNeedApproval => format!("{name:?} was let through a gate; if its arguments turn out others, it needs approval again"),
        Why::MayHaveNoAnswer => format!("the request of {name:?} is not known yet; it is blocked if nothing recorded answers it"),
        Why::NotCompared => format!("IncompleteContract(output): {name:?} has no recorded output to compare with"),
        Why::CannotRender => format!("the recorded inputs of {name:?} can't be rendered"),
        Why::NotCaptured => format!("the workspace around {name:?} was not recorded"),
        Why::NoSnapshot => "no workspace snapshot was recorded before the fork span; fork at a later span that has one".to_owned(),
        // Those that need more are told by who has it.
        why => format!("{name:?} can't be run: {}", why.reason()),
    };
    Blocked::new(why.reason(), message)
}
