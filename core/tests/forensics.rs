//! What a reader is told about runs that went wrong.

use replayfork_core::forensics::{End, Forensics, Via, forensics};
use replayfork_core::model::{RunEnvironment, Span, Status};
use replayfork_core::source::{Changed, Source};
use serde_json::{Value, json};

/// A step of a run: what is given is laid over a shell command that succeeded.
fn step(n: i64, name: &str, over: Value) -> Span {
    let mut span = json!({
        "id": format!("s{n}"), "ord": n * 100,
        "opening": {"name": name, "kind": "ShellCommand", "started": n * 100, "executor": {"type": "shell", "script": name}, "reads": [], "writes": []},
        "closing": {"ended": n * 100 + 50, "status": "Completed", "output": {"text": "ok", "stdout": "ok", "exit_code": 0}},
    });
    for (path, value) in over.as_object().unwrap() {
        let (parent, key) = path.rsplit_once('/').unwrap();
        span.pointer_mut(parent).unwrap()[key] = value.clone();
    }
    serde_json::from_value(span).unwrap()
}

fn fails(code: i32, stderr: &str) -> Value {
    json!({"/closing/status": "Failed", "/closing/output": {"text": "", "stderr": stderr, "exit_code": code}})
}

fn with(mut over: Value, more: Value) -> Value {
    over.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    over
}

fn blocked(reason: &str, upstream: Option<&str>) -> Value {
    let reason = json!([{"reason": reason, "upstream": upstream, "message": format!("because of {}", upstream.unwrap_or("itself"))}]);
    json!({"/closing/status": "Blocked", "/closing/output": null, "/closing/blocked": reason})
}

fn source(spans: Vec<Span>, changed: &[(&str, &str)]) -> Source {
    let changed = changed.iter().map(|(id, path)| ((*id).to_owned(), Changed { during: vec![(*path).to_owned()], ..Changed::default() }));
    Source::new(RunEnvironment { workspace_root: Some("/w".into()), ..RunEnvironment::default() }, spans, changed.collect())
}

fn of(spans: Vec<Span>, outcome: Status, decided_by: Option<&str>) -> Forensics {
    forensics(&source(spans, &[]), End { outcome: Some(outcome), decided_by })
}

fn path(found: &Forensics) -> Vec<&str> {
    found.path.iter().map(|l| l.span.name.as_str()).collect()
}

#[test]
fn a_run_without_trouble_has_an_empty_report_that_says_so() {
    let found = of(vec![step(1, "a", json!({})), step(2, "b", json!({}))], Status::Completed, None);
    assert_eq!(found, Forensics { summary: "Nothing failed and nothing is blocked.".into(), ..Forensics::default() });
    assert_eq!(of(vec![], Status::Completed, None), found);
    // Where a step after the blocked one decides.
    let spans = vec![step(1, "ask", blocked("ModelBlocked", None)), step(2, "end", json!({}))];
    assert_eq!(of(spans, Status::Completed, Some("s2")).summary, "Nothing failed; one span is blocked.");
    assert_eq!(of(vec![], Status::Failed, None).summary, "The run did not end well, and no span of it failed.");
}

#[test]
fn a_failure_without_a_cause_before_it_is_its_own() {
    let spans = vec![step(1, "build", json!({})), step(2, "test", fails(1, "collected 3 items\nAssertionError: too slow\n"))];
    let found = of(spans, Status::Failed, Some("s2"));
    assert_eq!(path(&found), ["test"]);
    assert_eq!(found.first_failed, found.root_cause);
    assert_eq!(found.summary, "`test` failed (exit code 1: AssertionError: too slow).");
}

