//! A shell so small that what commands do can be read off the case or the page that has them.
//!
//! `echo`, `cat`, `grep`, `test -f`, `rm`, `exit`, `date`, with `;`, `&&`, `||`, `>`, quotes and `$NAME`; besides `ln -s`, `mkdir`,
//! `chmod +x`, `ls`, `is` (what is at a path), `hang` (it never ends) and `answer` (a model). Output has no final newline.

use std::collections::BTreeMap;

use replayfork_core::answers::Answer;
use replayfork_core::contract::Action;
use replayfork_core::model::{Output, Status};
use serde_json::Value;

use super::files::{Entry, Files, Reach, followed, set};
use super::product::Physics;

/// Where commands run.
pub struct Toy {
    /// What `date` says.
    pub today: &'static str,
    /// The command that answers model calls.
    pub model: Vec<String>,
}

impl Toy {
    pub fn new(today: &'static str) -> Self {
        Self { today, model: vec!["answer".to_owned()] }
    }

    /// Runs an argument vector; `/bin/sh -c SCRIPT` is a script. One that hangs gives no output.
    pub fn run(&self, argv: &[String], env: &BTreeMap<String, String>, stdin: &str, files: &Files) -> (Status, Option<Output>, Files) {
        let mut shell = Shell { env, stdin, files: files.clone(), today: self.today, said: Vec::new(), stderr: String::new() };
        let code = match argv {
            [sh, c, script] if sh == "/bin/sh" && c == "-c" => shell.script(script),
            argv => shell.command(argv, None),
        };
        let Some(code) = code else { return (Status::Failed, None, shell.files) };
        let status = if code == 0 { Status::Completed } else { Status::Failed };
        let text = shell.said.join("\n");
        (status, Some(Output { stdout: text.clone(), text, stderr: shell.stderr, exit_code: Some(code) }), shell.files)
    }
}

impl Physics for Toy {
    fn perform(&mut self, action: &Action, _: &Reach<'_>, files: &Files) -> (Status, Option<Output>, Files) {
        let said = |text: &str| Some(Output { text: text.to_owned(), stdout: text.to_owned(), ..Output::default() });
        match action {
            Action::Run(command) => self.run(&command.argv, &command.env, &command.stdin, files),
            Action::ReadFile { path } => match files.get(&followed(files, path)) {
                Some(Entry::File { content, .. }) => (Status::Completed, said(content), files.clone()),
                _ => (Status::Failed, said("absent"), files.clone()),
            },
            Action::WriteFile { path, content, executable } => {
                let mut after = files.clone();
                put(&mut after, path, &Entry::File { content: content.clone(), executable: *executable });
                (Status::Completed, said("written"), after)
            }
            Action::AskModel { request } => {
                let (_, output, after) = self.run(&self.model, &BTreeMap::new(), &request.to_string(), files);
                let response = output.and_then(|o| serde_json::from_str::<Value>(&o.text).ok());
                match response.and_then(|r| Answer::parse(&r).ok()) {
                    Some(answer) => (Status::Completed, Some(answer.output()), after),
                    None => (Status::Failed, None, after),
                }
            }
        }
    }
}

/// The model repeats what it was asked.
fn answer(request: &str) -> String {
    let request: Value = serde_json::from_str(request).unwrap_or_default();
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let said = |m: &Value| format!("{}: {}", text(&m["role"]), text(&m["content"]));
    let messages: Vec<_> = request["messages"].as_array().into_iter().flatten().map(said).collect();
    Value::from(format!("{} at {}, {}", text(&request["model"]), request["temperature"], messages.join("; "))).to_string()
}

fn put(files: &mut Files, path: &str, entry: &Entry) {
    for (at, _) in path.match_indices('/') {
        set(files, &path[..at], Some(&Entry::Folder));
    }
    set(files, path, Some(entry));
}

struct Shell<'a> {
    env: &'a BTreeMap<String, String>,
    stdin: &'a str,
    files: Files,
    today: &'a str,
    said: Vec<String>,
    stderr: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Sign(&'static str),
}

