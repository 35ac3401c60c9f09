// One answer on its way: asked for, read, taken up again when the connection breaks, stopped.
import { ServerError, Unreachable, ask, events } from "../shared/api.js";
import { Emitter } from "../shared/emitter.js";
import { explain } from "../shared/words.js";
import { abandon, isAnswerLost, isKnown, isLost, isOff, noteAnswer, sessionAfter, sessionAt, takeBack, told } from "./sessions.js";
import { children, isSaid } from "./tree.js";

const FRAME_MS = 50;
const CHARS_A_MS = 100; // long answers take longer to draw, and are drawn less often
const RECONNECT_S = [0.2, 0.5, 1, 2, 2, 2, 2, 2, 2];
const LOADING_S = 1;
const STOP_MS = 5000;
const FEW = 4; // tokens: too few to say how fast they came

const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

const LOST = "The server does not have this answer any more; it may have been restarted. Ask again, and it goes on from what was said.";

/** Finish reasons after which an answer may go on. */
const CUT_SHORT = ["length", "cancelled", "timeout"];

/** The finish reason of an answer that a restart of the server cut off: it goes on, whatever the server has kept of it. */
export const RESTARTED = "restarted";

/**
 * Can more be had of an answer? It must have been cut short, the server must have it or be told, and nothing may follow it.
 * Calls and thoughts are read from their beginning, and a schema describes whole answers: those do not go on.
 */
export const canGoOn = (conversation, { id, content, calls, finish }) =>
  (finish === RESTARTED || (CUT_SHORT.includes(finish) && isKnown(conversation, id)))
  && content !== "" && !calls?.length && !conversation.schema && !children(conversation, id).length;

export class Answering extends Emitter {
  #abort = new AbortController();
  #frame = 0;
  #session = null;
  #model;
  isStopped = false;
  isReconnecting = false;

  /** `message` is the answer; `onChange(isNow)` is told when there is something to store, now or soon. */
  constructor(conversation, message, model, onChange) {
    super();
    this.conversation = conversation;
    this.message = message;
    this.#model = model;
    this.onChange = onChange;
  }

  /** Answer the question before it; if it has a part already, go on with that. */
  async run() {
    const { content, finish, stats } = this.message;
    Object.assign(this.message, { status: "waiting", error: null, finish: null, stats: null, asked: Date.now(), firstAt: null });
    this.changed();
    await this.#guarded(() => (isSaid(this.message) ? this.#goOn(finish === RESTARTED) : this.#generate()), { content, finish, stats });
  }

  /** Take up an answer that was on its way when the page was left. */
  async resume() {
    const { session, eventId } = this.message.resume;
    const record = this.conversation.sessions[session];
    this.#session = { id: session, record };
    await this.#guarded(async () => {
      if (!record) throw new ServerError(404, { message: "the session is gone", code: "session_not_found" });
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

  /** An answer from its beginning. A session that is not what we thought is made again from the history. */
  async #generate() {
    const { conversation, message } = this;
    const { signal } = this.#abort;
    const question = conversation.messages[message.parent];
    for (;;) {
      const isHeard = isKnown(conversation, question.id);
      this.#use(await sessionAfter(conversation, isHeard ? question.id : question.parent, this.#model, signal));
      const body = { ...conversation.sampling };
      if (conversation.schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: conversation.schema } };
      if (!isHeard) body.input = question.role === "user" ? question.content : told(question);
      try {
        return await this.#read(this.#stream(body), { question: isHeard ? null : question.id });
      } catch (error) {
        const isTriedAgain = !isSaid(message) && (isHeard ? isOff(error) : isLost(error));
        if (!isTriedAgain) throw error;
        abandon(conversation, this.#session.id);
        this.#session = null;
      }
    }
  }

