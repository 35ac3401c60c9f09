"""L05, L06, L07 and health: starting, stopping, and being asked for too much while at it."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import tests
from tests.planting import PlantedBug, plant
from tests.server import serving
from tests.server.serving import KEY, WAIT_S, Child, Reply, child, raw_request, request
from tests.server.wire import LONG, Wire, chat_request, until
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.server.app import Server
from tokenmill.server.config import ServerConfig, hash_key
from tokenmill.server.models import ModelSpec
from tokenmill.server.served import Served

NUM_STREAMS = 8
DRAIN_S = 30
SOON_S = 20.0
"""For a busy machine, and still far from the end of a drain."""
LOADING = r"; http://[^:]+:(\d+) answers 503"
TRACEBACK = re.compile("Traceback|Task was destroyed|never retrieved|Error:")


# -- as a process -----------------------------------------------------------------------------------------------------


def status(server: Child, path: str) -> int:
    return request(server.port, "GET", path).status


def stop(server: Child, number: signal.Signals = signal.SIGTERM) -> None:
    """Tell it to stop; it is not ready any more, at once."""
    told_at = time.monotonic()
    server.process.send_signal(number)
    until(lambda: status(server, "/health/ready") == 503)
    assert time.monotonic() - told_at < SOON_S


@contextmanager
def streams(server: Child, **options: Any) -> Iterator[list[Wire]]:
    """All of them have begun to answer."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Wire(server.port)) for _ in range(NUM_STREAMS)]
        for i, client in enumerate(clients):
            client.send(chat_request(f"stream {i}", stream=True, **options))
        for client in clients:
            client.first_id()
        yield clients


def endless(server: Child) -> AbstractContextManager[list[Wire]]:
    """Streams that take minutes: many choices, many log-probabilities."""
    return streams(server, max_tokens=LONG, n=4, logprobs=True, top_logprobs=20)


def children(server: Child) -> list[Path]:
    """Processes that it has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == server.process.pid:
            found.append(stat)
    return found


def assert_ends(server: Child) -> None:
    """With 0, and without a word about trouble; nothing that it has started is left."""
    started = children(server)
    assert server.process.wait(SOON_S) == 0, server.said()
    assert TRACEBACK.search(server.said()) is None, server.said()
    assert not [one for one in started if one.exists()]


def drain(log: Path) -> None:
    """L05: what runs is done to the end, nobody else is let in."""
    with child(log, "fake", "--drain", str(DRAIN_S)) as server, Wire(server.port) as idle, Wire(server.port) as kept:
        kept.send(raw_request("/health", b"", method="GET"))
        assert kept.read_reply() is not None
        with streams(server, max_tokens=500) as clients:
            stop(server)
            assert f"stopping; {NUM_STREAMS} requests may go on for {DRAIN_S} s" in server.said()
            kept.send(chat_request())
            assert_refused(kept.read_reply(), "stopping")
            assert_refused(request(server.port, "POST", "/v1/chat/completions", {}), "stopping")
            assert (status(server, "/health"), status(server, "/health/live")) == (503, 200)
            for client in clients:
                reply = client.read_reply()
                assert reply is not None
                events = reply.events()
                assert "error" not in events[-1], events[-1]
                assert [event["choices"][0]["finish_reason"] for event in events[-2:]] == [None, "length"]
        assert_ends(server)
        assert idle.replies() == []
        assert server.said().count(" POST /v1/chat/completions 200 ") == NUM_STREAMS


def assert_refused(reply: Reply | None, code: str) -> None:
    assert reply is not None
    assert (reply.status, reply.error["code"]) == (503, code)
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.headers["connection"] == "close"


def test_l05_what_runs_is_done_to_the_end(tmp_path: Path) -> None:
    drain(tmp_path / "log")


NO_DRAIN = PlantedBug(
    "no drain",
    Server,
    "_drain",
    "self._until_empty(self.served.config.drain_s, lambda: self._is_hurried)",
    "self._until_empty(0, lambda: self._is_hurried)",
)


def test_l05_a_server_that_cuts_streams_off_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(NO_DRAIN, monkeypatch)  # says here if its target is gone; the child's failure could be taken for the bug
    program = """
        import pytest
        from tests.planting import plant
        from tests.server.test_lifecycle import NO_DRAIN
        plant(NO_DRAIN, pytest.MonkeyPatch())
    """
    change_program(tmp_path / "program", program, monkeypatch)
    with pytest.raises(AssertionError, match="error"):
        drain(tmp_path / "log")


def change_program(path: Path, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children do this first, and then what they are told."""
    root = Path(tests.__file__).parent.parent
    lines = [f"#!{sys.executable}", "import sys", f"sys.path.insert(0, {str(root)!r})"]
    lines += [line.strip() for line in before.strip().splitlines()]
    path.write_text("\n".join([*lines, "from tokenmill.cli.main import main", "main()", ""]))
    path.chmod(0o700)
    monkeypatch.setattr(serving, "TOKENMILL", str(path))


