// An answer's thoughts: what stands between <think> and </think>.
//
// A block of them begins a line. The first one may lack its <think>: some chat templates write it at the end of the prompt, and
// the model only goes on. Tags within code are text.
const TAG = /^[ \t]*(<think>)|(<\/think>)|^[ \t]*(`{3,}|~{3,})|`[^`\n]*`/gm;

/** An answer without its thoughts. */
export const withoutThoughts = (text) => partsOf(text, false).filter(({ isThought }) => !isThought).map(({ content }) => content).join("");

/** The parts of an answer in order: `{ isThought, content }`. While it is on its way, a tag that is not complete is left out. */
export function partsOf(text, isLive) {
  const shown = isLive ? text.replace(/(^|\n)[ \t]*<(?:t(?:h(?:i(?:nk?)?)?)?)?$/, "$1") : text;
  const parts = [];
  let begin = 0;
  let isThought = false;
  let fence = null;
  const end = (at, next) => {
    if (isThought || shown.slice(begin, at).trim() !== "") parts.push({ isThought, content: shown.slice(begin, at) });
    begin = next;
  };
  for (const { 0: found, 1: open, 2: close, 3: marks, index } of shown.matchAll(TAG)) {
    const after = index + found.length;
    if (marks) fence = fence === null ? marks : marks.startsWith(fence) ? null : fence;
    else if (fence !== null && !isThought) continue;
    else if (open && !isThought) {
      end(index, after);
      isThought = true;
    } else if (close && (isThought || !parts.length)) {
      isThought = true;
      end(index, after);
      isThought = false;
      fence = null; // code that was not closed ends with the thoughts that it is in
    }
  }
  end(shown.length, shown.length);
  return parts;
}
