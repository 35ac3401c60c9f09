// One message: what was said, what it took, and what can be done with it.
import { Emitter, useChanges } from "../../shared/emitter.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../../shared/view.js";
import { count, duration, rate } from "../../shared/words.js";
import { RESTARTED, canGoOn } from "../answer.js";
import { copy } from "../copying.js";
import { SPEAKERS, isSaid, siblings, textOf } from "../tree.js";
import { Calls, Results } from "./calls.js";
import { IconButton } from "./icons.js";
import { Prose, Thoughts } from "./prose.js";

const QUIET = new Emitter();
const ENDINGS = {
  length: "Ended at the longest length.", cancelled: "Stopped.", timeout: "Ended: the time was up.", edited: "Edited by you.",
};

export function Message({ chat, conversation, message, answering }) {
  useChanges(answering ?? QUIET);
  const [isEdited, setEdited] = useState(false);
  const [isRaw, setRaw] = useState(false);
  const isUser = message.role === "user";
  const isLive = answering !== null;
  const article = useRef(null);
  const close = () => {
    setEdited(false);
    requestAnimationFrame(() => article.current?.querySelector("[data-edit]")?.focus());
  };
  const save = (text) => {
    close();
    if (isUser) chat.edit(conversation, message, text);
    else chat.rewrite(conversation, message, text);
  };
  const body = isEdited
    ? html`<${Editor} text=${message.content} label=${isUser ? "Your question" : "The answer"} action=${isUser ? "Send" : "Save"} isBusy=${chat.answering(conversation) !== null} onSave=${save} onCancel=${close} />`
    : message.role === "tool" ? html`<${Results} message=${message} />`
    : isUser || isRaw ? html`<p class="plain">${textOf(message)}</p>`
    : html`<${Answer} chat=${chat} conversation=${conversation} message=${message} isLive=${isLive} />`;

  return html`
    <article ref=${article} class="message ${message.role}" aria-label=${SPEAKERS[message.role]} aria-busy=${isLive} data-id=${message.id}>
      ${body}
      ${isLive && html`<${Progress} answering=${answering} message=${message} />`}
      ${!isLive && message.error && html`<${Problem} chat=${chat} conversation=${conversation} message=${message} />`}
      ${!isEdited && html`
        <footer>
          <${Branches} chat=${chat} conversation=${conversation} message=${message} />
          <${Actions} chat=${chat} conversation=${conversation} message=${message} isLive=${isLive} onEdit=${() => setEdited(true)}
            isRaw=${isRaw} onRaw=${() => setRaw(!isRaw)} />
          ${message.stats && html`<${Stats} stats=${message.stats} />`}
          ${!isLive && ENDINGS[message.finish] && html`<span class="ending">${message.stats ? "· " : ""}${ENDINGS[message.finish]}</span>`}
        </footer>`}
    </article>`;
}

function Answer({ chat, conversation, message, isLive }) {
  const { content, reasoning, thinking, calls } = message;
  const isThinking = isLive && content === "" && !calls;
  return html`
    ${reasoning && html`<${Thoughts} text=${reasoning} isLive=${isThinking} ...${thinking} />`}
    <${Prose} text=${content} isLive=${isLive && !calls} />
    ${calls && html`<${Calls} chat=${chat} conversation=${conversation} message=${message} isLive=${isLive} />`}`;
}

function Progress({ answering, message }) {
  const words = answering.isStopped ? "Stopping…" : answering.isReconnecting ? "The connection was lost; trying again…" : !isSaid(message) ? "Waiting for the first token…" : "";
  return html`<p class="progress"><span class="cursor" aria-hidden="true"></span>${words}</p>`;
}

function Problem({ chat, conversation, message }) {
  const [left, setLeft] = useState(message.error.retryAfter ?? 0);
  useEffect(() => {
    if (left <= 0) return undefined;
    const timer = setTimeout(() => setLeft(left - 1), 1000);
    return () => clearTimeout(timer);
  }, [left]);
  const goesOn = canGoOn(conversation, message);
  const again = () => (goesOn ? chat.goOn(conversation, message) : chat.regenerate(conversation, message));
  return html`
    <div class="trouble">
      <p role="alert">${message.error.text}</p>
      <button onClick=${again}>${goesOn && message.finish === RESTARTED ? "Continue" : "Try again"}${left > 0 ? ` (better in ${Math.ceil(left)} s)` : ""}</button>
    </div>`;
}

