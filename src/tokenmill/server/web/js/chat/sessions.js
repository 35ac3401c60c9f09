// Which session of the server goes on from which message.
//
// A conversation knows its sessions as { id: { turns, pending } }. `turns` are the messages that each turn of the session
// has taken in; `pending` those that the next one will. A branch goes on in the session that ends with its last message; in
// a fork of one that has come past it, if there is one; or else in a new one that is told the history. So a new question is
// all that is sent and computed, wherever in the tree it is asked, and a session that the server has lost is made again.
import { ServerError, ask } from "../shared/api.js";
import { isObject } from "./json.js";
import { history, lastSaid } from "./tree.js";

/** Does the server not know the session (any more)? */
export const isLost = (error) => error instanceof ServerError && error.code === "session_not_found";

/** Does the server know the session, but not its last answer? It was restarted while it answered. */
export const isAnswerLost = (error) => error instanceof ServerError && error.code === "answer_lost";

/** Does the server have other things to say of a session than we thought? Then it is made again. */
export const isOff = (error) => isLost(error) || (error instanceof ServerError && error.status === 400);

/** A session after a message, ready for what comes next: `{ id, record }`. */
export async function sessionAfter(conversation, message, model, signal) {
  const place = lastSaid(conversation, message);
  for (;;) {
    const found = await sessionAt(conversation, place, signal);
    if (found !== null) return found;
    if (find(conversation, place) === null) return create(conversation, place, model, signal);
  }
}

/** A session that ends with a message, forked if it has come past it; null if the server has none. */
export async function sessionAt(conversation, place, signal) {
  const found = find(conversation, place);
  if (found === null || found.isEnd) return found;
  try {
    return await fork(conversation, found, signal);
  } catch (error) {
    if (!isOff(error)) throw error;
    abandon(conversation, found.id);
    return null;
  }
}

/** Is there a session with a turn that ends with this message? */
export const isKnown = (conversation, message) => find(conversation, message) !== null;

function find(conversation, message) {
  let best = null;
  for (const [id, record] of Object.entries(conversation.sessions)) {
    const last = (record.pending.length ? record.pending : record.turns.at(-1))?.at(-1) ?? null;
    if (last === message) return { id, record, isEnd: true };
    const index = record.turns.findIndex((turn) => turn.at(-1) === message);
    if (index >= 0) best = { id, record, isEnd: false, numTurns: index + 1 };
  }
  return best;
}

/** A message as the API has it; results of tools are one each. */
export function told({ role, content, calls, results }) {
  if (role === "tool") return results.map((result) => ({ role, tool_call_id: result.id, content: result.content }));
  const complete = (calls ?? []).filter(isComplete);
  if (!complete.length) return [{ role, content }];
  const shaped = complete.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
  return [{ role, content: content || null, tool_calls: shaped }];
}

/** Has a call all of its arguments? One that was cut short is not told. */
function isComplete({ arguments: given }) {
  try {
    return isObject(JSON.parse(given));
  } catch {
    return false;
  }
}

async function create(conversation, place, model, signal) {
  const said = place === null ? [] : history(conversation, place);
  const body = { model };
  if (conversation.system.trim()) body.system = conversation.system;
  if (conversation.tools) body.tools = conversation.tools;
  if (said.length) body.messages = said.flatMap(told);
  const { id } = await ask("/v1/sessions", { method: "POST", body, signal });
  return keep(conversation, id, { turns: [], pending: said.map((message) => message.id) });
}

async function fork(conversation, { id, record, numTurns }, signal) {
  const body = { at_turn: numTurns };
  const { data } = await ask(`/v1/sessions/${id}/fork`, { method: "POST", body, signal });
  return keep(conversation, data[0].id, { turns: record.turns.slice(0, numTurns), pending: [] });
}

function keep(conversation, id, record) {
  conversation.sessions[id] = record;
  return { id, record, isEnd: true };
}

/** A session has taken in a question (null if it had it before) and has begun to answer. */
export function noteAnswer(record, question, answer) {
  if (record.turns.at(-1)?.at(-1) === answer) return; // it goes on with one that was cut short
  const taken = question === null ? record.pending : [...record.pending, question];
  if (taken.length) record.turns.push(taken);
  record.pending = [];
  record.turns.push([answer]);
}

/** Take a session back to where a question was asked, whatever the server has kept of the question and its answer. */
export async function takeBack(conversation, id, question) {
  const record = conversation.sessions[id];
  if (!record) return; // another tab has given it up
  const place = lastSaid(conversation, question.parent);
  const numTurns = record.turns.findIndex((turn) => turn.at(-1) === place) + 1;
  try {
    await ask(`/v1/sessions/${id}/rewind`, { method: "POST", body: { at_turn: numTurns } });
    record.turns.length = numTurns;
    record.pending = [];
  } catch {
    abandon(conversation, id);
  }
}

/** What the server has of a session is not known any more, or of no use; that it may be gone already is no matter. */
export function abandon(conversation, id) {
  delete conversation.sessions[id];
  ask(`/v1/sessions/${id}`, { method: "DELETE" }).catch(() => {});
}

export function abandonAll(conversation) {
  for (const id of Object.keys(conversation.sessions)) abandon(conversation, id);
}

/** Let another conversation go on from a message with a session of its own, if the server has one. */
export async function forkInto(source, target, message) {
  const found = find(source, message);
  if (found === null || found.record.pending.length) return;
  const numTurns = found.numTurns ?? found.record.turns.length;
  try {
    await fork(target, { ...found, numTurns });
  } catch {
    // it will be made anew from the history
  }
}
