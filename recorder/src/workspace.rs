//! Snapshots of the workspace, one after the other, on a thread of their own.

use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use replayfork_core::model::SnapshotRef;
use replayfork_snapshot::{Capturer, LocalStore, SnapshotError};
use tokio::sync::oneshot;

use crate::spool::{Item, Spool};

type Answer = oneshot::Sender<Result<SnapshotRef, String>>;

/// Takes snapshots on request.
pub struct Snapshots {
    requests: mpsc::Sender<Answer>,
    patience: Duration,
    last: Mutex<Option<SnapshotRef>>,
}

impl Snapshots {
    /// # Errors
    /// The folder for packs can't be used.
    pub fn start(root: &Path, spool_folder: &Path, spool: Arc<Spool>, patience: Duration) -> Result<Self, SnapshotError> {
        let store = LocalStore::open(&spool_folder.join("packs"))?;
        let mut capturer = Capturer::new(root);
        let (requests, inbox) = mpsc::channel::<Answer>();
        thread::Builder::new()
            .name("snapshots".into())
            .spawn(move || {
                for answer in inbox {
                    // Nobody waits any longer: the capture would say something about another moment.
                    if answer.is_closed() {
                        continue;
                    }
                    let _ = answer.send(capture(&mut capturer, &store, &spool).map_err(|e| e.to_string()));
                }
            })
            .map_err(|e| SnapshotError::Store(format!("no thread for snapshots: {e}")))?;
        Ok(Self { requests, patience, last: Mutex::new(None) })
    }

    /// The workspace as it is now, or why that is not recorded.
    ///
    /// # Errors
    /// It took too long, or failed.
    pub async fn now(&self) -> Result<SnapshotRef, String> {
        let (answer, taken) = oneshot::channel();
        self.requests.send(answer).map_err(|_| "the snapshot thread has ended".to_owned())?;
        let taken = tokio::time::timeout(self.patience, taken).await;
        let taken = taken.map_err(|_| format!("the snapshot took longer than {} s", self.patience.as_secs()))?;
        let taken = taken.map_err(|_| "the snapshot thread has ended".to_owned())?;
        if let Ok(snapshot) = &taken {
            *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(*snapshot);
        }
        taken
    }

    /// A run begins: what was seen last was another run's.
    pub fn forget(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The state that was seen last: what holds around a span that doesn't see the workspace.
    ///
    /// # Errors
    /// As [`Snapshots::now`], where there is none yet.
    pub async fn last(&self) -> Result<SnapshotRef, String> {
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match last {
            Some(snapshot) => Ok(snapshot),
            None => self.now().await,
        }
    }
}

fn capture(capturer: &mut Capturer, store: &LocalStore, spool: &Spool) -> Result<SnapshotRef, SnapshotError> {
    let captured = capturer.capture(store, &mut |pack| {
        let file = pack.file_name().unwrap_or_default().to_string_lossy().into_owned();
        spool.add(&Item::Pack { file }).map_err(|e| SnapshotError::Store(format!("the spool can't be written: {e}")))
    })?;
    for skipped in &captured.skipped {
        tracing::warn!(path = skipped.path, "not in the snapshot: {}", skipped.why);
    }
    Ok(captured.snapshot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_seen_last_is_of_the_same_run() {
        let folder = tempfile::tempdir().unwrap();
        let (root, spool) = (folder.path().join("work"), folder.path().join("spool"));
        std::fs::create_dir(&root).unwrap();
        let items = Arc::new(Spool::open(&spool).unwrap());
        let snapshots = Snapshots::start(&root, &spool, items, Duration::from_secs(60)).unwrap();
        let empty = snapshots.now().await.unwrap();
        std::fs::write(root.join("file"), "of the next run").unwrap();
        assert_eq!(snapshots.last().await.unwrap(), empty);
        snapshots.forget();
        assert_ne!(snapshots.last().await.unwrap(), empty);
    }
}
