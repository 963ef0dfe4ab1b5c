//! Alignment of unrelated runs: what must hold for any two, and what a reader expects of the usual cases.

use std::collections::{BTreeSet, HashMap, HashSet};

use proptest::prelude::*;
use proptest::sample::Index;
use replayfork_core::diff::{self, Pair, Prints, by_alignment};
use replayfork_core::model::Span;
use serde_json::{Value, json};

fn span(id: String, ord: i64, name: &str, kind: &str, parent: Option<String>, arguments: Value) -> Span {
    let output = json!({"text": format!("{name} {arguments}"), "exit_code": 0});
    serde_json::from_value(json!({
        "id": id, "ord": ord,
        "opening": {"name": name, "kind": kind, "parent": parent, "started": ord + 1, "arguments": arguments},
        "closing": {"ended": ord + 2, "status": "Completed", "output": output},
    }))
    .unwrap()
}

/// A run from lines such as `  read: {"path": "a"}`: two blanks for each level.
fn run(prefix: &str, text: &str) -> Vec<Span> {
    let mut above: Vec<String> = Vec::new();
    let lines = text.lines().filter(|l| !l.trim().is_empty()).enumerate();
    lines
        .map(|(n, line)| {
            let level = (line.len() - line.trim_start().len()) / 2;
            above.truncate(level);
            let (name, arguments) = line.trim().split_once(": ").unwrap_or((line.trim(), "null"));
            let id = format!("{prefix}{n}");
            let kind = if arguments == "null" { "Subgraph" } else { "ToolCall" };
            let span = span(id.clone(), n as i64, name, kind, above.last().cloned(), serde_json::from_str(arguments).unwrap());
            above.push(id);
            span
        })
        .collect()
}

fn align(a: &[Span], b: &[Span]) -> Vec<Pair> {
    diff::align(&Prints::of(a.iter()), &Prints::of(b.iter()))
}

