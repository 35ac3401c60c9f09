// Conversations as files: JSON, which can be taken back in, and Markdown, to read. Session files: session_files.js.
import { isObject } from "./json.js";
import { usable } from "./sampling.js";
import { SPEAKERS, newConversation, newId, pathTo, textOf, titleOf } from "./tree.js";

const FORMAT = "tokenmill.conversations";
const VERSION = 1;
const SESSION_FILE = "tokenmill-session"; // how one begins

/** Without what holds for this browser and this server only. */
function portable({ sessions, context, ...conversation }) {
  const messages = Object.fromEntries(Object.entries(conversation.messages).map(([id, { resume, session, ...message }]) => [id, message]));
  return { ...conversation, messages };
}

export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: conversations.map(portable) }, null, 1);
}

/** The branch that is shown. */
export function toMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  if (conversation.system.trim()) parts.push(`**System:** ${conversation.system.trim()}`);
  if (conversation.leaf !== null) {
    for (const message of pathTo(conversation, conversation.leaf)) {
      parts.push(`## ${SPEAKERS[message.role]}`, textOf(message).trim() || "(no answer)");
    }
  }
  return `${parts.join("\n\n")}\n`;
}

/** The conversations in a file; an Error in plain words if it has none, or they don't hang together. */
export function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("this file is no JSON");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) throw new Error("this file has no conversations of tokenmill's");
  if (data.version > VERSION) throw new Error("this file was made by a newer version");
  return data.conversations.map(taken);
}

/** Is it a session file? Files are known by how they begin, whatever they are called. */
export const isSessionFile = async (file) => (await file.slice(0, SESSION_FILE.length).text()) === SESSION_FILE;

const text = (value, fallback = "") => (typeof value === "string" ? value : fallback);
const time = (value) => (Number.isFinite(value) ? value : Date.now());

const STATS = ["prompt", "cached", "completion", "total", "ttft", "seconds", "rate"];

function statsOf(given) {
  const isWhole = ["prompt", "cached", "completion", "total"].every((name) => Number.isFinite(given?.[name]));
  return isWhole ? Object.fromEntries(STATS.map((name) => [name, Number.isFinite(given[name]) ? given[name] : null])) : null;
}

/** A conversation of our own making, with what can be used of another. It and its messages get names of their own. */
function taken(given) {
  const made = newConversation({
    model: text(given?.model, null), system: text(given?.system), sampling: usable(given?.sampling),
    tools: Array.isArray(given?.tools) ? given.tools.filter(isObject) : null, schema: isObject(given?.schema) ? given.schema : null,
  });
  made.title = text(given?.title) || null;
  made.created = time(given?.created);
  made.updated = time(given?.updated);
  const entries = Object.entries(given?.messages ?? {});
  const names = new Map(entries.map(([id]) => [id, newId()]));
  for (const [id, message] of entries) {
    if (!Object.hasOwn(SPEAKERS, message?.role)) throw new Error("a message has no role that is known");
    const parent = message.parent ?? null;
    made.messages[names.get(id)] = {
      id: names.get(id), parent: parent === null ? null : names.get(parent), role: message.role,
      content: text(message.content), at: time(message.at), ...partsOf(message),
    };
  }
  check(made);
  made.leaf = names.get(given?.leaf) ?? [...names.values()].at(-1) ?? null;
  return made;
}

/** What a message of its role has beside its content. */
function partsOf({ role, finish, stats, reasoning, thinking, calls, results }) {
  if (role === "user") return {};
  if (role === "tool") return { results: listOf(results, "content") };
  const made = { status: "done", finish: text(finish, null), stats: statsOf(stats) };
  if (text(reasoning)) made.reasoning = reasoning;
  const { tokens, seconds } = thinking ?? {};
  if (Number.isFinite(tokens) && Number.isFinite(seconds)) made.thinking = { tokens, seconds };
  return Array.isArray(calls) ? { ...made, calls: listOf(calls, "arguments") } : made;
}

/** Calls, or their results: each has an id, a name and a text of this name. */
const listOf = (given, field) =>
  (Array.isArray(given) ? given : []).map((one) => ({ id: text(one?.id), name: text(one?.name), [field]: text(one?.[field]) }));

/** Every message must follow one that is there, of the other role, and lead back to the beginning. */
function check({ messages }) {
  const isSound = new Set();
  for (const start of Object.values(messages)) {
    const way = [];
    for (let at = start; !isSound.has(at.id); at = messages[at.parent]) {
      way.push(at);
      const parent = at.parent === null ? null : messages[at.parent];
      if (parent === undefined || way.length > Object.keys(messages).length) throw new Error("a message follows one that is not there");
      if (at.role === "tool" && !parent?.calls) throw new Error("results of tools follow no call");
      if ((parent?.role ?? "assistant") === at.role) throw new Error("two messages of the same role follow one another");
      if (parent === null) break;
    }
    for (const message of way) isSound.add(message.id);
  }
}

/** Give the user a file. */
export function download(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A title as the name of a file. */
export const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 60) || "conversation";
