"""G8: no key notices what another one does: limits, usage, expiry and Retry-After by key, and the keys file.

The engine is held in a step where a test needs requests to be running; clocks pass when told.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planting import PlantedBug, plant
from tests.server.queueing import CHAT, assert_overloaded, read
from tests.server.serving import Reply, Running, child, raw_request, request, running
from tests.server.wire import Hold, Wire, cancel_all, chat_body, held, until, wait_for_inbox
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.engine.policies import WaitingQueue
from tokenmill.errors import ConfigError, Overloaded
from tokenmill.outputs import Usage
from tokenmill.server.api import operations, sessions
from tokenmill.server.api.responses import Background
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.keys import (
    FIRST_RETRY_S,
    MAX_RETRY_S,
    Account,
    ApiKey,
    Bucket,
    Everybody,
    KeyLimits,
    KeyRing,
    duration,
    read_keys,
)
from tokenmill.session import documents
from tokenmill.session.manager import LogBudget, SessionQuota
from tokenmill.session.session import Session

KEYS: dict[str, dict[str, Any]] = {
    "admin": {"admin": True},
    "plain": {},
    "narrow": {"concurrent_requests": 2},
    "slots": {"queue_slots": 2, "running_rows": 1},
    "paced": {"requests_per_minute": 3},
    "other": {"requests_per_minute": 2},
    "frugal": {"tokens_per_minute": 100},
    "keeper": {"sessions": 2, "stored_responses": 2, "stored_bytes": 4000},
    "small": {"session_bytes": 1},
    "short": {"max_context": 64},
    "expired": {"expires": "2020-01-01"},
}
"""One key for each limit, so that no test uses up another's."""


def keys_file(path: Path, keys: dict[str, dict[str, Any]], **limits: int) -> Path:
    tables = [{"name": name, "sha256": hash_key(f"sk-{name}").hex(), **own} for name, own in keys.items()]
    path.write_text(json.dumps({"key": tables, "limits": limits}))
    return path


@contextmanager
def serving(directory: Path) -> Iterator[Running]:
    model = FakeModel(FakeConfig(vocab_size=258, max_context=4096))
    llm = AsyncLLM(model, config=EngineConfig(max_num_seqs=4, max_queue=8), kv_cache_tokens=32_768)
    file = keys_file(directory / "keys.json", KEYS)
    with running(llm, ServerConfig(keys_file=file, max_stored_responses=3, keep_alive_s=20.0)) as one:
        yield one


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("keys")) as one:
        yield one


def chat(server: Running, name: str, **changes: Any) -> Reply:
    return server.post(CHAT, chat_body(**changes), key=f"sk-{name}")


def usage(server: Running, name: str) -> dict[str, Any]:
    (own,) = server.get("/v1/usage", key=f"sk-{name}").json()["data"]
    return dict(own)


def account_of(server: Running, name: str) -> Account:
    return next(one for one in server.served.keys.accounts if one.key.name == name)


@contextmanager
def frozen(server: Running, name: str) -> Iterator[None]:
    """No time passes for a key: what it has used up does not refill while a slow machine works."""
    account = account_of(server, name)
    clock, now = account._clock, account._clock()
    account._clock = lambda: now
    yield
    account._clock = clock


@contextmanager
def waiting(server: Running, name: str, count: int) -> Iterator[tuple[list[Wire], Hold]]:
    """So many requests of a key, in an engine that does not get on before it is released."""
    with held(server) as hold, ExitStack() as stack:
        clients = [stack.enter_context(Wire(server.port)) for _ in range(count)]
        for i, client in enumerate(clients):
            client.send(raw_request(CHAT, chat_body(f"{name} {i}"), key=f"sk-{name}"))
            if i == 0:
                hold.wait()
        wait_for_inbox(server, count - 1)
        yield clients, hold


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.req("G8", "R37")
def test_concurrent_requests_are_limited_for_this_key_alone(server: Running) -> None:
    with waiting(server, "narrow", 2) as (clients, hold), Wire(server.port) as other:
        reply = chat(server, "narrow")
        assert_overloaded(reply)
        assert "'narrow': limit 2 concurrent requests" in reply.error["message"]
        assert int(reply.headers["retry-after-ms"]) >= 1
        other.send(raw_request(CHAT, chat_body(), key="sk-plain"))
        wait_for_inbox(server, 2)
        hold.release()
        assert [read(client).status for client in [*clients, other]] == [200] * 3
    server.wait_until_idle()
    assert usage(server, "narrow") | {"requests": 2, "refused": 1, "running": 0} == usage(server, "narrow")


