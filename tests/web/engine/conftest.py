"""A server over a fake model and the engine page of it, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page

from tests.server.serving import Running, running
from tests.server.telling import make_llm
from tests.web.browsing import Visit, visiting
from tests.web.engine.watching import opened, origin_of
from tokenmill.server.config import ServerConfig

PICTURES = """(() => {
    window.pictures = 0;
    const clear = CanvasRenderingContext2D.prototype.clearRect;
    CanvasRenderingContext2D.prototype.clearRect = function (...box) {
        window.pictures += 1;
        return clear.apply(this, box);
    };
})()"""
"""Counts what is drawn: every picture begins with an empty canvas."""


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