impl Shell<'_> {
    /// Its exit code; `None` if it hangs.
    fn script(&mut self, script: &str) -> Option<i32> {
        let mut code = 0;
        for line in script.lines() {
            let tokens = self.tokens(line);
            let mut before = ";";
            for part in tokens.split_inclusive(|t| matches!(t, Token::Sign(";" | "&&" | "||"))) {
                let runs = match before {
                    "&&" => code == 0,
                    "||" => code != 0,
                    _ => true,
                };
                let (words, sign) = match part.split_last() {
                    Some((Token::Sign(sign), words)) if *sign != ">" => (words, *sign),
                    _ => (part, ";"),
                };
                if runs && !words.is_empty() {
                    let to = words.iter().position(|t| *t == Token::Sign(">"));
                    let text = |tokens: &[Token]| {
                        tokens.iter().filter_map(|t| if let Token::Word(w) = t { Some(w.clone()) } else { None }).collect::<Vec<_>>()
                    };
                    let target = to.and_then(|at| text(&words[at..]).pop());
                    let argv = text(&words[..to.unwrap_or(words.len())]);
                    code = self.command(&argv, target)?;
                    if argv.first().is_some_and(|c| c == "exit") {
                        return Some(code);
                    }
                }
                before = sign;
            }
        }
        Some(code)
    }

    fn tokens(&self, line: &str) -> Vec<Token> {
        let (mut tokens, mut word, mut chars) = (Vec::new(), None::<String>, line.chars().peekable());
        while let Some(c) = chars.next() {
            match c {
                '\'' => word.get_or_insert_default().extend(chars.by_ref().take_while(|c| *c != '\'')),
                '"' => {
                    let quoted: String = chars.by_ref().take_while(|c| *c != '"').collect();
                    word.get_or_insert_default().push_str(&self.expanded(&quoted));
                }
                '\\' => word.get_or_insert_default().extend(chars.next()),
                ' ' | ';' | '>' | '&' | '|' => {
                    tokens.extend(word.take().map(Token::Word));
                    match c {
                        '&' | '|' => {
                            chars.next();
                            tokens.push(Token::Sign(if c == '&' { "&&" } else { "||" }));
                        }
                        ';' => tokens.push(Token::Sign(";")),
                        '>' => tokens.push(Token::Sign(">")),
                        _ => {}
                    }
                }
                '$' => {
                    let mut name = String::from("$");
                    while let Some(c) = chars.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
                        name.push(c);
                    }
                    word.get_or_insert_default().push_str(&self.expanded(&name));
                }
                c => word.get_or_insert_default().push(c),
            }
        }
        tokens.extend(word.map(Token::Word));
        tokens
    }

    fn expanded(&self, text: &str) -> String {
        let mut parts = text.split('$');
        let mut out = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let end = part.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(part.len());
            out.push_str(self.env.get(&part[..end]).map_or("", String::as_str));
            out.push_str(&part[end..]);
        }
        out
    }

    /// What is at a path, links followed.
    fn look(&self, path: &str) -> Option<&Entry> {
        self.files.get(&followed(&self.files, path))
    }

    /// The exit code of one command; `None` if it hangs.
    fn command(&mut self, argv: &[String], to: Option<String>) -> Option<i32> {
        let argv: Vec<_> = argv.iter().map(String::as_str).collect();
        let mut code = 0;
        let mut said = Vec::new();
        match &argv[..] {
            ["echo", words @ ..] => said.push(words.join(" ")),
            ["date"] => said.push(self.today.to_owned()),
            ["cat"] => said.push(self.stdin.to_owned()),
            ["cat", paths @ ..] => {
                for path in paths {
                    match self.look(path) {
                        Some(Entry::File { content, .. }) => said.push(content.clone()),
                        _ => {
                            self.stderr.push_str(&format!("cat: {path}: no such file\n"));
                            code = 1;
                        }
                    }
                }
            }
            ["grep", what, path] => {
                let found = self.look(path).into_iter().flat_map(|e| e.content().lines()).filter(|l| l.contains(what));
                said = found.map(str::to_owned).collect();
                code = i32::from(said.is_empty());
            }
            ["test", "-f", path] => code = i32::from(!matches!(self.look(path), Some(Entry::File { .. }))),
            ["is", path] => said.push(match self.files.get(*path) {
                None => "nothing".into(),
                Some(Entry::File { executable: true, .. }) => "a program".into(),
                Some(Entry::File { executable: false, .. }) => "a file".into(),
                Some(other) => other.to_string(),
            }),
            ["ls", folder] => {
                let folder = followed(&self.files, folder);
                let below = self.files.keys().filter_map(|p| p.strip_prefix(&folder)?.strip_prefix('/'));
                said.push(below.collect::<Vec<_>>().join(" "));
            }
            ["ln", "-s", target, path] => put(&mut self.files, path, &Entry::Link((*target).to_owned())),
            ["mkdir", path] => put(&mut self.files, path, &Entry::Folder),
            ["chmod", "+x", path] => match self.files.get_mut(*path) {
                Some(Entry::File { executable, .. }) => *executable = true,
                _ => code = 1,
            },
            ["rm", path] => {
                code = i32::from(!self.files.contains_key(*path));
                set(&mut self.files, path, None);
            }
            ["answer"] => said.push(answer(self.stdin)),
            ["exit", n] => code = n.parse().expect("a number"),
            ["hang"] => return None,
            argv => panic!("the toy shell has no {argv:?}"),
        }
        match to {
            Some(path) => {
                let path = followed(&self.files, &path);
                put(&mut self.files, &path, &Entry::file(said.join("\n")));
            }
            None => self.said.append(&mut said),
        }
        Some(code)
    }
}
