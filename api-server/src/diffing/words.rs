//! A difference in a sentence.

use replayfork_client::read::Run;
use replayfork_core::diff::{Diff, SpanDiff};
use replayfork_core::model::{Fidelity, SpanKind, Status};

/// "`test_validate` now passes; one command ran again, seven results were reused, one model call is blocked."
pub fn of_fork(diff: &Diff, fork: &Run, fates: &[(Fidelity, SpanKind)], reused: i64) -> String {
    let mut clauses = Vec::new();
    let unreached = |span: &SpanDiff| span.b.as_ref().is_some_and(|b| b.fidelity == Fidelity::Skipped);
    let headline = diff.spans.iter().find_map(change_of_fate).or_else(|| {
        let span = diff.spans.iter().find(|s| s.output_differs && !unreached(s))?;
        Some(format!("`{}` gives another output", span.name))
    });
    let same = if diff.spans.iter().any(unreached) { "Nothing differs in what the fork came to" } else { "Nothing differs but timing" };
    let headline = headline.unwrap_or_else(|| same.to_owned());
    let of = |fidelity| fates.iter().filter(|(f, _)| *f == fidelity).map(|(_, kind)| *kind).collect::<Vec<_>>();
    let ran = of(Fidelity::Reexecuted);
    if !ran.is_empty() {
        let commands = ran.iter().all(|k| matches!(k, SpanKind::ShellCommand | SpanKind::ToolCall));
        clauses.push(format!("{} ran again", counted(ran.len(), if commands { "command" } else { "step" })));
    }
    let overridden = of(Fidelity::Overridden);
    if !overridden.is_empty() {
        clauses.push(format!("{} {} given by a patch", counted(overridden.len(), "output"), was(overridden.len())));
    }
    if reused > 0 {
        clauses.push(format!("{} {} reused", counted(reused as usize, "result"), was(reused as usize)));
    }
    let blocked = of(Fidelity::Blocked);
    if !blocked.is_empty() {
        let models = blocked.iter().all(|k| *k == SpanKind::LlmCall);
        clauses.push(format!("{} {} blocked", counted(blocked.len(), if models { "model call" } else { "step" }), is(blocked.len())));
    }
    let unreached = of(Fidelity::Skipped);
    if !unreached.is_empty() {
        let why = fork.fork_end.as_ref().map_or_else(String::new, |end| format!(" (the fork ended as {})", end.reason));
        clauses.push(format!("{} {} not reached{why}", counted(unreached.len(), "step"), was(unreached.len())));
    }
    if clauses.is_empty() { format!("{headline}.") } else { format!("{headline}; {}.", clauses.join(", ")) }
}

/// "`a` ended Failed and `b` Completed; they part at `test`; nine steps correspond, two of which differ, one is only in `b`."
pub fn of_unrelated(diff: &Diff, a: &Run, b: &Run) -> String {
    let counts = &diff.counts;
    let mut clauses = Vec::new();
    let ended = |outcome: Option<Status>| outcome.map_or_else(|| "has not ended".to_owned(), |o| format!("ended {o}"));
    if a.outcome != b.outcome {
        clauses.push(format!("`{}` {} and `{}` {}", a.name, ended(a.outcome), b.name, ended(b.outcome)));
    }
    if let Some(first) = first(diff) {
        clauses.push(match (&first.a, &first.b) {
            (Some(_), None) => format!("they part at `{}`, which only `{}` has", first.name, a.name),
            (None, Some(_)) => format!("they part at `{}`, which only `{}` has", first.name, b.name),
            _ => format!("they part at `{}`", first.name),
        });
    }
    let corresponding = (counts.same + counts.changed) as usize;
    let mut steps = vec![match corresponding {
        0 => "no steps correspond".to_owned(),
        1 => "one step corresponds".to_owned(),
        n => format!("{} correspond", counted(n, "step")),
    }];
    match counts.changed as usize {
        0 if corresponding == 0 => {}
        0 => steps.push("none of which differs".to_owned()),
        n => steps.push(format!("{} of which {}", number(n), if n == 1 { "differs" } else { "differ" })),
    }
    for (only, name) in [(counts.only_a as usize, &a.name), (counts.only_b as usize, &b.name)] {
        if only > 0 {
            steps.push(format!("{} {} only in `{name}`", number(only), is(only)));
        }
    }
    clauses.push(steps.join(", "));
    let sentence = clauses.join("; ");
    let mut letters = sentence.chars();
    letters.next().map_or_else(String::new, |first| format!("{}{}.", first.to_uppercase(), letters.as_str()))
}

