//! Where output goes: colours and a width on a terminal, neither in a pipe.

use std::fmt::Write as _;
use std::io::IsTerminal;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::text::safe;

/// Columns below which nothing is cut: a terminal that says less is no place to read a diff.
const NARROWEST: usize = 40;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    Plain,
    Bold,
    Dim,
    Red,
    Green,
    Cyan,
    Yellow,
}

/// Collects lines for one place.
#[derive(Clone, Debug, Default)]
pub struct Screen {
    colours: bool,
    /// Columns of the terminal; `None`: lines are as long as they are.
    width: Option<usize>,
    pub out: String,
}

impl Screen {
    /// Of standard output.
    pub fn detect() -> Self {
        if !std::io::stdout().is_terminal() {
            return Self::default();
        }
        let columns = rustix::termios::tcgetwinsize(std::io::stdout()).ok().map(|size| usize::from(size.ws_col)).filter(|&c| c > 0);
        Self { colours: std::env::var_os("NO_COLOR").is_none(), width: columns.map(|c| c.max(NARROWEST)), out: String::new() }
    }

    #[cfg(test)]
    pub fn with(colours: bool, width: Option<usize>) -> Self {
        Self { colours, width, out: String::new() }
    }

    pub fn print(&self) {
        print!("{}", self.out);
    }

    /// A line of parts, each of its own colour, cut where the terminal ends. What others wrote can't command the terminal.
    pub fn line(&mut self, parts: &[(Colour, &str)]) {
        let mut left = self.width.unwrap_or(usize::MAX);
        for (i, (colour, text)) in parts.iter().enumerate() {
            let text = safe(text);
            let more: usize = parts[i + 1..].iter().map(|(_, t)| t.width()).sum();
            let shown = cut(&text, left, more > 0);
            left -= shown.width().min(left);
            let code = match colour {
                Colour::Plain => "",
                Colour::Bold => "1",
                Colour::Dim => "2",
                Colour::Red => "31",
                Colour::Green => "32",
                Colour::Cyan => "36",
                Colour::Yellow => "33",
            };
            if self.colours && !code.is_empty() && !shown.is_empty() {
                // Writing to a string can't fail.
                let _ = write!(self.out, "\x1b[{code}m{shown}\x1b[0m");
            } else {
                self.out.push_str(&shown);
            }
            if shown.len() < text.len() || left == 0 {
                break;
            }
        }
        self.out.push('\n');
    }

    pub fn plain(&mut self, text: &str) {
        self.line(&[(Colour::Plain, text)]);
    }

    /// Text that is read as sentences: broken between words where the terminal ends, not cut.
    pub fn wrapped(&mut self, indent: &str, colour: Colour, text: &str) {
        for line in text.lines() {
            let mut current = String::new();
            let room = self.width.map_or(usize::MAX, |w| w.saturating_sub(indent.len()).max(NARROWEST / 2));
            for word in line.split_inclusive(' ') {
                if !current.is_empty() && (current.width() + word.trim_end().width()) > room {
                    self.line(&[(Colour::Plain, indent), (colour, current.trim_end())]);
                    current.clear();
                }
                current.push_str(word);
            }
            self.line(&[(Colour::Plain, indent), (colour, current.trim_end())]);
        }
    }

    /// A unified diff.
    pub fn diff(&mut self, unified: &str, indent: &str) {
        for line in unified.lines() {
            let colour = match line.as_bytes().first() {
                Some(b'+') => Colour::Green,
                Some(b'-') => Colour::Red,
                Some(b'@') => Colour::Cyan,
                Some(b'\\') => Colour::Dim,
                _ => Colour::Plain,
            };
            self.line(&[(Colour::Plain, indent), (colour, line)]);
        }
    }
}

/// The beginning of a text that fits, with an ellipsis where some is missing. `more`: something follows, and needs a column.
fn cut(text: &str, columns: usize, more: bool) -> String {
    let width = text.width();
    if width < columns || (width == columns && !more) {
        return text.to_owned();
    }
    let mut shown = String::new();
    let mut used = 0;
    for c in text.chars() {
        let w = c.width().unwrap_or(0);
        if used + w + 1 > columns {
            break;
        }
        used += w;
        shown.push(c);
    }
    if columns > 0 {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_gets_whole_lines_without_colours() {
        let mut screen = Screen::with(false, None);
        screen.diff(&format!("@@ -1 +1 @@\n-{}\n+\u{1b}[31mb\n", "a".repeat(300)), "  ");
        assert_eq!(screen.out, format!("  @@ -1 +1 @@\n  -{}\n  +\\u{{1b}}[31mb\n", "a".repeat(300)));
    }

    #[test]
    fn a_terminal_gets_colours_and_lines_that_fit() {
        let mut screen = Screen::with(true, Some(20));
        screen.diff(&format!("-{}\n+b\n", "wide 幅".repeat(9)), "  ");
        assert_eq!(screen.out, "  \x1b[31m-wide 幅wide 幅wi…\x1b[0m\n  \x1b[32m+b\x1b[0m\n");
        assert!(screen.out.lines().all(|l| l.replace("\x1b[31m", "").replace("\x1b[32m", "").replace("\x1b[0m", "").width() <= 20));
    }

    #[test]
    fn sentences_are_broken_and_not_cut() {
        let mut screen = Screen::with(false, Some(24));
        screen.wrapped("  ", Colour::Plain, "a sentence of several words that goes on");
        assert_eq!(screen.out, "  a sentence of several\n  words that goes on\n");
    }
}
