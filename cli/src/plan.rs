//! `plan`: what forks would do.

use anyhow::bail;
use replayfork_client::read::PlanAnswer;
use replayfork_core::plan::{Plan, PlannedSpan};
use serde_json::{Value, json};

use crate::Output;
use crate::connection::Connection;
use crate::manifest::{Manifest, admitted};
use crate::text::{self, safe, structured, table};

/// Plans each of the forks, and says of each which it is where there are several. `named` is the namespace that the user gave.
///
/// # Errors
/// What `kubectl apply` would be told, or what the api-server says; with several, after all have been planned.
pub async fn plan(connection: &Connection, named: Option<&str>, manifests: &[Manifest], output: Output) -> anyhow::Result<()> {
    if let [only] = manifests {
        let answer = ask(connection, named, only).await?;
        if !structured(output, &answer)? {
            show(&answer, output);
        }
        return Ok(());
    }
    let (mut plans, mut refused) = (Vec::new(), 0);
    for manifest in manifests {
        match ask(connection, named, manifest).await {
            Ok(answer) => plans.push((manifest, answer)),
            Err(error) => {
                eprintln!("error: replayfork/{}: {error:#}", manifest.name);
                refused += 1;
            }
        }
    }
    let all: Vec<Value> = plans.iter().map(|(manifest, answer)| json!({"fork": manifest.name, "plan": answer})).collect();
    if !structured(output, &json!({"plans": all}))? {
        for (i, (manifest, answer)) in plans.iter().enumerate() {
            println!("{}replayfork/{}", if i > 0 { "\n" } else { "" }, manifest.name);
            show(answer, output);
        }
    }
    if refused > 0 {
        bail!("{refused} of {} forks can't be planned", manifests.len());
    }
    Ok(())
}

async fn ask(connection: &Connection, named: Option<&str>, manifest: &Manifest) -> anyhow::Result<PlanAnswer> {
    let own = manifest.namespace.as_deref().filter(|_| named.is_none());
    let connection = &connection.within(own.unwrap_or(&connection.namespace));
    let spec = admitted(&connection.client, manifest, &connection.namespace).await?;
    connection.post("/api/v1/plans", &json!({"namespace": connection.namespace, "spec": spec})).await
}

fn show(answer: &PlanAnswer, output: Output) {
    let plan = &answer.plan;
    let c = plan.counts;
    println!(
        "{} at {}: {} will run, {} may run, {} will be blocked, {} may be blocked, {} may run or be blocked, {} reusable",
        answer.run_name,
        safe(fork_span(plan)),
        c.will_run,
        c.may_run,
        c.will_block,
        c.may_block,
        c.may_run_or_block,
        c.reusable
    );
    if plan.check {
        println!("No patches: every step that can be is run on its recorded inputs, to see whether it gives what it gave.");
    }
    for warning in &plan.warnings {
        println!("Note: {}.", safe(warning));
    }
    let pod = if plan.sandbox { "a pod only records the workspaces" } else { "no pod is started" };
    if plan.is_empty() {
        println!("Nothing has to run: the patches change nothing that any span would see; {pod}.");
    } else if plan.counts.may_be_run() == 0 {
        println!("Nothing can run: {pod}, and the fork ends as Blocked.");
    }
    if plan.spans.is_empty() {
        return;
    }
    println!();
    let rows: Vec<Vec<String>> = plan
        .spans
        .iter()
        .map(|span| {
            let what = span.fate();
            let causes: Vec<_> = span.causes.iter().map(|c| format!("{c:?}")).collect();
            let mut row = vec![span.name.clone(), span.kind.to_string(), what.to_owned(), causes.join(", "), blocked(span)];
            if output == Output::Wide {
                row.extend([span.id.clone(), span.triggers.join(", "), span.input_digest.map_or_else(String::new, |d| d.to_string())]);
            }
            row
        })
        .collect();
    let mut header = vec!["SPAN", "KIND", "IN THE FORK", "BECAUSE", "BLOCKED BY"];
    if output == Output::Wide {
        header.extend(["ID", "THROUGH", "TO APPROVE"]);
    }
    table(&header, &rows);
    if plan.spans_left_out > 0 {
        println!("{} further spans are not listed.", plan.spans_left_out);
    }
}

/// Reasons with what they are about; of a message that shows a place in a text, the line that says what is wrong.
fn blocked(span: &PlannedSpan) -> String {
    let reasons: Vec<_> = span.blocked.iter().map(|b| text::reason(b.reason, b.message.lines().next().unwrap_or_default())).collect();
    reasons.join("; ")
}

fn fork_span(plan: &Plan) -> &str {
    plan.spans.iter().find(|s| s.id == plan.fork_span).map_or(&plan.fork_span, |s| &s.name)
}
