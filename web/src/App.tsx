import { useEffect, useState } from "react";
import { Link } from "./parts/Link";
import { Mark } from "./character/Mark";
import { usePlace } from "./lib/location";
import { DiffPage } from "./pages/DiffPage";
import { RunPage } from "./pages/RunPage";
import { RunsPage } from "./pages/RunsPage";
import { Keys } from "./parts/Keys";

export function App() {
  const place = usePlace();
  const [keys, setKeys] = useState(false);
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.target instanceof HTMLInputElement) return;
      if (event.key === "?") setKeys((shown) => !shown);
      if (event.key === "Escape") setKeys(false);
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  const title = place.page === "runs" ? "Runs" : place.page === "run" ? place.run : `${place.a} → ${place.b}`;
  useEffect(() => {
    document.title = `${title} · ReplayFork`;
  }, [title]);
  return (
    <div className="app">
      <header className="bar">
        <Link className="brand" to={{ page: "runs", namespace: place.namespace, query: "" }}>
          <Mark /> ReplayFork
        </Link>
        {place.namespace && <span className="dim" title="Kubernetes namespace">{place.namespace}</span>}
        <span className="grow" />
        <button type="button" className="quiet" onClick={() => setKeys(true)} aria-label="Keyboard shortcuts">
          ?
        </button>
      </header>
      {place.page === "runs" && <RunsPage {...place} />}
      {place.page === "run" && <RunPage key={`${place.namespace}/${place.run}`} {...place} />}
      {place.page === "diff" && <DiffPage key={`${place.a}/${place.b}`} {...place} />}
      {keys && <Keys onClose={() => setKeys(false)} />}
    </div>
  );
}
