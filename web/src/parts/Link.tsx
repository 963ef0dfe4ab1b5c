import type { ReactNode } from "react";
import { go, href, type Place } from "../lib/location";

/** A link within the viewer: a real address, followed without loading the page anew. */
export function Link({ to, className, title, children }: { to: Place; className?: string; title?: string; children: ReactNode }) {
  return (
    <a
      href={href(to)}
      className={className}
      title={title}
      onClick={(event) => {
        if (event.metaKey || event.ctrlKey || event.shiftKey || event.button !== 0) return;
        event.preventDefault();
        go(to);
      }}
    >
      {children}
    </a>
  );
}
