import { useState, type ReactNode } from "react";
import { ApiError } from "../lib/api";

/** Says what failed and offers the retry; what was loaded before stays where it is. */
export function Failure({ error, retry }: { error: unknown; retry: () => void }) {
  const api = error instanceof ApiError ? error : null;
  return (
    <div className="failure" role="alert">
      <strong>{api?.reason === "RunNotFound" ? "There is no such run" : "That did not work"}</strong>
      <p>{error instanceof Error ? error.message : String(error)}</p>
      <button type="button" onClick={retry}>
        Try again
      </button>
    </div>
  );
}

/** Text that is shown in part while it is long, so that no page freezes on it. */
export function LongText({ text, label }: { text: string; label: string }) {
  const LIMIT = 100_000;
  const [whole, setWhole] = useState(false);
  const shown = whole || text.length <= LIMIT ? text : text.slice(0, LIMIT);
  return (
    <figure className="text">
      <figcaption>
        {label} <Copy text={text} />
      </figcaption>
      <pre tabIndex={0}>{shown}</pre>
      {shown.length < text.length && (
        <button type="button" onClick={() => setWhole(true)}>
          Show all {text.length} characters
        </button>
      )}
    </figure>
  );
}

export function Copy({ text, children = "Copy" }: { text: string; children?: ReactNode }) {
  const [done, setDone] = useState(false);
  return (
    <button
      type="button"
      className="quiet small"
      onClick={() => {
        navigator.clipboard?.writeText(text).then(() => {
          setDone(true);
          setTimeout(() => setDone(false), 1200);
        }, () => setDone(false));
      }}
    >
      {done ? "Copied" : children}
    </button>
  );
}
