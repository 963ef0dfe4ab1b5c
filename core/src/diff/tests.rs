use super::*;
use crate::Digest;
use serde_json::json;

fn span(id: &str, started: i64, ended: i64, over: serde_json::Value) -> Span {
    let mut span = json!({
        "id": id, "ord": started, "opening": {"name": id, "kind": "ShellCommand", "started": started},
        "closing": {"ended": ended, "status": "Completed", "output": {"text": "out", "exit_code": 0}, "input_tokens": 3, "output_tokens": 4},
    });
    for (path, value) in over.as_object().unwrap() {
        *span.pointer_mut(path).unwrap() = value.clone();
    }
    serde_json::from_value(span).unwrap()
}

#[test]
fn a_forks_duration_is_that_of_its_steps_and_not_of_the_time_between() {
    let source = [span("a", 0, 10, json!({})), span("b", 10, 40, json!({}))];
    let ran = span("b", 9_000, 9_002, json!({"/closing/output/text": "other"}));
    let fork = [source[0].clone(), Span { fidelity: Fidelity::Reexecuted, ord: 10, ..ran }];
    let diff = by_lineage(&source, &fork);
    assert_eq!((diff.a.duration_ns, diff.b.duration_ns), (40, 12));
    assert_eq!((diff.a.tokens, diff.b.tokens), (14, 14));
    assert_eq!(diff.first_divergent_span.as_deref(), Some("b"));
    assert_eq!(diff.spans.len(), 1);
    assert_eq!(
        diff.spans[0].text.as_deref(),
        Some("@@ -1 +1 @@\n-out\n\\ No newline at end of file\n+other\n\\ No newline at end of file\n")
    );
}

#[test]
fn timing_alone_is_no_difference() {
    let a = [span("a", 0, 10, json!({}))];
    let b = [span("a", 5, 500, json!({}))];
    let diff = by_lineage(&a, &b);
    assert!(diff.spans.is_empty() && diff.first_divergent_span.is_none());
}

#[test]
fn a_blocked_span_diverges_and_took_no_time() {
    let a = [span("a", 0, 10, json!({}))];
    let b = [span("a", 90, 95, json!({"/closing/status": "Blocked", "/closing/output": null}))];
    let diff = by_lineage(&a, &b);
    assert!(diff.spans[0].output_differs);
    assert_eq!(diff.b.duration_ns, 0);
}

#[test]
fn the_step_that_diverged_is_named_and_not_what_holds_it() {
    let nested = |text: &str, status: &str| {
        let run = span("run", 0, 90, json!({"/opening/kind": "Run", "/closing/status": status, "/closing/output": null}));
        let mut steps = [run, span("a", 1, 10, json!({})), span("b", 20, 30, json!({"/closing/output/text": text}))];
        steps[1].opening.parent = Some("run".into());
        steps[2].opening.parent = Some("run".into());
        steps
    };
    for diff in [
        by_lineage(&nested("ok", "Completed"), &nested("wrong", "Failed")),
        by_alignment(&nested("ok", "Completed"), &nested("wrong", "Failed")),
    ] {
        assert_eq!(diff.first_divergent_span.as_deref(), Some("b"));
        assert_eq!(diff.spans.iter().map(|s| (s.span.as_str(), s.first)).collect::<Vec<_>>(), [("run", false), ("b", true)]);
        assert_eq!(diff.counts, Counts { same: 1, changed: 2, only_a: 0, only_b: 0 });
    }
    let alone = by_lineage(&nested("ok", "Completed"), &nested("ok", "Failed"));
    assert_eq!(alone.first_divergent_span.as_deref(), Some("run"));
}

#[test]
fn a_step_that_ran_again_with_the_same_result_is_listed_and_does_not_differ() {
    let source = [span("a", 0, 10, json!({}))];
    let fork = [Span { fidelity: Fidelity::Reexecuted, ..span("a", 50, 70, json!({})) }];
    let fork = [Span { ord: 0, ..fork[0].clone() }];
    let diff = by_lineage(&source, &fork);
    assert_eq!((diff.counts, diff.first_divergent_span), (Counts { same: 1, ..Counts::default() }, None));
    assert!(!diff.spans[0].differs && diff.spans[0].text.is_none());
}

#[test]
fn a_span_that_has_another_place_in_the_fork_is_still_the_same_span() {
    let a = [span("x", 0, 1, json!({})), span("y", 2, 3, json!({})), span("only a", 4, 5, json!({}))];
    let b = [span("y", 0, 1, json!({})), span("only b", 1, 3, json!({})), span("x", 7, 9, json!({}))];
    assert_eq!(by_lineage(&a, &b).counts, Counts { same: 2, changed: 0, only_a: 1, only_b: 1 });
}

#[test]
fn a_variable_tells_forks_apart_and_not_unrelated_runs() {
    let with = |value: &str| {
        let mut span = span("a", 0, 10, json!({}));
        span.opening.executor =
            serde_json::from_value(json!({"type": "shell", "script": "true", "env": {"HOSTNAME": value, "PATH": "/bin"}})).unwrap();
        [span]
    };
    let diff = by_lineage(&with("x"), &with("y"));
    assert_eq!(diff.spans[0].env, ["HOSTNAME"]);
    assert!(!diff.spans[0].input_differs && diff.first_divergent_span.is_none());
    assert!(by_alignment(&with("x"), &with("y")).spans.is_empty());
}

