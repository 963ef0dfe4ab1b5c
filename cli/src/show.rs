//! `runs` and `show`.

use replayfork_client::fork::CloseReason;
use replayfork_client::read::{Run, RunKind, RunPage, SpanDetail, SpanPage, SpanSummary};
use replayfork_core::model::Status;
use serde_json::json;

use crate::connection::{Connection, encode};
use crate::screen::Screen;
use crate::text::{age, cost, duration, fidelity, number, safe, status, structured, table};
use crate::{Output, forensics};

fn outcome(run: &Run) -> String {
    match (run.outcome, &run.fork_end) {
        (Some(outcome), _) => status(outcome),
        (None, Some(end)) => format!("✗ {}", end.reason),
        (None, None) => format!("{:?}", run.state),
    }
}

/// Deletes a run.
///
/// # Errors
/// What the api-server says.
pub async fn delete(connection: &Connection, run: &str) -> anyhow::Result<()> {
    connection.delete(&format!("/api/v1/runs/{}{}", encode(run), connection.query())).await?;
    println!("run {run:?} is deleted; its workspaces go with the next collection");
    Ok(())
}

/// # Errors
/// What the api-server says.
pub async fn runs(
    connection: &Connection,
    agent: Option<String>,
    search: Option<String>,
    limit: i64,
    output: Output,
) -> anyhow::Result<()> {
    let mut runs = Vec::new();
    let mut before: Option<String> = None;
    while (runs.len() as i64) < limit {
        let mut path = format!("/api/v1/runs{}&limit={}", connection.query(), (limit - runs.len() as i64).clamp(1, 500));
        for (name, value) in [("agent", &agent), ("q", &search), ("before", &before)] {
            if let Some(value) = value {
                path.push_str(&format!("&{name}={}", encode(value)));
            }
        }
        let page: RunPage = connection.get(&path).await?;
        runs.extend(page.runs);
        match page.next {
            Some(next) => before = Some(next),
            None => {
                before = None;
                break;
            }
        }
    }
    if structured(output, &json!({"runs": runs, "more": before.is_some()}))? {
        return Ok(());
    }
    if runs.is_empty() && (agent.is_some() || search.is_some()) {
        println!("No run of namespace {:?} is of that agent, or matches what is searched for.", connection.namespace);
        return Ok(());
    }
    if runs.is_empty() {
        println!(
            "No runs in namespace {:?}. Record one: examples/scripted-agent/pod.yaml shows an agent with the recorder beside it.",
            connection.namespace
        );
        return Ok(());
    }
    let mut header = vec!["NAME", "STATUS", "AGENT", "STEPS", "DURATION", "TOKENS", "COST", "FORKED FROM", "FORKS", "AGE"];
    let wide = output == Output::Wide;
    if wide {
        header.extend(["ID", "MODEL", "STATE"]);
    }
    let rows: Vec<Vec<String>> = runs
        .iter()
        .map(|run| {
            let from = run.forked_from.as_ref().map_or_else(|| "–".into(), |f| format!("{} at {}", f.run_name, f.span_name));
            let length = run.ended.map(|e| e.saturating_sub(run.started));
            let mut row = vec![
                run.name.clone(),
                outcome(run),
                run.agent.clone(),
                number(Some(run.spans)),
                duration(length),
                number(run.tokens),
                cost(run.cost_usd),
                from,
                number(Some(run.forks)),
                age(run.started),
            ];
            if wide {
                row.extend([run.id.to_string(), run.model.clone().unwrap_or_else(|| "–".into()), format!("{:?}", run.state)]);
            }
            row
        })
        .collect();
    table(&header, &rows);
    if before.is_some() {
        println!("There are more; --limit {} lists as many again.", limit.saturating_mul(2));
    }
    Ok(())
}

/// All summaries of a run, page by page.
///
/// # Errors
/// What the api-server says.
pub async fn all_spans(connection: &Connection, run: &str) -> anyhow::Result<Vec<SpanSummary>> {
    let mut spans = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let mut path = format!("/api/v1/runs/{}/spans{}", encode(run), connection.query());
        if let Some(after) = &after {
            path.push_str(&format!("&after={}", encode(after)));
        }
        let page: SpanPage = connection.get(&path).await?;
        spans.extend(page.spans);
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(spans),
        }
    }
}

