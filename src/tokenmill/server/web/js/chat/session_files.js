// Session files (docs/durability.md): the server's own copy of a conversation, token by token, out of it and into it.
// Loaded when there is one to save or to take in.
import { Unreachable, ask, askFile } from "../shared/api.js";
import { usable } from "./sampling.js";
import { abandon, isLost, sessionAfter } from "./sessions.js";
import { add, lastSaid, newConversation } from "./tree.js";

const MEDIA_TYPE = "application/vnd.tokenmill.session";
const LENGTHS_AT = 22; // after the magic and the version: bytes of the header, number of ids, bytes of KV
const HEADER_AT = 46;
const LARGE_BYTES = 8 << 20; // a server that has read enough of a file may hang up before it is heard

/** The session that ends the branch shown, as a file; one that the server does not have is made from the history first. */
export async function saved(conversation, model) {
  if (lastSaid(conversation, conversation.leaf) === null) throw new Error("nothing has been said in this conversation yet");
  for (;;) {
    const { id } = await sessionAfter(conversation, conversation.leaf, model);
    try {
      // Without KV: a server takes none from outside, and with it most files would be larger than a server takes.
      return await askFile(`/v1/sessions/${id}/save`, { method: "POST", body: {} });
    } catch (error) {
      if (!isLost(error)) throw error;
      abandon(conversation, id);
    }
  }
}

/**
 * A conversation that goes on in the session of a file, with the first of these models that the file is of. Answers are
 * drawn as the last one was; how long they may be is not the session's to say.
 */
export async function restored(file, models, maxTokens) {
  const session = await restore(file.slice(0, file.size, MEDIA_TYPE), models);
  try {
    return conversationOf(await headerOf(file), session, maxTokens);
  } catch (error) {
    ask(`/v1/sessions/${session.id}`, { method: "DELETE" }).catch(() => {});
    throw error;
  }
}

async function restore(body, models) {
  let refusal = null;
  for (const model of models) {
    try {
      return await ask(`/v1/sessions/restore?model=${encodeURIComponent(model)}`, { method: "POST", body });
    } catch (error) {
      if (error instanceof Unreachable && body.size > LARGE_BYTES) throw new Error("the connection was lost: this file may be larger than the server takes");
      if (error.code !== "bad_session_file") throw error;
      refusal ??= error;
    }
  }
  throw refusal;
}

/** Of a file that the server has checked. */
async function headerOf(file) {
  const lengths = new DataView(await file.slice(LENGTHS_AT, HEADER_AT).arrayBuffer());
  const numBytes = Number(lengths.getBigUint64(0, true));
  return JSON.parse(await file.slice(HEADER_AT, HEADER_AT + numBytes).text());
}

function conversationOf({ session, turns }, { id, model }, maxTokens) {
  if (turns.some(({ messages }) => !messages.length)) throw new Error("this session has input that is no message, which can't be shown here");
  const parts = [...turns, { messages: session.inbox }]; // what waits for an answer comes last
  const [first] = parts.flatMap(({ messages }) => messages);
  const isTold = first?.role === "system";
  const answer = turns.findLast(({ kind }) => kind === "answer");
  const sampling = usable({ max_tokens: maxTokens, ...answer?.changes });
  const tools = session.template_options.tools ?? null;
  const made = newConversation({ model, system: isTold ? first.content : session.system ?? "", sampling, tools });
  const taken = parts.map(({ messages, finish_reason: finish = null }) => {
    const ids = messages.filter((message) => !isTold || message !== first).map((message) => take(made, message, finish));
    return [...new Set(ids)];
  });
  if (made.leaf === null) throw new Error("nothing has been said in this session yet");
  made.sessions[id] = { turns: taken.slice(0, -1), pending: taken.at(-1) };
  const ends = taken.filter((ids) => ids.length).map((ids) => ids.at(-1));
  // Where turns are not ours message by message, or will not stay so, the history is told to a session of our own.
  if (session.overflow !== "error" || new Set(ends).size < ends.length) abandon(made, id);
  if (made.messages[made.leaf].role !== "assistant") addUnanswered(made);
  return made;
}

/** The name of a message of the session's here: messages of one role after another are one. */
function take(made, { role, content, tool_calls: calls, tool_call_id: callId, reasoning_content: reasoning }, finish) {
  const last = made.messages[made.leaf] ?? null;
  if (role === "tool") return takeResult(made, last, callId, content);
  if (!["user", "assistant"].includes(role) || (typeof content !== "string" && !calls)) throw new Error(unknownRole(role));
  if (last === null && role === "assistant") throw new Error("this session begins with an answer, which can't be shown here");
  if (last?.role === role) {
    if (calls || last.calls) throw new Error("this session has one answer after another, which can't be shown here");
    last.content += `\n\n${content}`;
    return last.id;
  }
  const message = add(made, made.leaf, role, content ?? "");
  if (role === "assistant") Object.assign(message, { status: "done", finish, stats: null });
  if (reasoning) message.reasoning = reasoning;
  if (calls) message.calls = calls.map(({ id, function: called }) => ({ id, name: called.name, arguments: called.arguments }));
  return message.id;
}

/** What a tool has returned: those of one answer are one message here. */
function takeResult(made, last, callId, content) {
  const answer = last?.role === "tool" ? made.messages[last.parent] : last;
  const call = answer?.calls?.find(({ id }) => id === callId);
  if (!call) throw new Error(unknownRole("tool"));
  const message = last === answer ? Object.assign(add(made, made.leaf, "tool"), { results: [] }) : last;
  message.results.push({ id: callId, name: call.name, content });
  return message.id;
}

const unknownRole = (role) => `this session has messages of other roles (${role}), which can't be shown here`;

/** A question at the end waits for its answer as one whose answer failed: it can be tried. */
function addUnanswered(made) {
  const error = { text: "This question has no answer yet.", retryAfter: null };
  Object.assign(add(made, made.leaf, "assistant"), { status: "failed", finish: null, stats: null, error });
}
