/**
 * The character: a small recorder with two reels for eyes, on a 24-unit grid. Its pose acts out the step at the playhead; it
 * stands still where motion is unwanted.
 */
import type { ReactNode } from "react";
import type { Pose } from "./pose";

interface Look {
  /** Where the reels look, in units. */
  eyes: [number, number];
  /** How far the body leans, in degrees. */
  lean: number;
  prop: ReactNode;
}

const line = { fill: "none", stroke: "var(--text)", strokeWidth: 1, strokeLinecap: "round", strokeLinejoin: "round" } as const;

const LOOKS: Record<Pose, Look> = {
  thinking: {
    eyes: [0.4, -0.8],
    lean: -3,
    prop: (
      <g className="bob">
        <circle cx="20" cy="4" r="2.4" {...line} />
        <circle cx="17.4" cy="7" r="0.7" {...line} />
        <path d="M19 3.4h2M19 4.8h1.2" {...line} strokeWidth={0.6} />
      </g>
    ),
  },
  tool: {
    eyes: [0.8, 0.4],
    lean: 4,
    prop: (
      <g className="swing">
        <path d="M20 18 22.6 11.4" {...line} strokeWidth={1.3} />
        <path d="M21 10.4a2 2 0 1 1 3.2 1.2l-1.4-.2-.4 1z" fill="var(--kind-tool)" />
      </g>
    ),
  },
  typing: {
    eyes: [0, 1],
    lean: 3,
    prop: (
      <g>
        <rect x="5" y="20.6" width="14" height="2.6" rx="0.8" {...line} />
        <path className="type" d="M7 21.9h1M9.4 21.9h1M11.8 21.9h1M14.2 21.9h1M16.6 21.9h1" {...line} strokeWidth={0.9} />
        <path d="M20.4 5.4 22 7l-1.6 1.6M22.6 9h1" {...line} stroke="var(--kind-shell)" />
      </g>
    ),
  },
  reading: {
    eyes: [0.2, 1],
    lean: 0,
    prop: (
      <g>
        <path d="M5 19.6c2.4-1 4.8-1 7 .4 2.200-1.400 4.600-1.400 7-.4v3.800c-2.400-1-4.800-1-7 .4-2.200-1.400-4.600-1.400-7-.4z" fill="var(--ground)" stroke="var(--text)" strokeWidth={0.9} />
        <path d="M12 20v3.800" {...line} strokeWidth={0.7} />
      </g>
    ),
  },
  writing: {
    eyes: [0.8, 1],
    lean: 4,
    prop: (
      <g className="scribble">
        <path d="m19 21 4-7.400 1.200.7L20.200 21.700l-1.500.7z" fill="var(--kind-write)" />
        <path d="M13 23.400h6" {...line} strokeWidth={0.8} />
      </g>
    ),
  },
  calling: {
    eyes: [0.9, -0.3],
    lean: -2,
    prop: (
      <g className="waves">
        <path d="M20.600 9.400c.9.900.9 2.600 0 3.500" {...line} stroke="var(--kind-model)" />
        <path d="M22 8c1.700 1.700 1.700 4.600 0 6.300" {...line} stroke="var(--kind-model)" />
        <path d="M23.400 6.600c2.400 2.400 2.400 6.700 0 9.100" {...line} stroke="var(--kind-model)" />
      </g>
    ),
  },
  asking: {
    eyes: [0, -1],
    lean: 0,
    prop: <path d="M19.800 3.600c0-2 3.200-2 3.200 0 0 1.300-1.600 1.300-1.600 2.700m0 1.600v.2" {...line} stroke="var(--kind-human)" strokeWidth={1.200} />,
  },
  stopped: {
    eyes: [0, 0],
    lean: 0,
    prop: (
      <g>
        <path d="M22 23V8" {...line} />
        <path d="M22 10H4" stroke="var(--status-blocked)" strokeWidth={1.800} strokeDasharray="3 1.600" />
      </g>
    ),
  },
  tripped: {
    eyes: [-0.6, 0.6],
    lean: 14,
    prop: (
      <g>
        <path d="M20 23V13" {...line} />
        <path d="M20 13h4.200l-1.200 1.700 1.200 1.700H20z" fill="var(--status-failed)" />
      </g>
    ),
  },
  failing: {
    eyes: [0, 0.9],
    lean: -6,
    prop: (
      <path
        className="loose"
        d="M7 19c-2 2 1 3-1 4.400M12 19c1.600 1.800-1.200 2.400.4 4.400M17 19c2.200 1.400-.4 3 1.800 4"
        {...line}
        stroke="var(--status-failed)"
      />
    ),
  },
  done: {
    eyes: [0, 0],
    lean: 0,
    prop: <path d="m19.600 5.400 1.500 1.600 3-3.600" {...line} stroke="var(--status-completed)" strokeWidth={1.500} />,
  },
};

export function Character({ pose, moving }: { pose: Pose; moving: boolean }) {
  const { eyes, lean, prop } = LOOKS[pose];
  const reel = (cx: number) => (
    <g className="reel" style={{ transformOrigin: `${cx}px 12px` }}>
      <circle cx={cx} cy="12" r="3.300" fill="var(--ground)" />
      <path d={`M${cx} 9.600v1.300M${cx - 2} 13.200l1.100-.6M${cx + 2} 13.200l-1.100-.6`} stroke="var(--edge-strong)" strokeWidth="0.700" strokeLinecap="round" />
      <circle cx={cx + eyes[0]} cy={12 + eyes[1]} r="1.150" fill="var(--text)" />
    </g>
  );
  return (
    <svg className={`character pose-${pose}${moving ? " moving" : ""}`} viewBox="-1 0 27 25" width="76" height="70" role="img" aria-label={`The recorder, ${pose}`}>
      <g style={{ transform: `rotate(${lean}deg)`, transformOrigin: "12px 19px" }}>
        <rect x="2" y="5" width="20" height="14" rx="3" fill="var(--accent)" />
        <rect x="8.500" y="16.200" width="7" height="1.300" rx="0.600" fill="var(--ground)" opacity="0.800" />
        {reel(7.800)}
        {reel(16.200)}
        <path d="M7 19v2M17 19v2" stroke="var(--accent)" strokeWidth="1.600" strokeLinecap="round" />
      </g>
      {prop}
    </svg>
  );
}
