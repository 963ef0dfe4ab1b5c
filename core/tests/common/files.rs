//! Workspaces in memory: what each path stands for, the states that were recorded, and their contents as digests see them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use replayfork_core::Digest;
use replayfork_core::digest::Hasher;
use replayfork_core::footprint::Pattern;
use replayfork_core::model::SnapshotRef;
use replayfork_core::replay::Workspace;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub enum Entry {
    File { content: String, executable: bool },
    Link(String),
    Folder,
}

/// An entry as it is written down: a text is a file.
#[derive(Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Written {
    File(String),
    Program { program: String },
    Link { link: String },
    Folder {},
}

impl From<Written> for Entry {
    fn from(written: Written) -> Self {
        match written {
            Written::File(content) => Entry::file(content),
            Written::Program { program } => Entry::File { content: program, executable: true },
            Written::Link { link } => Entry::Link(link),
            Written::Folder {} => Entry::Folder,
        }
    }
}

impl From<Entry> for Written {
    fn from(entry: Entry) -> Self {
        match entry {
            Entry::File { content, executable: false } => Written::File(content),
            Entry::File { content, executable: true } => Written::Program { program: content },
            Entry::Link(link) => Written::Link { link },
            Entry::Folder => Written::Folder {},
        }
    }
}

impl Entry {
    pub fn file(content: impl Into<String>) -> Self {
        Entry::File { content: content.into(), executable: false }
    }

    /// A file's content; of anything else nothing.
    pub fn content(&self) -> &str {
        match self {
            Entry::File { content, .. } => content,
            Entry::Link(_) | Entry::Folder => "",
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Entry::File { content, executable: false } => f.write_str(content),
            Entry::File { content, executable: true } => write!(f, "x {content}"),
            Entry::Link(target) => write!(f, "-> {target}"),
            Entry::Folder => f.write_str("a folder"),
        }
    }
}

/// By path. Folders are in it where a test looks at them.
pub type Files = BTreeMap<String, Entry>;

/// Paths, each with what is there now.
pub type Changes = BTreeMap<String, Option<Entry>>;

/// Every workspace state that was recorded, by digest.
#[derive(Clone, Default)]
pub struct States(pub BTreeMap<Digest, Files>);

impl States {
    pub fn record(&mut self, files: &Files) -> SnapshotRef {
        let digest = Digest::of_json(&json!(files));
        self.0.insert(digest, files.clone());
        SnapshotRef { content: digest, node: digest }
    }

    pub fn of(&self, state: &SnapshotRef) -> &Files {
        &self.0[&state.content]
    }

    pub fn diff(&self, a: &SnapshotRef, b: &SnapshotRef) -> Vec<String> {
        changes(self.of(a), self.of(b))
    }

    /// Every path of any of them.
    pub fn paths(&self) -> Vec<String> {
        self.0.values().flat_map(BTreeMap::keys).collect::<BTreeSet<_>>().into_iter().cloned().collect()
    }
}

/// The paths at which two workspaces differ.
pub fn changes(a: &Files, b: &Files) -> Vec<String> {
    let paths: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    paths.into_iter().filter(|p| a.get(*p) != b.get(*p)).cloned().collect()
}

/// The same, with what the second has there.
pub fn changed(a: &Files, b: &Files) -> Changes {
    changes(a, b).into_iter().map(|path| (path.clone(), b.get(&path).cloned())).collect()
}

/// Makes a path what it is to be, whatever was there.
pub fn set(files: &mut Files, path: &str, entry: Option<&Entry>) {
    if entry != Some(&Entry::Folder) {
        files.retain(|p, _| !p.strip_prefix(path).is_some_and(|rest| rest.starts_with('/')));
    }
    match entry {
        Some(entry) => drop(files.insert(path.to_owned(), entry.clone())),
        None => drop(files.remove(path)),
    }
}

pub fn covered(patterns: &[Pattern], path: &str) -> bool {
    patterns.iter().any(|p| p.covers(&Pattern::Path(path.to_owned())))
}

/// Symlinks that are followed from one path.
const MAX_LINKS: usize = 40;

/// Where a link at `path` leads, if that is in the workspace.
fn joined(path: &str, target: &str) -> Option<String> {
    if target.starts_with('/') {
        return None;
    }
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The path with symlinked folders on the way resolved; these links go to `through`.
fn entered(files: &Files, path: &str, through: &mut Vec<String>) -> String {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let link = path.match_indices('/').find_map(|(at, _)| match files.get(&path[..at]) {
            Some(Entry::Link(target)) => Some((at, target)),
            _ => None,
        });
        let Some((at, target)) = link else { break };
        through.push(path[..at].to_owned());
        let Some(folder) = joined(&path[..at], target) else { break };
        path = format!("{folder}{}", &path[at..]).trim_start_matches('/').to_owned();
    }
    path
}

