//! The inputs of a step as named fields: recorded, patched, rendered, compared and hashed by one code.

mod request;

use std::collections::BTreeMap;

use serde_json::{Value, json};

use request::Request;

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
    Bound {
        binding: Binding,
        at: usize,
    },
    /// A model call's request, with templates at some of its places.
    Request {
        request: Request,
        at: usize,
    },
}

/// The inputs of one span, by name: `type`, `script`, `argv`, `cwd`, `stdin`, `env.NAME`, `path`, `content`,
/// `executable`, `provider`, `request`, `binding.NAME`, and `container.ID.NAME` for its containers' bindings.
///
/// What a unit's inner spans need of spans outside of it counts among its explicit dependencies.
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
    #[error("it depends on span {0:?}, which began after it")]
    LaterDependency(String),
    #[error("its request has nothing at {0:?}, where a binding renders to")]
    RequestPlace(String),
}

impl IncompleteContract {
    /// The field that is missing or wrong.
    pub fn field(&self) -> &'static str {
        match self {
            IncompleteContract::Path(_) => "path",
            IncompleteContract::NoCommand => "script",
            IncompleteContract::UnknownDependency(_) | IncompleteContract::LaterDependency(_) => "depends_on",
            IncompleteContract::RequestPlace(_) => "request",
        }
    }
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
            if let Executor::Model { request, .. } = executor {
                let request = Request::build(request, &opening.input_bindings, patches.map(|p| (p, span)))?;
                fields.insert("request".to_owned(), Field::Request { request, at: span });
            }
        }
        let is_model = matches!(opening.executor, Some(Executor::Model { .. }));
        for (name, binding) in &opening.input_bindings {
            if is_model && name.starts_with('/') {
                continue;
            }
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
            depends_on.extend(explicit(source, span, opening)?);
            if owner != span {
                for (name, binding) in &opening.input_bindings {
                    let id = &source.spans[owner].id;
                    fields.insert(format!("container.{id}.{name}"), Field::Bound { binding: binding.clone(), at: owner });
                }
            }
        }
        for &inner in source.inner(span) {
            let opening = &source.spans[inner].opening;
            let templates = opening.input_bindings.values().flat_map(binding::templates);
            let holes = templates.filter_map(|t| binding::holes(t).ok()).flatten();
            let bound = holes.filter_map(|hole| source.resolve(inner, &hole).ok());
            let needs: Vec<_> = bound.chain(explicit(source, inner, opening)?).collect();
            depends_on.extend(needs.into_iter().filter(|&n| n < span && source.unit_above(n) != Some(span)));
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

    /// Whether its templates render whatever the outputs are.
    pub fn always_renders(&self) -> bool {
        let mut always = true;
        let _ = self.each_template(|_, template| {
            always &= binding::always_renders(template);
            Ok(())
        });
        always
    }

    /// Names of the fields that are bound to upstream outputs, and are none of the executor's.
    pub fn plain(&self) -> impl Iterator<Item = &String> {
        self.fields.keys().filter(|field| field.starts_with("binding.") || field.starts_with("container."))
    }

    /// Whether nothing has to be rendered.
    pub(crate) fn has_no_template(&self) -> bool {
        self.template_bytes() == 0
    }

    pub(crate) fn template_bytes(&self) -> usize {
        let mut bytes = 0;
        let _ = self.each_template(|_, template| {
            bytes += template.len().max(1);
            Ok(())
        });
        bytes
    }

    fn each_template(&self, mut f: impl FnMut(usize, &str) -> Result<(), BindingError>) -> Result<(), BindingError> {
        for field in self.fields.values() {
            match field {
                Field::Literal(_) => {}
                Field::Bound { binding, at } => binding::templates(binding).into_iter().try_for_each(|t| f(*at, t))?,
                Field::Request { request, at } => request.templates().try_for_each(|t| f(*at, t))?,
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
                    Field::Request { request, at } => {
                        let resolve = |hole: &binding::Hole| source.resolve(*at, hole).and_then(output);
                        request.render(&Renderer::new(&resolve))?
                    }
                };
                Ok((name.clone(), value))
            })
            .collect()
    }
}