#[test]
fn the_path_leads_through_outputs_from_the_deepest_failure_to_the_end() {
    let spans = vec![
        step(1, "unrelated", fails(9, "")),
        step(
            2,
            "fetch",
            with(
                json!({"/closing/error": "connection refused\nby 10.0.0.1", "/closing/output": null}),
                json!({"/closing/status": "Failed"}),
            ),
        ),
        step(3, "parse", with(fails(2, ""), json!({"/opening/input_bindings": {"stdin": "{{ fetch }}"}}))),
        step(4, "good", json!({})),
        step(5, "report", with(fails(1, ""), json!({"/opening/depends_on": ["s3", "s4"]}))),
    ];
    let found = of(spans, Status::Failed, Some("s5"));
    assert_eq!(path(&found), ["fetch", "parse", "report"]);
    assert_eq!(found.path[1].via, Some(Via::Output { of: "s2".into(), binding: Some("stdin".into()) }));
    assert_eq!(found.path[1].because, "its stdin needs the output of `fetch`");
    assert_eq!(found.path[2].because, "it depends on `parse`");
    assert_eq!(found.first_failed.as_ref().unwrap().name, "unrelated");
    assert_eq!((found.failed, found.blocked), (4, 0));
    assert_eq!(found.summary, "`report` failed because `fetch` failed (connection refused).");
}

#[test]
fn a_container_failed_because_of_what_it_holds() {
    let container = |n, name, parent: Option<&str>| {
        step(
            n,
            name,
            json!({"/opening/kind": "Subgraph", "/opening/executor": null, "/opening/parent": parent, "/closing/ended": 900, "/closing/status": "Failed", "/closing/output": null}),
        )
    };
    let spans = vec![
        container(1, "run", None),
        container(2, "turn", Some("s1")),
        step(3, "early", with(fails(3, ""), json!({"/opening/parent": "s2"}))),
        step(4, "test", with(fails(1, ""), json!({"/opening/parent": "s2"}))),
        step(5, "note", json!({"/opening/parent": "s1"})),
    ];
    let found = of(spans, Status::Failed, None);
    assert_eq!(path(&found), ["test", "turn", "run"]);
    assert_eq!(found.path[2].via, Some(Via::Child { of: "s2".into() }));
    assert_eq!(found.first_failed.unwrap().name, "early");
    assert_eq!(found.failed, 2);
}

#[test]
fn a_failure_reaches_who_reads_the_file_that_it_wrote() {
    let sees = |path: &str| json!({"/opening/reads": [path], "/opening/writes": []});
    let writes = json!({"/opening/reads": [], "/opening/writes": ["src/"]});
    let spans = vec![
        step(1, "generate", with(fails(1, ""), writes.clone())),
        step(2, "compile", with(fails(2, ""), sees("src/"))),
        step(3, "lint", with(fails(3, ""), sees("docs/"))),
        // Undeclared: that it may see everything does not make everything before it a cause.
        step(4, "other", with(fails(4, ""), json!({"/opening/reads": null, "/opening/writes": null}))),
    ];
    let source = source(spans, &[("s1", "src/a.c")]);
    let ended = |by| forensics(&source, End { outcome: Some(Status::Failed), decided_by: Some(by) });
    let compile = ended("s2");
    assert_eq!(path(&compile), ["generate", "compile"]);
    assert_eq!(compile.path[1].because, "it sees src/a.c, which `generate` wrote or would have written");
    assert_eq!((path(&ended("s3")), path(&ended("s4"))), (vec!["lint"], vec!["other"]));
}

#[test]
fn blocked_spans_are_told_by_the_one_they_wait_for() {
    let spans = vec![
        step(1, "ask", blocked("ModelBlocked", None)),
        step(2, "apply", with(blocked("UpstreamBlocked", Some("s1")), json!({"/opening/input_bindings": {"stdin": "{{ ask }}"}}))),
        step(3, "approve", blocked("ApprovalNeeded", None)),
        step(4, "test", blocked("UpstreamBlocked", Some("s2"))),
        step(5, "ship", blocked("UpstreamBlocked", Some("s3"))),
    ];
    let found = of(spans, Status::Blocked, Some("s4"));
    let groups: Vec<_> = found
        .blocked_by
        .iter()
        .map(|g| (g.root.name.as_str(), g.reasons[0].reason.as_str(), g.spans.iter().map(|s| s.span.name.as_str()).collect::<Vec<_>>()))
        .collect();
    assert_eq!(groups, [("ask", "ModelBlocked", vec!["apply", "test"]), ("approve", "ApprovalNeeded", vec!["ship"])]);
    assert_eq!(path(&found), ["ask", "apply", "test"]);
    assert_eq!(found.path[2].because, "it sees files that `apply` would have written");
    assert_eq!(found.blocked, 5);
    assert_eq!(found.summary, "`test` is blocked because `ask` is blocked (ModelBlocked: because of itself).");
}

