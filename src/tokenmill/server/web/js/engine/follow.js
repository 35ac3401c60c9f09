// The connection to the server's events: taken up again when it breaks, given up while nobody looks.
import { ask, events } from "../shared/api.js";
import { Emitter } from "../shared/emitter.js";
import { explain } from "../shared/words.js";

const AGAIN_MS = 1000;
const MOST_MS = 5000;
const EVENTS = "/v1/scheduler/events?pace_s=0.3"; // the page draws no faster, and less is sent and read
const HIDDEN_MS = 10_000; // a page that nobody sees for so long gives its connection up

/** `status` is connecting, live, lost (it tries again), paused, asleep, or locked (it needs a key). */
export class Follower extends Emitter {
  status = "connecting";
  problem = null;
  servers = []; // names of those that share a database, if there are several
  server = null; // the one that is shown; null: whichever answers
  #state;
  #connection = null;
  #hiddenTimer = 0;

  constructor(state) {
    super();
    this.#state = state;
    document.addEventListener("visibilitychange", () => this.#look());
    window.addEventListener("online", () => this.status === "lost" && this.start());
  }

  /** Connect, at once. */
  start() {
    this.#connection?.abort();
    this.#connection = new AbortController();
    if (document.hidden) this.#look();
    if (this.status !== "lost") this.#become("connecting");
    this.#run(this.#connection.signal);
  }

  /** Show another server. */
  choose(server) {
    this.server = server;
    this.start();
  }

  /** A path of the server that is shown. */
  path(path) {
    if (this.server === null) return path;
    return `${path}${path.includes("?") ? "&" : "?"}server=${encodeURIComponent(this.server)}`;
  }

  /** What is shown stays as it is, and the server has nobody to tell anything. */
  pause() {
    this.#stop("paused");
  }

  #stop(status) {
    this.#connection?.abort();
    this.#become(status);
  }

  #look() {
    clearTimeout(this.#hiddenTimer);
    if (document.hidden) {
      this.#hiddenTimer = setTimeout(() => {
        if (["connecting", "live", "lost"].includes(this.status)) this.#stop("asleep");
      }, HIDDEN_MS);
    } else if (this.status === "asleep") {
      this.start();
    }
  }

  async #run(signal) {
    for (let waitMs = AGAIN_MS; !signal.aborted; waitMs = Math.min(2 * waitMs, MOST_MS)) {
      let problem;
      try {
        await this.#list(signal);
        const told = await ask(this.path("/v1/scheduler"), { signal }); // the stream says nothing where nothing happens
        if (signal.aborted) return;
        this.#state.begin(told);
        this.#become("live");
        waitMs = AGAIN_MS;
        problem = await this.#follow(signal);
      } catch (error) {
        if (error.status === 401) return this.#become("locked");
        problem = explain(error);
      }
      if (signal.aborted) return;
      this.#become("lost", problem);
      await passed(waitMs, signal);
    }
  }

  /** Which servers there are. One that is gone is not shown any more. */
  async #list(signal) {
    const { data } = await ask("/v1/servers", { signal });
    this.servers = data.length > 1 ? data.map(({ id }) => id) : [];
    if (!this.servers.includes(this.server)) this.server = data.find((one) => one.is_this && data.length > 1)?.id ?? null;
  }

  /** Until the stream is over; why it is. */
  async #follow(signal) {
    for await (const { event, data } of events(this.path(EVENTS), { signal })) {
      if (event === "end") return "The server is stopping.";
      this.#state.take(event, JSON.parse(data));
    }
    return "The server has closed the connection.";
  }

  #become(status, problem = null) {
    this.status = status;
    this.problem = problem;
    this.changed();
  }
}

/** So much time, or less if it is not needed any more. */
function passed(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