def test_l06_what_takes_too_long_is_ended_and_told_so(tmp_path: Path) -> None:
    with child(tmp_path / "log", "fake", "--drain", "0.5") as server:
        with endless(server) as clients:
            told_at = time.monotonic()
            stop(server)
            for client in clients:
                reply = client.read_reply()
                assert reply is not None
                *chunks, last = reply.events()
                assert last["error"]["code"] == "shutdown"
                assert not any("error" in chunk for chunk in chunks)
            assert 0.5 <= time.monotonic() - told_at < SOON_S
        assert_ends(server)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_l07_a_second_signal_ends_it_at_once(tmp_path: Path, second: signal.Signals) -> None:
    with child(tmp_path / "log", "fake", "--drain", str(DRAIN_S)) as server, endless(server):
        stop(server)
        server.process.send_signal(second)
        assert_ends(server)


def test_a_server_that_cannot_close_a_model_stops_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
        from tokenmill.server.batch_runner import Batches
        async def fail(_): raise RuntimeError("a bug")
        Batches.stop = fail
    """
    change_program(tmp_path / "program", program, monkeypatch)
    with child(tmp_path / "log", "fake") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON_S)
        assert "RuntimeError: a bug" in server.said()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_l07_a_signal_while_the_model_is_loaded(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
        import threading
        from tokenmill.entrypoints import async_llm
        async_llm.AsyncLLM = lambda *_, **__: threading.Event().wait()
    """
    change_program(tmp_path / "program", program, monkeypatch)
    with child(tmp_path / "log", "fake", until=LOADING) as server:
        until(lambda: status(server, "/health/live") == 200)
        assert status(server, "/health/ready") == 503
        assert_refused(request(server.port, "POST", "/v1/chat/completions", {}), "loading")
        server.process.send_signal(number)
        assert_ends(server)


# -- in this process --------------------------------------------------------------------------------------------------


@contextmanager
def loading(may_load: threading.Event) -> Iterator[tuple[int, Server]]:
    """A server whose model takes as long as the test wants."""

    def load() -> AsyncLLM:
        assert may_load.wait(WAIT_S)
        return AsyncLLM(FakeModel(FakeConfig(vocab_size=258)))

    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(Served(ServerConfig(key_hashes=(hash_key(KEY),)), [ModelSpec(name="fake", load=load)]))
    thread = threading.Thread(target=lambda: asyncio.run(server.load_and_serve(listener)), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], server
    finally:
        server.should_exit = True
        may_load.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        listener.close()


def test_503_until_the_model_is_loaded() -> None:
    may_load = threading.Event()
    with loading(may_load) as (port, server):
        for path in ("/health", "/health/ready"):
            reply = request(port, "GET", path, key=None)
            assert (reply.status, reply.json()) == (503, {"status": "not ready"})
            assert int(reply.headers["retry-after"]) >= 1
        live = request(port, "GET", "/health/live", key=None)
        assert (live.status, live.json()) == (200, {"status": "live"})
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/embeddings"),
            ("POST", "/tokenize"),
            ("POST", "/v1/requests/x/cancel"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/fake"),
            ("GET", "/v1/nothing"),
        ):
            assert_refused(request(port, method, path, b"{}" if method == "POST" else None), "loading")
        may_load.set()
        until(lambda: server.is_ready)
        for path in ("/health", "/health/ready"):
            reply = request(port, "GET", path, key=None)
            assert (reply.status, reply.json()) == (200, {"status": "ready"})
        body = {"model": "fake", "prompt": "a", "max_tokens": 3}
        assert request(port, "POST", "/v1/completions", body).status == 200
