// Small pictures for buttons, and the tooltips that say what they do.
import { html, useEffect, useLayoutEffect, useRef, useState } from "../../shared/view.js";

const PATHS = {
  plus: "M12 5v14M5 12h14",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14M20 20l-4-4",
  menu: "M4 7h16M4 12h16M4 17h16",
  send: "M5 12h13M12 5l7 7-7 7",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20h4L19 9l-4-4L4 16zM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2.3 5.7M20 4v7h-7",
  forward: "M5 5l7 7-7 7M13 5l7 7-7 7",
  fork: "M6 4v16M6 13c8 0 12-3 12-9M15 7l3-3 3 3",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M13 4v6M7 14v6",
  pulse: "M3 12h4l3-7 4 14 3-7h4",
  down: "M12 5v14M6 13l6 6 6-6",
  code: "M9 7l-5 5 5 5M15 7l5 5-5 5",
  theme: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  more: "M5 12h.01M12 12h.01M19 12h.01",
};

const REST_MS = 400;
const GAP_PX = 6;

/** A button that is only a picture. */
export const IconButton = ({ icon, label, keys, kind = "quiet", ...rest }) => html`
  <button class=${kind} aria-label=${label} data-tip=${keys ? `${label} (${keys})` : label} ...${rest}><${Icon} name=${icon} /></button>`;

/** The tooltip of whatever has one (data-tip): when the pointer rests on it, or the keyboard gets there. One for the page. */
export function Tooltip() {
  const [target, setTarget] = useState(null);
  const [text, setText] = useState("");
  const element = useRef(null);
  useEffect(() => {
    let timer = 0;
    const show = (next, delay) => {
      clearTimeout(timer);
      timer = setTimeout(() => setTarget(next), delay);
    };
    const hide = () => show(null, 0);
    const tipped = (place) => place.closest?.("[data-tip]") ?? null;
    const handlers = {
      pointerover: (event) => { if (event.pointerType !== "touch") show(tipped(event.target), tipped(event.target) ? REST_MS : 0); },
      focusin: (event) => { if (event.target.matches(":focus-visible")) show(tipped(event.target), 0); },
      focusout: (event) => setTarget((shown) => (shown === tipped(event.target) ? null : shown)),
      keydown: (event) => { if (event.key === "Escape") hide(); },
      scroll: hide,
      click: () => requestAnimationFrame(() => setTarget((shown) => (shown?.isConnected ? shown : null))), // it may be gone now
    };
    for (const [name, handler] of Object.entries(handlers)) document.addEventListener(name, handler, true);
    return () => {
      clearTimeout(timer);
      for (const [name, handler] of Object.entries(handlers)) document.removeEventListener(name, handler, true);
    };
  }, []);
  useEffect(() => {
    if (target === null) return undefined;
    const read = () => setText(target.dataset.tip ?? "");
    read();
    const observer = new MutationObserver(read); // what a button does may change while it is looked at
    observer.observe(target, { attributeFilter: ["data-tip"] });
    return () => {
      observer.disconnect();
      setText(""); // the next one has its own, or none yet
    };
  }, [target]);
  useLayoutEffect(() => {
    if (target === null || !element.current) return;
    const { left, width, top, bottom } = target.getBoundingClientRect();
    const { offsetWidth, offsetHeight, style } = element.current;
    const isBelow = bottom + GAP_PX + offsetHeight < innerHeight;
    style.left = `${Math.max(GAP_PX, Math.min(left + width / 2 - offsetWidth / 2, innerWidth - offsetWidth - GAP_PX))}px`;
    style.top = `${isBelow ? bottom + GAP_PX : top - GAP_PX - offsetHeight}px`;
  }, [target, text]);
  return target && text && html`<div class="tooltip" role="tooltip" ref=${element}>${text}</div>`;
}

export const Icon = ({ name }) => html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${PATHS[name]} /></svg>`;
