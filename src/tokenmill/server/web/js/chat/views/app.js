// The page: list, conversation, dialogs, and the keys that work everywhere.
import { useChanges } from "../../shared/emitter.js";
import { KeyDialog } from "../../shared/key_dialog.js";
import { THEMES, setTheme, theme } from "../../shared/theme.js";
import { html, useEffect, useState } from "../../shared/view.js";
import { withoutThoughts } from "../thoughts.js";
import { textOf, titleOf } from "../tree.js";
import { Composer } from "./composer.js";
import { Shortcuts } from "./dialogs.js";
import { IconButton, Tooltip } from "./icons.js";
import { Search } from "./search.js";
import { Settings } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Thread } from "./thread.js";

const NARROW = matchMedia("(max-width: 760px)");
const BANNERS = {
  loading: "The server is loading its model…",
  gone: "The server can't be reached. Trying again…",
  trouble: "The server is in trouble. Trying again…",
};

export function App({ chat }) {
  useChanges(chat);
  const [dialog, setDialog] = useState(null);
  const [isListShown, setListShown] = useState(!NARROW.matches);
  const { current } = chat;
  // A dialog tells that it was closed a moment later: another one may be open by then.
  const closing = (name) => () => setDialog((shown) => (shown === name ? null : shown));

  useEffect(() => {
    const onKeyDown = (event) => {
      const isCommand = event.ctrlKey || event.metaKey;
      const name = event.key.toLowerCase();
      if (isCommand && name === "k") setDialog("search");
      else if (isCommand && event.shiftKey && name === "o") chat.startNew();
      else if (isCommand && name === "b") setListShown((isShown) => !isShown);
      else if (name === "escape" && NARROW.matches && document.querySelector(".sidebar")) setListShown(false);
      else if (name === "escape" && !document.querySelector("dialog[open]") && chat.answering(chat.current)) chat.stop(chat.current);
      else return;
      event.preventDefault();
    };
    window.addEventListener("keydown", onKeyDown);
    return () => window.removeEventListener("keydown", onKeyDown);
  }, [chat]);
  useEffect(() => { if (NARROW.matches) setListShown(false); }, [current]);
  useEffect(() => {
    const onNarrow = ({ matches }) => setListShown(!matches);
    NARROW.addEventListener("change", onNarrow);
    return () => NARROW.removeEventListener("change", onNarrow);
  }, []);

  if (current === null) return null;
  document.title = `${titleOf(current)} · tokenmill`;
  return html`
    <div class="page ${isListShown ? "" : "no-list"}">
      ${isListShown && html`<${Sidebar} chat=${chat} onChosen=${() => NARROW.matches && setListShown(false)} onSearch=${() => setDialog("search")} onShortcuts=${() => setDialog("shortcuts")} />`}
      <main>
        <${Header} chat=${chat} conversation=${current} isListShown=${isListShown} onList=${() => setListShown(!isListShown)} onSettings=${() => setDialog("settings")} />
        ${BANNERS[chat.server] && html`<p class="banner" role="status">${BANNERS[chat.server]}</p>`}
        ${chat.loading && html`<p class="banner" role="status">${chat.loading.problem ? `${chat.loading.id}: ${chat.loading.problem}` : `Loading ${chat.loading.id}…`}</p>`}
        ${!chat.isStored && html`<p class="banner" role="status">This browser does not keep conversations: they last as long as the page.</p>`}
        <${Thread} key=${`thread ${current.id}`} chat=${chat} conversation=${current} />
        <${Composer} key=${`composer ${current.id}`} chat=${chat} conversation=${current} />
      </main>
      <${Tooltip} />
      <${Announcer} answering=${chat.answering(current)} />
      ${dialog === "search" && html`<${Search} chat=${chat} onClose=${closing("search")} />`}
      ${dialog === "settings" && html`<${Settings} chat=${chat} conversation=${current} onClose=${closing("settings")} />`}
      ${dialog === "shortcuts" && html`<${Shortcuts} onClose=${closing("shortcuts")} />`}
      ${chat.server === "key" && html`<${KeyDialog} onKey=${() => chat.look()} />`}
    </div>`;
}

const size = (bytes) => bytes < 1e9 ? `${Math.ceil(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`;

function Header({ chat, conversation, isListShown, onList, onSettings }) {
  const [chosen, setChosen] = useState(theme());
  const nextTheme = () => {
    const next = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
    setTheme(next);
    setChosen(next);
  };
  const model = chat.modelOf(conversation);
  const isLoading = chat.loading !== null && chat.loading.problem === null;
  return html`
    <header>
      <${IconButton} icon="menu" label="List of conversations" keys="Ctrl+B" onClick=${onList} aria-expanded=${isListShown} aria-controls="sidebar" />
      <h1>${titleOf(conversation)}</h1>
      <select aria-label="Model" value=${model?.id} disabled=${chat.answering(conversation) !== null || isLoading}
        onChange=${(event) => chat.useModel(conversation, event.target.value)}>
        ${chat.models.map(({ id, status }) => html`<option value=${id}>${id}${status === "loaded" ? "" : ` (${status})`}</option>`)}
        ${chat.cached.length > 0 && html`<optgroup label="Downloaded">${chat.cached.map(({ id, bytes }) => html`<option value=${id}>${id} (${size(bytes)})</option>`)}</optgroup>`}
      </select>
      <${IconButton} icon="settings" label="Settings" onClick=${onSettings} />
      <${IconButton} icon="theme" label=${`Theme: ${chosen}`} onClick=${nextTheme} />
    </header>`;
}

/** Tells those who listen to the page that an answer has begun, and then what it is: not every word of it as it comes. */
function Announcer({ answering }) {
  const [words, setWords] = useState("");
  useEffect(() => {
    if (!answering) return undefined;
    setWords("Generating an answer");
    return () => {
      const { status, error } = answering.message; // an error says itself, and one that goes on elsewhere says nothing
      setWords(status === "done" && !error ? withoutThoughts(textOf(answering.message)).trim() || "Stopped" : "");
    };
  }, [answering]);
  return html`<div class="visually-hidden" aria-live="polite">${words}</div>`;
}
