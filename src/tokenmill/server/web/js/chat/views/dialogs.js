// Dialogs: the browser's own, which keep the focus and close with Esc.
import { html, useEffect, useRef, useState } from "../../shared/view.js";

export function Dialog({ title, onClose, className = "", children }) {
  const element = useRef(null);
  useEffect(() => {
    const before = document.activeElement?.closest("details:not([open])")?.querySelector("summary") ?? document.activeElement;
    element.current.showModal();
    return () => before?.focus?.();
  }, []);
  const outside = ({ clientX, clientY }) => {
    const { left, right, top, bottom } = element.current.getBoundingClientRect();
    if (clientX < left || clientX > right || clientY < top || clientY > bottom) onClose();
  };
  return html`
    <dialog class="dialog ${className}" ref=${element} aria-label=${title} onClose=${onClose} onMouseDown=${outside}>
      <h2>${title}</h2>
      ${children}
    </dialog>`;
}

export function Confirm({ title, text, action, onConfirm, onClose }) {
  const confirm = () => { onConfirm(); onClose(); };
  return html`
    <${Dialog} title=${title} onClose=${onClose}>
      <p>${text}</p>
      <div class="buttons">
        <button onClick=${onClose} autofocus>Cancel</button>
        <button class="danger" onClick=${confirm}>${action}</button>
      </div>
    <//>`;
}

export function Notice({ title, text, onClose }) {
  return html`
    <${Dialog} title=${title} onClose=${onClose}>
      <p>${text}</p>
      <div class="buttons"><button onClick=${onClose} autofocus>Close</button></div>
    <//>`;
}

export function Rename({ title, onRename, onClose }) {
  const [value, setValue] = useState(title);
  const submit = (event) => {
    event.preventDefault();
    onRename(value);
    onClose();
  };
  return html`
    <${Dialog} title="Rename the conversation" onClose=${onClose}>
      <form onSubmit=${submit}>
        <label>Title <input value=${value} onInput=${(event) => setValue(event.target.value)} maxlength="200" autofocus /></label>
        <div class="buttons">
          <button type="button" onClick=${onClose}>Cancel</button>
          <button class="primary">Rename</button>
        </div>
      </form>
    <//>`;
}

const SHORTCUTS = [
  ["Enter", "send"], ["Shift + Enter", "new line"], ["Esc", "stop the answer, close a dialog"],
  ["Ctrl + K", "search conversations"], ["Ctrl + Shift + O", "new conversation"], ["Ctrl + B", "show or hide the list"],
];

export function Shortcuts({ onClose }) {
  return html`
    <${Dialog} title="Keyboard" onClose=${onClose}>
      <dl class="shortcuts">${SHORTCUTS.map(([keys, what]) => html`<div><dt><kbd>${keys}</kbd></dt><dd>${what}</dd></div>`)}</dl>
      <div class="buttons"><button onClick=${onClose} autofocus>Close</button></div>
    <//>`;
}
