"""The engine page for everybody: names, words, contrast, a phone, and the theme."""

from __future__ import annotations

import re
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.server.conversing import converse
from tests.server.serving import Running
from tests.server.wire import Wire, chat_request, held
from tests.web.browsing import visiting
from tests.web.engine.watching import core_of, opened, origin_of, run_many, wait_until_shown


@pytest.mark.req("B6")
def test_everything_has_a_name_and_pictures_have_words(page: Page, server: Running) -> None:
    run_many(server, 1)
    expect(page.locator("tr[data-ended-request]")).to_have_count(1)
    unnamed = page.evaluate("""() => [...document.querySelectorAll("button, a, canvas")].filter(
        (one) => !(one.textContent.trim() || one.getAttribute("aria-label"))).map((one) => one.outerHTML)""")
    assert unnamed == []
    words = re.compile(r"The last \d+ steps: \d+ decode tokens and \d+ prefill tokens of 1 requests")
    expect(page.locator(".strip canvas")).to_have_attribute("aria-label", words)
    said = re.compile(rf"KV memory: {core_of(server)['cells']['used']:,} of .* cells are used")
    expect(page.locator(".kv canvas")).to_have_attribute("aria-label", said)
    for table in page.locator("table").all():
        assert table.locator("thead th:not([scope=col])").count() == 0
    assert page.get_by_role("heading", level=1).inner_text() == "Engine"


@pytest.mark.req("B6")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Browser, server: Running, scheme: Any) -> None:
    with visiting(browser, origin_of(server), color_scheme=scheme, bypass_csp=True) as visit:  # to let axe in
        page = opened(visit.page, visit.watched.origin)
        talk = converse(server, key=None)
        with held(server, after=4) as hold:
            clients = [Wire(server.port) for _ in range(5)]
            for number, client in enumerate(clients):
                client.send(chat_request(f"client {number}", max_tokens=20))
            hold.wait()
            page.locator("tr[data-slot] button").first.click()
            expect(page.locator(".timeline [data-fact=prompt_tokens]")).to_be_visible()
            expect(page.locator("tr[data-session]")).to_be_visible()
            found = Axe().run(page).response["violations"]
            hold.release()
            assert all(client.read_reply() for client in clients)
            for client in clients:
                client.socket.close()
        assert talk.delete().status == 204
    assert [(one["id"], one["nodes"]) for one in found if one["impact"] in ("serious", "critical")] == []


@pytest.mark.req("B6")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_on_a_phone(browser: Browser, server: Running, scheme: Any) -> None:
    options = {"viewport": {"width": 390, "height": 844}, "color_scheme": scheme}
    with visiting(browser, origin_of(server), **options) as visit:
        page = opened(visit.page, visit.watched.origin)
        run_many(server, 3)
        wait_until_shown(page, server)
        page.locator("tr[data-ended-request] button").first.click()
        expect(page.locator(".timeline [data-fact=prompt_tokens]")).to_be_visible()
        assert page.evaluate("() => document.documentElement.scrollWidth") == 390
        colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert colour == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}[scheme]


@pytest.mark.req("B6")
def test_the_theme_is_that_of_all_pages(page: Page) -> None:
    button = page.get_by_role("button", name="Theme")
    for chosen in ("light", "dark", "system"):
        button.click()
        expect(button).to_have_accessible_name(f"Theme: {chosen}")
        assert page.evaluate("() => document.documentElement.dataset.theme") == chosen
    assert page.get_by_role("link", name="Chat", exact=True).get_attribute("href") == "/"
