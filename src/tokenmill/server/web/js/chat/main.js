import "../shared/theme.js";
import { html, render } from "../shared/view.js";
import { Chat } from "./chat.js";
import { App } from "./views/app.js";

const chat = new Chat();
render(html`<${App} chat=${chat} />`, document.getElementById("app"));
chat.open();
