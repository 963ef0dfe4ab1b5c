//! A workspace in memory, and every state of it that was recorded.

use std::collections::{BTreeMap, BTreeSet};

use replayfork_core::Digest;
use replayfork_core::digest::Hasher;
use replayfork_core::footprint::Pattern;
use replayfork_core::model::SnapshotRef;
use replayfork_core::replay::Workspace;
use serde_json::json;

/// Contents by path.
pub type Files = BTreeMap<String, String>;

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

/// The paths that differ.
pub fn changes(a: &Files, b: &Files) -> Vec<String> {
    let paths: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    paths.into_iter().filter(|p| a.get(*p) != b.get(*p)).cloned().collect()
}

pub fn set(files: &mut Files, path: &str, content: Option<&String>) {
    match content {
        Some(content) => drop(files.insert(path.to_owned(), content.clone())),
        None => drop(files.remove(path)),
    }
}

/// The workspace of a replay.
pub struct Memory {
    pub states: States,
    pub files: Files,
}

fn content(files: &Files, patterns: &[Pattern]) -> Digest {
    let mut hasher = Hasher::new("footprint");
    for pattern in patterns {
        hasher.add("pattern", pattern.to_string().as_bytes());
        for (path, content) in files.iter().filter(|(p, _)| pattern.covers(&Pattern::Path((*p).clone()))) {
            hasher.add(path, content.as_bytes());
        }
    }
    hasher.finish()
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
