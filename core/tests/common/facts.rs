//! What is looked up in the recorded workspaces before a fork is planned, as the api-server does.

use std::collections::BTreeMap;
use std::convert::Infallible;

use replayfork_core::concurrency::{recorded_changes, seen_through_links};
use replayfork_core::footprint::Pattern;
use replayfork_core::model::{RunEnvironment, SnapshotRef, Span};
use replayfork_core::patch::FileOverride;
use replayfork_core::plan::FactsNeeded;
use replayfork_core::source::{Facts, FileFact, SnapshotFact, Source};

use super::files::{self, Entry, States, changes};

/// A run, with what its spans saw through links and what each changed.
pub fn source(environment: &RunEnvironment, spans: Vec<Span>, states: &States) -> Source {
    let bare = Source::new(environment.clone(), spans, BTreeMap::new());
    let follow = |state: &SnapshotRef, patterns: &[Pattern]| Ok::<_, Infallible>(files::seen_through_links(states.of(state), patterns));
    let Ok(through) = seen_through_links(&bare, follow);
    let bare = Source::new(environment.clone(), bare.spans, through);
    let Ok(changed) = recorded_changes(&bare, |a, b| Ok::<_, Infallible>(states.diff(a, b)));
    Source::new(environment.clone(), bare.spans, changed)
}

/// What patches meet.
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
