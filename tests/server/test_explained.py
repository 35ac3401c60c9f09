"""Where the time of a request went, and why: each cause is brought about, over real sockets, and named."""

from __future__ import annotations

import http.client
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.server.conversing import Conversation, converse
from tests.server.queueing import read
from tests.server.serving import KEY, Reply, Running, running
from tests.server.telling import CHAT, OTHER_KEY, make_config, make_llm
from tests.server.wire import Wire, chat_request, held, until, wait_for_inbox
from tokenmill.session import persistence

PARTS = {
    "received", "queued", "prefill", "neighbours_prefill", "decode", "preempted", "delivery", "client_blocked",
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(make_llm(max_num_seqs=2, max_queue=2), make_config()) as one:
        yield one


def generation(server: Running, name: str, **options: Any) -> dict[str, Any]:
    reply = server.get(f"/v1/requests/{name}/timeline", **options)
    assert reply.status == 200, reply.body
    (one,) = reply.json()["generations"]
    assert set(one["parts"]) == PARTS
    assert all(seconds >= 0 for seconds in one["parts"].values())
    return dict(one)


def causes(one: dict[str, Any]) -> list[str]:
    return [cause["cause"] for cause in one["causes"]]


def chat(server: Running, messages: list[tuple[str, str]], name: str, **options: Any) -> Reply:
    said = [{"role": role, "content": content} for role, content in messages]
    body = {"model": "fake", "messages": said, "max_tokens": 4, "ignore_eos": True, "temperature": 0, **options}
    return server.post(CHAT, body, headers={"x-request-id": name})


@pytest.mark.req("B4")
def test_an_edited_system_prompt_is_named_with_both_texts(server: Running) -> None:
    question = ("user", "what is the capital of Japan?")
    chat(server, [("system", "You answer in one short sentence."), question], "first")
    chat(server, [("system", "You answer in one long paragraph."), question], "edited")
    cache = generation(server, "edited")["cache"]
    assert cache["cause"] == "changed"
    assert (cache["difference"]["message"], cache["difference"]["role"]) == (0, "system")
    assert cache["difference"]["before"].startswith("short sentence")
    assert cache["difference"]["now"].startswith("long paragraph")
    assert cache["cached_tokens"] == cache["difference"]["token"] == len("system: You answer in one ")
    chat(server, [("system", "You answer in one short sentence."), ("user", "who is it?")], "other question")
    # The same system prompt: what differs is the question.
    named = server.post(CHAT, {"model": "fake", "messages": [
        {"role": "system", "content": "You answer in one short sentence."}, {"role": "user", "content": "why?"},
    ], "max_tokens": 2}, headers={"x-request-id": "third"})  # fmt: skip
    assert named.status == 200
    assert generation(server, "third")["cache"]["difference"]["role"] == "user"


@pytest.mark.req("B4")
def test_a_long_neighbour_is_named() -> None:
    """Its prompt is computed in the steps that another one decodes in."""
    with running(make_llm(max_num_seqs=2, prefill_chunk=64, max_num_batched_tokens=128), make_config()) as server:
        backend = server.core.core._executor.backend
        launch = backend._launched

        def slow(step: Any) -> None:
            launch(step)
            time.sleep(0.001 * step.num_tokens)  # as a model would: by the token, and more than all else takes

        begin = backend._begin

        def noting(batch: Any, number: int) -> Any:
            step = begin(batch, number)
            step.num_tokens = len(batch)
            return step

        backend._launched, backend._begin = slow, noting
        with ThreadPoolExecutor() as pool, held(server, after=4) as hold:
            talking = pool.submit(chat, server, [("user", "short")], "talks", max_tokens=60)
            hold.wait()
            long = pool.submit(chat, server, [("user", "long " * 400)], "long", max_tokens=2)
            wait_for_inbox(server)
            hold.release()
            assert (talking.result().status, long.result().status) == (200, 200)
        one = generation(server, "talks")
        assert causes(one)[0] == "long_neighbour"
        assert "long_neighbour" not in causes(generation(server, "long")), "its prompt is its own"


@pytest.mark.req("B4")
def test_a_queue_is_named_and_a_full_one_is_refused(server: Running) -> None:
    with held(server, after=2) as hold:
        clients = [Wire(server.port) for _ in range(4)]
        for i, client in enumerate(clients):
            client.send(chat_request(f"{i}", headers=f"x-request-id: q{i}\r\n", max_tokens=20))
            if i == 0:
                hold.wait()
            wait_for_inbox(server, i)
        hold.release()
        refused = [read(client).status for client in clients]
        for client in clients:
            client.socket.close()
    assert 200 in refused
    waited = [generation(server, f"q{i}") for i in range(4)]
    assert "queue" in [cause for one in waited for cause in causes(one)]
    with held(server, after=2) as hold:
        clients = [Wire(server.port) for _ in range(6)]
        for i, client in enumerate(clients):
            client.send(chat_request(f"{i}", headers=f"x-request-id: f{i}\r\n", max_tokens=20))
            if i == 0:
                hold.wait()
            wait_for_inbox(server, i)
        hold.release()
        statuses = [read(client).status for client in clients]
        for client in clients:
            client.socket.close()
    assert 429 in statuses
    full = generation(server, f"f{statuses.index(429)}")
    assert causes(full) == ["queue_full"]
    assert "waited" in full["causes"][0]["why"]


@pytest.mark.req("B4")
def test_a_slow_reader_is_named() -> None:
    with running(make_llm(), make_config(send_timeout_s=30), send_buffer=4096) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        asked = {"max_tokens": 400, "stream": True, "logprobs": True, "top_logprobs": 20}
        began = time.monotonic()
        connection.sendall(chat_request(headers="x-request-id: slow\r\n", **asked))
        while (told := server.get("/v1/requests/slow/timeline")).status != 200:
            pass
        while told.json()["generations"][0]["finish_reason"] is None:
            told = server.get("/v1/requests/slow/timeline")
        ended = time.monotonic()
        while time.monotonic() < ended + max(0.5, ended - began):  # the answer is complete, and nobody takes it
            assert told.json()["generations"][0]["parts"]["client_blocked"] == 0, "it is not over"
        read_all = b""
        while not read_all.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            read_all = (read_all + connection.recv(1 << 16))[-64:]
        connection.close()
        server.wait_until_idle()
        one = generation(server, "slow")
        assert one["parts"]["client_blocked"] > 0.3
        assert "slow_reader" in causes(one)


@pytest.mark.req("B4")
def test_an_eviction_is_named_without_the_others_name() -> None:
    with running(make_llm(context=512, kv_cache_tokens=600), make_config()) as server:
        talk = converse(server)
        talk.ask("words " * 30)
        other = converse(server, OTHER_KEY)
        other.ask("x" * 380)
        answer = talk.ask("more")
        told = talk.get("explain").json()
        assert told["object"] == "session.explanation"
        first, last = told["turns"]
        assert (first["cause"], last["cause"], last["id"]) == ("first_turn", "evicted", answer["id"])
        assert last["evicted"]["seconds_before"] >= 0
        assert len(last["evicted"]["for"]) == 8, "of another key: a hash"
        assert last["prefilled_tokens"] == last["prompt_tokens"] - last["cached_tokens"]
        cache = generation(server, answer["id"])["cache"]
        answers = ("id", "proposed_tokens", "accepted_tokens")
        assert cache == {name: value for name, value in last.items() if name not in answers}
        assert Conversation(server, talk.id, OTHER_KEY).get("explain").status == 404


@pytest.mark.req("B4")
def test_a_restart_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistence, "MIN_KV_TOKENS", 10_000)
    config = make_config(store=tmp_path)
    with running(make_llm(), config) as server:
        talk = converse(server)
        talk.ask("words " * 20)
    with running(make_llm(), config) as server:
        again = Conversation(server, talk.id)
        again.ask("more")
        assert [turn["cause"] for turn in again.get("explain").json()["turns"]] == ["restart"]


