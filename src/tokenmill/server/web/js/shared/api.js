// Requests to the server that this page came from: keys, errors in plain words, streams of events.

const KEY = "tokenmill.key";

/** The server has answered, but not with what was wanted. */
export class ServerError extends Error {
  constructor(status, body, retryAfter) {
    super(body?.message ?? `the server answered ${status}`);
    this.status = status;
    this.code = body?.code ?? null;
    this.retryAfter = retryAfter;
  }
}

/** Nobody answers, or the connection broke. */
export class Unreachable extends Error {}

/** The API key, if there is one: for this tab only, or for this browser. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY),
  set(value, isKept) {
    key.forget();
    (isKept ? localStorage : sessionStorage).setItem(KEY, value);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

/** Send a request; its response, if the server has taken it. A body that is a file is sent as it is, and else as JSON. */
async function send(path, { method = "GET", body, signal, headers = {} } = {}) {
  const all = { ...headers };
  const isFile = body instanceof Blob; // says its type by itself
  if (body !== undefined && !isFile) all["Content-Type"] = "application/json";
  if (key.get()) all.Authorization ??= `Bearer ${key.get()}`;
  let response;
  try {
    const content = body === undefined || isFile ? body : JSON.stringify(body);
    response = await fetch(path, { method, body: content, signal, headers: all, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("the server can't be reached");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let error = null;
  try {
    ({ error } = await response.json());
  } catch {
    // whoever answered was not our server
  }
  const seconds = Number(response.headers.get("Retry-After"));
  return new ServerError(response.status, error, Number.isFinite(seconds) && seconds > 0 ? seconds : null);
}

/** What the server answers, as JSON; null if it has nothing to say. */
export async function ask(path, options) {
  const response = await send(path, options);
  return response.status === 204 ? null : response.json();
}

/** What the server answers, as a file. */
export async function askFile(path, options) {
  const response = await send(path, options);
  try {
    return await response.blob();
  } catch {
    throw new Unreachable("the connection was lost");
  }
}

/** The events of a stream: `{ event, id, data }`, with data as it was sent. Comments are skipped. */
export async function* events(path, options) {
  const response = await send(path, { headers: { Accept: "text/event-stream" }, ...options });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const pieces = (rest + value).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const found = parseEvent(piece);
        if (found.data !== null) yield found;
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("the connection was lost");
  } finally {
    reader.cancel().catch(() => {});
  }
}

function parseEvent(piece) {
  const found = { event: "message", id: null, data: null };
  for (const line of piece.split("\n")) {
    const [, field, value] = /^([a-z]*):? ?(.*)$/s.exec(line) ?? [];
    if (field === "data") found.data = found.data === null ? value : `${found.data}\n${value}`;
    else if (field === "event" || field === "id") found[field] = value;
  }
  return found;
}
