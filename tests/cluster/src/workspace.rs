//! Builds the project itself: the Rust workspace, the static executor, the viewer.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::command::run_logged;
use crate::phase::{note, phase_with_log};
use crate::product::Profile;

/// The clone that this program was built in.
pub fn project() -> PathBuf {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    project.canonicalize().unwrap_or(project)
}

/// Where the executor is compiled for: this machine's own kind, named so that its flags reach no build script.
pub(crate) const EXECUTOR_TARGET: &str = "x86_64-unknown-linux-gnu";

/// Builds all programs, and the executor, which alone is static.
pub fn build_rust(project: &Path, profile: Profile) -> Result<()> {
    let log = project.join("target/log/cargo.log");
    let _ = std::fs::remove_file(&log);
    let release = (profile == Profile::Release).then_some("--release");
    if !project.join("target/debug/replayfork-api-server").exists() {
        note("cargo's target folder is each clone's own; the first build takes about six minutes");
    }
    phase_with_log("building the Rust workspace", &log, || run_logged(cargo(project).args(["build", "--workspace"]).args(release), &log))?;
    phase_with_log("building the static executor", &log, || {
        let mut executor = cargo(project);
        executor.args(["build", "--package", "replayfork-executor", "--target", EXECUTOR_TARGET]).args(release);
        run_logged(executor.env("RUSTFLAGS", "-C target-feature=+crt-static"), &log)
    })
}

/// `web/dist`, if the viewer is there.
pub fn build_viewer(project: &Path) -> Result<()> {
    let _ = std::fs::remove_file(web_log(project));
    install_viewer_packages(project)?;
    let web = project.join("web");
    if !web.join("package.json").exists() {
        return Ok(());
    }
    let log = web_log(project);
    phase_with_log("building the viewer", &log, || run_logged(npm(&web).args(["run", "build"]), &log))
}

/// `npm ci`, unless the modules were installed from the very same lock file.
pub fn install_viewer_packages(project: &Path) -> Result<()> {
    let web = project.join("web");
    if !web.join("package.json").exists() {
        return Ok(());
    }
    let installed = web.join("node_modules/.replayfork-lock");
    let lock = std::fs::read(web.join("package-lock.json")).context("web/package-lock.json is missing")?;
    if std::fs::read(&installed).is_ok_and(|known| known == lock) {
        return Ok(());
    }
    let log = web_log(project);
    phase_with_log("installing the viewer's packages", &log, || {
        run_logged(npm(&web).args(["ci", "--no-audit", "--no-fund"]), &log)?;
        Ok(std::fs::write(&installed, &lock)?)
    })
}

fn web_log(project: &Path) -> PathBuf {
    project.join("target/log/web.log")
}

fn cargo(project: &Path) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Images are built from the clone's own target folder.
    cargo.current_dir(project).env("CARGO_TARGET_DIR", project.join("target")).env("CARGO_TERM_COLOR", "never");
    cargo
}

fn npm(web: &Path) -> Command {
    let mut npm = Command::new("npm");
    npm.current_dir(web);
    npm
}
