//! The product's own programs and its viewer, kept by the content of their sources: a clone that has the same sources
//! needs neither cargo nor npm to run the demo.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cache::{self, Inputs};
use crate::command::{output, run};
use crate::interrupt;
use crate::phase::note;
use crate::workspace;

/// How many versions of each are kept; a developer makes a new one with every change.
const KEPT: usize = 4;

/// What the programs are compiled from, below the project's root.
const SOURCES: [&str; 12] =
    ["Cargo.toml", "Cargo.lock", "core", "client", "crds", "snapshot", "api-server", "operator", "sandbox", "recorder", "cli", ".cargo"];

/// The static one of the programs, which has a target folder of its own.
const EXECUTOR: &str = "replayfork-executor";

const PROGRAMS: [&str; 6] =
    ["replayfork-api-server", "replayfork-operator", "replayfork-courier", "replayfork-recorder", "kubectl-replay", EXECUTOR];

/// How the programs are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// What tests, images and demo share.
    Dev,
    /// For benches.
    Release,
}

impl Profile {
    /// The folder's name below cargo's target folder.
    fn folder(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
        }
    }
}

/// Built programs and the built viewer.
#[derive(Clone, Debug)]
pub struct Product {
    programs: PathBuf,
    viewer: Option<PathBuf>,
}

impl Product {
    /// Builds what no clone has built from the same sources before.
    pub fn build(project: &Path, profile: Profile) -> Result<Self> {
        let programs = loop {
            interrupt::check()?;
            let digest = source_digest(project, profile)?;
            let mut same = true;
            let made = cache::entry("programs", profile.folder(), &digest, |folder| {
                workspace::build_rust(project, profile)?;
                same = source_digest(project, profile)? == digest;
                ensure!(same, "the sources changed while they were being built");
                collect(project, profile, folder)
            });
            // By an editor, or by cargo itself, which brings Cargo.lock up to date.
            if same {
                break made?;
            }
            note("the sources changed while they were being built, so they are built again");
        };
        cache::prune("programs", profile.folder(), KEPT)?;
        Ok(Self { programs, viewer: viewer(project)? })
    }

    /// Takes the programs that are in `target/debug` now, and the viewer that is in `web/dist`, whatever their sources.
    pub fn as_built(project: &Path) -> Result<Self> {
        let mut inputs = Inputs::new();
        for program in PROGRAMS {
            let path = place(project, Profile::Dev, program);
            inputs.add_path(program, &path).context("build it first")?;
        }
        let programs = cache::entry("programs", "as-built", &inputs.digest(), |folder| collect(project, Profile::Dev, folder))?;
        cache::prune("programs", "as-built", KEPT)?;
        let viewer = project.join("web/dist");
        let viewer = viewer.is_dir().then_some(viewer);
        Ok(Self { programs, viewer })
    }

    /// The folder of all programs, `kubectl-replay` among them.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// The folder of the viewer's files, if there is a viewer.
    pub fn viewer(&self) -> Option<&Path> {
        self.viewer.as_deref()
    }
}

fn source_digest(project: &Path, profile: Profile) -> Result<String> {
    let mut inputs = Inputs::new();
    inputs.add("compiler", output(Command::new("rustc").arg("--version"))?).add("profile", profile.folder());
    for source in SOURCES {
        let path = project.join(source);
        if path.exists() {
            inputs.add_sources(source, &path)?;
        }
    }
    Ok(inputs.digest())
}

/// The viewer's files, built if no clone has done so.
fn viewer(project: &Path) -> Result<Option<PathBuf>> {
    let web = project.join("web");
    if !web.join("package.json").exists() {
        return Ok(None);
    }
    let digest = Inputs::new().add_sources("web", &web)?.digest();
    let viewer = cache::entry("viewer", "dist", &digest, |folder| {
        workspace::build_viewer(project)?;
        run(Command::new("cp").arg("-R").arg(web.join("dist/.")).arg(folder))
    })?;
    cache::prune("viewer", "dist", KEPT)?;
    Ok(Some(viewer))
}

/// Copies the programs without their line tables, which make most of their size.
fn collect(project: &Path, profile: Profile, into: &Path) -> Result<()> {
    for program in PROGRAMS {
        let from = place(project, profile, program);
        run(Command::new("strip").args(["--strip-debug", "-o"]).arg(into.join(program)).arg(&from))?;
    }
    ensure!(fs::read_dir(into)?.count() == PROGRAMS.len());
    Ok(())
}

fn place(project: &Path, profile: Profile, program: &str) -> PathBuf {
    let target = project.join("target");
    let target = if program == EXECUTOR { target.join(workspace::EXECUTOR_TARGET) } else { target };
    target.join(profile.folder()).join(program)
}
