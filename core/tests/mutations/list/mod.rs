//! The mutations: of each the rule that it breaks, in the words of the semantics, and what it makes of it.

mod around;
mod running;
mod workspace;

/// Which suite is asked first. Random forks share the code that finds footprints, contracts and patches with what they are
/// compared with, so a rule in there is told by hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    Properties,
    Cases,
}

impl Suite {
    pub fn target(self) -> &'static str {
        match self {
            Suite::Properties => "replay_properties",
            Suite::Cases => "cases",
        }
    }
}

pub struct Mutation {
    pub name: &'static str,
    /// The rule that it replaces.
    pub rule: &'static str,
    pub first: Suite,
    /// Below `core/src`.
    pub file: &'static str,
    /// Text that is in the file exactly once.
    pub find: &'static str,
    pub replace: &'static str,
}

const fn rule(
    name: &'static str,
    rule: &'static str,
    first: Suite,
    file: &'static str,
    find: &'static str,
    replace: &'static str,
) -> Mutation {
    Mutation { name, rule, first, file, find, replace }
}

pub fn mutations() -> impl Iterator<Item = &'static Mutation> + Clone {
    workspace::MUTATIONS.iter().chain(running::MUTATIONS).chain(around::MUTATIONS)
}
