// What the page knows, and everything that can be done: views call these methods and follow the changes.
import { Unreachable, ask } from "../shared/api.js";
import { Emitter } from "../shared/emitter.js";
import { explain } from "../shared/words.js";
import { Answering } from "./answer.js";
import { abandon, abandonAll, forkInto, told } from "./sessions.js";
import * as storage from "./storage.js";
import { add, choose, copyUpTo, isSaid, newConversation, pathTo, remove } from "./tree.js";

const SAVE_MS = 500;
const LOOK_AGAIN_MS = 1500;
const DEFAULTS = "tokenmill.defaults";
const MOST_AT_ONCE = 4; // browsers have six connections to a server, and the page needs some for other things
const TOO_MANY = `${MOST_AT_ONCE} answers are on their way already. Wait until one of them is done.`;
const ELSEWHERE = "Another tab is at work in this conversation. Wait until it is done.";

const sessionFiles = () => import("./session_files.js").catch(() => { throw new Unreachable("the server can't be reached"); });

export class Chat extends Emitter {
  conversations = new Map();
  current = null;
  models = [];
  /** Downloaded models that an admin may load: `{ id, bytes }`. */
  cached = [];
  /** A model that is being loaded, or why it could not be: `{ id, problem }`. */
  loading = null;
  /** "ready", "loading", "gone", "trouble" or "key": what the server is like. */
  server = "loading";
  /** Can conversations be stored? */
  isStored = true;
  /** What gets the focus when it is drawn next: a button of a message, `{ id, label }`. */
  focus = null;
  /** What is written, but not sent yet, by conversation. */
  drafts = new Map();
  #answering = new Map();
  #unsaved = new Map();
  #stale = new Set();
  #blank = null;
  #looking = false;
  #isTakenUp = false;

