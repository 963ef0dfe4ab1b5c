import { useQuery } from "@tanstack/react-query";
import { useState } from "react";
import { api } from "../lib/api";
import { bytes } from "../lib/format";
import { Failure, LongText } from "./States";

interface State {
  namespace: string;
  run: string;
  digest: string;
}

const MOST = 512 * 1024;

/** A workspace state: folders open as they are asked for, a file is shown beside. */
export function Files(state: State) {
  const [file, setFile] = useState<{ path: string; size: number } | null>(null);
  return (
    <>
      <Folder {...state} path="" onFile={(path, size) => setFile({ path, size })} />
      {file && <File key={file.path} {...state} {...file} />}
    </>
  );
}

function Folder({ path, onFile, ...state }: State & { path: string; onFile: (path: string, size: number) => void }) {
  const query = useQuery({ queryKey: ["tree", state, path], queryFn: () => api.tree(state.namespace, state.run, state.digest, path), staleTime: Infinity });
  if (query.error) return <Failure error={query.error} retry={() => void query.refetch()} />;
  if (!query.data) return <div className="skeleton" style={{ width: 160, margin: 6 }} />;
  if (query.data.entries.length === 0) return <p className="dim">(empty)</p>;
  const below = (name: string) => (path ? `${path}/${name}` : name);
  return (
    <ul className={`files${path ? "" : " top"}`}>
      {query.data.entries.map((entry) => (
        <li key={entry.name}>
          {entry.kind === "directory" ? (
            <OpenFolder {...state} path={below(entry.name)} name={entry.name} onFile={onFile} />
          ) : entry.kind === "symlink" ? (
            <code>
              {entry.name} → {entry.target}
            </code>
          ) : (
            <>
              <button type="button" onClick={() => onFile(below(entry.name), entry.size ?? 0)}>
                {entry.name}
                {entry.kind === "executable" ? "*" : ""}
              </button>
              <span className="size">{bytes(entry.size)}</span>
            </>
          )}
        </li>
      ))}
    </ul>
  );
}

function OpenFolder({ name, ...rest }: State & { name: string; path: string; onFile: (path: string, size: number) => void }) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" aria-expanded={open} onClick={() => setOpen(!open)}>
        {open ? "▾" : "▸"} {name}/
      </button>
      {open && <Folder {...rest} />}
    </>
  );
}

function File({ path, size, ...state }: State & { path: string; size: number }) {
  const query = useQuery({
    queryKey: ["file", state, path],
    queryFn: () => api.file(state.namespace, state.run, state.digest, path),
    enabled: size <= MOST,
    staleTime: Infinity,
  });
  if (size > MOST) return <p className="note">{path} has {bytes(size)}; `kubectl replay` can fetch it.</p>;
  if (query.error) return <Failure error={query.error} retry={() => void query.refetch()} />;
  if (!query.data) return <div className="skeleton" style={{ width: 240, margin: "16px 0" }} />;
  const view = new Uint8Array(query.data);
  if (view.includes(0)) return <p className="note">{path} is binary, {bytes(size)}.</p>;
  return <LongText label={path} text={new TextDecoder().decode(view)} />;
}
