// A copy of an engine core's state that its events keep up to date: what `engine/view.py` is on the server.

export class CoreView {
  #slots;
  #slotOf; // request -> its slot
  #waiting; // request -> its place in the queue
  #parked; // sequence -> what is kept of it

  constructor(snapshot) {
    this.#reset(snapshot.slots.length, snapshot.cells.all);
    this.tick = snapshot.tick;
    this.free = snapshot.cells.free;
    for (const one of snapshot.waiting) this.#waiting.set(one.request, { ...one });
    for (const slot of snapshot.slots) if (slot.state !== "idle") this.#takeSlot({ ...slot });
    for (const one of snapshot.parked) this.#parked.set(one.seq, { ...one });
    this.parkedTokens = snapshot.parked_tokens;
  }

  #reset(numSlots, numCells) {
    this.tick = 0;
    this.all = this.free = numCells;
    this.#slots = Array.from({ length: numSlots }, (_, slot) => idle(slot));
    this.#slotOf = new Map();
    this.#waiting = new Map();
    this.#parked = new Map();
    this.parkedTokens = { all: 0, plain: 0 }; // those that several sequences share count once
  }

  // -- what happens --------------------------------------------------------------------------------------------------

  /** An event that came after the snapshot. */
  take(kind, data) {
    if (kind === "tick") this.#step(data);
    else if (kind === "request") this.#change(data);
    else if (kind === "parked") this.#changeParked(data);
    else if (kind === "forced") data.slots.forEach((slot, i) => (this.#slots[slot].tokens += data.tokens[i]));
    else if (kind === "verified") this.#verify(data);
    else if (kind === "cells") this.free = data.free;
    else if (kind === "start") this.#reset(data.slots, data.cells);
  }

  #step({ tick, slots, tokens, drawn, free }) {
    this.tick = tick;
    this.free = free;
    slots.forEach((number, i) => {
      const slot = this.#slots[number];
      if (slot.state !== "idle") slot.computed += tokens[i];
    });
    for (const number of drawn) {
      const slot = this.#slots[number];
      if (slot.state !== "idle") slot.tokens += 1;
    }
  }

  /** Proposed tokens were verified: the draws behind accepted ones are tokens, rejected ones are computed no more. */
  #verify({ slots, proposed, accepted, drawn }) {
    slots.forEach((number, i) => {
      this.#slots[number].tokens += drawn[i];
      this.#slots[number].computed -= proposed[i] - accepted[i];
    });
  }

  #change({ phase, request, session, slot, tokens, computed }) {
    if (phase === "queued") {
      this.#waiting.set(request, { request, session, tokens, preempted: false });
    } else if (phase === "prefill") {
      this.#waiting.delete(request);
      this.#takeSlot({ slot, state: "prefilling", request, session, tokens, computed });
    } else if (phase === "decode") {
      this.#slots[this.#slotOf.get(request)].state = "generating";
    } else {
      this.#leave(request);
      if (phase === "preempted") this.#waiting.set(request, { request, session, tokens, preempted: true });
    }
  }

  #takeSlot(slot) {
    this.#slotOf.set(slot.request, slot.slot);
    this.#slots[slot.slot] = slot;
  }

  /** It loses its slot, or its place in the queue. */
  #leave(request) {
    const number = this.#slotOf.get(request);
    if (number === undefined) {
      this.#waiting.delete(request);
    } else {
      this.#slotOf.delete(request);
      this.#slots[number] = idle(number);
    }
  }

  #changeParked({ change, seq, session, tokens, parked_tokens }) {
    this.#parked.delete(seq);
    this.parkedTokens = parked_tokens;
    if (change === "parked" || change === "shortened") this.#parked.set(seq, { seq, session, tokens });
  }

  // -- what there is -------------------------------------------------------------------------------------------------

  get slots() {
    return this.#slots;
  }

  get busy() {
    return this.#slots.filter((slot) => slot.state !== "idle");
  }

  get waiting() {
    return [...this.#waiting.values()];
  }

  get parked() {
    return [...this.#parked.values()].sort((one, other) => one.seq - other.seq);
  }

  get numRunning() {
    return this.#slotOf.size;
  }

  get numWaiting() {
    return this.#waiting.size;
  }

  get numParked() {
    return this.#parked.size;
  }

  get used() {
    return this.all - this.free;
  }

  isPreempted(request) {
    return this.#waiting.get(request)?.preempted ?? false;
  }

  /** As `GET /v1/scheduler` has it. */
  snapshot() {
    const { tick, slots, waiting, parked, parkedTokens, all, free, used } = this;
    const copies = slots.map((slot) => ({ ...slot }));
    return { tick, slots: copies, waiting, parked, parked_tokens: parkedTokens, cells: { all, free, used } };
  }
}

const idle = (slot) => ({ slot, state: "idle" });
