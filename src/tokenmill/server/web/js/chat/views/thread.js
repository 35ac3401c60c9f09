// The branch that is shown. It follows its end, unless the reader has gone up.
import { html, useEffect, useRef, useState } from "../../shared/view.js";
import { pathTo } from "../tree.js";
import { IconButton } from "./icons.js";
import { Message } from "./message.js";

const NEAR_PX = 60;

export function Thread({ chat, conversation }) {
  const scroller = useRef(null);
  const [isAtEnd, setAtEnd] = useState(true);
  const follows = useRef(true); // at once, where state would come a frame too late
  const lastTop = useRef(0);
  const answering = chat.answering(conversation);
  const path = conversation.leaf === null ? [] : pathTo(conversation, conversation.leaf);

  const toEnd = () => {
    follows.current = true;
    scroller.current.scrollTop = scroller.current.scrollHeight;
  };
  const onScroll = ({ target }) => {
    const isUp = target.scrollTop < lastTop.current;
    const isNear = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR_PX;
    if (!isNear) follows.current = false;
    else if (!isUp) follows.current = true; // up and near: the answer was drawn anew, or the reader is about to leave
    lastTop.current = target.scrollTop;
    setAtEnd(isNear);
  };
  const leave = () => { follows.current = false; };
  const onWheel = ({ deltaY }) => { if (deltaY < 0) leave(); };
  const onKeyDown = ({ key }) => { if (["ArrowUp", "PageUp", "Home"].includes(key)) leave(); };

  useEffect(toEnd, [conversation.id]);
  useEffect(() => {
    if (!answering) return undefined;
    toEnd();
    return answering.subscribe(() => requestAnimationFrame(() => { if (scroller.current && follows.current) toEnd(); }));
  }, [answering]);

  return html`
    <div class="thread" ref=${scroller} onScroll=${onScroll} onWheel=${onWheel} onTouchMove=${leave} onKeyDown=${onKeyDown} tabindex="0" role="region" aria-label="Conversation">
      ${!path.length && html`<${Welcome} chat=${chat} conversation=${conversation} />`}
      <div class="messages">
        ${path.map((message) => html`
          <${Message} key=${message.id} chat=${chat} conversation=${conversation} message=${message}
            answering=${answering?.message === message ? answering : null} />`)}
      </div>
      ${!isAtEnd && html`<${IconButton} icon="down" label="Go to the end" kind="to-end" onClick=${toEnd} />`}
    </div>`;
}

const IDEAS = [
  "Explain why the sky is blue in three sentences.",
  "Write a Python function that reverses a linked list.",
  "Make a table of four planets: name, moons, length of a day.",
];

function Welcome({ chat, conversation }) {
  const model = chat.modelOf(conversation);
  return html`
    <div class="welcome">
      <h1>What shall we talk about?</h1>
      <p>${model ? html`You talk to <strong>${model.id}</strong> on this server. It remembers each conversation, so an answer starts right away.` : "Looking for the server…"}</p>
      <ul>${IDEAS.map((idea) => html`<li><button onClick=${() => chat.send(conversation, idea)} disabled=${chat.server !== "ready"}>${idea}</button></li>`)}</ul>
    </div>`;
}
