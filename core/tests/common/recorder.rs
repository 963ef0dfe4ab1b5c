//! Runs as a recorder takes them down: a step reads when it begins, and writes when it ends.

use replayfork_core::model::{Closing, Fidelity, Opening, RunEnvironment, Span};
use replayfork_core::source::Source;

use super::files::{Changes, Files, States, changed, set};

/// A step that has begun, and what it will have changed when it ends.
struct Underway {
    n: usize,
    closing: Closing,
    writes: Changes,
}

/// A run that is being recorded.
#[derive(Default)]
pub struct Recorder {
    pub environment: RunEnvironment,
    pub files: Files,
    pub states: States,
    pub spans: Vec<Span>,
    underway: Vec<Underway>,
}

impl Recorder {
    pub fn new(environment: RunEnvironment, files: Files) -> Self {
        Self { environment, files, ..Self::default() }
    }

    /// Whether a step has begun and not ended.
    pub fn is_busy(&self) -> bool {
        !self.underway.is_empty()
    }

    /// Steps whose time has come end.
    pub fn settle(&mut self, now: i64) {
        self.underway.sort_by_key(|u| u.closing.ended);
        while self.underway.first().is_some_and(|u| u.closing.ended <= now) {
            let Underway { n, closing, writes } = self.underway.remove(0);
            for (path, entry) in &writes {
                set(&mut self.files, path, entry.as_ref());
            }
            self.spans[n].closing = Some(closing);
            self.spans[n].snapshot_after = self.spans[n].snapshot_before.map(|_| self.states.record(&self.files));
        }
    }

    /// Begins a step; gives the run so far.
    pub fn begin(&mut self, id: String, opening: Opening, snapshots: bool) -> Source {
        let sees = opening.sees_workspace() && snapshots;
        self.spans.push(Span {
            id,
            ord: self.spans.len() as i64,
            snapshot_before: sees.then(|| self.states.record(&self.files)),
            opening,
            closing: None,
            fidelity: Fidelity::Recorded,
            first_recorded: None,
            snapshot_after: None,
            input_digest: None,
        });
        Source::new(self.environment.clone(), self.spans.clone(), Default::default())
    }

    /// The step that began last will end so, with these files as it alone would leave them.
    pub fn ends(&mut self, closing: Closing, after: &Files) {
        self.underway.push(Underway { n: self.spans.len() - 1, closing, writes: changed(&self.files, after) });
    }

    /// A step that has not ended does at this time.
    pub fn ends_at(&mut self, n: usize, ended: i64) {
        for underway in self.underway.iter_mut().filter(|u| u.n == n) {
            underway.closing.ended = ended;
        }
    }
}
