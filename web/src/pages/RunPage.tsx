import { useQuery } from "@tanstack/react-query";
import { useEffect, useMemo, useRef, useState } from "react";
import { api, type Run, type SpanSummary } from "../lib/api";
import { absolute, count, duration, usd } from "../lib/format";
import { go, TABS, type Tab } from "../lib/location";
import { Inspector } from "../parts/Inspector";
import { Link } from "../parts/Link";
import { RunMark } from "../parts/kinds";
import { SpanTree } from "../parts/SpanTree";
import { Stage } from "../parts/Stage";
import { Copy, Failure } from "../parts/States";
import { Timeline } from "../parts/Timeline";

const STEP_MS = 700;
const LONGEST_MS = 4000;
const SHOWN_FORKS = 6;

interface Props {
  namespace: string;
  run: string;
  step: number | null;
  tab: Tab;
}

export function RunPage({ namespace, run: name, step: asked, tab }: Props) {
  const run = useQuery({ queryKey: ["run", namespace, name], queryFn: () => api.run(namespace, name) });
  const live = run.data !== undefined && run.data.state !== "sealed";
  const spans = useQuery({ queryKey: ["spans", namespace, name, run.data?.rev], queryFn: () => api.spans(namespace, name), enabled: run.data !== undefined, placeholderData: (old) => old });
  const forks = useQuery({ queryKey: ["forks", namespace, name], queryFn: () => api.forks(namespace, name), enabled: (run.data?.forks ?? 0) > 0 });
  const refetch = run.refetch;
  useEffect(() => {
    if (!live) return;
    const timer = setInterval(() => void refetch(), 2000);
    return () => clearInterval(timer);
  }, [live, refetch]);
  if (run.error) return <Failure error={run.error} retry={() => void run.refetch()} />;
  if (spans.error && !spans.data) return <Failure error={spans.error} retry={() => void spans.refetch()} />;
  const all = spans.data ?? [];
  const step = Math.min(Math.max(asked ?? firstStep(run.data, all), 1), Math.max(all.length, 1));
  return <Loaded namespace={namespace} name={name} run={run.data} spans={all} forks={forks.data ?? []} step={step} tab={tab} loading={!spans.data} />;
}

/** Where a run opens: at what decides it, or for a fork where it left its source. */
function firstStep(run: Run | undefined, spans: SpanSummary[]): number {
  const deciding = spans.findIndex((span) => span.id === run?.decided_by);
  return run?.forked_from?.step ?? (deciding >= 0 ? deciding + 1 : 1);
}

interface LoadedProps {
  namespace: string;
  name: string;
  run: Run | undefined;
  spans: SpanSummary[];
  forks: Run[];
  step: number;
  tab: Tab;
  loading: boolean;
}

