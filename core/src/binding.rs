//! Bindings: templates whose holes are the outputs of earlier spans.
//!
//! The language is minijinja's expressions in `{{ }}` and nothing else: no statements, no comments, no includes. `{{ name }}`
//! is the text of the nearest earlier span of that name, `{{ spans["id"].exit_code }}` a field of a span by id.
//! Fields: `text`, `stdout`, `stderr`, `exit_code`, `status`, `json`. Filters of ours: `words`, `lines`, `json`,
//! `trim`, `quote`; in an argument vector, an argument that is one expression with a list as its value is spliced.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use minijinja::machinery::Token;
use minijinja::machinery::ast::{CallArg, Expr, Stmt};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Object, ObjectRepr, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior};

use crate::model::{Binding, Output, Status};

/// Instructions that one template may take (minijinja's fuel).
pub const FUEL: u64 = 200_000;
/// Bytes that one rendered template may have.
pub const MAX_RENDERED: usize = 16 << 20;
/// Bytes that one template may have.
pub const MAX_TEMPLATE: usize = 1 << 20;

/// Words and signs that one expression may have.
const MAX_TOKENS: usize = 250;

/// What a hole refers to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Hole {
    Name(String),
    Id(String),
}

impl fmt::Display for Hole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Hole::Name(name) => f.write_str(name),
            Hole::Id(id) => write!(f, "spans[{id:?}]"),
        }
    }
}

/// A template that can't be read or rendered, with a caret at the place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}\n  {line}\n  {caret}")]
pub struct BindingError {
    pub message: String,
    line: String,
    caret: String,
}

impl BindingError {
    fn at(source: &str, offset: usize, message: impl Into<String>) -> Self {
        let offset = (0..=offset.min(source.len())).rev().find(|&i| source.is_char_boundary(i)).unwrap_or(0);
        let start = source[..offset].rfind('\n').map_or(0, |i| i + 1);
        let line: String = source[start..].lines().next().unwrap_or("").chars().take(200).collect();
        let column = source[start..offset].chars().count().min(200);
        Self { message: message.into(), line, caret: format!("{}^", " ".repeat(column)) }
    }

    fn from_minijinja(source: &str, error: &Error) -> Self {
        Self::of_rendering(source, &Found::default(), error)
    }

    fn of_rendering(source: &str, found: &Found, error: &Error) -> Self {
        let offset = error.range().map_or(0, |r| found.place(r.start));
        let what = error.detail().map_or_else(|| error.kind().to_string(), |d| format!("{}: {d}", error.kind()));
        Self::at(source, offset, what)
    }
}

/// The templates of a binding, in order.
pub fn templates(binding: &Binding) -> Vec<&str> {
    match binding {
        Binding::Template(t) => vec![t],
        Binding::Argv(items) => items.iter().map(String::as_str).collect(),
    }
}

/// The holes of a template.
///
/// # Errors
/// A template that does not parse, has statements, or uses `spans` in another way than `spans["id"]`.
pub fn holes(source: &str) -> Result<BTreeSet<Hole>, BindingError> {
    Ok(found(source)?.holes)
}

/// What a template refers to.
#[derive(Default)]
struct Found {
    holes: BTreeSet<Hole>,
    /// Where the spans end that stand for themselves, and none of their fields.
    bare: BTreeSet<usize>,
}

/// What makes a span that stands for itself its text, in filters, comparisons and tests too.
const TEXT: &str = ".text";

impl Found {
    /// A hole, and whether no field of it is asked for.
    fn hole(&mut self, expr: &Expr<'_>, hole: Hole, bare: bool) {
        self.holes.insert(hole);
        if bare {
            self.bare.insert(expr.span().end_offset as usize);
        }
    }

    /// The template with each span that stands for itself as its text.
    fn with_texts<'s>(&self, source: &'s str) -> Cow<'s, str> {
        let (mut whole, mut from) = (String::new(), 0);
        for &at in &self.bare {
            whole.push_str(&source[from..at]);
            whole.push_str(TEXT);
            from = at;
        }
        if from == 0 { Cow::Borrowed(source) } else { Cow::Owned(whole + &source[from..]) }
    }

    /// Of a place in that, the place in the template.
    fn place(&self, at: usize) -> usize {
        let before = self.bare.iter().enumerate().filter(|(n, bare)| **bare + n * TEXT.len() < at).count();
        at.saturating_sub(before * TEXT.len())
    }
}

