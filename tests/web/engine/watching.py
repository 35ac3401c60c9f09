"""The engine page as somebody sees it who looks at it, beside what the server says of itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, expect

from tests.server.serving import WAIT_S, Running
from tests.server.telling import CHAT
from tests.server.wire import chat_body

MAIN = 'await import("/web/js/engine/main.js")'


def origin_of(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}"


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


def assert_timeline_is_the_servers(page: Page, server: Running, call: str, key: str | None = None) -> None:
    (told,) = server.get(f"/v1/requests/{call}/timeline", key=key).json()["generations"]
    expect(page.locator(".timeline [data-fact=finish_reason]")).to_have_attribute("data-value", told["finish_reason"])
    facts = page.evaluate(
        "() => [...document.querySelectorAll('.timeline [data-fact]')].map((one) => ({ ...one.dataset }))"
    )
    assert len(facts) == 10
    for fact in facts:
        truth = told[fact["fact"]]
        assert type(truth)(fact["value"]) == truth
    phases = page.evaluate(
        "() => [...document.querySelectorAll('.timeline [data-phase]')].map((row) => ({ ...row.dataset }))"
    )
    assert [(one["phase"], float(one["begin"]), float(one["seconds"])) for one in phases] == [
        (one["phase"], one["begin"], one["seconds"]) for one in told["phases"]
    ]