@pytest.mark.req("G8")
def test_background_responses_are_on_their_key_s_account_until_they_end(server: Running) -> None:
    body = {"model": "fake", "input": "hi", "max_output_tokens": 4, "background": True}
    account = account_of(server, "narrow")
    before = account.totals.completion_tokens
    with held(server) as hold:
        names = [server.post("/v1/responses", body, key="sk-narrow").json()["id"] for _ in range(2)]
        hold.wait()
        assert account.totals.running == 2
        assert chat(server, "narrow").status == 429
        assert server.get(f"/v1/responses/{names[0]}", key="sk-narrow").json()["status"] == "queued"
    until(lambda: account.totals.running == 0)
    assert account.totals.completion_tokens == before + 8
    assert chat(server, "narrow").status == 200


@pytest.mark.req("G8")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["FIN", "RST", "cancel"])
def test_a_request_that_is_given_up_frees_its_place(server: Running, how: str, stream: bool) -> None:
    with held(server) as hold:
        clients = [Wire(server.port) for _ in range(2)]
        for i, client in enumerate(clients):
            body = chat_body(f"left {i}", stream=stream, max_tokens=4000)
            client.send(raw_request(CHAT, body, key="sk-narrow", headers=f"x-request-id: left-{i}\r\n"))
            if i == 0:
                hold.wait()
        wait_for_inbox(server, 1)
        assert chat(server, "narrow").status == 429
        for i, client in enumerate(clients):
            if how == "cancel":
                assert server.post(f"/v1/requests/left-{i}/cancel", None, key="sk-narrow").status == 200
            else:
                client.leave(how)
        account = account_of(server, "narrow")
        until(lambda: account.totals.running == 0)
        hold.release()
    for client in clients:
        client.socket.close()
    assert chat(server, "narrow").status == 200


@pytest.mark.req("G8")
def test_requests_per_minute(server: Running) -> None:
    with frozen(server, "paced"):
        replies = [chat(server, "paced") for _ in range(5)]
        server.wait_until_idle()
    assert [reply.status for reply in replies] == [200, 200, 200, 429, 429]
    assert [reply.headers["x-ratelimit-limit-requests"] for reply in replies] == ["3"] * 5
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["2", "1", "0", "0", "0"]
    assert "x-ratelimit-limit-tokens" not in replies[0].headers
    for reply in replies[3:]:
        assert_overloaded(reply)
        assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("20", "20000")
        assert reply.headers["x-ratelimit-reset-requests"] == "1m0s"
        assert "limit 3 requests per minute" in reply.error["message"]
    assert server.get("/v1/models", key="sk-paced").status == 200  # only what generates counts
    assert chat(server, "plain").status == 200


@pytest.mark.req("G8")
def test_other_apis_count_as_well_and_have_errors_of_their_own_shape(server: Running) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    anthropic = [server.post("/v1/messages", body, key="sk-other") for _ in range(3)]
    assert [reply.status for reply in anthropic] == [200, 200, 429]
    assert anthropic[2].json()["error"]["type"] == "rate_limit_error"
    ollama = server.post("/api/chat", body, key="sk-other")
    assert (ollama.status, type(ollama.json()["error"])) == (429, str)
    for reply in (anthropic[2], ollama):
        assert 20 <= int(reply.headers["retry-after"]) <= 30
        assert reply.headers["x-ratelimit-remaining-requests"] == "0"
    server.wait_until_idle()
    used = anthropic[0].json()["usage"]
    assert usage(server, "other")["prompt_tokens"] == 2 * used["input_tokens"]
    assert usage(server, "other")["completion_tokens"] == 2 * used["output_tokens"]


