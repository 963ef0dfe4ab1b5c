/** What is said of a file's change beside the diff of its contents. */
import type { FileChange, FileSide } from "./api";
import { bytes } from "./format";

function noun(side: FileSide): string {
  return side.type === "symlink" ? `a symlink to ${side.target}` : side.type === "directory" ? "a folder" : "a file";
}

/** Another type, the x bit, a symlink's target; of contents that are not compared line by line their sizes and digests. */
export function fileRemarks(change: FileChange): string[] {
  const { before, after } = change;
  const remarks: string[] = [];
  if (before && after) {
    if (before.type === "file" && after.type === "file") {
      if (before.executable !== after.executable) remarks.push(after.executable ? "became executable" : "is no longer executable");
    } else if (before.type === "symlink" && after.type === "symlink") remarks.push(`led to ${before.target}, leads to ${after.target}`);
    else remarks.push(`was ${noun(before)}, is ${noun(after)}`);
  } else {
    const side = before ?? after;
    if (side && side.type !== "file") remarks.push(noun(side));
    else if (after?.type === "file" && after.executable) remarks.push("executable");
  }
  const file = (side: FileSide | null | undefined) => (side?.type === "file" ? side : null);
  const [x, y] = [file(before), file(after)];
  if (change.unified == null && x?.digest !== y?.digest) {
    remarks.push([x, y].filter((side) => side != null).map((side) => `${bytes(side.size)} (${side.digest.slice(0, 8)})`).join(" → "));
  }
  return remarks;
}
