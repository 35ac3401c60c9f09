// Starts the engine page.
import "../shared/theme.js";
import { html, render } from "../shared/view.js";
import { App } from "./app.js";
import { Follower } from "./follow.js";
import { LiveState } from "./live.js";
import { Pace } from "./pace.js";

export const state = new LiveState();
export const follower = new Follower(state);
export const pace = new Pace();

state.subscribe(() => pace.ask());
setInterval(() => follower.status === "live" && pace.ask(), 1000); // rates and plots go on where nothing happens

render(html`<${App} state=${state} follower=${follower} pace=${pace} />`, document.getElementById("app"));
follower.start();
