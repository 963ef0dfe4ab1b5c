/** Which pose the character takes for a step: one word per pose, decided by kind, status and verdict. */
import type { SpanKind, SpanSummary } from "../lib/api";

export type Pose =
  | "thinking"
  | "tool"
  | "typing"
  | "reading"
  | "writing"
  | "calling"
  | "asking"
  | "stopped"
  | "tripped"
  | "failing"
  | "done";

const BY_KIND: Record<SpanKind, Pose> = {
  Run: "done",
  PlannerStep: "thinking",
  LlmCall: "calling",
  ToolCall: "tool",
  ShellCommand: "typing",
  FileRead: "reading",
  FileWrite: "writing",
  BrowserAction: "tool",
  Retrieval: "reading",
  MemoryLookup: "reading",
  HumanInput: "asking",
  GuardrailCheck: "stopped",
  Subgraph: "thinking",
  AdapterInternal: "thinking",
};

type Step = Pick<SpanSummary, "kind" | "status" | "verdict" | "name" | "blocked">;

export function pose(step: Step): Pose {
  if (step.verdict === "tripped") return "tripped";
  if (step.status === "Blocked" || step.verdict === "deny" || step.verdict === "gate:deny") return "stopped";
  if (step.status === "Failed" || step.status === "Canceled") return "failing";
  return BY_KIND[step.kind];
}

/** What happens, in one sentence. */
export function caption(step: Step): string {
  const name = step.name;
  if (step.blocked) return `${name} can't run: ${step.blocked.message}`;
  if (step.verdict === "deny" || step.verdict === "gate:deny") return `${name} was denied, and did not run.`;
  if (step.verdict === "tripped") return `${name} tripped a wire.`;
  const doing: Record<SpanKind, string> = {
    Run: "The run",
    PlannerStep: "Making a plan",
    LlmCall: "Asking the model",
    ToolCall: "Using a tool",
    ShellCommand: "Running a command",
    FileRead: "Reading a file",
    FileWrite: "Writing a file",
    BrowserAction: "Acting in the browser",
    Retrieval: "Looking something up",
    MemoryLookup: "Remembering",
    HumanInput: "Asking a person",
    GuardrailCheck: "Checking a guardrail",
    Subgraph: "Going through a part of the graph",
    AdapterInternal: "Working inside the adapter",
  };
  const ended = step.status === "Failed" ? ", and it failed" : step.status === "Canceled" ? ", and it was stopped" : "";
  return `${doing[step.kind]}: ${name}${ended}.`;
}
