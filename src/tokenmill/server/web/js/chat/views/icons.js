// Small pictures for buttons; the button itself says what it does.
import { html } from "../../shared/view.js";

const PATHS = {
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14M20 20l-4-4",
  menu: "M4 7h16M4 12h16M4 17h16",
  send: "M5 12h13M12 5l7 7-7 7",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2.3 5.7M20 4v7h-7",
  forward: "M5 5l7 7-7 7M13 5l7 7-7 7",
  fork: "M6 4v16M6 13c8 0 12-3 12-9M15 7l3-3 3 3",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M13 4v6M7 14v6",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  down: "M12 5v14M6 13l6 6 6-6",
  code: "M9 7l-5 5 5 5M15 7l5 5-5 5",
  theme: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  more: "M5 12h.01M12 12h.01M19 12h.01",
};

export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
