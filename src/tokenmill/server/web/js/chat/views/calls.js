// Calls of tools: what the model asks for, a form for what they return, and what they have returned.
import { html } from "../../shared/view.js";
import { jsonIn, indented } from "../json.js";
import { isPending } from "../tree.js";

/** The calls of an answer. While they wait for their results, each has a field for one. */
export function Calls({ chat, conversation, message, isLive }) {
  const isAsked = !isLive && isPending(conversation, message);
  const cards = message.calls.map(({ name, arguments: given }, i) => html`
    <${Card} key=${i} label=${`Call of ${name}`} kind="call" name=${name} text=${indented(given)}>
      ${isAsked && html`<textarea name=${i} rows="2" required aria-label=${`Result of ${name}`} placeholder="What it returns: text or JSON" onKeyDown=${submitOnEnter}></textarea>`}
    <//>`);
  if (!isAsked) return html`<div class="calls">${cards}</div>`;
  const send = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    chat.answerCalls(conversation, message, message.calls.map((_, i) => form.get(String(i))));
    document.querySelector(".composer textarea").focus();
  };
  const isOff = chat.server !== "ready" || chat.answering(conversation) !== null;
  return html`
    <form class="calls" aria-label="Tool results" onSubmit=${send}>
      ${cards}
      <div class="buttons"><button class="primary" disabled=${isOff} title="Ctrl+Enter">${message.calls.length > 1 ? "Send the results" : "Send the result"}</button></div>
    </form>`;
}

/** What tools have returned. */
export const Results = ({ message }) => html`
  <div class="calls">
    ${message.results.map(({ name, content }, i) => html`
      <${Card} key=${i} label=${`Result of ${name}`} kind="result" name=${name} text=${jsonIn(content) ?? content} />`)}
  </div>`;

const Card = ({ label, kind, name, text, children }) => html`
  <section class="card" aria-label=${label}>
    <h3>${kind} <code>${name}</code></h3>
    <pre tabindex="0" role="group" aria-label=${kind === "call" ? "Arguments" : "Content"}>${text}</pre>
    ${children}
  </section>`;

function submitOnEnter(event) {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}
