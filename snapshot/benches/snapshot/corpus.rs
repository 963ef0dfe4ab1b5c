//! What is captured: the sources of the dependencies that rustic-rs 0.11.4 locks, for x86-64 Linux, as cargo unpacks them.

use std::error::Error;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::disk::run;

const NAME: &str = "rustic-rs";
const VERSION: &str = "0.11.4";

/// Fetches the sources with cargo, once; they stay in `folder`.
///
/// # Errors
/// What cargo says.
pub fn fetch(folder: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let done = folder.join("fetched");
    if !done.exists() {
        std::fs::create_dir_all(folder.join("fetch/src"))?;
        let manifest = format!(
            "[package]\nname = \"fetch\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[dependencies]\n{NAME} = \"={VERSION}\"\n[workspace]\n"
        );
        std::fs::write(folder.join("fetch/Cargo.toml"), manifest)?;
        std::fs::write(folder.join("fetch/src/lib.rs"), "")?;
        let target = ["--target", "x86_64-unknown-linux-gnu"];
        let cargo = |home: &str| {
            let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
            cargo.arg("fetch").args(target).env("CARGO_HOME", folder.join(home));
            cargo
        };
        run(cargo("first").current_dir(folder.join("fetch")))?;
        let package = sources(&folder.join("first"))?.join(format!("{NAME}-{VERSION}"));
        // Whatever workspace the folder lies in, the package is none of its members.
        writeln!(std::fs::File::options().append(true).open(package.join("Cargo.toml"))?, "\n[workspace]")?;
        run(cargo("home").arg("--locked").current_dir(package))?;
        std::fs::write(done, "")?;
    }
    sources(&folder.join("home"))
}

/// The one registry's sources in a cargo home.
fn sources(home: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let registry = std::fs::read_dir(home.join("registry/src"))?.next().ok_or("cargo has fetched nothing")??;
    Ok(registry.path())
}
