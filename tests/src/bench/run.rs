//! A run as agents leave it, the same one each time, and what of it depends on what.
//!
//! Tasks of [`TASK`] steps, each in a container: a model is asked with what the steps before gave, a file is written with its
//! answer, tests read the file and shared ones and write a report, the report is read, a linter looks at the task's folder. Every
//! fifth step of its kind depends on a step by name. Of the shared files one is read by every second task, [`SHARED`] others by one
//! task in [`SHARED`] each; they are written anew by a task in the middle of the run.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

/// Steps of a task, its container included.
pub const TASK: usize = 50;
/// Shared files that one task in as many reads.
pub const SHARED: usize = 20;
/// Nanoseconds from a step's start to its end, and to the next one's start.
const STEP: i64 = 1_000_000;
const BEGIN: i64 = 1_800_000_000_000_000_000;

/// One step, as rows are made of it.
pub struct Step {
    pub id: String,
    pub name: String,
    pub kind: i16,
    pub parent: Option<String>,
    pub started: i64,
    pub ended: i64,
    pub sees_workspace: bool,
    pub opening: Value,
    pub closing: Value,
    /// Places of the steps whose outputs or files it uses.
    pub needs: Vec<u32>,
}

/// Makes a run step by step.
pub struct Generator {
    seed: u64,
    /// What outputs are made from.
    said: u64,
    /// Another attempt at the same: every 50th step gives another output, every 700th is left out.
    again: bool,
    steps: usize,
    at: usize,
    /// By path, the step that wrote it last.
    writers: HashMap<String, u32>,
}

fn mixed(mut n: u64) -> u64 {
    n ^= n >> 30;
    n = n.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n ^= n >> 27;
    n = n.wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ n >> 31
}

impl Generator {
    pub fn new(seed: u64, steps: usize) -> Self {
        Self { seed, said: seed, again: false, steps, at: 0, writers: HashMap::new() }
    }

    /// A run that did nearly the same as that of `of`, in other words of its own ids.
    pub fn again(of: u64, seed: u64, steps: usize) -> Self {
        Self { said: of, again: true, ..Self::new(seed, steps) }
    }

    /// As OTLP writes it, 16 hex digits.
    pub fn id(&self, at: usize) -> String {
        format!("{:016x}", mixed((self.seed << 40) | (at as u64 + 1)))
    }

    /// The step that began then.
    pub fn place(&self, started: i64) -> usize {
        ((started - BEGIN) / (2 * STEP)) as usize
    }

    fn middle(&self) -> usize {
        self.steps / TASK / 2
    }

    /// The step that writes the shared file which every second task reads.
    pub fn wide(&self) -> usize {
        self.middle() * TASK + 3
    }

    /// The step that writes a shared file which one task in [`SHARED`] reads.
    pub fn narrow(&self) -> usize {
        (self.middle() + 1) * TASK + 3
    }

    fn shared(&self, task: usize) -> String {
        format!("lib/part{}.py", task % SHARED)
    }

    /// What the step at [`Generator::wide`] or [`Generator::narrow`] writes.
    pub fn written(&self, at: usize) -> String {
        if at == self.wide() { "lib/common.py".to_owned() } else { self.shared(at / TASK) }
    }

    fn output(&self, at: usize) -> String {
        let mut text = String::new();
        for line in 0..3 + mixed(at as u64) % 4 {
            let _ = writeln!(text, "{:016x} passed in {} ms", mixed(self.said ^ (at as u64) << 8 ^ line), mixed(line ^ at as u64) % 900);
        }
        text
    }

    fn wrote(&self, path: &str) -> Option<u32> {
        self.writers.get(path).copied()
    }
}