/// The path, and, while a link is there, where it leads. `through` gets the links among the folders on the way.
fn stops(files: &Files, path: &str, through: &mut Vec<String>) -> Vec<String> {
    let mut stops = Vec::new();
    let mut next = Some(path.to_owned());
    while let Some(path) = next.filter(|_| stops.len() < MAX_LINKS) {
        let at = entered(files, &path, through);
        next = match files.get(&at) {
            Some(Entry::Link(target)) => joined(&at, target),
            _ => None,
        };
        stops.push(at);
    }
    stops
}

/// The path that is meant by one, links followed.
pub fn followed(files: &Files, path: &str) -> String {
    stops(files, path, &mut Vec::new()).pop().unwrap_or_default()
}

/// What lies below a folder, by path from there.
fn inside<'a>(files: &'a Files, folder: &'a str) -> impl Iterator<Item = (&'a str, &'a Entry)> {
    files.iter().filter_map(move |(path, entry)| match folder {
        "" => Some((path.as_str(), entry)),
        folder => Some((path.strip_prefix(folder)?.strip_prefix('/')?, entry)),
    })
}

/// The links below a folder that lead out of it. Out of the whole workspace none does.
fn leading_out(files: &Files, folder: &str) -> Vec<String> {
    let all = Pattern::Below(folder.to_owned());
    let leads_out = |(path, entry): (&str, &Entry)| {
        let path = format!("{folder}/{path}");
        let Entry::Link(target) = entry else { return None };
        joined(&path, target).filter(|end| !all.covers(&Pattern::Path(end.clone()))).map(|_| path)
    };
    inside(files, folder).filter(|_| !folder.is_empty()).filter_map(leads_out).collect()
}

/// What is seen through symlinks by a footprint, beyond its own patterns: where they lead, and the links on the way.
pub fn seen_through_links(files: &Files, patterns: &[Pattern]) -> Vec<Pattern> {
    let mut seen = BTreeSet::new();
    for pattern in patterns {
        let below = matches!(pattern, Pattern::Below(_));
        let mut through = Vec::new();
        let mut ends = stops(files, pattern.path(), &mut through);
        let links: Vec<_> = ends.iter().filter(|_| below).flat_map(|folder| leading_out(files, folder)).collect();
        for link in links {
            ends.extend(stops(files, &link, &mut through).into_iter().skip(1));
        }
        seen.extend(ends.into_iter().map(|end| if below { Pattern::Below(end) } else { Pattern::Path(end) }));
        seen.extend(through.into_iter().map(Pattern::Path));
    }
    seen.into_iter().filter(|one| !patterns.iter().any(|pattern| pattern.covers(one))).collect()
}

/// What the patterns stand for, and what links on them and below them lead to.
fn content(files: &Files, patterns: &[Pattern]) -> Digest {
    let mut hasher = Hasher::new("footprint");
    for pattern in patterns {
        hasher.add("pattern", pattern.to_string().as_bytes());
        let below = matches!(pattern, Pattern::Below(_));
        for stop in stops(files, pattern.path(), &mut Vec::new()) {
            add(&mut hasher, files, &stop, below);
            for link in leading_out(files, &stop).into_iter().filter(|_| below) {
                hasher.add("link", link.as_bytes());
                for stop in stops(files, &link, &mut Vec::new()).into_iter().skip(1) {
                    add(&mut hasher, files, &stop, true);
                }
            }
        }
    }
    hasher.finish()
}

fn add(hasher: &mut Hasher, files: &Files, at: &str, below: bool) {
    hasher.add("at", json!(files.get(at)).to_string().as_bytes());
    for (path, entry) in inside(files, at).filter(|_| below) {
        hasher.add(path, json!(entry).to_string().as_bytes());
    }
}

/// What a step may see and write, as what it does needs it.
pub struct Reach<'a> {
    pub sees: &'a [Pattern],
    pub writes: &'a [Pattern],
}

/// The workspace of a fork, and all that were recorded.
pub struct Memory {
    pub states: States,
    pub files: Files,
}

impl Workspace for Memory {
    type Error = std::convert::Infallible;

    fn now(&mut self, patterns: &[Pattern]) -> Result<Digest, Self::Error> {
        Ok(content(&self.files, patterns))
    }

    fn recorded(&mut self, snapshot: &SnapshotRef, patterns: &[Pattern]) -> Result<Digest, Self::Error> {
        Ok(content(self.states.of(snapshot), patterns))
    }
}
