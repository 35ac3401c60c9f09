// Markdown to HTML that can do no harm: what a model says is text, never HTML.
//
// HTML in the text is shown as it is written; links go to the web in a tab of their own; pictures become links, so that
// nothing is fetched from anywhere. What comes out is sanitised nevertheless, and without that the browser would not
// take it (trusted types).
import { Emitter } from "../shared/emitter.js";
import DOMPurify from "../../vendor/purify.js";
import { Marked } from "../../vendor/marked.js";

const CACHED_BLOCKS = 500;
const LONGEST_COLOURED = 50_000;
const SAFE_LINK = /^(https?:|mailto:)/i;
const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "button", "code", "del", "div", "em", "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6",
    "hr", "input", "li", "ol", "p", "pre", "section", "span", "strong", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: [
    "align", "checked", "class", "data-copy", "data-display", "data-note", "data-place", "disabled", "href", "rel", "role", "start",
    "tabindex", "target", "type", "aria-label",
  ],
  ALLOWED_URI_REGEXP: SAFE_LINK, // holds for all attributes but those that hold no address
  ADD_URI_SAFE_ATTR: ["align", "aria-label", "checked", "disabled", "rel", "start", "tabindex", "target", "type"],
  RETURN_TRUSTED_TYPE: true,
};

/** Changes when code can be coloured that could not before. */
export const colours = new (class extends Emitter { version = 0; })();
let highlighter = null;
let loading = null;
let isOpen = false; // the block that is made may still grow

const escape = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);

const renderer = {
  html({ text }) {
    return /^<br\s*\/?>$/i.test(text.trim()) ? "<br>" : escape(text);
  },
  link({ href, tokens }) {
    const inner = this.parser.parseInline(tokens);
    return SAFE_LINK.test(href) ? `<a href="${escape(href)}" target="_blank" rel="noopener noreferrer nofollow">${inner}</a>` : inner;
  },
  image({ href, text }) {
    const name = escape(text || href);
    return SAFE_LINK.test(href) ? `<a href="${escape(href)}" target="_blank" rel="noopener noreferrer nofollow">${name}</a>` : name;
  },
  code({ text, lang }) {
    const language = (lang ?? "").trim().split(/\s+/)[0].toLowerCase();
    const head = `<figcaption><span>${escape(language || "text")}</span><button type="button" class="quiet" data-copy="code">Copy</button></figcaption>`;
    return `<figure class="code">${head}<pre tabindex="0" role="group" aria-label="Code"><code>${coloured(text, language)}</code></pre></figure>`;
  },
  table(token) {
    const row = (cells, tag) => `<tr>${cells.map((cell) => {
      const align = cell.align ? ` align="${cell.align}"` : "";
      return `<${tag}${align}>${this.parser.parseInline(cell.tokens)}</${tag}>`;
    }).join("")}</tr>`;
    const body = token.rows.map((cells) => row(cells, "td")).join("");
    return `<div class="table" tabindex="0" role="group" aria-label="Table"><table><thead>${row(token.header, "th")}</thead><tbody>${body}</tbody></table></div>`;
  },
  checkbox({ checked }) {
    return `<input type="checkbox" disabled aria-label="${checked ? "done" : "to do"}"${checked ? " checked" : ""}> `;
  },
};

function coloured(text, language) {
  if (!language || isOpen || text.length > LONGEST_COLOURED) return escape(text);
  if (highlighter === null) {
    loading ??= import("../../vendor/highlight.js").then((module) => {
      highlighter = module.default;
      colours.version += 1;
      colours.changed();
    }, () => { loading = null; });
    return escape(text);
  }
  return highlighter.getLanguage(language) ? highlighter.highlight(text, { language, ignoreIllegals: true }).value : escape(text);
}

