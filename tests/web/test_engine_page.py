"""The engine page in a real browser: what it shows is what the server says of itself, and it costs nothing unseen."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.server import serving
from tests.server.conversing import converse
from tests.server.serving import KEY, WAIT_S, Running, running
from tests.server.telling import CHAT, OTHER_KEY, following, make_config, make_llm
from tests.server.wire import Wire, chat_body, chat_request, held, wait_for_inbox
from tests.web.browsing import Visit, visiting
from tokenmill.core import FaultKind
from tokenmill.server.config import ServerConfig
from tokenmill.server.telemetry.shapes import LiveCore, snapshot_json

WAIT_MS = 1000 * WAIT_S
MAIN = 'await import("/web/js/engine/main.js")'
PICTURES = """(() => {
    window.pictures = 0;
    const clear = CanvasRenderingContext2D.prototype.clearRect;
    CanvasRenderingContext2D.prototype.clearRect = function (...box) {
        window.pictures += 1;
        return clear.apply(this, box);
    };
})()"""
"""Counts what is drawn: every picture begins with an empty canvas."""
HIDE = """isHidden => {
    Object.defineProperty(document, "hidden", { get: () => isHidden, configurable: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def origin_of(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """Over a fake model, without keys: names are shown as they are."""
    with running(make_llm(max_num_seqs=3, max_queue=16), ServerConfig(keep_alive_s=0.2)) as one:
        yield one


@pytest.fixture
def visit(browser: Browser, server: Running) -> Iterator[Visit]:
    with visiting(browser, origin_of(server)) as one:
        one.context.add_init_script(PICTURES)
        yield one
    server.wait_until_idle()


@pytest.fixture
def page(visit: Visit) -> Page:
    """The engine page, connected."""
    return opened(visit.page, visit.watched.origin)


def opened(page: Page, origin: str) -> Page:
    page.goto(f"{origin}/engine")
    expect_status(page, "live")
    return page


def expect_status(page: Page, status: str) -> None:
    expect(page.locator("header .status")).to_have_class(f"status {status}")


def wait_for(page: Page, condition: Callable[[], Any], why: str) -> None:
    """Until it is so, while the page goes on."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, why
        page.wait_for_timeout(50)


def core_of(server: Running, key: str | None = None) -> dict[str, Any]:
    """The only core of the only model, as `/v1/scheduler` has it."""
    return dict(server.get("/v1/scheduler", key=key).json()["models"][0]["cores"][0])


def state_of(server: Running, key: str | None = None) -> dict[str, Any]:
    """The same without what changes by itself."""
    return {name: value for name, value in core_of(server, key).items() if name not in ("core", "rates")}


def state_in(page: Page) -> dict[str, Any]:
    """What the page has made of the events."""
    return dict(
        page.evaluate(
            f"async () => {{ const {{ state }} = {MAIN}; return [...state.cores.values()][0].view.snapshot(); }}"
        )
    )


def shown_on(page: Page) -> dict[str, Any]:
    """What somebody sees who looks at the page."""
    script = """() => {
        const { dataset } = document.querySelector(".core") ?? {};
        const rows = (kind) => [...document.querySelectorAll(kind)].map((row) => ({ ...row.dataset }));
        return { core: { ...dataset }, slots: rows("tr[data-slot]"), waiting: rows("tr[data-waiting-request]") };
    }"""
    return dict(page.evaluate(script))


def as_shown(core: dict[str, Any]) -> dict[str, Any]:
    """The scheduler's answer, as the page's elements tell it."""
    busy = [slot for slot in core["slots"] if slot["state"] != "idle"]
    numbers = {
        "tick": core["tick"],
        "running": len(busy),
        "slots": len(core["slots"]),
        "waiting": len(core["waiting"]),
        "parked": len(core["parked"]),
        "cellsAll": core["cells"]["all"],
        "cellsUsed": core["cells"]["used"],
        "cellsFree": core["cells"]["free"],
    }
    return {
        "core": {"model": "fake", "core": "0", **{name: str(value) for name, value in numbers.items()}},
        "slots": [
            {name: str(slot[name]) for name in ("slot", "state", "request", "tokens", "computed")} for slot in busy
        ],
        "waiting": [{"waitingRequest": one["request"], "tokens": str(one["tokens"])} for one in core["waiting"]],
    }


def wait_until_shown(page: Page, server: Running) -> None:
    wait_for(page, lambda: shown_on(page) == as_shown(core_of(server)), "the page never showed what the server says")


def run_many(server: Running, count: int, **options: Any) -> list[str]:
    """So many chats at once; the ids of their answers."""
    names: list[str] = []

    def chat(number: int) -> None:
        names.append(server.post(CHAT, chat_body(f"number {number} " * 20, **options), key=None).json()["id"])

    threads = [threading.Thread(target=chat, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return names


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("B6")
def test_the_page_shows_the_numbers_of_the_scheduler(page: Page, server: Running) -> None:
    wait_until_shown(page, server)
    run_many(server, 6, max_tokens=12)
    server.wait_until_idle()
    wait_until_shown(page, server)
    assert core_of(server)["cells"]["used"] > 0
    expect(page.locator("tr[data-ended-request]")).to_have_count(6)
    assert page.locator("[data-counter=generated]").get_attribute("data-value") == str(6 * 12)


@pytest.mark.req("B6")
def test_while_requests_run_and_wait_the_numbers_are_the_same(page: Page, server: Running) -> None:
    with held(server, after=1) as hold:
        clients = [Wire(server.port) for _ in range(5)]
        clients[0].send(chat_request("client 0", max_tokens=30))
        hold.wait()
        for number, client in enumerate(clients[1:], 1):
            client.send(chat_request(f"client {number}", max_tokens=30))
            wait_for_inbox(server, number)
        for _ in range(4):
            hold.step()
            wait_until_shown(page, server)
        shown = shown_on(page)["core"]
        assert (shown["running"], shown["waiting"]) == ("3", "2")
        assert state_in(page) == state_of(server)
        hold.release()
        assert all(client.read_reply() for client in clients)
        for client in clients:
            client.socket.close()
    server.wait_until_idle()
    wait_until_shown(page, server)


@pytest.mark.req("B6")
def test_sessions_are_shown_with_their_kv(page: Page, server: Running) -> None:
    talk = converse(server, key=None)
    talk.ask("hello")
    row = page.locator(f"tr[data-session='{talk.id}']")
    expect(row).to_have_attribute("data-state", "idle")
    expect(row).to_have_attribute("data-tokens", str(talk.info()["num_tokens"]))
    kept = sum(one["tokens"] for one in core_of(server)["parked"] if one["session"] == talk.id)
    of_session = page.locator(f"tr[data-kv-session='{talk.id}']")
    expect(of_session).to_have_attribute("data-parked-tokens", str(kept))
    assert talk.delete().status == 204
    expect(row).to_have_count(0)


# -- the state in the browser -----------------------------------------------------------------------------------------


@pytest.mark.req("R42", "B6")
def test_events_rebuild_the_same_state_as_in_python(browser: Browser) -> None:
    """After each event: the view of `state.js` is that of `engine/view.py`, and rates are those of `rates.py`."""
    small = make_llm(kv_cache_tokens=512, max_num_seqs=4, max_queue=16)
    with running(small, ServerConfig(keep_alive_s=0.2)) as server, following(server) as events:
        kind, first = events.next()
        assert kind == "snapshot"
        server.inject(FaultKind.FAIL, after=6)
        run = threading.Thread(target=run_many, args=(server, 8), kwargs={"max_tokens": 60})
        run.start()
        heard = events.until_end_of(8)
        run.join(WAIT_S)
        with visiting(browser, origin_of(server)) as visit:
            page = opened(visit.page, visit.watched.origin)
            script = """async ([first, heard]) => {
                const { LiveCore } = await import("/web/js/engine/live.js");
                const core = new LiveCore(first);
                const after = ([kind, data]) => (core.take(kind, data), core.view.snapshot());
                return { states: heard.map(after), rates: core.history.rates(heard.at(-1)[1].at) };
            }"""
            far = page.evaluate(script, [first, heard])
    live = LiveCore(first)
    truth = []
    for kind, data in heard:
        live.take(kind, data)
        truth.append(snapshot_json(live.view.snapshot(), lambda name, _: name))
    assert {"tick", "request", "parked", "failed_step"} <= {kind for kind, _ in heard}
    assert "preempted" in {data["phase"] for kind, data in heard if kind == "request"}
    assert far["states"] == truth
    rates = live.rates.now(heard[-1][1]["at"])
    assert far["rates"]["ticks"] == pytest.approx(rates.ticks)
    assert far["rates"]["generated"] == pytest.approx(rates.generated_tokens)
    assert far["rates"]["prefill"] == pytest.approx(rates.prefill_tokens)


@pytest.mark.req("B6")
def test_what_the_page_remembers_is_bounded(page: Page, server: Running) -> None:
    run_many(server, 3, max_tokens=700)
    server.wait_until_idle()
    wait_until_shown(page, server)
    assert state_in(page) == state_of(server)
    script = f"async () => {{ const {{ state }} = {MAIN}; return [...state.cores.values()][0].ticks.length; }}"
    assert page.evaluate(script) == 600


# -- one request ------------------------------------------------------------------------------------------------------


def assert_timeline_is_the_servers(page: Page, server: Running, call: str, key: str | None = None) -> None:
    (told,) = server.get(f"/v1/requests/{call}/timeline", key=key).json()["generations"]
    expect(page.locator(".timeline [data-fact=finish_reason]")).to_have_attribute(
        "data-value", told["finish_reason"], timeout=WAIT_MS
    )
    facts = page.evaluate(
        "() => [...document.querySelectorAll('.timeline [data-fact]')].map((one) => ({ ...one.dataset }))"
    )
    assert len(facts) == 8
    for fact in facts:
        truth = told[fact["fact"]]
        assert type(truth)(fact["value"]) == truth
    phases = page.evaluate(
        "() => [...document.querySelectorAll('.timeline [data-phase]')].map((row) => ({ ...row.dataset }))"
    )
    assert [(one["phase"], float(one["begin"]), float(one["seconds"])) for one in phases] == [
        (one["phase"], one["begin"], one["seconds"]) for one in told["phases"]
    ]


@pytest.mark.req("R42", "B6")
def test_a_click_on_a_request_shows_its_timeline_and_what_it_reused(page: Page, server: Running) -> None:
    prompt = "a prompt that is long enough to be of use to somebody else " * 2
    for _ in range(2):
        call = server.post(CHAT, chat_body(prompt), key=None).json()["id"]
    row = page.locator(f"tr[data-ended-request^='{call}'] button")
    row.click()
    assert_timeline_is_the_servers(page, server, call)
    cached = page.locator(".timeline [data-fact=cached_tokens]").get_attribute("data-value")
    assert cached is not None
    assert int(cached) > 0
    expect(page.locator(".timeline .reuse")).to_contain_text(cached)
    told = server.get(f"/v1/requests/{call}/timeline", key=None).json()["generations"][0]
    shown = page.locator(".timeline [data-cause]").evaluate_all("rows => rows.map((row) => row.dataset.cause)")
    assert shown == [cause["cause"] for cause in told["causes"]]
    page.get_by_label("Close the timeline").click()
    expect(page.locator(".timeline")).to_have_count(0)


@pytest.mark.req("B6")
def test_a_request_that_runs_can_be_watched_by_keyboard(page: Page, server: Running) -> None:
    with held(server, after=4) as hold, Wire(server.port) as client:
        client.send(chat_request("by keyboard", max_tokens=20))
        hold.wait()
        button = page.locator("tr[data-slot] button.request")
        button.focus()
        page.keyboard.press("Enter")
        panel = page.get_by_role("dialog", name="Timeline")
        expect(panel).to_be_focused()
        expect(panel.locator("[data-fact=finish_reason]")).to_have_text("not yet")
        page.keyboard.press("Escape")
        expect(panel).to_have_count(0)
        expect(button).to_be_focused()
        page.keyboard.press("Enter")
        hold.release()
        reply = client.read_reply()
        assert reply is not None
        assert_timeline_is_the_servers(page, server, reply.json()["id"])


@pytest.mark.req("B6")
def test_a_click_into_the_strip_finds_the_request(page: Page, server: Running) -> None:
    (call,) = run_many(server, 1, max_tokens=40)
    expect(page.locator("tr[data-ended-request]")).to_have_count(1)
    page.wait_for_timeout(400)
    canvas = page.locator(".strip canvas")
    box = canvas.bounding_box()
    assert box is not None
    bar, line = {"x": box["width"] - 12, "y": 96}, {"x": box["width"] - 12, "y": 20}
    canvas.hover(position=line)  # above the only brick
    expect(page.locator(".pointed")).to_contain_text("1 decode, 0 prefill")
    canvas.click(position=line)
    expect(page.locator(".timeline")).to_have_count(0)
    canvas.click(position=bar)
    assert_timeline_is_the_servers(page, server, call)


# -- coming and going -------------------------------------------------------------------------------------------------


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
    page.wait_for_timeout(1100)
    page.evaluate(HIDE, True)
    before = page.evaluate("() => window.pictures")
    assert before > 0
    shown = shown_on(page)
    run_many(server, 2, max_tokens=30)
    page.wait_for_timeout(1500)
    assert page.evaluate("() => window.pictures") == before
    assert shown_on(page) == shown
    assert num_readers(server) == 1, "for a moment it stays connected"
    asked = len(visit.watched.requests)
    page.clock.fast_forward("00:20")
    wait_for(page, lambda: num_readers(server) == 0, "it is still connected")
    assert len(visit.watched.requests) == asked
    page.evaluate(HIDE, False)
    wait_until_shown(page, server)
    assert page.evaluate("() => window.pictures") > before


@pytest.mark.req("B6")
def test_it_draws_no_more_than_a_few_times_a_second(page: Page, server: Running) -> None:
    load = threading.Thread(target=run_many, args=(server, 3), kwargs={"max_tokens": 3000})
    load.start()
    page.wait_for_timeout(500)
    before = page.evaluate("() => window.pictures")
    page.wait_for_timeout(2000)
    pictures = page.evaluate("() => window.pictures") - before
    load.join(WAIT_S)
    assert 0 < pictures <= 3 * (3 + 5), "the strip thrice a second, the map and four plots once"


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
    expect(page.get_by_text("No model is served yet")).to_be_visible(timeout=WAIT_MS)
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


# -- for everybody ----------------------------------------------------------------------------------------------------


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
            expect(page.locator(".timeline [data-fact=prompt_tokens]")).to_be_visible(timeout=WAIT_MS)
            expect(page.locator("tr[data-session]")).to_be_visible(timeout=WAIT_MS)
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
