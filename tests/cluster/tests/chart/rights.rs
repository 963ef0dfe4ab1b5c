//! Who may do what.

use serde_json::json;

use crate::render::rendered;

#[test]
fn each_namespace_gets_a_user_who_may_view_and_fork() {
    let objects = rendered(&["namespaces=[\"agents\",\"more\"]"]);
    for namespace in ["agents", "more"] {
        let here: Vec<_> = objects.iter().filter(|object| object["metadata"]["namespace"] == namespace).collect();
        let account = here.iter().find(|object| object["kind"] == "ServiceAccount").unwrap();
        assert_eq!(account["metadata"]["name"], "replayfork-user");
        let bindings = here.iter().filter(|object| object["kind"] == "RoleBinding");
        let mut roles: Vec<_> = bindings.map(|binding| binding["roleRef"]["name"].as_str().unwrap()).collect();
        roles.sort();
        assert_eq!(roles, ["replayfork-fork", "replayfork-view"]);
    }
}

#[test]
fn nobody_but_the_operator_may_operate_and_nobody_reads_secrets() {
    let objects = rendered(&["namespaces=[\"agents\"]"]);
    let roles = objects.iter().filter(|object| object["kind"].as_str().unwrap().ends_with("Role"));
    let mut operate = Vec::new();
    for role in roles {
        let name = role["metadata"]["name"].as_str().unwrap();
        for rule in role["rules"].as_array().unwrap() {
            assert!(!rule["resources"].to_string().contains("secrets"), "{name}: {rule}");
            assert!(!rule.to_string().contains("\"*\""), "{name}: {rule}");
            if rule["verbs"].to_string().contains("operate") {
                operate.push(name);
            }
        }
    }
    assert_eq!(operate, ["replayfork-operator"]);
    let bound =
        objects.iter().filter(|object| object["roleRef"]["name"] == "replayfork-operator" && object["kind"] == "ClusterRoleBinding");
    let subjects: Vec<_> = bound.map(|binding| &binding["subjects"]).collect();
    assert_eq!(subjects, [&json!([{"kind": "ServiceAccount", "name": "replayfork-operator", "namespace": "rf"}])]);
}