/// `a0=b1` for a pair, `a0` or `b1` for a span alone, `~` for one that moved.
fn said(a: &[Span], b: &[Span]) -> String {
    let one = |p: &Pair| {
        let ids: Vec<_> = [p.a.map(|i| &a[i]), p.b.map(|j| &b[j])].into_iter().flatten().map(|s| s.id.as_str()).collect();
        format!("{}{}", ids.join("="), if p.moved { "~" } else { "" })
    };
    align(a, b).iter().map(one).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_turn_that_was_put_in_leaves_the_others_where_they_are() {
    let a = run("a", "turn\n  ask: 1\n  read: 1\nturn\n  ask: 2\n  read: 2\nturn\n  ask: 3\n  read: 3\n");
    let b = run("b", "turn\n  ask: 1\n  read: 1\nturn\n  ask: 9\n  read: 9\nturn\n  ask: 2\n  read: 7\nturn\n  ask: 3\n  read: 3\n");
    assert_eq!(said(&a, &b), "a0=b0 a1=b1 a2=b2 b3 b4 b5 a3=b6 a4=b7 a5=b8 a6=b9 a7=b10 a8=b11");
}

#[test]
fn a_step_with_another_input_corresponds_to_its_namesake_in_the_same_place() {
    let a = run("a", "plan: 1\nread: \"x\"\ntest: \"old\"\nsend: 1\n");
    let b = run("b", "plan: 1\nread: \"x\"\ntest: \"new\"\nsend: 1\n");
    assert_eq!(said(&a, &b), "a0=b0 a1=b1 a2=b2 a3=b3");
}

#[test]
fn a_retry_in_one_run_only_is_the_step_that_the_other_does_not_have() {
    let a = run("a", "plan: 1\ntest: 1\nsend: 1\n");
    let b = run("b", "plan: 1\ntest: 1\ntest: 1\nsend: 1\n");
    assert_eq!(said(&a, &b), "a0=b0 a1=b1 b2 a2=b3");
}

#[test]
fn steps_in_another_order_are_found_and_said_to_have_moved() {
    let a = run("a", "read: 1\nlint: 1\ntest: 1\nsend: 1\n");
    let b = run("b", "lint: 1\ntest: 1\nread: 1\nsend: 1\n");
    assert_eq!(said(&a, &b), "a0=b2~ a1=b0 a2=b1 a3=b3");
}

#[test]
fn a_step_that_another_step_holds_now_has_moved() {
    let a = run("a", "one\n  read: 1\n  lint: 1\ntwo\n  test: 1\n");
    let b = run("b", "one\n  lint: 1\ntwo\n  read: 1\n  test: 1\n");
    assert_eq!(said(&a, &b), "a0=b0 a1=b3~ a2=b1 a3=b2 a4=b4");
}

#[test]
fn a_renamed_container_keeps_what_it_holds() {
    let a = run("a", "first\n  read: 1\n  think: 1\nthen\n  test: 1\n");
    let b = run("b", "begin\n  read: 1\n  think: 1\nthen\n  test: 1\n");
    assert_eq!(said(&a, &b), "a0=b0 a1=b1 a2=b2 a3=b3 a4=b4");
    let renamed = by_alignment(&a, &b);
    assert_eq!((renamed.spans.len(), renamed.spans[0].renamed.as_deref()), (1, Some("begin")));
}

#[test]
fn a_recorder_that_adds_a_level_changes_nothing_else() {
    let a = run("a", "read: 1\ntest: \"old\"\nsend: 1\n");
    let b = run("b", "run\n  read: 1\n  test: \"new\"\n  send: 1\n");
    assert_eq!(said(&a, &b), "b0 a0=b1~ a1=b2~ a2=b3~");
}

#[test]
fn runs_with_nothing_in_common_are_two_lists() {
    let (a, b) = (run("a", "read: 1\nlint: 2\n"), run("b", "fly: 3\n"));
    assert_eq!(said(&a, &b), "a0 a1 b0");
    assert_eq!(said(&a, &[]), "a0 a1");
    assert_eq!(said(&[], &[]), "");
}

#[test]
fn parents_that_are_missing_or_hold_each_other_do_no_harm() {
    let mut a = run("a", "one: 1\ntwo: 2\nthree: 3\n");
    a[0].opening.parent = Some("a1".into());
    a[1].opening.parent = Some("a0".into());
    a[2].opening.parent = Some("nobody".into());
    let mut b = run("b", "one: 1\ntwo: 2\nthree: 3\n");
    b[2].opening.parent = Some("b2".into());
    assert_eq!(said(&a, &a), "a0=a0 a1=a1 a2=a2");
    assert_eq!(align(&a, &b).iter().filter(|p| p.a.is_some() && p.b.is_some()).count(), 3);
}

/// A few names and inputs, so that most steps have twins.
fn tree() -> impl Strategy<Value = Vec<Span>> {
    proptest::collection::vec((any::<Index>(), 0..4usize, 0..4u8, any::<bool>()), 0..60).prop_map(|steps| {
        let mut spans: Vec<Span> = Vec::new();
        for (n, (parent, name, argument, nested)) in steps.into_iter().enumerate() {
            let parent = (nested && n > 0).then(|| spans[parent.index(n)].id.clone());
            let arguments = if argument == 3 { Value::Null } else { json!(argument) };
            spans.push(span(format!("s{n}"), n as i64, ["ask", "read", "test", "turn"][name], "ToolCall", parent, arguments));
        }
        spans
    })
}

fn matched(pairs: &[Pair]) -> BTreeSet<(usize, usize)> {
    pairs.iter().filter_map(|p| Some((p.a?, p.b?))).collect()
}

fn key(span: &Span) -> (String, String) {
    (span.opening.name.clone(), span.opening.arguments.to_string())
}

fn once(pairs: &[Pair], a: usize, b: usize) {
    let (of_a, of_b): (Vec<_>, Vec<_>) = (pairs.iter().filter_map(|p| p.a).collect(), pairs.iter().filter_map(|p| p.b).collect());
    assert_eq!((of_a.len(), of_b.len()), (a, b));
    assert_eq!((of_a.iter().collect::<HashSet<_>>().len(), of_b.iter().collect::<HashSet<_>>().len()), (a, b));
    assert!(pairs.iter().all(|p| p.a.is_some() || p.b.is_some()));
}

/// Of each kind of step as many correspond to an equal one as both runs have.
fn nothing_common_is_lost(a: &[Span], b: &[Span], pairs: &[Pair]) {
    let count = |spans: &[Span]| {
        let mut counts: HashMap<_, usize> = HashMap::new();
        spans.iter().for_each(|s| *counts.entry(key(s)).or_default() += 1);
        counts
    };
    let (of_a, of_b) = (count(a), count(b));
    let both: usize = of_a.iter().map(|(key, n)| *n.min(of_b.get(key).unwrap_or(&0))).sum();
    let equal = matched(pairs).into_iter().filter(|&(i, j)| key(&a[i]) == key(&b[j])).count();
    assert_eq!(equal, both);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a_run_is_itself(a in tree()) {
        let pairs = align(&a, &a);
        let identity: Vec<_> = (0..a.len()).map(|i| Pair { a: Some(i), b: Some(i), moved: false }).collect();
        prop_assert_eq!(pairs, identity);
        prop_assert!(by_alignment(&a, &a).spans.is_empty());
    }

    #[test]
    fn sides_may_be_changed(a in tree(), b in tree()) {
        let (there, back) = (align(&a, &b), align(&b, &a));
        once(&there, a.len(), b.len());
        once(&back, b.len(), a.len());
        let mirrored: BTreeSet<_> = back.iter().map(|p| Pair { a: p.b, b: p.a, moved: p.moved }).collect();
        prop_assert_eq!(there.iter().copied().collect::<BTreeSet<_>>(), mirrored);
    }

    #[test]
    fn steps_taken_out_or_put_in_leave_all_others_matched(a in tree(), out in proptest::collection::vec(any::<Index>(), 0..5)) {
        let mut b = a.clone();
        for at in out {
            if !b.is_empty() {
                b.remove(at.index(b.len()));
            }
        }
        for (x, y) in [(&a, &b), (&b, &a)] {
            let pairs = align(x, y);
            once(&pairs, x.len(), y.len());
            nothing_common_is_lost(x, y, &pairs);
        }
    }

    #[test]
    fn steps_with_another_name_leave_all_others_matched(a in tree(), renamed in proptest::collection::vec(any::<Index>(), 0..5)) {
        let mut b = a.clone();
        for (n, at) in renamed.iter().filter(|_| !a.is_empty()).enumerate() {
            b[at.index(a.len())].opening.name = format!("fresh{n}");
        }
        let pairs = align(&a, &b);
        once(&pairs, a.len(), b.len());
        nothing_common_is_lost(&a, &b, &pairs);
    }

    #[test]
    fn the_order_of_the_slices_is_of_no_account(a in tree(), b in tree(), seed in any::<u64>()) {
        let shuffle = |spans: &[Span]| {
            let mut order: Vec<usize> = (0..spans.len()).collect();
            order.sort_by_key(|i| (*i as u64).wrapping_mul(seed | 1).rotate_left(17));
            order.into_iter().map(|i| spans[i].clone()).collect::<Vec<_>>()
        };
        prop_assert_eq!(by_alignment(&a, &b), by_alignment(&shuffle(&a), &shuffle(&b)));
    }

    #[test]
    fn what_is_stored_of_a_run_compares_like_the_run(a in tree()) {
        let prints = Prints::of(a.iter());
        let mut read = Prints::default();
        prints.encode().for_each(|part| read.take(&part).unwrap());
        prop_assert_eq!(&prints, &read);
        prop_assert!(prints.encode().all(|part| Prints::default().take(&part[..part.len() - 1]).is_err()));
    }
}
