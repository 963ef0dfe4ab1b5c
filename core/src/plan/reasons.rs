//! Why a span can't be executed: one function for the plan and for the run.

use super::{Level, Prepared};
use crate::answers::request_digest;
use crate::contract::{Contract, Rendered, arguments_digest};
use crate::fork::ModelMode;
use crate::model::{Executor, Fidelity, Inputs, ReplayPolicy, SpanKind, Verdict};
use crate::reason::{Blocked, BlockedReason};
use crate::source::Source;

/// The output of an upstream span is not known.
pub fn upstream_blocked(source: &Source, upstream: usize) -> Blocked {
    let record = &source.spans[upstream];
    let name = &record.opening.name;
    let message = match source.unit_above(upstream) {
        Some(unit) => format!(
            "it needs the output of {name:?}, which runs as part of {:?} and is not recorded anew by itself; override the input that uses it",
            source.spans[unit].opening.name
        ),
        None if source.is_container(upstream) => {
            format!(
                "it needs the output of {name:?}, which only holds other spans together, and one of those differs; override the input that uses it"
            )
        }
        None => format!("it needs the output of {name:?}, which is blocked; override that output with a ToolOutputOverride, or fork later"),
    };
    Blocked::upstream(BlockedReason::UpstreamBlocked, &record.id, message)
}

/// Files that the span sees are not known.
pub fn files_unknown(fork: &Prepared<'_>, trigger: usize, span: usize) -> Blocked {
    let source = fork.source;
    let record = &source.spans[trigger];
    if trigger == span || (trigger == fork.first && source.start_state(fork.first).is_none()) {
        return Blocked::new(
            BlockedReason::SnapshotMissing,
            "no workspace snapshot was recorded before the fork span; fork at a later span that has one",
        );
    }
    Blocked::upstream(
        BlockedReason::UpstreamBlocked,
        &record.id,
        format!(
            "it may see files that {:?} would have written, which is blocked; write them with a FileContentOverride",
            record.opening.name
        ),
    )
}

/// A member of an entangled group whose inputs are as recorded, and which can't run with the others.
pub fn cannot_tell_writes(source: &Source, span: usize) -> Blocked {
    let others = source.entangled(span).map_or(&[][..], |g| &g.members);
    let other = others.iter().find(|&&m| m != span).map_or("", |&m| source.spans[m].opening.name.as_str());
    Blocked::new(
        BlockedReason::IncompleteContract,
        format!(
            "IncompleteContract(writes): its file changes can't be told from those of {other:?}, which ran at the same time and differs; record what each of them reads and writes"
        ),
    )
}

/// Why the span itself can't be executed once its inputs differ. `rendered` is absent while an input is not known; a reason that
/// needs it is then a "maybe", and so is one that a result of another fork may spare it.
pub fn own_reasons(fork: &Prepared<'_>, span: usize, rendered: Option<&Rendered>) -> Vec<(Blocked, Level)> {
    use BlockedReason::*;
    let mut reasons = without_cache(fork, span, rendered);
    if fork.may_use_cache(span) {
        let spared = |reason| matches!(reason, NoExecutor | ApprovalNeeded | NetworkNeeded);
        for (_, level) in reasons.iter_mut().filter(|(blocked, _)| spared(blocked.reason)) {
            *level = Level::Maybe;
        }
    }
    reasons
}

