// A model's words, as they grow: only blocks that have changed are made anew.
import { useChanges } from "../../shared/emitter.js";
import { html, useEffect, useMemo, useRef } from "../../shared/view.js";
import { copy } from "../copying.js";
import { blocks, colours, setFormulas } from "../markdown.js";

const THOUGHTS = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

export function Prose({ text, isLive }) {
  useChanges(colours);
  const thoughts = THOUGHTS.exec(text);
  const rest = thoughts ? text.slice(thoughts[0].length) : text;
  return html`
    ${thoughts && html`<${Thoughts} text=${thoughts[1]} isLive=${isLive && rest === ""} />`}
    <${Blocks} text=${rest} isLive=${isLive} />`;
}

function Thoughts({ text, isLive }) {
  return html`
    <details class="thoughts">
      <summary>${isLive ? "Thinking…" : "Thoughts"}</summary>
      <${Blocks} text=${text} isLive=${isLive} />
    </details>`;
}

function Blocks({ text, isLive }) {
  const made = useMemo(() => blocks(text, isLive), [text, isLive, colours.version]);
  return html`<div class="prose" onClick=${onClick}>${made.map((content, i) => html`<${Block} key=${i} content=${content} />`)}</div>`;
}

function Block({ content }) {
  const element = useRef(null);
  useEffect(() => { setFormulas(element.current); }, [content]);
  return html`<div ref=${element} dangerouslySetInnerHTML=${{ __html: content }}></div>`;
}

async function onClick(event) {
  const button = event.target.closest("[data-copy]");
  if (button === null) return;
  await copy(button.closest("figure").querySelector("code").textContent);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}
