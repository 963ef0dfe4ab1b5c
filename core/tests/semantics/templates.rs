//! `text bindings`: outputs, templates, and what these render to.

use std::collections::BTreeMap;

use replayfork_core::binding::{Hole, Renderer, SpanValue};
use replayfork_core::model::{Output, Status};
use serde_json::{Value, json};

/// Lines as in `NAME gave "…", exit N`, and as in `TEMPLATE  →  RESULT`; a template in brackets is an argument vector.
///
/// # Errors
/// A line that is neither.
pub fn rendered(text: &str) -> Result<String, String> {
    let mut given = BTreeMap::new();
    let mut lines = Vec::new();
    for line in text.lines() {
        if let Some((name, output)) = line.split_once(" gave ") {
            let (said, exit) = output.rsplit_once(", exit ").unwrap_or((output, "0"));
            let said: String = serde_json::from_str(said).map_err(|e| format!("{line}: {e}"))?;
            let code: i32 = exit.parse().map_err(|e| format!("{line}: {e}"))?;
            let status = if code == 0 { Status::Completed } else { Status::Failed };
            given.insert(name.trim().to_owned(), SpanValue { output: Output::overridden(&said, code), status });
            lines.push(line.to_owned());
        } else if line.is_empty() {
            lines.push(String::new());
        } else {
            let template = line.split_once("→").ok_or_else(|| format!("{line}: neither an output nor a template"))?.0;
            let width = template.trim_end().chars().count();
            let gap = " ".repeat(template.chars().count() - width);
            let template = template.trim_end();
            lines.push(format!("{template}{gap}→  {}", render(&given, template)?));
        }
    }
    Ok(lines.join("\n"))
}

fn render(given: &BTreeMap<String, SpanValue>, template: &str) -> Result<String, String> {
    let resolve = |hole: &Hole| {
        let name = match hole {
            Hole::Name(name) | Hole::Id(name) => name,
        };
        given.get(name).cloned().ok_or_else(|| format!("no span called {name:?} had ended when this one started"))
    };
    let renderer = Renderer::new(&resolve);
    if template.starts_with('[') {
        let argv: Vec<String> = serde_json::from_str(template).map_err(|e| format!("{template}: {e}"))?;
        return Ok(match renderer.render_argv(&argv) {
            Ok(argv) => json!(argv).to_string(),
            Err(error) => return Err(error.to_string()),
        });
    }
    Ok(match renderer.render(template) {
        Ok(text) if text.contains('\n') || text.trim() != text => Value::from(text).to_string(),
        Ok(text) => text,
        Err(error) => format!("error: {}", error.message),
    })
}

/// The error of a template that can't be read or rendered, caret and all.
pub fn error_of(template: &str) -> String {
    let output = SpanValue { output: Output::overridden("[1, 2]", 0), status: Status::Completed };
    let resolve = |hole: &Hole| match hole {
        Hole::Name(name) if name == "count" => Ok(output.clone()),
        Hole::Name(name) | Hole::Id(name) => Err(format!("no span called {name:?} had ended when \"test\" started")),
    };
    Renderer::new(&resolve).render(template).map_or_else(|e| e.to_string(), |text| format!("no error: {text}"))
}
