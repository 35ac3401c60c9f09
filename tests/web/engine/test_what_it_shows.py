"""The engine page in a real browser: what it shows is what the server says of itself."""

from __future__ import annotations

import itertools
import threading

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.server.conversing import converse
from tests.server.serving import WAIT_S, Running, running
from tests.server.telling import CHAT, following, make_llm
from tests.server.wire import Wire, chat_body, chat_request, held, until, wait_for_inbox
from tests.web.browsing import visiting
from tests.web.engine.watching import (
    MAIN,
    assert_timeline_is_the_servers,
    core_of,
    opened,
    origin_of,
    run_many,
    shown_on,
    state_in,
    state_of,
    wait_for,
    wait_until_shown,
)
from tokenmill.backends.fake import FaultKind
from tokenmill.server.config import ServerConfig
from tokenmill.server.telemetry.live import LiveCore, snapshot_json

# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.req("B6")
def test_the_page_shows_the_numbers_of_the_scheduler(page: Page, server: Running) -> None:
    wait_until_shown(page, server)
    run_many(server, 6, max_tokens=12)
    server.wait_until_idle()
    wait_until_shown(page, server)
    assert core_of(server)["cells"]["used"] > 0
    expect(page.locator("tr[data-ended-request]")).to_have_count(6)
    expect(page.locator("[data-counter=generated]")).to_have_attribute("data-value", str(6 * 12))


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
        with held(server) as hold:
            run.start()
            hold.wait()
            until(lambda: server.core.load >= 8)  # all at once: there is not room for them
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
    canvas = page.locator(".strip canvas")
    box = canvas.bounding_box()
    assert box is not None
    bar, line = {"x": box["width"] - 12, "y": 96}, {"x": box["width"] - 12, "y": 20}
    near = itertools.cycle((line, {**line, "y": 21}))

    def points_at_it() -> bool:
        canvas.hover(position=next(near))  # above the only brick
        return "1 decode, 0 prefill" in page.locator(".pointed").inner_text()

    wait_for(page, points_at_it, "the strip never showed the steps")
    canvas.click(position=line)
    expect(page.locator(".timeline")).to_have_count(0)
    canvas.click(position=bar)
    assert_timeline_is_the_servers(page, server, call)
