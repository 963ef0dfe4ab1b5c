// The viewer in a real browser, as a person uses it: opens a run, drags the scrubber, opens a call, opens a fork's diff. Leaves a
// screenshot of each, light and dark. Called with the start URL that `kubectl replay ui` prints, a run and its fork.
//
//   node e2e/viewer.mjs URL RUN FORK FOLDER
import assert from "node:assert/strict";
import { mkdirSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { chromium } from "playwright-core";

const [url, run, fork, folder] = process.argv.slice(2);
assert.ok(url && run && fork && folder, "usage: viewer.mjs URL RUN FORK FOLDER");
mkdirSync(folder, { recursive: true });
const profile = mkdtempSync(join(tmpdir(), "replayfork-viewer-"));

const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"];

async function use(colorScheme) {
  const context = await chromium.launchPersistentContext(join(profile, colorScheme), {
    executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
    args: FLAGS,
    colorScheme,
    viewport: { width: 1360, height: 860 },
  });
  const page = context.pages()[0] ?? (await context.newPage());
  const problems = [];
  page.on("pageerror", (error) => problems.push(String(error)));
  page.on("console", (message) => message.type() === "error" && problems.push(message.text()));
  const shot = (name) => page.screenshot({ path: join(folder, `${name}-${colorScheme}.png`) });
  try {
    await page.goto(url);
    const row = page.getByRole("row").filter({ has: page.getByRole("link", { name: run, exact: true }) });
    await row.first().waitFor();
    assert.match(await row.first().innerText(), /Failed/);
    await shot("1-runs");

    await page.getByRole("link", { name: run, exact: true }).first().click();
    await page.getByRole("option").first().waitFor();
    const slider = page.getByRole("slider", { name: "Step" });
    const last = Number(await slider.getAttribute("aria-valuemax"));
    assert.equal(last, 9, "the run has nine steps");
    assert.match(await slider.getAttribute("aria-valuetext"), /test_validate, Failed/, "a run opens at what decides it");

    const box = await slider.boundingBox();
    await page.mouse.move(box.x + box.width - 24, box.y + 16);
    await page.mouse.down();
    await page.mouse.move(box.x + box.width / 2, box.y + 16, { steps: 8 });
    await page.mouse.move(box.x + 20, box.y + 16, { steps: 8 });
    await page.mouse.up();
    assert.equal(await slider.getAttribute("aria-valuenow"), "1", "the scrubber was dragged to the first step");
    assert.match(page.url(), /step=1\b/, "the address says the step");
    await page.keyboard.press("End");
    assert.equal(await slider.getAttribute("aria-valuenow"), String(last));
    await page.keyboard.press("ArrowLeft");
    await page.keyboard.press("ArrowLeft");
    assert.match(await page.getByRole("option", { selected: true }).innerText(), /test_validate/, "tree and timeline agree");
    await shot("2-run");

    await page.getByRole("option", { name: /test_before/ }).click();
    await page.getByRole("tab", { name: "Output" }).click();
    await page.getByText("FAILED test_exhausted").waitFor();
    await page.getByRole("tab", { name: "Input" }).click();
    await page.getByText("run_tests.py {{ select_tests | words }}").waitFor();
    await shot("3-call");
    await page.getByRole("tab", { name: "Workspace" }).click();
    await page.getByRole("button", { name: "▸ auth/" }).click();
    await page.getByRole("button", { name: "pool.py" }).click();
    await page.getByText("class PoolExhausted").waitFor();
    await shot("4-workspace");

    await page.getByRole("link", { name: fork, exact: true }).click();
    await page.getByRole("heading", { name: /`test_validate` now passes/ }).waitFor();
    await page.getByText("⚑ first divergence").first().waitFor();
    assert.equal(await page.getByText("ModelBlocked").count() > 0, true, "a blocked step shows its reason");
    await shot("5-diff");
    await page.getByRole("button", { name: "Side by side" }).click();
    await page.locator("td.code.del").first().waitFor();
    await shot("6-side-by-side");

    await page.goto(`${new URL(url).origin}/replay/no-such-run`);
    await page.getByText("There is no such run").waitFor();
    const expected = problems.filter((text) => !/404/.test(text));
    assert.deepEqual(expected, [], "the browser's console has errors");
  } finally {
    await context.close();
  }
}

try {
  for (const scheme of ["light", "dark"]) await use(scheme);
  console.log(`viewer: every page was used, light and dark; screenshots in ${folder}`);
} finally {
  rmSync(profile, { recursive: true, force: true });
}
