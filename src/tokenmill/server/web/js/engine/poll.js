// Asking the server again and again, while somebody looks.
import { ask } from "../shared/api.js";

const GENTLE = 20; // a server that takes long to answer is asked less often

/** `take` gets each answer, `fail` each error; both say whether that was the last. Returns what ends it. */
export function poll(path, periodMs, take, fail) {
  const connection = new AbortController();
  let timer = 0;

  async function look() {
    const beganMs = performance.now();
    try {
      if (!document.hidden && take(await ask(path, { signal: connection.signal }))) return;
    } catch (error) {
      if (connection.signal.aborted || fail(error)) return;
    }
    if (connection.signal.aborted) return;
    timer = setTimeout(look, Math.max(periodMs, GENTLE * (performance.now() - beganMs)));
  }

  look();
  return () => {
    connection.abort();
    clearTimeout(timer);
  };
}
