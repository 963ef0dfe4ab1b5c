/** The api-server, by the types of its OpenAPI document. */
import type { components } from "../api/schema";

type Schemas = components["schemas"];
export type Run = Schemas["Run"];
export type RunPage = Schemas["RunPage"];
export type SpanSummary = Schemas["SpanSummary"];
export type SpanPage = Schemas["SpanPage"];
export type SpanDetail = Schemas["SpanDetail"];
export type Span = Schemas["Span"];
export type SpanKind = Schemas["SpanKind"];
export type Status = Schemas["Status"];
export type Fidelity = Schemas["Fidelity"];
export type RunDiff = Schemas["RunDiff"];
export type SpanDiff = Schemas["SpanDiff"];
export type SpanSide = Schemas["SpanSide"];
export type JsonDiff = Schemas["JsonDiff"];
export type FileChange = Schemas["FileChange"];
export type FileSide = Schemas["FileSide"];
export type TreeListing = Schemas["TreeListing"];
export type SnapshotRef = Schemas["SnapshotRef"];

/** An error answer, with what to do about it. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    readonly reason: string,
    message: string,
  ) {
    super(message);
  }
}

async function read(path: string, namespace: string, params: Record<string, string> = {}): Promise<Response> {
  const query = new URLSearchParams(params);
  if (namespace) query.set("namespace", namespace);
  let response: Response;
  try {
    response = await fetch(`/api/v1${path}?${query}`, { headers: { accept: "application/json" } });
  } catch {
    throw new ApiError(0, "Unreachable", "The api-server can't be reached. Is `kubectl replay ui` still running?");
  }
  if (response.ok) return response;
  const problem = (await response.json().catch(() => null)) as Partial<Schemas["Problem"]> | null;
  throw new ApiError(response.status, problem?.reason ?? "Unknown", problem?.detail ?? `The api-server answered with ${response.status}.`);
}

async function json<T>(path: string, namespace: string, params?: Record<string, string>): Promise<T> {
  return (await read(path, namespace, params)).json() as Promise<T>;
}

const e = encodeURIComponent;

export const api = {
  runs: (namespace: string, q: string, before?: string) =>
    json<RunPage>("/runs", namespace, { limit: "100", ...(q ? { q } : {}), ...(before ? { before } : {}) }),
  run: (namespace: string, run: string) => json<Run>(`/runs/${e(run)}`, namespace),
  forks: (namespace: string, run: string) => json<Run[]>(`/runs/${e(run)}/forks`, namespace),
  span: (namespace: string, run: string, span: string) => json<SpanDetail>(`/runs/${e(run)}/spans/${e(span)}`, namespace),
  tree: (namespace: string, run: string, digest: string, path: string) =>
    json<TreeListing>(`/runs/${e(run)}/snapshots/${digest}/tree`, namespace, { path }),
  file: async (namespace: string, run: string, digest: string, path: string) =>
    (await read(`/runs/${e(run)}/snapshots/${digest}/file`, namespace, { path })).arrayBuffer(),
  diff: (namespace: string, a: string, b: string) => json<RunDiff>(`/diffs/${e(a)}/${e(b)}`, namespace),
  /** All summaries of a run, page by page. */
  spans: async (namespace: string, run: string): Promise<SpanSummary[]> => {
    const all: SpanSummary[] = [];
    for (let after: string | undefined; ; ) {
      const page: SpanPage = await json<SpanPage>(`/runs/${e(run)}/spans`, namespace, { limit: "5000", ...(after ? { after } : {}) });
      all.push(...page.spans);
      if (!page.next) return all;
      after = page.next;
    }
  },
};
