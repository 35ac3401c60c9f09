// A conversation is a tree of messages; a branch is the way from its beginning to one of its ends.
// Everything here is plain data: it is stored, exported and imported as it is.

const TITLE_CHARS = 60;

/** Who says a message, by its role. */
export const SPEAKERS = { user: "You", assistant: "Model", tool: "Tool results" };

export const newId = () => crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export function newConversation({ model = null, system = "", sampling = {}, tools = null, schema = null } = {}) {
  const now = Date.now();
  return {
    id: newId(), title: null, created: now, updated: now, model, system, sampling,
    tools, schema, // functions that the model may call, as the API takes them; the JSON schema of its answers
    messages: {}, leaf: null, removed: [],
    sessions: {}, // what the server's sessions have taken in: see sessions.js
    context: null, // { leaf, tokens }: length of the branch up to a message; null tokens: more than the context
  };
}

/** A new message after `parent` (null: at the beginning); it becomes the end of the branch that is shown. */
export function add(conversation, parent, role, content = "") {
  const message = { id: newId(), parent, role, content, at: Date.now() };
  conversation.messages[message.id] = message;
  if (parent !== null) conversation.messages[parent].chosen = message.id;
  conversation.leaf = message.id;
  conversation.updated = message.at;
  return message;
}

export const children = (conversation, parent) =>
  Object.values(conversation.messages).filter((message) => message.parent === parent);

/** A message, and all others that follow the same one. */
export const siblings = (conversation, message) => children(conversation, message.parent);

/** From the beginning to a message. */
export function pathTo(conversation, id) {
  const path = [];
  for (let at = id; at !== null; at = conversation.messages[at].parent) path.push(conversation.messages[at]);
  return path.reverse();
}

/** Show the branch that goes through a message, on to where it was last time. */
export function choose(conversation, id) {
  for (let at = conversation.messages[id]; at.parent !== null; at = conversation.messages[at.parent]) {
    conversation.messages[at.parent].chosen = at.id;
  }
  let end = id;
  for (;;) {
    const next = children(conversation, end);
    if (!next.length) break;
    const chosen = conversation.messages[end].chosen;
    end = (next.find((message) => message.id === chosen) ?? next.at(-1)).id;
  }
  conversation.leaf = end;
}

/** Remove a message that has nothing after it. */
export function remove(conversation, id) {
  const { parent } = conversation.messages[id];
  delete conversation.messages[id];
  conversation.removed.push(id);
  if (conversation.leaf === id) conversation.leaf = parent;
}

/** Two tabs have each gone on with a conversation: this one's, with the messages that only the other knows. */
export function merged(conversation, other) {
  const unknown = Object.entries(other?.messages ?? {}).filter(([id]) => !conversation.removed.includes(id));
  return { ...conversation, messages: { ...Object.fromEntries(unknown), ...conversation.messages } };
}

/** Was anything said? A question whose answer never came was not heard by the model, either. */
export const isSaid = ({ role, content, reasoning, calls }) => role !== "assistant" || content !== "" || Boolean(reasoning || calls?.length);

/** Does an answer wait for what its calls return? */
export const isPending = (conversation, { id, calls, finish }) => finish === "tool_calls" && Boolean(calls?.length) && !children(conversation, id).length;

/** A message in words: what tools were called with and have returned, too. */
export const textOf = ({ content, calls = [], results = [] }) =>
  [content, ...calls.map((call) => `${call.name}(${call.arguments})`), ...results.map((result) => result.content)].filter((part) => part !== "").join("\n\n");

/** The last message up to `id` that the model knows of; null if there is none. */
export function lastSaid(conversation, id) {
  let at = id;
  while (at !== null && !isSaid(conversation.messages[at])) at = conversation.messages[conversation.messages[at].parent].parent;
  return at;
}

/** What the model knows of, up to a message. */
export function history(conversation, id) {
  const said = [];
  for (let at = lastSaid(conversation, id); at !== null; at = lastSaid(conversation, conversation.messages[at].parent)) {
    said.push(conversation.messages[at]);
  }
  return said.reverse();
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = Object.values(conversation.messages).find((message) => message.role === "user");
  const line = first?.content.trim().split("\n")[0] ?? "";
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line || "New conversation";
}

/** A conversation of its own with everything up to a message; ids of messages stay, so sessions can follow. */
export function copyUpTo(conversation, id) {
  const { model, system, sampling, tools, schema } = conversation;
  const copy = newConversation({ model, system, sampling: { ...sampling }, tools, schema });
  for (const { chosen, ...message } of pathTo(conversation, id)) copy.messages[message.id] = message;
  copy.leaf = id;
  copy.title = `${titleOf(conversation)} (fork)`;
  return copy;
}

/** Does the title or any message have all of these words? */
export function matches(conversation, words) {
  const text = [titleOf(conversation), ...Object.values(conversation.messages).map(textOf)].join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}
