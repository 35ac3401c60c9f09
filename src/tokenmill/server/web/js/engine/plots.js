// Throughput and latency over the last two minutes, a point a second.
import { rate } from "../shared/words.js";
import { html } from "../shared/view.js";
import { Canvas } from "./canvas.js";
import { KEPT_S } from "./history.js";
import { palette } from "./palette.js";

const HEIGHT = 92;
const TOP = 16; // for the scale
const MOST_OF = 0.95; // a rare spike is cut off at the top, so that the others can be seen

/** Each has lines: a value of a second, null where there is none; `isFull` are filled below, `isDashed` told apart. */
const PLOTS = [
  {
    name: "Generated", unit: "tok/s", latest: "generated tokens by the second",
    lines: [{ colour: "decode", isFull: true, value: (second) => second?.generated ?? 0 }],
  },
  {
    name: "Prefill", unit: "tok/s", latest: "prefill tokens by the second",
    lines: [{ colour: "prefill", isFull: true, value: (second) => second?.prefill ?? 0 }],
  },
  {
    name: "Step", unit: "ms", note: "mean, longest dashed", latest: "mean milliseconds of a step",
    lines: [
      { colour: "text", value: (second) => (second?.ticks ? second.stepMs / second.ticks : null) },
      { colour: "soft", isDashed: true, value: (second) => (second?.ticks ? second.longestMs : null) },
    ],
  },
  {
    name: "Inter-token", unit: "ms", note: "p50, p99 dashed", latest: "median milliseconds from a token to the next",
    lines: [
      { colour: "text", value: (second) => second?.p50Ms ?? null },
      { colour: "soft", isDashed: true, value: (second) => second?.p99Ms ?? null },
    ],
  },
];

export function Plots({ core, state, pace }) {
  return html`<div class="plots">${PLOTS.map((plot) => html`
    <${Plot} key=${plot.name} plot=${plot} pace=${pace} read=${() => core.history.seconds(state.now)} />`)}</div>`;
}

function Plot({ plot, pace, read }) {
  return html`
    <figure class="panel plot">
      <figcaption><h3>${plot.name}</h3> <span class="unit">${plot.unit}</span>
        ${plot.note && html`<span class="note">${plot.note}</span>`}</figcaption>
      <${Canvas} pace=${pace} height=${HEIGHT} aria-label=${plot.name} tell=${() => tell(plot, read())}
        draw=${(context, width) => drawPlot(context, width, plot.lines, read(), plot.unit)} />
      <div class="axis" aria-hidden="true"><span>${KEPT_S / 60} min ago</span><span>now</span></div>
    </figure>`;
}

function drawPlot(context, width, lines, seconds, unit) {
  const colours = palette();
  const values = lines.map(({ value }) => seconds.map(value));
  const most = niceAbove(Math.max(...values.map(mostOf)));
  const scale = { x: width / (KEPT_S - 1), y: (HEIGHT - TOP - 1) / most };
  context.fillStyle = colours.line;
  context.fillRect(0, TOP, width, 1);
  context.fillRect(0, HEIGHT - 1, width, 1);
  lines.forEach((line, i) => drawLine(context, line, values[i], scale, colours[line.colour]));
  context.fillStyle = colours.soft;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.fillText(`${rate(most)} ${unit}`, width, TOP - 5);
}

function drawLine(context, { isFull, isDashed }, values, scale, colour) {
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = isDashed ? 1 : 1.5;
  context.setLineDash(isDashed ? [3, 3] : []);
  context.lineJoin = "round";
  context.beginPath();
  values.forEach((value, i) => {
    if (value === null) return;
    const [x, y] = [i * scale.x, Math.max(HEIGHT - 1 - value * scale.y, TOP)];
    if (i > 0 && values[i - 1] !== null) context.lineTo(x, y);
    else context.moveTo(x - 1, y), context.lineTo(x, y);
  });
  context.stroke();
  context.setLineDash([]);
  if (!isFull) return;
  context.lineTo((values.length - 1) * scale.x, HEIGHT - 1);
  context.lineTo(0, HEIGHT - 1);
  context.globalAlpha = 0.16;
  context.fill();
  context.globalAlpha = 1;
}

/** What all but a few values are below. */
function mostOf(values) {
  const sorted = values.filter((value) => value).sort((one, other) => one - other);
  return sorted[Math.ceil(MOST_OF * (sorted.length - 1))] ?? 0;
}

/** A round number. */
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * power >= value);
}

function tell(plot, seconds) {
  const values = seconds.map(plot.lines[0].value).filter((value) => value !== null);
  if (values.length === 0) return `${plot.name}: nothing yet.`;
  return `${plot.name}, ${plot.latest}: ${rate(values.at(-1))} now, at most ${rate(Math.max(...values))} in ` +
    `${KEPT_S / 60} minutes.`;
}
