//! What is refused of a recording, by a recorder before it answers, and by the api-server.

use std::collections::{HashMap, HashSet};

use replayfork_core::footprint::relative;
use replayfork_core::model::{Executor, Opening};

use crate::ingest::{CreateRun, SpanUpload};
use crate::run_id;

/// Why something can't be recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct Invalid {
    /// A word for programs.
    pub reason: &'static str,
    /// What is wrong, where, and what would be right.
    pub detail: String,
}

/// Characters that an agent's, a model's or a session's name may have, and entries and characters of labels.
const MAX_TEXT: usize = 253;
const MAX_LABELS: usize = 64;

/// Checks what a run is called and said to be.
///
/// # Errors
/// The field and its bound.
pub fn run(request: &CreateRun) -> Result<(), Invalid> {
    let texts = [("agent", Some(&request.agent)), ("model", request.model.as_ref()), ("session", request.session.as_ref())];
    let labels = request.labels.iter().flat_map(|(k, v)| [("labels", Some(k)), ("labels", Some(v))]);
    for (field, text) in texts.into_iter().chain(labels) {
        let Some(text) = text else { continue };
        if text.chars().count() > MAX_TEXT || text.chars().any(char::is_control) || (field == "agent" && text.is_empty()) {
            let detail = format!("{field}: has at most {MAX_TEXT} characters, none of them a control character");
            return Err(Invalid { reason: "TextInvalid", detail });
        }
    }
    if request.labels.len() > MAX_LABELS {
        return Err(Invalid { reason: "TextInvalid", detail: format!("labels: at most {MAX_LABELS}, not {}", request.labels.len()) });
    }
    if let Some(name) = request.name.as_ref().filter(|name| !run_id::is_label(name)) {
        let detail = format!("name: {name:?} is no DNS label (a-z, 0-9 and -, at most 63); for example {:?}", run_id::to_label(name));
        return Err(Invalid { reason: "NameInvalid", detail });
    }
    Ok(())
}

/// Characters that a span id may have.
const MAX_ID: usize = 256;
/// Characters that a span's name may have.
const MAX_NAME: usize = 512;

/// Tokens that one span may have.
const MAX_TOKENS: i64 = 1_000_000_000_000;
/// US dollars that one span may cost.
const MAX_COST: f64 = 1e9;
/// The year 2200, in nanoseconds.
const MAX_TIME: i64 = 7_258_118_400_000_000_000;

/// Checks what no later reader could live with: of each span, and that no loop of parents or dependencies is sent at once. What
/// these refer to may come later, or never: a parent that never comes is none, and a step that needs a span that the run does not
/// have is not run again.
///
/// # Errors
/// The span and the field.
pub fn spans(uploads: &[SpanUpload]) -> Result<(), Invalid> {
    uploads.iter().try_for_each(check_one)?;
    check_loops(uploads, "parent", |opening| opening.parent.as_slice())?;
    check_loops(uploads, "depends_on", |opening| &opening.depends_on)
}

fn bad(span: &str, message: impl std::fmt::Display) -> Invalid {
    Invalid { reason: "SpanInvalid", detail: format!("span {:?}: {message}", span.chars().take(64).collect::<String>()) }
}

fn check_loops(uploads: &[SpanUpload], field: &str, refers_to: impl Fn(&Opening) -> &[String]) -> Result<(), Invalid> {
    let references: HashMap<&str, &[String]> =
        uploads.iter().filter_map(|u| Some((u.id.as_str(), refers_to(u.opening.as_ref()?)))).filter(|(_, to)| !to.is_empty()).collect();
    let (mut done, mut on_the_way) = (HashSet::new(), HashSet::new());
    for start in uploads.iter().map(|u| u.id.as_str()).filter(|id| references.contains_key(id)) {
        if done.contains(start) {
            continue;
        }
        // The way down to where the walk is, each with what it refers to beyond.
        let mut way = vec![(start, references[start].iter())];
        on_the_way.insert(start);
        while let Some((at, rest)) = way.last_mut() {
            let at = *at;
            let Some(next) = rest.next() else {
                done.insert(at);
                on_the_way.remove(at);
                way.pop();
                continue;
            };
            if on_the_way.contains(next.as_str()) {
                let message = format!("{field}: {next:?} comes back to {at:?}, so that neither could be first; leave one of the two out");
                return Err(bad(at, message));
            }
            if let Some(further) = references.get(next.as_str())
                && !done.contains(next.as_str())
            {
                on_the_way.insert(next);
                way.push((next, further.iter()));
            }
        }
    }
    Ok(())
}

