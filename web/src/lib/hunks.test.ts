import { expect, it } from "vitest";
import { lines, sideBySide } from "./hunks";

const DIFF = "@@ -1,3 +1,3 @@\n passed a\n-FAILED b\n-2 tests, 1 failed\n+passed b\n+2 tests, 0 failed\n same\n";

it("numbers the lines of both sides", () => {
  expect(lines(DIFF).map((l) => [l.kind, l.before, l.after])).toEqual([
    ["at", null, null],
    ["same", 1, 1],
    ["del", 2, null],
    ["del", 3, null],
    ["add", null, 2],
    ["add", null, 3],
    ["same", 4, 4],
  ]);
});

it("puts what was removed beside what came instead", () => {
  const rows = sideBySide(lines(DIFF));
  expect(rows[2]!.map((l) => l?.text)).toEqual(["FAILED b", "passed b"]);
  expect(sideBySide(lines("@@ -1 +1,2 @@\n-a\n+b\n+c")).at(-1)!.map((l) => l?.text)).toEqual([undefined, "c"]);
});
