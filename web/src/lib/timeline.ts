/** The timeline's geometry: which step lies where, in lanes by depth. Pure, so that it can be tested. */
import type { SpanSummary } from "./api";

export interface Bar {
  step: number;
  lane: number;
  /** Left edge and width as parts of the whole, 0 to 1. */
  x: number;
  w: number;
}

export interface Layout {
  bars: Bar[];
  lanes: number;
}

/** Depth of each span below its parents; parents that are missing or in a loop count as none. */
export function depths(spans: readonly Pick<SpanSummary, "id" | "parent">[]): number[] {
  const index = new Map(spans.map((span, i) => [span.id, i]));
  return spans.map((span) => {
    let depth = 0;
    const seen = new Set([span.id]);
    for (let parent = span.parent; parent && !seen.has(parent); depth++) {
      const at = index.get(parent);
      if (at === undefined) break;
      seen.add(parent);
      parent = spans[at]?.parent;
    }
    return depth;
  });
}

/**
 * Half of the width is shared equally by all steps and half by their durations, so that neither a long wait hides the short
 * steps nor all look alike.
 */
export function layout(spans: readonly Pick<SpanSummary, "id" | "parent" | "started" | "ended">[]): Layout {
  const lanes = depths(spans);
  const lengths = spans.map((span) => Math.max(0, (span.ended ?? span.started) - span.started));
  const total = lengths.reduce((sum, n) => sum + n, 0);
  let x = 0;
  const bars = spans.map((_, i) => {
    const even = 1 / spans.length;
    const share = total > 0 ? (lengths[i] ?? 0) / total : even;
    const w = 0.5 * even + 0.5 * share;
    const bar = { step: i + 1, lane: lanes[i] ?? 0, x, w };
    x += w;
    return bar;
  });
  return { bars, lanes: Math.max(1, ...lanes.map((n) => n + 1)) };
}

/** The step at a place of the timeline, from 1. */
export function stepAt(bars: readonly Bar[], x: number): number {
  let low = 0;
  let high = bars.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((bars[middle]?.x ?? 0) <= x) low = middle;
    else high = middle - 1;
  }
  return bars[low]?.step ?? 1;
}
