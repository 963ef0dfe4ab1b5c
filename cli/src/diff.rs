//! `diff`: what came out otherwise.

use kube::api::Api;
use replayfork_client::read::{Run, RunDiff};
use replayfork_core::diff::{FileChange, FileChangeKind, JsonChange, JsonDiff, Matching, SpanDiff, SpanSide};
use replayfork_core::model::Status;
use replayfork_crds::ReplayFork;
use serde_json::Value;

use crate::Output;
use crate::connection::{Connection, encode};
use crate::screen::{Colour, Screen};
use crate::text::{self, cost, duration, number, status, structured};

/// # Errors
/// What the api-server says.
pub async fn diff(connection: &Connection, a: &str, b: Option<&str>, output: Output) -> anyhow::Result<()> {
    let (a, b) = match b {
        Some(b) => (a.to_owned(), b.to_owned()),
        None => fork_and_source(connection, a).await?,
    };
    let found: RunDiff = connection.get(&format!("/api/v1/diffs/{}/{}{}", encode(&a), encode(&b), connection.query())).await?;
    if structured(output, &found)? {
        return Ok(());
    }
    let mut screen = Screen::detect();
    show(&found, output == Output::Wide, &mut screen);
    screen.print();
    Ok(())
}

fn show(found: &RunDiff, wide: bool, screen: &mut Screen) {
    summary(found, screen);
    for span in &found.diff.spans {
        pair(span, wide, screen);
    }
    let mut notes = found.notes.clone();
    if found.diff.spans_left_out > 0 {
        notes.push(format!("{} further pairs of steps are not listed", number(Some(found.diff.spans_left_out))));
    }
    if !notes.is_empty() {
        screen.plain("");
    }
    notes.iter().for_each(|note| screen.wrapped("", Colour::Dim, note));
}

fn summary(found: &RunDiff, screen: &mut Screen) {
    let (a, b) = (&found.diff.a, &found.diff.b);
    screen.line(&[(Colour::Bold, &format!("{} → {}", found.a.name, found.b.name))]);
    screen.wrapped("", Colour::Plain, &found.summary);
    screen.plain("");
    let ended = |run: &Run| run.outcome.map_or_else(|| "–".to_owned(), status);
    let colour = match (found.outcome_changed, found.b.outcome) {
        (true, Some(Status::Completed)) => Colour::Green,
        (true, _) => Colour::Red,
        (false, _) => Colour::Plain,
    };
    let mut fact = |name: &str, colour, value: String| screen.line(&[(Colour::Dim, &format!("{name:<17} ")), (colour, &value)]);
    fact("outcome", colour, format!("{} → {}", ended(&found.a), ended(&found.b)));
    fact("duration", Colour::Plain, format!("{} → {}", duration(Some(a.duration_ns)), duration(Some(b.duration_ns))));
    fact("tokens", Colour::Plain, format!("{} → {}", number(Some(a.tokens)), number(Some(b.tokens))));
    fact("cost", Colour::Plain, format!("{} → {}", cost(Some(a.cost_usd)), cost(Some(b.cost_usd))));
    let counts = &found.diff.counts;
    let mut steps = vec![format!("{} the same", number(Some(counts.same))), format!("{} changed", number(Some(counts.changed)))];
    for (only, run) in [(counts.only_a, &found.a), (counts.only_b, &found.b)] {
        if only > 0 {
            steps.push(format!("{} only in {}", number(Some(only)), run.name));
        }
    }
    if found.diff.matching == Matching::Alignment {
        steps.push("aligned, since neither is a fork of the other".to_owned());
    }
    fact("steps", Colour::Plain, steps.join(", "));
    let first = found.diff.spans.iter().find(|s| s.first);
    fact("first divergence", Colour::Yellow, first.map_or_else(|| "none".to_owned(), |f| format!("⚑ {} ({})", f.name, f.kind)));
}

