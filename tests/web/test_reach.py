"""For everybody: by keyboard, on a phone, in the dark, with a screen reader."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.server.serving import Child
from tests.web.browsing import Visit, visiting

JAPAN = "What is the capital of Japan?"


def faults(page: Page) -> list[str]:
    """What axe-core finds that is serious."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in found if one["impact"] in ("serious", "critical")]


@pytest.fixture
def open_visit(browser: Browser, server: Child) -> Iterator[Visit]:
    """On a page that lets axe in."""
    with visiting(browser, f"http://127.0.0.1:{server.port}", bypass_csp=True) as one:
        yield one


@pytest.mark.req("R41")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_fault_of_accessibility(open_visit: Visit, scheme: str) -> None:
    visit = open_visit
    visit.page.emulate_media(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    visit.open(max_tokens=8)
    expect(visit.page.get_by_label("Model", exact=True)).to_have_value("smollm2-135m")
    assert faults(visit.page) == [], "an empty conversation"
    visit.ask(JAPAN)
    visit.act(visit.questions.last, "Edit and ask again")
    visit.page.get_by_label("Your question").fill("What is a table?")
    with visit.answered():
        visit.page.keyboard.press("Control+Enter")
    assert faults(visit.page) == [], "a conversation with branches"
    visit.page.get_by_label("Settings").click()
    expect(visit.page.get_by_role("dialog")).to_be_visible()
    assert faults(visit.page) == [], "settings"
    visit.page.keyboard.press("Escape")
    expect(visit.page.get_by_role("dialog")).to_have_count(0)
    visit.page.keyboard.press("Control+k")
    expect(visit.page.get_by_label("Words to look for")).to_be_focused()
    assert faults(visit.page) == [], "search"


@pytest.mark.req("R41")
def test_everything_can_be_done_by_keyboard(visit: Visit) -> None:
    visit.open(max_tokens=300)
    keys = visit.page.keyboard
    expect(visit.field).to_be_focused()
    keys.type("Count to a hundred")
    keys.press("Shift+Enter")
    keys.type("in words.")
    keys.press("Enter")
    visit.wait_for_words(4)
    assert visit.said()[0] == "Count to a hundred\nin words."
    keys.press("Escape")
    visit.wait_for_answer()
    expect(visit.field).to_be_focused()
    keys.press("Control+k")
    expect(visit.page.get_by_label("Words to look for")).to_be_focused()
    keys.press("Escape")
    expect(visit.field).to_be_focused()
    reached = set()
    for _ in range(25):
        keys.press("Tab")
        reached.add(
            visit.page.evaluate(
                "() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.trim()"
            )
        )
    assert {
        "New conversation",
        "Search conversations",
        "Settings",
        "Model",
        "Copy",
        "Edit and ask again",
        "Another answer",
    } <= reached
    visit.answers.last.get_by_role("button", name="Another answer", exact=True).focus()
    keys.press("Enter")
    expect(visit.answers.last.locator(".branches")).to_contain_text("2/2")
    keys.press("Escape")
    visit.wait_for_answer()
    keys.press("Control+b")
    expect(visit.page.get_by_label("Conversations", exact=True)).to_have_count(0)
    keys.press("Control+Shift+O")
    expect(visit.messages).to_have_count(0)


@pytest.mark.req("R41")
def test_on_a_phone(browser: Browser, server: Child) -> None:
    options = {"viewport": {"width": 390, "height": 780}, "has_touch": True, "is_mobile": True}
    with visiting(browser, f"http://127.0.0.1:{server.port}", **options) as visit:
        visit.open()
        expect(visit.conversations).to_have_count(0)
        visit.field.fill(JAPAN)
        visit.page.get_by_label("Send", exact=True).tap()
        visit.wait_for_answer()
        assert "Tokyo" in visit.said()[-1]
        assert visit.page.evaluate("() => document.documentElement.scrollWidth") <= 390
        visit.page.get_by_label("List of conversations").tap()
        expect(visit.conversations).to_have_count(1)
        visit.page.get_by_role("button", name="New conversation", exact=True).tap()
        expect(visit.conversations).to_have_count(0)
        expect(visit.messages).to_have_count(0)


@pytest.mark.req("R41")
def test_dark_and_light(visit: Visit) -> None:
    def brightness() -> float:
        colour = visit.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        red, green, blue = (int(part) for part in colour[4:-1].split(","))
        return (red + green + blue) / 765

    visit.page.emulate_media(color_scheme="dark")
    visit.open()
    assert brightness() < 0.2
    visit.page.get_by_label("Theme: system").click()
    expect(visit.page.get_by_label("Theme: light")).to_be_visible()
    assert brightness() > 0.9, "light, whatever the system has"
    visit.page.reload()
    expect(visit.page.get_by_label("Theme: light")).to_be_visible()
    assert brightness() > 0.9
    visit.page.get_by_label("Theme: light").click()
    expect(visit.page.get_by_label("Theme: dark")).to_be_visible()
    visit.page.emulate_media(color_scheme="light")
    assert brightness() < 0.2


@pytest.mark.req("R41")
def test_a_screen_reader_hears_the_answer_once(visit: Visit) -> None:
    visit.open()
    expect(visit.field).to_be_visible()
    visit.page.evaluate("""() => {
        window.heard = [];
        const region = document.querySelector("[aria-live=polite]");
        const observer = new MutationObserver(() => window.heard.push(region.textContent));
        observer.observe(region, { subtree: true, childList: true, characterData: true });
    }""")
    answer = visit.ask(JAPAN)
    visit.page.wait_for_function("() => window.heard.length >= 2")
    assert visit.page.evaluate("() => window.heard") == ["Generating an answer", answer]