fn found(source: &str) -> Result<Found, BindingError> {
    if source.len() > MAX_TEMPLATE {
        return Err(BindingError::at(source, 0, format!("a template has at most {MAX_TEMPLATE} bytes, this one {}", source.len())));
    }
    check_size(source)?;
    let parsed = minijinja::machinery::parse(source, "binding", syntax()).map_err(|e| BindingError::from_minijinja(source, &e))?;
    let Stmt::Template(template) = parsed else {
        return Err(BindingError::at(source, 0, "not a template"));
    };
    let mut found = Found::default();
    for child in &template.children {
        match child {
            Stmt::EmitRaw(_) => {}
            Stmt::EmitExpr(emit) => walk(source, &emit.expr, &mut found)?,
            _ => {
                let at = source.find("{%").unwrap_or(0);
                return Err(BindingError::at(source, at, "statements are not part of the binding language, only {{ expressions }}"));
            }
        }
    }
    Ok(found)
}

/// Whether rendering can't fail once every hole has a value: plain holes, their fields and filters that take any text.
pub fn always_renders(source: &str) -> bool {
    let Ok(Stmt::Template(template)) = minijinja::machinery::parse(source, "binding", syntax()) else { return false };
    template.children.iter().all(|child| match child {
        Stmt::EmitRaw(_) => true,
        Stmt::EmitExpr(emit) => is_plain(&emit.expr),
        _ => false,
    })
}

fn is_plain(expr: &Expr<'_>) -> bool {
    match expr {
        Expr::Var(_) => true,
        Expr::Const(_) => true,
        Expr::GetItem(item) => matches!(&item.expr, Expr::Var(var) if var.id == "spans"),
        Expr::GetAttr(attr) => is_plain(&attr.expr) && ["text", "stdout", "stderr", "exit_code", "status"].contains(&attr.name),
        Expr::Filter(filter) => {
            let takes_any = ["words", "lines", "trim", "quote"].contains(&filter.name) && filter.args.is_empty();
            takes_any && filter.expr.as_ref().is_some_and(is_plain)
        }
        _ => false,
    }
}

/// Counts the tokens of each expression before it is parsed: parser, evaluator and destructor go down one level of the stack for
/// each operator of a chain, so an expression must be bounded by more than its nesting.
fn check_size(source: &str) -> Result<(), BindingError> {
    let mut tokens = 0;
    for token in minijinja::machinery::tokenize(source, false, syntax()) {
        let (token, span) = token.map_err(|e| BindingError::from_minijinja(source, &e))?;
        match token {
            Token::TemplateData(_) | Token::VariableStart | Token::VariableEnd => tokens = 0,
            _ => tokens += 1,
        }
        if tokens > MAX_TOKENS {
            let at = span.start_offset as usize;
            return Err(BindingError::at(
                source,
                at,
                format!("an expression has at most {MAX_TOKENS} words and signs; this one goes on here"),
            ));
        }
    }
    Ok(())
}

fn walk(source: &str, expr: &Expr<'_>, found: &mut Found) -> Result<(), BindingError> {
    walk_part(source, expr, true, found)
}

