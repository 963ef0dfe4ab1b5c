import { describe, expect, it } from "vitest";
import { ago, bytes, count, duration, tokens, usd } from "./format";

describe("how things are said", () => {
  it.each([
    [null, "–"],
    [0, "0 ms"],
    [340e6, "340 ms"],
    [1.24e9, "1.2 s"],
    [59.97e9, "1 m 00 s"],
    [184e9, "3 m 04 s"],
    [7500e9, "2 h 05 m"],
  ])("duration %s is %s", (given, said) => expect(duration(given)).toBe(said));

  it("groups digits and never says 0 for what is not known", () => {
    expect(count(1234567)).toBe("1\u2009234\u2009567");
    expect(count(undefined)).toBe("–");
    expect(tokens(null, undefined)).toBeNull();
    expect(tokens(3, null)).toBe(3);
    expect(usd(null)).toBe("–");
    expect(usd(0.0015)).toBe("US$ 0.0015");
  });

  it("says bytes in binary units", () => {
    expect([0, 1023, 1536, 20 << 20].map(bytes)).toEqual(["0 B", "1023 B", "1.5 KiB", "20 MiB"]);
  });

  it("says how long ago", () => {
    const now = 1_800_000_000_000;
    expect(ago(now * 1e6 - 30e9, now)).toBe("just now");
    expect(ago(now * 1e6 - 5400e9, now)).toBe("1 h ago");
  });
});
