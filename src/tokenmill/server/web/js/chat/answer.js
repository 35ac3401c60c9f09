// One answer on its way: asked for, read, taken up again when the connection breaks, stopped.
import { ServerError, Unreachable, ask, events } from "../shared/api.js";
import { Emitter } from "../shared/emitter.js";
import { explain } from "../shared/words.js";
import { abandon, isKnown, isLost, noteAnswer, sessionAfter } from "./sessions.js";

const FRAME_MS = 50;
const RECONNECT_S = [0.2, 0.5, 1, 2, 2, 2, 2, 2, 2];
const STOP_MS = 5000;

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

const LOST = "The server does not have this answer any more; it may have been restarted. Ask again, and it goes on from what was said.";

/** Finish reasons after which an answer may go on. */
export const CUT_SHORT = ["length", "cancelled", "timeout"];

export class Answering extends Emitter {
  #abort = new AbortController();
  #frame = 0;
  #session = null;
  isStopped = false;
  isReconnecting = false;

  /** `message` is the answer; `onChange(isOver)` is told when there is something to store. */
  constructor(conversation, message, onChange) {
    super();
    this.conversation = conversation;
    this.message = message;
    this.onChange = onChange;
  }

  /** Answer the question before it; if it has a part already, go on with that. */
  async run() {
    const { message } = this;
    const before = message.content;
    this.#begin();
    await this.#guarded(async () => {
      for (;;) {
        try {
          await this.#generate(before);
          return;
        } catch (error) {
          if (!isLost(error) || this.#session === null || message.content !== before) throw error;
          if (before !== "") throw error; // there is nothing to go on with
          abandon(this.conversation, this.#session.id); // it is made again from the history
        }
      }
    });
  }

  /** Take up an answer that was on its way when the page was left. */
  async resume() {
    const { message } = this;
    const { session, eventId } = message.resume;
    const record = this.conversation.sessions[session];
    this.#session = { id: session, record };
    await this.#guarded(async () => {
      if (!record) throw new Unreachable("the session is not known any more");
      await this.#read(this.#again(eventId), { isResumed: true });
    });
  }

  /** End it; what was said stays. */
  stop() {
    if (this.isStopped) return;
    this.isStopped = true;
    this.changed();
    if (this.#session === null) this.#abort.abort();
    else {
      ask(`/v1/sessions/${this.#session.id}/cancel`, { method: "POST" }).catch(() => this.#abort.abort());
      setTimeout(() => this.#abort.abort(), STOP_MS);
    }
  }

  #begin() {
    const { message } = this;
    message.status = "waiting";
    message.error = null;
    message.finish = null;
    message.asked = Date.now();
    message.firstAt = null;
    message.stats = null;
    this.changed();
  }

  async #generate(before) {
    const { conversation, message } = this;
    const isMore = before !== "";
    const question = conversation.messages[message.parent];
    const isHeard = isMore || isKnown(conversation, question.id);
    this.#session = await sessionAfter(conversation, isMore ? message.id : isHeard ? question.id : question.parent);
    const body = { ...conversation.sampling };
    if (!isHeard) body.input = question.content;
    const path = `/v1/sessions/${this.#session.id}/generate`;
    const stream = events(path, { method: "POST", body, signal: this.#abort.signal });
    await this.#read(stream, { question: isHeard ? null : question.id });
  }

  async #read(stream, { question = null, isResumed = false }) {
    const { message } = this;
    const session = this.#session;
    let source = stream;
    let numTries = 0;
    let isOver = false;
    for (;;) {
      try {
        for await (const event of source) {
          isOver = event.data === "[DONE]";
          if (isOver) continue;
          numTries = 0;
          this.isReconnecting = false;
          const chunk = JSON.parse(event.data);
          if (chunk.token_ids.length && !isResumed) noteAnswer(session.record, question, message.id);
          this.#take(chunk, event.id);
        }
        if (isOver) return;
        throw new Unreachable("the connection was lost");
      } catch (error) {
        const isWaiting = error instanceof ServerError && error.status === 503;
        const mayComeBack = (error instanceof Unreachable || isWaiting) && message.resume && !this.isStopped;
        if (!mayComeBack || numTries === RECONNECT_S.length) throw error;
        this.isReconnecting = true;
        this.changed();
        await pause(RECONNECT_S[numTries++]);
        source = this.#again(message.resume.eventId);
      }
    }
  }

  /** The same answer, after the last event that was seen. */
  #again(eventId) {
    const headers = { "Last-Event-ID": eventId };
    return events(`/v1/sessions/${this.#session.id}/stream`, { signal: this.#abort.signal, headers });
  }

  #take(chunk, eventId) {
    const { message } = this;
    message.content += chunk.text;
    message.status = "streaming";
    message.resume = { session: this.#session.id, eventId };
    if (chunk.token_ids.length) message.firstAt ??= Date.now();
    if (chunk.finish_reason !== null) {
      message.finish = chunk.finish_reason;
      message.stats = this.#stats(chunk.usage);
    }
    if (chunk.error) throw new ServerError(500, chunk.error);
    this.#redraw();
  }

  #stats(usage) {
    const { asked, firstAt } = this.message;
    const ended = Date.now();
    return {
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details.cached_tokens,
      completion: usage.completion_tokens,
      total: usage.total_tokens,
      ttft: firstAt === null ? null : (firstAt - asked) / 1000,
      seconds: (ended - asked) / 1000,
      rate: firstAt !== null && usage.completion_tokens > 1 && ended > firstAt ? ((usage.completion_tokens - 1) * 1000) / (ended - firstAt) : null,
    };
  }

  #redraw() {
    this.#frame ||= setTimeout(() => {
      this.#frame = 0;
      this.changed();
      this.onChange(false);
    }, FRAME_MS);
  }

  async #guarded(work) {
    const { message, conversation } = this;
    try {
      await work();
      message.status = "done";
    } catch (error) {
      message.status = this.isStopped ? "done" : "failed";
      message.finish = this.isStopped ? "cancelled" : null;
      message.error = this.isStopped ? null : { text: isLost(error) ? LOST : explain(error), retryAfter: error.retryAfter ?? null };
      // Unless the server has said it, nobody knows what it has taken in.
      const isKnownThere = error instanceof ServerError && !isLost(error);
      if (!isKnownThere && this.#session !== null) abandon(conversation, this.#session.id);
    } finally {
      clearTimeout(this.#frame);
      this.isReconnecting = false;
      delete message.resume;
      this.changed();
      this.onChange(true);
    }
  }
}
