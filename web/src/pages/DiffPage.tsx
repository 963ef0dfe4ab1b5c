import { useQuery } from "@tanstack/react-query";
import { useEffect, useMemo, useState } from "react";
import { api, type RunDiff, type SpanDiff } from "../lib/api";
import { count, duration, usd } from "../lib/format";
import { go } from "../lib/location";
import { ForkAxis } from "../parts/ForkAxis";
import { Link } from "../parts/Link";
import { Pair } from "../parts/Pair";
import { Failure } from "../parts/States";

interface Props {
  namespace: string;
  a: string;
  b: string;
  step: number | null;
}

/** Pairs that are drawn at once. */
const PAGE = 200;

export function DiffPage({ namespace, a, b, step }: Props) {
  const diff = useQuery({ queryKey: ["diff", namespace, a, b], queryFn: () => api.diff(namespace, a, b) });
  const source = useQuery({ queryKey: ["spans", namespace, a], queryFn: () => api.spans(namespace, a) });
  const fork = useQuery({ queryKey: ["spans", namespace, b], queryFn: () => api.spans(namespace, b) });
  const [split, setSplit] = useState(false);
  const [shown, setShown] = useState(PAGE);
  const spans = source.data;
  const pairs = diff.data?.diff.spans ?? [];
  const first = pairs.find((pair) => pair.first);
  const stepOf = useMemo(() => new Map(spans?.map((span, i) => [span.id, i + 1])), [spans]);
  const at = (pair: SpanDiff) => (pair.a && stepOf.get(pair.a.span)) || 0;
  const selected = step ?? (first ? at(first) || null : null);
  const aligned = diff.data?.diff.matching === "alignment";
  const limit = Math.max(shown, pairs.findIndex((pair) => selected && at(pair) === selected) + 1);
  const show = (to: number) => go({ page: "diff", namespace, a, b, step: to }, "replace");

  useEffect(() => {
    if (selected) document.getElementById(`step-${selected}`)?.scrollIntoView({ block: "nearest" });
  }, [selected, diff.data]);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.target instanceof HTMLInputElement || event.metaKey || event.ctrlKey) return;
      const length = spans?.length ?? 0;
      const now = selected ?? 1;
      const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 1, End: length }[event.key];
      if (to === undefined || length === 0) return;
      event.preventDefault();
      show(Math.min(Math.max(to, 1), length));
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });

  if (diff.error) return <Failure error={diff.error} retry={() => void diff.refetch()} />;
  return (
    <main className="diff">
      <div className="verdict">
        <h1>{diff.data?.summary ?? " "}</h1>
        <div className="facts">
          <span>
            <Link to={{ page: "run", namespace, run: a, step: selected, tab: "output" }}>{a}</Link> →{" "}
            <Link to={{ page: "run", namespace, run: b, step: aligned ? null : selected, tab: "output" }}>{b}</Link>
          </span>
          {diff.data && <Facts diff={diff.data} />}
          <span className="grow" />
          <button type="button" aria-pressed={split} onClick={() => setSplit(!split)}>
            {split ? "One column" : "Side by side"}
          </button>
        </div>
      </div>
      {spans && fork.data && diff.data && !aligned && (
        <ForkAxis a={{ name: a, spans }} b={{ name: b, spans: fork.data }} divergent={first?.b?.span ?? null} step={selected} onStep={show} />
      )}
      {diff.data && pairs.length === 0 && <p className="empty">Nothing differs but timing.</p>}
      {pairs.slice(0, limit).map((pair, i) => (
        <Pair key={i} pair={pair} step={at(pair)} selected={at(pair) !== 0 && at(pair) === selected} split={split} onSelect={() => at(pair) && show(at(pair))} />
      ))}
      {pairs.length > limit && (
        <button type="button" onClick={() => setShown(limit + PAGE)}>
          Show {Math.min(PAGE, pairs.length - limit)} more of {count(pairs.length)}
        </button>
      )}
      {(diff.data?.diff.spans_left_out ?? 0) > 0 && <p className="note">Further pairs of steps that are not listed: {count(diff.data?.diff.spans_left_out)}</p>}
      {(diff.data?.notes ?? []).map((note) => (
        <p className="note" key={note}>
          {note}
        </p>
      ))}
    </main>
  );
}

function Facts({ diff }: { diff: RunDiff }) {
  const { a, b, counts } = diff.diff;
  const only = counts.only_a + counts.only_b;
  return (
    <>
      {diff.outcome_changed && (
        <span>
          {diff.a.outcome ?? "–"} → {diff.b.outcome ?? "–"}
        </span>
      )}
      <span title={`${counts.only_a} only in ${diff.a.name}, ${counts.only_b} only in ${diff.b.name}`}>
        {count(counts.same)} the same, {count(counts.changed)} changed{only > 0 ? `, ${count(only)} in one run only` : ""}
      </span>
      <span>
        duration {duration(a.duration_ns)} → {duration(b.duration_ns)}
      </span>
      <span>
        tokens {count(a.tokens)} → {count(b.tokens)}
      </span>
      <span>
        cost {usd(a.cost_usd)} → {usd(b.cost_usd)}
      </span>
    </>
  );
}
