// A conversation's system prompt, model and sampling.
import { html, useState } from "../../shared/view.js";
import { FIELDS } from "../sampling.js";
import { Dialog } from "./dialogs.js";

/** What holds where nothing is set. */
function defaultOf(name, defaults) {
  const value = defaults?.[name];
  if (value === undefined) return "model default"; // it is not loaded
  return `${name === "top_k" && value <= 0 ? "all" : value} (default)`;
}

export function Settings({ chat, conversation, onClose }) {
  const [isDefault, setDefault] = useState(false);

  const save = (event) => {
    event.preventDefault();
    const form = new FormData(event.target);
    const sampling = {};
    for (const { name } of FIELDS) {
      if (form.get(name) !== "") sampling[name] = Number(form.get(name));
    }
    const stop = form.get("stop").split("\n").filter((line) => line !== "");
    if (stop.length) sampling.stop = stop;
    chat.configure(conversation, { system: form.get("system"), sampling }, isDefault);
    onClose();
  };
  const reset = (event) => {
    for (const field of event.target.form.querySelectorAll("input[type=number], textarea")) field.value = "";
  };

  const defaults = chat.modelOf(conversation)?.default_sampling_params;
  const field = ({ name, label, hint, unset, ...range }) => html`
    <label>${label}
      <input type="number" name=${name} ...${range} placeholder=${unset ?? defaultOf(name, defaults)} defaultValue=${conversation.sampling[name] ?? ""} aria-describedby=${`${name}-hint`} />
      <span class="hint" id=${`${name}-hint`}>${hint}</span>
    </label>`;

  // Uncontrolled fields: the end of an answer redraws the dialog, which must not reset what is being typed.
  return html`
    <${Dialog} title="Settings of this conversation" className="settings" onClose=${onClose}>
      <form onSubmit=${save}>
        <label>System prompt
          <textarea name="system" rows="4" placeholder="What the model should know and how it should answer" autofocus defaultValue=${conversation.system}></textarea>
        </label>
        <div class="fields">${FIELDS.map(field)}</div>
        <label>Stop at
          <textarea name="stop" rows="2" placeholder="texts that end an answer, one per line" defaultValue=${(conversation.sampling.stop ?? []).join("\n")}></textarea>
        </label>
        <label class="check"><input type="checkbox" checked=${isDefault} onChange=${(event) => setDefault(event.target.checked)} /> For new conversations, too</label>
        <div class="buttons">
          <button type="button" class="quiet" onClick=${reset}>Clear all</button>
          <button type="button" onClick=${onClose}>Cancel</button>
          <button class="primary">Save</button>
        </div>
      </form>
    <//>`;
}
