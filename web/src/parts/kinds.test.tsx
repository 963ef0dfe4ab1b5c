import { renderToStaticMarkup } from "react-dom/server";
import { expect, test } from "vitest";
import type { Run } from "../lib/api";
import { RunMark, fate } from "./kinds";

const shown = (run: Partial<Run>) => renderToStaticMarkup(<RunMark run={run as Run} />).replace(/<[^>]*>/g, "").trim();

test("a run says what became of it, and a fork that ended early says how", () => {
  expect(shown({ state: "sealed", outcome: "Failed" })).toBe("✗ Failed");
  expect(shown({ state: "open" })).toBe("● recording");
  expect(shown({ state: "sealed", fork_end: { reason: "Interrupted", message: "the pod was told to end" } })).toBe("◼ Interrupted");
  expect(shown({ state: "sealed" })).toBe("–");
});

test("a step of a check says whether it gave what it gave when recorded", () => {
  expect(fate({ fidelity: "Reexecuted", reproduced: true })).toBe("identical");
  expect(fate({ fidelity: "Reexecuted", reproduced: false })).toBe("differs");
  expect(fate({ fidelity: "Reexecuted" })).toBe("ran again");
});
