import { expect, it } from "vitest";
import { href, parse, type Place } from "./location";

const places: Place[] = [
  { page: "runs", namespace: "", query: "" },
  { page: "runs", namespace: "agents", query: "a b" },
  { page: "run", namespace: "agents", run: "scripted-agent", step: 7, tab: "output" },
  { page: "run", namespace: "", run: "odd/name?", step: null, tab: "overview" },
  { page: "diff", namespace: "agents", a: "scripted-agent", b: "shorter-wait", step: 7 },
];

it.each(places)("an address says what it was written from: %o", (place) => {
  expect(parse(href(place))).toEqual(place);
});

it("what no address of ours says is ignored", () => {
  expect(parse("/replay/x?step=-1&tab=none")).toEqual({ page: "run", namespace: "", run: "x", step: null, tab: "overview" });
  expect(parse("/elsewhere")).toEqual({ page: "runs", namespace: "", query: "" });
});