fn without_cache(fork: &Prepared<'_>, span: usize, rendered: Option<&Rendered>) -> Vec<(Blocked, Level)> {
    let record = &fork.source.spans[span];
    let opening = &record.opening;
    let name = &opening.name;
    let certain = |reason, message: String| vec![(Blocked::new(reason, message), Level::Certain)];
    let incomplete =
        |field: &str, message: String| certain(BlockedReason::IncompleteContract, format!("IncompleteContract({field}): {message}"));
    if record.verdict().refuses() {
        return certain(BlockedReason::VerdictDenied, format!("{name:?} was denied ({}) when recorded, and stays so", record.verdict()));
    }
    if !opening.redacted.is_empty() {
        return certain(
            BlockedReason::RedactedInput,
            format!("inputs of {name:?} were redacted when recorded: {}", opening.redacted.join(", ")),
        );
    }
    if opening.kind == SpanKind::HumanInput {
        return certain(
            BlockedReason::HumanInputNeeded,
            format!("{name:?} needs a person's answer; override its readers' inputs, or fork after it"),
        );
    }
    let asks_model = matches!(opening.executor, Some(Executor::Model { .. }));
    if fork.spec.model.mode == ModelMode::Blocked && (asks_model || opening.kind == SpanKind::LlmCall) {
        return certain(
            BlockedReason::ModelBlocked,
            format!("{name:?} is a model call, and spec.model.mode is Blocked; Recorded, Command or Endpoint can answer it"),
        );
    }
    if opening.executor.is_none() {
        return certain(
            BlockedReason::NoExecutor,
            format!("{name:?} ({}) was recorded without an executor, so nothing can run it", opening.kind),
        );
    }
    if fork.check && record.fidelity == Fidelity::Overridden {
        return certain(
            BlockedReason::RecordOnly,
            format!("the output of {name:?} was given by a patch, so there is nothing to reproduce"),
        );
    }
    if opening.policy() == ReplayPolicy::RecordOnly {
        return certain(BlockedReason::RecordOnly, format!("{name:?} was recorded with the policy RecordOnly"));
    }
    if opening.network && fork.spec.sandbox.egress.is_empty() {
        return certain(BlockedReason::NetworkNeeded, format!("{name:?} needs the network, and spec.sandbox.egress opens none of it"));
    }
    if asks_model && opening.inputs == Inputs::Unknown {
        return incomplete("input_bindings", format!("what {name:?} was asked depends on inputs that were not recorded"));
    }
    let contract = match Contract::patched(fork.source, &fork.patches, span) {
        Ok(contract) => contract,
        Err(error) => return incomplete(error.field(), format!("{name:?} can't be run: {error}")),
    };
    if let Err(error) = contract.bound_spans(fork.source) {
        return certain(BlockedReason::BindingFailed, format!("a binding of {name:?} can't be rendered: {error}"));
    }
    let mut reasons = Vec::new();
    if rendered.is_none() && !contract.always_renders() {
        let message = format!("a binding of {name:?} may turn out not to fit the output that it is rendered with");
        reasons.push((Blocked::new(BlockedReason::BindingFailed, message), Level::Maybe));
    }
    if record.verdict() == Verdict::GateAllow {
        reasons.extend(approval(fork, span, rendered));
    }
    if asks_model {
        reasons.extend(model_reasons(fork, span, &contract, rendered));
    }
    reasons
}

/// A verdict was given for the arguments that it was given for.
fn approval(fork: &Prepared<'_>, span: usize, rendered: Option<&Rendered>) -> Option<(Blocked, Level)> {
    let record = &fork.source.spans[span];
    let name = &record.opening.name;
    let Some(rendered) = rendered else {
        let message = format!("{name:?} was let through a gate; if its arguments turn out others, it needs approval again");
        return Some((Blocked::new(BlockedReason::ApprovalNeeded, message), Level::Maybe));
    };
    let now = arguments_digest(rendered);
    // What a fork before this one left blocked, nobody has let through with the arguments that it has since.
    let then = fork.recorded_inputs(span).filter(|_| !fork.source.was_left_out(span)).map(|r| arguments_digest(&r));
    if then == Some(now) || fork.is_approved(span, &now) {
        return None;
    }
    let message = format!(
        "{name:?} was let through a gate with other arguments; to approve these, add {{span: {:?}, inputDigest: {now}}} to spec.approvals",
        record.id
    );
    Some((Blocked::new(BlockedReason::ApprovalNeeded, message), Level::Certain))
}

fn model_reasons(fork: &Prepared<'_>, span: usize, contract: &Contract, rendered: Option<&Rendered>) -> Vec<(Blocked, Level)> {
    let name = &fork.source.spans[span].opening.name;
    let mut reasons = Vec::new();
    let is_plain = |field: &&String| field.starts_with("binding.") || field.starts_with("container.");
    let replaced = fork.patches.prompt.get(&span).is_some_and(|p| p.all.is_some());
    let plain: Vec<_> = contract.fields.keys().filter(is_plain).collect();
    if !plain.is_empty() && !replaced {
        let message = |field: &str| {
            let field = field.rsplit('.').next().unwrap_or(field);
            format!(
                "IncompleteContract(request): the binding {field:?} of {name:?} has another value, and is recorded in no place of the request; record it under the place's JSON pointer, or replace all messages with a PromptEdit"
            )
        };
        match (rendered, fork.recorded_inputs(span)) {
            (Some(now), then) => {
                let changed = plain.iter().find(|f| then.as_ref().and_then(|t| t.get(**f)) != now.get(**f));
                if let Some(field) = changed {
                    return vec![(Blocked::new(BlockedReason::IncompleteContract, message(field)), Level::Certain)];
                }
            }
            (None, _) => reasons.push((Blocked::new(BlockedReason::IncompleteContract, message(plain[0])), Level::Maybe)),
        }
    }
    if fork.spec.model.mode == ModelMode::Recorded {
        match rendered.and_then(|r| r.get("request")) {
            Some(request) if fork.answers().and_then(|a| a.find(span, request)).is_some() => {}
            Some(request) => {
                let message = format!(
                    "neither the run nor spec.model.fixtures has an answer to the request of {name:?}; a fixture for it has the requestDigest {}",
                    request_digest(request)
                );
                reasons.push((Blocked::new(BlockedReason::NoRecordedResponse, message), Level::Certain));
            }
            None => {
                let message = format!("the request of {name:?} is not known yet; it is blocked if nothing recorded answers it");
                reasons.push((Blocked::new(BlockedReason::NoRecordedResponse, message), Level::Maybe));
            }
        }
    }
    reasons
}
