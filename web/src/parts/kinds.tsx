/** Kinds and states, each with a glyph and a word, so that no meaning rests on colour alone. */
import type { Fidelity, Run, SpanKind, Status } from "../lib/api";

interface KindLook {
  glyph: string;
  hue: string;
  word: string;
}

export const KINDS: Record<SpanKind, KindLook> = {
  Run: { glyph: "◎", hue: "var(--kind-run)", word: "Run" },
  PlannerStep: { glyph: "◇", hue: "var(--kind-think)", word: "Plan" },
  LlmCall: { glyph: "≋", hue: "var(--kind-model)", word: "Model call" },
  ToolCall: { glyph: "⚒", hue: "var(--kind-tool)", word: "Tool" },
  ShellCommand: { glyph: "❯", hue: "var(--kind-shell)", word: "Command" },
  FileRead: { glyph: "▤", hue: "var(--kind-read)", word: "Read" },
  FileWrite: { glyph: "✎", hue: "var(--kind-write)", word: "Write" },
  BrowserAction: { glyph: "⌖", hue: "var(--kind-tool)", word: "Browser" },
  Retrieval: { glyph: "⌕", hue: "var(--kind-read)", word: "Retrieval" },
  MemoryLookup: { glyph: "❖", hue: "var(--kind-read)", word: "Memory" },
  HumanInput: { glyph: "☺", hue: "var(--kind-human)", word: "Person" },
  GuardrailCheck: { glyph: "⛊", hue: "var(--kind-gate)", word: "Guardrail" },
  Subgraph: { glyph: "▣", hue: "var(--kind-run)", word: "Subgraph" },
  AdapterInternal: { glyph: "·", hue: "var(--kind-run)", word: "Internal" },
};

export const STATUS_GLYPH: Record<Status, string> = {
  Running: "…",
  Completed: "✓",
  Failed: "✗",
  Skipped: "–",
  Blocked: "⊘",
  Canceled: "◼",
};

export function StatusMark({ status, word = true }: { status: Status; word?: boolean }) {
  return (
    <span className={`status status-${status.toLowerCase()}`} title={word ? undefined : status}>
      <span aria-hidden={word}>{STATUS_GLYPH[status]}</span>
      {word ? ` ${status}` : <span className="sr">{status}</span>}
    </span>
  );
}

/** What became of a run: its outcome, or why a fork has none. */
export function RunMark({ run }: { run: Run }) {
  if (run.outcome) return <StatusMark status={run.outcome} />;
  if (run.state !== "sealed") return <span>● recording</span>;
  if (!run.fork_end) return <span>–</span>;
  return (
    <span className="status status-canceled" title={run.fork_end.message}>
      <span aria-hidden>{STATUS_GLYPH.Canceled}</span> {run.fork_end.reason}
    </span>
  );
}

export function KindMark({ kind, word = false }: { kind: SpanKind; word?: boolean }) {
  const look = KINDS[kind];
  return (
    <span className="kind" style={{ color: look.hue }} title={look.word}>
      <span aria-hidden>{look.glyph}</span>
      {word ? ` ${look.word}` : <span className="sr">{look.word}</span>}
    </span>
  );
}

/** What became of a step in a fork. */
export const FIDELITY_WORD: Record<Fidelity, string> = {
  Recorded: "as recorded",
  Reused: "reused",
  Reexecuted: "ran again",
  Overridden: "overridden",
  ServedFromRecording: "served from the recording",
  Blocked: "blocked",
  Skipped: "not reached",
};

/** What a fork made of a step; in a check of a run, whether it gave what it gave when recorded. */
export function fate({ fidelity, reproduced }: { fidelity: Fidelity; reproduced?: boolean | null }) {
  if (reproduced == null) return FIDELITY_WORD[fidelity];
  return reproduced ? "identical" : "differs";
}