#[test]
fn spans_that_wait_for_each_other_do_not_hang_anything() {
    let spans = vec![step(1, "a", blocked("UpstreamBlocked", Some("s2"))), step(2, "b", blocked("UpstreamBlocked", Some("s1")))];
    let found = of(spans, Status::Blocked, None);
    assert_eq!(found.blocked_by.len(), 1);
    assert_eq!(found.blocked_by[0].spans.len(), 1);
    assert!(!found.path.is_empty());
}

#[test]
fn a_refused_step_is_a_cause() {
    let spans = vec![
        step(1, "delete", json!({"/closing/status": "Skipped", "/closing/verdict": "gate:deny", "/closing/output": null})),
        step(2, "report", with(fails(1, ""), json!({"/opening/depends_on": ["s1"]}))),
    ];
    assert_eq!(of(spans, Status::Failed, None).summary, "`report` failed because `delete` was refused (verdict gate:deny).");
}

#[test]
fn attempts_at_a_step_are_one_group_and_a_success_ends_it() {
    let script = |text: &str| json!({"/opening/executor/script": text});
    let spans = vec![
        step(1, "test", with(fails(1, ""), script("pytest tests/auth tests/login --maxfail 1"))),
        step(2, "edit", json!({})),
        step(3, "test", with(fails(1, ""), script("pytest tests/auth tests/login --maxfail 1"))),
        step(4, "test", script("pytest tests/auth tests/login --maxfail 2")),
        // After the success: another call, not another attempt.
        step(5, "test", script("pytest tests/auth tests/login --maxfail 2")),
        step(6, "look", with(fails(1, ""), script("cat a"))),
        step(7, "look", script("grep -rn something in quite another place")),
        step(8, "push", fails(1, "")),
        step(9, "push", fails(1, "")),
    ];
    let found = of(spans, Status::Failed, None);
    let groups: Vec<_> = found
        .retries
        .iter()
        .map(|g| (g.name.as_str(), g.attempts.iter().map(|a| (a.step, a.status)).collect::<Vec<_>>(), g.succeeded.as_deref()))
        .collect();
    let (bad, good) = (Status::Failed, Status::Completed);
    assert_eq!(groups, [("test", vec![(1, bad), (3, bad), (4, good)], Some("s4")), ("push", vec![(8, bad), (9, bad)], None)]);
    assert_eq!(path(&found), ["push"]);
}

#[test]
fn a_failure_that_a_later_attempt_made_good_is_not_what_ended_the_run() {
    let spans = vec![step(1, "test", fails(1, "boom")), step(2, "test", json!({})), step(3, "note", json!({}))];
    let good = of(spans.clone(), Status::Completed, None);
    assert_eq!(good.summary, "`test` failed (exit code 1: boom), and the run still ended well.");
    assert!(good.path.is_empty() && good.root_cause.is_none());
    assert!(of(spans, Status::Failed, None).path.is_empty());
}

#[test]
fn calls_at_the_same_time_are_no_attempts() {
    let spans = vec![step(1, "get", with(fails(1, ""), json!({"/closing/ended": 500}))), step(2, "get", json!({}))];
    assert!(of(spans, Status::Completed, None).retries.is_empty());
}

#[test]
fn a_hundred_thousand_failures_are_a_short_report_in_a_moment() {
    let spans = (1..=100_000).map(|n| {
        let needs = if n > 1 { json!({"/opening/depends_on": [format!("s{}", n - 1)]}) } else { json!({}) };
        step(n, "loop", with(fails(1, ""), needs))
    });
    let source = source(spans.collect(), &[]);
    let started = std::time::Instant::now();
    let found = forensics(&source, End { outcome: Some(Status::Failed), decided_by: None });
    assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    assert_eq!((found.root_cause.unwrap().step, found.path.len(), found.path_left_out), (1, 200, 99_800));
    assert_eq!((found.retries[0].attempts.len(), found.retries[0].left_out), (200, 99_800));
    assert!(serde_json::to_string(&found.path).unwrap().len() < 100_000);
}
