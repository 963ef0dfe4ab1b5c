import { expect, test } from "vitest";
import type { FileChange, FileSide } from "./api";
import { fileRemarks } from "./files";

const file = (digest: string, executable = false): FileSide => ({ type: "file", size: 2048, digest: digest.repeat(64), executable });
const said = (before: FileSide | null, after: FileSide | null, unified?: string) =>
  fileRemarks({ path: "p", change: "modified", before, after, unified } as FileChange).join(", ");

test("what a text diff does not show is said", () => {
  expect(said(file("a"), file("a", true))).toBe("became executable");
  expect(said(file("a", true), file("a"))).toBe("is no longer executable");
  expect(said({ type: "symlink", target: "x" }, { type: "symlink", target: "y" })).toBe("led to x, leads to y");
  expect(said({ type: "directory" }, { type: "symlink", target: "y" })).toBe("was a folder, is a symlink to y");
  expect(said(file("a"), file("b"))).toBe("2.0 KiB (aaaaaaaa) → 2.0 KiB (bbbbbbbb)");
  expect(said(file("a"), file("b"), "@@ -1 +1 @@")).toBe("");
  expect(said(null, file("b", true))).toBe("executable, 2.0 KiB (bbbbbbbb)");
  expect(said({ type: "directory" }, null)).toBe("a folder");
});