@pytest.mark.req("G8")
def test_tokens_per_minute(server: Running) -> None:
    """Admitted until they are used up; what a request was going to use and did not is given back."""
    with frozen(server, "frugal"):
        used_up(server)


def used_up(server: Running) -> None:
    first = chat(server, "frugal", max_tokens=30)
    used = first.json()["usage"]["total_tokens"]
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 100 - used
    server.wait_until_idle()
    second = chat(server, "frugal", max_tokens=100)
    assert second.status == 200
    server.wait_until_idle()
    third = chat(server, "frugal")
    assert_overloaded(third)
    total = used + second.json()["usage"]["total_tokens"]
    assert int(third.headers["retry-after"]) == math.ceil(0.6 * (total - 99))
    assert "limit 100 tokens per minute" in third.error["message"]
    assert usage(server, "frugal")["remaining"]["tokens_per_minute"] == 0


@pytest.mark.req("G8", "R15")
def test_queue_slots_and_rows_of_a_key(server: Running) -> None:
    """One runs and two wait; the queue has room for others."""
    with waiting(server, "slots", 5) as (clients, hold), Wire(server.port) as other:
        other.send(raw_request(CHAT, chat_body(), key="sk-plain"))
        wait_for_inbox(server, 5)
        hold.release()
        assert read(other).status == 200
        replies = [read(client) for client in clients]
    assert [reply.status for reply in replies] == [200, 200, 200, 429, 429]
    for reply in replies[3:]:
        assert_overloaded(reply)
        assert "of this API key are queued, its limit is 2" in reply.error["message"]
        assert int(reply.headers["x-queue-position"]) >= 1
    server.wait_until_idle()
    assert usage(server, "slots")["refused"] == 2


@pytest.mark.req("G8", "R37")
def test_a_key_that_floods_the_queue_gets_429_while_others_are_admitted(server: Running) -> None:
    with waiting(server, "plain", 30) as (flood, hold), ExitStack() as stack:
        others = [stack.enter_context(Wire(server.port)) for _ in range(3)]
        for client in others:
            client.send(raw_request(CHAT, chat_body(), key="sk-admin"))
        wait_for_inbox(server, 32)
        hold.release()
        assert [read(client).status for client in others] == [200] * 3
        replies = [read(client) for client in flood]
    refused = [reply for reply in replies if reply.status == 429]
    assert 30 - 4 - 8 <= len(refused) < 30 - 4
    waits = sorted(int(reply.headers["retry-after-ms"]) for reply in refused)
    assert all(wait >= 1 for wait in waits)


@pytest.mark.req("G8", "R36")
def test_sessions_and_their_bytes(server: Running) -> None:
    made = [server.post("/v1/sessions", {}, key="sk-keeper") for _ in range(3)]
    assert [reply.status for reply in made] == [201, 201, 429]
    assert "has 2 sessions, its limit is 2" in made[2].error["message"]
    name = made[0].json()["id"]
    assert server.post(f"/v1/sessions/{name}/fork", {}, key="sk-keeper").status == 429
    assert server.post(f"/v1/sessions/{name}/append", {"input": "hi"}, key="sk-keeper").status == 200
    assert usage(server, "keeper")["sessions"] == 2
    assert request(server.port, "DELETE", f"/v1/sessions/{name}", key="sk-keeper").status == 204
    name = server.post("/v1/sessions", {}, key="sk-keeper").json()["id"]
    small = server.post("/v1/sessions", {}, key="sk-small").json()["id"]
    assert server.post(f"/v1/sessions/{small}/append", {"input": "hi"}, key="sk-small").status == 429
    assert server.post("/v1/sessions", {}, key="sk-plain").status == 201


