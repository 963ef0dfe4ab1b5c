import { useEffect, useMemo, useRef, type KeyboardEvent, type PointerEvent } from "react";
import type { SpanSummary } from "../lib/api";
import { layout, stepAt } from "../lib/timeline";
import { KINDS } from "./kinds";

const LANE = 16;
const TOP = 8;
const TICKS = 8;

/** A canvas of all steps; the playhead is the scrubber: drag, wheel, click. Screen readers get a slider. */
export function Timeline({ spans, step, onStep }: { spans: SpanSummary[]; step: number; onStep: (step: number) => void }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const { bars, lanes } = useMemo(() => layout(spans), [spans]);
  const height = TOP + Math.min(lanes, 8) * LANE + TICKS;

  useEffect(() => {
    const element = canvas.current;
    if (!element) return;
    const draw = () => paint(element, height);
    const observer = new ResizeObserver(draw);
    observer.observe(element);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    draw();
    return () => {
      observer.disconnect();
      dark.removeEventListener("change", draw);
    };

    function paint(target: HTMLCanvasElement, tall: number) {
      const context = target.getContext("2d");
      if (!context) return;
      const scale = devicePixelRatio;
      const wide = target.clientWidth;
      target.width = Math.round(wide * scale);
      target.height = Math.round(tall * scale);
      context.scale(scale, scale);
      const style = getComputedStyle(target);
      const colour = (name: string) => style.getPropertyValue(name.replace(/^var\((.*)\)$/, "$1")).trim();
      const fits = (label: string, room: number) => room > 26 && context.measureText(label).width < room - 18;
      context.font = `11px ${colour("--sans")}`;
      context.textBaseline = "middle";
      spans.forEach((span, i) => {
        const bar = bars[i];
        if (!bar) return;
        const x = bar.x * wide;
        const w = Math.max(1.5, bar.w * wide - 1);
        const y = TOP + Math.min(bar.lane, 7) * LANE;
        const hue = colour(KINDS[span.kind].hue);
        context.globalAlpha = span.status === "Blocked" ? 0.12 : 0.26;
        context.fillStyle = hue;
        context.fillRect(x, y, w, LANE - 3);
        context.globalAlpha = 1;
        context.fillRect(x, y, Math.min(3, w), LANE - 3);
        if (span.status === "Failed" || span.status === "Canceled") {
          context.fillStyle = colour("--status-failed");
          context.fillRect(x, y + LANE - 5, w, 2);
        }
        if (span.status === "Blocked") hatch(context, x, y, w, LANE - 3, colour("--status-blocked"));
        const label = `${KINDS[span.kind].glyph} ${span.name}`;
        context.fillStyle = colour("--text");
        if (fits(label, w)) context.fillText(label, x + 7, y + (LANE - 3) / 2 + 0.5);
        // Ticks are workspace states.
        if (span.snapshot_after) {
          context.fillStyle = colour("--edge-strong");
          context.fillRect(x + w - 1, tall - TICKS + 1, 1, 4);
        }
      });
      const now = bars[step - 1];
      if (now) {
        const x = now.x * wide;
        const w = Math.max(3, now.w * wide - 1);
        context.strokeStyle = colour("--accent");
        context.fillStyle = colour("--accent");
        context.lineWidth = 1.5;
        context.strokeRect(x + 0.75, TOP + Math.min(now.lane, 7) * LANE - 1.25, w - 1.5, LANE - 0.5);
        context.fillRect(x + w / 2 - 0.75, 0, 1.5, tall);
        context.beginPath();
        context.moveTo(x + w / 2 - 5, 0);
        context.lineTo(x + w / 2 + 5, 0);
        context.lineTo(x + w / 2, 6);
        context.fill();
      }
    }
  }, [bars, height, spans, step]);

  const move = (event: PointerEvent<HTMLDivElement>) => {
    const box = canvas.current?.getBoundingClientRect();
    if (box && box.width > 0) onStep(stepAt(bars, (event.clientX - box.left) / box.width));
  };
  const onKey = (event: KeyboardEvent) => {
    // The page's own keys do the moving.
    if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) event.preventDefault();
  };
  const current = spans[step - 1];
  return (
    <div
      className="timeline"
      role="slider"
      tabIndex={0}
      aria-label="Step"
      aria-valuemin={1}
      aria-valuemax={spans.length}
      aria-valuenow={step}
      aria-valuetext={current ? `${step} of ${spans.length}: ${current.name}, ${current.status}` : ""}
      onKeyDown={onKey}
      onPointerDown={(event) => {
        event.currentTarget.setPointerCapture(event.pointerId);
        move(event);
      }}
      onPointerMove={(event) => event.currentTarget.hasPointerCapture(event.pointerId) && move(event)}
      onWheel={(event) => onStep(step + Math.sign(event.deltaY || event.deltaX))}
    >
      <canvas ref={canvas} style={{ height }} />
    </div>
  );
}

function hatch(context: CanvasRenderingContext2D, x: number, y: number, w: number, h: number, colour: string) {
  context.save();
  context.beginPath();
  context.rect(x, y, w, h);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  for (let at = x - h; at < x + w; at += 6) {
    context.beginPath();
    context.moveTo(at, y + h);
    context.lineTo(at + h, y);
    context.stroke();
  }
  context.restore();
}
