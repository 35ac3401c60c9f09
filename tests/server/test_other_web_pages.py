"""S04, S05, S07: what a page of somebody else's may read, and what it can have done. Row I09."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.refusals import BODIES, CHAT
from tests.server.serving import KEY, Reply, Running, request, running
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.server.config import ServerConfig, hash_key

PAGE = "https://app.example"
OTHER_PAGES = ["https://evil.com", "null", "http://localhost.evil.com", "http://localhost", "http://127.0.0.1:8000"]
OTHER_PAGES += [f"{PAGE}.evil.com", "http://app.example", f"{PAGE}:8443", "https://x.app.example", f"{PAGE}/", "*", ""]
OTHER_PAGES += ["https://APP.example", f"{PAGE}, https://evil.com", "file://", "https://app.example@evil.com"]
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def cors(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control-")}


def a_server(**settings: Any) -> Any:
    llm = AsyncLLM(FakeModel(FakeConfig(vocab_size=258, depth=1)), config=EngineConfig(), kv_cache_tokens=8192)
    return running(llm, ServerConfig(**settings), "org/name")


@pytest.fixture(scope="module")
def for_pages() -> Iterator[Running]:
    with a_server(key_hashes=(hash_key(KEY),), cors_origins=(PAGE,)) as one:
        yield one


@pytest.fixture(scope="module")
def for_all_pages() -> Iterator[Running]:
    with a_server(cors_origins=("*",)) as one:
        yield one


@pytest.mark.parametrize("origin", [PAGE, *OTHER_PAGES])
def test_s04_no_page_may_read_anything_unless_it_is_allowed(server: Running, origin: str) -> None:
    for path in ("/v1/models", "/health", "/openapi.json", "/nothing"):
        for key in (KEY, None):
            assert cors(request(server.port, "GET", path, key=key, headers={"Origin": origin})) == {}
        reply = request(server.port, "OPTIONS", path, key=None, headers={"Origin": origin, **ASKS})
        assert reply.status in (404, 405)
        assert cors(reply) == {}


@pytest.mark.parametrize("origin", OTHER_PAGES)
def test_s04_other_pages_than_the_one_that_is_allowed(for_pages: Running, origin: str) -> None:
    for path, key in (("/v1/models", KEY), ("/v1/models", None), ("/health", None)):
        reply = request(for_pages.port, "GET", path, key=key, headers={"Origin": origin})
        assert "access-control-allow-origin" not in reply.headers
    reply = request(for_pages.port, "OPTIONS", CHAT, key=None, headers={"Origin": origin, **ASKS})
    assert reply.status in (400, 403, 404, 405)
    assert "access-control-allow-origin" not in reply.headers


def test_s04_the_page_that_is_allowed(for_pages: Running) -> None:
    asked = request(for_pages.port, "OPTIONS", CHAT, key=None, headers={"Origin": PAGE, **ASKS})
    assert asked.status == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert {"authorization", "content-type"} <= set(re.split(", *", asked.headers["access-control-allow-headers"]))
    assert "POST" in asked.headers["access-control-allow-methods"]
    for method, path, key, status in (
        ("GET", "/v1/models", KEY, 200),
        ("GET", "/v1/models", None, 401),
        ("GET", "/nothing", KEY, 404),
        ("POST", CHAT, KEY, 400),
        ("GET", "/health", None, 200),
    ):
        body = b"{" if method == "POST" else None
        reply = request(for_pages.port, method, path, body, key, {"Origin": PAGE})
        assert reply.status == status
        assert reply.headers["access-control-allow-origin"] == PAGE  # so that it can read what was wrong
        assert "x-request-id" in reply.headers["access-control-expose-headers"].lower()
        assert "origin" in reply.headers["vary"].lower()
        assert "access-control-allow-credentials" not in reply.headers
    body = {**BODIES[CHAT], "model": "org/name", "stream": True}
    stream = request(for_pages.port, "POST", CHAT, body, headers={"Origin": PAGE})
    assert stream.events()
    assert stream.headers["access-control-allow-origin"] == PAGE


def test_s04_all_pages_but_without_cookies(for_all_pages: Running) -> None:
    for origin in OTHER_PAGES[:3]:
        for method, more in (("GET", {}), ("OPTIONS", ASKS)):
            reply = request(for_all_pages.port, method, "/v1/models", key=None, headers={"Origin": origin, **more})
            assert reply.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in reply.headers
            assert "set-cookie" not in reply.headers


def test_s07_a_form_on_a_page_can_not_ask_for_anything(for_all_pages: Running) -> None:
    """What a page may send without asking first is refused: also where no key is needed."""
    before = for_all_pages.tick()
    for path, body in (
        (CHAT, {**BODIES[CHAT], "model": "org/name"}),
        ("/v1/completions", {"model": "org/name", "prompt": "hi", "max_tokens": 2}),
        ("/v1/responses", {"model": "org/name", "input": "hi", "max_output_tokens": 2}),
        ("/v1/embeddings", {"model": "org/name", "input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [97]}),
    ):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            headers = {"Content-Type": kind, "Origin": "https://evil.com"}
            reply = request(for_all_pages.port, "POST", path, body, None, headers)
            assert reply.status in (415, 403), (path, kind, reply.body)
            assert reply.error["message"]
    assert for_all_pages.tick() == before


def test_i09_the_name_of_a_model_may_have_a_slash(for_pages: Running) -> None:
    for path in ("/v1/models/org%2Fname", "/v1/models/org/name", "/models/org%2fname"):
        assert for_pages.get(path).json()["id"] == "org/name"
    for path in ("/v1/models/org%252Fname", "/v1/models/name", "/v1/models/org", "/v1/models/org%2Fname%2F"):
        assert for_pages.get(path).error["code"] == "model_not_found"
    assert for_pages.client.models.retrieve("org/name").id == "org/name"


def test_s05_without_keys_the_server_answers_only_to_its_own_names() -> None:
    """A page that has made its own name mean this machine is of the same origin, so only the name tells."""
    llm = AsyncLLM(FakeModel(FakeConfig(vocab_size=258)), kv_cache_tokens=1024)
    with running(llm, ServerConfig(allowed_hosts=frozenset({"my.name"}))) as server:
        for host, status in (
            ("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:80", 200), ("LOCALHOST:1", 200), ("my.name:5", 200),
            ("evil.example", 421), ("evil.example:8000", 421), ("localhost.evil.example", 421), ("", 421),
        ):  # fmt: skip
            assert request(server.port, "GET", "/v1/models", key=None, headers={"Host": host}).status == status, host