impl Iterator for Generator {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        if self.again && self.at % 700 == 351 {
            self.at += 1;
        }
        if self.at >= self.steps {
            return None;
        }
        let (at, task, place) = (self.at, self.at / TASK, self.at % TASK);
        self.at += 1;
        let started = BEGIN + at as i64 * 2 * STEP;
        let text = self.output(at);
        let closing = |output: Value| json!({"ended": started + STEP, "status": "Completed", "verdict": "allow", "output": output});
        let mut step = Step {
            id: self.id(at),
            name: String::new(),
            kind: 13,
            parent: (place > 0).then(|| self.id(task * TASK)),
            started,
            ended: started + STEP,
            sees_workspace: true,
            opening: Value::Null,
            closing: closing(json!({"text": text, "stdout": text, "exit_code": 0})),
            needs: Vec::new(),
        };
        let before = |n: usize| json!(format!("{{{{ spans[\"{}\"] }}}}", self.id(at - n)));
        let source = format!("src/m{task}/f{}.py", place % 7);
        let report = format!("out/m{task}/r{}.txt", place / 5);
        let (shared, common) = (self.shared(task), "lib/common.py".to_owned());
        let mut writes: Option<String> = None;
        let mut reads: Vec<String> = Vec::new();
        let shell = |script: String| json!({"type": "shell", "script": script, "env": {"PATH": "/usr/bin:/bin", "HOME": "/home/agent"}});
        let mut opening = json!({});
        if place == 0 {
            step.name = format!("task {task}");
            step.closing["ended"] = json!(started + (TASK as i64 * 2 - 1) * STEP);
            step.ended = started + (TASK as i64 * 2 - 1) * STEP;
            step.sees_workspace = false;
            opening = json!({"kind": "Subgraph", "workspace": "none"});
        } else if place == 3 && (at == self.wide() || at == self.narrow() || task < SHARED) {
            // Shared files come to be in the first tasks, and are made anew in the middle.
            step.kind = 5;
            step.name = format!("generate {task}");
            let path = if at == self.wide() || task == 0 { common } else { shared };
            opening = json!({"kind": "ShellCommand", "executor": shell(format!("python3 generate.py > {path}")), "reads": ["generate.py"], "writes": [path]});
            writes = Some(path);
        } else {
            match place % 5 {
                1 => {
                    step.kind = 3;
                    step.name = "think".into();
                    // What the three steps before gave; the first one of a task has nothing to go by.
                    let far = if place > 4 { 3 } else { 1 };
                    let bindings = if place > 1 {
                        json!({"/messages/0/content": before(1), "/messages/1/content": before(far.min(2)), "/messages/2/content": before(far)})
                    } else {
                        json!({})
                    };
                    step.needs.extend((1..=far).filter(|_| place > 1).map(|n| (at - n) as u32));
                    step.sees_workspace = false;
                    let message = |role: &str| json!({"role": role, "content": text});
                    opening = json!({"kind": "LlmCall", "model": "m", "input_bindings": bindings,
                        "executor": {"type": "model", "provider": "openai", "request": {"model": "m", "messages": [message("system"), message("user"), message("user")]}}});
                }
                2 => {
                    step.kind = 7;
                    step.name = "write".into();
                    step.needs.push(at as u32 - 1);
                    opening = json!({"kind": "FileWrite", "executor": {"type": "file_write", "path": source, "content": text}, "input_bindings": {"content": before(1)}});
                    writes = Some(source);
                }
                3 => {
                    step.kind = 5;
                    step.name = "test".into();
                    let written = format!("src/m{task}/f{}.py", (place - 1) % 7);
                    reads = vec![written, shared];
                    if task.is_multiple_of(2) {
                        reads.push(common);
                    }
                    opening = json!({"kind": "ShellCommand", "executor": shell(format!("pytest -q src/m{task}")), "reads": reads, "writes": [report]});
                    writes = Some(report);
                }
                4 => {
                    step.kind = 6;
                    step.name = "read report".into();
                    opening = json!({"kind": "FileRead", "executor": {"type": "file_read", "path": report}});
                    reads = vec![report];
                }
                _ => {
                    step.kind = 4;
                    step.name = format!("lint {}", place / 5);
                    step.needs.push(at as u32 - 1);
                    reads = vec![format!("src/m{task}/f{}.py", (place - 3) % 7), shared];
                    opening = json!({"kind": "ToolCall", "executor": shell("ruff check src".into()), "reads": reads, "writes": [], "depends_on": [self.id(at - 1)]});
                }
            }
        }
        step.needs.extend(reads.iter().filter_map(|path| self.wrote(path)));
        step.needs.sort_unstable();
        step.needs.dedup();
        self.writers.extend(writes.map(|path| (path, at as u32)));
        if self.again && at % 50 == 8 {
            step.closing = closing(json!({"text": "failed\n", "stdout": "failed\n", "exit_code": 1}));
        }
        opening["name"] = json!(step.name);
        opening["started"] = json!(started);
        if let Some(parent) = &step.parent {
            opening["parent"] = json!(parent);
        }
        step.opening = opening;
        Some(step)
    }
}