@pytest.mark.req("G8", "R36")
def test_session_bytes_are_divided_by_key() -> None:
    """A key that keeps all it can leaves room for others; alone, without other keys, it may use everything."""

    def fill(budget: LogBudget, key: str) -> int:
        """Bytes that a key can have, in sessions of 10."""
        for number in range(1000):
            try:
                budget.check(key, num_new=1)
            except Overloaded:
                return budget.used(key)[1]
            options = SimpleNamespace(key=key, is_kept=True)
            budget.set(cast("Session", SimpleNamespace(session_id=f"{key}{number}", options=options, num_bytes=10)))
        raise AssertionError("there was no end to it")

    shared = LogBudget(1000, lambda _: SessionQuota(is_shared=True))
    taken = [fill(shared, key) for key in ("hostile", "a", "b")]
    assert taken == [510, 250, 130]
    assert shared.total < 1000
    assert fill(LogBudget(1000, lambda _: SessionQuota()), "alone") == 1000


@pytest.mark.req("G8")
def test_stored_responses_are_divided_by_key(server: Running) -> None:
    """The server keeps three: those of the key that has most make room, and no other's."""

    def store(name: str, before: str | None = None) -> Reply:
        body = {"model": "fake", "input": "hi", "max_output_tokens": 4, "previous_response_id": before}
        return server.post("/v1/responses", body, key=f"sk-{name}")

    kept = store("plain").json()["id"]
    flood = [store("admin").json()["id"] for _ in range(5)]
    assert store("plain", kept).status == 200
    assert [store("admin", one).status for one in flood[:3]] == [400] * 3
    own = [store("keeper").json()["id"] for _ in range(3)]
    assert usage(server, "keeper")["stored_responses"] <= 2
    assert store("keeper", own[0]).error["code"] == "previous_response_not_found"


@pytest.mark.req("G8")
def test_stored_bytes_of_a_key(server: Running) -> None:
    """Conversations beyond its limit are refused, responses make room for them; those of other keys stay."""

    def keep(name: str, size: int) -> Reply:
        return server.post("/v1/conversations", {"items": [{"role": "user", "content": "x" * size}]}, key=f"sk-{name}")

    assert keep("plain", 5000).status == 200
    refused = keep("keeper", 5000)
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert "its limit is 4000" in refused.error["message"]
    assert keep("keeper", 2000).status == 200
    assert keep("keeper", 2000).status == 429
    assert usage(server, "keeper")["stored_bytes"] > 2000


@pytest.mark.req("R18")
def test_quotas_of_a_request_over_http(server: Running) -> None:
    """The key's context quota, and the request's own, which can only be smaller."""
    long = "x" * 80
    for name, changes in (("short", {}), ("plain", {"max_context": 64}), ("short", {"max_context": 2000})):
        reply = chat(server, name, content=long, **changes)
        assert reply.error["code"] == "context_length_exceeded", reply.body
    whole = chat(server, "short", max_tokens=None).json()
    assert whole["usage"]["total_tokens"] == 64
    assert whole["choices"][0]["finish_reason"] == "length"
    session = server.post("/v1/sessions", {}, key="sk-short").json()["id"]
    body = {"input": long, "stream": False}
    assert server.post(f"/v1/sessions/{session}/generate", body, key="sk-short").status == 400
    before = server.tick()
    assert chat(server, "plain", content=long, max_tokens_per_step=10, max_tokens=1).status == 200
    assert server.tick() - before >= 8
    assert chat(server, "plain", max_context=0).error["param"] == "max_context"


# -- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.req("G8")
def test_requests_are_counted_when_they_are_done(server: Running) -> None:
    """Until then the queue may refuse one, and a counter must not go down."""
    before = usage(server, "narrow")["requests"]
    with waiting(server, "narrow", 1) as (clients, hold):
        running = usage(server, "narrow")
        assert (running["running"], running["requests"]) == (1, before)
        hold.release()
        assert read(clients[0]).status == 200
    server.wait_until_idle()
    assert usage(server, "narrow")["requests"] == before + 1