fn explicit(source: &Source, span: usize, opening: &Opening) -> Result<Vec<usize>, IncompleteContract> {
    let find = |id: &String| match source.index(id) {
        None => Err(IncompleteContract::UnknownDependency(id.clone())),
        Some(i) if i >= span => Err(IncompleteContract::LaterDependency(id.clone())),
        Some(i) => Ok(i),
    };
    opening.depends_on.iter().map(find).collect()
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
        Executor::Model { provider, request: _ } => put("provider", json!(provider)),
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

/// The footprint after patches: a new command has what the patch declares, or may touch everything.
fn footprint(source: &Source, span: usize, command: Option<&CommandPatch>) -> Result<Footprint, PathError> {
    let opening = &source.spans[span].opening;
    Footprint::of(opening, opening.executor.as_ref(), source.root())?;
    match command.filter(|c| c.voids_footprint()) {
        None => Ok(source.footprint(span)),
        Some(command) => {
            let opening = Opening { reads: command.reads.clone(), writes: command.writes.clone(), ..opening.clone() };
            Footprint::of(&opening, opening.executor.as_ref(), source.root())
        }
    }
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

/// What a person approves of a step: its rendered script or argv, working directory, environment and standard input, or the
/// path and content that it writes. The workspace is no part of it.
pub fn arguments_digest(rendered: &Rendered) -> Digest {
    let counts = |name: &str| !name.starts_with("binding.") && !name.starts_with("container.");
    let mut hasher = Hasher::new("arguments");
    for (name, value) in rendered.iter().filter(|(name, _)| counts(name)) {
        hasher = hasher.json(name, value);
    }
    hasher.finish()
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
    ReadFile {
        path: String,
    },
    WriteFile {
        path: String,
        content: String,
        executable: bool,
    },
    /// A model is asked, in the way that the fork's spec names.
    AskModel {
        request: Value,
    },
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
        "model" => Ok(Action::AskModel { request: rendered.get("request").cloned().unwrap_or_default() }),
        other => Err(format!("nothing executes steps of type {other:?}")),
    }
}

/// The opening of a step after patches, as a fork's run keeps it: what was recorded, with the patched executor, templates and
/// footprint, so that a fork of the fork starts from there.
pub fn patched_opening(source: &Source, patches: &Patches, span: usize, started: i64) -> Opening {
    let recorded = &source.spans[span].opening;
    let mut opening = Opening { started, ..recorded.clone() };
    let command = patches.command.get(&span);
    match &mut opening.executor {
        Some(Executor::Shell(shell)) => {
            shell.env = patches.environment(source, span, &shell.env);
            let vars: Vec<_> = opening.input_bindings.keys().filter_map(|name| name.strip_prefix("env.").map(str::to_owned)).collect();
            for var in vars {
                let now = shell.env.get(&var);
                let then = match &recorded.executor {
                    Some(Executor::Shell(shell)) => shell.env.get(&var),
                    _ => None,
                };
                if now != then {
                    opening.input_bindings.remove(&format!("env.{var}"));
                }
            }
            if let Some(command) = command {
                command_opening(command, shell, &mut opening.input_bindings);
            }
        }
        Some(Executor::Model { request, .. }) => {
            if let Ok(patched) = Request::build(request, &recorded.input_bindings, Some((patches, span))) {
                opening.input_bindings.retain(|name, _| !name.starts_with('/'));
                opening.input_bindings.extend(patched.bindings());
                *request = patched.into_base();
            }
        }
        _ => {}
    }
    // A declaration that did not hold is not made again.
    if !source.changed(span).outside.is_empty() {
        (opening.reads, opening.writes) = (None, None);
    }
    if let Some(command) = command.filter(|c| c.voids_footprint()) {
        opening.reads = command.reads.clone();
        opening.writes = command.writes.clone();
    }
    opening
}

fn command_opening(command: &CommandPatch, shell: &mut Shell, bindings: &mut BTreeMap<String, Binding>) {
    if command.script.is_some() || command.argv.is_some() {
        (shell.script, shell.argv) = (None, None);
        bindings.remove("script");
        bindings.remove("argv");
    }
    for (name, text, field) in
        [("script", &command.script, &mut shell.script), ("cwd", &command.cwd, &mut shell.cwd), ("stdin", &command.stdin, &mut shell.stdin)]
    {
        if let Some(text) = text {
            bindings.insert(name.to_owned(), Binding::Template(text.clone()));
            *field = Some(text.clone());
        }
    }
    if let Some(argv) = &command.argv {
        bindings.insert("argv".to_owned(), Binding::Argv(argv.clone()));
        shell.argv = Some(argv.clone());
    }
}

/// A patched opening with its executor rendered: what was really executed.
pub fn executed(mut opening: Opening, rendered: &Rendered) -> Opening {
    let text = |name: &str| rendered.get(name).and_then(Value::as_str).map(str::to_owned);
    match &mut opening.executor {
        Some(Executor::Shell(shell)) => {
            *shell = Shell {
                script: text("script"),
                argv: rendered
                    .get("argv")
                    .and_then(Value::as_array)
                    .map(|v| v.iter().filter_map(|a| a.as_str().map(str::to_owned)).collect()),
                cwd: text("cwd"),
                stdin: text("stdin"),
                env: rendered
                    .iter()
                    .filter_map(|(name, value)| Some((name.strip_prefix("env.")?.to_owned(), value.as_str()?.to_owned())))
                    .collect(),
                timeout_ms: shell.timeout_ms,
            };
        }
        Some(Executor::FileWrite { content, .. }) => *content = text("content").unwrap_or_default(),
        Some(Executor::Model { request, .. }) => *request = rendered.get("request").cloned().unwrap_or_default(),
        Some(Executor::FileRead { .. }) | None => {}
    }
    opening
}
