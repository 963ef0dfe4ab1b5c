import { useQuery } from "@tanstack/react-query";
import { useEffect, useState } from "react";
import { api, type RunDiff, type SpanDiff, type SpanSide } from "../lib/api";
import { count, duration, usd } from "../lib/format";
import { go } from "../lib/location";
import { ForkAxis } from "../parts/ForkAxis";
import { Hunks } from "../parts/Hunks";
import { FIDELITY_WORD, KindMark, StatusMark } from "../parts/kinds";
import { Link } from "../parts/Link";
import { Failure } from "../parts/States";

interface Props {
  namespace: string;
  a: string;
  b: string;
  step: number | null;
}

export function DiffPage({ namespace, a, b, step }: Props) {
  const diff = useQuery({ queryKey: ["diff", namespace, a, b], queryFn: () => api.diff(namespace, a, b) });
  const source = useQuery({ queryKey: ["spans", namespace, a], queryFn: () => api.spans(namespace, a) });
  const fork = useQuery({ queryKey: ["spans", namespace, b], queryFn: () => api.spans(namespace, b) });
  const [split, setSplit] = useState(false);
  const spans = source.data;
  const divergent = diff.data?.diff.first_divergent_span ?? null;
  const selected = step ?? (spans && divergent ? spans.findIndex((span) => span.id === divergent) + 1 || null : null);
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
            <Link to={{ page: "run", namespace, run: b, step: selected, tab: "output" }}>{b}</Link>
          </span>
          {diff.data && <Facts diff={diff.data} />}
          <span className="grow" />
          <button type="button" aria-pressed={split} onClick={() => setSplit(!split)}>
            {split ? "One column" : "Side by side"}
          </button>
        </div>
      </div>
      {spans && fork.data && <ForkAxis a={{ name: a, spans }} b={{ name: b, spans: fork.data }} divergent={divergent} step={selected} onStep={show} />}
      {diff.data?.diff.spans.length === 0 && <p className="empty">Nothing differs but timing.</p>}
      {diff.data?.diff.spans.map((pair) => {
        const at = (spans?.findIndex((span) => span.id === pair.span) ?? -1) + 1;
        return <Pair key={pair.span} pair={pair} step={at} selected={at === selected} first={pair.span === divergent} split={split} onSelect={() => show(at)} />;
      })}
    </main>
  );
}

function Facts({ diff }: { diff: RunDiff }) {
  const { a, b } = diff.diff;
  return (
    <>
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

interface PairProps {
  pair: SpanDiff;
  step: number;
  selected: boolean;
  first: boolean;
  split: boolean;
  onSelect: () => void;
}

function Pair({ pair, step, selected, first, split, onSelect }: PairProps) {
  const blocked = pair.b?.blocked ?? [];
  return (
    <section className={`pair${selected ? " selected" : ""}`} id={`step-${step}`} aria-label={`Step ${step}, ${pair.name}`}>
      <header onClick={onSelect}>
        <span className="dim">{step}</span>
        <KindMark kind={pair.kind} />
        <h2>{pair.name}</h2>
        {first && <span className="flag">⚑ first divergence</span>}
        <span className="grow" />
        {blocked.map((b, i) => (
          <span className="chip blocked" key={i}>
            {b.reason}
          </span>
        ))}
        {blocked.length === 0 && pair.b && <span className="chip">{FIDELITY_WORD[pair.b.fidelity]}</span>}
      </header>
      <div className="sides">
        <div>{pair.a ? <Side side={pair.a} /> : <span className="dim">not in this run</span>}</div>
        <div>{pair.b ? <Side side={pair.b} /> : <span className="dim">not in this run</span>}</div>
      </div>
      {blocked.map((b, i) => (
        <div className="note" key={i}>
          {b.message}
        </div>
      ))}
      {blocked.length === 0 && pair.text && <Hunks unified={pair.text} caption="Output" split={split} />}
      {blocked.length === 0 && pair.stderr && <Hunks unified={pair.stderr} caption="Standard error" split={split} />}
      {(pair.files ?? []).map((file) =>
        file.unified ? (
          <Hunks key={file.path} unified={file.unified} caption={`${{ added: "+", removed: "−", modified: "~" }[file.change]} ${file.path}`} split={split} />
        ) : (
          <div className="hunks" key={file.path}>
            <div className="caption">
              {{ added: "+", removed: "−", modified: "~" }[file.change]} {file.path} (not compared line by line)
            </div>
          </div>
        ),
      )}
    </section>
  );
}

function Side({ side }: { side: SpanSide }) {
  return (
    <>
      <StatusMark status={side.status} />
      {side.exit_code != null && <span className="dim"> exit {side.exit_code}</span>}
      {(side.blocked ?? []).length === 0 && <span className="dim"> {duration(side.duration_ns)}</span>}
    </>
  );
}
