//! The commands of the examples: a shell so small that what it does can be read here.
//!
//! `echo`, `cat`, `grep`, `test -f`, `rm`, `exit`, `date`, with `;`, `&&`, `||`, `>`, quotes and `$NAME`.

use std::collections::BTreeMap;

use super::memory::Files;

/// What a script did.
#[derive(Debug, Default)]
pub struct Ran {
    pub stdout: String,
    pub stderr: String,
    pub exit_code: i32,
}

/// Runs an argument vector; `/bin/sh -c SCRIPT` is a script. `today` is what `date` says.
pub fn run(argv: &[String], env: &BTreeMap<String, String>, stdin: &str, files: &mut Files, today: &str) -> Ran {
    let mut shell = Shell { env, stdin, files, today, ran: Ran::default() };
    match argv {
        [sh, c, script] if sh == "/bin/sh" && c == "-c" => shell.script(script),
        argv => shell.command(argv, None),
    }
    shell.ran
}

struct Shell<'a> {
    env: &'a BTreeMap<String, String>,
    stdin: &'a str,
    files: &'a mut Files,
    today: &'a str,
    ran: Ran,
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Sign(&'static str),
}

impl Shell<'_> {
    fn script(&mut self, script: &str) {
        for line in script.lines() {
            let tokens = self.tokens(line);
            let mut before = ";";
            for part in tokens.split_inclusive(|t| matches!(t, Token::Sign(";" | "&&" | "||"))) {
                let runs = match before {
                    "&&" => self.ran.exit_code == 0,
                    "||" => self.ran.exit_code != 0,
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
                    let leaves = argv.first().is_some_and(|c| c == "exit");
                    self.command(&argv, target);
                    if leaves {
                        return;
                    }
                }
                before = sign;
            }
        }
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

    fn command(&mut self, argv: &[String], to: Option<String>) {
        let argv: Vec<_> = argv.iter().map(String::as_str).collect();
        let mut code = 0;
        let mut said = String::new();
        match &argv[..] {
            ["echo", words @ ..] => said = words.join(" ") + "\n",
            ["date"] => said = format!("{}\n", self.today),
            ["cat"] => said = self.stdin.to_owned(),
            ["cat", paths @ ..] => {
                for path in paths {
                    match self.files.get(*path) {
                        Some(content) => said.push_str(&format!("{content}\n")),
                        None => {
                            self.ran.stderr.push_str(&format!("cat: {path}: no such file\n"));
                            code = 1;
                        }
                    }
                }
            }
            ["grep", what, path] => {
                let found: Vec<_> = self.files.get(*path).iter().flat_map(|c| c.lines()).filter(|l| l.contains(what)).collect();
                said = found.iter().map(|l| format!("{l}\n")).collect();
                code = i32::from(found.is_empty());
            }
            ["test", "-f", path] => code = i32::from(!self.files.contains_key(*path)),
            ["rm", path] => code = i32::from(self.files.remove(*path).is_none()),
            ["exit", n] => code = n.parse().expect("a number"),
            argv => panic!("the examples' shell has no {argv:?}"),
        }
        match to {
            Some(path) => drop(self.files.insert(path, said.trim_end().to_owned())),
            None => self.ran.stdout.push_str(&said),
        }
        self.ran.exit_code = code;
    }
}
