"""S01, S03, S08: nobody comes in without a key, how keys are compared, and what two keys share."""

from __future__ import annotations

import ast
import hashlib
import hmac
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.refusals import BODIES, CHAT
from tests.server.serving import KEY, Reply, Running, request
from tokenmill.errors import ConfigError
from tokenmill.server import keys
from tokenmill.server.api.operations import EVENTS
from tokenmill.server.app import create_app
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.requests import EmbeddingRequest
from tokenmill.server.served import Served
from tokenmill.server.web import assets
from tokenmill.session.postgres import KV_PATH

OPEN = {"/health", "/health/live", "/health/ready"}
FILES = set(assets())
OPENAI = ["/models", "/models/{name:path}", "/chat/completions", "/completions", "/responses", "/embeddings"]
OPENAI += [
    "/usage",
    "/requests/{request_id}/cancel",
    "/requests/{request_id}/timeline",
    "/scheduler",
    "/scheduler/events",
    "/servers",
]
OPENAI += [
    "/files",
    "/files/{file_id}",
    "/files/{file_id}/content",
    "/batches",
    "/batches/{batch_id}",
    "/batches/{batch_id}/cancel",
    "/models/cached",
    "/models/load",
    "/models/unload",
    "/sessions",
    "/sessions/restore",
    "/sessions/{session_id}",
]
VERBS = ["append", "generate", "regenerate", "stream", "resume", "cancel", "fork", "rewind", "edit", "turns", "explain"]
VERBS += ["save"]
OPENAI += [f"/sessions/{{session_id}}/{verb}" for verb in VERBS]
OPENAI += ["/responses/input_tokens", "/responses/{response_id}", "/chat/completions/{completion_id}"]
OPENAI += [f"/responses/{{response_id}}/{verb}" for verb in ("cancel", "input_items")]
OPENAI += ["/chat/completions/{completion_id}/messages", "/conversations", "/conversations/{conversation_id}"]
OPENAI += ["/conversations/{conversation_id}/items", "/conversations/{conversation_id}/items/{item_id}"]
ANTHROPIC = ["/messages", "/messages/count_tokens"]
OLLAMA = ["chat", "delete", "embed", "embeddings", "generate", "ps", "pull", "show", "tags", "version"]
VERSIONED = [*OPENAI, *ANTHROPIC]
WITH_KEY = {"/openapi.json", "/metrics", "/tokenize", "/detokenize", *VERSIONED, *(f"/v1{path}" for path in VERSIONED)}
WITH_KEY |= {"/v1/loads", "/loads", "/server_info", "/get_server_info"}
WITH_KEY |= {f"/api/{verb}" for verb in OLLAMA}
WITH_KEY |= {"/infill", "/props", "/slots", "/apply-template", KV_PATH.removeprefix("/v1")}
FOR_SERVERS = {KV_PATH}
"""Whoever does not have a server's secret finds nothing there."""
BODY = BODIES[CHAT]
ENDLESS = {EVENTS, f"/v1{EVENTS}"}


def routes() -> Iterator[tuple[str, str]]:
    """Every method and path of the server, as the application has them."""
    app = create_app(Served(ServerConfig(key_hashes=(hash_key(KEY),))))
    for route in app.routes:
        inner: Any = getattr(route, "effective_route_contexts", lambda route=route: [route])()  # of a router in it
        yield from ((method, one.path) for one in inner for method in sorted(one.methods))


def filled(path: str) -> str:
    return re.sub(r"\{\w+_id\}", "x", path.replace("{name:path}", "fake"))


def check_401(reply: Reply) -> None:
    assert reply.status == 401, reply.body[:200]
    assert reply.headers["www-authenticate"] == "Bearer"
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    if isinstance(error, dict) and "code" in error:  # OpenAI's
        assert reply.error["code"] == "invalid_api_key"
    elif isinstance(error, dict):  # Anthropic's
        assert error["type"] == "authentication_error"
    else:  # Ollama's
        assert "API key" in error
    assert KEY not in reply.body.decode()


# -- S01: where a key is needed ---------------------------------------------------------------------------------------


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
    assert {path for _, path in routes()} == OPEN | WITH_KEY | FILES | FOR_SERVERS


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
        if path in FOR_SERVERS:
            assert reply.status == 404
        elif path in OPEN and method != "HEAD":
            assert reply.status == 200
        elif method != "HEAD":
            check_401(reply)
    for query in (f"key={KEY}", f"api_key={KEY}", f"access_token={KEY}", f"Authorization=Bearer%20{KEY}"):
        reply = request(server.port, method, f"{filled(path)}?{query}", body, None)
        assert reply.status == (200 if path in OPEN else 404 if path in FOR_SERVERS else 401)
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
    if not path.startswith("/api/") and not path.removeprefix("/v1").startswith("/messages"):  # else of another shape
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


def test_a_key_is_not_empty() -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        ServerConfig(host="0.0.0.0", key_hashes=(hash_key(""),))


# -- S03: how keys are compared ---------------------------------------------------------------------------------------


def test_s03_all_keys_are_compared_in_constant_time() -> None:
    """A loop over all keys that nothing leaves early, with compare_digest of hashes; no other comparison of keys."""
    (method,) = ast.parse(textwrap.dedent(inspect.getsource(keys.known_key))).body
    loops = [node for node in ast.walk(method) if isinstance(node, ast.For)]
    assert [ast.unparse(loop.iter) for loop in loops] == ["key_hashes"]
    inside = [node for statement in loops[0].body for node in ast.walk(statement)]
    assert not any(isinstance(node, ast.Return | ast.Break | ast.Continue | ast.Raise) for node in inside)
    calls = [ast.unparse(node.func) for node in inside if isinstance(node, ast.Call)]
    assert calls == ["hmac.compare_digest"]
    compared = [node for node in ast.walk(method) if isinstance(node, ast.Compare)]
    assert all(isinstance(node.ops[0], ast.Is | ast.IsNot) for node in compared)
    names = {node.attr for node in ast.walk(ast.parse(inspect.getsource(keys))) if isinstance(node, ast.Attribute)}
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


# -- S08: what two keys share -----------------------------------------------------------------------------------------


def test_s08_embeddings_of_two_keys_share_no_kv() -> None:
    body = EmbeddingRequest(model="fake", input="a text")
    several = Served(ServerConfig(key_hashes=(hash_key("one"), hash_key("other"))))
    assert several.hints("one", body).namespace != several.hints("other", body).namespace
    assert Served(ServerConfig()).hints("one", body).namespace is None
