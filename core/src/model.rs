//! Runs and spans: what a recorder tells and what a replay needs.
//!
//! A span has two parts, each written once: the [`Opening`], when the step begins, and the [`Closing`], when it
//! has ended. Times are nanoseconds since the Unix epoch.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::Digest;

/// Version of the executor contract: it is part of every input digest, and changes when the meaning of an
/// executor does.
pub const CONTRACT_VERSION: u32 = 1;

macro_rules! named_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $code:tt / $text:tt),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
        pub enum $name { $($(#[$vmeta])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            pub const ALL: &'static [$name] = &[$($name::$variant),+];

            /// The small number under which a database row holds it; never reused for another meaning.
            pub fn code(self) -> i16 {
                match self { $($name::$variant => $code),+ }
            }

            pub fn from_code(code: i16) -> Option<Self> {
                match code { $($code => Some($name::$variant),)+ _ => None }
            }

            pub fn as_str(self) -> &'static str {
                match self { $($name::$variant => $text),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

named_enum! {
    /// What kind of step a span is.
    SpanKind {
        Run = 1 / "Run", PlannerStep = 2 / "PlannerStep", LlmCall = 3 / "LlmCall", ToolCall = 4 / "ToolCall",
        ShellCommand = 5 / "ShellCommand", FileRead = 6 / "FileRead", FileWrite = 7 / "FileWrite",
        BrowserAction = 8 / "BrowserAction", Retrieval = 9 / "Retrieval", MemoryLookup = 10 / "MemoryLookup",
        HumanInput = 11 / "HumanInput", GuardrailCheck = 12 / "GuardrailCheck", Subgraph = 13 / "Subgraph",
        AdapterInternal = 14 / "AdapterInternal",
    }
}

impl SpanKind {
    /// Whether steps of this kind see the workspace unless they say `workspace: none`.
    pub fn sees_workspace(self) -> bool {
        use SpanKind::*;
        !matches!(self, PlannerStep | LlmCall | HumanInput | GuardrailCheck | Retrieval | MemoryLookup)
    }
}

named_enum! {
    /// How a span ended, or that it has not.
    Status {
        Running = 1 / "Running", Completed = 2 / "Completed", Failed = 3 / "Failed", Skipped = 4 / "Skipped",
        Blocked = 5 / "Blocked", Canceled = 6 / "Canceled",
    }
}

named_enum! {
    /// What the permission system said of the step.
    Verdict {
        None = 0 / "none", Allow = 1 / "allow", Deny = 2 / "deny", GateAllow = 3 / "gate:allow",
        GateDeny = 4 / "gate:deny", Tripped = 5 / "tripped", Route = 6 / "route",
    }
}

impl Verdict {
    /// The step was refused, so it did not run when recorded.
    pub fn refuses(self) -> bool {
        matches!(self, Verdict::Deny | Verdict::GateDeny)
    }
}

named_enum! {
    /// Where a span's result in a run comes from.
    Fidelity {
        Recorded = 0 / "Recorded", Reused = 1 / "Reused", Reexecuted = 2 / "Reexecuted", Overridden = 3 / "Overridden",
        ServedFromRecording = 4 / "ServedFromRecording", Blocked = 5 / "Blocked", Skipped = 6 / "Skipped",
    }
}

named_enum! {
    /// When a recorded result may stand for a new execution.
    ReplayPolicy {
        /// Reused on an equal digest, else blocked.
        RecordOnly = 1 / "RecordOnly",
        /// Its own recorded result is reused on an equal digest.
        Rerunnable = 2 / "Rerunnable",
        /// Another fork's result too.
        Cacheable = 3 / "Cacheable",
        /// Cacheable, and sees no workspace.
        Pure = 4 / "Pure",
    }
}

/// What it takes to run a step again. Absent: the step is not executable.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum Executor {
    /// A command: a script for `/bin/sh -c`, or an argument vector.
    Shell(Shell),
    FileRead {
        /// Below the workspace root; absolute, or relative to the root.
        path: String,
    },
    FileWrite {
        path: String,
        #[serde(default)]
        content: String,
        /// Whether the written file has its x bit set.
        #[serde(default)]
        executable: bool,
    },
    /// A call of a model. `request` is the body of a chat completion; bindings named by JSON pointers (RFC 6901) render into it.
    Model {
        provider: String,
        #[serde(default)]
        request: Value,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Shell {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// Working directory, absolute or relative to the workspace root. Default: the root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// The complete environment of the command.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// Milliseconds after which the step is stopped. Default: the fork's own deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

impl Executor {
    pub fn type_name(&self) -> &'static str {
        match self {
            Executor::Shell(_) => "shell",
            Executor::FileRead { .. } => "file_read",
            Executor::FileWrite { .. } => "file_write",
            Executor::Model { .. } => "model",
        }
    }
}

/// A template, or for `argv` one template per argument.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum Binding {
    Template(String),
    Argv(Vec<String>),
}

/// Whether all inputs of a step are known from the record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Inputs {
    #[default]
    Known,
    Unknown,
}

/// What a step may see of the workspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceAccess {
    None,
    Full,
}

/// The part of a span that is known when it begins.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Opening {
    pub name: String,
    pub kind: SpanKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Nanoseconds since the Unix epoch; to a recorder 0 says "now".
    #[serde(default)]
    pub started: i64,
    /// The step's arguments, as its caller gave them: any JSON.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub arguments: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub executor: Option<Executor>,
    /// Templates by the field of the executor that they render (`script`, `argv`, `stdin`, `cwd`, `content`,
    /// `env.NAME`; of a model call's request the place by its JSON pointer, as in `/messages/0/content`); other names only
    /// count as inputs.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub input_bindings: BTreeMap<String, Binding>,
    /// Ids of spans whose outputs this one needs beyond its bindings.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub depends_on: Vec<String>,
    #[serde(default)]
    pub inputs: Inputs,
    /// Paths that the step may read, list or test for; `dir/` is all below. Declared together with `writes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub writes: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<WorkspaceAccess>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay_policy: Option<ReplayPolicy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Names of inputs that were removed before they were recorded.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub redacted: Vec<String>,
    /// The step needs the network: it is run again only where `spec.sandbox.egress` opens some of it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub network: bool,
}

impl Opening {
    /// Whether the step can see the workspace at all.
    pub fn sees_workspace(&self) -> bool {
        self.replay_policy != Some(ReplayPolicy::Pure)
            && match self.workspace {
                Some(WorkspaceAccess::None) => false,
                Some(WorkspaceAccess::Full) => true,
                None => self.kind.sees_workspace(),
            }
    }

    /// The policy in force: Rerunnable with an executor, RecordOnly without, unless recorded otherwise.
    pub fn policy(&self) -> ReplayPolicy {
        self.replay_policy.unwrap_or(match self.executor {
            Some(_) => ReplayPolicy::Rerunnable,
            None => ReplayPolicy::RecordOnly,
        })
    }
}

/// What a step gave, as later steps can use it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Output {
    /// For a command its stdout; for a file read the content.
    #[serde(default)]
    pub text: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stdout: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stderr: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
}

