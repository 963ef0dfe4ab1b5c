//! The inputs of a step as named fields: recorded, patched, rendered, compared and hashed by one code.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::Digest;
use crate::binding::{self, BindingError, Renderer, SpanValue};
use crate::digest::Hasher;
use crate::footprint::{Footprint, PathError};
use crate::model::{Binding, CONTRACT_VERSION, Executor, Opening, Shell};
use crate::patch::{CommandPatch, Patches};
use crate::source::Source;

/// One input: a value, or a template that is rendered with the outputs visible to span `at`.
#[derive(Clone, Debug, PartialEq)]
pub enum Field {
    Literal(Value),
    Bound { binding: Binding, at: usize },
}

/// The inputs of one span, by name: `type`, `script`, `argv`, `cwd`, `stdin`, `env.NAME`, `path`, `content`,
/// `executable`, `provider`, `request`, `binding.NAME`, and `container.ID.NAME` for its containers' bindings.
#[derive(Clone, Debug)]
pub struct Contract {
    pub span: usize,
    pub fields: BTreeMap<String, Field>,
    pub footprint: Footprint,
    /// Indices of the explicit dependencies, its containers' included.
    pub depends_on: Vec<usize>,
    pub timeout_ms: Option<u64>,
}

/// Fields with every template rendered.
pub type Rendered = BTreeMap<String, Value>;

/// Something that a contract needs and the record lacks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IncompleteContract {
    #[error("{0}")]
    Path(#[from] PathError),
    #[error("its executor has neither `script` nor `argv`")]
    NoCommand,
    #[error("it depends on span {0:?}, which the run does not have")]
    UnknownDependency(String),
}

/// Fields of the executor that a binding of the same name renders.
const RENDERED_FIELDS: [&str; 5] = ["script", "argv", "cwd", "stdin", "content"];

impl Contract {
    /// The contract as recorded.
    ///
    /// # Errors
    /// A record that lacks what its executor needs.
    pub fn recorded(source: &Source, span: usize) -> Result<Self, IncompleteContract> {
        Self::build(source, None, span)
    }

    /// The contract after patches.
    ///
    /// # Errors
    /// As [`Contract::recorded`].
    pub fn patched(source: &Source, patches: &Patches, span: usize) -> Result<Self, IncompleteContract> {
        Self::build(source, Some(patches), span)
    }

    fn build(source: &Source, patches: Option<&Patches>, span: usize) -> Result<Self, IncompleteContract> {
        let opening = &source.spans[span].opening;
        let command = patches.and_then(|p| p.command.get(&span));
        let mut fields = BTreeMap::new();
        if let Some(executor) = &opening.executor {
            let env = match (executor, patches) {
                (Executor::Shell(shell), Some(patches)) => patches.environment(source, span, &shell.env),
                (Executor::Shell(shell), None) => shell.env.clone(),
                _ => BTreeMap::new(),
            };
            executor_fields(executor, env, &mut fields);
        }
        for (name, binding) in &opening.input_bindings {
            let bound = Field::Bound { binding: binding.clone(), at: span };
            let overridden = |var: &str| match (fields.get(&format!("env.{var}")), &opening.executor) {
                (Some(Field::Literal(now)), Some(Executor::Shell(shell))) => shell.env.get(var).is_none_or(|then| now != then),
                (None, Some(Executor::Shell(shell))) => shell.env.contains_key(var),
                _ => false,
            };
            match name.strip_prefix("env.") {
                Some(var) if overridden(var) => {}
                Some(_) => drop(fields.insert(name.clone(), bound)),
                None if RENDERED_FIELDS.contains(&name.as_str()) && opening.executor.is_some() => drop(fields.insert(name.clone(), bound)),
                None => drop(fields.insert(format!("binding.{name}"), bound)),
            }
        }
        if let Some(command) = command {
            apply_command(command, span, &mut fields);
        }
        let mut depends_on = Vec::new();
        for owner in std::iter::once(span).chain(source.ancestors(span)) {
            let opening = &source.spans[owner].opening;
            for id in &opening.depends_on {
                depends_on.push(source.index(id).ok_or_else(|| IncompleteContract::UnknownDependency(id.clone()))?);
            }
            if owner != span {
                for (name, binding) in &opening.input_bindings {
                    let id = &source.spans[owner].id;
                    fields.insert(format!("container.{id}.{name}"), Field::Bound { binding: binding.clone(), at: owner });
                }
            }
        }
        depends_on.sort_unstable();
        depends_on.dedup();
        if matches!(opening.executor, Some(Executor::Shell(_))) && !fields.contains_key("script") && !fields.contains_key("argv") {
            return Err(IncompleteContract::NoCommand);
        }
        let footprint = footprint(source, span, command)?;
        let timeout_ms = match &opening.executor {
            Some(Executor::Shell(shell)) => shell.timeout_ms,
            _ => None,
        };
        Ok(Self { span, fields, footprint, depends_on, timeout_ms })
    }

