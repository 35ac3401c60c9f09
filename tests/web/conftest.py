"""A browser and a server with the default model, for all tests of the web page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.server.serving import Child, child
from tests.web.browsing import Visit, browsing, visiting


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with browsing() as one:
        yield one


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """`tokenmill serve`, with the default model."""
    with child(tmp_path_factory.mktemp("web") / "log", "smollm2-135m", "--context", "2048", "--threads", "1") as one:
        yield one


@pytest.fixture
def visit(browser: Browser, server: Child) -> Iterator[Visit]:
    with visiting(browser, f"http://127.0.0.1:{server.port}") as one:
        yield one
