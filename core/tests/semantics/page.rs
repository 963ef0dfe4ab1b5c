//! The fenced blocks of a page, and where they stand in it.

/// One block: the words behind its fence, and its lines.
#[derive(Clone, Debug)]
pub struct Block {
    /// As in `yaml fork=NAME`: `yaml`, `fork`, `NAME`.
    pub language: String,
    pub what: String,
    pub name: String,
    pub text: String,
    /// Number of the fence's line in the page, from 1.
    pub line: usize,
}

/// All blocks, in order.
pub fn blocks(page: &str) -> Vec<Block> {
    let mut found = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((n, line)) = lines.next() {
        let Some(info) = line.trim_start().strip_prefix("```") else { continue };
        let (language, what) = info.trim().split_once(' ').unwrap_or((info.trim(), ""));
        let (what, name) = what.split_once('=').unwrap_or((what, ""));
        let text: Vec<_> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
        let owned = |s: &str| s.trim().to_owned();
        found.push(Block { language: owned(language), what: owned(what), name: owned(name), text: text.join("\n"), line: n + 1 });
    }
    found
}

/// The page with another text in one of its blocks.
pub fn with_text(page: &str, block: &Block, text: &str) -> String {
    let lines: Vec<_> = page.lines().collect();
    let after = block.line + if block.text.is_empty() { 0 } else { block.text.split('\n').count() };
    let middle: Vec<_> = text.lines().collect();
    [&lines[..block.line], &middle, &lines[after..]].concat().join("\n") + "\n"
}
