//! `diff`: what came out otherwise.

use kube::api::Api;
use replayfork_client::read::{Run, RunDiff};
use replayfork_core::diff::{FileChangeKind, SpanSide};
use replayfork_crds::ReplayFork;

use crate::Output;
use crate::connection::{Connection, encode};
use crate::text::{self, duration, number, status, structured};

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
    println!("{} → {}", found.a.name, found.b.name);
    println!("{}", found.summary);
    let totals = (&found.diff.a, &found.diff.b);
    println!(
        "duration {} → {}, tokens {} → {}",
        duration(Some(totals.0.duration_ns)),
        duration(Some(totals.1.duration_ns)),
        number(Some(totals.0.tokens)),
        number(Some(totals.1.tokens))
    );
    for span in &found.diff.spans {
        let first = if found.diff.first_divergent_span.as_ref() == Some(&span.span) { "  ⚑ first divergence" } else { "" };
        println!("\n{} ({}){first}", span.name, span.kind);
        let side = |s: Option<&SpanSide>| s.map_or_else(|| "–".to_owned(), describe);
        println!("  {} → {}", side(span.a.as_ref()), side(span.b.as_ref()));
        for blocked in span.b.iter().flat_map(|b| &b.blocked) {
            let lines: Vec<_> = blocked.message.lines().map(text::safe).collect();
            println!("  {}: {}", blocked.reason, lines.join("\n  "));
        }
        let blocked = span.b.as_ref().is_some_and(|b| !b.blocked.is_empty());
        if let Some(text) = span.text.as_ref().filter(|_| !blocked) {
            text::diff(text, "  ");
        }
        if let Some(stderr) = span.stderr.as_ref().filter(|_| !blocked) {
            println!("  stderr:");
            text::diff(stderr, "  ");
        }
        for file in &span.files {
            let sign = match file.change {
                FileChangeKind::Added => '+',
                FileChangeKind::Removed => '-',
                FileChangeKind::Modified => '~',
            };
            println!("  {sign} {}", text::safe(&file.path));
            if let Some(unified) = &file.unified {
                text::diff(unified, "    ");
            }
        }
    }
    Ok(())
}

fn describe(side: &SpanSide) -> String {
    let mut parts = vec![status(side.status)];
    if let Some(code) = side.exit_code {
        parts.push(format!("exit {code}"));
    }
    if side.blocked.is_empty() {
        parts.push(duration(side.duration_ns));
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