/// # Errors
/// What the api-server says.
pub async fn run(connection: &Connection, run: &str, output: Output) -> anyhow::Result<()> {
    let found: Run = connection.get(&format!("/api/v1/runs/{}{}", encode(run), connection.query())).await?;
    let spans = all_spans(connection, run).await?;
    if structured(output, &json!({"run": found, "spans": spans}))? {
        return Ok(());
    }
    let length = duration(found.ended.map(|e| e.saturating_sub(found.started)));
    println!(
        "{}  {}  agent {}  {} tokens  {}  {length}",
        found.name,
        outcome(&found),
        found.agent,
        number(found.tokens),
        cost(found.cost_usd)
    );
    if let Some(from) = &found.forked_from {
        println!("forked from {} at {} (step {})", from.run_name, from.span_name, from.step);
    }
    if let Some(end) = found.fork_end.as_ref().filter(|end| end.reason != CloseReason::Succeeded) {
        println!("ended as {}: {}", end.reason, safe(&end.message));
    }
    let check = found.fork_end.as_ref().and_then(|end| end.reproducibility);
    if let Some(check) = check {
        println!(
            "a check: {} identical, {} different, {} not executable",
            number(Some(check.identical)),
            number(Some(check.differs)),
            number(Some(check.not_executable))
        );
        if let Some(from) = found.forked_from.as_ref().filter(|_| check.differs > 0) {
            println!("what differs: kubectl replay diff {} {}", from.run_name, found.name);
        }
    }
    let troubled = found.outcome.is_some_and(|o| o != Status::Completed) || spans.iter().any(|s| s.blocked.is_some());
    if check.is_none() && troubled {
        let mut screen = Screen::detect();
        forensics::brief(&forensics::of(connection, run).await?, &found.name, &mut screen);
        screen.print();
    }
    println!();
    let fork = found.kind == RunKind::Fork;
    let mut header = vec!["STEP", "SPAN", "KIND", "STATUS", "VERDICT", "DURATION"];
    match (fork, check) {
        (true, Some(_)) => header.extend(["REPRODUCED", "WHY NOT"]),
        (true, None) => header.extend(["IN THE FORK", "BLOCKED"]),
        (false, _) => {}
    }
    if output == Output::Wide {
        header.extend(["ID", "SNAPSHOTS", "TOKENS"]);
    }
    let rows: Vec<Vec<String>> = spans
        .iter()
        .enumerate()
        .map(|(i, span)| {
            let indent = if span.parent.is_some() { "  " } else { "" };
            let mut row = vec![
                (i + 1).to_string(),
                format!("{indent}{}", span.name),
                span.kind.to_string(),
                status(span.status),
                span.verdict.to_string(),
                duration(span.ended.map(|e| e.saturating_sub(span.started)).filter(|_| span.blocked.is_none())),
            ];
            if fork {
                let reason = span.blocked.as_ref().map_or_else(String::new, |b| b.reason.to_string());
                let fate = if check.is_some() { verdict(span) } else { fidelity(span.fidelity) };
                row.extend([fate.to_owned(), reason]);
            }
            if output == Output::Wide {
                let states = match (span.snapshot_before, span.snapshot_after) {
                    (true, true) => "both",
                    (true, false) => "before",
                    (false, true) => "after",
                    (false, false) => "none",
                };
                row.extend([span.id.clone(), states.to_owned(), number(span.input_tokens.zip(span.output_tokens).map(|(i, o)| i + o))]);
            }
            row
        })
        .collect();
    table(&header, &rows);
    Ok(())
}

/// What a check found of a step.
fn verdict(span: &SpanSummary) -> &'static str {
    match (span.reproduced, span.blocked.is_some()) {
        (Some(true), _) => "identical",
        (Some(false), _) => "differs",
        (None, true) => "not executable",
        // Before the span that the check starts at, or one that holds others together.
        (None, false) => "–",
    }
}

/// # Errors
/// What the api-server says.
pub async fn span(connection: &Connection, run: &str, span: &str, output: Output) -> anyhow::Result<()> {
    let detail: SpanDetail = connection.get(&format!("/api/v1/runs/{}/spans/{}{}", encode(run), encode(span), connection.query())).await?;
    // A span whole is structure, in a terminal too.
    if !structured(output, &detail)? {
        structured(Output::Yaml, &detail)?;
    }
    Ok(())
}
