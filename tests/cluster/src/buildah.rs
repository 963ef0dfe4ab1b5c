//! Buildah without a daemon: one private store for a few images, gone afterwards.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache;
use crate::command::run_logged;

/// An archive's name in its cache entry.
pub(crate) const ARCHIVE: &str = "image.tar";

/// Buildah with a store of its own, which goes away with this value.
pub(crate) struct Builder {
    store: tempfile::TempDir,
    log: PathBuf,
}

impl Builder {
    pub fn new() -> Result<Self> {
        let log = cache::root()?.join("log/images.log");
        let _ = fs::remove_file(&log);
        // In the cache, since overlays need a real file system and /tmp may be none.
        let store = tempfile::Builder::new().prefix(".store-").tempdir_in(cache::root()?)?;
        Ok(Self { store, log })
    }

    /// Makes an image that others are built on from a root file system.
    pub fn base(&self, tag: &str, rootfs: &Path) -> Result<()> {
        let context = tempfile::tempdir_in(cache::root()?)?;
        fs::hard_link(rootfs, context.path().join("rootfs.tar"))?;
        let dockerfile = context.path().join("Dockerfile");
        fs::write(&dockerfile, "FROM scratch\nADD rootfs.tar /\n")?;
        self.build(context.path(), &dockerfile, tag, &[])
    }

    /// Builds one Dockerfile.
    pub fn build(&self, context: &Path, dockerfile: &Path, tag: &str, arguments: &[String]) -> Result<()> {
        let mut buildah = self.buildah("bud");
        // A fixed time makes the same content the same layer, so that images share what they have in common.
        buildah.args(["--isolation", "chroot", "--pull-never", "--timestamp", "0", "--layers=false"]);
        for argument in arguments {
            buildah.args(["--build-arg", argument]);
        }
        buildah.arg("--tag").arg(tag).arg("--file").arg(dockerfile).arg(context);
        run_logged(&mut buildah, &self.log).with_context(|| format!("the image {tag} could not be built"))
    }

    /// Writes an image as the archive that containerd imports.
    pub fn save(&self, tag: &str, archive: &Path) -> Result<()> {
        let mut buildah = self.buildah("push");
        buildah.args(["--disable-compression", tag]).arg(format!("oci-archive:{}:{tag}", archive.display()));
        run_logged(&mut buildah, &self.log).with_context(|| format!("the image {tag} could not be written"))
    }

    /// Pushes an archive, which holds the image `tag`, to a registry under the name `name`.
    pub fn publish(&self, archive: &Path, tag: &str, name: &str) -> Result<()> {
        let mut pull = self.buildah("pull");
        pull.arg(format!("oci-archive:{}", archive.display()));
        run_logged(&mut pull, &self.log).with_context(|| format!("{} can't be read", archive.display()))?;
        let mut push = self.buildah("push");
        push.arg(tag).arg(format!("docker://{name}"));
        run_logged(&mut push, &self.log)
            .with_context(|| format!("{name} could not be pushed (log in with `buildah login`, or give another REGISTRY)"))
    }

    /// Buildah mounts its store and may leave that mounted; in a mount namespace of its own nothing stays.
    fn buildah(&self, verb: &str) -> Command {
        let mut buildah = Command::new("unshare");
        buildah.args(["--mount", "--propagation", "private", "buildah", verb]);
        buildah.arg("--root").arg(self.store.path().join("root")).arg("--runroot").arg(self.store.path().join("run"));
        buildah.args(["--storage-driver", "overlay"]);
        buildah
    }
}
