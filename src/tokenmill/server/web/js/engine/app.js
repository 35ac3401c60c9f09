// The engine page: what every core is doing.
import { useChanges } from "../shared/emitter.js";
import { KeyDialog } from "../shared/key_dialog.js";
import { setTheme, theme, THEMES } from "../shared/theme.js";
import { html, useEffect, useState } from "../shared/view.js";
import { CorePanel } from "./core_panel.js";
import { Sessions } from "./sessions.js";
import { Timeline } from "./timeline.js";

const SAID = {
  connecting: "connecting", live: "live", lost: "not connected", paused: "paused", asleep: "asleep", locked: "needs a key",
};

export function App({ state, follower, pace }) {
  useChanges(follower);
  useChanges(pace.slow);
  const [selected, setSelected] = useState(null);
  useEffect(() => pace.ask(), [selected]);
  const cores = [...state.cores.values()];

  return html`
    <${Head} follower=${follower} />
    ${follower.servers.length > 1 && html`<${Servers} follower=${follower} />`}
    <main class=${follower.status} aria-busy=${follower.status === "connecting"}>
      ${follower.status === "lost" && html`<${Lost} follower=${follower} />`}
      ${cores.map((core) => html`<${CorePanel} key="${core.core} ${core.model}" core=${core} state=${state} pace=${pace}
        selected=${selected} onPick=${setSelected} />`)}
      ${cores.length === 0 && follower.status === "live" && html`<${Nothing} />`}
      <${Sessions} state=${state} follower=${follower} />
    </main>
    ${selected !== null && html`<${Timeline} request=${selected} follower=${follower} onClose=${() => setSelected(null)} />`}
    ${follower.status === "locked" && html`<${KeyDialog} onKey=${() => follower.start()} />`}`;
}

function Head({ follower }) {
  const { status } = follower;
  const isPaused = status === "paused";
  return html`
    <header class="top">
      <a class="brand" href="/" aria-label="tokenmill, back to the chat"><img src="/web/icon.svg" alt="" width="28" height="28" /> <span class="word">tokenmill</span></a>
      <h1>Engine</h1>
      <span class="status ${status}" role="status">${SAID[status]}</span>
      <span class="space" />
      <button disabled=${status === "locked"} onClick=${() => (isPaused ? follower.start() : follower.pause())}>
        ${isPaused ? "Go on" : "Pause"}</button>
      <${ThemeButton} />
      <a class="button" href="/">Chat</a>
    </header>`;
}

const Servers = ({ follower }) => html`
  <nav class="servers" aria-label="Servers">
    ${follower.servers.map((server) => html`<button key=${server} aria-pressed=${server === follower.server}
      onClick=${() => follower.choose(server)}>${server}</button>`)}
  </nav>`;

function ThemeButton() {
  const [chosen, setChosen] = useState(theme());
  function next() {
    setTheme(THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length]);
    setChosen(theme());
  }
  return html`<button class="theme" onClick=${next} aria-label="Theme: ${chosen}" title="Theme: ${chosen}">
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><circle cx="12" cy="12" r="9" /><path d="M12 3a9 9 0 0 0 0 18z" fill="currentColor" /></svg>
    <span class="word">${chosen}</span></button>`;
}

const Lost = ({ follower }) => html`
  <div class="banner" role="alert">
    <p><b>Not connected.</b> ${follower.problem} What is shown is the last that was heard; it tries again by itself.</p>
    <button onClick=${() => follower.start()}>Try now</button>
  </div>`;

const Nothing = () => html`
  <section class="panel nothing"><h2>No model is served yet</h2>
    <p>As soon as one is loaded its engine shows up here.</p></section>`;
