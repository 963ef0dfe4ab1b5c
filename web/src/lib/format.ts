/** How things are said: durations as people say them, unknown as "–", never 0. */

const UNKNOWN = "–";

/** Nanoseconds as `340 ms`, `1.2 s`, `3 m 04 s` or `2 h 05 m`. */
export function duration(nanoseconds: number | null | undefined): string {
  if (nanoseconds == null) return UNKNOWN;
  const ms = Math.floor(nanoseconds / 1e6);
  if (ms < 1000) return `${ms} ms`;
  const seconds = nanoseconds / 1e9;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const two = (n: number) => String(n).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} m ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor(whole / 60) % 60)} m`;
}

/** A number with its digits grouped by thin spaces. */
export function count(n: number | null | undefined): string {
  if (n == null) return UNKNOWN;
  return String(n).replace(/\B(?=(\d{3})+(?!\d))/g, "\u2009");
}

export function bytes(n: number | null | undefined): string {
  if (n == null) return UNKNOWN;
  if (n < 1024) return `${n} B`;
  const units = ["KiB", "MiB", "GiB", "TiB"];
  let value = n;
  let unit = "B";
  for (const next of units) {
    if (value < 1024) break;
    value /= 1024;
    unit = next;
  }
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${unit}`;
}

export function usd(n: number | null | undefined): string {
  return n == null ? UNKNOWN : `US$ ${n.toFixed(n < 0.1 ? 4 : 2)}`;
}

/** The absolute time, for a tooltip. */
export function absolute(nanoseconds: number | null | undefined): string {
  return nanoseconds == null ? UNKNOWN : new Date(nanoseconds / 1e6).toISOString().replace("T", " ").replace("Z", " UTC");
}

export function ago(nanoseconds: number, now = Date.now()): string {
  const seconds = Math.max(0, Math.round(now / 1000 - nanoseconds / 1e9));
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}

export function tokens(input: number | null | undefined, output: number | null | undefined): number | null {
  return input == null && output == null ? null : (input ?? 0) + (output ?? 0);
}