fn pair(span: &SpanDiff, wide: bool, screen: &mut Screen) {
    screen.plain("");
    let renamed = span.renamed.as_ref().map_or_else(String::new, |name| format!(" → {name}"));
    let first = if span.first { "  ⚑ first divergence" } else { "" };
    let name = format!("{}{renamed}", span.name);
    screen.line(&[(Colour::Bold, &name), (Colour::Dim, &format!(" ({})", span.kind)), (Colour::Yellow, first)]);
    let side = |s: Option<&SpanSide>| s.map_or_else(|| "not in this run".to_owned(), describe);
    screen.plain(&format!("  {} → {}", side(span.a.as_ref()), side(span.b.as_ref())));
    if wide {
        let id = |s: Option<&SpanSide>| s.map_or_else(|| "–".to_owned(), |s| s.span.clone());
        screen.line(&[(Colour::Dim, &format!("  id {} → {}", id(span.a.as_ref()), id(span.b.as_ref())))]);
    }
    let mut remarks = Vec::new();
    if span.input_differs {
        remarks.push("another input".to_owned());
    }
    if !span.env.is_empty() {
        remarks.push(format!("environment: {}", span.env.join(", ")));
    }
    if span.moved {
        remarks.push("in another place".to_owned());
    }
    if let (Some(a), Some(b)) = (&span.a, &span.b)
        && a.verdict != b.verdict
    {
        remarks.push(format!("verdict {} → {}", a.verdict, b.verdict));
    }
    if !remarks.is_empty() {
        screen.plain(&format!("  {}", remarks.join("; ")));
    }
    let blocked = span.b.as_ref().map_or(&[][..], |b| &b.blocked);
    for reason in blocked {
        screen.wrapped("  ", Colour::Plain, &text::reason(reason.reason, &reason.message));
    }
    if blocked.is_empty() {
        outputs(span, screen);
    }
    for change in &span.files {
        file(change, screen);
    }
    if span.files_left_out > 0 {
        screen.line(&[(Colour::Dim, &format!("  … further files: {}", number(Some(span.files_left_out))))]);
    }
}

fn outputs(span: &SpanDiff, screen: &mut Screen) {
    match &span.json {
        Some(json) if json.changes.is_empty() => screen.plain("  the same JSON, written in another way"),
        Some(json) => json_changes(json, screen),
        None => span.text.iter().for_each(|text| screen.diff(text, "  ")),
    }
    if let Some(stderr) = &span.stderr {
        screen.line(&[(Colour::Dim, "  stderr:")]);
        screen.diff(stderr, "  ");
    }
}

fn json_changes(json: &JsonDiff, screen: &mut Screen) {
    for change in &json.changes {
        let JsonChange { path, path_before, before, after, cut: _ } = change;
        let path = if path.is_empty() { "(whole)" } else { path };
        let moved = path_before.as_ref().map_or_else(String::new, |p| format!(" (was {p})"));
        let value = |value: &Option<Value>| value.as_ref().map(Value::to_string);
        screen.line(&[(Colour::Cyan, &format!("  {path}{moved}"))]);
        for (sign, colour, value) in [('-', Colour::Red, value(before)), ('+', Colour::Green, value(after))] {
            if let Some(value) = value {
                screen.line(&[(colour, &format!("  {sign} {value}"))]);
            }
        }
    }
    if json.left_out > 0 {
        screen.line(&[(Colour::Dim, &format!("  … further changes: {}", number(Some(json.left_out))))]);
    }
}

fn file(change: &FileChange, screen: &mut Screen) {
    let (sign, colour) = match change.change {
        FileChangeKind::Added => ('+', Colour::Green),
        FileChangeKind::Removed => ('-', Colour::Red),
        FileChangeKind::Modified => ('~', Colour::Yellow),
    };
    let remarks = change.remarks();
    let remarks = if remarks.is_empty() { String::new() } else { format!("  {}", remarks.join(", ")) };
    screen.line(&[(colour, &format!("  {sign} {}", change.path)), (Colour::Dim, &remarks)]);
    change.unified.iter().for_each(|unified| screen.diff(unified, "    "));
}

fn describe(side: &SpanSide) -> String {
    let mut parts = vec![status(side.status)];
    if let Some(code) = side.exit_code {
        parts.push(format!("exit {code}"));
    }
    if side.blocked.is_empty() {
        parts.push(duration(side.duration_ns));
    }
    if let Some(tokens) = side.tokens {
        parts.push(format!("{} tokens", number(Some(tokens))));
    }
    if let Some(usd) = side.cost_usd {
        parts.push(cost(Some(usd)));
    }
    let fidelity = text::fidelity(side.fidelity);
    if !fidelity.is_empty() {
        parts.push(fidelity.to_owned());
    }
    parts.join(", ")
}

