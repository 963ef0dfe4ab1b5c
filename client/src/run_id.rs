//! Names of runs, fit for a Kubernetes object.

/// Characters that a run's name may have.
pub const MAX_NAME: usize = 63;

/// Brings any text into the form of a DNS label (RFC 1123), at most [`MAX_NAME`] long; "run" where nothing is left.
pub fn to_label(text: &str) -> String {
    let mut label = String::new();
    for c in text.chars().flat_map(char::to_lowercase) {
        match c {
            'a'..='z' | '0'..='9' => label.push(c),
            _ if !label.is_empty() && !label.ends_with('-') => label.push('-'),
            _ => {}
        }
        if label.len() >= MAX_NAME {
            break;
        }
    }
    let label = label.trim_matches('-');
    if label.is_empty() { "run".to_owned() } else { label.to_owned() }
}

/// Whether a text is a DNS label.
pub fn is_label(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_NAME && to_label(text) == text
}

#[cfg(test)]
mod tests {
    #[test]
    fn any_text_becomes_a_label() {
        assert_eq!(super::to_label("My Agent_v2!"), "my-agent-v2");
        assert_eq!(super::to_label("\u{1f980}"), "run");
        assert!(super::is_label(&super::to_label(&"x-".repeat(80))));
        assert!(!super::is_label("Upper") && !super::is_label("-a") && !super::is_label(""));
    }
}
