//! What patches meet in the recorded workspaces, looked up as the api-server does.

use replayfork_core::model::SnapshotRef;
use replayfork_core::patch::FileOverride;
use replayfork_core::plan::FactsNeeded;
use replayfork_core::source::{Facts, FileFact, SnapshotFact, Source};

use super::files::{Entry, States, changes};

pub fn facts(source: &Source, states: &States, needed: FactsNeeded) -> Facts {
    let mut facts = Facts::default();
    for (target, before, files) in needed.files {
        let recorded = before.map(|s| states.0[&s.content].clone()).unwrap_or_default();
        let of_file = |f: &FileOverride| {
            let (same, executable) = match recorded.get(&f.path) {
                Some(Entry::File { content, executable }) => (content.as_bytes() == &*f.content, *executable),
                _ => (false, false),
            };
            (f.path.clone(), FileFact { same: before.is_some().then_some(same), executable })
        };
        facts.files.insert(source.spans[target].id.clone(), files.iter().map(of_file).collect());
    }
    for (target, before, content) in needed.snapshots {
        let recorded = before.map(|s| states.0[&s.content].clone()).unwrap_or_default();
        let Some(named) = states.0.get(&content) else { continue };
        let changed = before.map(|_| changes(&recorded, named));
        facts.snapshots.insert(source.spans[target].id.clone(), SnapshotFact { state: SnapshotRef { content, node: content }, changed });
    }
    facts
}
