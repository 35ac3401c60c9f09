"""A browser, and the chat page as a user sees it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Request, expect, sync_playwright

from tests.server.wire import until

WAIT_MS = 60_000
expect.set_options(timeout=WAIT_MS)
LONG = "Write a long story about a lighthouse and its keeper."
"""The default model has much to say to this."""


LEAF = """
    const { load } = await import("/web/js/chat/storage.js");
    const conversation = await load(location.hash.slice(1));
    const leaf = conversation?.messages[conversation.leaf];
"""
LEAF_ID = f"async () => {{ {LEAF} return leaf?.id ?? null; }}"
"""The last message of the branch that is shown, as it is stored."""
HAS_MOVED = f"async (before) => {{ {LEAF} return (leaf?.id ?? null) !== before; }}"
ANSWERED = f"""async () => {{
    {LEAF}
    if (!["done", "failed"].includes(leaf?.status)) return false;
    for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
    return true;
}}"""
"""Has that branch come to its end, and has the page had time to draw it?"""


def chromium() -> str | None:
    """Where a Chromium is."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return os.environ.get("TOKENMILL_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)


@contextmanager
def browsing() -> Iterator[Browser]:
    path = chromium()
    if path is None:
        reason = "there is no Chromium here: install one, or name it with TOKENMILL_CHROMIUM"
        if os.environ.get("TOKENMILL_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Watched:
    """What a page did that it must not do, and what it asked the server."""

    origin: str
    problems: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    expected: tuple[str, ...] = ("Failed to load resource",)
    """Beginnings of errors in the console that the test wants to happen: the browser notes every refusal."""

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", lambda message: self._note(message.type, message.text))
        page.on("request", self._ask)

    def _note(self, kind: str, text: str) -> None:
        if kind == "error" and not text.startswith(self.expected):
            self.problems.append(f"console: {text}")

    def _ask(self, request: Request) -> None:
        self.requests.append(request)
        if not request.url.startswith((self.origin, "data:", "blob:")):
            self.problems.append(f"request to {request.url}")

    def bodies(self, path_end: str) -> list[Any]:
        """What was sent to paths that end so."""
        found = [one for one in self.requests if one.method == "POST" and one.url.endswith(path_end)]
        return [json.loads(one.post_data or "null") for one in found]


@contextmanager
def visiting(browser: Browser, origin: str, **options: Any) -> Iterator[Visit]:
    """A browser of its own, on the page. Nothing may go wrong in it, and nothing may leave the server's origin."""
    context = browser.new_context(**options)
    watched = Watched(origin)
    visit = Visit(context, watched)
    try:
        yield visit
    finally:
        context.close()
    assert watched.problems == []


class Visit:
    """The chat page, by what is on it."""

    def __init__(self, context: BrowserContext, watched: Watched) -> None:
        self.context = context
        self.watched = watched
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        watched.watch(self.page)

    def open(self, path: str = "/", **sampling: Any) -> Visit:
        """With greedy answers of a few tokens, unless told."""
        defaults = json.dumps({"sampling": {"temperature": 0, "max_tokens": 24, **sampling}})
        self.context.add_init_script(
            f"if (!localStorage['tokenmill.defaults']) localStorage['tokenmill.defaults'] = {defaults!r}"
        )
        self.page.goto(self.watched.origin + path)
        return self

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def field(self) -> Locator:
        return self.page.get_by_label("Your message")

    @property
    def messages(self) -> Locator:
        return self.page.locator("article.message")

    @property
    def answers(self) -> Locator:
        return self.page.locator("article.message.assistant")

    @property
    def questions(self) -> Locator:
        return self.page.locator("article.message.user")

    @property
    def conversations(self) -> Locator:
        return self.page.locator(".conversations li")

    def said(self) -> list[str]:
        """The texts of all messages on the branch that is shown, as they are stored."""
        return [content for _, content in self.stored_path()]

    def stored(self) -> list[dict[str, Any]]:
        """All conversations in the browser, the latest one first."""
        script = """async () => {
            const { loadAll } = await import("/web/js/chat/storage.js");
            return (await loadAll()).sort((one, other) => other.updated - one.updated);
        }"""
        return list(self.page.evaluate(script))

    def current(self) -> dict[str, Any]:
        name = self.page.evaluate("() => location.hash.slice(1)")
        return next(one for one in self.stored() if one["id"] == name)

    def stored_path(self) -> list[tuple[str, str]]:
        conversation = self.current()
        path, at = [], conversation["leaf"]
        while at is not None:
            message = conversation["messages"][at]
            path.append((message["role"], message["content"]))
            at = message["parent"]
        return path[::-1]

    def leaf(self) -> dict[str, Any]:
        """The last message that is shown."""
        conversation = self.current()
        return dict(conversation["messages"][conversation["leaf"]])

    def last_stats(self) -> dict[str, Any]:
        """Those of the answer that is shown last: they are stored shortly after it has ended."""
        until(lambda: self.leaf()["stats"] is not None)
        return dict(self.leaf()["stats"])

    # -- what is done -------------------------------------------------------------------------------------------------

    def send(self, text: str) -> None:
        self.field.fill(text)
        self.page.keyboard.press("Enter")

    def start_new(self) -> None:
        self.page.keyboard.press("Control+Shift+O")
        expect(self.messages).to_have_count(0)

    def ask(self, text: str) -> str:
        """Send a question and wait for its answer."""
        with self.answered():
            self.send(text)
        return self.said()[-1]

    @contextmanager
    def answered(self) -> Iterator[None]:
        """What is done in here asks for an answer of its own: wait for that one, not for the one before."""
        before = self.page.evaluate(LEAF_ID)
        yield
        self.page.wait_for_function(HAS_MOVED, arg=before)
        self.wait_for_answer()

    def wait_for_answer(self) -> None:
        """The answer that is asked for is complete, and drawn."""
        self.page.wait_for_function(ANSWERED)
        expect(self.answers.last).to_have_attribute("aria-busy", "false")
        expect(self.page.get_by_label("Send", exact=True)).to_be_visible()

    def wait_for_words(self, num_chars: int = 1) -> None:
        """The answer on its way has begun."""
        script = "least => document.querySelector('article[aria-busy=true] .prose')?.textContent.trim().length >= least"
        self.page.wait_for_function(script, arg=num_chars)

    def act(self, message: Locator, label: str) -> None:
        message.get_by_role("button", name=label, exact=True).click()
