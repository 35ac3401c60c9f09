// KV memory: whose it is. Squares of equally many cells; sequences that run first, then parked sessions, then what is free.
import { count } from "../shared/words.js";
import { html } from "../shared/view.js";
import { Canvas } from "./canvas.js";
import { palette } from "./palette.js";

const ROWS = 8;
const HEIGHT = 8 * 13;
const PITCH = 13;
const SQUARE = 11;
const MOST_SHOWN = 8;

export function KvMap({ core, pace }) {
  const { view } = core;
  const owners = byOwner(view);
  return html`
    <figure class="panel kv">
      <figcaption>
        <h3>KV memory</h3>
        <span><b>${count(view.used)}</b> of ${count(view.all)} cells, ${percent(view.used, view.all)}</span>
      </figcaption>
      <${Canvas} pace=${pace} height=${HEIGHT} aria-label="KV memory" tell=${() => tell(core.view)}
        draw=${(context, width) => drawMap(context, width, core)} />
      <p class="legends">
        <span class="legend"><span class="key solid" /> running</span>
        <span class="legend"><span class="key parked" /> parked, can be given up</span>
        <span class="legend"><span class="key free" /> free</span>
      </p>
      <table hidden=${owners.length === 0}>
        <thead><tr><th scope="col">Session</th><th scope="col">Running</th><th scope="col">Parked</th></tr></thead>
        <tbody>
          ${owners.slice(0, MOST_SHOWN).map(({ session, running, parked }) => html`
            <tr key=${session} data-kv-session=${session ?? ""} data-running-tokens=${running} data-parked-tokens=${parked}>
              <th scope="row" class="name" title=${session}>${session ?? html`<i>no session</i>`}</th>
              <td>${running ? count(running) : "–"}</td><td>${parked ? count(parked) : "–"}</td>
            </tr>`)}
        </tbody>
      </table>
      ${owners.length === 0 && html`<p class="empty">Nothing is kept.</p>`}
      ${owners.length > MOST_SHOWN && html`<p class="empty">and ${count(owners.length - MOST_SHOWN)} more</p>`}
    </figure>`;
}

/** Tokens of each session, most first. Those that two sessions share count for both; `null` has what no session has. */
export function byOwner({ busy, parked, parkedTokens }) {
  const owners = new Map();
  const add = (session, field, tokens) => {
    if (!owners.has(session)) owners.set(session, { session, running: 0, parked: 0 });
    owners.get(session)[field] += tokens;
  };
  for (const slot of busy) add(slot.session, "running", slot.computed);
  for (const one of parked) if (one.session !== null) add(one.session, "parked", one.tokens);
  if (parkedTokens.plain) add(null, "parked", parkedTokens.plain);
  const size = (one) => one.running + one.parked;
  return [...owners.values()].sort((one, other) => size(other) - size(one));
}

/** Cells of sequences that run, of parked sessions, and free ones. What is shared is told of those that run. */
function parts(core) {
  const { view } = core;
  const running = view.busy.map((slot) => ({ size: slot.computed, hue: core.hueOf(slot.request) }));
  const parked = byOwner({ busy: [], parked: view.parked, parkedTokens: view.parkedTokens }).map((one, i) => ({ size: one.parked, hatch: i % 2 }));
  const numRunning = Math.min(sum(running), view.used);
  return [...scaled(running, numRunning), ...scaled(parked, view.used - numRunning)];
}

const sum = (all) => all.reduce((total, one) => total + one.size, 0);

function scaled(all, room) {
  const whole = sum(all);
  return all.map((one) => ({ ...one, size: whole ? (one.size * room) / whole : 0 }));
}

/** Square by square: down, then to the right. */
function drawMap(context, width, core) {
  const colours = palette();
  const squares = ROWS * Math.floor((width + PITCH - SQUARE) / PITCH);
  const each = core.view.all / squares;
  let [place, cells] = [0, 0];
  const fill = (end, style) => {
    context.fillStyle = style;
    for (; place < end; place += 1) {
      context.fillRect(PITCH * Math.floor(place / ROWS), PITCH * (place % ROWS), SQUARE, SQUARE);
    }
  };
  for (const { size, hue, hatch } of parts(core)) {
    cells += size;
    fill(Math.ceil(cells / each), hue === undefined ? colours.parkedHatches[hatch] : colours.hues[hue]);
  }
  fill(squares, colours.free);
}

const percent = (part, whole) => `${((100 * part) / Math.max(whole, 1)).toFixed(part && part < whole / 10 ? 1 : 0)} %`;

function tell(view) {
  return `KV memory: ${count(view.used)} of ${count(view.all)} cells are used. ${count(view.numRunning)} sequences run; ` +
    `${count(view.parkedTokens.all)} tokens are parked.`;
}
