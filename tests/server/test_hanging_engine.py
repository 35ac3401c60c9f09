"""L04: a step that never returns. Clients hear of it, the server reports it, and an engine process is replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.conversing import converse
from tests.server.serving import KEY, Reply, Running, child, raw_request, request, running
from tests.server.wire import LONG, Wire, until
from tokenmill import AsyncLLM
from tokenmill.entrypoints import async_llm
from tokenmill.server.app import EXIT_HUNG
from tokenmill.server.config import ServerConfig, hash_key

HANG_S = 2.0
UNREADY_AFTER_S = 0.5
"""In place of the 5 s of docs/operations.md."""
NUM_STREAMS = 4
OPTIONS: dict[str, Any] = {"vocab_size": 258, "max_context": 8192, "depth": 1}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _unready_early(monkeypatch: pytest.MonkeyPatch) -> None:
    assert async_llm.HANGS_AFTER_S == 5.0
    monkeypatch.setattr(async_llm, "HANGS_AFTER_S", UNREADY_AFTER_S)


@contextmanager
def hanging(tmp_path: Path, engine: str, *, holds_gil: bool = False) -> Iterator[tuple[Running, Path]]:
    """A server whose engine hangs in the next step once the file exists; a step that does so removes it first."""
    file = tmp_path / "hang"
    extra = {**OPTIONS, "hang_file": str(file), "hang_holds_gil": holds_gil}
    llm = AsyncLLM("fake", engine=engine, extra=extra, hang_timeout_s=HANG_S, max_num_seqs=16, kv_cache_tokens=65_536)
    with running(llm, ServerConfig(key_hashes=(hash_key(KEY),))) as server:
        yield server, file


def chat(content: str = "hi", **changes: Any) -> bytes:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": LONG, **GREEDY, **changes}
    return raw_request("/v1/chat/completions", body)


def within(began: float, limit_s: float) -> bool:
    """Was it in time, on a machine that may have more to do?"""
    return time.monotonic() - began < limit_s * max(1.0, os.getloadavg()[0])


def read(client: Wire) -> Reply:
    reply = client.read_reply()
    assert reply is not None
    return reply


def assert_one_error(reply: Reply, code: str) -> None:
    errors = [event["error"]["code"] for event in reply.events() if "error" in event]
    assert errors == [code]


def hang_under_load(server: Running, file: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Streams that run, a request with a timeout of its own, and one that comes later: each is told once, in time.

    Readiness fails a second after its limit at the latest, before the hang is given up.
    """
    with ExitStack() as stack:
        streams = [stack.enter_context(Wire(server.port)) for _ in range(NUM_STREAMS)]
        hasty, later = (stack.enter_context(Wire(server.port)) for _ in range(2))
        for stream in streams:
            stream.send(chat(stream=True))
        for stream in streams:
            stream.first_id()
        file.touch()
        until(lambda: not file.exists())  # from here on no step returns
        began = time.monotonic()
        hasty.send(chat("hasty", timeout_s=0.2))
        later.send(chat("later"))
        meanwhile()
        assert read(hasty).error["code"] == "timeout"
        assert within(began, 0.2 + 0.5)
        until(lambda: server.get("/health/ready").status == 503)
        assert within(began, UNREADY_AFTER_S + 1)
        for stream in streams:
            assert_one_error(read(stream), "error")
        assert read(later).status == 500
        assert within(began, HANG_S + 2)


@pytest.mark.slow
@pytest.mark.req("G13", "R35")
def test_l04_a_hanging_engine_thread_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hanging(tmp_path, "thread") as (server, file):
        assert server.get("/health/live").json() == {"status": "live"}
        hang_under_load(server, file)
        assert server.get("/health/ready").status == 503
        live = server.get("/health/live")
        assert (live.status, live.json()) == (503, {"status": "engine lost"})
        refused = server.chat(**GREEDY)
        assert (refused.status, refused.error["code"]) == (503, "engine_dead")
        until(lambda: server.served.gate.num_inside == 0)
    assert "tokenmill-core-0 hangs" in caplog.text
    assert "in _wait" in caplog.text, "the log has no stacks"


@pytest.mark.slow
@pytest.mark.req("G13", "R32")
@pytest.mark.parametrize("holds_gil", [False, True])
def test_l04_a_hanging_engine_process_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, holds_gil: bool
) -> None:
    """Whether the step keeps the interpreter lock or not; a session says what it would have said."""
    with hanging(tmp_path, "process", holds_gil=holds_gil) as (server, file):
        told, talk = (converse(server, system="be brief", allowed_token_ids=None) for _ in range(2))
        for said in ("one", "two"):
            told.ask(said)
        talk.ask("one")
        with Wire(server.port) as turn:
            body = {"input": "two", "stream": False}
            hang_under_load(server, file, lambda: turn.send(raw_request(f"{talk.path}/generate", body)))
            assert read(turn).status == 500
        until(lambda: server.get("/health/ready").status == 200)
        assert server.get("/health/live").status == 200
        assert server.chat(**GREEDY).status == 200
        talk.ask("two")
        assert talk.said() == told.said()
        until(lambda: server.served.gate.num_inside == 0)
    assert "in _wait" in caplog.text, "the log has no stacks"


@pytest.mark.slow
@pytest.mark.req("G13")
def test_l04_a_hanging_step_does_not_keep_the_server_from_stopping(tmp_path: Path) -> None:
    """Long before the hang timeout: its clients are told, and then the thread is not waited for."""
    file = tmp_path / "hang"
    options = ["--hang-timeout", "600", "--drain", "0.2", "--extra", f"hang_file={file}"]
    with child(tmp_path / "log", "fake", "--engine", "thread", *options) as one, Wire(one.port) as client:
        file.touch()
        client.send(chat())
        until(lambda: not file.exists())
        one.process.send_signal(signal.SIGTERM)
        reply = read(client)
        assert (reply.status, reply.error["code"]) == (503, "shutdown")
        assert one.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.req("G13")
def test_exit_on_hang_ends_the_server_with_a_code_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "hang"
    options = ["--hang-timeout", str(HANG_S), "--exit-on-hang", "--extra", f"hang_file={file}"]
    with child(tmp_path / "log", "fake", "--engine", "thread", *options) as one:
        file.touch()
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, **GREEDY}
        reply = request(one.port, "POST", "/v1/chat/completions", body)
        assert reply.status == 500
        assert one.process.wait(30) == EXIT_HUNG
        assert "hangs" in one.said()
        assert "in _wait" in one.said()
