// What a core did, second by second: rates as the server has them (`telemetry/rates.py`), and what plots show.

export const KEPT_S = 120;
const WINDOW_S = 10;
const LEAST_S = 0.5; // a rate over less than this is noise

export class History {
  #seconds = [];
  #began = null;

  noteTick(at, generated, prefill, stepMs) {
    const second = this.#second(at);
    second.ticks += 1;
    second.generated += generated;
    second.prefill += prefill;
    second.stepMs += stepMs;
    second.longestMs = Math.max(second.longestMs, stepMs);
  }

  /** Tokens beside those that steps give in any case. */
  noteDrawn(at, generated) {
    this.#second(at).generated += generated;
  }

  /** A request started with so much of its prompt cached. */
  noteStart(at, prompt, cached) {
    const second = this.#second(at);
    second.prompt += prompt;
    second.cached += cached;
  }

  /** From a token of a request to its next. */
  noteGap(at, gapS) {
    this.#second(at).gapsMs.push(1000 * gapS);
  }

  /** By the second, over the last ten; the hit rate is the share of prompt tokens that were cached. */
  rates(at) {
    const first = Math.floor(at) - WINDOW_S + 1;
    const seconds = this.#seconds.filter(({ number }) => first <= number && number <= at);
    if (this.#began === null || seconds.length === 0) return { ticks: 0, generated: 0, prefill: 0, hitRate: null };
    const span = Math.max(at - Math.max(first, this.#began), LEAST_S);
    const sum = (name) => seconds.reduce((total, one) => total + one[name], 0);
    const prompt = sum("prompt");
    return {
      ticks: sum("ticks") / span,
      generated: sum("generated") / span,
      prefill: sum("prefill") / span,
      hitRate: prompt ? sum("cached") / prompt : null,
    };
  }

  /** The last whole seconds, oldest first; null where nothing was done. */
  seconds(at) {
    const end = Math.floor(at);
    const found = new Array(KEPT_S).fill(null);
    for (const second of this.#seconds) {
      const place = second.number - end + KEPT_S;
      if (place >= 0 && place < KEPT_S) found[place] = second;
    }
    return found;
  }

  get latest() {
    return this.#seconds.at(-1)?.number ?? -Infinity;
  }

  #second(at) {
    const number = Math.floor(at);
    this.#began ??= at;
    const last = this.#seconds.at(-1);
    if (last?.number === number) return last;
    if (last) close(last);
    if (this.#seconds.length > KEPT_S) this.#seconds.shift();
    const zeros = { ticks: 0, generated: 0, prefill: 0, prompt: 0, cached: 0, stepMs: 0, longestMs: 0 };
    const second = { number, ...zeros, gapsMs: [], p50Ms: null, p99Ms: null };
    this.#seconds.push(second);
    return second;
  }
}

/** A second is over: all that is kept of its gaps is how they spread. */
function close(second) {
  const gaps = second.gapsMs.sort((one, other) => one - other);
  if (gaps.length > 0) {
    second.p50Ms = gaps[Math.floor(0.5 * (gaps.length - 1))];
    second.p99Ms = gaps[Math.ceil(0.99 * (gaps.length - 1))];
  }
  second.gapsMs = [];
}