/// `bare`: no field of the expression's value is asked for.
fn walk_part(source: &str, expr: &Expr<'_>, bare: bool, found: &mut Found) -> Result<(), BindingError> {
    let at = |message: &str| Err(BindingError::at(source, expr.span().start_offset as usize, message));
    if let Expr::GetItem(item) = expr
        && let Expr::Var(var) = &item.expr
        && var.id == "spans"
    {
        return match &item.subscript_expr {
            Expr::Const(id) if id.value.as_str().is_some() => {
                found.hole(expr, Hole::Id(id.value.as_str().unwrap_or_default().to_owned()), bare);
                Ok(())
            }
            _ => at("spans[…] takes a span id in quotes, so that the dependency is known before anything runs"),
        };
    }
    let mut all = |exprs: &[&Expr<'_>]| exprs.iter().try_for_each(|e| walk(source, e, found));
    let args = |args: &[CallArg<'_>], found: &mut Found| {
        args.iter().try_for_each(|arg| match arg {
            CallArg::Pos(e) | CallArg::Kwarg(_, e) | CallArg::PosSplat(e) | CallArg::KwargSplat(e) => walk(source, e, found),
        })
    };
    match expr {
        Expr::Var(var) if var.id == "spans" => at("`spans` is used as spans[\"id\"]"),
        Expr::Var(var) => {
            found.hole(expr, Hole::Name(var.id.to_owned()), bare);
            Ok(())
        }
        Expr::Const(_) => Ok(()),
        Expr::UnaryOp(e) => all(&[&e.expr]),
        Expr::BinOp(e) => all(&[&e.left, &e.right]),
        Expr::Compare(e) => {
            all(&[&e.expr])?;
            e.ops.iter().try_for_each(|op| walk(source, &op.expr, found))
        }
        Expr::IfExpr(e) => {
            all(&[&e.test_expr, &e.true_expr])?;
            e.false_expr.iter().try_for_each(|e| walk(source, e, found))
        }
        Expr::Filter(e) => {
            e.expr.iter().try_for_each(|e| walk(source, e, found))?;
            args(&e.args, found)
        }
        Expr::Test(e) => {
            all(&[&e.expr])?;
            args(&e.args, found)
        }
        Expr::GetAttr(e) => walk_part(source, &e.expr, false, found),
        Expr::GetItem(e) => {
            let is_field = matches!(&e.subscript_expr, Expr::Const(key) if key.value.as_str().is_some());
            walk_part(source, &e.expr, !is_field, found)?;
            walk(source, &e.subscript_expr, found)
        }
        Expr::Slice(e) => {
            all(&[&e.expr])?;
            [&e.start, &e.stop, &e.step].into_iter().flatten().try_for_each(|e| walk(source, e, found))
        }
        Expr::Call(_) => at("functions are not part of the binding language"),
        Expr::List(e) => e.items.iter().try_for_each(|e| walk(source, e, found)),
        Expr::Tuple(e) => e.items.iter().try_for_each(|e| walk(source, e, found)),
        Expr::Map(e) => e.keys.iter().chain(&e.values).try_for_each(|e| walk(source, e, found)),
    }
}

/// A span's output as a template sees it.
#[derive(Clone, Debug)]
pub struct SpanValue {
    pub output: Output,
    pub status: Status,
}

impl fmt::Display for SpanValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.output.text)
    }
}

impl Object for SpanValue {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        Some(match key.as_str()? {
            "text" => Value::from(self.output.text.clone()),
            "stdout" => Value::from(self.output.stdout.clone()),
            "stderr" => Value::from(self.output.stderr.clone()),
            "exit_code" => self.output.exit_code.map_or(Value::from(()), Value::from),
            "status" => Value::from(self.status.as_str()),
            "json" => serde_json::from_str::<serde_json::Value>(&self.output.text).ok().map(|v| Value::from(minijinja::value::Serde(v)))?,
            _ => return None,
        })
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.output.text)
    }
}

/// Words that are quoted for the shell where they become text, and stay a list in an argument vector.
#[derive(Debug)]
struct Words(Vec<String>);

impl Object for Words {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).map(|w| Value::from(w.clone()))
    }

    fn enumerate(self: &Arc<Self>) -> minijinja::value::Enumerator {
        minijinja::value::Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, word) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(" ")?;
            }
            f.write_str(&quote(word))?;
        }
        Ok(())
    }
}

/// Quotes a word for a POSIX shell; words of harmless characters stay as they are.
pub fn quote(word: &str) -> String {
    let harmless = |c: char| c.is_ascii_alphanumeric() || "_-./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(harmless) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// A value as text: what came out of JSON is written as JSON.
fn text(value: &Value) -> String {
    let json = match value.kind() {
        ValueKind::Bool | ValueKind::None | ValueKind::Map => true,
        ValueKind::Seq => value.downcast_object_ref::<Words>().is_none(),
        _ => false,
    };
    let written = json.then(|| serde_json::to_string(value).ok()).flatten();
    written.unwrap_or_else(|| value.to_string())
}

/// What a template says is what is rendered: a final newline too.
fn syntax() -> SyntaxConfig {
    SyntaxConfig::builder().keep_trailing_newline(true).build().expect("the default delimiters are valid")
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_undefined_behavior(UndefinedBehavior::Strict);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_syntax(syntax());
    env.set_fuel(Some(FUEL));
    env.set_formatter(|out, _, value| Ok(out.write_str(&text(value))?));
    env.add_filter("words", |v: Value| {
        let words = match v.kind() {
            ValueKind::Seq => v.try_iter()?.map(|w| text(&w)).collect(),
            _ => text(&v).split_whitespace().map(str::to_owned).collect(),
        };
        Ok::<_, Error>(Value::from_object(Words(words)))
    });
    env.add_filter("lines", |v: Value| Value::from(text(&v).lines().map(str::to_owned).collect::<Vec<_>>()));
    env.add_filter("json", |v: Value| {
        serde_json::from_str::<serde_json::Value>(&text(&v))
            .map(|v| Value::from(minijinja::value::Serde(v)))
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("the text is no JSON: {e}")))
    });
    env.add_filter("trim", |v: Value| text(&v).trim().to_owned());
    env.add_filter("quote", |v: Value| quote(&text(&v)));
    env
}

