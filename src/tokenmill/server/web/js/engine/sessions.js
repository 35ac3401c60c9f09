// The sessions of this key, asked for now and then while somebody looks.
import { Unreachable } from "../shared/api.js";
import { count } from "../shared/words.js";
import { html, useEffect, useState } from "../shared/view.js";
import { byOwner } from "./kv_map.js";
import { poll } from "./poll.js";

const PERIOD_MS = 3000;
const MOST_ROWS = 50;
const MOST_SESSIONS = 1000; // of one answer
const ORDER = ["generating", "appending", "idle", "ended"];
const rank = ({ state }) => ORDER.indexOf(state);

export function Sessions({ state, follower }) {
  const [sessions, setSessions] = useState(null);
  const isLive = follower.status === "live";
  useEffect(() => {
    if (!isLive) return undefined;
    const take = ({ data }) => setSessions(data.sort((one, other) => rank(one) - rank(other)));
    return poll(`/v1/sessions?limit=${MOST_SESSIONS}&order=desc`, PERIOD_MS, take, (error) => {
      if (error instanceof Unreachable) follower.start(); // its stream may not have noticed yet
    });
  }, [isLive]);
  if (sessions === null) return null;

  const kept = new Map();
  for (const { view } of state.cores.values()) for (const one of byOwner(view)) kept.set(one.session, one);
  return html`
    <section class="panel sessions" data-num-sessions=${sessions.length}>
      <h2>Sessions</h2>
      ${sessions.length === 0 ? html`<p class="empty">No session is open.</p>` : html`
        <div class="scroll" tabindex="0" role="region" aria-label="Sessions"><table>
          <thead><tr><th scope="col">Session</th><th scope="col">State</th><th scope="col">Turns</th>
            <th scope="col">Tokens</th><th scope="col">KV</th><th scope="col">Model</th></tr></thead>
          <tbody>${sessions.slice(0, MOST_ROWS).map((session) => html`
            <tr key=${session.id} data-session=${session.id} data-state=${session.state} data-tokens=${session.num_tokens}>
              <th scope="row" class="name" title=${session.id}>${session.id}</th>
              <td><span class="state ${session.state}">${session.state}</span></td>
              <td>${count(session.num_turns)}</td><td>${count(session.num_tokens)}</td>
              <td>${sayKept(kept.get(session.id))}</td><td class="name">${session.model}</td>
            </tr>`)}</tbody>
        </table></div>`}
      ${sessions.length > MOST_ROWS && html`
        <p class="empty">and ${count(sessions.length - MOST_ROWS)}${sessions.length === MOST_SESSIONS && " or"} more</p>`}
    </section>`;
}

function sayKept(kept) {
  if (!kept) return "none";
  return kept.running ? `${count(kept.running)} running` : `${count(kept.parked)} parked`;
}
