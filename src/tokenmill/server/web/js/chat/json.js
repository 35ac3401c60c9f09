// JSON that a model writes, indented to be read. Only whitespace changes: numbers and escapes stay as they were written.
const TOKENS = /"(?:[^"\\]|\\.)*"?|[{}[\],:]|[^\s{}[\],:"]+/gs;
const BEGINNING = /^(\{\s*"|\[\s*["{[])/;
const DEEPEST = 40; // levels of indentation: a model may open brackets for ever

export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** JSON, complete or cut off anywhere, with a line for each member and item. */
export function indented(text) {
  const tokens = text.match(TOKENS) ?? [];
  let depth = 0;
  const line = () => `\n${"  ".repeat(Math.min(depth, DEEPEST))}`;
  return tokens.map((token, i) => {
    if (token === "{" || token === "[") {
      depth += 1;
      return "]}".includes(tokens[i + 1] ?? " ") ? token : token + line();
    }
    if (token === "}" || token === "]") {
      depth = Math.max(0, depth - 1); // what comes from a file may be anything
      return "[{".includes(tokens[i - 1] ?? " ") ? token : line() + token;
    }
    return token === "," ? token + line() : token === ":" ? ": " : token;
  }).join("");
}

/** The object or array that a text is (or, as long as it grows, begins with); null if it is neither. */
export function jsonIn(text, isLive = false) {
  const found = text.trim();
  if (!/^[{[]/.test(found)) return null;
  if (isLive) return BEGINNING.test(found) ? indented(found) : null;
  try {
    JSON.parse(found);
  } catch {
    return null;
  }
  return indented(found);
}
