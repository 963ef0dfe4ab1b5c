//! `docs/semantics.md` says what replays do, and every example in it is carried out here and compared word for word.
//!
//! The page's blocks are told apart by the words behind their fences; one that nothing here carries out is an error. With
//! `REPLAYFORK_UPDATE_DOCS=1` what differs is written into the page, to be read before it is committed.

#[path = "../common/mod.rs"]
mod common;
mod page;
mod recording;
mod replaying;
mod templates;

use std::collections::BTreeMap;
use std::path::PathBuf;

use common::product::Cache;
use page::Block;
use recording::Recorded;
use replayfork_core::fork::ForkSpec;
use replayfork_core::patch::Contents;
use replaying::Forked;
use serde_json::Value;

fn path() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/semantics.md"))
}

/// What the page has said so far.
#[derive(Default)]
struct Reader {
    runs: BTreeMap<String, Recorded>,
    contents: Contents,
    cache: Cache,
    fork: Option<Result<Forked, String>>,
    error: Option<String>,
    /// The block before this one still needs a look at what came of it.
    open: Option<String>,
}

impl Reader {
    /// What a block should say, or `None` where it is given.
    fn read(&mut self, block: &Block) -> Result<Option<String>, String> {
        let shown = matches!((&*block.language, &*block.what), ("text", "plan" | "ran" | "blocked" | "files" | "error"));
        if let Some(open) = self.open.take().filter(|_| !shown) {
            return Err(format!("{open} is followed by nothing that shows what comes of it"));
        }
        let fork = || match &self.fork {
            Some(Ok(fork)) => Ok(fork),
            Some(Err(refused)) => Err(format!("the fork is refused: {refused}")),
            None => Err("there is no fork to show".to_owned()),
        };
        Ok(Some(match (&*block.language, &*block.what) {
            ("yaml", "run") => {
                (self.fork, self.error) = (None, None);
                match recording::record(&block.text) {
                    Ok(run) => drop(self.runs.insert(block.name.clone(), run)),
                    Err(refused) => {
                        self.open = Some(format!("run {} is refused ({refused}) and", block.name));
                        self.error = Some(refused);
                    }
                }
                return Ok(None);
            }
            ("yaml", "fork") => {
                let forked = self.carry_out(block)?;
                self.error = forked.as_ref().err().cloned();
                self.open = Some(format!("fork {}", block.name));
                self.fork = Some(forked);
                return Ok(None);
            }
            ("text", "upload") => {
                self.contents.insert(block.text.as_bytes());
                return Ok(None);
            }
            ("text", "template") => {
                self.error = Some(templates::error_of(&block.text));
                self.open = Some("a template".into());
                return Ok(None);
            }
            ("text", "bindings") => templates::rendered(&block.text)?,
            ("text", "plan") => fork()?.plan.clone(),
            ("text", "ran") => fork()?.ran.clone(),
            ("text", "blocked") => fork()?.blocked.clone(),
            ("text", "files") => fork()?.files.clone(),
            ("text", "error") => self.error.clone().ok_or("nothing was refused")?,
            (language, what) => return Err(format!("nothing carries out a block of {language:?} {what:?}")),
        }))
    }

    fn carry_out(&mut self, block: &Block) -> Result<Result<Forked, String>, String> {
        let given: Value = serde_yaml_ng::from_str(&block.text).map_err(|e| e.to_string())?;
        let spec: ForkSpec = serde_json::from_value(given.clone()).map_err(|e| e.to_string())?;
        if let Some(unread) = unread(&given, &serde_json::to_value(&spec).map_err(|e| e.to_string())?, "") {
            return Err(format!("{unread} is no field of a ReplayFork"));
        }
        let run = self.runs.get(&spec.source.run).ok_or_else(|| format!("no run {:?}", spec.source.run))?;
        let forked = replaying::fork(run, &self.contents, &spec, &mut self.cache);
        Ok(forked.map(|(forked, run)| {
            self.runs.insert(block.name.clone(), run);
            forked
        }))
    }
}

/// A member that was given and not taken.
fn unread(given: &Value, taken: &Value, at: &str) -> Option<String> {
    match (given, taken) {
        (Value::Object(given), Value::Object(taken)) => {
            given.iter().find_map(|(k, v)| taken.get(k).map_or(Some(format!("{at}.{k}")), |t| unread(v, t, &format!("{at}.{k}"))))
        }
        (Value::Array(given), Value::Array(taken)) => given.iter().zip(taken).find_map(|(g, t)| unread(g, t, at)),
        _ => None,
    }
}

