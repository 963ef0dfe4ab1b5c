//! Root file systems for the images, from the packages of this machine's own Debian.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::cache::{self, Inputs};
use crate::command::run_logged;
use crate::phase::phase_with_log;

/// Changes when the way they are made changes.
const RECIPE: &str = "2";

/// What an image is built on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Rootfs {
    /// What a dynamic Rust program needs: libc, libgcc, certificates. No shell.
    Libc,
    /// A small Debian with a shell, Python and git.
    Python,
}

impl Rootfs {
    pub fn name(self) -> &'static str {
        match self {
            Self::Libc => "libc",
            Self::Python => "python",
        }
    }

    fn packages(self) -> &'static str {
        match self {
            Self::Libc => "libc6,libgcc-s1,ca-certificates",
            Self::Python => {
                "base-files,base-passwd,ca-certificates,coreutils,dash,diffutils,findutils,git,grep,libgcc-s1,procps,python3,sed"
            }
        }
    }

    /// What the packages' own scripts, which don't run, would have done; and what nobody reads in a container.
    fn finish(self) -> &'static [&'static str] {
        const CERTIFICATES: &str = "mkdir -p \"$1/etc/ssl/certs\" && cat \"$1\"/usr/share/ca-certificates/mozilla/*.crt > \"$1/etc/ssl/certs/ca-certificates.crt\"";
        const TRIM: &str = "rm -rf \"$1\"/usr/share/doc \"$1\"/usr/share/man \"$1\"/usr/share/locale \"$1\"/usr/share/info";
        match self {
            Self::Libc => &[CERTIFICATES, TRIM],
            Self::Python => &[
                CERTIFICATES,
                TRIM,
                "cp \"$1/usr/share/base-passwd/passwd.master\" \"$1/etc/passwd\"",
                "cp \"$1/usr/share/base-passwd/group.master\" \"$1/etc/group\"",
            ],
        }
    }

    pub fn add_to(self, inputs: &mut Inputs) -> Result<()> {
        inputs.add("recipe", RECIPE).add("codename", codename()?).add("packages", self.packages());
        for command in self.finish() {
            inputs.add("finish", command);
        }
        Ok(())
    }

    /// The root file system as a tar archive; made first if it isn't in the cache.
    pub fn build(self) -> Result<PathBuf> {
        let mut inputs = Inputs::new();
        self.add_to(&mut inputs)?;
        let log = cache::root()?.join("log").join(format!("rootfs-{}.log", self.name()));
        let entry = cache::entry("rootfs", self.name(), &inputs.digest(), |folder| {
            let _ = fs::remove_file(&log);
            let title = format!("making the root file system {} from Debian packages", self.name());
            phase_with_log(&title, &log, || self.bootstrap(folder, &log))
        })?;
        Ok(entry.join("rootfs.tar"))
    }

    fn bootstrap(self, into: &Path, log: &Path) -> Result<()> {
        let work = tempfile::tempdir()?;
        let mut mmdebstrap = Command::new("mmdebstrap");
        // `extract` unpacks and configures nothing: no package's script runs.
        mmdebstrap.args(["--variant=extract", "--mode=root", &format!("--include={}", self.packages())]);
        for command in self.finish() {
            mmdebstrap.arg(format!("--extract-hook={command}"));
        }
        mmdebstrap.arg(codename()?).arg(into.join("rootfs.tar")).args(sources()?);
        run_logged(mmdebstrap.env("TMPDIR", work.path()).env("SOURCE_DATE_EPOCH", "0"), log)
    }
}

/// The name of this machine's Debian release.
fn codename() -> Result<String> {
    let text = fs::read_to_string("/etc/os-release").context("this machine is no Debian")?;
    let name = text.lines().find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    Ok(name.context("/etc/os-release names no VERSION_CODENAME")?.trim_matches('"').to_owned())
}

/// The files that tell apt where this release's packages are, as they stand on this machine.
fn sources() -> Result<Vec<PathBuf>> {
    let codename = codename()?;
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(folder) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(folder.filter_map(|entry| Some(entry.ok()?.path())));
    }
    files.retain(|file| {
        let known = file.extension().is_some_and(|extension| extension == "list" || extension == "sources");
        let text = fs::read_to_string(file).unwrap_or_default();
        // Another vendor's source is for another suite.
        known && text.lines().filter(|line| !line.starts_with('#')).any(|line| line.split_whitespace().any(|word| word == codename))
    });
    files.sort();
    ensure!(!files.is_empty(), "no apt source of this machine has the release {codename}");
    Ok(files)
}