/// Renders templates against the outputs that `resolve` gives.
pub struct Renderer<'a> {
    env: Environment<'static>,
    resolve: &'a dyn Fn(&Hole) -> Result<SpanValue, String>,
}

impl<'a> Renderer<'a> {
    /// `resolve` says what a hole is, or why it is nothing.
    pub fn new(resolve: &'a dyn Fn(&Hole) -> Result<SpanValue, String>) -> Self {
        Self { env: environment(), resolve }
    }

    fn context(&self, source: &str) -> Result<(Value, Found), BindingError> {
        let mut names = std::collections::BTreeMap::new();
        let mut ids = std::collections::BTreeMap::new();
        let found = found(source)?;
        for hole in &found.holes {
            let value = (self.resolve)(hole).map_err(|why| {
                let needle = match hole {
                    Hole::Name(n) | Hole::Id(n) => n,
                };
                let expression = source.find("{{").unwrap_or(0);
                BindingError::at(source, source[expression..].find(needle.as_str()).map_or(0, |i| expression + i), why)
            })?;
            match hole {
                Hole::Name(name) => names.insert(name.clone(), Value::from_object(value)),
                Hole::Id(id) => ids.insert(id.clone(), Value::from_object(value)),
            };
        }
        names.insert("spans".to_owned(), Value::from_pairs(ids));
        Ok((Value::from_pairs(names), found))
    }

    /// Renders one template to text.
    ///
    /// # Errors
    /// What [`holes`] refuses, a hole without a value, a failing filter, fuel or size exhausted.
    pub fn render(&self, source: &str) -> Result<String, BindingError> {
        let (context, found) = self.context(source)?;
        let rendered = self.env.render_str(&found.with_texts(source), context);
        let rendered = rendered.map_err(|e| BindingError::of_rendering(source, &found, &e))?;
        if rendered.len() > MAX_RENDERED {
            return Err(BindingError::at(
                source,
                0,
                format!("the rendered text has {} bytes, at most {MAX_RENDERED} are allowed", rendered.len()),
            ));
        }
        Ok(rendered)
    }

