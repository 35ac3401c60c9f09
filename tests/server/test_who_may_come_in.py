"""S01 to S05, S07, S08: keys, paths and names that look like others, and what a web page may do."""

from __future__ import annotations

import ast
import hashlib
import hmac
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.serving import HI, KEY, Reply, Running, raw_request, request, running
from tokenmill import AsyncLLM
from tokenmill.config import EngineConfig
from tokenmill.core import FakeConfig, FakeModel
from tokenmill.errors import ConfigError
from tokenmill.server import auth
from tokenmill.server.app import create_app
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.context import ENDLESS
from tokenmill.server.page import assets
from tokenmill.server.requests import EmbeddingRequest
from tokenmill.server.served import Served

OPEN = {"/health", "/health/live", "/health/ready"}
FILES = set(assets())
OPENAI = ["/models", "/models/{name:path}", "/chat/completions", "/completions", "/responses", "/embeddings"]
OPENAI += ["/requests/{request_id}/cancel", "/requests/{request_id}/timeline", "/scheduler", "/scheduler/events"]
OPENAI += ["/models/load", "/models/unload", "/sessions", "/sessions/restore", "/sessions/{session_id}"]
VERBS = ("append", "generate", "regenerate", "stream", "cancel", "fork", "rewind", "edit", "turns", "explain", "save")
OPENAI += [f"/sessions/{{session_id}}/{verb}" for verb in VERBS]
WITH_KEY = {"/openapi.json", "/metrics", "/tokenize", "/detokenize", *OPENAI, *(f"/v1{path}" for path in OPENAI)}
CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "fake", "messages": HI, "max_tokens": 2}


def routes() -> Iterator[tuple[str, str]]:
    """Every method and path of the server, as the application has them."""
    app = create_app(Served(ServerConfig(key_hashes=(hash_key(KEY),))))
    for route in app.routes:
        inner: Any = getattr(route, "effective_route_contexts", lambda route=route: [route])()  # of a router in it
        yield from ((method, one.path) for one in inner for method in sorted(one.methods))


def filled(path: str) -> str:
    return path.replace("{name:path}", "fake").replace("{request_id}", "x").replace("{session_id}", "x")


def check_401(reply: Reply) -> None:
    assert reply.status == 401, reply.body[:200]
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["x-request-id"]
    assert reply.error["code"] == "invalid_api_key"
    assert KEY not in reply.body.decode()


# -- S01: keys --------------------------------------------------------------------------------------------------------

NO_KEYS: dict[str, dict[str, str]] = {
    "no key": {},
    "a wrong key": {"Authorization": "Bearer wrong"},
    "part of the key": {"Authorization": f"Bearer {KEY[:-1]}"},
    "more than the key": {"Authorization": f"Bearer {KEY}x"},
    "the key in capitals": {"Authorization": f"Bearer {KEY.upper()}"},
    "no key after Bearer": {"Authorization": "Bearer"},
    "an empty key": {"Authorization": "Bearer "},
    "an empty header": {"Authorization": ""},
    "Basic": {"Authorization": "Basic c2stdGVzdA=="},
    "the key as Basic": {"Authorization": f"Basic {KEY}"},
    "the key alone": {"Authorization": KEY},
    "no space": {"Authorization": f"Bearer{KEY}"},
    "two spaces": {"Authorization": f"Bearer  {KEY}"},
    "a space after it": {"Authorization": f"Bearer {KEY} "},
    "a tab": {"Authorization": f"Bearer\t{KEY}"},
    "more words": {"Authorization": f"Bearer {KEY} {KEY}"},
    "a list": {"Authorization": f"Bearer {KEY}, Bearer wrong"},
    "a wrong key in small letters": {"Authorization": "bearer wrong"},
    "a wrong key and a space": {"Authorization": "Bearer wrong "},
    "letters beyond ASCII": {"Authorization": "Bearer schl\xfcssel"},
    "letters beyond ASCII as UTF-8": {"Authorization": "Bearer schlüssel".encode().decode("latin-1")},
    "the hash of the key": {"Authorization": f"Bearer {hash_key(KEY).hex()}"},
    "the fingerprint of the key": {"Authorization": f"Bearer {hash_key(KEY).hex()[:8]}"},
    "a wrong key elsewhere": {"x-api-key": "wrong"},
    "an empty key elsewhere": {"api-key": ""},
    "a right and a wrong key": {"Authorization": f"Bearer {KEY}", "x-api-key": "wrong"},
    "the key in a cookie": {"Cookie": f"Authorization=Bearer {KEY}; api_key={KEY}"},
    "the key for a proxy": {"Proxy-Authorization": f"Bearer {KEY}"},
    "another path": {"X-Original-URL": "/health", "X-Rewrite-URL": "/health", "X-Forwarded-Prefix": "/health"},
    "from this machine": {"X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1", "Forwarded": "for=127.0.0.1"},
    "another method": {"X-HTTP-Method-Override": "OPTIONS"},
}


@pytest.mark.req("R37")
def test_s01_every_route_has_a_rule() -> None:
    assert {path for _, path in routes()} == OPEN | WITH_KEY | FILES


