//! The volumes that steps fill. One that outgrows its limit ends in an eviction, late and with a second of grace; so the courier
//! looks first, and stops the step while its result can still be kept.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::sync::watch;

use crate::steps::Stop;

/// How often the volumes are measured; kubelet does so every ten seconds.
const EVERY: Duration = Duration::from_secs(1);
/// What a pod that is told to end has for one more look.
const LAST_LOOK: Duration = Duration::from_millis(800);
/// Parts of a limit in a hundred at which a step is stopped: the rest is room for what it writes between two looks.
const MARGIN: u64 = 90;

/// A limit as the spec has it: `2Gi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    number: u64,
    unit: &'static str,
    factor: u64,
}

/// The suffixes that the spec's schema takes, with their bytes.
const UNITS: [(&str, u64); 9] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("", 1),
];

impl std::str::FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = UNITS.iter().find_map(|(unit, factor)| Some((text.strip_suffix(unit)?.parse().ok()?, *unit, *factor)));
        let (number, unit, factor) = read.ok_or_else(|| format!("{text:?} is no size like 2Gi"))?;
        Ok(Self { number, unit, factor })
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.number, self.unit)
    }
}

impl Limit {
    /// Bytes from which on a volume counts as full.
    fn full(self) -> u64 {
        let bytes = u128::from(self.number) * u128::from(self.factor) * u128::from(MARGIN) / 100;
        u64::try_from(bytes).unwrap_or(u64::MAX)
    }
}

/// A volume that is as good as full, by its name in the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    volume: &'static str,
    limit: Limit,
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { volume, limit } = self;
        write!(f, "the volume {volume:?} has more than {MARGIN} % of its limit of {limit}; raise spec.sandbox.scratchSize")
    }
}

/// What a step can fill: the workspace and `/tmp` itself, and through its changes the folder where the courier keeps their contents.
#[derive(Clone, Debug)]
pub struct Volumes {
    folders: [(&'static str, PathBuf); 3],
    limit: Limit,
}

impl Volumes {
    /// `limit` is that of each.
    pub fn new(workspace: &Path, tmp: &Path, scratch: &Path, limit: Limit) -> Self {
        Self { folders: [("workspace", workspace.to_owned()), ("tmp", tmp.to_owned()), ("scratch", scratch.to_owned())], limit }
    }

    /// The first that is full, as of now.
    async fn full(&self) -> Option<Full> {
        let Self { folders, limit } = self.clone();
        let look = move || folders.iter().find(|(_, folder)| disk_usage(folder) > limit.full()).map(|(volume, _)| Full { volume, limit });
        tokio::task::spawn_blocking(look).await.unwrap_or(None)
    }

    /// The same within the time that a pod may have when it is evicted.
    pub async fn full_at_the_end(&self) -> Option<Full> {
        tokio::time::timeout(LAST_LOOK, self.full()).await.unwrap_or(None)
    }

    /// Measures the volumes until one is full.
    pub async fn watch(self, stop: watch::Sender<Option<Stop>>) {
        loop {
            tokio::time::sleep(EVERY).await;
            if let Some(full) = self.full().await {
                return Stop::Full(full).tell(&stop);
            }
        }
    }
}

/// Bytes on disk of all below a folder; what vanishes meanwhile counts as nothing.
fn disk_usage(root: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let mut folders = vec![root.to_owned()];
    let mut bytes = 0;
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        for entry in entries.flatten() {
            match entry.metadata() {
                Ok(meta) if meta.is_dir() => folders.push(entry.path()),
                Ok(meta) => bytes += meta.blocks() * 512,
                Err(_) => {}
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_spec_writes_them() {
        for (text, full) in [("100", 90), ("10k", 9000), ("64Mi", (64 << 20) / 10 * 9 + 3), ("2Gi", 1_932_735_283)] {
            let limit: Limit = text.parse().unwrap();
            assert_eq!((limit.to_string().as_str(), limit.full()), (text, full));
        }
        assert!("1.5Gi".parse::<Limit>().is_err() && "Gi".parse::<Limit>().is_err());
        assert_eq!("99999999999999Ti".parse::<Limit>().unwrap().full(), u64::MAX);
    }

    #[tokio::test]
    async fn a_full_volume_is_named_with_its_limit_and_the_field_that_raises_it() {
        let folder = std::env::temp_dir().join(format!("replayfork-volumes-{}", std::process::id()));
        let of = |name: &str| folder.join(name);
        for name in ["workspace", "tmp/deep/er", "scratch"] {
            std::fs::create_dir_all(of(name)).unwrap();
        }
        let volumes = Volumes::new(&of("workspace"), &of("tmp"), &of("scratch"), "1Mi".parse().unwrap());
        assert_eq!(volumes.full_at_the_end().await, None);
        std::fs::write(of("tmp/deep/er/file"), vec![1; 1_000_000]).unwrap();
        let full = volumes.full_at_the_end().await.unwrap().to_string();
        for word in ["\"tmp\"", "1Mi", "spec.sandbox.scratchSize"] {
            assert!(full.contains(word), "{full}");
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
