// The question for an API key.
import { ServerError, ask, key } from "./api.js";
import { html, useEffect, useRef, useState } from "./view.js";
import { explain } from "./words.js";

const SENDABLE = /^[\x21-\x7e]+$/; // in a header

/** Asks until the server takes the key; then calls `onKey`. */
export function KeyDialog({ onKey }) {
  const dialog = useRef(null);
  const field = useRef(null);
  const [problem, setProblem] = useState(key.get() ? "The key that is stored here is not taken any more." : "");

  useEffect(() => dialog.current.showModal(), []);

  async function enter(event) {
    event.preventDefault();
    const form = new FormData(event.target);
    const given = form.get("key").trim();
    try {
      if (!SENDABLE.test(given)) throw new ServerError(401);
      await ask("/v1/models", { headers: { Authorization: `Bearer ${given}` } });
      key.set(given, form.get("kept") !== null);
      onKey();
    } catch (error) {
      setProblem(error.status === 401 ? "That key is not one of the server's." : explain(error));
      field.current.select();
    }
  }

  return html`
    <dialog class="dialog" ref=${dialog} aria-labelledby="key-title" onCancel=${(event) => event.preventDefault()}>
      <form onSubmit=${enter}>
        <h2 id="key-title">This server wants an API key</h2>
        <label>API key
          <input ref=${field} name="key" type="password" autocomplete="off" required autofocus />
        </label>
        <label class="check"><input name="kept" type="checkbox" /> Keep it in this browser</label>
        <p class="hint">The key stays in your browser, and goes to this server alone.</p>
        ${problem && html`<p class="problem" role="alert">${problem}</p>`}
        <div class="buttons"><button class="primary">Continue</button></div>
      </form>
    </dialog>`;
}
