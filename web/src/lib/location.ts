/** What the page shows, as the address says it. The address is the only place where that is kept. */
import { useSyncExternalStore } from "react";

export const BASE = "/replay/";
export const TABS = ["overview", "input", "output", "workspace", "raw"] as const;
export type Tab = (typeof TABS)[number];

export type Place =
  | { page: "runs"; namespace: string; query: string }
  | { page: "run"; namespace: string; run: string; step: number | null; tab: Tab }
  | { page: "diff"; namespace: string; a: string; b: string; step: number | null };

/** Reads an address; anything unknown is the list of runs. */
export function parse(href: string): Place {
  const url = new URL(href, "http://viewer.invalid");
  const namespace = url.searchParams.get("namespace") ?? "";
  const parts = url.pathname.startsWith(BASE) ? url.pathname.slice(BASE.length).split("/").filter(Boolean).map(decodeURIComponent) : [];
  const number = Number(url.searchParams.get("step"));
  const step = Number.isInteger(number) && number > 0 ? number : null;
  const [first, word, second] = parts;
  if (first && word === "vs" && second) return { page: "diff", namespace, a: first, b: second, step };
  if (first && !word) {
    const tab = TABS.find((t) => t === url.searchParams.get("tab")) ?? "overview";
    return { page: "run", namespace, run: first, step, tab };
  }
  return { page: "runs", namespace, query: url.searchParams.get("q") ?? "" };
}

/** Writes an address. */
export function href(place: Place): string {
  const params = new URLSearchParams();
  if (place.namespace) params.set("namespace", place.namespace);
  let path = BASE;
  if (place.page === "runs" && place.query) params.set("q", place.query);
  if (place.page !== "runs" && place.step) params.set("step", String(place.step));
  if (place.page === "run") {
    path += encodeURIComponent(place.run);
    if (place.tab !== "overview") params.set("tab", place.tab);
  }
  if (place.page === "diff") path += `${encodeURIComponent(place.a)}/vs/${encodeURIComponent(place.b)}`;
  const query = params.toString();
  return query ? `${path}?${query}` : path;
}

const listeners = new Set<() => void>();
const tell = () => listeners.forEach((listener) => listener());
addEventListener("popstate", tell);

/** Goes to a place; moving within a page replaces the entry, so that Back leaves the page. */
export function go(place: Place, how: "push" | "replace" = "push"): void {
  const to = href(place);
  if (to === location.pathname + location.search) return;
  history[how === "push" ? "pushState" : "replaceState"](null, "", to);
  tell();
}

export function usePlace(): Place {
  const subscribe = (listener: () => void) => {
    listeners.add(listener);
    return () => listeners.delete(listener);
  };
  const address = useSyncExternalStore(subscribe, () => location.pathname + location.search);
  return parse(address);
}