@pytest.mark.req("G8")
def test_usage_is_that_of_the_key_and_an_admin_sees_all(server: Running) -> None:
    before = usage(server, "short")
    told = chat(server, "short").json()["usage"]
    server.wait_until_idle()
    after = usage(server, "short")
    assert after["prompt_tokens"] - before["prompt_tokens"] == told["prompt_tokens"]
    assert after["completion_tokens"] - before["completion_tokens"] == told["completion_tokens"]
    assert after["requests"] - before["requests"] == 1
    assert after["limits"] == {"max_context": 64}
    everybody = server.get("/v1/usage", key="sk-admin").json()
    assert {one["key"] for one in everybody["data"]} == set(KEYS)
    assert everybody["object"] == "list"
    text = server.get("/metrics", key="sk-admin").body.decode()
    for name in KEYS:
        assert f'tokenmill_key_requests_total{{admitted="yes",key="{name}"}}' in text
        assert f"sk-{name}" not in text
        assert hash_key(f"sk-{name}").hex()[:8] not in text
    assert f'tokenmill_key_tokens_total{{key="short",kind="prompt"}} {after["prompt_tokens"]:.1f}' in text


@pytest.mark.req("G8")
def test_an_answer_of_a_session_is_charged_once_whoever_reads_it(server: Running) -> None:
    """Also when its client has left, and when its stream is read again."""
    session = server.post("/v1/sessions", {}, key="sk-plain").json()["id"]
    before = usage(server, "plain")
    with held(server) as hold, Wire(server.port) as client:
        body = {"input": "hi", "max_tokens": 8, "ignore_eos": True}
        client.send(raw_request(f"/v1/sessions/{session}/generate", body, key="sk-plain"))
        hold.wait()
        client.leave("RST")
        account = account_of(server, "plain")
        until(lambda: account.totals.running == 0)
        hold.release()
        server.wait_until_idle()
    for _ in range(2):
        assert server.get(f"/v1/sessions/{session}/stream", key="sk-plain").status == 200
    assert usage(server, "plain")["completion_tokens"] - before["completion_tokens"] == 8


def test_a_server_without_keys_counts_everybody_as_one() -> None:
    llm = AsyncLLM(FakeModel(FakeConfig(vocab_size=258, max_context=4096)), kv_cache_tokens=8192)
    with running(llm, ServerConfig()) as server:
        reply = server.chat()
        assert "x-ratelimit-limit-requests" not in reply.headers
        assert reply.headers["x-queue-position"] == "0"
        server.wait_until_idle()
        (only,) = server.get("/v1/usage").json()["data"]
        assert (only["key"], only["requests"], only["limits"]) == ("anonymous", 1, {})
        assert only["completion_tokens"] == reply.json()["usage"]["completion_tokens"]


# -- the keys file ----------------------------------------------------------------------------------------------------


@pytest.mark.req("R37")
def test_a_key_that_has_expired_is_none(server: Running, tmp_path: Path) -> None:
    assert server.get("/v1/models", key="sk-expired").error["code"] == "invalid_api_key"
    now = [1000.0]
    file = keys_file(tmp_path / "keys.json", {"one": {"expires": "1970-01-01T00:16:41"}})
    keys = KeyRing(ServerConfig(keys_file=file), wall_clock=lambda: now[0])
    assert keys.find(b"sk-one") is not None
    now[0] = 1001.0
    assert keys.find(b"sk-one") is None


