"""L02, L12, N04, E10: an engine that fails, a clock that jumps, a storm of cancellations, one row of NaN."""

from __future__ import annotations

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import tokenmill
from tests.server.network import ask
from tests.server.serving import KEY, WAIT_S, Reply, Running, running
from tests.server.wire import LONG, Wire, chat_body, chat_request, until
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel, FaultKind
from tokenmill.server.config import ServerConfig, hash_key

CHAT = "/v1/chat/completions"
NUM_STORM = 200
STEPPED_S = 1e6
"""By which the clock is set."""
FOR_STAMPS = {
    "backends/huggingface.py",
    "bench/report.py",
    "bench/serve.py",
    "cli/keys.py",
    "server/api/conversations.py",
    "server/api/operations.py",
    "server/api/ollama.py",
    "server/api/responses.py",
    "server/batch_runner.py",
    "server/keys.py",
    "server/served.py",
    "server/stored_files.py",
    "server/streaming.py",
    "server/telemetry/timeline.py",
    "session/documents.py",
    "session/manager.py",
    "session/records.py",
    "session/session.py",
    "session/store.py",
    "text/environment.py",
}
"""Modules that may ask for the time of day: for what users are shown, and for files that outlive a process."""


def test_l02_a_fatal_failure_is_one_error_for_everybody(server: Running) -> None:
    """Three streams, one that waits for its whole answer, and two in the queue: the server has four rows."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Wire(server.port)) for _ in range(6)]
        for number, client in enumerate(clients):
            client.send(chat_request(stream=number != 3, max_tokens=LONG))
            until(lambda count=number + 1: num_inside(server) == count)
        server.inject(FaultKind.FATAL)
        ends = [outcome(client.read_reply()) for client in clients]
    assert ends == ["server_error"] * 6
    until(lambda: server.get("/health/ready").status == 200)
    assert ask(server)


@pytest.mark.req("G13")
def test_l02_an_engine_that_fails_again_and_again_is_given_up_and_reported() -> None:
    """A fourth time within ten minutes: only a restart of the server helps, and a service manager can see that."""
    llm = AsyncLLM(FakeModel(FakeConfig(vocab_size=258, max_context=256)), kv_cache_tokens=1024)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as server:
        for _ in range(4):
            assert server.get("/health/live").status == 200
            server.inject(FaultKind.FATAL)
            assert server.chat().status == 500
        refused = server.chat()
        assert (refused.status, refused.error["code"]) == (503, "engine_dead")
        assert server.get("/health/ready").status == 503
        live = server.get("/health/live")
        assert (live.status, live.json()) == (503, {"status": "engine lost"})
        assert llm._client.stats() == [None]


def num_inside(server: Running) -> int:
    stats = server.core.call(lambda core: core.stats()).result(WAIT_S)
    return int(stats.num_running + stats.num_waiting)


def outcome(reply: Reply | None) -> str:
    """The one error that an answer is, or ends with."""
    assert reply is not None
    if reply.headers["content-type"] == "application/json":
        assert reply.status == 500
        return str(reply.error["type"])
    errors = [event["error"]["type"] for event in reply.events() if "error" in event]
    assert len(errors) == 1
    return str(errors[0])


def test_l12_a_clock_that_jumps_ends_nothing(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    now, jumps = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: now() + STEPPED_S * (next(jumps) % 3 - 1))
    assert server.chat(max_tokens=20, timeout_s=WAIT_S).status == 200
    stream = server.chat(max_tokens=20, stream=True)
    assert stream.events()[-1]["choices"][0]["finish_reason"]
    assert server.get("/health/ready").status == 200


def test_l12_nothing_but_stamps_goes_by_the_time_of_day() -> None:
    package = Path(tokenmill.__file__).parent
    texts = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    found = {name for name, text in texts.items() if re.search(r"\b(time\.time|datetime\.now)\(", text)}
    assert found <= FOR_STAMPS, found - FOR_STAMPS


def test_n04_a_storm_of_cancellations_leaves_nothing(server: Running) -> None:
    """More than fit into rows and queue, each given up at another moment; then all rows, KV and memory are free."""
    expected = ask(server)

    def leave(number: int) -> None:
        with Wire(server.port) as client:
            client.send(
                chat_request(
                    "storm " * (number % 7 + 1), stream=number % 2 == 0, max_tokens=4 if number % 4 == 2 else LONG
                )
            )
            if number % 4 == 0:  # an answer, or 429
                client.read_head()
            client.leave("RST" if number % 3 else "FIN")

    leave(0)
    server.wait_until_idle()
    before, num_threads = resident_bytes(), threading.active_count()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(NUM_STORM)))
    began = time.monotonic()
    assert ask(server) == expected
    assert time.monotonic() - began < WAIT_S
    server.wait_until_idle()
    assert resident_bytes() - before < 64 << 20
    assert threading.active_count() <= num_threads + 16


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_e10_one_row_without_numbers_fails_alone(server: Running) -> None:
    texts = [f"row {letter}" for letter in "abcd"]
    expected = [ask(server, content=text) for text in texts]
    hold = server.inject(FaultKind.STALL)
    nan = server.inject(FaultKind.NAN, token=ord("~"), times=None)
    with ThreadPoolExecutor(5) as pool:
        bad = pool.submit(server.post, CHAT, chat_body("row ~"))
        assert hold.stalled.wait(WAIT_S)
        good = [pool.submit(ask, server, content=text) for text in texts[:3]]
        hold.release.set()
        assert bad.result(WAIT_S).status == 500
        assert [one.result(WAIT_S) for one in good] == expected[:3]
    server.core.call(lambda core: core._executor.backend.faults.remove(nan)).result(WAIT_S)
    assert ask(server, content=texts[3]) == expected[3]
