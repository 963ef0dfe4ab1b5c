//! Footprints: the paths of the workspace that a step may read and write.

use serde::{Deserialize, Serialize};

use crate::model::{Executor, Opening, ReplayPolicy};

/// A set of paths relative to the workspace root: one path, a folder with all below it, or everything.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Pattern {
    /// Exactly this path.
    Path(String),
    /// This folder and all below it; the empty string is the whole workspace.
    Below(String),
}

impl Pattern {
    /// The whole workspace.
    pub fn all() -> Self {
        Pattern::Below(String::new())
    }

    /// Whether every path of `other` is in `self`.
    pub fn covers(&self, other: &Pattern) -> bool {
        match (self, other) {
            (Pattern::Path(a), Pattern::Path(b)) => a == b,
            (Pattern::Path(_), Pattern::Below(_)) => false,
            (Pattern::Below(dir), Pattern::Path(p) | Pattern::Below(p)) => is_at_or_below(p, dir),
        }
    }

    /// Whether what happens to a path of `other` can be seen through `self`. A path's fate includes that of the
    /// folders it lies in: writing `a/b` may make or remove `a`.
    pub fn overlaps(&self, other: &Pattern) -> bool {
        let (a, b) = (self.path(), other.path());
        is_at_or_below(a, b) || is_at_or_below(b, a)
    }

    /// The form in which it is declared.
    pub fn declared(&self) -> String {
        match self {
            Pattern::Path(path) => path.clone(),
            Pattern::Below(path) if path.is_empty() => "./".to_owned(),
            Pattern::Below(path) => format!("{path}/"),
        }
    }

    pub fn path(&self) -> &str {
        match self {
            Pattern::Path(p) | Pattern::Below(p) => p,
        }
    }
}

impl std::fmt::Display for Pattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Pattern::Path(p) => f.write_str(p),
            Pattern::Below(p) if p.is_empty() => f.write_str("the workspace"),
            Pattern::Below(p) => write!(f, "{p}/"),
        }
    }
}

fn is_at_or_below(path: &str, dir: &str) -> bool {
    dir.is_empty() || path == dir || path.strip_prefix(dir).is_some_and(|rest| rest.starts_with('/'))
}

/// A path that can't be one of the workspace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path:?} is not a path of the workspace: {why}")]
pub struct PathError {
    pub path: String,
    pub why: &'static str,
}

/// Brings a path into the form in which paths are compared: relative to `root`, without `.`, `//` or a final `/`.
///
/// # Errors
/// A path outside of the root, and any with `..`.
pub fn relative(path: &str, root: Option<&str>) -> Result<String, PathError> {
    let error = |why| PathError { path: path.to_owned(), why };
    let below = if path.starts_with('/') {
        let root = root.ok_or_else(|| error("it is absolute, and the run has no recorded workspace root"))?;
        let root = root.trim_end_matches('/');
        match path.strip_prefix(root) {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => rest,
            _ => return Err(error("it is outside of the workspace root")),
        }
    } else {
        path
    };
    let mut parts = Vec::new();
    for part in below.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err(error("it contains `..`")),
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

/// A declared path; `dir/` is all below.
///
/// # Errors
/// As [`relative`].
pub fn pattern(text: &str, root: Option<&str>) -> Result<Pattern, PathError> {
    let path = relative(text, root)?;
    Ok(if text.ends_with('/') || path.is_empty() { Pattern::Below(path) } else { Pattern::Path(path) })
}

/// What a step may read and write of the workspace.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Footprint {
    /// What its result can depend on: reads and writes together.
    pub sees: Vec<Pattern>,
    pub writes: Vec<Pattern>,
}

impl Footprint {
    /// Whether it touches the workspace at all.
    pub fn is_none(&self) -> bool {
        self.sees.is_empty() && self.writes.is_empty()
    }

    /// Whether neither of two steps that ran at the same time could see or undo what the other one wrote.
    pub fn excludes(&self, other: &Footprint) -> bool {
        let apart = |a: &Footprint, b: &Footprint| !a.sees.iter().chain(&a.writes).any(|p| b.writes.iter().any(|w| p.overlaps(w)));
        apart(self, other) && apart(other, self)
    }

    /// Whether a change of `path` is one that these writes declare; folders that a declared path lies in may come and go.
    pub fn declares(writes: &[Pattern], path: &str) -> bool {
        let change = Pattern::Path(path.to_owned());
        writes.iter().any(|w| w.covers(&change) || w.path().strip_prefix(path).is_some_and(|rest| rest.starts_with('/')))
    }

    /// Both together.
    #[must_use]
    pub fn with(mut self, other: Footprint) -> Self {
        for (into, from) in [(&mut self.sees, other.sees), (&mut self.writes, other.writes)] {
            into.extend(from);
            into.sort();
            into.dedup();
        }
        self
    }

    fn none() -> Self {
        Self::default()
    }

    /// Everything, read and written.
    pub fn whole() -> Self {
        Self { sees: vec![Pattern::all()], writes: vec![Pattern::all()] }
    }

    /// The footprint of a span: by its executor, by its kind, as declared, or the whole workspace.
    ///
    /// # Errors
    /// A declared path or an executor's path that is none of the workspace.
    pub fn of(opening: &Opening, executor: Option<&Executor>, root: Option<&str>) -> Result<Self, PathError> {
        match executor {
            Some(Executor::FileRead { path }) => {
                return Ok(Self { sees: vec![Pattern::Path(relative(path, root)?)], writes: vec![] });
            }
            // It sets its path to its content whatever was there, so it depends on nothing of the workspace.
            Some(Executor::FileWrite { path, .. }) => {
                return Ok(Self { sees: vec![], writes: vec![Pattern::Path(relative(path, root)?)] });
            }
            _ => {}
        }
        if !opening.sees_workspace() || opening.replay_policy == Some(ReplayPolicy::Pure) {
            return Ok(Self::none());
        }
        let (Some(reads), Some(writes)) = (&opening.reads, &opening.writes) else {
            return Ok(Self::whole());
        };
        let parse = |paths: &Vec<String>| paths.iter().map(|p| pattern(p, root)).collect::<Result<Vec<_>, _>>();
        let (reads, writes) = (parse(reads)?, parse(writes)?);
        let mut sees = reads;
        sees.extend(writes.iter().cloned());
        sees.sort();
        sees.dedup();
        Ok(Self { sees, writes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_brought_below_the_root_or_refused_by_name() {
        assert_eq!(relative("/ws/a//b/./c/", Some("/ws")).unwrap(), "a/b/c");
        assert_eq!(relative("a/b", None).unwrap(), "a/b");
        for (path, root) in [("/etc/passwd", Some("/ws")), ("/wsx/a", Some("/ws")), ("a/../b", None), ("/a", None)] {
            let error = relative(path, root).unwrap_err();
            assert_eq!(error.path, path);
        }
    }

    #[test]
    fn a_folder_overlaps_what_is_below_and_what_it_lies_in() {
        let below = Pattern::Below("a/b".into());
        assert!(below.overlaps(&Pattern::Path("a/b/c".into())));
        assert!(below.overlaps(&Pattern::Path("a".into())));
        assert!(!below.overlaps(&Pattern::Path("a/bc".into())));
        assert!(Pattern::all().covers(&below));
        assert!(!Pattern::Path("a".into()).covers(&Pattern::Path("a/b".into())));
    }
}
