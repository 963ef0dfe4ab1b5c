/** Reads unified diffs into lines with their numbers. */
export interface Line {
  kind: "at" | "same" | "add" | "del";
  before: number | null;
  after: number | null;
  text: string;
}

export function lines(unified: string): Line[] {
  const out: Line[] = [];
  let before = 0;
  let after = 0;
  for (const raw of unified.replace(/\n$/, "").split("\n")) {
    const header = /^@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@/.exec(raw);
    if (header) {
      before = Number(header[1]);
      after = Number(header[2]);
      out.push({ kind: "at", before: null, after: null, text: raw });
    } else if (raw.startsWith("\\") || raw.startsWith("@@")) {
      out.push({ kind: "at", before: null, after: null, text: raw });
    } else if (raw.startsWith("+")) {
      out.push({ kind: "add", before: null, after: after++, text: raw.slice(1) });
    } else if (raw.startsWith("-")) {
      out.push({ kind: "del", before: before++, after: null, text: raw.slice(1) });
    } else {
      out.push({ kind: "same", before: before++, after: after++, text: raw.slice(1) });
    }
  }
  return out;
}

/** Pairs removed and added lines of a hunk, for two columns. */
export function sideBySide(all: Line[]): [Line | null, Line | null][] {
  const rows: [Line | null, Line | null][] = [];
  let removed: Line[] = [];
  let added: Line[] = [];
  const flush = () => {
    for (let i = 0; i < Math.max(removed.length, added.length); i++) rows.push([removed[i] ?? null, added[i] ?? null]);
    removed = [];
    added = [];
  };
  for (const line of all) {
    if (line.kind === "del") removed.push(line);
    else if (line.kind === "add") added.push(line);
    else {
      flush();
      rows.push([line, line]);
    }
  }
  flush();
  return rows;
}
