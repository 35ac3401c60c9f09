"""One engine, three clients: the same verbs, the same tokens, the same endings. And no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_pool import WAIT_S, Listener
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.engine.client import InlineClient, ThreadClient
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.entrypoints.process import ProcessClient
from tokenmill.errors import EngineDead, InvalidRequest, ModelNotFound
from tokenmill.outputs import FinishReason
from tokenmill.params import SamplingParams

pytestmark = pytest.mark.slow

OPTIONS = {"vocab_size": 64, "max_context": 4000, "depth": 1}
CONFIG = EngineConfig(max_num_seqs=8)
LIMITS = BackendLimits(num_cells=8192)


def make(kind: str, depth: int = 1) -> Any:
    options = {**OPTIONS, "depth": depth}
    model = FakeModel(FakeConfig(**options))  # type: ignore[arg-type]
    if kind == "inline":
        return InlineClient(model, CONFIG, LIMITS)
    if kind == "thread":
        return ThreadClient(model, CONFIG, LIMITS)
    return ProcessClient("fake", {"extra": options, "config": CONFIG, "kv_cache_tokens": LIMITS.num_cells})


@contextmanager
def client_of(kind: str, depth: int = 1) -> Iterator[Any]:
    client = make(kind, depth)
    try:
        yield client
    finally:
        client.close()


def request(name: str, max_new_tokens: int = 12, **params: Any) -> Request:
    draw = Draw(params=SamplingParams(**params), seed=len(name))
    return Request(name, [1, 2, len(name)], Limits(max_new_tokens=max_new_tokens), draw=draw)


def results(client: Any, requests: list[Request]) -> dict[str, tuple[list[int], FinishReason]]:
    listeners = {one.request_id: Listener() for one in requests}
    for one in requests:
        client.submit(one, listeners[one.request_id])
    if isinstance(client, InlineClient):
        client.run(lambda: all(listener.ended.is_set() for listener in listeners.values()))
    return {name: listener.result() for name, listener in listeners.items()}


KINDS = ["inline", "thread", "process"]


@pytest.mark.req("R32", "G12")
def test_the_same_tokens_over_all_clients_at_both_depths() -> None:
    def requests() -> list[Request]:
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0},
            {"top_p": 0.7},
            {"repetition_penalty": 1.4, "logprobs": 2},
        ]
        return [request("r" * (i + 1), **kind) for i, kind in enumerate(kinds)]

    found = []
    for kind in KINDS:
        for depth in (0, 1):
            with client_of(kind, depth) as client:
                found.append(results(client, requests()))
    assert all(one == found[0] for one in found)
    scores = []
    for kind in KINDS:
        with client_of(kind) as client:
            one = request("scored", prompt_logprobs=2)
            results(client, [one])
            scores.append(one.prompt_logprobs)
    assert scores[0] == scores[1] == scores[2]
    assert len(scores[0]) == 2
    assert all(len(tokens) == 12 for tokens, _ in found[0].values())


@pytest.mark.req("R32")
@pytest.mark.parametrize("kind", KINDS)
def test_verbs_and_errors(kind: str) -> None:
    with client_of(kind) as client:
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            client.submit(Request("bad", [64], Limits()), Listener())
        with pytest.raises(InvalidRequest, match="maximum context length"):
            client.submit(Request("long", [1] * 4000, Limits()), Listener())
        cancelled, stopped = Listener(), Listener()
        client.submit(request("cancelled", 3500), cancelled)
        client.submit(request("stopped", 3500), stopped)
        wait(client, lambda: len(cancelled.outputs) >= 3 and len(stopped.outputs) >= 3)
        client.cancel("cancelled")
        client.finish("stopped", keep_tokens=2)
        wait(client, lambda: cancelled.ended.is_set() and stopped.ended.is_set())
        assert cancelled.result()[1] is FinishReason.CANCELLED
        assert stopped.result()[1] is FinishReason.STOP
        client.cancel("nobody")
        assert len(client.stats()) == 1
        again = request("again", 4)
        assert results(client, [again])["again"][1] is FinishReason.LENGTH
    with pytest.raises(EngineDead):
        client.submit(request("after"), Listener())


@pytest.mark.parametrize("kind", KINDS)
def test_the_id_of_a_request_that_has_ended_can_be_used_again(kind: str) -> None:
    with client_of(kind) as client:
        for _ in range(3):
            assert results(client, [request("same", 4)])["same"][1] is FinishReason.LENGTH


def wait(client: Any, condition: Callable[[], bool]) -> None:
    if isinstance(client, InlineClient):
        client.run(condition)
        return
    heard = threading.Event()
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        heard.wait(0.01)


@pytest.mark.req("R32", "G18")
def test_an_engine_process_that_is_killed_reaches_every_caller_once() -> None:
    with client_of("process") as client:
        listeners = [Listener() for _ in range(5)]
        for i, listener in enumerate(listeners):
            client.submit(request(f"r{i}", 3500), listener)
        assert listeners[0].heard.wait(WAIT_S)
        killed_at = time.monotonic()
        os.kill(client.process.pid, signal.SIGKILL)
        for listener in listeners:
            assert listener.result()[1] is FinishReason.ERROR
        assert time.monotonic() - killed_at < 10
        assert "exit code -9" in (listeners[0].outputs[-1].error or "")
        assert all(sum(output.is_finished for output in one.outputs) == 1 for one in listeners)


@pytest.mark.fault("L08")
@pytest.mark.req("R32")
def test_a_parent_that_is_killed_leaves_no_orphan(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import time
            from tokenmill.entrypoints.process import ProcessClient
            client = ProcessClient("fake")
            print(client.process.pid, client._child.folder, flush=True)
            time.sleep(600)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, folder = parent.stdout.readline().split()
    child = int(pid)
    assert is_running(child)
    parent.kill()
    parent.wait(WAIT_S)
    parent.stdout.close()
    deadline = time.monotonic() + WAIT_S
    gone = threading.Event()
    while is_running(child):
        assert time.monotonic() < deadline, "the engine process outlived its parent"
        gone.wait(0.02)
    assert not Path(folder).exists(), "the socket outlived both"


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_closing_ends_requests_process_and_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.entrypoints.process.CLOSE_S", WAIT_S)  # not killed, however busy the machine is
    client = make("process")
    folder = client._child.folder
    assert folder.stat().st_mode & 0o077 == 0, "the socket's folder is open to others"
    listener = Listener()
    client.submit(request("r", 3500), listener)
    client.close()
    assert listener.result()[1] in (FinishReason.SHUTDOWN, FinishReason.LENGTH)
    assert client.process.returncode == 0
    assert not folder.exists()
    client.close()


def test_a_model_that_can_not_be_opened_is_named() -> None:
    with pytest.raises(ModelNotFound, match="no model 'nowhere'"):
        ProcessClient("nowhere")
