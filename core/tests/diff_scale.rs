//! Time of a diff of two runs of 100,000 spans each. `cargo test --release -p replayfork-core --test diff_scale -- --ignored --nocapture`

use std::time::Instant;

use replayfork_core::diff::{Diff, align, by_alignment, by_lineage};
use replayfork_core::model::{Fidelity, Span};
use serde_json::json;

const SPANS: usize = 100_000;

/// A run of turns of ten steps: a model call, commands and reads, each with an output of a few hundred bytes.
fn run(spans: usize, prefix: &str) -> Vec<Span> {
    (0..spans)
        .map(|n| {
            let turn = n / 10 * 10;
            let (kind, executor) = match n % 10 {
                0 => ("Subgraph", json!(null)),
                1 => ("LlmCall", json!({"type": "model", "provider": "openai", "request": {"model": "m", "temperature": 0.1, "messages": [{"role": "user", "content": format!("turn {turn}: {}", "what next? ".repeat(20))}]}})),
                2..6 => ("FileRead", json!({"type": "file_read", "path": format!("src/module_{}.py", n % 500)})),
                _ => ("ShellCommand", json!({"type": "shell", "script": format!("python3 run.py --case {}", n % 3000), "env": {"HOME": "/root", "PATH": "/bin:/usr/bin"}})),
            };
            let parent = (n != turn).then(|| format!("{prefix}{turn}"));
            serde_json::from_value(json!({
                "id": format!("{prefix}{n}"), "ord": n * 1000,
                "opening": {"name": format!("step {}", n % 10), "kind": kind, "parent": parent, "started": n * 1000, "executor": executor},
                "closing": {"ended": n * 1000 + 900, "status": "Completed", "output": {"text": format!("{n} {}", "line of output\n".repeat(20)), "exit_code": 0}, "input_tokens": 10, "output_tokens": 3},
            }))
            .unwrap()
        })
        .collect()
}

/// Every 50th step has another output, every 1000th another input, every 700th is missing.
fn other(a: &[Span], prefix: &str) -> Vec<Span> {
    let mut b = a.to_vec();
    for (n, span) in b.iter_mut().enumerate() {
        span.id = span.id.replacen('a', prefix, 1);
        span.opening.parent = span.opening.parent.as_ref().map(|p| p.replacen('a', prefix, 1));
        let closing = span.closing.as_mut().unwrap();
        if n % 50 == 7 {
            closing.output.as_mut().unwrap().text.push_str("and another line\n");
            span.fidelity = Fidelity::Reexecuted;
        }
        if n % 1000 == 7 {
            span.opening.arguments = json!({"case": n});
        }
    }
    if prefix != "a" {
        let mut n = 0;
        b.retain(|_| {
            n += 1;
            n % 700 != 3
        });
    }
    b
}

fn timed<T>(what: &str, f: impl Fn() -> T) -> T {
    let mut best = f64::MAX;
    let mut last = None;
    for _ in 0..3 {
        let started = Instant::now();
        last = Some(f());
        best = best.min(started.elapsed().as_secs_f64());
    }
    println!("{what:<58} {:>8.1} ms", best * 1e3);
    last.unwrap()
}

fn tell(diff: &Diff) {
    println!("    {:?}, {} listed, {} left out", diff.counts, diff.spans.len(), diff.spans_left_out);
}

#[test]
#[ignore = "a measurement, for a release build"]
fn time_of_a_diff() {
    let a = run(SPANS, "a");
    let fork = other(&a, "a");
    let unrelated = other(&a, "b");
    let foreign: Vec<Span> = run(SPANS, "c")
        .into_iter()
        .enumerate()
        .map(|(n, mut span)| {
            span.opening.name = format!("{} {n}", span.opening.name);
            span.opening.arguments = json!(n);
            span
        })
        .collect();
    let flat: Vec<Span> = unrelated.iter().rev().enumerate().map(|(n, s)| Span { ord: n as i64, ..s.clone() }).collect();
    let same = a.clone();
    println!("two runs of {SPANS} spans");
    tell(&timed("lineage, nothing differs", || by_lineage(&a, &same)));
    tell(&timed("lineage, one step in 50 differs", || by_lineage(&a, &fork)));
    timed("alignment alone, a run with itself", || align(&a, &a));
    timed("alignment alone", || align(&a, &unrelated));
    tell(&timed("alignment, one step in 50 differs", || by_alignment(&a, &unrelated)));
    tell(&timed("alignment, in reverse order", || by_alignment(&a, &flat)));
    tell(&timed("alignment, nothing in common", || by_alignment(&a, &foreign)));
}
