//! The suites tested by themselves: each rule of the replay semantics is replaced by the shorter one that comes to mind first, and
//! the suite must fail. `make test-mutations` runs it; `REPLAYFORK_MUTATIONS=WORD,…` only those whose names hold one of the words.

mod list;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use list::{Mutation, Suite, mutations};

/// Random forks per mutation, unless `REPLAYFORK_PROPERTY_CASES` says otherwise.
const CASES: &str = "800";

fn core() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder that this test was built in: the crates that core needs are there already.
fn target() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("it is a folder in the target folder")
}

/// The source with the mutation in it, or why that can't be.
fn mutated(mutation: &Mutation) -> Result<String, String> {
    let path = core().join("src").join(mutation.file);
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {}: {e}", mutation.name, path.display()))?;
    match text.matches(mutation.find).count() {
        1 => Ok(text.replace(mutation.find, mutation.replace)),
        found => {
            Err(format!("{}: its text is {found} times in {}, not once; anchor it anew:\n{}", mutation.name, mutation.file, mutation.find))
        }
    }
}

#[test]
fn every_mutation_has_its_place_and_a_name_of_its_own() {
    let wrong: Vec<_> = mutations().filter_map(|m| mutated(m).err()).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let names: std::collections::BTreeSet<_> = mutations().map(|m| m.name).collect();
    assert_eq!(names.len(), mutations().count());
}

/// The core crate as a workspace of its own.
struct Copy {
    folder: PathBuf,
}

impl Copy {
    fn new() -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("mutations");
        let copy = Self { folder };
        let old = copy.folder.join("core");
        if old.exists() {
            std::fs::remove_dir_all(&old).expect("the last copy can be removed");
        }
        for part in ["Cargo.toml", "src", "tests/common", "tests/cases", "tests/replay_properties"] {
            copy_all(&core().join(part), &old.join(part));
        }
        let root = core().parent().expect("the crate is in the workspace");
        let manifest = std::fs::read_to_string(root.join("Cargo.toml")).expect("the workspace has a manifest");
        std::fs::write(copy.folder.join("Cargo.toml"), alone(&manifest)).expect("the copy can be written");
        std::fs::copy(root.join("Cargo.lock"), copy.folder.join("Cargo.lock")).expect("the workspace has a lock file");
        copy
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.folder.join("core/src").join(file), text).expect("the copy can be written");
    }

    /// Whether a suite passes.
    fn passes(&self, suite: Suite) -> Result<bool, String> {
        let cargo = |args: &[&str]| {
            let mut command = Command::new(env!("CARGO"));
            command.args(["test", "--quiet", "--offline", "--test", suite.target()]).args(args).current_dir(&self.folder);
            command.env("CARGO_TARGET_DIR", target());
            command.env("REPLAYFORK_PROPERTY_CASES", std::env::var("REPLAYFORK_PROPERTY_CASES").unwrap_or_else(|_| CASES.into()));
            // That it fails is all that is asked.
            command.env("PROPTEST_MAX_SHRINK_ITERS", "0").env("RUST_BACKTRACE", "0").output().expect("cargo runs")
        };
        let built = cargo(&["--no-run"]);
        if !built.status.success() {
            return Err(String::from_utf8_lossy(&built.stderr).into_owned());
        }
        Ok(cargo(&[]).status.success())
    }
}

/// The workspace's manifest with this crate as its only member, compiled fast.
fn alone(manifest: &str) -> String {
    let (before, rest) = manifest.split_once("members = [").expect("the workspace has members");
    let (_, after) = rest.split_once(']').expect("the list ends");
    format!("{before}members = [\"core\"]{after}\n[profile.dev.package.replayfork-core]\nopt-level = 0\ndebug = 0\n")
}

fn copy_all(from: &Path, to: &Path) {
    if !from.is_dir() {
        std::fs::create_dir_all(to.parent().expect("a file is in a folder")).expect("the copy can be written");
        std::fs::copy(from, to).expect("the copy can be written");
        return;
    }
    for entry in std::fs::read_dir(from).expect("the folder can be read") {
        let entry = entry.expect("the folder can be read");
        copy_all(&entry.path(), &to.join(entry.file_name()));
    }
}

/// What came of one mutation: the suite that noticed it, or why it could not be tried.
fn tried(copy: &Copy, mutation: &Mutation) -> Result<Option<Suite>, String> {
    let original = std::fs::read_to_string(core().join("src").join(mutation.file)).map_err(|e| e.to_string())?;
    copy.write(mutation.file, &mutated(mutation)?);
    let suites = if mutation.first == Suite::Cases { [Suite::Cases, Suite::Properties] } else { [Suite::Properties, Suite::Cases] };
    let mut noticed = Ok(None);
    for suite in suites {
        match copy.passes(suite) {
            Ok(true) => continue,
            Ok(false) => noticed = Ok(Some(suite)),
            Err(error) => noticed = Err(format!("{} does not compile:\n{error}", mutation.name)),
        }
        break;
    }
    copy.write(mutation.file, &original);
    noticed
}

#[test]
#[ignore = "minutes; `make test-mutations` runs it"]
fn every_rule_made_shorter_is_noticed() {
    let copy = Copy::new();
    for suite in [Suite::Cases, Suite::Properties] {
        assert_eq!(copy.passes(suite), Ok(true), "without a mutation {suite:?} passes");
    }
    let wanted = std::env::var("REPLAYFORK_MUTATIONS").unwrap_or_default();
    let is_wanted = |m: &&Mutation| wanted.split(',').any(|word| m.name.contains(word.trim()));
    let mut failures = Vec::new();
    for mutation in mutations().filter(is_wanted) {
        let begun = Instant::now();
        let (says, failure) = match tried(&copy, mutation) {
            Ok(Some(suite)) => (format!("noticed by {}", suite.target()), None),
            Ok(None) => ("SURVIVED".into(), Some(format!("{} survived; the rule: {}", mutation.name, mutation.rule))),
            Err(error) => ("NOT TRIED".into(), Some(error)),
        };
        eprintln!("{:>5.1} s  {:<44} {says}", begun.elapsed().as_secs_f64(), mutation.name);
        failures.extend(failure);
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}
