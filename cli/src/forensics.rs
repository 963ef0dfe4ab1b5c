//! `forensics`: what went wrong in a run, and because of what.

use replayfork_client::read::Run;
use replayfork_core::forensics::{Forensics, SpanRef};

use crate::Output;
use crate::connection::{Connection, encode};
use crate::screen::{Colour, Screen};
use crate::text::{self, number, status, structured};

/// # Errors
/// What the api-server says.
pub async fn of(connection: &Connection, run: &str) -> anyhow::Result<Forensics> {
    connection.get(&format!("/api/v1/runs/{}/forensics{}", encode(run), connection.query())).await
}

/// # Errors
/// What the api-server says.
pub async fn forensics(connection: &Connection, run: &str, output: Output) -> anyhow::Result<()> {
    let found = of(connection, run).await?;
    if structured(output, &found)? {
        return Ok(());
    }
    let run: Run = connection.get(&format!("/api/v1/runs/{}{}", encode(run), connection.query())).await?;
    let mut screen = Screen::detect();
    screen.line(&[(Colour::Bold, &run.name), (Colour::Plain, &run.outcome.map_or_else(String::new, |o| format!("  {}", status(o))))]);
    show(&found, &mut screen);
    screen.print();
    Ok(())
}

/// Two lines below a run's own.
pub fn brief(found: &Forensics, run: &str, screen: &mut Screen) {
    screen.wrapped("", Colour::Plain, &found.summary);
    if found.path.len() > 1 || !found.blocked_by.is_empty() || !found.retries.is_empty() {
        screen.line(&[(Colour::Dim, &format!("kubectl replay forensics {run} shows how it came to that"))]);
    }
}

fn step(span: &SpanRef) -> String {
    format!("{:>4}  {}  {}", span.step, status(span.status), span.name)
}

fn show(found: &Forensics, screen: &mut Screen) {
    screen.wrapped("", Colour::Plain, &found.summary);
    let why = |span: &SpanRef| span.why.as_ref().map_or_else(String::new, |why| format!("  {why}"));
    if let Some(first) = found.first_failed.as_ref().filter(|first| found.root_cause.as_ref() != Some(*first)) {
        heading("first failure", screen);
        screen.line(&[(Colour::Red, &step(first)), (Colour::Dim, &why(first))]);
    }
    if !found.path.is_empty() {
        heading("from the root cause to the end", screen);
    }
    for (i, link) in found.path.iter().enumerate() {
        let colour = if i == 0 { Colour::Red } else { Colour::Plain };
        let after = if link.because.is_empty() { why(&link.span) } else { format!("  {}", link.because) };
        screen.line(&[(colour, &step(&link.span)), (Colour::Dim, &after)]);
        if found.path_left_out > 0 && i + 1 == found.path.len() / 2 {
            screen.line(&[(Colour::Dim, &format!("      … {} more", number(Some(found.path_left_out))))]);
        }
    }
    for group in &found.blocked_by {
        heading("blocked", screen);
        screen.line(&[(Colour::Yellow, &step(&group.root))]);
        for reason in &group.reasons {
            screen.wrapped("      ", Colour::Plain, &text::reason(reason.reason, &reason.message));
        }
        for blocked in &group.spans {
            let reasons: Vec<&str> = blocked.reasons.iter().map(|r| r.reason.as_str()).collect();
            screen.line(&[(Colour::Plain, &step(&blocked.span)), (Colour::Dim, &format!("  because of it ({})", reasons.join(", ")))]);
        }
        if group.left_out > 0 {
            screen.line(&[(Colour::Dim, &format!("      … {} more", number(Some(group.left_out))))]);
        }
    }
    for group in &found.retries {
        let end = if group.succeeded.is_some() { "and succeeded" } else { "and did not succeed" };
        let tried = group.attempts.len() as i64 + group.left_out;
        heading(&format!("{} was tried {} times {end}", group.name, number(Some(tried))), screen);
        for attempt in &group.attempts {
            screen.line(&[(Colour::Plain, &step(attempt)), (Colour::Dim, &why(attempt))]);
        }
    }
    for (left_out, what) in [(found.blocked_by_left_out, "groups of blocked steps"), (found.retries_left_out, "steps tried again")] {
        if left_out > 0 {
            screen.line(&[(Colour::Dim, &format!("… {} more {what}", number(Some(left_out))))]);
        }
    }
}

fn heading(text: &str, screen: &mut Screen) {
    screen.plain("");
    screen.line(&[(Colour::Bold, text)]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_path_reads_from_cause_to_effect() {
        let span = |step: i64, name: &str, status: &str, why: &str| json!({"span": format!("s{step}"), "name": name, "kind": "ShellCommand", "status": status, "verdict": "allow", "step": step, "why": why});
        let found: Forensics = serde_json::from_value(json!({
            "summary": "`report` is blocked because `ask` is blocked.", "failed": 2, "blocked": 2,
            "first_failed": span(1, "test", "Failed", "exit code 1"), "root_cause": span(4, "ask", "Blocked", "ModelBlocked"),
            "path": [{"span": span(4, "ask", "Blocked", "ModelBlocked")}, {"span": span(5, "report", "Blocked", ""), "because": "its stdin needs the output of `ask`"}],
            "blocked_by": [{"root": span(4, "ask", "Blocked", ""), "reasons": [{"reason": "ModelBlocked", "message": "no model is given"}],
                "spans": [{"span": span(5, "report", "Blocked", ""), "reasons": [{"reason": "UpstreamBlocked", "message": ""}]}]}],
            "retries": [{"name": "test", "kind": "ShellCommand", "attempts": [span(1, "test", "Failed", "exit code 1"), span(2, "test", "Failed", "exit code 2")]}],
        }))
        .unwrap();
        let mut screen = Screen::with(false, None);
        show(&found, &mut screen);
        assert_eq!(
            screen.out,
            "\
`report` is blocked because `ask` is blocked.

first failure
   1  ✗ Failed  test  exit code 1

from the root cause to the end
   4  ⊘ Blocked  ask  ModelBlocked
   5  ⊘ Blocked  report  its stdin needs the output of `ask`

blocked
   4  ⊘ Blocked  ask
      ModelBlocked: no model is given
   5  ⊘ Blocked  report  because of it (UpstreamBlocked)

test was tried 2 times and did not succeed
   1  ✗ Failed  test  exit code 1
   2  ✗ Failed  test  exit code 2
"
        );
    }
}
