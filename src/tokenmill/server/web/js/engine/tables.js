// Slots, queue and requests that are done, as tables. A request's name opens its timeline.
import { count, duration } from "../shared/words.js";
import { html } from "../shared/view.js";

const MOST_ROWS = 64;

export function Slots({ core, onPick }) {
  const { busy, slots } = core.view;
  const numIdle = slots.length - busy.length;
  return html`
    <section class="panel slots">
      <h3>Slots</h3>
      <${Table} columns=${["Slot", "Request", "State", "Tokens", "Computed", "Session"]} isEmpty=${busy.length === 0}>
        ${busy.slice(0, MOST_ROWS).map((slot) => html`
          <tr key=${slot.slot} data-slot=${slot.slot} data-state=${slot.state} data-request=${slot.request}
            data-tokens=${slot.tokens} data-computed=${slot.computed}>
            <td>${slot.slot}</td>
            <td class="name"><${Name} core=${core} request=${slot.request} onPick=${onPick} /></td>
            <td><span class="state ${slot.state}">${slot.state}</span></td>
            <td>${count(slot.tokens)}</td><td>${count(slot.computed)}</td>
            <td class="name" title=${slot.session}>${slot.session ?? "–"}</td>
          </tr>`)}
      <//>
      <p class="empty">${rest(busy.length - MOST_ROWS)}${busy.length === 0 ? `All ${slots.length} slots are idle.` : `${numIdle} idle`}</p>
    </section>`;
}

export function Queue({ core, onPick }) {
  const { waiting } = core.view;
  return html`
    <section class="panel queue">
      <h3>Queue</h3>
      <${Table} columns=${["Request", "Tokens", "Session"]} isEmpty=${waiting.length === 0}>
        ${waiting.slice(0, MOST_ROWS).map((one) => html`
          <tr key=${one.request} data-waiting-request=${one.request} data-tokens=${one.tokens}>
            <td class="name"><${Name} core=${core} request=${one.request} onPick=${onPick} /></td>
            <td>${count(one.tokens)}${one.preempted && html` <span class="state preempted">preempted</span>`}</td>
            <td class="name" title=${one.session}>${one.session ?? "–"}</td>
          </tr>`)}
      <//>
      <p class="empty">${rest(waiting.length - MOST_ROWS)}${waiting.length === 0 && "Nobody waits."}</p>
    </section>`;
}

export function Ended({ core, onPick }) {
  return html`
    <section class="panel ended">
      <h3>Done lately</h3>
      <${Table} columns=${["Request", "Prompt", "Cached", "Generated", "Time", "Ended"]} isEmpty=${core.ended.length === 0}>
        ${core.ended.map((one) => html`
          <tr key=${one.request} data-ended-request=${one.request}>
            <td class="name"><${Name} core=${core} request=${one.request} onPick=${onPick} /></td>
            <td>${count(one.prompt)}</td><td>${count(one.cached)}</td><td>${count(one.generated)}</td>
            <td>${one.seconds === null ? "–" : duration(one.seconds)}</td>
            <td>${one.reason}</td>
          </tr>`)}
      <//>
      ${core.ended.length === 0 && html`<p class="empty">No request has ended while this page was open.</p>`}
    </section>`;
}

const COUNTERS = [
  ["steps", "Steps"], ["generated", "Tokens generated"], ["prefill", "Tokens prefilled"],
  ["prompt", "Prompt tokens"], ["cached", "Prompt tokens cached"],
  ["proposed", "Tokens proposed"], ["accepted", "Proposed tokens accepted"], ["ended", "Requests ended"],
  ["preemptions", "Preemptions"], ["evictions", "Evictions"], ["failedSteps", "Failed steps"],
  ["restarts", "Core restarts"], ["missed", "Times events were missed"],
];

export function Counters({ core }) {
  return html`
    <section class="panel counters">
      <h3>Since this page was opened</h3>
      <dl>${COUNTERS.map(([field, label]) => html`
        <div key=${field}><dt>${label}</dt><dd data-counter=${field} data-value=${core.counters[field]}>
          ${count(core.counters[field])}</dd></div>`)}
      </dl>
    </section>`;
}

function Table({ columns, isEmpty, children }) {
  return html`
    <div class="scroll" hidden=${isEmpty}><table>
      <thead><tr>${columns.map((column) => html`<th scope="col" key=${column}>${column}</th>`)}</tr></thead>
      <tbody>${children}</tbody>
    </table></div>`;
}

/** A request: its colour, its name without what is of no use to people. */
function Name({ core, request, onPick }) {
  return html`
    <button class="request" title=${request} aria-haspopup="dialog" onClick=${() => onPick(request)}>
      <span class="swatch request-colour hue-${core.hueOf(request)}" aria-hidden="true" />
      <span class="short">${request.split("~")[0].replace(/\/0$/, "")}</span>
    </button>`;
}

const rest = (hidden) => (hidden > 0 ? `${count(hidden)} more, ` : "");
