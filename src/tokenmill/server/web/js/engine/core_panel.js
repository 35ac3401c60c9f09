// All of one engine core.
import { count, rate } from "../shared/words.js";
import { html } from "../shared/view.js";
import { KvMap } from "./kv_map.js";
import { Plots } from "./plots.js";
import { Strip } from "./strip.js";
import { Counters, Ended, Queue, Slots } from "./tables.js";

export function CorePanel({ core, state, pace, selected, onPick }) {
  const { view } = core;
  return html`
    <section class="core" aria-label="${core.model}, core ${core.core}" data-model=${core.model} data-core=${core.core}
      data-tick=${view.tick} data-running=${view.numRunning} data-slots=${view.slots.length}
      data-waiting=${view.numWaiting} data-parked=${view.numParked}
      data-cells-all=${view.all} data-cells-used=${view.used} data-cells-free=${view.free}>
      <header>
        <h2>${core.model} <span class="which">core ${core.core}</span></h2>
        <span class="tick">tick <b>${count(view.tick)}</b></span>
      </header>
      <${Figures} core=${core} rates=${core.history.rates(state.now)} />
      <${Strip} core=${core} pace=${pace} selected=${selected} onPick=${onPick} />
      <${Plots} core=${core} state=${state} pace=${pace.slow} />
      <div class="columns">
        <div><${Slots} core=${core} onPick=${onPick} /><${Queue} core=${core} onPick=${onPick} /></div>
        <${KvMap} core=${core} pace=${pace.slow} />
      </div>
      <div class="columns"><${Ended} core=${core} onPick=${onPick} /><${Counters} core=${core} /></div>
    </section>`;
}

function Figures({ core: { view }, rates }) {
  const hits = rates.hitRate === null ? "–" : Math.round(100 * rates.hitRate);
  return html`
    <dl class="figures">
      <${Figure} label="Running" value=${count(view.numRunning)} unit="of ${view.slots.length} slots" />
      <${Figure} label="Waiting" value=${count(view.numWaiting)} unit="in the queue" />
      <${Figure} label="Generating" value=${rate(rates.generated)} unit="tok/s" />
      <${Figure} label="Prefilling" value=${rate(rates.prefill)} unit="tok/s" />
      <${Figure} label="Steps" value=${rate(rates.ticks)} unit="a second" />
      <${Figure} label="Prompts cached" value=${hits} unit=${rates.hitRate === null ? "no request lately" : "%"} />
    </dl>`;
}

const Figure = ({ label, value, unit }) => html`
  <div><dt>${label}</dt><dd><b>${value}</b> <span class="unit">${unit}</span></dd></div>`;
