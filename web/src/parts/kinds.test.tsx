import { renderToStaticMarkup } from "react-dom/server";
import { expect, test } from "vitest";
import type { Run } from "../lib/api";
import { RunMark } from "./kinds";

const shown = (run: Partial<Run>) => renderToStaticMarkup(<RunMark run={run as Run} />).replace(/<[^>]*>/g, "").trim();

test("a run says what became of it, and a fork that ended early says how", () => {
  expect(shown({ state: "sealed", outcome: "Failed" })).toBe("✗ Failed");
  expect(shown({ state: "open" })).toBe("● recording");
  expect(shown({ state: "sealed", fork_end: { reason: "Interrupted", message: "the pod was told to end" } })).toBe("◼ Interrupted");
  expect(shown({ state: "sealed" })).toBe("–");
});
