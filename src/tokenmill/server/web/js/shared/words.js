// Numbers and errors as people say them.
import { ServerError, Unreachable } from "./api.js";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => WHOLE.format(value);
export const rate = (value) => (value < 10 ? value.toFixed(1) : WHOLE.format(value));

export function duration(seconds) {
  if (seconds < 0.001) return "0 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  return `${minutes} min ${Math.round(seconds - 60 * minutes)} s`;
}

/** Words as a sentence. */
const sentence = (words) => `${words.charAt(0).toUpperCase()}${words.slice(1)}.`;

/** Why something of the user's is refused, by the server or by the page itself. */
export const reason = (error) => (error instanceof ServerError || error instanceof Unreachable ? explain(error) : sentence(error.message));

/** What went wrong, in plain words, and what can be done. */
export function explain(error) {
  if (error instanceof Unreachable) {
    return "The server can't be reached. It may have been stopped, or be starting again.";
  }
  if (!(error instanceof ServerError)) return `Something went wrong: ${error?.message ?? error}`;
  if (error.status === 401) return "The server wants an API key.";
  if (error.status === 403) return `The key may not do this: ${error.message}.`;
  if (error.status === 413) return `This is larger than the server takes: ${error.message}.`;
  if (error.status === 429) return "The server is busy with others right now.";
  if (error.code === "context_length_exceeded") {
    return "This conversation has outgrown the model's context. Start a new one, or edit an earlier question.";
  }
  if (error.code === "answer_lost") return "The server was restarted before this answer was complete.";
  if (error.code === "shutdown") return "The server was stopped before this answer was complete.";
  if (error.code === "loading") return "The model is still being loaded.";
  if (error.status === 503) return `The server can't take this right now: ${error.message}.`;
  if (error.status === 504 || error.code === "timeout") return "The answer took longer than the server allows.";
  if (error.status === 507) return `The model does not fit: ${error.message}.`;
  return `The server says: ${error.message}.`;
}
