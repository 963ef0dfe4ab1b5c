import react from "@vitejs/plugin-react";
import { defineConfig } from "vitest/config";

// The api-server serves the viewer below /replay; in development its API is reached through `kubectl replay ui --port 4200`
// or an api-server with auth.mode None.
const api = process.env["REPLAYFORK_DEV_API"] ?? "http://127.0.0.1:3210";

export default defineConfig({
  base: "/replay/",
  plugins: [react()],
  build: { target: "es2022", sourcemap: false },
  server: { proxy: { "/api": api } },
  test: { environment: "jsdom", include: ["src/**/*.test.{ts,tsx}"] },
});