    /// Renders an argument vector; an argument that is one expression with a list as value is spliced.
    ///
    /// # Errors
    /// As [`Renderer::render`].
    pub fn render_argv(&self, items: &[String]) -> Result<Vec<String>, BindingError> {
        let mut argv = Vec::new();
        for source in items {
            let is_one = |text: &str| text.trim().strip_prefix("{{")?.strip_suffix("}}").filter(|s| !s.contains("{{")).map(str::to_owned);
            if is_one(source).is_none() {
                argv.push(self.render(source)?);
                continue;
            }
            let (context, found) = self.context(source)?;
            let expression = is_one(&found.with_texts(source)).unwrap_or_default();
            let value = self
                .env
                .compile_expression(&expression)
                .and_then(|e| e.eval(context))
                .map_err(|e| BindingError::of_rendering(source, &found, &e))?;
            match value.kind() {
                ValueKind::Seq | ValueKind::Iterable => {
                    let items = value.try_iter().map_err(|e| BindingError::from_minijinja(source, &e))?;
                    argv.extend(items.map(|v| text(&v)));
                }
                _ => argv.push(text(&value)),
            }
        }
        Ok(argv)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(text: &str, exit_code: i32) -> SpanValue {
        SpanValue { output: Output::overridden(text, exit_code), status: Status::Completed }
    }

    fn render(source: &str) -> Result<String, BindingError> {
        let resolve = |hole: &Hole| match hole.to_string().as_str() {
            "tests" => Ok(span("test_a  it's\ntest_b", 0)),
            r#"spans["s-1"]"# => Ok(span(r#"{"n": [1, 2.5, null]}"#, 3)),
            other => Err(format!("no earlier span is called {other}")),
        };
        Renderer::new(&resolve).render(source)
    }

    #[test]
    fn fields_and_filters_render() {
        for (source, want) in [
            ("run {{ tests | words }}", r"run test_a 'it'\''s' test_b"),
            ("{{ spans['s-1'].exit_code + 1 }}", "4"),
            ("{{ spans['s-1'].json.n[1] }}", "2.5"),
            // As JSON, not as the template language writes them.
            ("{{ spans['s-1'].json }} {{ spans['s-1'].json.n[2] }} {{ 1 == 1 }}", r#"{"n":[1,2.5,null]} null true"#),
            ("{{ tests | lines }}", r#"["test_a  it's","test_b"]"#),
            ("{{ (tests | lines)[1] }}", "test_b"),
            ("{{ tests | trim | quote }}", "'test_a  it'\\''s\ntest_b'"),
            // A name is a text, whatever is done with it.
            ("{{ 'few' if tests | length < 100 else 'many' }} {{ tests | upper }} {{ tests[:6] }}", "few TEST_A  IT'S\nTEST_B test_a"),
            ("{{ tests == \"test_a  it's\ntest_b\" }} {{ 'test' in tests }} {{ tests is string }}", "true true true"),
            ("{{ spans['s-1'] | length }} {{ tests['exit_code'] }} {{ tests.status }}", "21 0 Completed"),
            ("no holes, one newline\n", "no holes, one newline\n"),
            ("{{ '{{' }}.State}}", "{{.State}}"),
        ] {
            assert_eq!(render(source).unwrap(), want, "{source}");
        }
    }

    #[test]
    fn lists_splice_into_argument_vectors_and_other_values_do_not() {
        let resolve = |_: &Hole| Ok(span("a 'b c", 0));
        let argv = Renderer::new(&resolve).render_argv(&[
            "run".into(),
            "{{ x | words }}".into(),
            "{{ x }}".into(),
            "--n={{ x.exit_code }}".into(),
        ]);
        assert_eq!(argv.unwrap(), ["run", "a", "'b", "c", "a 'b c", "--n=0"]);
    }

    #[test]
    fn errors_show_the_template_with_a_caret_at_the_place() {
        let error = render("run {{ nobody }} now").unwrap_err().to_string();
        assert_eq!(error, "no earlier span is called nobody\n  run {{ nobody }} now\n         ^");
        assert!(render("x {{ tests | nofilter }}").unwrap_err().to_string().contains("nofilter"));
        let error = render("{{ tests }} {{ tests | lines | first | json }}").unwrap_err().to_string();
        assert!(
            error.ends_with("\n  {{ tests }} {{ tests | lines | first | json }}\n                                         ^"),
            "{error}"
        );
        assert!(render("{% for x in tests %}{{ x }}{% endfor %}").unwrap_err().message.contains("statements"));
        assert!(render("{{ spans[tests] }}").unwrap_err().message.contains("in quotes"));
        assert!(render("{{ range(9) }}").unwrap_err().message.contains("functions"));
    }

    #[test]
    fn no_expression_is_so_long_that_it_eats_the_stack() {
        let chains = [
            format!("{{{{ {}1 }}}}", "-".repeat(60_000)),
            format!("{{{{ 1{} }}}}", "+1".repeat(60_000)),
            format!("{{{{ \"a\"{} }}}}", "|trim".repeat(12_000)),
            format!("{{{{ tests{} }}}}", ".text".repeat(12_000)),
            format!("{{{{ \"}}}}\"{} }}}}", " ~ \"}}\"".repeat(12_000)),
            format!("{{{{ {}1{} }}}}", "(".repeat(9_000), ")".repeat(9_000)),
        ];
        for chain in &chains {
            // A worker's stack, which is smaller than a test's own.
            let error = std::thread::scope(|s| {
                let small = std::thread::Builder::new().stack_size(1 << 20);
                small.spawn_scoped(s, || render(chain)).unwrap().join().unwrap().unwrap_err()
            });
            assert!(error.message.contains("at most 250"), "{}", error.message);
        }
        let long_but_fine = format!("{{{{ 1{} }}}}", "+1".repeat(100));
        assert_eq!(render(&long_but_fine).unwrap(), "101");
    }

    #[test]
    fn holes_are_known_without_rendering() {
        let found = holes("{{ a.exit_code }} {{ spans['b'].text ~ c }}").unwrap();
        assert_eq!(found.iter().map(Hole::to_string).collect::<Vec<_>>(), ["a", "c", r#"spans["b"]"#]);
    }
}
