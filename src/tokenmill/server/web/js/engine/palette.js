// Colours for canvases, as the style sheet has them in the present theme.
import { NUM_HUES } from "./live.js";

const NAMED = ["panel", "line", "text", "soft", "decode", "prefill", "parked", "free"];
const TILE = 6; // pixels of a hatch until it repeats
let found = null;

window.addEventListener("themechange", () => (found = null));

/** Named colours; `hues` and their `hatches` are those of requests. */
export function palette() {
  return (found ??= read());
}

function read() {
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colour = () => getComputedStyle(probe).color;
  const colours = {};
  for (const name of NAMED) {
    probe.style.color = `var(--${name})`;
    colours[name] = colour();
  }
  probe.style.color = "";
  const hues = Array.from({ length: NUM_HUES }, (_, hue) => {
    probe.className = `request-colour hue-${hue}`;
    return colour();
  });
  probe.remove();
  return { ...colours, hues, hatches: hues.map((hue) => hatch(hue)), parkedHatches: [1, -1].map((slope) => hatch(colours.parked, slope)) };
}

/** Diagonal lines over a thin tint, up or down. */
function hatch(colour, slope = 1) {
  const tile = new OffscreenCanvas(TILE, TILE);
  const context = tile.getContext("2d");
  context.fillStyle = context.strokeStyle = colour;
  context.globalAlpha = 0.3;
  context.fillRect(0, 0, TILE, TILE);
  context.globalAlpha = 1;
  context.lineWidth = 1.8;
  context.beginPath();
  for (const x of [-TILE, 0, TILE, 2 * TILE]) {
    context.moveTo(x - slope, TILE + 1);
    context.lineTo(x + slope * (TILE + 1), -1);
  }
  context.stroke();
  return context.createPattern(tile, "repeat");
}
