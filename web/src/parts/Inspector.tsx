import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { api, type Span, type SpanDetail, type SpanSummary } from "../lib/api";
import { absolute, count, duration, tokens, usd } from "../lib/format";
import { TABS, type Tab } from "../lib/location";
import { Files } from "./Files";
import { fate, KindMark, StatusMark } from "./kinds";
import { Failure, LongText } from "./States";

interface Props {
  namespace: string;
  run: string;
  summary: SpanSummary;
  tab: Tab;
  onTab: (tab: Tab) => void;
}

const TITLES: Record<Tab, string> = { overview: "Overview", input: "Input", output: "Output", workspace: "Workspace", raw: "Raw" };

export function Inspector({ namespace, run, summary, tab, onTab }: Props) {
  const query = useQuery({ queryKey: ["span", namespace, run, summary.id, summary.status], queryFn: () => api.span(namespace, run, summary.id) });
  return (
    <section className="inspector" aria-label="Inspector">
      <div className="tabs" role="tablist">
        {TABS.map((name) => (
          <button type="button" key={name} role="tab" aria-selected={tab === name} onClick={() => onTab(name)}>
            {TITLES[name]}
          </button>
        ))}
      </div>
      <div className="pane" role="tabpanel" aria-label={TITLES[tab]}>
        {tab === "overview" && <Overview summary={summary} detail={query.data} />}
        {tab !== "overview" && query.error && <Failure error={query.error} retry={() => void query.refetch()} />}
        {tab !== "overview" && !query.error && !query.data && <div className="skeleton" style={{ width: 240 }} />}
        {query.data && tab === "input" && <Input span={query.data.span} />}
        {query.data && tab === "output" && <OutputPane span={query.data.span} />}
        {query.data && tab === "workspace" && <WorkspacePane namespace={namespace} run={run} detail={query.data} />}
        {query.data && tab === "raw" && <LongText label="As recorded" text={JSON.stringify(query.data, null, 2)} />}
      </div>
    </section>
  );
}

function Overview({ summary, detail }: { summary: SpanSummary; detail: SpanDetail | undefined }) {
  const closing = detail?.span.closing;
  const length = summary.ended == null || summary.blocked ? null : summary.ended - summary.started;
  return (
    <>
      {(closing?.blocked ?? (summary.blocked ? [summary.blocked] : [])).map((blocked, i) => (
        <div className="note" key={i}>
          <span className="chip blocked">{blocked.reason}</span> {blocked.message}
        </div>
      ))}
      {closing?.error && <div className="note">{closing.error}</div>}
      <dl className="fields">
        <dt>Span</dt>
        <dd>{summary.name}</dd>
        <dt>Kind</dt>
        <dd>
          <KindMark kind={summary.kind} word />
        </dd>
        <dt>Status</dt>
        <dd>
          <StatusMark status={summary.status} />
        </dd>
        <dt>Verdict</dt>
        <dd>{summary.verdict === "none" ? "–" : summary.verdict}</dd>
        {summary.fidelity !== "Recorded" && (
          <>
            <dt>In this fork</dt>
            <dd>{fate(summary)}</dd>
          </>
        )}
        <dt>Duration</dt>
        <dd>{duration(length)}</dd>
        <dt>Started</dt>
        <dd>{absolute(summary.started)}</dd>
        <dt>Exit code</dt>
        <dd>{closing?.output?.exit_code ?? "–"}</dd>
        <dt>Model</dt>
        <dd>{summary.model ?? "–"}</dd>
        <dt>Tokens</dt>
        <dd>
          {count(tokens(summary.input_tokens, summary.output_tokens))}
          {summary.input_tokens != null && ` (${count(summary.input_tokens)} in, ${count(summary.output_tokens)} out)`}
        </dd>
        <dt>Cost</dt>
        <dd>{usd(summary.cost_usd)}</dd>
        <dt>Id</dt>
        <dd>
          <code>{summary.id}</code>
        </dd>
      </dl>
    </>
  );
}

function text(value: unknown): string {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

function Input({ span }: { span: Span }) {
  const { opening } = span;
  const executor = opening.executor;
  const parts: [string, unknown][] = [];
  if (executor?.type === "shell") {
    if (executor.script) parts.push(["Script", executor.script]);
    if (executor.argv) parts.push(["Arguments", executor.argv]);
    if (executor.stdin) parts.push(["Standard input", executor.stdin]);
    parts.push(["Environment", Object.entries(executor.env ?? {}).map(([k, v]) => `${k}=${v}`).join("\n")]);
  } else if (executor?.type === "file_write") {
    parts.push(["Path", executor.path], ["Content", executor.content ?? ""]);
  } else if (executor?.type === "file_read") {
    parts.push(["Path", executor.path]);
  } else if (executor?.type === "model") {
    parts.push(["Request", executor.request]);
  }
  if (opening.arguments != null) parts.push(["Arguments of the call", opening.arguments]);
  for (const [name, binding] of Object.entries(opening.input_bindings ?? {})) parts.push([`Bound: ${name}`, binding]);
  if (opening.reads) parts.push(["Reads", opening.reads.join("\n") || "nothing"]);
  if (opening.writes) parts.push(["Writes", opening.writes.join("\n") || "nothing"]);
  if (parts.length === 0) return <p className="dim">This step was recorded without inputs.</p>;
  return parts.map(([label, value]) => <LongText key={label} label={label} text={text(value)} />);
}

function OutputPane({ span }: { span: Span }) {
  const output = span.closing?.output;
  if (!output) return <p className="dim">{span.closing ? "This step ended without an output." : "This step has not ended."}</p>;
  const { stdout = "", stderr = "" } = output;
  return (
    <>
      {output.exit_code != null && <p>Exit code {output.exit_code}</p>}
      <LongText label={stdout === output.text && output.exit_code != null ? "Standard output" : "Text"} text={output.text ?? ""} />
      {stdout && stdout !== output.text && <LongText label="Standard output" text={stdout} />}
      {stderr && <LongText label="Standard error" text={stderr} />}
    </>
  );
}

function WorkspacePane({ namespace, run, detail }: { namespace: string; run: string; detail: SpanDetail }) {
  const { snapshot_before: before, snapshot_after: after } = detail.span;
  const [side, setSide] = useState<"before" | "after">("after");
  const shown = side === "after" ? (after ?? before) : (before ?? after);
  if (!shown) return <p className="dim">{detail.snapshots_missing?.join("; ") || "No workspace state was recorded around this step."}</p>;
  return (
    <>
      <div className="chooser">
        {(["before", "after"] as const).map((name) => (
          <button type="button" key={name} aria-pressed={shown === (name === "after" ? after : before)} disabled={!(name === "after" ? after : before)} onClick={() => setSide(name)}>
            {name === "after" ? "After the step" : "Before the step"}
          </button>
        ))}
        {before && after && <span className="dim">{before.content === after.content ? "the step changed nothing" : "the step changed files"}</span>}
      </div>
      <Files key={shown.node} namespace={namespace} run={run} digest={shown.node} />
    </>
  );
}
