import { useMemo } from "react";
import { lines, sideBySide, type Line } from "../lib/hunks";

const SIGN = { at: "", same: " ", add: "+", del: "−" } as const;

/** A unified diff, in one column or two; colour is never the only sign. */
export function Hunks({ unified, caption, split }: { unified: string; caption: string; split: boolean }) {
  const all = useMemo(() => lines(unified), [unified]);
  return (
    <div className="hunks">
      <div className="caption">{caption}</div>
      {split ? (
        <table className="side">
          <tbody>
            {sideBySide(all).map(([left, right], i) =>
              left?.kind === "at" ? (
                <tr className="at" key={i}>
                  <td colSpan={4}>{left.text}</td>
                </tr>
              ) : (
                <tr key={i}>
                  <Cell line={left} number={left?.before} />
                  <Cell line={right} number={right?.after} />
                </tr>
              ),
            )}
          </tbody>
        </table>
      ) : (
        <table>
          <tbody>
            {all.map((line, i) => (
              <tr className={line.kind} key={i}>
                <td className="no">{line.before}</td>
                <td className="no">{line.after}</td>
                <td className="code">
                  {SIGN[line.kind]} {line.text}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </div>
  );
}

function Cell({ line, number }: { line: Line | null; number: number | null | undefined }) {
  return (
    <>
      <td className="no">{number}</td>
      <td className={`code ${line && line.kind !== "same" ? line.kind : ""}`}>{line ? `${SIGN[line.kind]} ${line.text}` : ""}</td>
    </>
  );
}
