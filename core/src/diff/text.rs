//! Unified diffs of texts, bounded, with words that say what was left out.

use similar::{Algorithm, DiffOp, capture_diff_slices, group_diff_ops};

/// Bytes of one side above which a text is not compared line by line.
pub const MAX_DIFF_TEXT: usize = 1 << 20;
/// Bytes of one line that are shown.
pub const MAX_LINE: usize = 1000;
/// Bytes after which a unified diff ends.
pub const MAX_UNIFIED: usize = 128 << 10;

/// Lines of context around a change.
const CONTEXT: usize = 3;
/// Bytes that are shown of a long line before the place where it differs.
const LEAD: usize = 80;

/// A unified diff with three lines of context; `None` where the texts are equal.
pub fn unified(a: &str, b: &str) -> Option<String> {
    if a == b {
        return None;
    }
    if a.len().max(b.len()) > MAX_DIFF_TEXT {
        return Some(format!("@@ too long to compare line by line: {} and {} bytes @@\n", a.len(), b.len()));
    }
    let (old, new): (Vec<_>, Vec<_>) = (a.split_inclusive('\n').collect(), b.split_inclusive('\n').collect());
    let mut writer = Writer { out: String::new(), left_out: 0 };
    for hunk in group_diff_ops(capture_diff_slices(Algorithm::Myers, &old, &new), CONTEXT) {
        writer.hunk(&hunk, &old, &new);
    }
    if writer.left_out > 0 {
        writer.out.push_str(&format!("@@ {} more lines of the difference are left out @@\n", writer.left_out));
    }
    Some(writer.out)
}

struct Writer {
    out: String,
    left_out: usize,
}

impl Writer {
    fn hunk(&mut self, hunk: &[DiffOp], old: &[&str], new: &[&str]) {
        let (Some(first), Some(last)) = (hunk.first(), hunk.last()) else { return };
        let range = |from: usize, to: usize| match to - from {
            0 => format!("{from},0"),
            1 => format!("{}", from + 1),
            lines => format!("{},{lines}", from + 1),
        };
        if self.out.len() <= MAX_UNIFIED {
            let (a, b) = (range(first.old_range().start, last.old_range().end), range(first.new_range().start, last.new_range().end));
            self.out.push_str(&format!("@@ -{a} +{b} @@\n"));
        }
        for op in hunk {
            let (removed, added) = (&old[op.old_range()], &new[op.new_range()]);
            if matches!(op, DiffOp::Equal { .. }) {
                removed.iter().for_each(|line| self.line(' ', line, None));
                continue;
            }
            for (i, line) in removed.iter().enumerate() {
                self.line('-', line, added.get(i).copied());
            }
            for (i, line) in added.iter().enumerate() {
                self.line('+', line, removed.get(i).copied());
            }
        }
    }

    /// One line; of a long one the part around the place where it differs from its counterpart.
    fn line(&mut self, sign: char, line: &str, other: Option<&str>) {
        if self.out.len() > MAX_UNIFIED {
            self.left_out += 1;
            return;
        }
        let content = line.strip_suffix('\n');
        let text = content.unwrap_or(line);
        self.out.push(sign);
        if text.len() <= MAX_LINE {
            self.out.push_str(text);
        } else {
            let common = other.map_or(0, |other| common_prefix(text, other));
            let from = if common > LEAD { text.floor_char_boundary(common - LEAD) } else { 0 };
            let to = text.floor_char_boundary((from + MAX_LINE).min(text.len()));
            if from > 0 {
                self.out.push_str(&format!("… {from} bytes … "));
            }
            self.out.push_str(&text[from..to]);
            if to < text.len() {
                self.out.push_str(&format!(" … {} bytes …", text.len() - to));
            }
        }
        self.out.push('\n');
        if content.is_none() {
            self.out.push_str("\\ No newline at end of file\n");
        }
    }
}

fn common_prefix(a: &str, b: &str) -> usize {
    a.bytes().zip(b.bytes()).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diff_reads_like_any_unified_diff() {
        assert_eq!(unified("same\n", "same\n"), None);
        assert_eq!(unified("a\nb\nc\n", "a\nB\nc\n").unwrap(), "@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n");
        assert_eq!(unified("", "new\n").unwrap(), "@@ -0,0 +1 @@\n+new\n");
        assert_eq!(unified("x", "x\n").unwrap(), "@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+x\n");
        let lines = |n: usize| (1..=n).map(|i| format!("{i}\n")).collect::<String>();
        assert_eq!(unified(&lines(9), &lines(8)).unwrap(), "@@ -6,4 +6,3 @@\n 6\n 7\n 8\n-9\n");
    }

    #[test]
    fn a_long_line_is_shown_around_the_place_that_differs() {
        let line = |middle: &str| format!("{}é{middle}{}\n", "x".repeat(50_000), "y".repeat(50_000));
        let diff = unified(&line("old"), &line("new")).unwrap();
        assert!(diff.len() < 3 * MAX_LINE, "{} bytes", diff.len());
        assert!(diff.contains("xxéoldyy") && diff.contains("xxénewyy") && diff.contains("… 49922 bytes … x"), "{}", &diff[..200]);
    }

    #[test]
    fn what_is_too_much_says_how_much_it_is() {
        let huge = "x".repeat(MAX_DIFF_TEXT + 1);
        assert_eq!(unified(&huge, "y").unwrap(), "@@ too long to compare line by line: 1048577 and 1 bytes @@\n");
        let lines = |c: char| (0..20_000).map(|i| format!("{c}{i} and some more text\n")).collect::<String>();
        let diff = unified(&lines('a'), &lines('b')).unwrap();
        assert!(diff.len() < MAX_UNIFIED + 2 * MAX_LINE);
        let shown = diff.lines().filter(|l| l.starts_with(['-', '+'])).count();
        assert!(diff.ends_with(&format!("@@ {} more lines of the difference are left out @@\n", 40_000 - shown)));
    }

    #[test]
    fn hundreds_of_thousands_of_empty_or_unlike_lines_take_no_time_that_anybody_notices() {
        let (a, b) = ("\n".repeat(MAX_DIFF_TEXT), "x\n".repeat(MAX_DIFF_TEXT / 2));
        let started = std::time::Instant::now();
        assert!(unified(&a, &b).is_some());
        assert!(started.elapsed().as_secs() < 5, "{:?}", started.elapsed());
    }
}