/// Checks that no file is written outside of the workspace. Without a recorded root nothing can be said.
///
/// # Errors
/// Span, path and root.
pub fn paths(uploads: &[SpanUpload], root: Option<&str>) -> Result<(), Invalid> {
    let Some(root) = root else { return Ok(()) };
    for upload in uploads {
        if let Some(Executor::FileWrite { path, .. }) = upload.opening.as_ref().and_then(|o| o.executor.as_ref()) {
            relative(path, Some(root)).map_err(|e| bad(&upload.id, format!("executor.path: {e} ({root:?})")))?;
        }
    }
    Ok(())
}

fn check_one(upload: &SpanUpload) -> Result<(), Invalid> {
    let bad = |message: String| Err(bad(&upload.id, message));
    if upload.id.is_empty() || upload.id.len() > MAX_ID || upload.id.chars().any(|c| c.is_control() || c == '/') {
        return bad(format!("id: has 1 to {MAX_ID} bytes, no / and no control character; it is part of addresses"));
    }
    if matches!(upload.id.as_str(), "." | "..") {
        return bad("id: is . or .., which no address can have".into());
    }
    if upload.opening.is_none() && upload.closing.is_none() {
        return bad("give `opening`, `closing` or both".into());
    }
    if let Some(closing) = &upload.closing {
        for (field, tokens) in [("input_tokens", closing.input_tokens), ("output_tokens", closing.output_tokens)] {
            if tokens.is_some_and(|n| !(0..=MAX_TOKENS).contains(&n)) {
                return bad(format!("{field}: {} is not between 0 and {MAX_TOKENS}", tokens.unwrap_or_default()));
            }
        }
        if closing.cost_usd.is_some_and(|c| !(0.0..=MAX_COST).contains(&c)) {
            return bad(format!("cost_usd: {} is not between 0 and {MAX_COST}", closing.cost_usd.unwrap_or_default()));
        }
        let begun = upload.opening.as_ref().map_or(1, |o| o.started);
        if closing.ended < begun || closing.ended > MAX_TIME {
            return bad(format!("ended: {} is before it started, or no time in nanoseconds since 1970", closing.ended));
        }
    }
    if let Some(opening) = &upload.opening {
        if opening.name.is_empty() || opening.name.len() > MAX_NAME || opening.name.contains('\0') {
            return bad(format!("name: has 1 to {MAX_NAME} characters and no NUL"));
        }
        if opening.parent.iter().chain(&opening.depends_on).any(|id| id.is_empty() || id.len() > MAX_ID || id.contains('\0')) {
            return bad(format!("parent, depends_on: ids have 1 to {MAX_ID} characters and no NUL"));
        }
        if opening.started <= 0 || opening.started > MAX_TIME {
            // Only a recorder knows when "now" was.
            return bad(format!("started: {} is no time in nanoseconds since 1970", opening.started));
        }
        if opening.reads.is_some() != opening.writes.is_some() {
            return bad("`reads` and `writes` are declared together or not at all".into());
        }
        for (field, binding) in &opening.input_bindings {
            for template in replayfork_core::binding::templates(binding) {
                if let Err(error) = replayfork_core::binding::holes(template) {
                    return bad(format!("input_bindings.{field}: {error}"));
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;

    fn span(id: &str, opening: Value, closing: Value) -> SpanUpload {
        let mut whole = json!({"name": "step", "kind": "ShellCommand", "started": 1_000});
        for (member, value) in opening.as_object().unwrap() {
            whole[member] = value.clone();
        }
        serde_json::from_value(json!({"id": id, "opening": whole, "closing": closing})).unwrap()
    }

    fn refused(uploads: &[SpanUpload]) -> String {
        super::spans(uploads).err().map(|e| e.detail).unwrap_or_default()
    }

    #[test]
    fn numbers_times_and_names_have_limits_that_are_said() {
        let ended = |more: Value| {
            let mut closing = json!({"status": "Completed", "ended": 2_000});
            for (member, value) in more.as_object().unwrap() {
                closing[member] = value.clone();
            }
            closing
        };
        let fine =
            span("a", json!({"name": "n".repeat(512)}), ended(json!({"input_tokens": MAX_TOKENS, "output_tokens": 0, "cost_usd": 1e9})));
        assert_eq!(refused(&[fine]), "");
        for (upload, says) in [
            (span("a", json!({}), ended(json!({"input_tokens": MAX_TOKENS + 1}))), "input_tokens: 1000000000001 is not between"),
            (span("a", json!({}), ended(json!({"output_tokens": -1}))), "output_tokens: -1 is not between 0"),
            (span("a", json!({}), ended(json!({"cost_usd": -0.1}))), "cost_usd: -0.1"),
            (span("a", json!({}), ended(json!({"cost_usd": 1e10}))), "cost_usd"),
            (span("a", json!({}), ended(json!({"ended": 999}))), "ended: 999 is before"),
            (span("a", json!({"started": 0}), Value::Null), "started: 0 is no time"),
            (span("a", json!({"name": "n".repeat(513)}), Value::Null), "name: has 1 to 512"),
            (span("a", json!({"name": "nul\0"}), Value::Null), "name: has 1 to 512 characters and no NUL"),
            (span("a/b", json!({}), Value::Null), "no /"),
            (span("..", json!({}), Value::Null), "id: is . or .."),
            (span("\u{7}", json!({}), Value::Null), "no control character"),
            (span(&"i".repeat(257), json!({}), Value::Null), "id: has 1 to 256"),
            (span("nul\0", json!({}), Value::Null), "no control character"),
            (span("a", json!({"parent": "nul\0"}), Value::Null), "parent"),
        ] {
            let said = refused(&[upload]);
            assert!(said.starts_with("span ") && said.contains(says), "{said:?} does not say {says:?}");
        }
    }

    #[test]
    fn a_loop_is_refused_with_both_spans_and_what_comes_later_is_waited_for() {
        let below = |id: &str, parent: &str| span(id, json!({"parent": parent}), Value::Null);
        let after = |id: &str, spans: &[&str]| span(id, json!({"depends_on": spans}), Value::Null);
        for (uploads, field) in [
            (vec![below("a", "a")], "parent"),
            (vec![below("a", "b"), below("b", "a")], "parent"),
            (vec![below("top", "a"), below("a", "b"), below("b", "c"), below("c", "a")], "parent"),
            (vec![after("a", &["x", "b"]), after("b", &["y", "a"])], "depends_on"),
        ] {
            let said = refused(&uploads);
            assert!(said.starts_with("span ") && said.contains(&format!("{field}: \"a\" comes back to")), "{said}");
        }
        let fine = [below("b", "a"), below("a", "later"), after("c", &["d", "e"]), after("d", &["e"]), after("e", &["never"])];
        assert_eq!(refused(&fine), "");
        // A long chain is walked once, and not once from each of its spans.
        let chain: Vec<_> = (0..2000).map(|i| below(&i.to_string(), &(i + 1).to_string())).collect();
        assert_eq!(refused(&chain), "");
    }

    #[test]
    fn files_are_written_in_the_workspace_or_not_at_all() {
        let write = |path: &str| [span("w", json!({"kind": "FileWrite", "executor": {"type": "file_write", "path": path}}), Value::Null)];
        let refused = |path: &str, root| paths(&write(path), root).err().map(|e| e.detail);
        for path in ["/etc/passwd", "../up", "a/../../b", "/workspaces/a"] {
            let said = refused(path, Some("/workspace")).unwrap_or_default();
            assert!(said.contains("span \"w\": executor.path") && said.contains(path) && said.contains("/workspace"), "{said}");
        }
        for (path, root) in [("/workspace/a", Some("/workspace")), ("a/b", Some("/workspace")), ("/anywhere", None)] {
            assert_eq!(refused(path, root), None);
        }
    }

    #[test]
    fn names_of_agents_models_sessions_and_labels_have_limits_that_are_said() {
        let refused = |more: Value| {
            let mut request = json!({"agent": "a"});
            for (member, value) in more.as_object().unwrap() {
                request[member] = value.clone();
            }
            run(&serde_json::from_value(request).unwrap()).err().map(|e| e.detail).unwrap_or_default()
        };
        assert_eq!(refused(json!({"agent": "ä".repeat(253), "labels": {"k": "v"}})), "");
        let labels: BTreeMap<String, String> = (0..65).map(|i| (i.to_string(), String::new())).collect();
        for (more, says) in [
            (json!({"agent": ""}), "agent"),
            (json!({"agent": "a".repeat(254)}), "agent: has at most 253"),
            (json!({"model": "nul\0"}), "model"),
            (json!({"session": "line\nbreak"}), "session"),
            (json!({"labels": {("k".repeat(254)): ""}}), "labels"),
            (json!({"labels": labels}), "labels: at most 64, not 65"),
            (json!({"name": "My Run"}), "name: \"My Run\" is no DNS label"),
        ] {
            let said = refused(more);
            assert!(said.contains(says), "{said:?} does not say {says:?}");
        }
    }
}
