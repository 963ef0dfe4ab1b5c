//! The difference of two runs, computed when it is read.

use deadpool_postgres::GenericClient;
use replayfork_client::read::RunDiff;
use replayfork_core::diff::{Diff, FileChange, FileChangeKind, SpanDiff, by_lineage, unified};
use replayfork_core::model::{Fidelity, Span, SpanKind, Status};
use replayfork_snapshot::{Entry, Kind, diff, path_text};

use crate::problem::{ApiError, ApiResult};
use crate::store::blobs::{self, Loaded, Trees};
use crate::store::runs::Found;
use crate::store::spans;

/// Files of one span whose contents are compared.
const MAX_FILES: usize = 100;
/// Bytes up to which a file's content is compared.
const MAX_FILE: u64 = 256 << 10;

/// Compares two runs of which one is a fork of the other, or both of the same.
///
/// # Errors
/// 400 for unrelated runs.
pub async fn run_diff(client: &impl GenericClient, a: &Found, b: &Found) -> ApiResult<RunDiff> {
    let root = |f: &Found| f.base_rid.unwrap_or(f.rid);
    if root(a) != root(b) {
        return Err(ApiError::bad_request(
            "RunsUnrelated",
            format!(
                "{:?} and {:?} are not forks of the same run; a diff compares a fork with its source or with another fork of it",
                a.run.name, b.run.name
            ),
        ));
    }
    let (left, right) = (spans::all(client, a).await?, spans::all(client, b).await?);
    let mut diff = by_lineage(&left, &right);
    add_files(client, a.ns, &left, &right, &mut diff).await?;
    let count = |fidelity| right.iter().filter(|s| s.fidelity == fidelity).count() as i64;
    let (reexecuted, overridden, blocked) = (count(Fidelity::Reexecuted), count(Fidelity::Overridden), count(Fidelity::Blocked));
    let reused = right.len() as i64 - reexecuted - overridden - blocked - count(Fidelity::Skipped);
    let summary = sentence(&diff, b, &right, reused);
    Ok(RunDiff { a: a.run.clone(), b: b.run.clone(), summary, reexecuted, reused, overridden, blocked, diff })
}

async fn add_files(client: &impl GenericClient, ns: i32, left: &[Span], right: &[Span], whole: &mut Diff) -> ApiResult<()> {
    let mut trees = Trees::default();
    let mut shown: Option<(replayfork_core::Digest, replayfork_core::Digest)> = None;
    for span in &mut whole.spans {
        let after = |side: &[Span]| side.iter().find(|s| s.id == span.span).and_then(|s| s.snapshot_after);
        let (Some(a), Some(b)) = (after(left), after(right)) else { continue };
        // A difference that the workspace had before is told once.
        if a.content == b.content || shown == Some((a.content, b.content)) {
            continue;
        }
        shown = Some((a.content, b.content));
        trees.load(client, ns, [a.node, b.node]).await?;
        for change in diff(&mut trees.nodes, &mut Loaded, Some(&a.node), Some(&b.node))?.into_iter().take(MAX_FILES) {
            let kind = match (&change.before, &change.after) {
                (None, _) => FileChangeKind::Added,
                (_, None) => FileChangeKind::Removed,
                _ => FileChangeKind::Modified,
            };
            let before = text(client, ns, change.before.as_ref()).await?;
            let after = text(client, ns, change.after.as_ref()).await?;
            let unified = match (before, after) {
                (Some(before), Some(after)) => unified(&before, &after),
                _ => None,
            };
            span.files.push(FileChange { path: path_text(&change.path), change: kind, unified });
        }
    }
    Ok(())
}

/// A small text file's content; nothing for an absent one, `None` for what is not compared line by line.
async fn text(client: &impl GenericClient, ns: i32, entry: Option<&Entry>) -> ApiResult<Option<String>> {
    match entry.map(|e| &e.kind) {
        None => Ok(Some(String::new())),
        Some(Kind::File { size, digest, chunks, .. }) if *size <= MAX_FILE && chunks.is_empty() => {
            let bytes = blobs::get(client, ns, digest).await?;
            Ok(String::from_utf8(bytes).ok().filter(|t| !t.contains('\0')))
        }
        Some(Kind::Symlink { target }) => Ok(Some(format!("-> {}\n", path_text(target)))),
        Some(_) => Ok(None),
    }
}

/// "`test_validate` now passes; one command ran again, seven results were reused, one model call is blocked."
fn sentence(diff: &Diff, fork: &Found, right: &[Span], reused: i64) -> String {
    let mut clauses = Vec::new();
    let unreached = |span: &SpanDiff| span.b.as_ref().is_some_and(|b| b.fidelity == Fidelity::Skipped);
    let headline = diff.spans.iter().find_map(change_of_fate).or_else(|| {
        let span = diff.spans.iter().find(|s| s.output_differs && !unreached(s))?;
        Some(format!("`{}` gives another output", span.name))
    });
    let same = if diff.spans.iter().any(unreached) { "Nothing differs in what the fork came to" } else { "Nothing differs but timing" };
    let headline = headline.unwrap_or_else(|| same.to_owned());
    let of = |fidelity| right.iter().filter(move |s| s.fidelity == fidelity).map(|s| s.opening.kind).collect::<Vec<_>>();
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
        let verb = if blocked.len() == 1 { "is" } else { "are" };
        clauses.push(format!("{} {verb} blocked", counted(blocked.len(), if models { "model call" } else { "step" })));
    }
    let unreached = of(Fidelity::Skipped);
    if !unreached.is_empty() {
        let why = fork.run.fork_end.as_ref().map_or_else(String::new, |end| format!(" (the fork ended as {})", end.reason));
        clauses.push(format!("{} {} not reached{why}", counted(unreached.len(), "step"), was(unreached.len())));
    }
    if clauses.is_empty() { format!("{headline}.") } else { format!("{headline}; {}.", clauses.join(", ")) }
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

fn counted(n: usize, noun: &str) -> String {
    const WORDS: [&str; 13] = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"];
    let number = WORDS.get(n).map_or_else(|| n.to_string(), |w| (*w).to_owned());
    format!("{number} {noun}{}", if n == 1 { "" } else { "s" })
}

/// # Errors
/// 404 for a path that the tree does not have.
pub fn not_in_tree(path: &str) -> ApiError {
    ApiError::not_found("PathNotFound", format!("the workspace state has no {path:?}"))
}
