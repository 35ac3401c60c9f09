// A conversation's system prompt, model and sampling.
import { html, useState } from "../../shared/view.js";
import { Dialog } from "./dialogs.js";

const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 100, step: "any", hint: "0: always the likeliest token" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: "any", hint: "the likeliest tokens that make up this share" },
  { name: "top_k", label: "Top k", min: 1, step: 1, hint: "only so many of the likeliest tokens" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any", hint: "at least this share of the likeliest one's probability" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, step: "any", hint: "1: none" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: "any", hint: "0: none" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: "any", hint: "0: none" },
  { name: "max_tokens", label: "Longest answer", min: 1, step: 1, hint: "in tokens" },
  { name: "seed", label: "Seed", min: 0, step: 1, hint: "the same seed, the same answer" },
];

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

  const field = ({ name, label, hint, ...range }) => html`
    <label>${label}
      <input type="number" name=${name} ...${range} placeholder="the model's own" value=${conversation.sampling[name] ?? ""} aria-describedby=${`${name}-hint`} />
      <span class="hint" id=${`${name}-hint`}>${hint}</span>
    </label>`;

  return html`
    <${Dialog} title="Settings of this conversation" className="settings" onClose=${onClose}>
      <form onSubmit=${save}>
        <label>System prompt
          <textarea name="system" rows="4" placeholder="What the model should know and how it should answer" autofocus value=${conversation.system}></textarea>
        </label>
        <div class="fields">${FIELDS.map(field)}</div>
        <label>Stop at
          <textarea name="stop" rows="2" placeholder="texts that end an answer, one a line" value=${(conversation.sampling.stop ?? []).join("\n")}></textarea>
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
