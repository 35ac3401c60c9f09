// A picture that is drawn at a pace: sized to its place, sharp, and told in words now and then.
import { html, useEffect, useRef } from "../shared/view.js";

const TOLD_MS = 4000; // between two descriptions: they are for those who ask

/** `draw(context, width, height)` in CSS pixels; `tell()` says the same in a sentence. */
export function Canvas({ pace, height, draw, tell, ...attributes }) {
  const canvas = useRef(null);
  const latest = useRef(null);
  latest.current = { draw, tell };

  useEffect(() => {
    const element = canvas.current;
    const context = element.getContext("2d");
    let width = 0;

    function show() {
      if (width === 0 || document.hidden) return;
      const scale = window.devicePixelRatio;
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.clearRect(0, 0, width, height);
      latest.current.draw(context, width, height);
    }

    function describe() {
      if (!document.hidden) element.setAttribute("aria-label", latest.current.tell());
    }

    const sizes = new ResizeObserver(([entry]) => {
      width = Math.floor(entry.contentRect.width);
      element.width = Math.round(width * window.devicePixelRatio);
      element.height = Math.round(height * window.devicePixelRatio);
      show();
    });
    sizes.observe(element);
    window.addEventListener("themechange", show);
    const leave = pace.subscribe(show);
    const timer = setInterval(describe, TOLD_MS);
    return () => {
      leave();
      clearInterval(timer);
      sizes.disconnect();
      window.removeEventListener("themechange", show);
    };
  }, [pace, height]);

  return html`<canvas ref=${canvas} role="img" style=${{ height: `${height}px` }} ...${attributes}></canvas>`;
}