// Where formulas and footnotes may begin: all of them in one, since a text is searched for each that is given. A block begins a
// line; the paragraph before it is cut there, and nowhere else.
const BLOCKS = /(?<=\n)(?:\$\$|\\\[|\[\^[^\]\s]+\]:)/;
const IN_LINES = /\$|\\[([]|\[\^/;
const beginning = (pattern) => (text) => pattern.exec(text)?.index;

// Formulas: $$ ... $$ and \[ ... \] are set by themselves, wherever they stand; $ ... $ and \( ... \) within the line.
const formula = (name, level, pattern, display) => ({
  name, level,
  tokenizer(text) {
    const found = pattern.exec(text);
    return found ? { type: name, raw: found[0], text: found[1].trim() } : undefined;
  },
  renderer: ({ text }) => `<span class="math" data-display="${display}">${escape(text)}</span>`,
});

// Footnotes: [^name] refers to a note, [^name]: ... is one. Notes are known when the lines are read, which is after all blocks
// are; they are numbered as they are referred to, and stand at the end. Addresses (#...) are the conversations', so these are
// buttons: Prose moves between them.
const NOTE = new RegExp([
  /^\[\^([^\]\s]+)\]:[ \t]*/, // its name,
  /([^\n]*(?:\n(?!\[\^|[#>|~`*+-]|\d+[.)])[ \t]*\S[^\n]*|\n+(?: {4}|\t)[^\n]*)*)/, // the lines that go on with it, and indented ones
  /(?:\n+|$)/,
].map(({ source }) => source).join(""));

const footnote = {
  name: "footnote", level: "block",
  start: beginning(BLOCKS),
  tokenizer(text) {
    const found = NOTE.exec(text);
    if (!found) return undefined;
    const [raw, name, content] = found;
    const token = { type: "footnote", raw, tokens: [] };
    const notes = (this.lexer.tokens.notes ??= Object.assign(new Map(), { numReferred: 0 }));
    if (!notes.has(name)) notes.set(name, { number: null, tokens: token.tokens });
    this.lexer.blockTokens(content.replace(/^(?: {4}|\t)/gm, ""), token.tokens);
    return token;
  },
  renderer: () => "",
};

const reference = {
  name: "reference", level: "inline",
  start: beginning(IN_LINES),
  tokenizer(text) {
    const found = /^\[\^([^\]\s]+)\]/.exec(text);
    const notes = this.lexer.tokens.notes;
    const note = found && notes?.get(found[1]);
    if (!note) return undefined;
    note.number ??= (notes.numReferred += 1);
    return { type: "reference", raw: found[0], number: note.number };
  },
  renderer: ({ number }) => `<sup><button type="button" class="quiet" data-note="${number}" aria-label="Footnote ${number}">${number}</button></sup>`,
};

/** All notes of a text as one block; those that nothing refers to come last. */
function notesOf(notes) {
  const numbered = [...notes.values()].sort((one, other) => (one.number ?? Infinity) - (other.number ?? Infinity));
  const items = numbered.map(({ number, tokens }) => {
    const back = number === null ? "" : `<button type="button" class="quiet" data-place="${number}" aria-label="Back to the text">↩</button>`;
    return `<li${number === null ? "" : ` data-note="${number}" tabindex="-1"`}>${marked.parser(tokens)}${back}</li>`;
  });
  return `<section class="footnotes" role="group" aria-label="Footnotes"><ol>${items.join("")}</ol></section>`;
}

const marked = new Marked({
  gfm: true,
  renderer,
  extensions: [
    footnote,
    reference,
    formula("dollars", "block", /^\$\$((?:\\[^]|[^$\\])+)\$\$[ \t]*(?:\n|$)/, true),
    formula("brackets", "block", /^\\\[([^]+?)\\\][ \t]*(?:\n|$)/, true),
    formula("inline dollars", "inline", /^\$\$((?:\\[^]|[^$`\\])+)\$\$/, true),
    formula("inline brackets", "inline", /^\\\[([^`]+?)\\\]/, true),
    formula("dollar", "inline", /^\$(?![\s$])((?:\\.|[^$\n\\])+?)(?<!\s)\$(?!\d)/, false),
    formula("parentheses", "inline", /^\\\(([^\n]+?)\\\)/, false),
  ],
});

const cache = new Map(); // sanitised, by what it was made of

/** The blocks of a text, each as HTML. A block that has not changed is the very same object as before. */
export function blocks(text, isLive = false) {
  const all = marked.lexer(text);
  const tokens = all.filter(({ type }) => type !== "space" && type !== "footnote");
  const made = tokens.map((token, i) => {
    isOpen = isLive && i === tokens.length - 1;
    return harmless(marked.parser([token]));
  });
  if (all.notes === undefined) return made;
  isOpen = isLive;
  return [...made, harmless(notesOf(all.notes))];
}

function harmless(content) {
  if (isOpen) return DOMPurify.sanitize(content, ALLOWED);
  let known = cache.get(content);
  if (known === undefined) {
    known = DOMPurify.sanitize(content, ALLOWED);
    if (cache.size >= CACHED_BLOCKS) cache.delete(cache.keys().next().value);
    cache.set(content, known);
  }
  return known;
}

let formulas = null;

/** Set the formulas below an element, which are text until then. MathML: it needs no fonts and no styles. */
export async function setFormulas(element) {
  const found = [...element.querySelectorAll(".math:not([data-set])")];
  if (!found.length) return;
  formulas ??= import("../../vendor/katex.js").then(() => globalThis.katex);
  let katex;
  try {
    katex = await formulas;
  } catch {
    formulas = null; // they stay text, and the next ones are tried again
    return;
  }
  for (const one of found) {
    const source = one.textContent;
    one.dataset.set = "";
    try {
      katex.render(source, one, { output: "mathml", displayMode: one.dataset.display === "true", trust: false, maxExpand: 100, maxSize: 20 });
    } catch {
      one.textContent = source; // no formula after all
    }
  }
}