impl Output {
    /// An overridden output: stdout is its text, stderr is empty.
    pub fn overridden(text: &str, exit_code: i32) -> Self {
        Self { text: text.to_owned(), stdout: text.to_owned(), stderr: String::new(), exit_code: Some(exit_code) }
    }

    /// The same output in the form in which outputs of this executor are compared: a command's text is its stdout, and what no text
    /// may hold is U+FFFD, as a sandbox has it.
    #[must_use]
    pub fn normalised(mut self, executor: Option<&Executor>) -> Self {
        for part in [&mut self.text, &mut self.stdout, &mut self.stderr] {
            if part.contains('\0') {
                *part = part.replace('\0', "\u{fffd}");
            }
        }
        match executor {
            Some(Executor::Shell(_)) => {
                if self.stdout.is_empty() {
                    self.stdout = std::mem::take(&mut self.text);
                }
                self.text = self.stdout.clone();
            }
            _ if self.stdout.is_empty() => self.stdout = self.text.clone(),
            _ => {}
        }
        self
    }
}

/// The part of a span that is known when it has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Closing {
    /// Nanoseconds since the Unix epoch; to a recorder 0 says "now".
    #[serde(default)]
    pub ended: i64,
    pub status: Status,
    #[serde(default = "no_verdict")]
    pub verdict: Verdict,
    /// Absent when the step ended without one (a timeout, a failed start).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<Output>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_tokens: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output_tokens: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<f64>,
    /// Why a span of a fork is blocked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<crate::reason::Blocked>,
    /// Of a fork without patches: whether the step gave what it gave when recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reproduced: Option<bool>,
    /// Paths that nobody knows from this blocked span of a fork on: it would have written them. `dir/` is all below.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unknown: Vec<String>,
}

impl Closing {
    /// A closing that says how and when, and nothing else.
    pub fn new(ended: i64, status: Status, output: Option<Output>) -> Self {
        Self {
            ended,
            status,
            verdict: Verdict::None,
            output,
            error: None,
            input_tokens: None,
            output_tokens: None,
            cost_usd: None,
            blocked: Vec::new(),
            reproduced: None,
            unknown: Vec::new(),
        }
    }
}

fn no_verdict() -> Verdict {
    Verdict::None
}

/// A workspace state: `content` says what it is, `node` is the stored tree, modification times included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotRef {
    pub content: Digest,
    pub node: Digest,
}

/// A span of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Span {
    pub id: String,
    /// Place in the run's order: unique in the run with `id`, never changed.
    pub ord: i64,
    pub opening: Opening,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closing: Option<Closing>,
    #[serde(default = "recorded")]
    pub fidelity: Fidelity,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_before: Option<SnapshotRef>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_after: Option<SnapshotRef>,
    /// Start and end in the run that the step was first recorded in, where a fork has run it since, or seen it in another
    /// workspace. They say what it followed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_recorded: Option<(i64, i64)>,
    /// Digest of the inputs that a result of this span belongs to, where it was taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub input_digest: Option<Digest>,
}

fn recorded() -> Fidelity {
    Fidelity::Recorded
}

impl Span {
    pub fn status(&self) -> Status {
        self.closing.as_ref().map_or(Status::Running, |c| c.status)
    }

    pub fn verdict(&self) -> Verdict {
        self.closing.as_ref().map_or(Verdict::None, |c| c.verdict)
    }

    pub fn output(&self) -> Option<&Output> {
        self.closing.as_ref().and_then(|c| c.output.as_ref())
    }

    /// It did not run when recorded. One that a fork blocked was to run.
    pub fn did_not_run(&self) -> bool {
        self.status() == Status::Skipped || (self.verdict().refuses() && self.status() != Status::Blocked)
    }
}

/// What a replay needs to know of a run besides its spans.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RunEnvironment {
    /// Image reference of the agent's container, as written in its pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Absolute path of the workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_root: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub home: Option<String>,
}
