import type { FileChange, JsonDiff, SpanDiff, SpanSide } from "../lib/api";
import { fileRemarks } from "../lib/files";
import { count, duration } from "../lib/format";
import { Hunks } from "./Hunks";
import { FIDELITY_WORD, KindMark, StatusMark } from "./kinds";

interface Props {
  pair: SpanDiff;
  step: number;
  selected: boolean;
  split: boolean;
  onSelect: () => void;
}

/** Two steps that correspond, and what differs. */
export function Pair({ pair, step, selected, split, onSelect }: Props) {
  const blocked = pair.b?.blocked ?? [];
  const remarks = [
    pair.input_differs && pair.a && pair.b ? "another input" : null,
    pair.env?.length ? `environment: ${pair.env.join(", ")}` : null,
    pair.moved ? "in another place" : null,
    pair.a && pair.b && pair.a.verdict !== pair.b.verdict ? `verdict ${pair.a.verdict} → ${pair.b.verdict}` : null,
  ].filter((remark) => remark !== null);
  return (
    <section className={`pair${selected ? " selected" : ""}`} id={step ? `step-${step}` : undefined} aria-label={step ? `Step ${step}, ${pair.name}` : pair.name}>
      <header onClick={onSelect}>
        <span className="dim">{step || "+"}</span>
        <KindMark kind={pair.kind} />
        <h2>
          {pair.name}
          {pair.renamed && ` → ${pair.renamed}`}
        </h2>
        {pair.first && <span className="flag">⚑ first divergence</span>}
        <span className="grow" />
        {remarks.map((remark) => (
          <span className="dim" key={remark}>
            {remark}
          </span>
        ))}
        {blocked.map((b, i) => (
          <span className="chip blocked" key={i}>
            {b.reason}
          </span>
        ))}
        {blocked.length === 0 && pair.b && pair.b.fidelity !== "Recorded" && <span className="chip">{FIDELITY_WORD[pair.b.fidelity]}</span>}
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
      {pair.json && <JsonChanges json={pair.json} />}
      {blocked.length === 0 && pair.text && <Hunks unified={pair.text} caption="Output" split={split} />}
      {blocked.length === 0 && pair.stderr && <Hunks unified={pair.stderr} caption="Standard error" split={split} />}
      {(pair.files ?? []).map((file) => (
        <File key={file.path} file={file} split={split} />
      ))}
      {(pair.files_left_out ?? 0) > 0 && <div className="note">Further files: {count(pair.files_left_out)}</div>}
    </section>
  );
}

function Side({ side }: { side: SpanSide }) {
  return (
    <>
      <StatusMark status={side.status} />
      {side.exit_code != null && <span className="dim"> exit {side.exit_code}</span>}
      {(side.blocked ?? []).length === 0 && <span className="dim"> {duration(side.duration_ns)}</span>}
      {side.tokens != null && <span className="dim"> {count(side.tokens)} tokens</span>}
    </>
  );
}

/** Outputs that are JSON, by what they say: one row a place. */
function JsonChanges({ json }: { json: JsonDiff }) {
  const shown = (value: unknown) => (value === undefined ? "" : JSON.stringify(value));
  return (
    <div className="hunks">
      <div className="caption">{json.changes.length === 0 ? "Output: the same JSON, written in another way" : "Output, as JSON"}</div>
      {json.changes.length > 0 && (
        <table className="json">
          <tbody>
            {json.changes.map((change, i) => (
              <tr key={i}>
                <td className="code path">
                  {change.path || "(whole)"}
                  {change.path_before != null && <span className="dim"> was {change.path_before}</span>}
                </td>
                <td className={`code${change.before === undefined ? "" : " del"}`}>{change.before === undefined ? "" : `− ${shown(change.before)}`}</td>
                <td className={`code${change.after === undefined ? "" : " add"}`}>{change.after === undefined ? "" : `+ ${shown(change.after)}`}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
      {(json.left_out ?? 0) > 0 && <div className="caption">Further changes: {count(json.left_out)}</div>}
    </div>
  );
}

function File({ file, split }: { file: FileChange; split: boolean }) {
  const sign = { added: "+", removed: "−", modified: "~" }[file.change];
  const caption = [`${sign} ${file.path}`, ...fileRemarks(file)].join(" · ");
  return file.unified ? (
    <Hunks unified={file.unified} caption={caption} split={split} />
  ) : (
    <div className="hunks">
      <div className="caption">{caption}</div>
    </div>
  );
}
