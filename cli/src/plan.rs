//! `plan`: what a fork would do.

use std::io::Read;

use anyhow::{Context, bail};
use replayfork_client::read::PlanAnswer;
use replayfork_core::plan::{Mark, Plan};
use serde_json::{Value, json};

use crate::Output;
use crate::connection::Connection;
use crate::text::{structured, table};

/// A ReplayFork as it stands in a file.
pub struct Manifest {
    pub namespace: Option<String>,
    spec: Value,
}

/// # Errors
/// The file can't be read, or holds no ReplayFork.
pub fn read(filename: &str) -> anyhow::Result<Manifest> {
    let text = if filename == "-" {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        text
    } else {
        std::fs::read_to_string(filename).with_context(|| format!("can't read {filename}"))?
    };
    let manifest: Value = serde_yaml_ng::from_str(&text).with_context(|| format!("{filename} is no YAML"))?;
    if manifest["kind"] != "ReplayFork" {
        bail!("{filename}: kind is {}, not ReplayFork", manifest["kind"]);
    }
    let namespace = manifest["metadata"]["namespace"].as_str().map(str::to_owned);
    Ok(Manifest { namespace, spec: manifest["spec"].clone() })
}

/// # Errors
/// What the api-server says.
pub async fn plan(connection: &Connection, manifest: &Manifest, output: Output) -> anyhow::Result<()> {
    let request = json!({"namespace": connection.namespace, "spec": manifest.spec});
    let answer: PlanAnswer = connection.post("/api/v1/plans", &request).await?;
    if structured(output, &answer)? {
        return Ok(());
    }
    let plan = &answer.plan;
    let c = plan.counts;
    println!(
        "{} at {}: {} will run, {} may run, {} will be blocked, {} may be blocked, {} may run or be blocked, {} reusable",
        answer.run_name,
        fork_span(plan),
        c.will_run,
        c.may_run,
        c.will_block,
        c.may_block,
        c.may_run_or_block,
        c.reusable
    );
    if plan.is_empty() {
        println!("Nothing has to run: the patches change nothing that any span would see.");
    } else if !plan.needs_sandbox() {
        println!("Nothing can run: no pod is started, and the fork ends as Blocked.");
    }
    if plan.spans.is_empty() {
        return Ok(());
    }
    println!();
    let rows: Vec<Vec<String>> = plan
        .spans
        .iter()
        .map(|span| {
            let what = match span.mark {
                None => "overridden",
                Some(Mark::WillRun) => "will run",
                Some(Mark::MayRun) => "may run",
                Some(Mark::WillBeBlocked) => "will be blocked",
                Some(Mark::MayBeBlocked) => "may be blocked",
                Some(Mark::MayRunOrBeBlocked) => "may run or be blocked",
            };
            let causes: Vec<_> = span.causes.iter().map(|c| format!("{c:?}")).collect();
            let blocked: Vec<_> = span.blocked.iter().map(|b| b.reason.to_string()).collect();
            let mut row = vec![span.name.clone(), span.kind.to_string(), what.to_owned(), causes.join(", "), blocked.join(", ")];
            if output == Output::Wide {
                row.extend([span.id.clone(), span.triggers.join(", ")]);
            }
            row
        })
        .collect();
    let mut header = vec!["SPAN", "KIND", "IN THE FORK", "BECAUSE", "BLOCKED BY"];
    if output == Output::Wide {
        header.extend(["ID", "THROUGH"]);
    }
    table(&header, &rows);
    Ok(())
}

fn fork_span(plan: &Plan) -> &str {
    plan.spans.iter().find(|s| s.id == plan.fork_span).map_or(&plan.fork_span, |s| &s.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_gives_spec_and_namespace_and_anything_else_is_refused_by_name() {
        let folder = std::env::temp_dir().join(format!("replayfork-plan-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            path.to_string_lossy().into_owned()
        };
        let good = file("good.yaml", "kind: ReplayFork\nmetadata: {name: x, namespace: agents}\nspec: {source: {run: r, span: s}}\n");
        let manifest = read(&good).unwrap();
        assert_eq!(manifest.namespace.as_deref(), Some("agents"));
        assert_eq!(manifest.spec["source"]["run"], "r");
        let pod = file("pod.yaml", "kind: Pod\n");
        for (path, says) in [(pod.as_str(), "not ReplayFork"), ("/nowhere.yaml", "can't read /nowhere.yaml")] {
            let error = read(path).err().map(|e| e.to_string()).unwrap_or_default();
            assert!(error.contains(says), "{error}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
