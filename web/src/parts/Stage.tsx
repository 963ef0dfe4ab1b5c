import { useMemo } from "react";
import { Character } from "../character/Character";
import { caption, pose } from "../character/pose";
import type { SpanSummary } from "../lib/api";
import { layout } from "../lib/timeline";

/** The character at the playhead, acting the step, with what happens in one sentence. */
export function Stage({ spans, step, playing }: { spans: SpanSummary[]; step: number; playing: boolean }) {
  const { bars } = useMemo(() => layout(spans), [spans]);
  const span = spans[step - 1];
  const bar = bars[step - 1];
  if (!span || !bar) return <div className="stage" />;
  const at = (bar.x + bar.w / 2) * 100;
  return (
    <div className="stage">
      <div className="caption" aria-live={playing ? "off" : "polite"}>
        <strong>
          {step} of {spans.length}
        </strong>{" "}
        {caption(span)}
      </div>
      <div className="actor" style={{ left: `clamp(54px, ${at}%, calc(100% - 54px))` }}>
        <Character pose={pose(span)} moving={playing} />
      </div>
    </div>
  );
}