#[test]
fn outputs_that_are_json_are_compared_as_such() {
    let of = |text: &str| [span("a", 0, 10, json!({"/closing/output/text": text}))];
    let diff = by_lineage(&of(r#"{"passed": 3, "failed": 0}"#), &of(r#"{"failed": 1, "passed": 3.0}"#));
    let json = diff.spans[0].json.as_ref().unwrap();
    assert_eq!(json.changes.iter().map(|c| c.path.as_str()).collect::<Vec<_>>(), ["/failed"]);
    assert!(diff.spans[0].text.is_some());
    assert_eq!(by_lineage(&of("[1]"), &of("no list")).spans[0].json, None);
}

#[test]
fn a_workspace_that_differs_is_told_where_it_begins_to() {
    let state = |content: &str| Some(crate::model::SnapshotRef { content: Digest::of(content.as_bytes()), node: Digest::of(b"") });
    let steps = |states: [&str; 4]| {
        let each = |(n, content): (usize, &str)| Span {
            snapshot_after: state(content),
            ..span(["a", "b", "c", "d"][n], n as i64, n as i64 + 1, json!({}))
        };
        states.into_iter().enumerate().map(each).collect::<Vec<_>>()
    };
    let mut diff = by_lineage(&steps(["0", "1", "1", "2"]), &steps(["0", "x", "x", "y"]));
    assert_eq!(diff.spans.iter().map(|s| s.span.as_str()).collect::<Vec<_>>(), ["b", "d"]);
    // The last step changed the same file in both: whoever looks at the files finds nothing new.
    diff.spans[0].files.extend(FileChange::new("f".into(), None, Some(FileSide::Directory)));
    diff.settle();
    assert_eq!(diff.spans.iter().map(|s| s.span.as_str()).collect::<Vec<_>>(), ["b"]);
    assert_eq!(diff.counts, Counts { same: 3, changed: 1, only_a: 0, only_b: 0 });
}

#[test]
fn a_diff_of_everything_stays_small_and_says_what_it_leaves_out() {
    let long = |c: &str| (0..4_000).map(|i| format!("{c} {i} a line like any other\n")).collect::<String>();
    let steps = |c: &str| {
        let text = |n: i64| if n % 100 == 99 { long(c) } else { c.to_owned() };
        (0..10_200i64).map(|n| span(&format!("s{n}"), n, n + 1, json!({"/closing/output/text": text(n)}))).collect::<Vec<_>>()
    };
    let diff = by_lineage(&steps("x"), &steps("y"));
    assert_eq!((diff.spans.len(), diff.spans_left_out, diff.counts.changed), (MAX_PAIRS, 200, 10_200));
    let bytes = serde_json::to_string(&diff).unwrap().len();
    assert!(bytes < 12 << 20, "{bytes} bytes");
    assert_eq!(diff.spans[9_999].text.as_deref(), Some("@@ differs; not shown, since the whole diff would be too long @@\n"));
}

#[test]
fn a_stored_run_reads_as_it_was_written() {
    let digest = |text: &str| Digest::of(text.as_bytes());
    let spans: Vec<Span> = (0..2 * PART as i64 + 3)
        .map(|n| {
            let mut span = span(&format!("s{n}"), n, 2 * n, json!({"/opening/kind": "LlmCall"}));
            span.opening.parent = (n > 0).then(|| format!("s{}", n / 2));
            span.snapshot_after =
                (n % 3 > 0).then(|| crate::model::SnapshotRef { content: digest(&(n / 7).to_string()), node: digest("") });
            match n % 5 {
                0 => span.closing = None,
                1 => span.closing.as_mut().unwrap().cost_usd = Some(0.25),
                2 => {
                    span.opening.executor =
                        Some(serde_json::from_value(json!({"type": "shell", "script": "ls", "env": {"N": (n % 2).to_string()}})).unwrap())
                }
                3 => span.opening.arguments = json!({"n": n}),
                _ => (span.closing.as_mut().unwrap().input_tokens, span.closing.as_mut().unwrap().output_tokens) = (None, None),
            }
            span
        })
        .collect();
    let prints = Prints::of(spans.iter());
    let mut read = Prints::default();
    prints.encode().for_each(|part| read.take(&part).unwrap());
    assert_eq!(prints, read);
    assert_eq!(prints.encode().count(), 3);
}

#[test]
fn numbers_are_asked_for_as_numbers_and_members_in_any_order() {
    let asks = |arguments: serde_json::Value| {
        let mut step = span("a", 0, 1, json!({}));
        step.opening.arguments = arguments;
        step
    };
    let differs = |a: &str, b: &str| {
        let [a, b] = [a, b].map(|text| asks(serde_json::from_str(text).unwrap()));
        assert_eq!(same_input(&a, &b), by_lineage(std::slice::from_ref(&a), std::slice::from_ref(&b)).spans.is_empty());
        !same_input(&a, &b)
    };
    assert!(!differs(r#"{"a": 1, "b": [2.50]}"#, r#"{"b": [25e-1], "a": 1.0}"#));
    assert!(differs(r#"{"a": "1"}"#, r#"{"a": 1}"#));
    assert!(differs("[[1], 2]", "[1, [2]]"));
    assert!(differs("9007199254740993", "9007199254740992"));
}