  /** More of an answer. After a restart the server is told the part that the page has, unless it has it: nothing is said twice. */
  async #goOn(isRestarted) {
    const { conversation, message } = this;
    for (;;) {
      const found = await sessionAt(conversation, message.id, this.#abort.signal);
      try {
        if (found !== null) this.#use(found);
        else if (isRestarted) await this.#tellPart();
        else throw new ServerError(404, { message: "the session is gone", code: "session_not_found" });
        return await this.#read(this.#stream(conversation.sampling), {});
      } catch (error) {
        if (!isRestarted || !isLost(error) || this.#session === null) throw error;
        abandon(conversation, this.#session.id);
        this.#session = null;
      }
    }
  }

  /** Have a session that ends with the question and the part, as with an answer that was cut short. */
  async #tellPart() {
    const { conversation, message } = this;
    const { signal } = this.#abort;
    const question = conversation.messages[message.parent];
    this.#use(await sessionAfter(conversation, question.parent, this.#model, signal));
    const input = [question, message].flatMap(told);
    const body = { input, continue_final_message: true };
    await ask(`/v1/sessions/${this.#session.id}/append`, { method: "POST", body, signal });
    noteAnswer(this.#session.record, question.id, message.id);
  }

  /** Note which session answers before it does: a page that dies must not leave one behind that says more than it knows. */
  #use(session) {
    this.#session = session;
    this.message.session = session.id;
    this.onChange(true);
  }

  #stream(body) {
    return events(`/v1/sessions/${this.#session.id}/generate`, { method: "POST", body, signal: this.#abort.signal });
  }

  /** The same answer, after the last event that was seen. */
  #again(eventId) {
    const headers = { "Last-Event-ID": eventId };
    return events(`/v1/sessions/${this.#session.id}/stream`, { signal: this.#abort.signal, headers });
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
        const seconds = isWaiting ? LOADING_S : RECONNECT_S[numTries++]; // one that loads its model will be there
        if (!mayComeBack || seconds === undefined) throw error;
        this.isReconnecting = true;
        this.changed();
        await pause(seconds);
        source = this.#again(message.resume.eventId);
      }
    }
  }

  #take(chunk, eventId) {
    const { message } = this;
    if (chunk.deltas) this.#addParts(chunk);
    else message.content += chunk.text;
    message.status = "streaming";
    message.resume = { session: this.#session.id, eventId };
    if (chunk.token_ids.length) message.firstAt ??= Date.now();
    if (chunk.finish_reason !== null) {
      message.finish = chunk.finish_reason;
      message.stats = this.#stats(chunk.usage);
      if (message.thinking) this.#endThinking(chunk.usage.completion_tokens_details.reasoning_tokens);
    }
    const isCutShort = CUT_SHORT.includes(chunk.finish_reason) && isSaid(message);
    if (chunk.error && !isCutShort) throw new ServerError(500, chunk.error);
    this.#redraw();
  }

  /** Of a model that thinks or calls tools: what it says comes as the server has told it apart. */
  #addParts({ deltas, token_ids: ids }) {
    const { message } = this;
    for (const { content, reasoning_content: reasoning, tool_calls: calls = [] } of deltas) {
      if (reasoning) {
        message.thinking ??= { tokens: 0, from: Date.now(), seconds: null };
        message.reasoning = (message.reasoning ?? "") + reasoning;
      } else if (message.thinking) this.#endThinking(message.thinking.tokens);
      message.content += content ?? "";
      for (const { index, id, function: { name, arguments: given } } of calls) {
        if (id) (message.calls ??= [])[index] = { id, name, arguments: "" };
        message.calls[index].arguments += given;
      }
    }
    if (message.thinking?.seconds === null) message.thinking.tokens += ids.length;
  }

  /** Their number is told at the end of the answer; none, if it only went on. */
  #endThinking(tokens) {
    const { thinking } = this.message;
    thinking.tokens = tokens || thinking.tokens;
    thinking.seconds ??= (Date.now() - thinking.from) / 1000;
  }

  #stats(usage) {
    const { asked, firstAt } = this.message;
    const ended = Date.now();
    const isFast = firstAt === null || ended === firstAt || usage.completion_tokens <= FEW;
    return {
      prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details.cached_tokens,
      completion: usage.completion_tokens,
      total: usage.total_tokens,
      ttft: firstAt === null ? null : (firstAt - asked) / 1000,
      seconds: (ended - asked) / 1000,
      rate: isFast ? null : ((usage.completion_tokens - 1) * 1000) / (ended - firstAt),
    };
  }

  #redraw() {
    this.#frame ||= setTimeout(() => {
      this.#frame = 0;
      this.changed();
      this.onChange(false);
    }, Math.max(FRAME_MS, (this.message.content.length + (this.message.reasoning ?? "").length) / CHARS_A_MS));
  }

  /** Do it, and note how it ended. If nothing was added to an answer, it ended as it had `before`. */
  async #guarded(work, before = {}) {
    const { message, conversation } = this;
    try {
      await work();
      message.status = "done";
    } catch (error) {
      message.status = this.isStopped ? "done" : "failed";
      const isRestarted = (isAnswerLost(error) || error.code === "shutdown") && message.content !== "";
      message.finish = this.isStopped ? "cancelled" : isRestarted ? RESTARTED : null;
      message.error = this.isStopped ? null : { text: isLost(error) ? LOST : explain(error), retryAfter: error.retryAfter ?? null };
      if (isAnswerLost(error)) await takeBack(conversation, this.#session.id, conversation.messages[message.parent]);
      // Unless the server has said it, nobody knows what it has taken in.
      const isKnownThere = error instanceof ServerError && !isLost(error);
      if (!isKnownThere && this.#session !== null) abandon(conversation, this.#session.id);
    } finally {
      if (message.content !== "" && message.content === before.content) Object.assign(message, before);
      clearTimeout(this.#frame);
      this.isReconnecting = false;
      delete message.resume;
      delete message.session;
      this.changed();
      this.onChange(true);
    }
  }
}
