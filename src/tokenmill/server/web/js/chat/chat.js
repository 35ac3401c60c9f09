// What the page knows, and everything that can be done: views call these methods and follow the changes.
import { Unreachable, ask } from "../shared/api.js";
import { Emitter } from "../shared/emitter.js";
import { Answering } from "./answer.js";
import { abandonAll, forkInto } from "./sessions.js";
import * as storage from "./storage.js";
import { add, choose, copyUpTo, newConversation, remove } from "./tree.js";

const SAVE_MS = 500;
const LOOK_AGAIN_MS = 1500;
const DEFAULTS = "tokenmill.defaults";

export class Chat extends Emitter {
  conversations = new Map();
  current = null;
  models = [];
  /** "ready", "loading", "gone" or "key": what the server is like. */
  server = "loading";
  /** What is written, but not sent yet, by conversation. */
  drafts = new Map();
  #answering = new Map();
  #unsaved = new Map();
  #looking = false;
  #isTakenUp = false;

  /** Read what is stored, and see what the server has. */
  async open() {
    for (const conversation of await storage.loadAll()) this.conversations.set(conversation.id, conversation);
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
      if (!this.#isTakenUp) this.#takeUpAll();
    } catch (error) {
      this.server = error.status === 401 ? "key" : error instanceof Unreachable ? "gone" : "loading";
    }
    this.changed();
    return this.server === "ready" || this.server === "key";
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
    this.current = this.conversations.get(id) ?? newConversation(this.#defaults());
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

  take(conversations) {
    for (const conversation of conversations) {
      this.conversations.set(conversation.id, conversation);
      this.#changed(conversation);
    }
  }

  /** Another system prompt, model or other sampling. What the model was told before, it must be told anew. */
  configure(conversation, { model = conversation.model, system = conversation.system, sampling = conversation.sampling }, isDefault = false) {
    if (model !== conversation.model || system !== conversation.system) abandonAll(conversation);
    Object.assign(conversation, { model, system, sampling });
    if (isDefault) localStorage.setItem(DEFAULTS, JSON.stringify({ model, system, sampling }));
    this.#changed(conversation);
  }

  #defaults() {
    try {
      return JSON.parse(localStorage.getItem(DEFAULTS)) ?? {};
    } catch {
      return {};
    }
  }

  // -- questions and answers ------------------------------------------------------------------------------------------

  answering(conversation) {
    return this.#answering.get(conversation.id) ?? null;
  }

  /** A question at the end of the branch that is shown. */
  send(conversation, text) {
    this.#ask(conversation, conversation.leaf, text);
  }

  /** Another question in place of one: a branch of its own. */
  edit(conversation, message, text) {
    this.#ask(conversation, message.parent, text);
  }

  /** Other words for an answer: a branch of its own. */
  rewrite(conversation, message, text) {
    Object.assign(add(conversation, message.parent, "assistant", text), { status: "done", finish: "edited" });
    this.#changed(conversation);
  }

  /** Another answer to the same question; one that never came is tried again in its place. */
  regenerate(conversation, message) {
    if (this.answering(conversation)) return;
    if (message.content === "") remove(conversation, message.id);
    this.#answer(conversation, add(conversation, message.parent, "assistant"));
  }

  /** Go on with an answer that was cut short. */
  goOn(conversation, message) {
    if (!this.answering(conversation)) this.#answer(conversation, message);
  }

  stop(conversation) {
    this.answering(conversation)?.stop();
  }

  choose(conversation, message) {
    choose(conversation, message.id);
    this.#changed(conversation);
  }

  /** A conversation of its own from here on. */
  async fork(conversation, message) {
    const copy = copyUpTo(conversation, message.id);
    await forkInto(conversation, copy, message.id);
    this.take([copy]);
    this.show(copy.id);
  }

  #ask(conversation, parent, text) {
    if (this.answering(conversation)) return;
    const question = add(conversation, parent, "user", text);
    const isNew = !this.conversations.has(conversation.id);
    this.conversations.set(conversation.id, conversation);
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
        Object.assign(message, { status: "failed", error: { text: "The page was left before the answer began.", retryAfter: null } });
        this.#changed(conversation);
      }
    }
  }

  async #follows(conversation, message, begin) {
    const answering = new Answering(conversation, message, (isOver) => {
      this.#keep(conversation, isOver);
    });
    this.#answering.set(conversation.id, answering);
    this.#changed(conversation);
    await begin(answering);
    this.#answering.delete(conversation.id);
    this.#changed(conversation);
    if (message.status === "failed") this.look();
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
      storage.save(conversation).catch((error) => console.error("a conversation could not be stored", error));
    } else if (!this.#unsaved.has(conversation.id)) {
      this.#unsaved.set(conversation.id, setTimeout(() => this.#keep(conversation, true), SAVE_MS));
    }
  }

  /** Another tab has changed a conversation; what this one is doing with it goes first. */
  async #reload(id) {
    if (this.#answering.has(id)) return;
    const stored = await storage.load(id);
    const isShown = this.current?.id === id;
    if (stored) this.conversations.set(id, stored);
    else this.conversations.delete(id);
    if (isShown) this.#follow();
    else this.changed();
  }

  #saveAll() {
    for (const id of [...this.#unsaved.keys()]) this.#keep(this.conversations.get(id), true);
  }
}
