const KEYS: [string, string][] = [
  ["← →", "one step back, forward"],
  ["⇧ ← →", "ten steps"],
  ["Home End", "first, last step"],
  ["Space", "play, pause"],
  ["/", "search"],
  ["1 … 5", "tabs of the inspector"],
  ["d", "compare with the source or the newest fork"],
  ["f", "how to fork at this step"],
  ["?", "these keys"],
];

export function Keys({ onClose }: { onClose: () => void }) {
  return (
    <div className="overlay" onClick={onClose} role="presentation">
      <div className="dialog" role="dialog" aria-label="Keyboard shortcuts" onClick={(event) => event.stopPropagation()}>
        <h2>Keys</h2>
        <dl className="keys">
          {KEYS.map(([key, what]) => (
            <div key={key}>
              <dt>
                <kbd>{key}</kbd>
              </dt>
              <dd>{what}</dd>
            </div>
          ))}
        </dl>
        <button type="button" onClick={onClose} autoFocus>
          Close
        </button>
      </div>
    </div>
  );
}
