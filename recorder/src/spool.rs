//! What was taken and not yet sent: one file per item, in order.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use replayfork_client::ingest::{CreateRun, FinishRun, SnapshotUpload, SpanUpload};
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use uuid::Uuid;

/// One thing to send.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Item {
    Run(CreateRun),
    Spans {
        run: Uuid,
        spans: Vec<SpanUpload>,
    },
    /// A pack in the spool's folder, by its file's name.
    Pack {
        file: String,
    },
    Snapshots {
        run: Uuid,
        snapshots: Vec<SnapshotUpload>,
    },
    Finish {
        run: Uuid,
        finish: FinishRun,
    },
}

pub struct Spool {
    queue: PathBuf,
    rejected: PathBuf,
    state: Mutex<State>,
    /// Something was added.
    added: Notify,
    /// Something was sent.
    pub sent: Notify,
}

struct State {
    next: u64,
    waiting: VecDeque<u64>,
}

impl Spool {
    /// Opens a spool, with what an earlier recorder left in it.
    ///
    /// # Errors
    /// The folder can't be made or read.
    pub fn open(folder: &Path) -> io::Result<Self> {
        let (queue, rejected) = (folder.join("queue"), folder.join("rejected"));
        fs::create_dir_all(&queue)?;
        fs::create_dir_all(&rejected)?;
        let mut waiting = Vec::new();
        for entry in fs::read_dir(&queue)? {
            let path = entry?.path();
            match (path.extension().and_then(|e| e.to_str()), path.file_stem().and_then(|s| s.to_str()).and_then(|s| s.parse().ok())) {
                (Some("json"), Some(number)) => waiting.push(number),
                // Cut off before it was acknowledged.
                _ => fs::remove_file(&path)?,
            }
        }
        waiting.sort_unstable();
        let next = waiting.last().map_or(0, |n: &u64| n + 1);
        Ok(Self { queue, rejected, state: Mutex::new(State { next, waiting: waiting.into() }), added: Notify::new(), sent: Notify::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, number: u64) -> PathBuf {
        self.queue.join(format!("{number:012}.json"))
    }

    /// The folder with the packs that items name.
    pub fn packs(&self) -> PathBuf {
        self.queue.with_file_name("packs")
    }

    pub fn len(&self) -> usize {
        self.state().waiting.len()
    }

    /// Writes an item; once this returns, it survives the recorder's death.
    ///
    /// # Errors
    /// The disk is full or broken; nothing was taken then.
    pub fn add(&self, item: &Item) -> io::Result<()> {
        let bytes = serde_json::to_vec(item)?;
        let mut state = self.state();
        let number = state.next;
        let (file, temporary) = (self.file(number), self.queue.join(format!("{number:012}.tmp")));
        if let Err(error) = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, &file)) {
            let _ = fs::remove_file(&temporary);
            return Err(error);
        }
        state.next += 1;
        state.waiting.push_back(number);
        drop(state);
        self.added.notify_one();
        Ok(())
    }

    /// The oldest item, and the one after it where both are packs; waits until there is one.
    pub async fn first(&self) -> Vec<(u64, io::Result<Item>)> {
        loop {
            let added = self.added.notified();
            let first: Vec<u64> = self.state().waiting.iter().take(2).copied().collect();
            if !first.is_empty() {
                let read = |number: u64| fs::read(self.file(number)).and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
                let mut items: Vec<_> = first.into_iter().map(|number| (number, read(number))).collect();
                if !items.iter().all(|(_, item)| matches!(item, Ok(Item::Pack { .. }))) {
                    items.truncate(1);
                }
                return items;
            }
            added.await;
        }
    }

    /// The item was acknowledged.
    pub fn done(&self, number: u64) {
        if let Err(error) = fs::remove_file(self.file(number)) {
            tracing::warn!(%error, number, "a sent item could not be removed; it may be sent again, which changes nothing");
        }
        self.remove(number);
    }

    /// The item can never be taken: it is set aside, so that nothing is lost and nothing waits behind it.
    pub fn reject(&self, number: u64) {
        let _ = fs::rename(self.file(number), self.rejected.join(format!("{number:012}.json")));
        self.remove(number);
    }

    fn remove(&self, number: u64) {
        self.state().waiting.retain(|n| *n != number);
        self.sent.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pack(file: &str) -> Item {
        Item::Pack { file: file.into() }
    }

    #[tokio::test]
    async fn only_packs_come_together() {
        let folder = tempfile::tempdir().unwrap();
        let spool = Spool::open(folder.path()).unwrap();
        let snapshots = Item::Snapshots { run: Uuid::nil(), snapshots: vec![] };
        for item in [&pack("a"), &pack("b"), &pack("c"), &snapshots, &pack("d")] {
            spool.add(item).unwrap();
        }
        let mut together = Vec::new();
        while spool.len() > 0 {
            let items = spool.first().await;
            together.push(items.len());
            items.iter().for_each(|(number, _)| spool.done(*number));
        }
        assert_eq!(together, [2, 1, 1, 1]);
    }

    #[tokio::test]
    async fn what_was_taken_comes_back_in_order_after_a_crash() {
        let folder = tempfile::tempdir().unwrap();
        let spool = Spool::open(folder.path()).unwrap();
        for name in ["a", "b", "c"] {
            spool.add(&pack(name)).unwrap();
        }
        fs::write(folder.path().join("queue/000000000003.tmp"), "{\"half").unwrap();
        drop(spool);
        let again = Spool::open(folder.path()).unwrap();
        let mut found = Vec::new();
        while again.len() > 0 {
            for (number, item) in again.first().await {
                let Item::Pack { file } = item.unwrap() else { panic!("it was a pack") };
                found.push(file);
                again.done(number);
            }
        }
        assert_eq!(found, ["a", "b", "c"]);
        again.add(&pack("d")).unwrap();
        assert_eq!(Spool::open(folder.path()).unwrap().len(), 1);
    }
}
