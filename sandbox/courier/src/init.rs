//! What the init container does.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use anyhow::Context;

#[derive(clap::Args)]
pub struct Init {
    /// The executor in this image.
    #[arg(long, default_value = "/usr/bin/replayfork-executor")]
    executor: PathBuf,
    /// Where the executor goes, in a volume that the user's image sees.
    #[arg(long)]
    to: PathBuf,
    /// A folder to make in the workspace volume, so that it belongs to the pod's uid.
    #[arg(long)]
    workspace: PathBuf,
}

/// # Errors
/// A volume that can't be written, with its path.
pub fn init(init: &Init) -> anyhow::Result<()> {
    fs::copy(&init.executor, &init.to).with_context(|| format!("can't put the executor at {}", init.to.display()))?;
    fs::set_permissions(&init.to, fs::Permissions::from_mode(0o555))?;
    fs::create_dir_all(&init.workspace).with_context(|| format!("can't make {}", init.workspace.display()))?;
    Ok(())
}
