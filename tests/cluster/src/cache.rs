//! What was built once is kept below the user's cache folder, by the digest of all that went into it: any clone finds
//! it, and what changed gets another name. An entry appears whole or not at all.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::{FlockOperation, flock};

/// `$XDG_CACHE_HOME/replayfork`, or `~/.cache/replayfork`.
pub fn root() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let base = match base {
        Some(base) => base,
        None => std::env::home_dir().context("neither XDG_CACHE_HOME nor HOME is set, so there is no cache folder")?.join(".cache"),
    };
    Ok(base.join("replayfork"))
}

/// How many hex digits of a digest a name holds.
const DIGITS: usize = 16;

/// The digest of everything that an entry is made from.
#[derive(Default)]
pub struct Inputs(blake3::Hasher);

impl Inputs {
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value under a name; both are framed, so that no two lists of inputs collide.
    pub fn add(&mut self, name: &str, value: impl AsRef<[u8]>) -> &mut Self {
        let value = value.as_ref();
        self.0.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
        self.0.update(&(value.len() as u64).to_le_bytes()).update(value);
        self
    }

    /// Adds a file's content and mode, or a folder's, recursively and in order.
    pub fn add_path(&mut self, name: &str, path: &Path) -> Result<&mut Self> {
        self.add_tree(name, path, &|_| false)
    }

    fn add_tree(&mut self, name: &str, path: &Path, skip: &dyn Fn(&Path) -> bool) -> Result<&mut Self> {
        let meta = fs::metadata(path).with_context(|| format!("{} is needed and missing", path.display()))?;
        if meta.is_dir() {
            let mut entries: Vec<_> = fs::read_dir(path)?.map(|entry| Ok(entry?.file_name())).collect::<Result<_>>()?;
            entries.sort();
            self.add(name, "folder");
            for entry in entries {
                let path = path.join(&entry);
                if !skip(&path) {
                    self.add_tree(&format!("{name}/{}", entry.to_string_lossy()), &path, skip)?;
                }
            }
        } else {
            let mut content = blake3::Hasher::new();
            content.update_reader(File::open(path)?)?;
            self.add(name, content.finalize().as_bytes());
            self.add("mode", (meta.permissions().mode() & 0o111).to_le_bytes());
        }
        Ok(self)
    }

    /// Like [`Self::add_path`], without what builds leave in a source folder.
    pub fn add_sources(&mut self, name: &str, path: &Path) -> Result<&mut Self> {
        let leftover = |entry: &Path| {
            let name = entry.file_name().unwrap_or_default();
            ["target", "node_modules", "dist", ".git"].iter().any(|skipped| name == *skipped)
        };
        self.add_tree(name, path, &leftover)
    }

    /// As many hex digits as are enough to tell the few versions that one machine meets apart.
    pub fn digest(&self) -> String {
        self.0.finalize().to_hex()[..DIGITS].to_owned()
    }
}

/// Where an entry is, or will be.
pub fn path(kind: &str, name: &str, digest: &str) -> Result<PathBuf> {
    Ok(root()?.join(kind).join(format!("{name}-{digest}")))
}

/// Returns the entry `NAME-DIGEST` in the part `kind` of the cache; makes it first if it isn't there.
///
/// `make` gets an empty folder to fill. Two processes that want the same entry wait for each other.
pub fn entry(kind: &str, name: &str, digest: &str, make: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let folder = root()?.join(kind);
    let wanted = path(kind, name, digest)?;
    if wanted.is_dir() {
        return Ok(wanted);
    }
    let _lock = lock(&folder, name)?;
    if wanted.is_dir() {
        return Ok(wanted);
    }
    let scratch = tempfile::Builder::new().prefix(".making-").tempdir_in(&folder)?;
    make(scratch.path())?;
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755))?;
    fs::rename(scratch.keep(), &wanted)?;
    Ok(wanted)
}

/// Removes all but the `kept` entries of a name that were made last.
///
/// For what changes often. A clone that still wants a removed one makes it again.
pub fn prune(kind: &str, name: &str, kept: usize) -> Result<()> {
    let folder = root()?.join(kind);
    let _lock = lock(&folder, name)?;
    let mut entries = Vec::new();
    for entry in fs::read_dir(&folder)? {
        let entry = entry?;
        let of_name = entry
            .file_name()
            .to_string_lossy()
            .strip_prefix(name)
            .is_some_and(|rest| rest.strip_prefix('-').is_some_and(|digest| digest.len() == DIGITS && !digest.contains('-')));
        if of_name {
            entries.push((entry.metadata()?.modified()?, entry.path()));
        }
    }
    entries.sort();
    for (_, path) in entries.iter().rev().skip(kept) {
        fs::remove_dir_all(path).with_context(|| format!("can't remove {}", path.display()))?;
    }
    Ok(())
}

/// Holds a lock file in the cache; the file stays, the lock goes with the returned value or the process.
fn lock(folder: &Path, name: &str) -> Result<File> {
    fs::create_dir_all(folder).with_context(|| format!("can't make the cache folder {}", folder.display()))?;
    let file = File::create(folder.join(format!(".{name}.lock")))?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_framed_differently_has_another_digest() {
        let mut one = Inputs::new();
        one.add("a", "bc");
        let mut other = Inputs::new();
        other.add("ab", "c");
        assert_ne!(one.digest(), other.digest());
    }

    #[test]
    fn a_files_content_and_executable_bit_count() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let digest = || Inputs::new().add_path("folder", folder.path()).unwrap().digest();
        fs::write(&file, "one").unwrap();
        let first = digest();
        assert_eq!(first, digest());
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        let second = digest();
        assert_ne!(first, second);
        fs::write(&file, "two").unwrap();
        assert_ne!(second, digest());
    }
}