function Branches({ chat, conversation, message }) {
  const group = useRef(null);
  useEffect(() => {
    if (chat.focus?.id !== message.id || !group.current) return;
    const wanted = group.current.querySelector(`[aria-label="${chat.focus.label}"]:not(:disabled)`) ?? group.current.querySelector("button:not(:disabled)");
    chat.focus = null;
    wanted?.focus();
  });
  const all = siblings(conversation, message);
  if (all.length < 2) return null;
  const place = all.findIndex(({ id }) => id === message.id);
  const arrow = (label, icon, step) => html`
    <${IconButton} icon=${icon} label=${label} disabled=${!all[place + step]} onClick=${() => chat.choose(conversation, all[place + step], label)} />`;
  return html`
    <span class="branches" role="group" aria-label="Branches" ref=${group}>
      ${arrow("Previous branch", "left", -1)}
      <span>${place + 1}/${all.length}</span>
      ${arrow("Next branch", "right", 1)}
    </span>`;
}

function Actions({ chat, conversation, message, isLive, onEdit, isRaw, onRaw }) {
  const [isCopied, setCopied] = useState(false);
  const isBusy = chat.answering(conversation) !== null;
  const isUser = message.role === "user";
  const isAnswer = message.role === "assistant";
  const copyIt = async () => {
    await copy(textOf(message));
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  const action = (icon, label, onClick, isOff = isBusy) =>
    html`<${IconButton} icon=${icon} label=${label} onClick=${onClick} disabled=${isOff} data-edit=${icon === "edit" ? "" : undefined} />`;
  const another = () => {
    chat.regenerate(conversation, message);
    document.querySelector(".composer textarea").focus();
  };
  if (isLive) return null;
  return html`
    <span class="actions">
      ${action("copy", isCopied ? "Copied" : "Copy", copyIt, false)}
      ${message.role !== "tool" && action("edit", isUser ? "Edit and ask again" : "Edit the answer", onEdit)}
      ${isAnswer && action("again", "Another answer", another)}
      ${isAnswer && !message.error && canGoOn(conversation, message) && action("forward", "Continue", () => chat.goOn(conversation, message))}
      ${isAnswer && action("fork", "Fork to a new conversation", () => chat.fork(conversation, message))}
      ${isAnswer && action("code", isRaw ? "Show it formatted" : "Show it as it was written", onRaw, false)}
    </span>`;
}

function Stats({ stats }) {
  const parts = [
    `${count(stats.completion)} tokens`,
    stats.rate !== null && `${rate(stats.rate)} tokens/s`,
    stats.ttft !== null && `first after ${duration(stats.ttft)}`,
  ].filter(Boolean);
  return html`
    <span class="stats">${parts.join(" · ")} · <span class="reused" data-cached=${stats.cached} data-prompt=${stats.prompt}>${count(stats.cached)} of ${count(stats.prompt)} reused</span></span>`;
}

function Editor({ text, label, action, isBusy, onSave, onCancel }) {
  const field = useRef(null);
  useLayoutEffect(() => { // with the field itself: what is typed at once must not find the caret moved
    field.current.focus();
    field.current.setSelectionRange(text.length, text.length);
  }, []);
  const save = () => { if (field.current.value.trim() && !isBusy) onSave(field.current.value); };
  const onKeyDown = (event) => {
    if (event.key === "Escape") onCancel();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) save();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`
    <div class="editor">
      <textarea ref=${field} rows=${Math.min(12, text.split("\n").length + 1)} aria-label=${label} onKeyDown=${onKeyDown} defaultValue=${text}></textarea>
      <div class="buttons">
        <button onClick=${onCancel}>Cancel</button>
        <button class="primary" onClick=${save} disabled=${isBusy} title=${isBusy ? "When the answer is complete" : "Ctrl+Enter"}>${action}</button>
      </div>
    </div>`;
}