BAD_FILES: dict[str, tuple[dict[str, Any] | str, str]] = {
    "no JSON": ("{", "is not valid JSON"),
    "no object": ("[]", "must be a list of tables"),
    "a strange table": ({"keys": []}, "unknown keys; supported"),
    "a strange setting": ({"key": [{"name": "a", "sha256": "0" * 64, "rpm": 1}]}, "key 'a': unknown rpm"),
    "no name": ({"key": [{"sha256": "0" * 64}]}, "name must be"),
    "a name for a label": ({"key": [{"name": 'a"}', "sha256": "0" * 64}]}, "name must be"),
    "a key in the clear": ({"key": [{"name": "a", "sha256": "sk-secret"}]}, "64 hexadecimal digits"),
    "a limit of 0": ({"limits": {"sessions": 0}}, "sessions must be a positive integer, not 0"),
    "a limit that is true": ({"limits": {"sessions": True}}, "sessions must be a positive integer"),
    "a bad time": ({"key": [{"name": "a", "sha256": "0" * 64, "expires": "soon"}]}, "expires must be a date"),
    "a name twice": ({"key": [{"name": "a", "sha256": c * 64} for c in "01"]}, "keys a have the same name"),
    "a key twice": ({"key": [{"name": n, "sha256": "0" * 64} for n in "ab"]}, "keys a, b have the same sha256"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_what_is_wrong_with_a_keys_file(tmp_path: Path, name: str) -> None:
    content, message = BAD_FILES[name]
    file = tmp_path / "keys.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=message) as found:
        read_keys(file)
    assert "sk-secret" not in str(found.value)


def test_a_keys_file_is_toml_with_defaults_that_keys_may_change(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        f"""
        [limits]
        requests_per_minute = 60
        sessions = 5
        [[key]]
        name = "one"
        sha256 = "{"ab" * 32}"
        expires = 2027-01-01
        sessions = 9
        """
    )
    (key,) = read_keys(file).keys
    assert key.limits == KeyLimits(requests_per_minute=60, sessions=9)
    assert key.expires_at == 1798761600
    own = KeyRing(ServerConfig(key_hashes=(hash_key("x"),), keys_file=file)).find(b"x")
    assert own is not None
    assert (own.key.name, own.key.limits.sessions) == ("api-key-1", 5)


@pytest.mark.req("R37", "G8")
def test_the_keys_file_is_read_again_on_sighup(tmp_path: Path) -> None:
    """New keys come in, removed ones do not, limits change; a file that is wrong changes nothing. No restart."""
    file = keys_file(tmp_path / "keys.json", {"old": {}, "stays": {}})
    with child(tmp_path / "log", "fake", "--keys-file", str(file)) as served:

        def status(key: str) -> int:
            return request(served.port, "GET", "/v1/models", key=key).status

        def reload(said: str) -> None:
            os.kill(served.process.pid, signal.SIGHUP)
            until(lambda: said in served.said())

        assert [status(f"sk-{name}") for name in ("old", "stays", "new")] == [200, 200, 401]
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert request(served.port, "POST", CHAT, body, key="sk-stays").status == 200
        keys_file(file, {"stays": {"requests_per_minute": 1}, "new": {}})
        reload("read 2 keys")
        assert [status(f"sk-{name}") for name in ("old", "stays", "new")] == [401, 200, 200]
        assert request(served.port, "POST", CHAT, body, key="sk-stays").status == 200
        assert request(served.port, "POST", CHAT, body, key="sk-stays").status == 429
        (own,) = request(served.port, "GET", "/v1/usage", key="sk-stays").json()["data"]
        assert (own["requests"], own["refused"]) == (2, 1)
        file.write_text("{")
        reload("the keys are unchanged")
        assert [status(f"sk-{name}") for name in ("old", "stays", "new")] == [401, 200, 200]
        assert served.stop() == 0


def test_keys_that_are_in_use_keep_their_account(tmp_path: Path) -> None:
    now = [0.0]
    file = keys_file(tmp_path / "keys.json", {"one": {"requests_per_minute": 10}})
    keys = KeyRing(ServerConfig(keys_file=file), clock=lambda: now[0])
    account = keys.find(b"sk-one")
    assert account is not None
    assert all(account.admit() is None for _ in range(4))
    keys_file(file, {"one": {"requests_per_minute": 5}})
    keys.reload()
    assert keys.find(b"sk-one") is account
    assert account.remaining()["requests_per_minute"] == 1  # what was taken stays taken
    keys_file(file, {})
    keys.reload()
    assert keys.find(b"sk-one") is None
    account.leave(200, 0)  # what runs goes on


# -- rates ------------------------------------------------------------------------------------------------------------


@pytest.mark.req("G8")
@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 5)), max_size=60),
)
@settings(max_examples=100, deadline=None)
def test_a_rate_limit_holds_over_every_interval(per_minute: int, arrivals: list[tuple[float, int]]) -> None:
    """In t minutes at most (t + 1) times the limit; who waits as told is admitted, who comes much earlier is not."""
    now, admitted = 0.0, []
    key = ApiKey(name="x", sha256=b"", limits=KeyLimits(requests_per_minute=per_minute))
    account = Account(key, Everybody(), lambda: now)
    for pause, count in arrivals:
        now += pause
        for _ in range(count):
            refusal = account.admit()
            if refusal is None:
                admitted.append(now)
                account.leave(200, 0)
                continue
            wait_s = int(refusal.headers["retry-after-ms"]) / 1000
            assert int(refusal.headers["Retry-After"]) == max(1, math.ceil(wait_s)) or wait_s <= 0.002
            twin = Bucket(per_minute, now)
            twin.take(per_minute - account._requests.level(now), now)  # type: ignore[union-attr]
            assert twin.level(now + wait_s + 1e-6) >= 1
            assert twin.level(now) < 1
    for i, first in enumerate(admitted):
        for j in range(i, len(admitted)):
            assert j - i + 1 <= per_minute * (1 + (admitted[j] - first) / 60) + 1e-6