    /// The spans whose outputs the templates use, with the field that does.
    ///
    /// # Errors
    /// A template that does not parse, or a hole that refers to nothing.
    pub fn bound_spans(&self, source: &Source) -> Result<Vec<usize>, BindingError> {
        let mut found = Vec::new();
        self.each_template(|at, template| {
            for hole in binding::holes(template)? {
                match source.resolve(at, &hole) {
                    Ok(upstream) => found.push(upstream),
                    // Rendered against nothing, so that the error shows the place.
                    Err(why) => drop(Renderer::new(&|_| Err(why.clone())).render(template)?),
                }
            }
            Ok(())
        })?;
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    fn each_template(&self, mut f: impl FnMut(usize, &str) -> Result<(), BindingError>) -> Result<(), BindingError> {
        for field in self.fields.values() {
            if let Field::Bound { binding, at } = field {
                for template in binding::templates(binding) {
                    f(*at, template)?;
                }
            }
        }
        Ok(())
    }

    /// Renders every template. `output` gives what a span gave, or says why it has nothing.
    ///
    /// # Errors
    /// The first template that can't be rendered.
    pub fn render(&self, source: &Source, output: &dyn Fn(usize) -> Result<SpanValue, String>) -> Result<Rendered, BindingError> {
        self.fields
            .iter()
            .map(|(name, field)| {
                let value = match field {
                    Field::Literal(value) => value.clone(),
                    Field::Bound { binding, at } => {
                        let resolve = |hole: &binding::Hole| source.resolve(*at, hole).and_then(output);
                        let renderer = Renderer::new(&resolve);
                        match binding {
                            Binding::Template(t) => Value::String(renderer.render(t)?),
                            Binding::Argv(items) => json!(renderer.render_argv(items)?),
                        }
                    }
                };
                Ok((name.clone(), value))
            })
            .collect()
    }
}

fn executor_fields(executor: &Executor, env: BTreeMap<String, String>, fields: &mut BTreeMap<String, Field>) {
    let mut put = |name: &str, value: Value| drop(fields.insert(name.to_owned(), Field::Literal(value)));
    put("type", json!(executor.type_name()));
    match executor {
        Executor::Shell(Shell { script, argv, cwd, stdin, env: _, timeout_ms: _ }) => {
            for (name, value) in [("script", script), ("cwd", cwd), ("stdin", stdin)] {
                if let Some(value) = value {
                    put(name, json!(value));
                }
            }
            if let Some(argv) = argv {
                put("argv", json!(argv));
            }
            for (name, value) in env {
                put(&format!("env.{name}"), json!(value));
            }
        }
        Executor::FileRead { path } => put("path", json!(path)),
        Executor::FileWrite { path, content, executable } => {
            put("path", json!(path));
            put("content", json!(content));
            put("executable", json!(executable));
        }
        Executor::Model { provider, request } => {
            put("provider", json!(provider));
            put("request", request.clone());
        }
    }
}

fn apply_command(command: &CommandPatch, span: usize, fields: &mut BTreeMap<String, Field>) {
    let bound = |binding| Field::Bound { binding, at: span };
    if command.script.is_some() || command.argv.is_some() {
        fields.remove("script");
        fields.remove("argv");
    }
    let texts = [("script", &command.script), ("cwd", &command.cwd), ("stdin", &command.stdin)];
    for (name, text) in texts {
        if let Some(text) = text {
            fields.insert(name.to_owned(), bound(Binding::Template(text.clone())));
        }
    }
    if let Some(argv) = &command.argv {
        fields.insert("argv".to_owned(), bound(Binding::Argv(argv.clone())));
    }
}

fn footprint(source: &Source, span: usize, command: Option<&CommandPatch>) -> Result<Footprint, PathError> {
    let mut opening = source.spans[span].opening.clone();
    if let Some(command) = command
        && (command.script.is_some() || command.argv.is_some() || command.reads.is_some())
    {
        opening.reads = command.reads.clone();
        opening.writes = command.writes.clone();
    }
    Footprint::of(&opening, opening.executor.as_ref(), source.root())
}

/// Everything else that an input digest covers.
pub struct Surroundings<'a> {
    /// Image reference; `None` where none was recorded, so that it counts as equal.
    pub image: Option<&'a str>,
    /// Outputs of the explicit dependencies, in the contract's order.
    pub dependencies: Vec<Option<&'a SpanValue>>,
    /// Content of the footprint; `None` for a step that sees nothing of the workspace.
    pub workspace: Option<Digest>,
}

