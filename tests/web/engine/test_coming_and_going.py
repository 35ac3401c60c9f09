"""The engine page's connection: it costs nothing unseen, comes back with the server, and asks for a key."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server import serving
from tests.server.serving import KEY, WAIT_S, Running, running
from tests.server.telling import CHAT, OTHER_KEY, make_config, make_llm
from tests.server.wire import chat_body
from tests.web.browsing import Visit, visiting
from tests.web.engine.watching import (
    assert_timeline_is_the_servers,
    expect_status,
    opened,
    origin_of,
    run_many,
    shown_on,
    state_in,
    state_of,
    wait_for,
    wait_until_shown,
)
from tokenmill.server.config import ServerConfig

HIDE = """isHidden => {
    Object.defineProperty(document, "hidden", { get: () => isHidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def num_readers(server: Running) -> int:
    return len(server.served.telemetry.watches["fake"][0]._readers)


@pytest.mark.req("B6")
def test_a_page_that_is_paused_stays_as_it_is_and_asks_for_nothing(page: Page, server: Running) -> None:
    wait_until_shown(page, server)
    before = shown_on(page)
    page.get_by_role("button", name="Pause").click()
    expect_status(page, "paused")
    wait_for(page, lambda: num_readers(server) == 0, "the server still tells it everything")
    run_many(server, 2)
    page.wait_for_timeout(600)
    assert shown_on(page) == before
    page.get_by_role("button", name="Go on").click()
    wait_until_shown(page, server)
    assert state_in(page) == state_of(server)


@pytest.mark.req("B6")
def test_a_hidden_page_draws_nothing_and_lets_its_connection_go(visit: Visit, server: Running) -> None:
    visit.page.clock.install()
    page = opened(visit.page, visit.watched.origin)
    run_many(server, 2)
    wait_until_shown(page, server)
    page.clock.pause_at(page.evaluate("() => Date.now()") + 60_000)
    page.evaluate(HIDE, True)
    before = page.evaluate("() => window.pictures")
    assert before > 0
    shown = shown_on(page)
    run_many(server, 2, max_tokens=30)
    wait_for(page, lambda: state_in(page) == state_of(server), "it is not told of what it does not draw")
    page.clock.run_for(5000)
    assert page.evaluate("() => window.pictures") == before
    assert shown_on(page) == shown
    assert num_readers(server) == 1, "for a moment it stays connected"
    asked = len(visit.watched.requests)
    page.clock.fast_forward("00:20")
    wait_for(page, lambda: num_readers(server) == 0, "it is still connected")
    assert len(visit.watched.requests) == asked
    page.evaluate(HIDE, False)
    page.clock.resume()
    wait_until_shown(page, server)
    assert page.evaluate("() => window.pictures") > before


@pytest.mark.req("B6")
def test_it_draws_no_more_than_a_few_times_a_second(page: Page, server: Running) -> None:
    load = threading.Thread(target=run_many, args=(server, 3), kwargs={"max_tokens": 3000})
    load.start()
    page.wait_for_timeout(500)
    count = "() => [window.pictures, performance.now() / 1000]"
    before, began_s = page.evaluate(count)
    page.wait_for_timeout(2000)
    after, ended_s = page.evaluate(count)
    load.join(WAIT_S)
    most = (ended_s - began_s + 1) * (3 + 5)
    assert 0 < after - before <= most, "the strip thrice a second, the map and four plots once"


@contextmanager
def running_at(port: int) -> Iterator[Running]:
    """A server where another one was."""
    listener = socket.create_server(("127.0.0.1", port))
    with mock.patch.object(serving.socket, "create_server", return_value=listener):
        starting = running(make_llm(), ServerConfig(keep_alive_s=0.2))
        server = starting.__enter__()
    try:
        yield server
    finally:
        starting.__exit__(None, None, None)


@pytest.mark.req("B6")
def test_it_comes_back_with_the_server(browser: Browser) -> None:
    with ExitStack() as stack:
        with running_at(0) as first:
            visit = stack.enter_context(visiting(browser, origin_of(first)))
            page = opened(visit.page, visit.watched.origin)
            run_many(first, 2)
            wait_until_shown(page, first)
        expect_status(page, "lost")
        banner = page.get_by_role("alert")
        expect(banner).to_contain_text("Not connected.")
        assert page.locator(".core").count() == 1, "the last picture stays"
        with running_at(first.port) as second:
            expect_status(page, "live")
            expect(banner).to_have_count(0)
            run_many(second, 2)
            second.wait_until_idle()
            wait_until_shown(page, second)
            page.close()


@pytest.mark.req("B6")
def test_models_come_and_go(page: Page, server: Running) -> None:
    telemetry = server.served.telemetry
    telemetry.attach("second", server.llm)
    expect(page.locator(".core[data-model=second]")).to_have_count(1)
    telemetry.detach("second")
    expect(page.locator(".core")).to_have_count(1)
    telemetry.detach("fake")
    expect(page.get_by_text("No model is served yet")).to_be_visible()
    telemetry.attach("fake", server.llm)
    wait_until_shown(page, server)


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.req("B6", "R41")
def test_a_server_with_keys_is_asked_with_one(browser: Browser) -> None:
    with running(make_llm(), make_config()) as server, visiting(browser, origin_of(server)) as visit:
        page = visit.page
        page.goto(f"{visit.watched.origin}/engine")
        field = page.get_by_role("textbox", name="API key")
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not one of the server's")
        assert page.locator(".core").count() == 0
        field.fill(KEY)
        page.keyboard.press("Enter")
        expect_status(page, "live")
        mine = server.post(CHAT, chat_body("mine")).json()["id"]
        server.post(CHAT, chat_body("not mine"), key=OTHER_KEY)
        wait_for(page, lambda: state_in(page) == state_of(server, KEY), "the page does not know the state")
        expect(page.locator("tr[data-ended-request]")).to_have_count(2)
        page.locator(f"tr[data-ended-request^='{mine}'] button").click()
        assert_timeline_is_the_servers(page, server, mine, KEY)
        page.locator(f"tr[data-ended-request]:not([data-ended-request^='{mine}']) button").click()
        expect(page.get_by_role("alert")).to_contain_text("another key")
