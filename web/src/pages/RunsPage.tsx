import { useInfiniteQuery } from "@tanstack/react-query";
import { useEffect, useRef } from "react";
import { RunMark } from "../parts/kinds";
import { Link } from "../parts/Link";
import { Copy, Failure } from "../parts/States";
import { api, type Run } from "../lib/api";
import { absolute, ago, count, duration } from "../lib/format";
import { go } from "../lib/location";

const FIRST_RUN = "kubectl apply -f examples/scripted-agent/pod.yaml";

/** Forks behind the run that they come from, where that is in the list. */
export function nested(runs: Run[]): { run: Run; below: boolean }[] {
  const ids = new Set(runs.map((run) => run.id));
  const forks = new Map<string, Run[]>();
  for (const run of runs) {
    const source = run.forked_from?.run;
    if (source && ids.has(source)) forks.set(source, [...(forks.get(source) ?? []), run]);
  }
  return runs
    .filter((run) => !(run.forked_from && ids.has(run.forked_from.run)))
    .flatMap((run) => [{ run, below: false }, ...(forks.get(run.id) ?? []).map((fork) => ({ run: fork, below: true }))]);
}

export function RunsPage({ namespace, query }: { namespace: string; query: string }) {
  const search = useRef<HTMLInputElement>(null);
  const runs = useInfiniteQuery({
    queryKey: ["runs", namespace, query],
    queryFn: ({ pageParam }) => api.runs(namespace, query, pageParam),
    initialPageParam: undefined as string | undefined,
    getNextPageParam: (page) => page.next ?? undefined,
    refetchInterval: 10_000,
  });
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.key === "/" && event.target !== search.current) {
        event.preventDefault();
        search.current?.focus();
      }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  const all = runs.data?.pages.flatMap((page) => page.runs) ?? [];
  return (
    <main className="page">
      <div className="tools">
        <h1>Runs</h1>
        <input
          ref={search}
          type="search"
          placeholder="Search by name  /"
          aria-label="Search by name"
          value={query}
          onChange={(event) => go({ page: "runs", namespace, query: event.target.value }, "replace")}
        />
      </div>
      {runs.error && <Failure error={runs.error} retry={() => void runs.refetch()} />}
      {!runs.error && runs.data && all.length === 0 && <Empty namespace={namespace} query={query} />}
      {(all.length > 0 || runs.isPending) && (
        <table className="runs">
          <thead>
            <tr>
              <th>Status</th>
              <th>Name</th>
              <th>Agent</th>
              <th className="number">Steps</th>
              <th>When</th>
              <th className="number">Duration</th>
              <th className="number">Tokens</th>
              <th>Forked from</th>
            </tr>
          </thead>
          <tbody>
            {runs.isPending &&
              Array.from({ length: 6 }, (_, i) => (
                <tr key={i}>
                  <td colSpan={8}>
                    <div className="skeleton" style={{ width: `${70 - i * 6}%` }} />
                  </td>
                </tr>
              ))}
            {nested(all).map(({ run, below }) => (
              <Row key={run.id} run={run} below={below} namespace={namespace} />
            ))}
          </tbody>
        </table>
      )}
      {runs.hasNextPage && (
        <p>
          <button type="button" disabled={runs.isFetchingNextPage} onClick={() => void runs.fetchNextPage()}>
            {runs.isFetchingNextPage ? "Loading…" : "Show older runs"}
          </button>
        </p>
      )}
    </main>
  );
}

function Row({ run, below, namespace }: { run: Run; below: boolean; namespace: string }) {
  const from = run.forked_from;
  return (
    <tr>
      <td>
        <RunMark run={run} />
      </td>
      <td>
        {below && <span className="fork-indent">└ </span>}
        <Link to={{ page: "run", namespace, run: run.name, step: null, tab: "overview" }}>{run.name}</Link>
      </td>
      <td>{run.agent}</td>
      <td className="number">{count(run.spans)}</td>
      <td title={absolute(run.started)}>{ago(run.started)}</td>
      <td className="number">{duration(run.ended == null ? null : run.ended - run.started)}</td>
      <td className="number">{count(run.tokens)}</td>
      <td>
        {from ? (
          <Link to={{ page: "diff", namespace, a: from.run_name, b: run.name, step: null }} title="Compare with its source">
            {from.run_name} at step {from.step}, {from.span_name}
          </Link>
        ) : (
          <span className="dim">–</span>
        )}
      </td>
    </tr>
  );
}

function Empty({ namespace, query }: { namespace: string; query: string }) {
  if (query) return <div className="empty">No run has “{query}” in its name.</div>;
  return (
    <div className="empty">
      <h2>No runs in {namespace ? `namespace ${namespace}` : "this namespace"} yet</h2>
      <p>An agent is recorded by the recorder beside it, in its pod. The example agent shows how:</p>
      <pre>{FIRST_RUN}</pre>
      <Copy text={FIRST_RUN}>Copy the command</Copy>
    </div>
  );
}
