//! The container images, built with buildah and kept as OCI archives by the digest of what is in them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::buildah::{ARCHIVE, Builder};
use crate::cache::{self, Inputs};
use crate::command::run;
use crate::components::PAUSE_IMAGE;
use crate::phase::phase;
use crate::product::Product;
use crate::rootfs::Rootfs;

/// Changes when the way images are built changes.
const RECIPE: &str = "1";

/// How many versions of each image are kept.
const KEPT: usize = 4;

/// The registry that images are named after on a cluster which gets them by import. It exists nowhere.
pub const REGISTRY: &str = "replayfork.local";

/// The tag of images that are imported; every cluster starts with an empty store, so it can always be the same.
pub const TAG: &str = "dev";

/// One of the project's images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Image {
    ApiServer,
    Operator,
    Sandbox,
    Recorder,
    ScriptedAgent,
}

/// An image and the archive it lies in.
#[derive(Clone, Debug)]
pub struct Built {
    pub image: Image,
    pub archive: PathBuf,
}

impl Image {
    pub const ALL: [Self; 5] = [Self::ApiServer, Self::Operator, Self::Sandbox, Self::Recorder, Self::ScriptedAgent];

    /// The name below a registry.
    pub fn repository(self) -> &'static str {
        match self {
            Self::ApiServer => "replayfork/api-server",
            Self::Operator => "replayfork/operator",
            Self::Sandbox => "replayfork/sandbox",
            Self::Recorder => "replayfork/recorder",
            Self::ScriptedAgent => "replayfork/scripted-agent",
        }
    }

    /// The name that it has on a cluster which gets it by import.
    pub fn reference(self) -> String {
        format!("{REGISTRY}/{}:{TAG}", self.repository())
    }

    fn name(self) -> &'static str {
        self.repository().rsplit('/').next().expect("a repository has a last part")
    }

    fn dockerfile(self) -> &'static str {
        match self {
            Self::ApiServer => "api-server/Dockerfile",
            Self::Operator => "operator/Dockerfile",
            Self::Sandbox => "sandbox/Dockerfile",
            Self::Recorder => "recorder/Dockerfile",
            Self::ScriptedAgent => "examples/scripted-agent/Dockerfile",
        }
    }

    fn rootfs(self) -> Rootfs {
        match self {
            Self::ScriptedAgent => Rootfs::Python,
            Self::ApiServer | Self::Operator | Self::Sandbox | Self::Recorder => Rootfs::Libc,
        }
    }

    /// The programs in it.
    fn programs(self) -> &'static [&'static str] {
        match self {
            Self::ApiServer => &["replayfork-api-server"],
            Self::Operator => &["replayfork-operator"],
            Self::Sandbox => &["replayfork-courier", "replayfork-executor"],
            Self::Recorder => &["replayfork-recorder"],
            Self::ScriptedAgent => &[],
        }
    }

    /// All that its Dockerfile copies: where it lies, and what it is called there.
    fn content(self, project: &Path, product: &Product) -> Result<Vec<(PathBuf, String)>> {
        let mut content = Vec::new();
        for program in self.programs() {
            content.push((product.programs().join(program), format!("bin/{program}")));
        }
        let folder = match self {
            Self::ApiServer => product.viewer().map(|viewer| (viewer.to_owned(), "web/dist")),
            Self::ScriptedAgent => {
                let agent = "examples/scripted-agent";
                Some((project.join(agent), agent))
            }
            Self::Operator | Self::Sandbox | Self::Recorder => None,
        };
        if let Some((folder, name)) = folder {
            for file in files(&folder)? {
                let below = file.strip_prefix(&folder)?.display().to_string();
                content.push((file, format!("{name}/{below}")));
            }
        }
        Ok(content)
    }

    /// The digest of all that goes into it.
    fn digest(self, project: &Path, product: &Product) -> Result<String> {
        let mut inputs = Inputs::new();
        inputs.add("recipe", RECIPE).add_path("dockerfile", &project.join(self.dockerfile()))?;
        self.rootfs().add_to(&mut inputs)?;
        for (path, name) in self.content(project, product)? {
            inputs.add_path(&name, &path)?;
        }
        Ok(inputs.digest())
    }

    /// Lays out what the Dockerfile copies.
    fn lay_out(self, project: &Path, product: &Product, context: &Path) -> Result<()> {
        // Folders that a Dockerfile copies must be there, empty or not.
        for folder in ["bin", "web/dist"] {
            fs::create_dir_all(context.join(folder))?;
        }
        for (path, name) in self.content(project, product)? {
            let to = context.join(name);
            fs::create_dir_all(to.parent().expect("below the context"))?;
            fs::copy(path, to)?;
        }
        Ok(())
    }
}

