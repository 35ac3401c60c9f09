// The strip of recent steps. Above the line a brick for every sequence that decodes, below it, hatched, what prefills.
import { count } from "../shared/words.js";
import { html, useRef, useState } from "../shared/view.js";
import { Canvas } from "./canvas.js";
import { palette } from "./palette.js";

const HEIGHT = 176;
const PITCH = 5; // from bar to bar
const BAR = 4;
const GUTTER = 40; // for the scales
const DECODE_HEIGHT = 92;
const LINE = 8 + DECODE_HEIGHT; // where decode and prefill meet
const PREFILL_HEIGHT = HEIGHT - LINE - 10;
const FAINT = 0.2;

/** `onPick` gets the request whose part of a step was clicked. */
export function Strip({ core, pace, selected, onPick }) {
  const shown = useRef(null);
  const [pointed, setPointed] = useState(null);

  function draw(context, width) {
    shown.current = lay(core.ticks, width);
    drawStrip(context, width, shown.current, selected);
  }

  function find(event) {
    const box = event.target.getBoundingClientRect();
    return shown.current && partAt(shown.current, event.clientX - box.left, event.clientY - box.top);
  }

  function point(event) {
    const part = find(event);
    setPointed(part?.step ? part : null);
    event.target.classList.toggle("pickable", part?.request !== undefined);
  }

  return html`
    <figure class="panel strip">
      <figcaption>
        <h3>Steps</h3>
        <span class="legend"><span class="key decode" /> decode, a brick a sequence</span>
        <span class="legend"><span class="key prefill" /> prefill, by tokens</span>
        <span class="pointed">${pointed ? sayStep(pointed) : "one colour, one request; click it for its timeline"}</span>
      </figcaption>
      <${Canvas} pace=${pace} height=${HEIGHT} draw=${draw} tell=${() => tell(core.ticks)} aria-label="Recent steps"
        onPointerMove=${point} onPointerLeave=${() => setPointed(null)}
        onClick=${(event) => { const { request } = find(event) ?? {}; if (request !== undefined) onPick(request); }} />
      ${core.ticks.length === 0 && html`<p class="empty over">No steps yet. They appear here as soon as a request runs.</p>`}
    </figure>`;
}

/** Which steps there is room for, where, and at which scales. */
function lay(ticks, width) {
  const steps = ticks.slice(-Math.max(Math.floor((width - GUTTER) / PITCH), 1));
  const decode = Math.max(4, ...steps.map((step) => step?.decode ?? 0));
  const prefill = 2 ** Math.ceil(Math.log2(Math.max(16, ...steps.map((step) => step?.prefill ?? 0))));
  return { steps, decode, prefill, left: width - PITCH * steps.length };
}

function drawStrip(context, width, shown, selected) {
  const { line, soft } = palette();
  const alphaOf = (request) => (selected === null || selected === request ? 1 : FAINT);
  drawDecode(context, shown, alphaOf);
  drawPrefill(context, shown, alphaOf);
  context.globalAlpha = 1;
  shown.steps.forEach((step, i) => step === null && drawGap(context, shown.left + PITCH * i, soft));
  context.fillStyle = line;
  context.fillRect(GUTTER, LINE, width - GUTTER, 1);
  drawScales(context, shown, soft);
}

/** Bricks of a request that lie side by side are drawn as one, and parted afterwards: that is ten times less work. */
function drawDecode(context, { steps, decode, left }, alphaOf) {
  const { hues, panel, soft } = palette();
  const brick = DECODE_HEIGHT / decode;
  const height = brick >= 4 ? brick - 1 : brick;
  const requestAt = (step, level) => (step !== null && level < step.decode ? step.requests[level] ?? null : undefined);
  for (let level = 0; level < decode; level += 1) {
    for (let i = 0, end = 0; i < steps.length; i = end) {
      const request = requestAt(steps[i], level);
      for (end = i + 1; end < steps.length && requestAt(steps[end], level) === request; ) end += 1;
      if (request === undefined) continue;
      context.globalAlpha = alphaOf(request);
      context.fillStyle = hues[steps[i].hues[level]] ?? soft;
      context.fillRect(left + PITCH * i, LINE - brick * (level + 1), PITCH * (end - i), height);
    }
  }
  context.globalAlpha = 1;
  context.fillStyle = panel;
  for (let x = left + BAR; x < left + PITCH * steps.length; x += PITCH) context.fillRect(x, 0, PITCH - BAR, LINE);
}

function drawPrefill(context, { steps, prefill, left }, alphaOf) {
  const { hatches, soft } = palette();
  steps.forEach((step, i) => {
    if (step === null) return;
    let bottom = LINE + 1;
    for (let j = step.decode; j < step.tokens.length; j += 1) {
      const height = Math.max((PREFILL_HEIGHT * step.tokens[j]) / prefill, 1);
      context.globalAlpha = alphaOf(step.requests[j]);
      context.fillStyle = hatches[step.hues[j]] ?? soft;
      context.fillRect(left + PITCH * i, bottom, BAR, height);
      bottom += height;
    }
  });
}

function drawGap(context, x, colour) {
  context.fillStyle = colour;
  for (let y = 8; y < HEIGHT - 10; y += 6) context.fillRect(x + 1, y, 1, 3);
}

function drawScales(context, { decode, prefill }, colour) {
  context.fillStyle = colour;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.fillText(count(decode), GUTTER - 8, 16);
  context.fillText("0", GUTTER - 8, LINE + 4);
  context.fillText(count(prefill), GUTTER - 8, HEIGHT - 10);
}

/** The step under a point, and whose part of it. */
function partAt({ steps, decode, prefill, left }, x, y) {
  const step = steps[Math.floor((x - left) / PITCH)];
  if (!step) return null;
  if (y <= LINE) {
    const place = Math.floor((LINE - y) / (DECODE_HEIGHT / decode));
    return { step, request: place < step.decode ? step.requests[place] : undefined };
  }
  let bottom = LINE + 1;
  for (let j = step.decode; j < step.tokens.length; j += 1) {
    bottom += Math.max((PREFILL_HEIGHT * step.tokens[j]) / prefill, 1);
    if (y <= bottom) return { step, request: step.requests[j] };
  }
  return { step, request: undefined };
}

const sayStep = ({ step }) =>
  `tick ${count(step.tick)}: ${count(step.decode)} decode, ${count(step.prefill)} prefill, ` +
  `${step.stepMs.toFixed(1)} ms (planned in ${step.scheduleMs.toFixed(2)} ms)`;

function tell(ticks) {
  const steps = ticks.filter((step) => step !== null);
  if (steps.length === 0) return "Recent steps: none yet.";
  const sum = (name) => count(steps.reduce((total, step) => total + step[name], 0));
  const requests = new Set(steps.flatMap((step) => step.requests)).size;
  return `The last ${steps.length} steps: ${sum("decode")} decode tokens and ${sum("prefill")} prefill tokens of ` +
    `${requests} requests. The latest, tick ${steps.at(-1).tick}, took ${steps.at(-1).stepMs.toFixed(1)} ms.`;
}
