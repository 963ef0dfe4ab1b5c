//! The container images, built with buildah and kept as OCI archives by the digest of what is in them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::cache::{self, Inputs};
use crate::command::{run, run_logged};
use crate::components::PAUSE_IMAGE;

/// Changes when the way images are built changes.
const RECIPE: &str = "1";

/// The archive's name in its cache entry.
const ARCHIVE: &str = "image.tar";

/// The archive of the image that holds a pod's namespaces.
pub(crate) fn pause() -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("pause/pause.c");
    let digest = Inputs::new().add("recipe", RECIPE).add_path("source", &source)?.digest();
    let entry = cache::entry("images", "pause", &digest, |folder| {
        let context = tempfile::tempdir()?;
        run(Command::new("cc").args(["-static", "-Os", "-s", "-o"]).arg(context.path().join("pause")).arg(&source))?;
        fs::write(context.path().join("Dockerfile"), "FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT [\"/pause\"]\n")?;
        let builder = Builder::new()?;
        builder.build(context.path(), &context.path().join("Dockerfile"), PAUSE_IMAGE, &[])?;
        builder.save(PAUSE_IMAGE, &folder.join(ARCHIVE))
    })?;
    Ok(entry.join(ARCHIVE))
}

/// Buildah with a store of its own, which goes away with this value.
struct Builder {
    store: tempfile::TempDir,
    log: PathBuf,
}

impl Builder {
    fn new() -> Result<Self> {
        let log = cache::root()?.join("log/images.log");
        let _ = fs::remove_file(&log);
        // In the cache, since overlays need a real file system and /tmp may be none.
        let store = tempfile::Builder::new().prefix(".store-").tempdir_in(cache::root()?)?;
        Ok(Self { store, log })
    }

    /// Builds one Dockerfile.
    fn build(&self, context: &Path, dockerfile: &Path, tag: &str, arguments: &[String]) -> Result<()> {
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
    fn save(&self, tag: &str, archive: &Path) -> Result<()> {
        let mut buildah = self.buildah("push");
        buildah.args(["--disable-compression", tag]).arg(format!("oci-archive:{}:{tag}", archive.display()));
        run_logged(&mut buildah, &self.log).with_context(|| format!("the image {tag} could not be written"))
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
