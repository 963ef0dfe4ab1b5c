//! The container images, built with buildah and kept as OCI archives by the digest of what is in them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::buildah::{ARCHIVE, Builder};
use crate::cache::{self, Inputs};
use crate::command::run;
use crate::components::PAUSE_IMAGE;
use crate::phase::phase;
use crate::rootfs::Rootfs;

/// Changes when the way images are built changes.
const RECIPE: &str = "1";

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
    pub const ALL: [Self; 5] = [
        Self::ApiServer,
        Self::Operator,
        Self::Sandbox,
        Self::Recorder,
        Self::ScriptedAgent,
    ];

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
        self.repository()
            .rsplit('/')
            .next()
            .expect("a repository has a last part")
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

    /// The programs in it, below `target/`.
    fn programs(self) -> &'static [&'static str] {
        match self {
            Self::ApiServer => &["debug/replayfork-api-server"],
            Self::Operator => &["debug/replayfork-operator"],
            Self::Sandbox => &[
                "debug/replayfork-courier",
                "x86_64-unknown-linux-gnu/debug/replayfork-executor",
            ],
            Self::Recorder => &["debug/replayfork-recorder"],
            Self::ScriptedAgent => &[],
        }
    }

    /// The folders in it, below the project's root.
    fn folders(self) -> &'static [&'static str] {
        match self {
            Self::ApiServer => &["web/dist"],
            Self::ScriptedAgent => &["examples/scripted-agent"],
            Self::Operator | Self::Sandbox | Self::Recorder => &[],
        }
    }

    /// The digest of all that goes into it.
    fn digest(self, project: &Path) -> Result<String> {
        let mut inputs = Inputs::new();
        inputs
            .add("recipe", RECIPE)
            .add_path("dockerfile", &project.join(self.dockerfile()))?;
        self.rootfs().add_to(&mut inputs)?;
        for program in self.programs() {
            let path = project.join("target").join(program);
            inputs
                .add_path(program, &path)
                .context("build it first: cargo build --workspace, and the executor")?;
        }
        for folder in self.folders() {
            for (name, path) in files(&project.join(folder))? {
                inputs.add_path(&name, &path)?;
            }
        }
        Ok(inputs.digest())
    }

    /// Lays out what the Dockerfile copies, the programs without their line tables.
    fn lay_out(self, project: &Path, context: &Path) -> Result<()> {
        let bin = context.join("bin");
        fs::create_dir_all(&bin)?;
        for program in self.programs() {
            let from = project.join("target").join(program);
            let to = bin.join(from.file_name().expect("a program has a name"));
            run(Command::new("strip")
                .arg("--strip-debug")
                .arg("-o")
                .arg(&to)
                .arg(&from))?;
        }
        for folder in self.folders() {
            fs::create_dir_all(context.join(folder))?;
            for (name, path) in files(&project.join(folder))? {
                let to = context.join(folder).join(name);
                fs::create_dir_all(to.parent().expect("below the context"))?;
                fs::copy(path, to)?;
            }
        }
        Ok(())
    }
}

/// Builds the project's images from the programs in `target/debug`; those that are in the cache are taken from there.
pub fn build(project: &Path) -> Result<Vec<Built>> {
    build_these(project, &Image::ALL)
}

/// Builds a single image.
pub fn build_one(project: &Path, image: Image) -> Result<Built> {
    Ok(build_these(project, &[image])?.remove(0))
}

fn build_these(project: &Path, images: &[Image]) -> Result<Vec<Built>> {
    let mut stale = Vec::new();
    let mut built = Vec::new();
    for image in images.iter().copied() {
        let digest = image.digest(project)?;
        let archive = cache::path("images", image.name(), &digest)?.join(ARCHIVE);
        if !archive.exists() {
            stale.push((image, digest));
        }
        built.push(Built { image, archive });
    }
    if !stale.is_empty() {
        let bases: BTreeSet<_> = stale.iter().map(|(image, _)| image.rootfs()).collect();
        bases
            .into_iter()
            .try_for_each(|rootfs| rootfs.build().map(drop))?;
        phase(
            &format!("building {} of {} images", stale.len(), built.len()),
            || build_stale(project, &stale),
        )?;
    }
    Ok(built)
}

fn build_stale(project: &Path, stale: &[(Image, String)]) -> Result<()> {
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
            image.lay_out(project, context.path())?;
            let arguments = [
                format!("BASE={base}"),
                "BIN=bin".to_owned(),
                "EXECUTOR=bin".to_owned(),
            ];
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
    let digest = Inputs::new()
        .add("recipe", RECIPE)
        .add_path("source", &source)?
        .digest();
    let entry = cache::entry("images", "pause", &digest, |folder| {
        let context = tempfile::tempdir()?;
        run(Command::new("cc")
            .args(["-static", "-Os", "-s", "-o"])
            .arg(context.path().join("pause"))
            .arg(&source))?;
        let dockerfile = context.path().join("Dockerfile");
        fs::write(
            &dockerfile,
            "FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT [\"/pause\"]\n",
        )?;
        let builder = Builder::new()?;
        builder.build(context.path(), &dockerfile, PAUSE_IMAGE, &[])?;
        builder.save(PAUSE_IMAGE, &folder.join(ARCHIVE))
    })?;
    Ok(entry.join(ARCHIVE))
}

/// All files below a folder that belong into an image, by their path below it. A folder that is absent has none.
fn files(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(current) = folders.pop() {
        let Ok(entries) = fs::read_dir(&current) else {
            continue;
        };
        for entry in entries {
            let entry = entry?;
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() {
                if name != "__pycache__" {
                    folders.push(path);
                }
            } else if name != "Dockerfile" && !name.ends_with(".yaml") {
                found.push((path.strip_prefix(folder)?.display().to_string(), path));
            }
        }
    }
    found.sort();
    Ok(found)
}
