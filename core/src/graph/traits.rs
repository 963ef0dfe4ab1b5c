//! What planning has to know of a step besides what it touches and depends on, as bits.

use crate::contract::{Contract, IncompleteContract};
use crate::model::{Executor, Fidelity, Inputs, ReplayPolicy, Span, SpanKind, Status, Verdict};
use crate::patch::Patches;
use crate::source::Source;

/// A set of the constants below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Traits(pub u32);

macro_rules! traits {
    ($($(#[$meta:meta])* $name:ident),+ $(,)?) => {
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        enum Place { $($name),+ }
        impl Traits { $($(#[$meta])* pub const $name: Traits = Traits(1 << Place::$name as u32);)+ }
    };
}

traits! {
    /// Plans and replays treat it by itself.
    UNIT,
    EXECUTOR,
    FILE_WRITE,
    /// Its executor asks a model.
    MODEL,
    /// Its executor has an environment.
    SHELL,
    DID_NOT_RUN,
    /// A fork left it without a result.
    LEFT_OUT,
    INPUTS_UNKNOWN,
    HAS_RESULT,
    COMPLETED,
    HAS_OUTPUT,
    REEXECUTED,
    /// A patch gave its output.
    OVERRIDDEN,
    GATED,
    REFUSED,
    REDACTED,
    HUMAN,
    LLM_CALL,
    RECORD_ONLY,
    CACHEABLE,
    NETWORK,
    /// The record lacks what its executor needs.
    BROKEN,
    /// A template does not parse, or refers to nothing.
    UNBOUND,
    /// Its templates render whatever the outputs are.
    ALWAYS_RENDERS,
    /// Its recorded inputs can be rendered.
    RENDERS,
    /// A model call with a binding that is in no place of its request.
    PLAIN,
    /// It and others that ran at the same time can't be told apart.
    ENTANGLED,
    SHOWS_CHANGES,
    /// It touches the workspace, which was not recorded around it.
    NOT_CAPTURED,
}

impl Traits {
    /// Those that a patched contract may change.
    pub const OF_CONTRACT: Traits = Traits(Self::BROKEN.0 | Self::UNBOUND.0 | Self::ALWAYS_RENDERS.0 | Self::PLAIN.0);

    /// Whether any of these is among them.
    pub fn has(self, any: Traits) -> bool {
        self.0 & any.0 != 0
    }

    pub fn set(&mut self, what: Traits, is: bool) {
        if is {
            self.0 |= what.0;
        }
    }

    /// What a record says by itself.
    pub fn of_record(span: &Span) -> Self {
        let opening = &span.opening;
        let mut traits = Self::default();
        traits.set(Self::EXECUTOR, opening.executor.is_some());
        traits.set(Self::FILE_WRITE, matches!(opening.executor, Some(Executor::FileWrite { .. })));
        traits.set(Self::MODEL, matches!(opening.executor, Some(Executor::Model { .. })));
        traits.set(Self::SHELL, matches!(opening.executor, Some(Executor::Shell(_))));
        traits.set(Self::DID_NOT_RUN, span.did_not_run());
        traits.set(Self::INPUTS_UNKNOWN, opening.inputs == Inputs::Unknown);
        traits.set(Self::COMPLETED, span.status() == Status::Completed);
        traits.set(Self::HAS_OUTPUT, span.output().is_some());
        traits.set(Self::REEXECUTED, span.fidelity == Fidelity::Reexecuted);
        traits.set(Self::OVERRIDDEN, span.fidelity == Fidelity::Overridden);
        traits.set(Self::GATED, span.verdict() == Verdict::GateAllow);
        traits.set(Self::REFUSED, span.verdict().refuses());
        traits.set(Self::REDACTED, !opening.redacted.is_empty());
        traits.set(Self::HUMAN, opening.kind == SpanKind::HumanInput);
        traits.set(Self::LLM_CALL, opening.kind == SpanKind::LlmCall);
        traits.set(Self::RECORD_ONLY, opening.policy() == ReplayPolicy::RecordOnly);
        traits.set(Self::CACHEABLE, matches!(opening.policy(), ReplayPolicy::Cacheable | ReplayPolicy::Pure));
        traits.set(Self::NETWORK, opening.network);
        traits
    }

    /// What its contract says, as recorded or patched.
    pub fn of_contract(source: &Source, span: usize, contract: Result<&Contract, &IncompleteContract>, patches: Option<&Patches>) -> Self {
        let Ok(contract) = contract else { return Self::BROKEN };
        let mut traits = Self::default();
        traits.set(Self::UNBOUND, contract.bound_spans(source).is_err());
        traits.set(Self::ALWAYS_RENDERS, contract.always_renders());
        let asks = matches!(source.spans[span].opening.executor, Some(Executor::Model { .. }));
        let replaced = patches.and_then(|p| p.prompt.get(&span)).is_some_and(|p| p.all.is_some());
        traits.set(Self::PLAIN, asks && !replaced && contract.plain().next().is_some());
        traits
    }
}

impl std::ops::BitOr for Traits {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}
