// What this page knows of a server: every core's state, its recent steps and requests, from a snapshot and events.
import { Emitter } from "../shared/emitter.js";
import { History } from "./history.js";
import { CoreView } from "./state.js";

export const MAX_TICKS = 600;
export const NUM_HUES = 12;
const MAX_ENDED = 20;
const MAX_HUED = 4096; // requests whose colour is remembered

/** All cores of a server. */
export class LiveState extends Emitter {
  cores = new Map();
  #aheadS = 0; // the server's clock against ours

  /** By the server's clock. */
  get now() {
    return performance.now() / 1000 + this.#aheadS;
  }

  /** A connection begins: what there is now, as `GET /v1/scheduler` tells it. */
  begin({ models }) {
    const before = this.cores;
    this.cores = new Map();
    for (const { model, cores } of models) {
      for (const told of cores) this.#renew(before, { ...told, model });
    }
    this.changed();
  }

  /** An event of the stream. */
  take(kind, data) {
    const name = nameOf(data);
    if (kind === "snapshot") {
      this.#aheadS = data.at - performance.now() / 1000;
      this.#renew(this.cores, data);
      this.cores.get(name).checkClock(data.at);
    } else if (kind === "gone") {
      this.cores.delete(name);
    } else {
      this.cores.get(name)?.take(kind, data);
    }
    this.changed();
  }

  #renew(before, told) {
    const name = nameOf(told);
    const core = before.get(name);
    core?.renew(told);
    this.cores.set(name, core ?? new LiveCore(told));
  }
}

const nameOf = ({ model, core }) => `${core} ${model}`;
const sumOf = (numbers) => numbers.reduce((sum, one) => sum + one, 0);

/** One core: its state, and what it did lately. */
export class LiveCore {
  history = new History();
  ticks = []; // the latest steps, oldest first; null where some were missed
  ended = []; // the latest requests that are done, newest first
  counters = {
    steps: 0, generated: 0, prefill: 0, prompt: 0, cached: 0, proposed: 0, accepted: 0, ended: 0,
    preemptions: 0, evictions: 0, failedSteps: 0, restarts: 0, missed: 0,
  };
  #hues = new Map(); // request -> its colour
  #numHued = 0;
  #requests = new Map(); // those on their way -> when they began, and got a token last

  constructor(told) {
    this.model = told.model;
    this.core = told.core;
    this.view = new CoreView(told);
  }

  /** Events were missed: go on from a snapshot. */
  renew(told) {
    if (told.tick !== this.view.tick) {
      this.#noteStep(null);
      this.counters.missed += 1;
      this.#requests.clear();
    }
    this.view = new CoreView(told);
  }

  /** Another machine's clock says nothing of what was before. */
  checkClock(at) {
    if (at < this.history.latest) this.history = new History();
  }

  take(kind, data) {
    if (kind === "tick") this.#tick(data);
    else if (kind === "forced") this.counters.generated += sumOf(data.tokens);
    else if (kind === "verified") this.#verify(data);
    else if (kind === "request") this.#request(data);
    else if (kind === "parked") this.counters.evictions += data.change === "evicted";
    else if (kind === "failed_step") this.counters.failedSteps += 1;
    else if (kind === "start") this.#restart();
    this.view.take(kind, data);
  }

  /** The number of a request's colour: the same as long as it is seen. */
  hueOf(request) {
    if (request === undefined) return null;
    if (!this.#hues.has(request)) {
      if (this.#hues.size >= MAX_HUED) this.#hues.delete(this.#hues.keys().next().value);
      this.#hues.set(request, this.#nextHue());
    }
    return this.#hues.get(request);
  }

  /** The next one, but for those of requests that run, if there are others. */
  #nextHue() {
    const taken = new Set(this.view.busy.map((slot) => this.#hues.get(slot.request)));
    let hue = this.#numHued++ % NUM_HUES;
    for (let tries = 1; tries < NUM_HUES && taken.has(hue); tries += 1) hue = this.#numHued++ % NUM_HUES;
    return hue;
  }

  #tick({ tick, at, slots, tokens, decode, drawn, step_ms: stepMs, schedule_ms: scheduleMs }) {
    const requests = slots.map((slot) => this.view.slots[slot].request);
    const prefill = sumOf(tokens.slice(decode)); // those before may have proposed tokens, too
    const hues = requests.map((request) => this.hueOf(request));
    this.#noteStep({ tick, requests, hues, tokens, decode, prefill, stepMs, scheduleMs });
    this.history.noteTick(at, drawn.length, prefill, stepMs);
    this.counters.steps += 1;
    this.counters.generated += drawn.length;
    this.counters.prefill += prefill;
    for (const slot of drawn) this.#noteToken(at, this.view.slots[slot].request);
  }

  #verify({ at, proposed, accepted, drawn }) {
    this.history.noteDrawn(at, sumOf(drawn));
    this.counters.generated += sumOf(drawn);
    this.counters.proposed += sumOf(proposed);
    this.counters.accepted += sumOf(accepted);
  }

  #noteStep(step) {
    if (step === null && !this.ticks.at(-1)) return; // one gap is enough
    this.ticks.push(step);
    if (this.ticks.length > MAX_TICKS) this.ticks.shift();
  }

  #noteToken(at, request) {
    if (request === undefined) return;
    const known = this.#requests.get(request);
    if (known && known.drawn !== null) this.history.noteGap(at, at - known.drawn);
    this.#requests.set(request, { began: known?.began ?? null, drawn: at });
  }

  #request(data) {
    const { at, phase, request, prompt, cached } = data;
    if (phase === "queued") {
      this.#requests.set(request, { began: at, drawn: null });
    } else if (phase === "prefill" && !this.view.isPreempted(request)) {
      this.history.noteStart(at, prompt, cached);
      this.counters.prompt += prompt;
      this.counters.cached += cached;
    } else if (phase === "preempted") {
      this.counters.preemptions += 1;
    } else if (phase === "ended") {
      this.#end(data);
    }
  }

  #end({ at, request, session, prompt, cached, tokens, finish_reason: reason }) {
    const began = this.#requests.get(request)?.began ?? null;
    this.#requests.delete(request);
    this.counters.ended += 1;
    const seconds = began === null ? null : at - began;
    this.ended.unshift({ request, session, reason, prompt, cached, generated: tokens - prompt, seconds });
    this.ended.length = Math.min(this.ended.length, MAX_ENDED);
  }

  #restart() {
    this.counters.restarts += 1;
    this.#requests.clear();
    this.#noteStep(null);
  }
}
