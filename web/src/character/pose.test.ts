import { expect, it } from "vitest";
import { caption, pose } from "./pose";

const step = (over: object) => ({ kind: "ShellCommand", status: "Completed", verdict: "allow", name: "lint", ...over }) as Parameters<typeof pose>[0];

it.each([
  [{}, "typing"],
  [{ status: "Failed" }, "failing"],
  [{ kind: "LlmCall" }, "calling"],
  [{ kind: "LlmCall", status: "Blocked" }, "stopped"],
  [{ verdict: "gate:deny" }, "stopped"],
  [{ verdict: "tripped" }, "tripped"],
])("%o is %s", (over, want) => expect(pose(step(over))).toBe(want));

it("says in one sentence what happens", () => {
  expect(caption(step({}))).toBe("Running a command: lint.");
  expect(caption(step({ status: "Failed" }))).toBe("Running a command: lint, and it failed.");
  expect(caption(step({ status: "Blocked", blocked: { reason: "ModelBlocked", message: "no model" } }))).toBe("lint can't run: no model");
});