/// Every block that does not say what happens, with what it should say; or why it can't be carried out.
fn differences(page: &str) -> Vec<(Block, Result<String, String>)> {
    let mut reader = Reader::default();
    let mut found = Vec::new();
    for block in page::blocks(page) {
        match reader.read(&block) {
            Ok(Some(text)) if text != block.text => found.push((block, Ok(text))),
            Ok(_) => {}
            Err(why) => found.push((block, Err(why))),
        }
    }
    if let (Some(open), Some(last)) = (reader.open, page::blocks(page).pop()) {
        found.push((last, Err(format!("{open} is followed by nothing that shows what comes of it"))));
    }
    found
}

fn report(found: &[(Block, Result<String, String>)]) -> String {
    let one = |(block, now): &(Block, Result<String, String>)| {
        let place = format!("docs/semantics.md:{}: ", block.line);
        match now {
            Err(why) => place + why,
            Ok(now) => {
                let diff = similar::TextDiff::from_lines(&block.text, now);
                format!("{place}this is not what happens\n{}", diff.unified_diff().header("the page", "what happens"))
            }
        }
    };
    found.iter().map(one).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_page_says_what_happens() {
    let mut page = std::fs::read_to_string(path()).unwrap();
    let mut found = differences(&page);
    if std::env::var_os("REPLAYFORK_UPDATE_DOCS").is_some() {
        for (block, now) in found.iter().rev() {
            if let Ok(now) = now {
                page = page::with_text(&page, block, now);
            }
        }
        std::fs::write(path(), &page).unwrap();
        found = differences(&page);
    }
    assert!(found.is_empty(), "{}", report(&found));
}

#[test]
fn whatever_drifts_is_found() {
    let page = std::fs::read_to_string(path()).unwrap();
    let (mut tried, mut yaml) = (0, 0);
    for block in page::blocks(&page) {
        if block.language == "text" && !matches!(&*block.what, "upload" | "template") {
            let drifted = page::with_text(&page, &block, &format!("{} ", block.text));
            let found = differences(&drifted);
            assert!(found.iter().any(|(b, _)| b.line == block.line), "line {}: an added blank is not noticed", block.line);
            tried += 1;
        }
        yaml += usize::from(block.language == "yaml");
    }
    assert!(tried > 30 && yaml > 30, "{tried} results of {yaml} examples: the page is not read");
    for (instead, says) in [
        ("```sh\nkubectl\n```\n", "nothing carries out"),
        ("```\nplain\n```\n", "nothing carries out"),
        ("```yaml run=r\nsteps: [{name: a, gives: 1}]\n```\n", "unknown field"),
        ("```text plan\nnothing\n```\n", "there is no fork to show"),
    ] {
        let report = report(&differences(instead));
        assert!(report.contains(says), "{instead} gives {report}");
    }
}

#[test]
fn a_fork_that_is_not_looked_at_is_an_error_and_so_is_a_field_that_nobody_reads() {
    let run = "```yaml run=r\nsteps: [{name: a, script: echo 1}]\n```\n";
    let fork = |more: &str| format!("{run}```yaml fork=f\nsource: {{run: r, span: a}}\n{more}\n```\n");
    assert!(report(&differences(&fork(""))).contains("fork f is followed by nothing"));
    assert!(report(&differences(&fork("patch: []"))).contains(".patch is no field"));
}

#[test]
fn there_is_a_manifest_for_each_type_of_patch() {
    let mut types = std::collections::BTreeSet::new();
    for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/forks")).unwrap() {
        let file = file.unwrap().path();
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.lines().take(2).all(|line| line.starts_with("# ")), "{} says in its first lines what it shows", file.display());
        let manifest: Value = serde_yaml_ng::from_str(&text).unwrap();
        let spec: ForkSpec = serde_json::from_value(manifest["spec"].clone()).unwrap();
        spec.check().unwrap();
        assert_eq!(unread(&manifest["spec"], &serde_json::to_value(&spec).unwrap(), ""), None, "{}", file.display());
        assert_eq!(manifest["metadata"]["name"].as_str(), file.file_stem().and_then(|s| s.to_str()));
        types.extend(spec.patches.iter().map(|p| format!("{:?}", p.r#type)));
    }
    assert_eq!(types.len(), 8, "{types:?}");
}
