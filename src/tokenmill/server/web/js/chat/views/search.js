// Ctrl+K: find a conversation by its title or by anything that was said in it.
import { html, useEffect, useRef, useState } from "../../shared/view.js";
import { matches, titleOf } from "../tree.js";
import { Dialog } from "./dialogs.js";

const MOST = 50;

export function Search({ chat, onClose }) {
  const [words, setWords] = useState("");
  const [chosen, setChosen] = useState(0);
  const found = chat.list.filter((conversation) => !words.trim() || matches(conversation, words.trim())).slice(0, MOST);

  const list = useRef(null);
  useEffect(() => list.current.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" }), [chosen]);

  const open = (conversation) => {
    onClose();
    chat.show(conversation.id);
  };
  const onKeyDown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) setChosen((chosen + step + found.length) % Math.max(1, found.length));
    else if (event.key === "Enter" && found[chosen]) open(found[chosen]);
    else return;
    event.preventDefault();
  };

  return html`
    <${Dialog} title="Search conversations" className="search" onClose=${onClose}>
      <input type="search" aria-label="Words to look for" placeholder="Words in the title or in the text" value=${words} autofocus
        role="combobox" aria-expanded="true" aria-controls="found" aria-activedescendant=${found[chosen] ? `found-${chosen}` : undefined}
        onInput=${(event) => { setWords(event.target.value); setChosen(0); }} onKeyDown=${onKeyDown} />
      <ul id="found" ref=${list} role="listbox" aria-label="Conversations found">
        ${found.map((conversation, i) => html`
          <li key=${conversation.id} id=${`found-${i}`} role="option" aria-selected=${i === chosen} onClick=${() => open(conversation)}>
            ${titleOf(conversation)}
          </li>`)}
      </ul>
      ${!found.length && html`<p class="hint">Nothing found.</p>`}
    <//>`;
}
