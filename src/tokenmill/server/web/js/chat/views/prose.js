// A model's words, as they grow: only blocks that have changed are made anew.
import { useChanges } from "../../shared/emitter.js";
import { html, useEffect, useMemo, useRef } from "../../shared/view.js";
import { count, duration } from "../../shared/words.js";
import { copy } from "../copying.js";
import { jsonIn } from "../json.js";
import { blocks, colours, setFormulas } from "../markdown.js";
import { partsOf } from "../thoughts.js";

export function Prose({ text, isLive }) {
  useChanges(colours);
  const parts = partsOf(text, isLive);
  return parts.map(({ isThought, content }, i) => {
    const isOpen = isLive && i === parts.length - 1;
    if (isThought) return html`<${Thoughts} key=${i} text=${content} isLive=${isOpen} />`;
    const json = jsonIn(content, isOpen);
    return html`<${Blocks} key=${i} text=${json === null ? content : `\`\`\`json\n${json}\n\`\`\``} isLive=${isOpen} />`;
  });
}

/** Folded until the reader opens it. What it took, if that is known: `tokens` and `seconds`. */
export function Thoughts({ text, isLive, tokens = 0, seconds = 0 }) {
  if (!isLive && text.trim() === "") return null; // a model that was told not to think
  const took = [tokens && `${count(tokens)} tokens`, seconds > 0 && duration(seconds)].filter(Boolean).join(", ");
  return html`
    <details class="thoughts">
      <summary>${isLive ? "Thinking…" : "Thoughts"}${took && ` (${took})`}</summary>
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
  const button = event.target.closest("button");
  if (button === null) return;
  const { note, place } = button.dataset;
  const prose = button.closest(".prose");
  if (note) return show(prose.querySelector(`li[data-note="${note}"]`));
  if (place) return show(prose.querySelector(`button[data-note="${place}"]`));
  await copy(button.closest("figure").querySelector("code").textContent);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

/** A footnote, or the place that refers to it. */
function show(element) {
  element.scrollIntoView({ block: "nearest" });
  element.focus();
}
