/** The recorder as a small mark. */
export function Mark() {
  return (
    <svg width="20" height="20" viewBox="0 0 24 24" aria-hidden>
      <rect x="2" y="5" width="20" height="14" rx="3" fill="var(--accent)" />
      <circle cx="8" cy="12" r="3.2" fill="var(--ground)" />
      <circle cx="16" cy="12" r="3.2" fill="var(--ground)" />
      <circle cx="8" cy="12" r="1" fill="var(--accent)" />
      <circle cx="16" cy="12" r="1" fill="var(--accent)" />
    </svg>
  );
}
