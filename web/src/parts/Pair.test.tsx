import { renderToStaticMarkup } from "react-dom/server";
import { expect, test } from "vitest";
import type { SpanDiff, SpanSide } from "../lib/api";
import { Pair } from "./Pair";

const side: SpanSide = { span: "s1", status: "Completed", verdict: "allow", exit_code: 0, duration_ns: 5e6, fidelity: "Recorded" };
const pair: SpanDiff = { span: "s1", name: "test", kind: "ShellCommand", a: side, b: side, differs: true, output_differs: true };
const shown = (over: Partial<SpanDiff>) =>
  renderToStaticMarkup(<Pair pair={{ ...pair, ...over }} step={3} selected={false} split={false} onSelect={() => {}} />)
    .replace(/<[^>]*>/g, "\n")
    .split("\n")
    .map((line) => line.trim())
    .filter((line) => line !== "");

test("JSON is shown by place, with null apart from nothing", () => {
  const lines = shown({ json: { changes: [{ path: "/ok", before: null, after: true }, { path: "/new", after: [1] }], left_out: 2 } });
  expect(lines).toEqual(expect.arrayContaining(["/ok", "− null", "+ true", "/new", "+ [1]", "Further changes: 2"]));
  expect(shown({ json: { changes: [] } })).toContain("Output: the same JSON, written in another way");
});

test("a step says where it differs besides its output", () => {
  const lines = shown({ first: true, moved: true, env: ["A", "B"], renamed: "check", b: { ...side, verdict: "deny" } });
  expect(lines).toEqual(expect.arrayContaining(["⚑ first divergence", "in another place", "environment: A, B", "verdict allow → deny"]));
  expect(lines.join(" ")).toContain("test → check");
});

test("a step of one run only says so, and files what became of them", () => {
  const file = { path: "run.sh", change: "added" as const, after: { type: "file" as const, size: 10, digest: "ab".repeat(32), executable: true } };
  const lines = shown({ b: null, files: [file], files_left_out: 7 });
  expect(lines).toEqual(expect.arrayContaining(["not in this run", "+ run.sh · executable · 10 B (abababab)", "Further files: 7"]));
});