  /** Read what is stored, and see what the server has. */
  async open() {
    try {
      for (const conversation of await storage.loadAll()) this.conversations.set(conversation.id, conversation);
    } catch {
      this.isStored = false;
    }
    window.addEventListener("hashchange", () => this.#follow());
    window.addEventListener("pagehide", () => this.#saveAll());
    storage.onOtherTabs((id) => this.#reload(id));
    this.#follow();
    await this.look();
  }

  // -- the server -----------------------------------------------------------------------------------------------------

  /** Look until the server answers; then its models are known. */
  async look() {
    if (this.#looking) return;
    this.#looking = true;
    try {
      while (!(await this.#lookOnce())) await new Promise((resolve) => setTimeout(resolve, LOOK_AGAIN_MS));
    } finally {
      this.#looking = false;
    }
  }

  async #lookOnce() {
    try {
      const { data } = await ask("/v1/models");
      this.models = data;
      this.server = "ready";
      this.#lookForCached();
      if (!this.#isTakenUp) this.#takeUpAll();
    } catch (error) {
      this.server = { 401: "key", 503: "loading" }[error.status] ?? (error instanceof Unreachable ? "gone" : "trouble");
    }
    this.changed();
    return this.server === "ready" || this.server === "key";
  }

  /** Which other models could be loaded. The server tells admins only; everybody else sees none. */
  async #lookForCached() {
    const { data } = await ask("/v1/models/cached").catch(() => ({ data: [] }));
    this.cached = data;
    this.changed();
  }

  /** Choose a model for a conversation; a downloaded one is loaded first. */
  async useModel(conversation, id) {
    if (this.cached.some((model) => model.id === id)) {
      this.loading = { id, problem: null };
      this.changed();
      try {
        await ask("/v1/models/load", { method: "POST", body: { model: id } });
        this.loading = null;
      } catch (error) {
        this.loading = { id, problem: explain(error) };
      }
      await this.look();
      if (this.loading !== null) return this.changed();
    }
    this.loading = null;
    return this.configure(conversation, { model: id });
  }

  modelOf(conversation) {
    return this.models.find(({ id, aliases }) => id === conversation.model || aliases.includes(conversation.model)) ?? this.models[0] ?? null;
  }

  // -- conversations --------------------------------------------------------------------------------------------------

  /** The latest one first. */
  get list() {
    return [...this.conversations.values()].sort((one, other) => other.updated - one.updated);
  }

  /** An empty conversation; it is stored with its first question. */
  startNew() {
    this.show(null);
  }

  show(id) {
    const hash = id === null ? "" : `#${id}`;
    if (location.hash === hash) this.#follow();
    else if (id === null) {
      history.pushState(null, "", location.pathname);
      this.#follow();
    } else location.hash = hash;
  }

  #follow() {
    const id = location.hash.slice(1);
    this.current = this.conversations.get(id) ?? (this.#blank ??= newConversation(this.#defaults()));
    this.changed();
  }

  rename(conversation, title) {
    conversation.title = title.trim() || null;
    this.#changed(conversation);
  }

  async delete(conversation) {
    this.stop(conversation);
    this.conversations.delete(conversation.id);
    this.#unsaved.delete(conversation.id);
    abandonAll(conversation);
    await storage.erase(conversation.id);
    if (this.current === conversation) this.startNew();
    this.changed();
  }

  /** The session that ends the branch shown, as a file. */
  async saved(conversation) {
    const { saved } = await sessionFiles();
    try {
      return await saved(conversation, this.modelOf(conversation)?.id);
    } finally {
      this.#changed(conversation); // it may have another session now
    }
  }

  /** The conversation of a session file, which may be of the model that is chosen or of another one that is loaded. */
  async restored(file) {
    const { restored } = await sessionFiles();
    const chosen = this.modelOf(this.current);
    if (chosen === null) throw new Unreachable("the server is not ready");
    const others = this.models.filter((model) => model !== chosen && model.status === "loaded");
    return restored(file, [chosen, ...others].map(({ id }) => id), this.#defaults().sampling?.max_tokens);
  }

  take(conversations) {
    for (const conversation of conversations) {
      this.conversations.set(conversation.id, conversation);
      this.#changed(conversation);
    }
  }

  /** Other settings. Where they change what the model was told before, it must be told anew. */
  configure(conversation, changes, isDefault = false) {
    const { model, system, sampling, tools = null, schema = null } = { ...conversation, ...changes };
    const isSame = JSON.stringify(tools) === JSON.stringify(conversation.tools ?? null);
    if (model !== conversation.model || system !== conversation.system || !isSame) {
      if (this.answering(conversation)) this.#stale.add(conversation.id); // the answer on its way is not disturbed
      else abandonAll(conversation);
      conversation.context = null;
    }
    Object.assign(conversation, { model, system, sampling, tools, schema });
    if (isDefault) localStorage.setItem(DEFAULTS, JSON.stringify({ model, system, sampling, tools, schema }));
    this.#changed(conversation);
  }

  #defaults() {
    try {
      return JSON.parse(localStorage.getItem(DEFAULTS)) ?? {};
    } catch {
      return {};
    }
  }

  /** Count what the model would read of the branch that is shown, unless the last answer's usage has told it. */
  async countContext(conversation) {
    const { leaf, system } = conversation;
    const model = this.modelOf(conversation)?.id;
    if (leaf === null || !model || conversation.context?.leaf === leaf) return;
    if (conversation.tools) return; // their declarations are in the prompt, too: only the server knows how
    const said = pathTo(conversation, leaf).filter(isSaid).flatMap(told);
    const messages = system.trim() ? [{ role: "system", content: system }, ...said] : said;
    let tokens;
    try {
      ({ count: tokens } = await ask("/tokenize", { method: "POST", body: { model, messages, add_generation_prompt: false } }));
    } catch (error) {
      if (error.code !== "context_length_exceeded") return; // it is not shown, then
      tokens = null; // the server does not count what can't fit
    }
    const isSame = conversation.leaf === leaf && conversation.system === system && this.modelOf(conversation)?.id === model;
    if (!isSame || this.answering(conversation)) return;
    conversation.context = { leaf, tokens };
    this.#changed(conversation);
  }

  // -- questions and answers ------------------------------------------------------------------------------------------

  answering(conversation) {
    return this.#answering.get(conversation.id) ?? null;
  }

  /** A question at the end of the branch that is shown. */
  send(conversation, text) {
    this.#ask(conversation, conversation.leaf, "user", text);
  }

  /** Another question in place of one: a branch of its own. */
  edit(conversation, message, text) {
    this.#ask(conversation, message.parent, "user", text);
  }

  /** What the calls of an answer have returned, in their order: the model goes on from there. */
  answerCalls(conversation, message, contents) {
    const results = message.calls.map(({ id, name }, i) => ({ id, name, content: contents[i] }));
    this.#ask(conversation, message.id, "tool", "", { results });
  }

  /** Other words for an answer: a branch of its own. */
  rewrite(conversation, message, text) {
    if (this.answering(conversation)) return;
    Object.assign(add(conversation, message.parent, "assistant", text), { status: "done", finish: "edited" });
    this.#changed(conversation);
  }

  /** Another answer to the same question; one that never came is tried again in its place. */
  regenerate(conversation, message) {
    if (this.answering(conversation)) return;
    if (!isSaid(message)) remove(conversation, message.id);
    this.#answer(conversation, add(conversation, message.parent, "assistant"));
  }

  /** Go on with an answer that was cut short. */
  goOn(conversation, message) {
    if (!this.answering(conversation)) this.#answer(conversation, message);
  }

  stop(conversation) {
    this.answering(conversation)?.stop();
  }

  /** Show the branch of a message; the button of this label gets the focus there. */
  choose(conversation, message, label) {
    choose(conversation, message.id);
    this.focus = { id: message.id, label };
    this.#changed(conversation);
  }

  /** A conversation of its own from here on. */
  async fork(conversation, message) {
    const copy = copyUpTo(conversation, message.id);
    await forkInto(conversation, copy, message.id);
    this.take([copy]);
    this.show(copy.id);
  }

  #ask(conversation, parent, role, text, more = {}) {
    if (this.answering(conversation)) return;
    const question = Object.assign(add(conversation, parent, role, text), more);
    const isNew = !this.conversations.has(conversation.id);
    this.conversations.set(conversation.id, conversation);
    if (this.#blank === conversation) this.#blank = null;
    this.#answer(conversation, add(conversation, question.id, "assistant"));
    if (isNew) this.show(conversation.id);
  }

  #answer(conversation, message) {
    this.#follows(conversation, message, (answering) => answering.run());
  }

  /** Go on reading answers that were on their way when the page was left. */
  #takeUpAll() {
    this.#isTakenUp = true;
    for (const conversation of this.conversations.values()) this.#takeUp(conversation);
  }

  #takeUp(conversation) {
    for (const message of Object.values(conversation.messages)) {
      if (!["waiting", "streaming"].includes(message.status)) continue;
      if (message.resume) this.#follows(conversation, message, (answering) => answering.resume());
      else {
        if (message.session) abandon(conversation, message.session); // it may have gone on without us
        delete message.session;
        this.#fail(conversation, message, "The page was left before the answer began.");
      }
    }
  }

  async #follows(conversation, message, begin) {
    if (this.#answering.size >= MOST_AT_ONCE) return this.#fail(conversation, message, TOO_MANY);
    const model = this.modelOf(conversation)?.id;
    const answering = new Answering(conversation, message, model, (isNow) => this.#keep(conversation, isNow));
    this.#answering.set(conversation.id, answering);
    this.#changed(conversation);
    const isOurs = await withLock(conversation.id, () => begin(answering));
    this.#answering.delete(conversation.id);
    if (this.#stale.delete(conversation.id)) abandonAll(conversation);
    else if (message.stats) conversation.context = { leaf: message.id, tokens: message.stats.total };
    if (!isOurs) this.#fail(conversation, message, ELSEWHERE);
    this.#changed(conversation);
    if (message.status === "failed") this.look();
  }

  #fail(conversation, message, text) {
    Object.assign(message, { status: "failed", error: { text, retryAfter: null } });
    this.#changed(conversation);
  }

  // -- storing --------------------------------------------------------------------------------------------------------

  #changed(conversation) {
    if (this.conversations.has(conversation.id)) this.#keep(conversation, true);
    this.changed();
  }

  /** Store it: now, or soon. */
  #keep(conversation, isNow) {
    if (!this.conversations.has(conversation.id)) return;
    if (isNow) {
      clearTimeout(this.#unsaved.get(conversation.id));
      this.#unsaved.delete(conversation.id);
      storage.save(conversation).catch(() => {
        this.isStored = false;
        this.changed();
      });
    } else if (!this.#unsaved.has(conversation.id)) {
      this.#unsaved.set(conversation.id, setTimeout(() => this.#keep(conversation, true), SAVE_MS));
    }
  }

  /** Another tab has changed a conversation; what this one is doing with it goes first. */
  async #reload(id) {
    if (this.#answering.has(id)) return;
    const stored = await storage.load(id);
    const known = this.conversations.get(id);
    if (!stored) this.conversations.delete(id);
    else if (known) Object.assign(known, stored); // the same object: whoever has it sees what is new
    else this.conversations.set(id, stored);
    this.#follow();
  }

  #saveAll() {
    for (const id of [...this.#unsaved.keys()]) this.#keep(this.conversations.get(id), true);
  }
}

/** Do something that only one tab at a time may do with a conversation; false if another one is at it. */
async function withLock(id, work) {
  if (!navigator.locks) { // only where the page came over HTTPS or from this machine
    await work();
    return true;
  }
  return navigator.locks.request(`tokenmill.${id}`, { ifAvailable: true }, async (lock) => {
    if (lock !== null) await work();
    return lock !== null;
  });
}