/// The source's and the fork's run of one name: a ReplayFork's, or a forked run's own.
async fn fork_and_source(connection: &Connection, name: &str) -> anyhow::Result<(String, String)> {
    let forks: Api<ReplayFork> = Api::namespaced(connection.client.clone(), &connection.namespace);
    // Who may read runs need not be allowed to read ReplayForks.
    let resource = forks.get_opt(name).await.ok().flatten();
    let run = match resource.and_then(|fork| fork.status?.fork_run_id) {
        Some(id) => id,
        None => name.to_owned(),
    };
    let found: Run = connection.get(&format!("/api/v1/runs/{}{}", encode(&run), connection.query())).await?;
    match found.forked_from {
        Some(from) => Ok((from.run.to_string(), run)),
        None => anyhow::bail!("{name:?} is no fork; give a second run to compare it with"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(name: &str, outcome: &str) -> Value {
        json!({"id": "0190c6a0-0000-7000-8000-000000000001", "namespace": "n", "name": name, "kind": "recorded", "state": "sealed",
            "agent": "a", "outcome": outcome, "started": 1, "spans": 3, "rev": 1, "forks": 0})
    }

    #[test]
    fn the_summary_comes_first_and_then_each_step_that_differs() {
        let side = |span: &str, status: &str, code: i64, ns: i64| json!({"span": span, "status": status, "verdict": "allow", "exit_code": code, "duration_ns": ns, "fidelity": "Recorded"});
        let digest = "0".repeat(64);
        let found: RunDiff = serde_json::from_value(json!({
            "a": run("monday", "Failed"), "b": run("tuesday", "Completed"), "outcome_changed": true,
            "summary": "`monday` ended Failed and `tuesday` ended Completed; they part at `test`; eight steps correspond, one of which differs.",
            "reexecuted": 0, "reused": 0, "overridden": 0, "blocked": 0, "notes": ["3 further files differ whose contents are not compared"],
            "diff": {
                "matching": "alignment", "first_divergent_span": "s7", "counts": {"same": 7, "changed": 1, "only_a": 0, "only_b": 1},
                "a": {"spans": 8, "duration_ns": 1_500_000_000, "tokens": 1200, "cost_usd": 0.01},
                "b": {"spans": 9, "duration_ns": 900_000_000, "tokens": 900, "cost_usd": 0.0},
                "spans": [
                    {"span": "s7", "name": "test", "kind": "ShellCommand", "differs": true, "output_differs": true, "input_differs": true, "first": true,
                     "a": side("s7", "Failed", 1, 5_000_000), "b": side("t7", "Completed", 0, 7_000_000),
                     "text": "@@ -1 +1 @@\n-1 failed\n+passed\n", "stderr": "@@ -1 +0,0 @@\n-trace\n",
                     "files": [{"path": "run.sh", "change": "modified", "before": {"type": "file", "size": 1, "digest": digest, "executable": false}, "after": {"type": "file", "size": 1, "digest": digest, "executable": true}}],
                     "files_left_out": 4},
                    {"span": "t8", "name": "report", "kind": "ToolCall", "differs": true, "output_differs": true, "b": side("t8", "Completed", 0, 1_000_000),
                     "json": {"changes": [{"path": "/ok", "before": null, "after": true}], "left_out": 2}, "text": "not shown"},
                ],
            },
        }))
        .unwrap();
        let mut screen = Screen::with(false, Some(60));
        show(&found, false, &mut screen);
        assert_eq!(
            screen.out,
            "\
monday → tuesday
`monday` ended Failed and `tuesday` ended Completed; they
part at `test`; eight steps correspond, one of which
differs.

outcome           ✗ Failed → ✓ Completed
duration          1.5 s → 900 ms
tokens            1 200 → 900
cost              $0.0100 → $0.0000
steps             7 the same, 1 changed, 1 only in tuesday,…
first divergence  ⚑ test (ShellCommand)

test (ShellCommand)  ⚑ first divergence
  ✗ Failed, exit 1, 5 ms → ✓ Completed, exit 0, 7 ms
  another input
  @@ -1 +1 @@
  -1 failed
  +passed
  stderr:
  @@ -1 +0,0 @@
  -trace
  ~ run.sh  became executable
  … further files: 4

report (ToolCall)
  not in this run → ✓ Completed, exit 0, 1 ms
  /ok
  - null
  + true
  … further changes: 2

3 further files differ whose contents are not compared
"
        );
    }
}
