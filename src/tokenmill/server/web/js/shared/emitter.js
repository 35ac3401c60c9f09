// Things that change, and views that follow them.
import { useLayoutEffect, useReducer } from "./view.js";

export class Emitter {
  #listeners = new Set();

  /** Be told of every change; returns what ends it. */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Tell everybody that something has changed. */
  changed() {
    for (const listener of [...this.#listeners]) listener();
  }
}

/** Draw the view anew when the emitter changes, once a frame at most. */
export function useChanges(emitter) {
  const [, redraw] = useReducer((count) => count + 1, 0);
  useLayoutEffect(() => {
    let frame = 0;
    const schedule = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        redraw();
      });
    };
    const leave = emitter.subscribe(schedule);
    return () => {
      leave();
      cancelAnimationFrame(frame);
    };
  }, [emitter]);
}