fn first(diff: &Diff) -> Option<&SpanDiff> {
    diff.spans.iter().find(|s| s.first)
}

fn change_of_fate(span: &SpanDiff) -> Option<String> {
    let (a, b) = (span.a.as_ref()?, span.b.as_ref()?);
    match (a.status, b.status) {
        _ if b.fidelity == Fidelity::Skipped => None,
        (Status::Failed, Status::Completed) => Some(format!("`{}` now passes", span.name)),
        (Status::Completed, Status::Failed) => Some(format!("`{}` now fails", span.name)),
        (_, Status::Canceled) => Some(format!("`{}` was interrupted", span.name)),
        _ => None,
    }
}

fn was(n: usize) -> &'static str {
    if n == 1 { "was" } else { "were" }
}

fn is(n: usize) -> &'static str {
    if n == 1 { "is" } else { "are" }
}

fn number(n: usize) -> String {
    const WORDS: [&str; 13] = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"];
    WORDS.get(n).map_or_else(|| n.to_string(), |w| (*w).to_owned())
}

fn counted(n: usize, noun: &str) -> String {
    format!("{} {noun}{}", number(n), if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use replayfork_core::diff::{by_alignment, by_lineage};
    use replayfork_core::model::Span;
    use serde_json::{Value, json};

    use super::*;

    fn run(name: &str, outcome: Option<Status>) -> Run {
        serde_json::from_value(json!({
            "id": "0190c6a0-0000-7000-8000-000000000001", "namespace": "n", "name": name, "kind": "recorded", "state": "sealed",
            "agent": "a", "outcome": outcome, "started": 1, "spans": 3, "rev": 1, "forks": 0,
        }))
        .unwrap()
    }

    fn span(n: i64, name: &str, status: Status, over: &Value) -> Span {
        let mut span = json!({
            "id": format!("s{n}"), "ord": n, "opening": {"name": name, "kind": "ShellCommand", "started": n},
            "closing": {"ended": n, "status": status, "output": {"text": name}},
        });
        for (field, value) in over.as_object().unwrap() {
            span[field] = value.clone();
        }
        serde_json::from_value(span).unwrap()
    }

    #[test]
    fn a_fork_is_told_by_what_became_of_it() {
        let source = [span(1, "read", Status::Completed, &json!({})), span(2, "test", Status::Failed, &json!({}))];
        let fates = |spans: &[Span]| spans.iter().map(|s| (s.fidelity, s.opening.kind)).collect::<Vec<_>>();
        let fork = [source[0].clone(), span(2, "test", Status::Completed, &json!({"fidelity": "Reexecuted"}))];
        let said = of_fork(&by_lineage(&source, &fork), &run("fork", None), &fates(&fork), 1);
        assert_eq!(said, "`test` now passes; one command ran again, one result was reused.");
        let said = of_fork(&by_lineage(&source, &source), &run("fork", None), &fates(&source), 2);
        assert_eq!(said, "Nothing differs but timing; two results were reused.");
    }

    #[test]
    fn unrelated_runs_are_told_by_what_they_share() {
        let (bad, good) = (Status::Failed, Status::Completed);
        let a = [span(1, "read", good, &json!({})), span(2, "test", bad, &json!({})), span(3, "send", good, &json!({}))];
        let b = [
            span(1, "read", good, &json!({})),
            span(2, "look", good, &json!({})),
            span(3, "test", good, &json!({})),
            span(4, "send", good, &json!({})),
        ];
        let said = |a: &[Span], x, b: &[Span], y| of_unrelated(&by_alignment(a, b), &run("monday", x), &run("tuesday", y));
        assert_eq!(
            said(&a, Some(bad), &b, Some(good)),
            "`monday` ended Failed and `tuesday` ended Completed; they part at `look`, which only `tuesday` has; \
             three steps correspond, one of which differs, one is only in `tuesday`."
        );
        assert_eq!(said(&a, Some(bad), &a, Some(bad)), "Three steps correspond, none of which differs.");
        assert_eq!(
            said(&a[..1], None, &b[1..3], None),
            "They part at `read`, which only `monday` has; no steps correspond, one is only in `monday`, two are only in `tuesday`."
        );
    }
}
