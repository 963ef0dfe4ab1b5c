import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef } from "react";
import type { SpanSummary } from "../lib/api";
import { duration } from "../lib/format";
import { depths } from "../lib/timeline";
import { fate, KindMark, StatusMark } from "./kinds";

const ROW = 28;

/** All spans as a tree in order; only the rows in sight are in the page. */
export function SpanTree({ spans, step, matches, onStep }: { spans: SpanSummary[]; step: number; matches: (span: SpanSummary) => boolean; onStep: (step: number) => void }) {
  const scroller = useRef<HTMLDivElement>(null);
  const indents = useMemo(() => depths(spans), [spans]);
  const rows = useVirtualizer({ count: spans.length, getScrollElement: () => scroller.current, estimateSize: () => ROW, overscan: 12 });
  useEffect(() => {
    if (spans.length > 0) rows.scrollToIndex(step - 1, { align: "auto" });
  }, [rows, spans.length, step]);
  return (
    <div className="spans" ref={scroller} role="listbox" aria-label="Spans">
      <div style={{ height: rows.getTotalSize(), position: "relative" }}>
        {rows.getVirtualItems().map((row) => {
          const span = spans[row.index];
          if (!span) return null;
          const at = row.index + 1;
          const changed = span.fidelity !== "Recorded" && span.fidelity !== "Reused";
          return (
            <button
              type="button"
              role="option"
              key={row.key}
              aria-selected={at === step}
              tabIndex={at === step ? 0 : -1}
              className={`span-row${matches(span) ? "" : " unmatched"}`}
              style={{ top: row.start }}
              onClick={() => onStep(at)}
            >
              <span className="step">{at}</span>
              <KindMark kind={span.kind} />
              <span className="name" style={{ paddingLeft: (indents[row.index] ?? 0) * 14 }}>
                {span.name}
              </span>
              {changed ? <span className={`chip${span.blocked ? " blocked" : ""}`}>{span.blocked?.reason ?? fate(span)}</span> : <span className="dim">{duration(span.ended == null ? null : span.ended - span.started)}</span>}
              <StatusMark status={span.status} word={false} />
            </button>
          );
        })}
      </div>
    </div>
  );
}
