//! The custom resource `ReplayFork`: its types, its rules, and the YAML generated from them.
//!
//! The rules that admission checks stand on `spec`, per field, so that an optional field can be neither added nor removed
//! where it may not change. Everything is bounded, so that their cost is.

mod spec;
mod status;

pub use spec::{EgressRule, NetworkIsolation, PortRule, ReplayFork, ReplayForkSpec, ResourceAmounts, Resources, SandboxSpec};
pub use status::{BlockedSpanStatus, CONDITION_TYPES, PlanStatus, ReplayForkStatus, ResultStatus, condition, conditions_differ};

use kube::CustomResourceExt;

/// The CustomResourceDefinition as YAML.
///
/// # Panics
/// The types can't be written as YAML; a test shows that they can.
pub fn crd_yaml() -> String {
    let crd = serde_json::to_value(ReplayFork::crd()).expect("a CRD is JSON");
    serde_yaml_ng::to_string(&crd).expect("JSON is YAML")
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_committed_yaml_is_what_the_types_say() {
        for file in ["replayforks.yaml", "../charts/replayfork/files/replayforks.yaml"] {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
            let committed = std::fs::read_to_string(&path).unwrap_or_default();
            assert_eq!(committed, super::crd_yaml(), "{}: run `make generate`", path.display());
        }
    }
}