/// The digest of a step's inputs, by which recorded and cached results are found.
pub fn input_digest(rendered: &Rendered, around: &Surroundings<'_>) -> Digest {
    let mut hasher = Hasher::new("input").part("version", &CONTRACT_VERSION.to_le_bytes()).value("image", &around.image);
    for (name, value) in rendered {
        hasher = hasher.json(name, value);
    }
    for dependency in &around.dependencies {
        hasher = match dependency {
            None => hasher.part("dependency", b"none"),
            Some(value) => hasher.value("dependency", &json!([value.output, value.status])),
        };
    }
    hasher.value("workspace", &around.workspace).finish()
}

/// A command as the sandbox runs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    pub argv: Vec<String>,
    /// Relative to the workspace root.
    pub cwd: String,
    pub env: BTreeMap<String, String>,
    pub stdin: String,
    pub timeout_ms: Option<u64>,
}

/// What executing a step means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Run(Command),
    ReadFile { path: String },
    WriteFile { path: String, content: String, executable: bool },
}

/// The action that rendered fields describe.
///
/// # Errors
/// A path outside of the workspace, or a type that nothing here executes.
pub fn action(source: &Source, rendered: &Rendered, timeout_ms: Option<u64>) -> Result<Action, String> {
    let text = |name: &str| rendered.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let path = |name: &str| crate::footprint::relative(&text(name), source.root()).map_err(|e| e.to_string());
    match text("type").as_str() {
        "shell" => {
            let argv = match rendered.get("argv").and_then(Value::as_array) {
                Some(items) => items.iter().filter_map(|v| v.as_str().map(str::to_owned)).collect(),
                None => vec!["/bin/sh".to_owned(), "-c".to_owned(), text("script")],
            };
            let env = rendered
                .iter()
                .filter_map(|(name, value)| Some((name.strip_prefix("env.")?.to_owned(), value.as_str()?.to_owned())))
                .collect();
            Ok(Action::Run(Command { argv, cwd: path("cwd")?, env, stdin: text("stdin"), timeout_ms }))
        }
        "file_read" => Ok(Action::ReadFile { path: path("path")? }),
        "file_write" => {
            let executable = rendered.get("executable") == Some(&Value::Bool(true));
            Ok(Action::WriteFile { path: path("path")?, content: text("content"), executable })
        }
        other => Err(format!("nothing executes steps of type {other:?}")),
    }
}

/// The opening of a step as it is executed: its executor rendered and patched, begun at `started`.
pub fn executed(opening: &Opening, rendered: &Rendered, started: i64) -> Opening {
    let text = |name: &str| rendered.get(name).and_then(Value::as_str).map(str::to_owned);
    let executor = opening.executor.as_ref().map(|executor| match executor {
        Executor::Shell(shell) => Executor::Shell(Shell {
            script: text("script"),
            argv: rendered.get("argv").and_then(Value::as_array).map(|v| v.iter().filter_map(|a| a.as_str().map(str::to_owned)).collect()),
            cwd: text("cwd"),
            stdin: text("stdin"),
            env: rendered
                .iter()
                .filter_map(|(name, value)| Some((name.strip_prefix("env.")?.to_owned(), value.as_str()?.to_owned())))
                .collect(),
            timeout_ms: shell.timeout_ms,
        }),
        Executor::FileWrite { path, executable, .. } => {
            Executor::FileWrite { path: path.clone(), content: text("content").unwrap_or_default(), executable: *executable }
        }
        other => other.clone(),
    });
    Opening { executor, started, ..opening.clone() }
}
