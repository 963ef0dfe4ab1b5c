//! Workspaces in memory: what each path stands for, the states that were recorded, and their contents as digests see them.

use std::collections::{BTreeMap, BTreeSet};

use replayfork_core::Digest;
use replayfork_core::digest::Hasher;
use replayfork_core::footprint::Pattern;
use replayfork_core::model::SnapshotRef;
use replayfork_core::replay::Workspace;
use serde::Serialize;
use serde_json::json;

/// What is at a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Entry {
    File { content: String, executable: bool },
    Link(String),
    Folder,
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

/// By path. Folders are in it where a test looks at them.
pub type Files = BTreeMap<String, Entry>;

/// Every workspace state that was recorded, by digest.
#[derive(Clone, Default)]
pub struct States(pub BTreeMap<Digest, Files>);

impl States {
    pub fn record(&mut self, files: &Files) -> SnapshotRef {
        let digest = Digest::of_json(&json!(files));
        self.0.insert(digest, files.clone());
        SnapshotRef { content: digest, node: digest }
    }

    pub fn diff(&self, a: &SnapshotRef, b: &SnapshotRef) -> Vec<String> {
        changes(&self.0[&a.content], &self.0[&b.content])
    }
}

/// The paths at which two workspaces differ.
pub fn changes(a: &Files, b: &Files) -> Vec<String> {
    let paths: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    paths.into_iter().filter(|p| a.get(*p) != b.get(*p)).cloned().collect()
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

fn content(files: &Files, patterns: &[Pattern]) -> Digest {
    let mut hasher = Hasher::new("footprint");
    for pattern in patterns {
        hasher.add("pattern", pattern.to_string().as_bytes());
        add(&mut hasher, files, pattern, 8);
    }
    hasher.finish()
}

/// What is at the pattern, and what links lead to.
fn add(hasher: &mut Hasher, files: &Files, pattern: &Pattern, links: usize) {
    for (path, entry) in files.iter().filter(|(p, _)| pattern.covers(&Pattern::Path((*p).clone()))) {
        hasher.add(path, json!(entry).to_string().as_bytes());
        if let (Entry::Link(target), true) = (entry, links > 0) {
            add(hasher, files, &Pattern::Below(target.clone()), links - 1);
        }
    }
}

impl Workspace for Memory {
    type Error = std::convert::Infallible;

    fn now(&mut self, patterns: &[Pattern]) -> Result<Digest, Self::Error> {
        Ok(content(&self.files, patterns))
    }

    fn recorded(&mut self, snapshot: &SnapshotRef, patterns: &[Pattern]) -> Result<Digest, Self::Error> {
        Ok(content(&self.states.0[&snapshot.content], patterns))
    }
}