/// Builds the project's images; those that are in the cache are taken from there.
pub fn build(project: &Path, product: &Product) -> Result<Vec<Built>> {
    let mut stale = Vec::new();
    let mut built = Vec::new();
    for image in Image::ALL {
        let digest = image.digest(project, product)?;
        let archive = cache::path("images", image.name(), &digest)?.join(ARCHIVE);
        if !archive.exists() {
            stale.push((image, digest));
        }
        built.push(Built { image, archive });
    }
    if !stale.is_empty() {
        let bases: BTreeSet<_> = stale.iter().map(|(image, _)| image.rootfs()).collect();
        bases.into_iter().try_for_each(|rootfs| rootfs.build().map(drop))?;
        let title = format!("building {} of {} images", stale.len(), built.len());
        phase(&title, || build_stale(project, product, &stale))?;
    }
    Image::ALL.into_iter().try_for_each(|image| cache::prune("images", image.name(), KEPT))?;
    Ok(built)
}

fn build_stale(project: &Path, product: &Product, stale: &[(Image, String)]) -> Result<()> {
    let builder = Builder::new()?;
    let mut bases = BTreeSet::new();
    for (image, digest) in stale {
        cache::entry("images", image.name(), digest, |folder| {
            let rootfs = image.rootfs();
            let base = format!("localhost/replayfork-base-{}", rootfs.name());
            if bases.insert(rootfs) {
                builder.base(&base, &rootfs.build()?)?;
            }
            let context = tempfile::tempdir()?;
            image.lay_out(project, product, context.path())?;
            let arguments = [format!("BASE={base}"), format!("CERTIFICATES={base}"), "BIN=bin".to_owned(), "EXECUTOR=bin".to_owned()];
            let dockerfile = project.join(image.dockerfile());
            builder.build(context.path(), &dockerfile, &image.reference(), &arguments)?;
            builder.save(&image.reference(), &folder.join(ARCHIVE))
        })?;
    }
    Ok(())
}

/// The archive of the image that holds a pod's namespaces.
pub(crate) fn pause() -> Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("pause/pause.c");
    let digest = Inputs::new().add("recipe", RECIPE).add_path("source", &source)?.digest();
    let entry = cache::entry("images", "pause", &digest, |folder| {
        let context = tempfile::tempdir()?;
        run(Command::new("cc").args(["-static", "-Os", "-s", "-o"]).arg(context.path().join("pause")).arg(&source))?;
        let dockerfile = context.path().join("Dockerfile");
        fs::write(&dockerfile, "FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT [\"/pause\"]\n")?;
        let builder = Builder::new()?;
        builder.build(context.path(), &dockerfile, PAUSE_IMAGE, &[])?;
        builder.save(PAUSE_IMAGE, &folder.join(ARCHIVE))
    })?;
    Ok(entry.join(ARCHIVE))
}

/// All files below a folder that belong into an image.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(current) = folders.pop() {
        for entry in fs::read_dir(&current)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                if name != "__pycache__" {
                    folders.push(entry.path());
                }
            } else if name != "Dockerfile" && !name.ends_with(".yaml") {
                found.push(entry.path());
            }
        }
    }
    found.sort();
    Ok(found)
}
