//! `yaml fork=NAME`: a fork as in a ReplayFork's spec; its plan, and what a replay does, in few words.

use replayfork_core::fork::{ForkSpec, ModelMode};
use replayfork_core::model::Output;
use replayfork_core::patch::Contents;
use replayfork_core::plan::{self, Plan, Prepared};
use replayfork_core::reason::Blocked;
use replayfork_core::replay::Reproduced;
use serde_json::Value;

use super::recording::Recorded;
use crate::common::facts::facts;
use crate::common::files::{Entry, Files};
use crate::common::product::{Became, Cache, Early, Gave, Ran, World, replayed};
use crate::common::shell::Toy;

/// What `date` says when a fork runs.
const TODAY: &str = "Tuesday";

/// A fork that was carried out, in the page's words.
pub struct Forked {
    /// The spans of the plan.
    pub plan: String,
    /// What became of each span from the fork's first on.
    pub ran: String,
    /// Every message of a blocked span in the plan.
    pub blocked: String,
    /// The workspace at the end.
    pub files: String,
}

/// Plans a fork and carries it out; with the fork as a run.
///
/// # Errors
/// The refusal.
pub fn fork(recorded: &Recorded, contents: &Contents, spec: &ForkSpec, cache: &mut Cache) -> Result<(Forked, Recorded), String> {
    let bare = recorded.source();
    let needed = Prepared::facts_needed(&bare, contents, spec).map_err(|e| e.to_string())?;
    let facts = facts(&bare, &recorded.states, needed);
    let source = bare.with_facts(facts);
    let fork = Prepared::new(&source, contents, spec).map_err(|e| e.to_string())?;
    let plan = plan::of(&fork);
    let mut toy = Toy::new(TODAY);
    if let (Some(command), ModelMode::Command) = (&spec.model.command, spec.model.mode) {
        toy.model.clone_from(&command.argv);
    }
    let paths = recorded.states.paths();
    let (end, ran, states) = replayed(&fork, World { states: &recorded.states, paths: &paths, cache, physics: &mut toy });
    let forked = Forked { plan: plan_text(&plan), blocked: blocked_text(&plan), ran: ran_text(&fork, &ran), files: files_text(&end.files) };
    let run = Recorded { environment: fork.environment.clone(), spans: ran.spans, states, inherited: fork.to_inherit() };
    Ok((forked, run))
}

/// Rows in columns that are as wide as they have to be, and notes below.
fn columns(rows: &[Vec<String>], notes: &[String]) -> String {
    let width = |i: usize| rows.iter().filter(|r| r.len() > i + 1).map(|r| r[i].chars().count()).max().unwrap_or(0);
    let line = |row: &Vec<String>| {
        let last = row.iter().rposition(|c| !c.is_empty()).unwrap_or(0);
        let cells: Vec<_> = row[..=last]
            .iter()
            .enumerate()
            .map(|(i, cell)| if i == last { cell.clone() } else { format!("{cell:<w$}", w = width(i)) })
            .collect();
        cells.join("  ")
    };
    let lines: Vec<_> = rows.iter().map(line).chain(notes.iter().map(|n| format!("note: {n}"))).collect();
    if lines.is_empty() { "nothing".to_owned() } else { lines.join("\n") }
}

fn reasons(blocked: &[Blocked]) -> String {
    let one = |b: &Blocked| match &b.upstream {
        Some(upstream) => format!("{}({upstream})", b.reason),
        None => b.reason.to_string(),
    };
    let all: Vec<_> = blocked.iter().map(one).collect();
    all.join(", ")
}

fn plan_text(plan: &Plan) -> String {
    let row = |span: &plan::PlannedSpan| {
        let mark = span.fate();
        let causes: Vec<_> = span.causes.iter().map(|c| format!("{c:?}")).collect();
        let mut because = causes.join(", ");
        if !span.triggers.is_empty() {
            because.push_str(&format!(" by {}", span.triggers.join(", ")));
        }
        vec![span.id.clone(), mark.to_owned(), because, reasons(&span.blocked)]
    };
    let rows: Vec<_> = plan.spans.iter().map(row).collect();
    columns(&rows, &plan.warnings)
}

fn blocked_text(plan: &Plan) -> String {
    let of_span = |s: &plan::PlannedSpan| s.blocked.iter().map(|b| format!("{}: {}: {}", s.id, b.reason, b.message)).collect::<Vec<_>>();
    let all: Vec<_> = plan.spans.iter().flat_map(of_span).collect();
    if all.is_empty() { "nothing".to_owned() } else { all.join("\n") }
}

fn ran_text(fork: &Prepared<'_>, ran: &Ran) -> String {
    let row = |(n, became): (&usize, &Became)| {
        let given = || ran.gave.get(n).map(result).unwrap_or_default();
        let (what, more) = match became {
            Became::Kept => ("as recorded".to_owned(), String::new()),
            Became::Reused => ("reused".to_owned(), String::new()),
            Became::Overridden => ("overridden".to_owned(), given()),
            Became::Executed => ("ran".to_owned(), given()),
            Became::Served => ("from the record".to_owned(), given()),
            Became::Cached => ("from another fork".to_owned(), given()),
            Became::Blocked(blocked) => ("blocked".to_owned(), reasons(blocked)),
            Became::Reproduced(Reproduced::Identical) => ("identical".to_owned(), given()),
            Became::Reproduced(Reproduced::Differs(respects)) => (format!("differs: {}", respects.join(", ")), given()),
            Became::NotExecutable(blocked) => ("not executable".to_owned(), reasons(blocked)),
        };
        vec![fork.source.spans[*n].id.clone(), what, more]
    };
    let rows: Vec<_> = ran.became.iter().map(row).collect();
    let early = ran.early.as_ref().map(|early| match early {
        Early::UndeclaredWrite { path, .. } => format!("the fork ends here: UndeclaredWrite: {path}"),
        Early::WorkspaceInconsistent(message) => format!("the fork ends here: WorkspaceInconsistent: {message}"),
    });
    let notes = early.map_or_else(|| ran.warnings.clone(), |early| vec![early]);
    columns(&rows, &notes)
}

fn files_text(files: &Files) -> String {
    let at = |entry: &Entry| match entry {
        Entry::File { content, executable: false } => Value::from(content.clone()).to_string(),
        other => other.to_string(),
    };
    let rows: Vec<_> = files.iter().map(|(path, entry)| vec![path.clone(), at(entry)]).collect();
    columns(&rows, &[])
}

/// What a step gave and changed.
fn result(gave: &Gave) -> String {
    let Gave { output, changed } = gave;
    let mut said = match output {
        Some(Output { text, .. }) => Value::from(text.trim_end()).to_string(),
        None => "no output".to_owned(),
    };
    if let Some(code) = output.as_ref().and_then(|o| o.exit_code).filter(|code| *code != 0) {
        said.push_str(&format!(", exit {code}"));
    }
    for (path, now) in changed {
        said.push_str(&format!(", {} {path}", if now.is_some() { "wrote" } else { "removed" }));
    }
    said
}
