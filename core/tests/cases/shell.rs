//! A shell of a few words, so that what a case's commands do can be read off the case.

use std::collections::BTreeMap;

use replayfork_core::contract::Action;
use replayfork_core::model::{Output, Status};
use serde_json::Value;

use crate::common::files::{Entry, Files, Reach, set};
use crate::common::product::Physics;

/// Runs commands such as `put PATH TEXT; cat PATH`; `$NAME` is the variable. A model answers with what it was asked.
pub struct TinyShell;

impl Physics for TinyShell {
    fn perform(&mut self, action: &Action, _: &Reach<'_>, files: &Files) -> (Status, Option<Output>, Files) {
        let text = |text: &str| Some(Output { text: text.to_owned(), stdout: text.to_owned(), ..Output::default() });
        let mut after = files.clone();
        match action {
            Action::Run(command) => {
                let script = match command.argv.as_slice() {
                    [sh, c, script] if sh == "/bin/sh" && c == "-c" => script.clone(),
                    argv => argv.join(" "),
                };
                Self::script(&script, &command.env, &command.stdin, files)
            }
            Action::ReadFile { path } => match look(files, path) {
                Some(Entry::File { content, .. }) => (Status::Completed, text(content), after),
                _ => (Status::Failed, text("absent"), after),
            },
            Action::WriteFile { path, content, executable } => {
                put(&mut after, path, &Entry::File { content: content.clone(), executable: *executable });
                (Status::Completed, text(""), after)
            }
            Action::AskModel { request } => {
                let asked = request.pointer("/messages/0/content").and_then(Value::as_str).unwrap_or_default();
                (Status::Completed, text(&format!("{} at {}", asked, request["temperature"])), after)
            }
        }
    }
}

/// What is at a path, links followed.
fn look<'a>(files: &'a Files, path: &str) -> Option<&'a Entry> {
    match files.get(path) {
        Some(Entry::Link(target)) => look(files, target),
        found => found,
    }
}

fn put(files: &mut Files, path: &str, entry: &Entry) {
    for (at, _) in path.match_indices('/') {
        set(files, &path[..at], Some(&Entry::Folder));
    }
    set(files, path, Some(entry));
}

impl TinyShell {
    /// Runs a script. One that hangs gives no output.
    pub fn script(script: &str, env: &BTreeMap<String, String>, stdin: &str, files: &Files) -> (Status, Option<Output>, Files) {
        let mut after = files.clone();
        let (mut said, mut exit_code) = (Vec::new(), 0);
        for line in script.split(';') {
            let word = |word: &str| match word.strip_prefix('$') {
                Some(name) => env.get(name).cloned().unwrap_or_default(),
                None => word.to_owned(),
            };
            let words: Vec<String> = line.split_whitespace().map(word).collect();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            match words.as_slice() {
                [] => {}
                ["put", path, text @ ..] => put(&mut after, path, &Entry::file(text.join(" "))),
                ["link", path, target] => put(&mut after, path, &Entry::Link((*target).to_owned())),
                ["mkdir", path] => put(&mut after, path, &Entry::Folder),
                ["chmod", path] => {
                    if let Some(Entry::File { executable, .. }) = after.get_mut(*path) {
                        *executable = true;
                    }
                }
                ["rm", path] => set(&mut after, path, None),
                ["cat", path] => match look(&after, path) {
                    Some(Entry::File { content, .. }) => said.push(content.clone()),
                    _ => (said, exit_code) = (vec![format!("no {path}")], 1),
                },
                ["is", path] => said.push(match after.get(*path) {
                    None => "nothing".into(),
                    Some(Entry::Folder) => "a folder".into(),
                    Some(Entry::Link(target)) => format!("-> {target}"),
                    Some(Entry::File { executable: true, .. }) => "a program".into(),
                    Some(Entry::File { executable: false, .. }) => "a file".into(),
                }),
                ["ls", dir] => {
                    let below = after.keys().filter_map(|p| p.strip_prefix(dir)?.strip_prefix('/'));
                    said.push(below.collect::<Vec<_>>().join(" "));
                }
                ["echo", text @ ..] => said.push(text.join(" ")),
                ["stdin"] => said.push(stdin.to_owned()),
                ["exit", code] => exit_code = code.parse().expect("a number"),
                ["hang"] => return (Status::Failed, None, after),
                other => panic!("no command {other:?}"),
            }
        }
        let text = said.join("\n");
        let status = if exit_code == 0 { Status::Completed } else { Status::Failed };
        (status, Some(Output { stdout: text.clone(), text, stderr: String::new(), exit_code: Some(exit_code) }), after)
    }
}
