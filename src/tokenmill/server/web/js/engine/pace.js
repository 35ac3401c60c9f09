// How often this page draws: not more than needed, never while nobody sees it, and all of it in the same frame.
import { Emitter } from "../shared/emitter.js";

const PERIOD_MS = 333;
const SLOW_MS = 950; // every third time

/** Told a few times a second while something changes; `slow` is told once a second, for what is read, not watched. */
export class Pace extends Emitter {
  slow = new Emitter();
  #lastMs = -Infinity;
  #slowMs = -Infinity;
  #isWanted = false;
  #timer = 0;

  constructor() {
    super();
    document.addEventListener("visibilitychange", () => this.#isWanted && this.ask());
  }

  /** Something has changed: draw soon, or as soon as somebody looks. */
  ask() {
    this.#isWanted = true;
    if (document.hidden || this.#timer !== 0) return;
    const waitMs = Math.max(this.#lastMs + PERIOD_MS - performance.now(), 0);
    this.#timer = setTimeout(() => this.#beat(), waitMs);
  }

  #beat() {
    this.#timer = 0;
    if (document.hidden) return;
    this.#isWanted = false;
    this.#lastMs = performance.now();
    this.changed();
    if (this.#lastMs - this.#slowMs < SLOW_MS) return this.ask(); // what is slow has not been told yet
    this.#slowMs = this.#lastMs;
    this.slow.changed();
  }
}
