// The list of conversations, and what can be done with all of them.
import { key } from "../../shared/api.js";
import { html, useRef, useState } from "../../shared/view.js";
import { reason } from "../../shared/words.js";
import { download, fileName, fromJson, isSessionFile, toJson, toMarkdown } from "../transfer.js";
import { titleOf } from "../tree.js";
import { Confirm, Notice, Rename } from "./dialogs.js";
import { Icon, IconButton } from "./icons.js";

export function Sidebar({ chat, onChosen, onSearch, onShortcuts }) {
  const [dialog, setDialog] = useState(null);
  const close = () => setDialog(null);
  const { list } = chat;
  const forgetKey = () => {
    key.forget();
    chat.look();
  };

  return html`
    <nav class="sidebar" id="sidebar" aria-label="Conversations">
      <div class="top">
        <button class="primary" onClick=${() => chat.startNew()} title="Ctrl+Shift+O"><${Icon} name="plus" /> New conversation</button>
        <${IconButton} icon="search" label="Search conversations" keys="Ctrl+K" kind="" onClick=${onSearch} />
      </div>
      <ul class="conversations">
        ${list.map((conversation) => html`<${Entry} key=${conversation.id} chat=${chat} conversation=${conversation} setDialog=${setDialog} close=${close} onChosen=${onChosen} />`)}
      </ul>
      ${!list.length && html`<p class="hint">Conversations are kept in this browser.</p>`}
      <div class="bottom">
        <${Transfer} chat=${chat} setDialog=${setDialog} close=${close} />
        <button class="quiet" onClick=${onShortcuts}>Keyboard</button>
        ${key.get() && html`<button class="quiet" onClick=${forgetKey}>Forget the key</button>`}
        <a class="button quiet" href="/engine"><${Icon} name="pulse" /> Engine</a>
      </div>
      ${dialog}
    </nav>`;
}

function Entry({ chat, conversation, setDialog, close, onChosen }) {
  const title = titleOf(conversation);
  const isCurrent = chat.current === conversation;
  const isBusy = chat.answering(conversation) !== null;
  const rename = () => setDialog(html`<${Rename} title=${title} onClose=${close} onRename=${(name) => chat.rename(conversation, name)} />`);
  const remove = () => setDialog(html`
    <${Confirm} title="Delete this conversation?" text=${`“${title}” will be gone, here and on the server.`} action="Delete" onClose=${close}
      onConfirm=${() => chat.delete(conversation)} />`);
  const name = fileName(title);
  const save = async () => {
    try {
      const file = await chat.saved(conversation);
      download(`${name}.session`, file, file.type);
    } catch (error) {
      setDialog(html`<${Notice} title="The session can't be saved" text=${reason(error)} onClose=${close} />`);
    }
  };
  return html`
    <li class=${isCurrent ? "current" : ""}>
      <a href=${`#${conversation.id}`} onClick=${onChosen} aria-current=${isCurrent ? "page" : undefined}>
        ${isBusy && html`<span class="busy" role="img" aria-label="answering"></span>`}<span class="title">${title}</span>
      </a>
      <${Menu} label=${`More about ${title}`}>
        <button onClick=${rename}>Rename</button>
        <button onClick=${() => download(`${name}.json`, toJson([conversation]), "application/json")}>Export as JSON</button>
        <button onClick=${() => download(`${name}.md`, toMarkdown(conversation), "text/markdown")}>Export as Markdown</button>
        <button onClick=${save} disabled=${isBusy} title=${isBusy ? "When the answer is complete" : "To go on elsewhere, token for token"}>Save the session</button>
        <button onClick=${remove}>Delete</button>
      <//>
    </li>`;
}

function Transfer({ chat, setDialog, close }) {
  const file = useRef(null);
  const take = async (event) => {
    const [chosen] = event.target.files;
    event.target.value = "";
    try {
      const taken = (await isSessionFile(chosen)) ? [await chat.restored(chosen)] : fromJson(await chosen.text());
      chat.take(taken);
      if (taken.length) chat.show(taken[0].id);
    } catch (error) {
      setDialog(html`<${Notice} title="The file can't be taken in" text=${reason(error)} onClose=${close} />`);
    }
  };
  return html`
    <input type="file" accept="application/json,.json,.session" hidden ref=${file} onChange=${take} aria-label="A file with conversations" />
    <${Menu} label="Export and import" text="Export, import" above>
      <button onClick=${() => download("conversations.json", toJson(chat.list), "application/json")}>Export all</button>
      <button onClick=${() => file.current.click()}>Import…</button>
    <//>`;
}

/** A few actions behind a button; it closes when one is chosen, when the focus leaves it, and with Esc. */
function Menu({ label, text, above = false, children }) {
  const element = useRef(null);
  const items = useRef(null);
  const place = () => { // beside the button, wherever the list that it is in ends
    const button = element.current.getBoundingClientRect();
    const isBelow = !above && button.bottom + items.current.offsetHeight < innerHeight;
    items.current.style.left = `${Math.max(8, Math.min(button.left, innerWidth - items.current.offsetWidth - 8))}px`;
    items.current.style.top = `${isBelow ? button.bottom : button.top - items.current.offsetHeight}px`;
  };
  const shut = () => { element.current.open = false; };
  const onFocusOut = (event) => { if (!element.current.contains(event.relatedTarget)) shut(); };
  const onKeyDown = (event) => {
    if (event.key !== "Escape" || !element.current.open) return;
    shut();
    element.current.querySelector("summary").focus();
    event.stopPropagation();
  };
  return html`
    <details class="menu" ref=${element} onToggle=${place} onFocusOut=${onFocusOut} onKeyDown=${onKeyDown}>
      <summary aria-label=${label} data-tip=${text ? undefined : label} class="button quiet">${text ?? html`<${Icon} name="more" />`}</summary>
      <div class="items" ref=${items} onClick=${shut}>${children}</div>
    </details>`;
}