@pytest.mark.req("G8")
@pytest.mark.parametrize("service_s", [0.4, 1.7, 5.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_retry_after_is_near_the_true_value(service_s: float, batch: int) -> None:
    """A key with `batch` rows and as many slots, and five times as many clients, which come again when told.

    The true value for a refused client: when as many have been admitted as wait before it, and itself. Simulated time.
    """
    now, places = 0.0, 2 * batch
    account = Account(ApiKey(name="x", sha256=b""), Everybody(), lambda: now)
    due = [(0.001 * i, i) for i in range(5 * places)]
    ends: list[float] = []
    """When those that were admitted are done: a row is free for each when the `batch`-th before it is."""
    refused: list[tuple[float, float, int]] = []
    admitted: list[float] = []
    waiting_clients: set[int] = set()
    while now < 60 * service_s:
        due.sort()
        now = due[0][0]
        if ends and ends[0] <= now:
            now = ends.pop(0)
            account.leave(200, 0)
            continue
        _, client = due.pop(0)
        assert account.admit() is None
        if len(ends) < places:
            ends.append((now if len(ends) < batch else ends[-batch]) + service_s)
            admitted.append(now)
            waiting_clients.discard(client)
            due.append((ends[-1] + 0.001, client))  # it asks again when it has its answer
        else:
            account.leave(429, 0)
            wait_s = account.retry_s()
            waiting_clients.add(client)
            refused.append((now, wait_s, len(waiting_clients)))
            due.append((now + wait_s, client))
    settled = [one for one in refused if 5 * service_s < one[0] < 40 * service_s]
    assert len(settled) > 20
    good = 0
    for at, wait_s, ahead in settled:
        later = [time for time in admitted if time > at]
        true_s = later[ahead - 1] - at if len(later) >= ahead else math.inf
        good += true_s / 2 <= wait_s <= 2 * true_s
    assert good >= 0.9 * len(settled), (good, len(settled))


def test_retry_after_is_bounded_and_starts_from_what_is_known() -> None:
    now = 0.0
    everybody = Everybody()
    account = Account(ApiKey(name="x", sha256=b""), everybody, lambda: now)
    assert account.admit() is None
    assert account.retry_s() == account.retry_s() == FIRST_RETRY_S
    everybody.note(0.0, 1)  # another key
    for now in (3.0, 6.0, 9.0):
        everybody.note(now, is_done=True)
    assert account.retry_s() == pytest.approx(6.0)  # nothing of its own is done yet: its share of what others have done
    for _ in range(100):
        assert 0 < account.retry_s() <= MAX_RETRY_S
    assert account.num_refused_ahead() == 10


def test_tokens_that_are_used_are_those_of_the_right_key() -> None:
    limits = KeyLimits(tokens_per_minute=100)
    one, other = (Account(ApiKey(name=name, sha256=b"", limits=limits), Everybody(), lambda: 0.0) for name in "ab")
    assert one.admit() is None
    assert one.reserve(150) == 150
    assert one.admit() is not None  # what it is going to use is taken already
    assert other.admit() is None
    one.charge(Usage(30, 10, 0))
    one.leave(200, 150)
    assert one.remaining() == {"tokens_per_minute": 60}
    assert other.remaining() == {"tokens_per_minute": 100}


def test_durations_are_written_as_openai_does() -> None:
    assert [duration(one) for one in (0, 0.12, 1.5, 59, 60, 361.2)] == ["0ms", "120ms", "1.5s", "59s", "1m0s", "6m2s"]


# -- bugs that are caught ---------------------------------------------------------------------------------------------

BUGS = [
    (PlantedBug("no limit", Account, "admit", "self._requests.level(now) < 1", "False"), test_requests_per_minute),
    (PlantedBug("one account for all", KeyRing, "find", "self._accounts[known]", "next(iter(self._accounts.values()))"),
     test_usage_is_that_of_the_key_and_an_admin_sees_all),
    (PlantedBug("everybody sees all", operations, "engine_routes", "own.key.is_admin", "True"),
     test_usage_is_that_of_the_key_and_an_admin_sees_all),
    (PlantedBug("what runs in the background is free", Background, "start", "caller.is_left_to_task = True", "pass"),
     test_background_responses_are_on_their_key_s_account_until_they_end),
    (PlantedBug("a place is not freed", Account, "leave", "self.totals.running -= 1", "pass"),
     lambda server: test_a_request_that_is_given_up_frees_its_place(server, "FIN", stream=True)),
    (PlantedBug("what a client that left has used is not charged", sessions, "charge_for",
                "live.on_usage = caller.account.charge", "pass"),
     test_an_answer_of_a_session_is_charged_once_whoever_reads_it),
    (PlantedBug("queue slots of all keys together", WaitingQueue, "take_slot",
                "self._usage.take_slot(share, None if most is None else most + num_free_rows)",
                'self._usage.take_slot("", None if most is None else most + num_free_rows)'),
     lambda server: flood_then_slots(server)),
    (PlantedBug("the first key loses its responses", documents, "_make_room",
                "_oldest(connection, whose, evictable & set(kinds), (kind, document.id), most_of)",
                "connection.execute('SELECT kind, id FROM documents ORDER BY rowid').fetchone()"),
     test_stored_responses_are_divided_by_key),
    (PlantedBug("refused requests are not", Account, "leave", "status == 429", "False"),
     test_queue_slots_and_rows_of_a_key),
]  # fmt: skip


def flood_then_slots(server: Running) -> None:
    """Requests of another key in the queue are not counted as those of a key with few slots."""
    with waiting(server, "plain", 9) as (clients, hold), Wire(server.port) as other:
        other.send(raw_request(CHAT, chat_body(), key="sk-slots"))
        wait_for_inbox(server, 9)
        hold.release()
        assert read(other).status == 200
        assert [read(client).status for client in clients] == [200] * 9


@pytest.mark.parametrize(("bug", "check"), BUGS, ids=[bug.name for bug, _ in BUGS])
def test_a_planted_bug_is_caught(
    bug: PlantedBug, check: Callable[[Running], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.server.wire.PATIENCE_S", 0.5)
    plant(bug, monkeypatch)
    with serving(tmp_path) as server:
        try:
            check(server)
        except (AssertionError, ValueError):
            return
        finally:
            cancel_all(server)
    pytest.fail(f"{bug.name} was not noticed")
