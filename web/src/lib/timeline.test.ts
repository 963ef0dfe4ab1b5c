import { expect, it } from "vitest";
import { depths, layout, stepAt } from "./timeline";

const span = (id: string, parent: string | null, started: number, ended: number | null) => ({ id, parent, started, ended });

it("every step has a place, and the place gives the step back", () => {
  const spans = Array.from({ length: 40 }, (_, i) => span(`s${i}`, null, i * 10, i === 7 ? i * 10 + 900 : i * 10 + 1));
  const { bars } = layout(spans);
  expect(bars.at(-1)!.x + bars.at(-1)!.w).toBeCloseTo(1);
  for (const bar of bars) {
    expect(bar.w).toBeGreaterThan(0);
    expect(stepAt(bars, bar.x + bar.w / 2)).toBe(bar.step);
  }
  expect(stepAt(bars, -1)).toBe(1);
  expect(stepAt(bars, 2)).toBe(40);
});

it("lanes follow the tree, and neither orphans nor loops break it", () => {
  const spans = [span("a", null, 0, 9), span("b", "a", 1, 2), span("c", "b", 1, 2), span("d", "gone", 3, 4), span("x", "y", 5, 6), span("y", "x", 5, 6)];
  expect(depths(spans)).toEqual([0, 1, 2, 0, 1, 1]);
  expect(layout(spans).lanes).toBe(3);
});

it("a run without durations is shared out evenly", () => {
  const { bars } = layout([span("a", null, 5, null), span("b", null, 5, null)]);
  expect(bars.map((bar) => bar.w)).toEqual([0.5, 0.5]);
});
