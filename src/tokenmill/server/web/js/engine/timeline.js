// Where the time of one request went, and what it could reuse.
import { count, duration, explain } from "../shared/words.js";
import { html, useEffect, useRef, useState } from "../shared/view.js";
import { poll } from "./poll.js";

const PERIOD_MS = 1000;
const HASH = /^[0-9a-f]{8}$/; // how the names of other keys are shown

export function Timeline({ request, follower, onClose }) {
  const [told, setTold] = useState(null);
  const [problem, setProblem] = useState(null);
  const panel = useRef(null);

  useEffect(() => follow(request, follower, setTold, setProblem), [request]);
  useEffect(() => {
    const opener = document.activeElement;
    panel.current.focus();
    return () => opener?.isConnected && opener.focus();
  }, []);

  return html`
    <section class="timeline" ref=${panel} tabindex="-1" role="dialog" aria-labelledby="timeline-title"
      data-request=${request} onKeyDown=${(event) => event.key === "Escape" && onClose()}>
      <header>
        <h2 id="timeline-title">Timeline</h2>
        <button class="quiet" aria-label="Close the timeline" onClick=${onClose}>✕</button>
      </header>
      <p class="full-name">${request}</p>
      ${problem && html`<p class="problem" role="alert">${problem}</p>`}
      ${told && html`<${Generation} one=${told.one} numOthers=${told.numOthers} />`}
      ${!told && !problem && html`<p class="empty">Asking the server…</p>`}
    </section>`;
}

/** Ask for it until it has ended; returns what ends it. */
function follow(request, follower, setTold, setProblem) {
  setTold(null);
  setProblem(null);
  const take = ({ generations }) => {
    const one = generations.find(({ id }) => id === request) ?? generations.at(-1);
    setTold({ one, numOthers: generations.length - 1 });
    setProblem(null);
    return one.finish_reason !== null;
  };
  const path = follower.path(`/v1/requests/${encodeURIComponent(callOf(request))}/timeline`);
  return poll(path, PERIOD_MS, take, (error) => {
    setProblem(say(error, request));
    return error.status === 404;
  });
}

/** The id of the answer that a request of the engine works for. */
function callOf(request) {
  const end = request.lastIndexOf("~");
  return (end < 0 ? request : request.slice(0, end)).split("/")[0];
}

function say(error, request) {
  if (error.status !== 404) return explain(error);
  return HASH.test(request)
    ? "This request was made with another key: only that one may see where its time went."
    : "The server does not remember this request any more.";
}

function Generation({ one, numOthers }) {
  const fresh = one.prompt_tokens - one.cached_tokens;
  return html`
    <div class="phases" aria-hidden="true">
      ${one.phases.map(({ phase, seconds }) => html`<span class="phase ${phase}" style=${{ flexGrow: seconds }} title=${phase} />`)}
    </div>
    <table>
      <thead><tr><th scope="col">Phase</th><th scope="col">Began</th><th scope="col">Took</th></tr></thead>
      <tbody>${one.phases.map(({ phase, begin, seconds }) => html`
        <tr data-phase=${phase} data-begin=${begin} data-seconds=${seconds}>
          <th scope="row"><span class="key phase ${phase}" aria-hidden="true" /> ${phase}</th>
          <td>${precise(begin)}</td><td>${precise(seconds)}</td></tr>`)}</tbody>
    </table>
    <h3>Prompt</h3>
    <div class="phases" aria-hidden="true">
      <span class="phase cached" style=${{ flexGrow: one.cached_tokens }} title="cached" />
      <span class="phase prefill" style=${{ flexGrow: fresh }} title="computed" />
    </div>
    <p class="reuse">${one.cache?.why ? `${capital(one.cache.why)}.` : reuse(one)}</p>
    ${one.causes?.length > 0 && html`
      <h3>Where the time went</h3>
      <ul class="causes">${one.causes.map(({ cause, seconds, why }) => html`
        <li data-cause=${cause}>${precise(seconds)}: ${why}</li>`)}</ul>`}
    <dl>
      <${Fact} of=${one} name="prompt_tokens" label="Prompt tokens" show=${count} />
      <${Fact} of=${one} name="cached_tokens" label="Cached" show=${count} />
      <${Fact} of=${one} name="computed_tokens" label="Computed in all" show=${count} />
      <${Fact} of=${one} name="completion_tokens" label="Generated" show=${count} />
      <${Fact} of=${one} name="proposed_tokens" label="Proposed" show=${count} />
      <${Fact} of=${one} name="accepted_tokens" label="Accepted of these" show=${count} />
      <${Fact} of=${one} name="ttft_s" label="First token after" show=${precise} />
      <${Fact} of=${one} name="seconds" label="In all" show=${precise} />
      <${Fact} of=${one} name="preemptions" label="Preemptions" show=${count} />
      <${Fact} of=${one} name="finish_reason" label="Ended" show=${(reason) => reason} />
    </dl>
    <p class="hint">${one.model}, core ${one.core}${numOthers > 0 && `; one of ${numOthers + 1} generations of its call`}</p>`;
}

const Fact = ({ of, name, label, show }) => html`
  <div><dt>${label}</dt><dd data-fact=${name} data-value=${of[name]}>${of[name] === null ? "not yet" : show(of[name])}</dd></div>`;

function reuse({ prompt_tokens: prompt, cached_tokens: cached }) {
  if (cached === 0) return `Nothing of its ${count(prompt)} tokens was there before.`;
  return `The KV of ${count(cached)} of its ${count(prompt)} tokens was there before (${Math.round((100 * cached) / prompt)}\u00a0%).`;
}

const capital = (text) => text[0].toUpperCase() + text.slice(1);
const precise = (seconds) => (seconds < 0.1 ? `${(1000 * seconds).toFixed(1)} ms` : duration(seconds));
