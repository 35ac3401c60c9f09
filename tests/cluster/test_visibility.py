"""What several servers of one database show of each other: over HTTP, in the terminal, on the engine page."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.cluster.database import Database
from tests.cluster.serving import Node, nodes
from tests.server.serving import TOKENMILL
from tests.web.browsing import browsing, visiting
from tests.web.engine.watching import opened


@pytest.fixture(scope="module")
def servers(postgres: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    postgres.empty()
    with nodes(postgres, tmp_path_factory.mktemp("visible"), 2) as made:
        yield made


def names(node: Node) -> tuple[str, str]:
    """This server's name, and the other one's."""
    listed = node.request("GET", "/v1/servers").json()["data"]
    assert len(listed) == 2
    (own,) = (one["id"] for one in listed if one["is_this"])
    (other,) = (one["id"] for one in listed if not one["is_this"])
    return own, other


def slots_of(node: Node, server: str) -> int:
    told = node.request("GET", f"/v1/scheduler?server={server}").json()
    return len(told["models"][0]["cores"][0]["parked"])


def test_a_server_tells_of_the_others(servers: list[Node]) -> None:
    one, two = servers
    own, other = names(one)
    assert names(two) == (other, own)
    two.tokens(two.create(), "hello")
    assert slots_of(one, other) == slots_of(two, other) == 1
    assert slots_of(one, own) == slots_of(two, own) == 0
    metrics = one.request("GET", f"/metrics?server={other}").body.decode()
    assert 'tokenmill_requests_total{finish_reason="length",model="fake"} 1.0' in metrics
    for path in ("/v1/scheduler", "/v1/scheduler/events", "/metrics", "/v1/requests/x/timeline"):
        assert one.request("GET", f"{path}?server=nobody").status == 400


def test_top_shows_all_of_them(servers: list[Node]) -> None:
    url = f"http://127.0.0.1:{servers[0].port}"
    command = [TOKENMILL, "top", "--cluster", "--once", "--url", url]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    for name in names(servers[0]):
        assert f"{url}  {name}" in said
    assert said.count("fake core 0") == 2


def test_the_engine_page_has_a_tab_for_each(servers: list[Node]) -> None:
    own, other = names(servers[0])
    with browsing() as browser, visiting(browser, f"http://127.0.0.1:{servers[0].port}") as visit:
        page = opened(visit.page, visit.watched.origin)
        tabs = page.get_by_role("navigation", name="Servers")
        expect(tabs.get_by_role("button", pressed=True)).to_have_text(own)
        tabs.get_by_role("button", name=other).click()
        expect(tabs.get_by_role("button", pressed=True)).to_have_text(other)
        servers[1].tokens(servers[1].create(), "to be seen")
        expect(page.locator(".core")).to_have_count(1)
        expect(page.locator("header .status")).to_have_class("status live")
