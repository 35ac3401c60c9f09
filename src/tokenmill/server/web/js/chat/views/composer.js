// Where questions are written, and how much of the context is used.
import { html, useEffect, useRef, useState } from "../../shared/view.js";
import { count } from "../../shared/words.js";
import { pathTo } from "../tree.js";
import { IconButton } from "./icons.js";

const MOST_ROWS_PX = 240;
const TOUCH = matchMedia("(pointer: coarse)"); // no Shift key to begin a new line with, and a keyboard that hides half the page

export function Composer({ chat, conversation }) {
  const field = useRef(null);
  const [text, setText] = useState(chat.drafts.get(conversation.id) ?? "");
  const write = (value) => {
    chat.drafts.set(conversation.id, value);
    setText(value);
    setDue(false);
  };
  const isBusy = chat.answering(conversation) !== null;
  const isReady = chat.server === "ready";
  /** Was it sent before the server was ready? Then it goes as soon as that is the case. */
  const [isDue, setDue] = useState(false);

  useEffect(() => { if (!TOUCH.matches) field.current.focus(); }, [conversation.id]);
  useEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${Math.min(field.current.scrollHeight + 2, MOST_ROWS_PX)}px`;
  }, [text]);

  const send = () => {
    const question = field.current.value.trim(); // as it is now, drawn or not
    if (question === "" || chat.answering(conversation) !== null) return;
    if (chat.server !== "ready") {
      setDue(chat.server === "loading");
      return;
    }
    chat.send(conversation, question);
    write("");
    if (!TOUCH.matches) field.current.focus();
  };
  useEffect(() => { if (isDue && isReady) send(); }, [isDue, isReady]);
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !TOUCH.matches) {
      event.preventDefault();
      send();
    }
  };
  const stop = () => {
    chat.stop(conversation);
    field.current.focus();
  };

  return html`
    <div class="composer">
      <div class="row">
        <textarea ref=${field} rows="1" aria-label="Your message" placeholder="Ask anything" value=${text}
          onInput=${(event) => write(event.target.value)} onKeyDown=${onKeyDown}></textarea>
        ${isBusy
          ? html`<${IconButton} icon="stop" label="Stop the answer" keys="Esc" kind="danger" onClick=${stop} />`
          : html`<${IconButton} icon="send" label="Send" keys="Enter" kind="primary" onClick=${send} disabled=${text.trim() === "" || !isReady} />`}
      </div>
      <${Gauge} chat=${chat} conversation=${conversation} />
    </div>`;
}

function Gauge({ chat, conversation }) {
  const { leaf, model, system, context } = conversation;
  const isIdle = chat.server === "ready" && chat.answering(conversation) === null;
  useEffect(() => { if (isIdle) chat.countContext(conversation); }, [isIdle, leaf, model, system]);
  const most = chat.modelOf(conversation)?.max_model_len;
  if (!most || leaf === null) return html`<p class="gauge hint">Answers may be wrong. Enter sends, Shift+Enter begins a new line.</p>`;
  const isOfBranch = context && pathTo(conversation, leaf).some(({ id }) => id === context.leaf);
  if (!isOfBranch) return html`<p class="gauge hint">${count(most)} tokens of context</p>`;
  const used = context.tokens ?? Infinity;
  return html`
    <p class="gauge hint ${used > most ? "over" : ""}">
      <meter min="0" max=${most} high=${0.9 * most} value=${Math.min(used, most)} aria-label="Context used"></meter>
      ${used === Infinity ? `more than ${count(most)}` : `${count(used)} of ${count(most)}`} tokens of context
    </p>`;
}