@pytest.mark.req("R37", "R41")
def test_s01_the_web_page_is_for_everybody_and_nothing_else_is(server: Running) -> None:
    for path in FILES:
        assert request(server.port, "GET", path, None, None).status == 200
        assert request(server.port, "POST", path, BODY, None).status == 405
    for path in (
        "/web",
        "/web/",
        "/web/x",
        "/web/js",
        "/web/js/",
        "/engine/",
        "//",
        "/web/..",
        "/web/js/../../v1/models",
    ):
        check_401(request(server.port, "GET", path, None, None))


@pytest.mark.parametrize(("method", "path"), sorted(route for route in routes() if route[1] not in FILES))
def test_s01_a_key_is_needed_everywhere_but_for_health(server: Running, method: str, path: str) -> None:
    body = BODY if method == "POST" else None
    for headers in NO_KEYS.values():
        reply = request(server.port, method, filled(path), body, None, headers)
        if path in OPEN and method != "HEAD":
            assert reply.status == 200
        elif method != "HEAD":
            check_401(reply)
    for query in (f"key={KEY}", f"api_key={KEY}", f"access_token={KEY}", f"Authorization=Bearer%20{KEY}"):
        reply = request(server.port, method, f"{filled(path)}?{query}", body, None)
        assert reply.status == (200 if path in OPEN else 401)
    if path not in ENDLESS:
        assert request(server.port, method, filled(path), body).status in (200, 201, 400, 403, 404, 415)


@pytest.mark.parametrize(
    "path", sorted(OPEN | WITH_KEY | {"/web/", "/nothing", "/v1/nothing", "/docs", "/health/x", "/healthz"})
)
def test_s01_other_methods_need_a_key_as_well(server: Running, path: str) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"):
        reply = request(server.port, method, filled(path), None, None)
        assert reply.status in ((200, 405) if path in OPEN else (401,)), method
    reply = request(server.port, "OPTIONS", filled(path), None, None)  # open, and tells nothing
    assert reply.status in (404, 405)
    assert set(reply.error) == {"message", "type", "param", "code"}


def test_s01_the_same_key_said_otherwise(server: Running) -> None:
    """The scheme has no case; some clients have headers of their own."""
    for headers in (
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer {KEY}"},
        {"Authorization": f"BEARER {KEY}"},
        {"Authorization": "Bearer other"},
        {"x-api-key": KEY},
        {"api-key": KEY},
        {"Authorization": f"Bearer {KEY}", "x-api-key": KEY},
    ):
        assert request(server.port, "GET", "/v1/models", key=None, headers=headers).status == 200, headers


def test_s01_no_websocket_gets_around_it(server: Running) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "eA==",
    }
    for path in ("/v1/models", "/web/", "/ws"):
        check_401(request(server.port, "GET", path, None, None, upgrade))
    h2 = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"}
    check_401(request(server.port, "GET", "/v1/models", None, None, h2))


# -- S02: paths that look like others ---------------------------------------------------------------------------------

TARGETS = [
    "/v1/models",
    "//v1/models",
    "/v1//models",
    "/V1/models",
    "/v1/models/",
    "/v1/%2e%2e/v1/models",
    "/v1/../health",
    "/v1/%2e%2e/health",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1%2fmodels",
    "/health/..;/v1/models",
    "/health;/v1/models",
    "/health%00/v1/models",
    "/health%3f/v1/models",
    "/health%23",
    "/health/",
    "/Health",
    "//health",
    "/./health",
    "/%2fhealth",
    "/v1/models%20",
    "/v1/models?/health",
    "/v1/models#/health",
    "/v1/models;/health",
    "/v1%5cmodels",
    "/%76%31/models",
    "/tokenize",
    "/openapi.json",
    "http://x/v1/models",
    "http://x/health/../v1/models",
    "http://health/v1/models",
    "http://x:1/health@y/v1/models",
    "HTTP://127.0.0.1/openapi.json",
]
HOSTS = [
    "x/v1/../health?",
    "x/health",
    "x/health?",
    "x/health#",
    "health",
    "a@b",
    "a:b@c/health",
    "[::1]/health",
    "x:0",
]
HOSTS += ["x\\health", "evil.example", "127.0.0.1", "", "*", "/health", "?", "#", "%2fhealth", "x%2fhealth%3f"]


def raw(server: Running, content: bytes) -> bytes:
    """All that is answered."""
    with server.connect() as connection:
        connection.sendall(content)
        return connection.makefile("rb").read()


def check_raw(answer: bytes, statuses: tuple[int, ...], what: Any) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ")[1])
    assert status in statuses, (what, answer)
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, what
    if status == 401:
        assert b"www-authenticate: Bearer" in head


