//! What a permission system said when recorded, and what of it holds in a fork.

use serde_json::json;

use crate::build::{Recorded, env, file, on, output, run, says, script_that_sees, sh, writes};
use replayfork_core::model::{SpanKind, Verdict};

fn with_verdict(verdict: Verdict) -> Recorded {
    run(&[("a", "0")])
        .step("begin", sh("echo x").sees(&[], &[]))
        .step("ask", says(SpanKind::ToolCall, "yes"))
        .step("deploy", sh("echo {{ ask }} $V").env("V", "0").sees(&["a"], &[]).verdict(verdict))
        .step("use", sh("echo {{ deploy }}").sees_nothing())
        .recorded()
}

#[test]
fn what_was_denied_stays_denied_whatever_its_inputs() {
    for verdict in [Verdict::Deny, Verdict::GateDeny] {
        let run = with_verdict(verdict);
        run.fork("ask", json!([output("no")])).tells(&["ask: overridden (PatchedInput) -> overridden"]);
        let fork = run.fork("deploy", json!([env("V", "1")]));
        fork.tells(&[
            "deploy: will be blocked (PatchedInput VerdictDenied) -> blocked: VerdictDenied",
            "use: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
        ]);
        assert!(fork.says_of("deploy").contains("was denied"), "{}", fork.says_of("deploy"));
    }
}

#[test]
fn what_was_skipped_stays_out_unless_it_is_patched() {
    let run = run(&[]).step("ask", says(SpanKind::ToolCall, "yes")).step("extra", sh("echo {{ ask }}").sees_nothing().skipped()).recorded();
    run.fork("ask", json!([output("no")])).tells(&["ask: overridden (PatchedInput) -> overridden"]);
    run.fork("extra", json!([script_that_sees("echo now", &[], &[])])).gives("extra", "now");
}

#[test]
fn what_a_gate_let_through_needs_approval_for_other_arguments() {
    let run = with_verdict(Verdict::GateAllow);
    let fork = run.fork("ask", json!([output("no")]));
    fork.tells(&[
        "ask: overridden (PatchedInput) -> overridden",
        "deploy: will be blocked (UpstreamOutputChanged ApprovalNeeded) -> blocked: ApprovalNeeded",
        "use: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
    let digest = fork.plan.spans[1].input_digest.unwrap().to_string();
    assert!(fork.says_of("deploy").contains(&digest), "{}", fork.says_of("deploy"));
    let approvals = json!({"approvals": [{"span": "deploy", "inputDigest": digest}]});
    run.fork_with("ask", json!([output("no")]), approvals.clone()).gives("deploy", "no 0").gives("use", "no 0");
    // The approval is of those arguments and no others.
    run.fork_with("ask", json!([output("never")]), approvals).tells(&[
        "ask: overridden (PatchedInput) -> overridden",
        "deploy: will be blocked (UpstreamOutputChanged ApprovalNeeded) -> blocked: ApprovalNeeded",
        "use: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
}

#[test]
fn an_approval_that_nothing_asks_for_is_said_to_be_of_no_use() {
    let approvals = json!({"approvals": [{"span": "use", "inputDigest": "0".repeat(64)}]});
    let fork = with_verdict(Verdict::GateAllow).fork_with("ask", json!([output("no")]), approvals);
    assert!(fork.warnings().contains("spec.approvals[0] is of no use: \"use\" was not let through a gate"), "{}", fork.warnings());
}

#[test]
fn other_files_are_no_other_arguments() {
    with_verdict(Verdict::GateAllow)
        .fork("deploy", json!([file("a", "1")]))
        .tells(&["deploy: will run (WorkspaceChanged) -> ran", "use: may run (UpstreamOutputChanged) -> reused"]);
}

#[test]
fn a_variable_is_one_of_the_arguments() {
    with_verdict(Verdict::GateAllow).fork("deploy", json!([env("V", "1")])).tells(&[
        "deploy: will be blocked (PatchedInput ApprovalNeeded) -> blocked: ApprovalNeeded",
        "use: will be blocked (UpstreamOutputChanged UpstreamBlocked) -> blocked: UpstreamBlocked",
    ]);
}

#[test]
fn arguments_that_are_not_known_yet_may_need_approval() {
    let run = run(&[])
        .step("make", sh("echo $V").env("V", "0").sees_nothing())
        .step("deploy", writes("out", "{{ make | trim }}").verdict(Verdict::GateAllow))
        .recorded();
    run.fork("make", json!([env("V", "1")])).tells(&[
        "make: will run (PatchedInput) -> ran",
        "deploy: may run or be blocked (UpstreamOutputChanged ApprovalNeeded) -> blocked: ApprovalNeeded",
    ]);
    run.fork("make", json!([script_that_sees("echo 0; echo", &[], &[])]))
        .tells(&["make: will run (PatchedInput) -> ran", "deploy: may run or be blocked (UpstreamOutputChanged ApprovalNeeded) -> reused"]);
}

#[test]
fn a_fork_of_the_fork_is_no_way_around_a_gate_or_a_denial() {
    for (verdict, reason) in [(Verdict::GateAllow, "ApprovalNeeded"), (Verdict::Deny, "VerdictDenied")] {
        let fork = with_verdict(verdict).fork("deploy", json!([env("V", "1")])).as_run();
        let again = fork.fork("deploy", json!([on("use", env("X", "1"))]));
        assert_eq!(again.plan.counts.will_run, 0, "{verdict}");
        assert!(again.plan.spans[0].blocked.iter().any(|b| b.reason.as_str() == reason), "{:?}", again.plan.spans);
        again.gives("deploy", "nothing").gives("use", "nothing");
        let Some(digest) = again.plan.spans[0].input_digest else { continue };
        let approvals = json!({"approvals": [{"span": "deploy", "inputDigest": digest}]});
        fork.fork_with("deploy", json!([on("use", env("X", "1"))]), approvals).gives("use", "yes 1");
    }
}

#[test]
fn a_step_that_was_allowed_runs_with_any_arguments() {
    for verdict in [Verdict::Allow, Verdict::None, Verdict::Route] {
        with_verdict(verdict).fork("ask", json!([output("no")])).gives("use", "no 0");
    }
}
