"""A server whose engine runs in a process of its own: what clients see of it, above all when it is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.server.conversing import Conversation, converse
from tests.server.serving import KEY, Running, running
from tests.server.wire import LONG, Wire, chat_request, until
from tokenmill import AsyncLLM
from tokenmill.entrypoints.process import ProcessClient
from tokenmill.server.config import ServerConfig, hash_key

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("TOKENMILL_KILLS", "2"))
"""How often the engine process is killed; more with the environment variable."""
NUM_STREAMS = 6
HEARD_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def remote() -> Iterator[Running]:
    options: dict[str, Any] = {"vocab_size": 258, "max_context": 8192, "depth": 1}
    llm = AsyncLLM("fake", engine="process", extra=options, max_num_seqs=16, kv_cache_tokens=65_536)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as one:
        yield one


def client_of(server: Running) -> ProcessClient:
    client = server.llm.client
    assert isinstance(client, ProcessClient)
    return client


def kill(server: Running) -> None:
    """Kill the engine process, and wait until another one has been started."""
    client = client_of(server)
    dead = client.process
    os.kill(dead.pid, signal.SIGKILL)
    until(lambda: client.process is not dead)


def wait_until_ready(server: Running) -> None:
    until(lambda: server.get("/health/ready").status == 200)


@pytest.mark.fault("L03")
@pytest.mark.req("R32", "G18")
def test_an_engine_process_killed_mid_stream_is_one_error_for_each_client(remote: Running) -> None:
    talk = converse(remote)
    talk.ask("remember this")
    for turn in range(KILLS):
        wait_until_ready(remote)
        with ExitStack() as stack:
            streams = [stack.enter_context(Wire(remote.port)) for _ in range(NUM_STREAMS)]
            for stream in streams:
                stream.send(chat_request(stream=True, max_tokens=LONG))
            for stream in streams:
                stream.first_id()
            killed_at = time.monotonic()
            kill(remote)
            for stream in streams:
                reply = stream.read_reply()
                assert reply is not None
                errors = [event for event in reply.events() if "error" in event]
                assert [error["error"]["type"] for error in errors] == ["server_error"]
            assert time.monotonic() - killed_at < HEARD_WITHIN_S * max(1.0, os.getloadavg()[0])
        wait_until_ready(remote)
        assert remote.chat(max_tokens=3).status == 200
        assert talk.ask(f"turn {turn}")["finish_reason"] == "length"
    assert len(talk.turns()) == 2 * (1 + KILLS)
    until(lambda: remote.served.gate.num_inside == 0)  # the last request leaves after its client has the answer


@pytest.mark.fault("P04")
@pytest.mark.req("R32")
def test_a_session_whose_engine_was_killed_says_what_it_would_have_said(remote: Running) -> None:
    def said(*, killed: bool) -> list[str]:
        talk: Conversation = converse(remote, system="be brief")
        talk.ask("one")
        if killed:
            kill(remote)
            wait_until_ready(remote)
        talk.ask("two")
        return talk.said()

    assert said(killed=True) == said(killed=False)


@pytest.mark.req("R32")
def test_requests_while_there_is_no_engine_get_503(remote: Running) -> None:
    wait_until_ready(remote)
    kill(remote)
    reply = remote.chat()
    assert reply.status in (200, 503)  # it may be back already
    if reply.status == 503:
        assert reply.error["type"] == "server_error"
    wait_until_ready(remote)
    assert remote.chat().status == 200


@pytest.mark.req("R32", "R42")
def test_telemetry_comes_from_the_engine_process(remote: Running) -> None:
    wait_until_ready(remote)
    reply = remote.chat(max_tokens=5)
    assert reply.status == 200
    text = remote.get("/metrics").body.decode()
    values = [float(line.split()[-1]) for line in text.splitlines() if "tokenmill_generated_tokens_total{" in line]
    assert sum(values) >= 5
    timeline = remote.get(f"/v1/requests/{reply.json()['id']}/timeline")
    assert timeline.status == 200, timeline.body
    (snapshot,) = remote.get("/v1/scheduler").json()["models"][0]["cores"]
    assert all(slot["state"] == "idle" for slot in snapshot["slots"])
