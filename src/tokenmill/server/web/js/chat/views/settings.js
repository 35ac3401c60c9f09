// A conversation's system prompt, tools, response format and sampling.
import { html, useState } from "../../shared/view.js";
import { isObject } from "../json.js";
import { FIELDS } from "../sampling.js";
import { Dialog } from "./dialogs.js";

/** What holds where nothing is set. */
function defaultOf(name, defaults) {
  const value = defaults?.[name];
  if (value === undefined) return "model default"; // it is not loaded
  return `${name === "top_k" && value <= 0 ? "all" : value} (default)`;
}

/** Each field of JSON, what it may hold, and how that is said. */
const JSON_FIELDS = [
  {
    name: "tools", label: "Tools", rows: 3, wrong: "a JSON array of functions", read: (value) => (isObject(value) ? [value] : value),
    isValid: (value) => Array.isArray(value) && value.every(isObject),
    placeholder: '[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]',
  },
  {
    name: "schema", label: "Response schema", rows: 3, wrong: "a JSON schema: an object", read: (value) => value, isValid: isObject,
    placeholder: '{"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}',
  },
];

/** What is in such a field; null if it is empty. What is wrong with it is said at the field. */
function readJson(field, { wrong, read, isValid }) {
  if (field.value.trim() === "") return null;
  try {
    const value = read(JSON.parse(field.value));
    if (isValid(value)) return Array.isArray(value) && !value.length ? null : value;
    field.setCustomValidity(`This must be ${wrong}.`);
  } catch (error) {
    field.setCustomValidity(`This must be ${wrong}. ${error.message}`);
  }
  return null;
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
    const given = Object.fromEntries(JSON_FIELDS.map((field) => [field.name, readJson(event.target.elements[field.name], field)]));
    if (!event.target.reportValidity()) return;
    chat.configure(conversation, { system: form.get("system"), sampling, ...given }, isDefault);
    onClose();
  };
  const reset = (event) => {
    for (const field of event.target.form.querySelectorAll("input[type=number], textarea")) {
      field.value = "";
      field.setCustomValidity("");
    }
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
        ${JSON_FIELDS.map(({ name, label, rows, placeholder }) => html`
          <label>${label}
            <textarea class="json" name=${name} rows=${rows} spellcheck="false" placeholder=${placeholder} onInput=${({ target }) => target.setCustomValidity("")}
              defaultValue=${conversation[name] ? JSON.stringify(conversation[name], null, 1) : ""}></textarea>
          </label>`)}
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
