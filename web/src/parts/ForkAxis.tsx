import type { Fidelity, SpanSummary } from "../lib/api";
import { KINDS } from "./kinds";

const LEFT = 150;
const GAP = 26;
const R = 8;
const SOURCE_Y = 22;
const FORK_Y = 62;

interface Props {
  a: { name: string; spans: SpanSummary[] };
  b: { name: string; spans: SpanSummary[] };
  divergent: string | null;
  step: number | null;
  onStep: (step: number) => void;
}

/** Two timelines on one axis of steps: joined where they are the same, apart where they are not. */
export function ForkAxis({ a, b, divergent, step, onStep }: Props) {
  const gap = Math.max(10, Math.min(64, Math.max(GAP, 900 / Math.max(a.spans.length, 1))));
  const width = LEFT + a.spans.length * gap + 40;
  const x = (i: number) => LEFT + i * gap + R;
  const first = b.spans.findIndex((span) => changed(span.fidelity));
  return (
    <div className="axis">
      <svg width={width} height={92} role="img" aria-label={`${b.name} beside ${a.name}`}>
        <defs>
          <pattern id="hatch" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
            <rect width="4" height="4" fill="var(--ground)" />
            <line x1="0" y1="0" x2="0" y2="4" stroke="var(--status-blocked)" strokeWidth="1.6" />
          </pattern>
        </defs>
        <text x="0" y={SOURCE_Y + 4}>{clip(a.name)}</text>
        <text x="0" y={FORK_Y + 4}>{clip(b.name)}</text>
        <line x1={x(0)} x2={x(a.spans.length - 1)} y1={SOURCE_Y} y2={SOURCE_Y} stroke="var(--edge-strong)" />
        {first >= 0 && (
          <path
            d={`M${x(Math.max(0, first - 1))} ${SOURCE_Y} C${x(first) - gap / 2} ${SOURCE_Y} ${x(first) - gap / 2} ${FORK_Y} ${x(first)} ${FORK_Y} H${x(b.spans.length - 1)}`}
            fill="none"
            stroke="var(--edge-strong)"
          />
        )}
        {a.spans.map((span, i) => (
          <Node key={span.id} span={span} x={x(i)} y={SOURCE_Y} ghost={false} step={i + 1} selected={step === i + 1} onStep={onStep} />
        ))}
        {b.spans.map((span, i) =>
          first >= 0 && i >= first ? (
            <Node key={span.id} span={span} x={x(i)} y={FORK_Y} ghost={!changed(span.fidelity)} step={i + 1} selected={step === i + 1} onStep={onStep}>
              {span.id === divergent && (
                <g>
                  <line x1={x(i)} x2={x(i)} y1={FORK_Y - R} y2={FORK_Y - 20} stroke="var(--accent)" strokeWidth="1.5" />
                  <path d={`M${x(i)} ${FORK_Y - 20}h11l-3 4 3 4h-11z`} fill="var(--accent)" />
                  <title>First divergence</title>
                </g>
              )}
            </Node>
          ) : null,
        )}
        {a.spans.map((span, i) =>
          gap >= 20 || i % Math.ceil(20 / gap) === 0 ? (
            <text key={span.id} x={x(i)} y={88} textAnchor="middle">
              {i + 1}
            </text>
          ) : null,
        )}
      </svg>
      <div className="legend" aria-label="Signs">
        {(["Reused", "Reexecuted", "Overridden", "Blocked"] as const).map((fidelity) => (
          <span key={fidelity}>
            <svg width="18" height="18">
              <Shape fidelity={fidelity} x={9} y={9} hue="var(--dim)" />
            </svg>
            {{ Reused: "reused", Reexecuted: "ran again", Overridden: "overridden", Blocked: "blocked" }[fidelity]}
          </span>
        ))}
        <span>
          <span className="flag">⚑</span> first divergence
        </span>
      </div>
    </div>
  );
}

const changed = (fidelity: Fidelity) => fidelity !== "Recorded" && fidelity !== "Reused";
const clip = (name: string) => (name.length > 20 ? `${name.slice(0, 19)}…` : name);

function Shape({ fidelity, x, y, hue }: { fidelity: Fidelity; x: number; y: number; hue: string }) {
  switch (fidelity) {
    case "Reexecuted":
      return <circle cx={x} cy={y} r={R - 1} fill={hue} />;
    case "Overridden":
      return <path d={`M${x - 7} ${y - 7}h4.500l2.500 4 2.500-4h4.500v14h-14z`} fill={hue} />;
    case "ServedFromRecording":
      return <circle cx={x} cy={y} r={R - 1} fill="var(--ground)" stroke={hue} strokeWidth="1.5" strokeDasharray="1.500 2" />;
    case "Blocked":
      return <rect x={x - 7} y={y - 7} width="14" height="14" rx="2" fill="url(#hatch)" stroke="var(--status-blocked)" />;
    default:
      return <circle cx={x} cy={y} r={R - 3} fill="var(--ground)" stroke={hue} strokeWidth="1" />;
  }
}

interface NodeProps {
  span: SpanSummary;
  x: number;
  y: number;
  ghost: boolean;
  step: number;
  selected: boolean;
  onStep: (step: number) => void;
  children?: React.ReactNode;
}

function Node({ span, x, y, ghost, step, selected, onStep, children }: NodeProps) {
  const failed = span.status === "Failed" || span.status === "Canceled";
  const hue = KINDS[span.kind].hue;
  // In the source every step is solid: it ran.
  const fidelity = y === SOURCE_Y ? "Reexecuted" : ghost ? "Reused" : span.fidelity;
  return (
    <g className="step" opacity={ghost ? 0.6 : 1} onClick={() => onStep(step)}>
      <title>{`${step} ${span.name}: ${span.status}`}</title>
      {selected && <circle cx={x} cy={y} r={R + 3} fill="none" stroke="var(--accent)" strokeWidth="1.5" />}
      <Shape fidelity={fidelity} x={x} y={y} hue={hue} />
      {failed && <path d={`M${x - 3} ${y - 3}l6 6m0-6l-6 6`} stroke="var(--ground)" strokeWidth="1.6" />}
      {children}
    </g>
  );
}