function Loaded({ namespace, name, run, spans, forks, step, tab, loading }: LoadedProps) {
  const [playing, setPlaying] = useState(false);
  const [realTime, setRealTime] = useState(false);
  const [query, setQuery] = useState("");
  const [forking, setForking] = useState(false);
  const search = useRef<HTMLInputElement>(null);
  const show = (to: number, how: "push" | "replace" = "replace") => {
    go({ page: "run", namespace, run: name, step: Math.min(Math.max(to, 1), Math.max(spans.length, 1)), tab }, how);
  };
  const setTab = (next: Tab) => go({ page: "run", namespace, run: name, step, tab: next }, "replace");
  const needle = query.trim().toLowerCase();
  const matches = useMemo(() => (span: SpanSummary) => needle === "" || `${span.name} ${span.kind} ${span.status}`.toLowerCase().includes(needle), [needle]);
  const other = run?.forked_from?.run_name ?? forks.at(-1)?.name;
  const check = run?.fork_end?.reproducibility;
  const compare = () => {
    if (!run || !other) return;
    go(run.forked_from ? { page: "diff", namespace, a: other, b: name, step } : { page: "diff", namespace, a: name, b: other, step: null });
  };

  const span = spans[step - 1];
  useEffect(() => {
    if (!playing) return;
    if (step >= spans.length) {
      setPlaying(false);
      return;
    }
    const length = span?.ended == null ? 0 : (span.ended - span.started) / 1e6;
    const timer = setTimeout(() => show(step + 1), realTime ? Math.min(Math.max(length, 120), LONGEST_MS) : STEP_MS);
    return () => clearTimeout(timer);
  });

  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.target instanceof HTMLInputElement) {
        if (event.key === "Escape") search.current?.blur();
        return;
      }
      if (event.metaKey || event.ctrlKey || event.altKey) return;
      const stride = event.shiftKey ? 10 : 1;
      const acts: Record<string, () => void> = {
        ArrowLeft: () => show(step - stride),
        ArrowRight: () => show(step + stride),
        Home: () => show(1),
        End: () => show(spans.length),
        " ": () => setPlaying((now) => !now),
        "/": () => search.current?.focus(),
        d: compare,
        f: () => setForking((now) => !now),
        Escape: () => setForking(false),
      };
      const numbered = TABS[Number(event.key) - 1];
      const act = acts[event.key] ?? (numbered && (() => setTab(numbered)));
      if (!act || (event.key === " " && event.target instanceof HTMLButtonElement)) return;
      event.preventDefault();
      act();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });

  return (
    <main className="run">
      <div className="run-head">
        <h1>{name}</h1>
        {run && <RunMark run={run} />}
        <span className="facts">
          <span>{run?.agent ?? " "}</span>
          <span>{run?.model ?? ""}</span>
          <span>{count(run?.tokens)} tokens</span>
          <span>{usd(run?.cost_usd)}</span>
          <span title={absolute(run?.started)}>{duration(run?.ended == null ? null : run.ended - run.started)}</span>
        </span>
        <span className="lineage">
          {run?.forked_from && (
            <span className="dim">
              forked from{" "}
              <Link to={{ page: "run", namespace, run: run.forked_from.run_name, step: run.forked_from.step, tab }}>{run.forked_from.run_name}</Link> at step {run.forked_from.step}
            </span>
          )}
          {forks.length > 0 && (
            <span className="dim">
              {forks.length === 1 ? "1 fork" : `${forks.length} forks`}:{" "}
              {forks.slice(-SHOWN_FORKS).map((fork, i) => (
                <span key={fork.id}>
                  {i > 0 && ", "}
                  <Link to={{ page: "diff", namespace, a: name, b: fork.name, step: null }}>{fork.name}</Link>
                </span>
              ))}
              {forks.length > SHOWN_FORKS && (
                <>
                  {" "}
                  and <Link to={{ page: "runs", namespace, query: "" }}>{forks.length - SHOWN_FORKS} more</Link>
                </>
              )}
            </span>
          )}
          {other && (
            <button type="button" onClick={compare}>
              Compare
            </button>
          )}
        </span>
      </div>
      {run?.fork_end && run.fork_end.reason !== "Succeeded" && (
        <div className="note">
          The fork ended as {run.fork_end.reason}: {run.fork_end.message}
        </div>
      )}
      {check && (
        <div className="note">
          A check of the run: {check.identical} identical, {check.differs} different, {check.not_executable} not executable.
        </div>
      )}
      <Stage spans={spans} step={step} playing={playing} />
      <Timeline spans={spans} step={step} onStep={show} />
      <div className="transport">
        <button type="button" onClick={() => setPlaying(!playing)} aria-pressed={playing} disabled={spans.length === 0}>
          {playing ? "❚❚ Pause" : "▶ Play"}
        </button>
        <button type="button" onClick={() => setRealTime(!realTime)} aria-pressed={realTime} title="Steps of equal length, or as long as they took">
          {realTime ? "real time" : "1× step"}
        </button>
        <button type="button" onClick={() => show(step - 1)} disabled={step <= 1} aria-label="Step back">
          ◀
        </button>
        <span className="where">
          {step} of {spans.length}
        </span>
        <button type="button" onClick={() => show(step + 1)} disabled={step >= spans.length} aria-label="Step forward">
          ▶
        </button>
        <span className="grow" />
        <input ref={search} type="search" placeholder="Search steps  /" aria-label="Search steps" value={query} onChange={(event) => setQuery(event.target.value)}
          onKeyDown={(event) => {
            if (event.key !== "Enter") return;
            const next = [...spans.keys()].map((i) => ((i + step) % spans.length) + 1).find((at) => { const found = spans[at - 1]; return found && matches(found); });
            if (next) show(next);
          }}
        />
        <button type="button" onClick={() => setForking(true)} disabled={!span}>
          Fork here
        </button>
      </div>
      <div className="split">
        {loading ? <div className="spans" aria-busy /> : <SpanTree spans={spans} step={step} matches={matches} onStep={show} />}
        {span ? <Inspector key={span.id} namespace={namespace} run={name} summary={span} tab={tab} onTab={setTab} /> : <section className="inspector">{!loading && <p className="pane dim">No step has been recorded yet.</p>}</section>}
      </div>
      {forking && span && <ForkHere run={run} span={span} namespace={namespace} onClose={() => setForking(false)} />}
    </main>
  );
}

/** Forks are made with kubectl, with the rights that the user has there: this gives the manifest. */
function ForkHere({ run, span, namespace, onClose }: { run: Run | undefined; span: SpanSummary; namespace: string; onClose: () => void }) {
  const command = span.kind === "ShellCommand";
  const patch = command
    ? `    - type: EnvVarOverride\n      env: [{name: NAME, value: "value"}]`
    : `    - type: ToolOutputOverride\n      output: {text: "another output"}`;
  const manifest = `apiVersion: replayfork.dev/v1alpha1
kind: ReplayFork
metadata: {name: what-if, namespace: ${namespace || "NAMESPACE"}}
spec:
  source: {run: ${run?.name ?? ""}, span: ${JSON.stringify(span.id)}}
  patches:
${patch}
`;
  return (
    <div className="overlay" role="presentation" onClick={onClose}>
      <div className="dialog" role="dialog" aria-label="Fork here" onClick={(event) => event.stopPropagation()}>
        <h2>Fork at {span.name}</h2>
        <p>Change the patch, then plan and apply it:</p>
        <figure className="text">
          <pre>{manifest}</pre>
        </figure>
        <p>
          <code>kubectl replay plan -f what-if.yaml</code>, then <code>kubectl apply -f what-if.yaml</code>
        </p>
        <Copy text={manifest}>Copy the manifest</Copy>{" "}
        <button type="button" onClick={onClose} autoFocus>
          Close
        </button>
      </div>
    </div>
  );
}
