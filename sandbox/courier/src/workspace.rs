//! The fork's workspace: restored, compared, captured, uploaded.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::Context;
use replayfork_client::Pack;
use replayfork_core::Digest;
use replayfork_core::footprint::Pattern;
use replayfork_core::model::SnapshotRef;
use replayfork_core::replay::{Workspace, WorkspaceChange};
use replayfork_snapshot::{
    Capturer, LocalStore, Nodes, Skipped, SnapshotError, diff, footprint_content, parse_pack, path_bytes, path_text, put_file,
    replay_paths, restore,
};

use crate::api::Api;

/// The workspace folder, the blobs at hand, and its state as last captured.
pub struct ForkWorkspace {
    api: Api,
    root: PathBuf,
    store: LocalStore,
    nodes: Nodes,
    capturer: Capturer,
    /// Recorded states whose blobs are at hand.
    fetched: HashSet<Digest>,
    start: Option<Digest>,
    /// Packs of the workspace as it was before anything was restored. Their blobs are at hand, so no later pack has them.
    unsent: Vec<PathBuf>,
    pub now: SnapshotRef,
    /// Entries that the last look at the workspace could not read, so that `now` lacks them.
    pub unread: Vec<Skipped>,
}

impl ForkWorkspace {
    /// Blobs of all states that were fetched or captured.
    pub fn store(&self) -> &LocalStore {
        &self.store
    }

    /// # Errors
    /// The folders can't be used.
    pub fn open(api: Api, root: &Path, scratch: &Path) -> anyhow::Result<Self> {
        let store = LocalStore::open(&scratch.join("packs"))?;
        let mut capturer = Capturer::new(root);
        let mut unsent = Vec::new();
        let captured = capturer.capture(&store, &mut |pack| {
            unsent.push(pack.to_owned());
            Ok(())
        });
        let now = captured.context("the workspace can't be read")?.snapshot;
        let nodes = Nodes::default();
        Ok(Self {
            api,
            root: root.to_owned(),
            store,
            nodes,
            capturer,
            fetched: HashSet::new(),
            start: None,
            unsent,
            now,
            unread: Vec::new(),
        })
    }

    /// Makes the workspace equal a recorded state.
    ///
    /// # Errors
    /// What the api-server or the file system says.
    pub async fn start_from(&mut self, state: &SnapshotRef) -> anyhow::Result<()> {
        self.fetch(state).await?;
        restore(&self.root, &self.store, &mut self.nodes, Some(&self.now.node), &state.node).context("the workspace can't be restored")?;
        self.start = Some(state.node);
        self.capture().await?;
        anyhow::ensure!(
            self.now.content == state.content,
            "the restored workspace is {}, the recorded one {}",
            self.now.content,
            state.content
        );
        Ok(())
    }

    /// Gets the blobs of a recorded state.
    ///
    /// # Errors
    /// What the api-server says.
    pub async fn fetch(&mut self, state: &SnapshotRef) -> anyhow::Result<()> {
        if !self.fetched.insert(state.node) {
            return Ok(());
        }
        let Self { api, store, start, .. } = self;
        api.snapshot(&state.node, start.as_ref(), store).await.context("a recorded workspace can't be fetched")?;
        Ok(())
    }

    /// Captures the workspace and sends what the api-server lacks. Returns the paths that changed since the last capture.
    ///
    /// # Errors
    /// What the api-server or the file system says.
    pub async fn capture(&mut self) -> anyhow::Result<Vec<String>> {
        let mut packs = std::mem::take(&mut self.unsent);
        let captured = self.capturer.capture(&self.store, &mut |pack| {
            packs.push(pack.to_owned());
            Ok(())
        })?;
        // Read back two by two, so that no more are in memory.
        for paths in packs.chunks(2) {
            let packs = paths.iter().map(|path| read_pack(path)).collect::<anyhow::Result<Vec<_>>>()?;
            self.api.offer(&packs, &self.store).await?;
        }
        self.unread = captured.skipped.into_iter().filter(|skipped| skipped.unread).collect();
        let before = std::mem::replace(&mut self.now, captured.snapshot);
        if before.content == self.now.content {
            return Ok(Vec::new());
        }
        let changes = diff(&mut self.nodes, &mut self.store, Some(&before.node), Some(&self.now.node))?;
        Ok(changes.iter().map(|c| path_text(&c.path)).collect())
    }

    /// Makes changes happen that no step makes.
    ///
    /// # Errors
    /// What the api-server or the file system says.
    pub async fn change(&mut self, changes: &[WorkspaceChange]) -> anyhow::Result<()> {
        for change in changes {
            match change {
                WorkspaceChange::Restore(state) => {
                    self.fetch(state).await?;
                    restore(&self.root, &self.store, &mut self.nodes, Some(&self.now.node), &state.node)
                        .context("a workspace can't be restored")?;
                }
                WorkspaceChange::Recorded { state, paths } => {
                    self.fetch(state).await?;
                    let paths: Vec<_> = paths.iter().map(|p| path_bytes(p)).collect();
                    replay_paths(&self.root, &mut self.nodes, &mut self.store, &self.now.node, (&state.node, &paths))?;
                }
                WorkspaceChange::File { path, content, executable } => self.put_file(path, content, *executable)?,
            }
            self.capture().await?;
        }
        Ok(())
    }

    /// Sets a path to a file, whatever was there when last captured.
    ///
    /// # Errors
    /// What the file system says.
    pub fn put_file(&mut self, path: &str, content: &[u8], executable: bool) -> Result<(), SnapshotError> {
        put_file(&self.root, &mut self.nodes, &mut self.store, &self.now.node, (path, content, executable))
    }

    /// The paths that differ between two states of which all blobs are at hand.
    ///
    /// # Errors
    /// What the api-server says.
    pub async fn difference(&mut self, before: &SnapshotRef, after: &SnapshotRef) -> anyhow::Result<Vec<String>> {
        self.fetch(before).await?;
        self.fetch(after).await?;
        let changes = diff(&mut self.nodes, &mut self.store, Some(&before.node), Some(&after.node))?;
        Ok(changes.iter().map(|c| path_text(&c.path)).collect())
    }
}

impl Workspace for ForkWorkspace {
    type Error = SnapshotError;

    fn now(&mut self, patterns: &[Pattern]) -> Result<Digest, SnapshotError> {
        footprint_content(&mut self.nodes, &mut self.store, &self.now.node, patterns)
    }

    fn recorded(&mut self, snapshot: &SnapshotRef, patterns: &[Pattern]) -> Result<Digest, SnapshotError> {
        footprint_content(&mut self.nodes, &mut self.store, &snapshot.node, patterns)
    }
}

/// A pack as it is stored.
fn read_pack(path: &Path) -> anyhow::Result<Pack> {
    let bytes = std::fs::read(path).with_context(|| format!("can't read {}", path.display()))?;
    let index = parse_pack(&bytes).map_err(SnapshotError::from)?;
    let (digests, has_directories) = (index.digests().collect(), index.has_directories());
    Ok(Pack { digests, has_directories, bytes: bytes.into() })
}