@pytest.mark.parametrize("target", TARGETS)
def test_s02_paths_that_look_like_others(server: Running, target: str) -> None:
    for method, body in (("GET", ""), ("POST", json.dumps(BODY))):
        head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        answer = raw(server, f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        check_raw(answer, (401,), target)


@pytest.mark.parametrize("host", HOSTS)
def test_s02_hosts_that_look_like_paths(server: Running, host: str) -> None:
    for target in ("/v1/models", "/openapi.json", "/v1/../health", "/nothing"):
        answer = raw(server, f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        check_raw(answer, (401, 400, 421), (host, target))


def test_s02_two_of_something(server: Running) -> None:
    for headers in (
        "Host: x\r\nHost: x/health\r\n",
        "Host: x/health?\r\nHost: y\r\n",
        "",
        "Host: x\r\nAuthorization: Bearer wrong\r\nAuthorization: Bearer sk-test\r\n",
        "Host: x\r\nAuthorization: Bearer sk-test\r\nAuthorization: Bearer wrong\r\n",
        "Host: x\r\nAuthorization: Bearer\r\nAuthorization: sk-test\r\n",
        "Host: x\r\nAuthorization : Bearer sk-test\r\n",
        "Host: x\r\nAuthorization: Bearer\r\n sk-test\r\n",
    ):
        answer = raw(server, f"GET /v1/models HTTP/1.1\r\n{headers}Connection: close\r\n\r\n".encode())
        check_raw(answer, (401, 400), headers)


def test_s02_a_connection_that_was_let_in_is_asked_again(server: Running) -> None:
    first, then = raw_request("/v1/models", b"", method="GET"), raw_request("/v1/models", b"", key=None, method="GET")
    answers = raw(server, first + then + first.replace(b"Host: localhost", b"Host: localhost\r\nConnection: close"))
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"401", b"200"]


# -- S03: how keys are compared ---------------------------------------------------------------------------------------


def test_s03_all_keys_are_compared_in_constant_time() -> None:
    """A loop over all keys that nothing leaves early, with compare_digest of hashes; no other comparison of keys."""
    (method,) = ast.parse(textwrap.dedent(inspect.getsource(auth.ApiKeys._known))).body
    loops = [node for node in ast.walk(method) if isinstance(node, ast.For)]
    assert [ast.unparse(loop.iter) for loop in loops] == ["self._key_hashes"]
    inside = [node for statement in loops[0].body for node in ast.walk(statement)]
    assert not any(isinstance(node, ast.Return | ast.Break | ast.Continue | ast.Raise) for node in inside)
    calls = [ast.unparse(node.func) for node in inside if isinstance(node, ast.Call)]
    assert calls == ["hmac.compare_digest"]
    compared = [node for node in ast.walk(method) if isinstance(node, ast.Compare)]
    assert all(isinstance(node.ops[0], ast.Is | ast.IsNot) for node in compared)
    names = {node.attr for node in ast.walk(ast.parse(inspect.getsource(auth))) if isinstance(node, ast.Attribute)}
    assert "compare_digest" in names


def test_s03_every_key_is_looked_at_whichever_is_right(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(known: bytes, given: bytes) -> bool:
        seen.append((known, given))
        return real(known, given)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key, status in (("other", 200), (KEY, 200), ("wrong", 401), ("", 401)):
        seen.clear()
        assert request(server.port, "GET", "/v1/models", key=None, headers={"x-api-key": key}).status == status
        assert [known for known, _ in seen] == [hash_key("other"), hash_key(KEY)]
        assert {given for _, given in seen} == {hash_key(key)}  # as long as all others, whatever was sent


def test_s03_what_is_kept_of_a_key_is_not_the_key(server: Running) -> None:
    for key in ("a", "12345678", "deadbeef", KEY, "schlüssel", "x" * 1000):
        assert hash_key(key) == hashlib.sha256(key.encode()).digest()
        assert hash_key(key).hex() == hashlib.sha256(key.encode()).hexdigest() != key
    assert KEY not in repr(server.served.config)


# -- S04, S07: web pages ----------------------------------------------------------------------------------------------

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
    body = {**BODY, "model": "org/name", "stream": True}
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
        (CHAT, {**BODY, "model": "org/name"}),
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


# -- names, where there are no keys ------------------------------------------------------------------------------------


def test_s05_without_keys_the_server_answers_only_to_its_own_names() -> None:
    """A page that has made its own name mean this machine is of the same origin, so only the name tells."""
    llm = AsyncLLM(FakeModel(FakeConfig(vocab_size=258)), kv_cache_tokens=1024)
    with running(llm, ServerConfig(allowed_hosts=frozenset({"my.name"}))) as server:
        for host, status in (
            ("localhost", 200), ("127.0.0.1:8000", 200), ("[::1]:80", 200), ("LOCALHOST:1", 200), ("my.name:5", 200),
            ("evil.example", 421), ("evil.example:8000", 421), ("localhost.evil.example", 421), ("", 421),
        ):  # fmt: skip
            assert request(server.port, "GET", "/v1/models", key=None, headers={"Host": host}).status == status, host


def test_s08_embeddings_of_two_keys_share_no_kv() -> None:
    body = EmbeddingRequest(model="fake", input="a text")
    assert body.hints("one", separate=True).namespace != body.hints("other", separate=True).namespace
    assert body.hints("one", separate=False).namespace is None


def test_a_key_is_not_empty() -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        ServerConfig(host="0.0.0.0", key_hashes=(hash_key(""),))
