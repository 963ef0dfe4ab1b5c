//! How things are said in a terminal.

use replayfork_core::model::{Fidelity, Status};
use serde::Serialize;

use crate::Output;

/// Prints a value as JSON or YAML; `false` where a table is wanted.
///
/// # Errors
/// Standard output is closed.
pub fn structured(output: Output, value: &impl Serialize) -> anyhow::Result<bool> {
    match output {
        Output::Json => println!("{}", serde_json::to_string_pretty(value)?),
        Output::Yaml => print!("{}", serde_yaml_ng::to_string(value)?),
        Output::Table | Output::Wide => return Ok(false),
    }
    Ok(true)
}

/// Text of others for a terminal: control characters and those that turn the direction of writing are shown, not obeyed.
pub fn safe(text: &str) -> String {
    let harmless = |c: char| c == '\t' || !(c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'));
    text.chars().map(|c| if harmless(c) { c.to_string() } else { c.escape_unicode().to_string() }).collect()
}

/// A table with aligned columns, two blanks apart, like kubectl's.
pub fn table(header: &[&str], rows: &[Vec<String>]) {
    let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| safe(cell)).collect()).collect();
    let mut widths: Vec<usize> = header.iter().map(|h| h.len()).collect();
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let line = |cells: Vec<&str>| {
        let mut out = String::new();
        for (i, cell) in cells.iter().enumerate() {
            out.push_str(cell);
            if i + 1 < cells.len() {
                out.push_str(&" ".repeat(widths[i] - cell.chars().count() + 3));
            }
        }
        println!("{}", out.trim_end());
    };
    line(header.to_vec());
    for row in &rows {
        line(row.iter().map(String::as_str).collect());
    }
}

/// A duration as people say it: `340 ms`, `1.2 s`, `3 m 04 s`, `2 h 05 m`.
pub fn duration(nanoseconds: Option<i64>) -> String {
    let Some(ns) = nanoseconds else { return "–".into() };
    let (ms, s) = (ns / 1_000_000, ns / 1_000_000_000);
    match s {
        _ if ms < 1000 => format!("{ms} ms"),
        0..60 => format!("{:.1} s", ns as f64 / 1e9),
        60..3600 => format!("{} m {:02} s", s / 60, s % 60),
        _ => format!("{} h {:02} m", s / 3600, s / 60 % 60),
    }
}

/// A number with its digits grouped; "–" where it is not known.
pub fn number(n: Option<i64>) -> String {
    let Some(n) = n else { return "–".into() };
    let digits = n.unsigned_abs().to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    if n < 0 { format!("-{out}") } else { out }
}

pub fn cost(usd: Option<f64>) -> String {
    usd.map_or_else(|| "–".into(), |c| format!("${c:.4}"))
}

/// How long ago a time in nanoseconds was, as kubectl says ages.
pub fn age(then: i64) -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64);
    match now - then / 1_000_000_000 {
        s @ ..120 => format!("{}s", s.max(0)),
        s @ 120..7200 => format!("{}m", s / 60),
        s @ 7200..172_800 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86_400),
    }
}

pub fn status(status: Status) -> String {
    let sign = match status {
        Status::Completed => "✓",
        Status::Failed => "✗",
        Status::Running => "…",
        Status::Blocked => "⊘",
        Status::Skipped => "–",
        Status::Canceled => "◼",
    };
    format!("{sign} {status}")
}

/// A reason with its message; once, where the message begins with it.
pub fn reason(reason: impl std::fmt::Display, message: &str) -> String {
    let reason = reason.to_string();
    if message.starts_with(&format!("{reason}(")) { message.to_owned() } else { format!("{reason}: {message}") }
}

/// What became of a span in a fork; nothing for a run as recorded.
pub fn fidelity(fidelity: Fidelity) -> &'static str {
    match fidelity {
        Fidelity::Recorded => "",
        Fidelity::Skipped => "not reached",
        other => other.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_said_once() {
        assert_eq!(reason("ModelBlocked", "it asks a model"), "ModelBlocked: it asks a model");
        assert_eq!(reason("IncompleteContract", "IncompleteContract(writes): its file"), "IncompleteContract(writes): its file");
    }

    #[test]
    fn durations_are_said_as_people_say_them() {
        for (ns, said) in [
            (None, "–"),
            (Some(0), "0 ms"),
            (Some(340_000_000), "340 ms"),
            (Some(1_240_000_000), "1.2 s"),
            (Some(184_000_000_000), "3 m 04 s"),
            (Some(7_500_000_000_000), "2 h 05 m"),
        ] {
            assert_eq!(duration(ns), said);
        }
    }

    #[test]
    fn nothing_of_others_reaches_the_terminal_as_a_command() {
        assert_eq!(safe("\u{1b}[31mred\u{7} a\nb \u{202e}x\té"), "\\u{1b}[31mred\\u{7} a\\u{a}b \\u{202e}x\té");
    }

    #[test]
    fn numbers_are_grouped_and_unknown_is_not_zero() {
        assert_eq!(number(Some(1_234_567)), "1 234 567");
        assert_eq!(number(Some(-1_000)), "-1 000");
        assert_eq!((number(Some(0)), number(None), cost(None)), ("0".into(), "–".into(), "–".into()));
    }
}