@pytest.mark.req("B4")
def test_parts_sum_to_the_wall_time_of_500_mixed_requests(caplog: pytest.LogCaptureFixture) -> None:
    """Of each as the log has it; of all together as whoever sends them measures it."""
    chance = random.Random(4)
    caplog.set_level(logging.INFO, "tokenmill.access")
    with running(make_llm(max_num_seqs=8, max_queue=64, kv_cache_tokens=8192), make_config()) as server:
        backend = server.core.core._executor.backend
        launch = backend._launched

        def slow(step: Any) -> None:
            launch(step)
            time.sleep(0.004)

        backend._launched = slow
        talks = [converse(server) for _ in range(4)]
        locks = [threading.Lock() for _ in talks]

        def send(number: int, kind: int, size: int) -> tuple[str, float]:
            name = f"mixed-{number}"
            headers = {"x-request-id": name, "Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            body: dict[str, Any] = {"model": "fake", "max_tokens": 8 + size % 24, "ignore_eos": True, "temperature": 0}
            path = CHAT
            if kind < 6:
                body |= {"messages": [{"role": "user", "content": f"{number} " + "w " * size}], "stream": kind % 2 == 0}
            elif kind < 8:
                path = "/v1/completions"
                body |= {"prompt": f"{number}" + "p " * size, "stream": kind == 7}
            else:
                place = number % len(talks)
                path = f"{talks[place].path}/generate"
                body = {"input": f"{number}", "stream": kind == 8, "max_tokens": 8}
            lock = locks[number % len(talks)] if kind >= 8 else threading.Lock()
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            connection.connect()
            with lock:
                began = time.monotonic()
                connection.request("POST", path, json.dumps(body), headers)
                answer = connection.getresponse()
                answer.read()
                seconds = time.monotonic() - began
            connection.close()
            assert answer.status == 200
            return name, seconds

        with ThreadPoolExecutor(8) as pool:
            given = [(i, chance.randrange(10), chance.randrange(200)) for i in range(500)]
            measured = list(pool.map(lambda one: send(*one), given))

        def logged_s() -> dict[str, float]:
            return {one.request["id"]: one.request["ms"] / 1000 for one in caplog.records if hasattr(one, "request")}

        until(lambda: {name for name, _ in measured} <= logged_s().keys())
        logged = logged_s()
        total = 0.0
        for name, _ in measured:
            told = sum(generation(server, name)["parts"].values())
            assert told == pytest.approx(logged[name], rel=0.02)
            total += told
        # Those who measure from outside have to share an interpreter with the server here.
        assert total == pytest.approx(sum(seconds for _, seconds in measured), rel=0.05)
