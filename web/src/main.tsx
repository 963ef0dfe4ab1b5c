import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { App } from "./App";
import { ApiError } from "./lib/api";
import "./styles/theme.css";
import "./styles/layout.css";
import "./styles/run.css";
import "./styles/diff.css";

const client = new QueryClient({
  defaultOptions: {
    queries: {
      staleTime: 10_000,
      // What the server refuses it will refuse again; only what can't be reached is asked for once more.
      retry: (failures, error) => failures < 2 && (!(error instanceof ApiError) || error.status === 0 || error.status >= 500),
    },
  },
});

const root = document.getElementById("root");
if (!root) throw new Error("the page has no #root");
createRoot(root).render(
  <StrictMode>
    <QueryClientProvider client={client}>
      <App />
    </QueryClientProvider>
  </StrictMode>,
);
