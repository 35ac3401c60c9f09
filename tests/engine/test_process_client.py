"""The engine process and its mistakes: each costs the request it is about, never the process, never a neighbour."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from tests.engine.test_clients import CONFIG, LIMITS, OPTIONS, make, request, results, wait
from tests.engine.test_pool import WAIT_S, Listener, backend
from tokenmill import errors
from tokenmill.backends.fake import FakeConfig, FakeModel, Fault, FaultKind
from tokenmill.engine import events
from tokenmill.engine.client import ThreadClient, done
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.engine.view import CoreView
from tokenmill.entrypoints import process, wire
from tokenmill.entrypoints.process import STACKS, EngineProcess, ProcessClient
from tokenmill.entrypoints.wire import Mailroom
from tokenmill.errors import ConfigError, EngineDead, InvalidRequest, ModelLoadError, TokenmillError
from tokenmill.outputs import FinishReason, GeneratedToken, StepResult

pytestmark = pytest.mark.slow

WAIT_MS = WAIT_S * 1000
LONG = 3900
"""Tokens of a request that is still running when a test has done what it wants to it."""


@pytest.fixture
def client() -> Iterator[ProcessClient]:
    client = make("process")
    try:
        yield client
    finally:
        client.close()


def running(client: ProcessClient, name: str) -> Listener:
    """A request that has had its first token."""
    listener = Listener()
    client.submit(request(name, LONG), listener)
    assert listener.heard.wait(WAIT_S)
    return listener


def goes_on(client: ProcessClient, name: str, listener: Listener) -> bool:
    """Does a running request still get tokens, and hear it when it is cancelled?"""
    so_far = len(listener.outputs)
    wait(client, lambda: len(listener.outputs) > so_far)
    client.cancel(name)
    return listener.result()[1] is FinishReason.CANCELLED


def is_serving(client: ProcessClient) -> bool:
    return results(client, [request("probe", 3)])["probe"][1] is FinishReason.LENGTH


# -- the parent: what is wrong is told on the caller's thread ---------------------------------------------------------


@pytest.mark.req("R32")
def test_a_wrong_verb_costs_at_most_its_own_request(client: ProcessClient) -> None:
    with pytest.raises(InvalidRequest, match="cancelled with reason stop"):
        client.cancel("nobody", FinishReason.STOP)
    neighbour, wrong = running(client, "neighbour"), running(client, "wrong")
    with pytest.raises(InvalidRequest, match="cancelled with reason stop"):
        client.cancel("neighbour", FinishReason.STOP)
    with pytest.raises(InvalidRequest, match="cannot be sent"):
        client.finish("neighbour", np.int64(1))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="already running"):
        client.submit(request("neighbour"), Listener())
    client.finish("wrong", keep_tokens=1_000_000)
    assert wrong.result()[1] is FinishReason.ERROR
    assert "cannot keep" in (wrong.outputs[-1].error or "")
    assert goes_on(client, "neighbour", neighbour)
    assert is_serving(client)


NOT_CARRIED: dict[str, Callable[[], Request]] = {
    "a lone surrogate in its name": lambda: request("\ud800"),
    "a lone surrogate in a stop string": lambda: request("r", stop=("\ud800",)),
    "a lone surrogate in its key": lambda: Request("r", [1], Limits(), Hints(key="\ud800")),
    "a number of more than 64 bits": lambda: Request("r", [1], Limits(), draw=Draw(seed=1 << 70)),
    "a number of numpy's": lambda: Request("r", [1], Limits(), draw=Draw(choice=np.int64(1))),  # type: ignore[arg-type]
    "a number that is none": lambda: Request("r", [1], Limits(), draw=Draw(seed=0.5)),  # type: ignore[arg-type]
    "a namespace that is no plain value": lambda: Request("r", [1], Limits(), Hints(namespace=frozenset("ab"))),
    "a namespace with one inside": lambda: Request("r", [1], Limits(), Hints(namespace=("a", (1, len)))),
    "a namespace of more than 64 bits": lambda: Request("r", [1], Limits(), Hints(namespace=("a", 1 << 70))),
}


@pytest.mark.req("R32")
def test_a_request_that_can_not_be_carried_is_refused_and_forgotten(client: ProcessClient) -> None:
    for what, make_request in NOT_CARRIED.items():
        with pytest.raises(InvalidRequest):  # not all of them can be made
            client.submit(make_request(), Listener())
        assert not client._requests, what
    assert is_serving(client)


def test_options_that_can_not_be_carried_start_nothing() -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigError, match="cannot be sent"):
        ProcessClient("fake", {"extra": {"tokenizer": object()}})
    assert threading.active_count() == threads


@pytest.mark.parametrize("namespace", [None, "a", 7, b"salt", 0.5, True, (), ("a", 1), ("a", (1, (None, "b")), ())])
def test_a_namespace_arrives_as_it_was(namespace: Hashable) -> None:
    hints = Hints(namespace=namespace, key="k", priority=3)
    message = wire.decode_for_engine(wire.pack(wire.Submit.of(Request("r", [1], Limits(), hints))))
    assert isinstance(message, wire.Submit)
    arrived = message.request().hints
    assert arrived == hints
    assert hash(arrived.namespace) == hash(namespace)


@pytest.mark.req("R32")
def test_kv_is_shared_inside_a_namespace_of_tuples_only(client: ProcessClient) -> None:
    def num_cached(name: str, namespace: Hashable) -> int:
        one = Request(name, list(range(1, 49)), Limits(max_new_tokens=2), Hints(namespace=namespace))
        assert results(client, [one])[name][1] is FinishReason.LENGTH
        return one.num_cached

    assert num_cached("first", ("a", (1, None))) == 0
    assert num_cached("same", ("a", (1, None))) > 0
    assert num_cached("other", ("a", (2, None))) == 0


# -- the parent's thread ----------------------------------------------------------------------------------------------


class Raising(Listener):
    """A sink that raises at each token."""

    def __call__(self, result: StepResult) -> None:
        super().__call__(result)
        raise RuntimeError("a bug in a sink")


@pytest.mark.req("R32", "G18")
def test_a_sink_that_raises_loses_its_own_request_only(client: ProcessClient, caplog: pytest.LogCaptureFixture) -> None:
    neighbour, raising = running(client, "neighbour"), Raising()
    client.submit(request("raising", LONG), raising)
    wait(client, lambda: "raising" not in client._requests)
    assert len(raising.outputs) == 1, "it was told more after it had failed"
    assert "the sink of request raising failed" in caplog.text
    assert goes_on(client, "neighbour", neighbour)
    at_the_end = Raising()
    client.submit(request("short", 1), at_the_end)
    assert at_the_end.ended.wait(WAIT_S)
    assert is_serving(client)


def test_sinks_that_raise_at_the_end_keep_nobody_from_hearing_it() -> None:
    client = make("process")
    listener, raising = Listener(), Raising()
    client._requests["raising"] = request("raising")
    client._sinks.add("raising", raising)  # first in line, and its ending is the first it hears
    client.submit(request("r", LONG), listener)
    os.kill(client.process.pid, signal.SIGKILL)
    assert listener.result()[1] is FinishReason.ERROR
    assert raising.ended.is_set()
    client.close()


@pytest.mark.req("R32", "G18")
def test_a_thread_that_fails_leaves_neither_a_child_nor_a_caller(
    client: ProcessClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(message: bytes) -> wire.FromEngine:
        raise RuntimeError("a bug in the mail")

    listener = running(client, "r")
    monkeypatch.setattr(wire, "decode_from_engine", broken)
    assert listener.result()[1] is FinishReason.ERROR
    client._thread.join(WAIT_S)
    assert client.process.returncode == -signal.SIGKILL
    assert "a bug in the mail" in caplog.text
    with pytest.raises(EngineDead):
        client.submit(request("more"), Listener())


# -- the mail ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path / 'mail'}"


def test_what_is_posted_leaves_while_more_comes_in_than_is_handled(address: str) -> None:
    sender, reader = Mailroom(address, bind=True), Mailroom(address, bind=False)
    try:
        for i in range(300):
            sender.post(str(i).encode())
        assert sender._socket.poll(WAIT_MS, zmq.POLLOUT), "the reader never came"
        assert list(sender.receive(0)) == []
        messages = reader.receive(WAIT_MS)
        assert next(messages) == b"0"
        reader.post(b"stop")
        assert reader._socket.poll(WAIT_MS)
        assert next(messages) == b"1"
        # The reader has 298 to go, and is not asked for any of them.
        assert next(sender.receive(WAIT_MS), None) == b"stop"
    finally:
        reader.close()
        sender.close()


# -- the child --------------------------------------------------------------------------------------------------------


class Child:
    """An `EngineProcess` on a thread of this process, with a core that can be told to stall, and its parent's mail."""

    def __init__(self, address: str) -> None:
        self.mail = Mailroom(address, bind=True)
        self.engine = EngineProcess(address)
        model = FakeModel(FakeConfig(vocab_size=64, max_context=4000))
        self.client = ThreadClient(model, CONFIG, LIMITS)
        self.engine._client = self.client
        self._thread = threading.Thread(target=self.engine.run, daemon=True)
        self._thread.start()

    def post(self, message: wire.ToEngine) -> None:
        self.mail.post(wire.encode(message))

    def until(self, is_it: Callable[[wire.FromEngine], bool]) -> wire.FromEngine:
        """The next message of that kind."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for message in self.mail.receive(10):
                decoded = wire.decode_from_engine(message)
                if is_it(decoded):
                    return decoded
        raise AssertionError("the child did not answer")

    def ending(self, request_id: str) -> GeneratedToken:
        def is_it(message: wire.FromEngine) -> bool:
            return isinstance(message, wire.Step) and any(
                token.request_id == request_id and token.is_finished for token in message.result()
            )

        message = self.until(is_it)
        assert isinstance(message, wire.Step)
        return next(token for token in message.result() if token.request_id == request_id and token.is_finished)

    def close(self) -> None:
        self.post(wire.Close())
        while self._thread.is_alive():
            list(self.mail.receive(10))
        self.mail.close()


@pytest.fixture
def child(address: str) -> Iterator[Child]:
    child = Child(address)
    try:
        yield child
    finally:
        child.close()


def undecodable(message: wire.ToEngine, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(wire.encode(message)), **fields})


@pytest.mark.req("R32")
def test_a_message_that_fails_in_the_child_ends_its_own_request_only(child: Child) -> None:
    child.post(wire.Submit.of(request("neighbour", LONG)))
    child.post(wire.Submit.of(request("cancelled", LONG)))
    child.post(wire.Submit.of(request("finished", LONG)))
    child.until(lambda message: isinstance(message, wire.Step) and "finished" in message.request_ids)
    child.post(wire.Cancel("cancelled", FinishReason.STOP))
    assert child.ending("cancelled").finish_reason is FinishReason.ERROR
    child.post(wire.Finish("finished", 1_000_000))
    assert "cannot keep" in (child.ending("finished").error or "")
    child.post(wire.Submit("bad", np.array([99], dtype=np.int32).tobytes(), Limits(), Hints(), None, Draw()))
    assert "outside the vocabulary" in (child.ending("bad").error or "")
    child.mail.post(b"\xc1 not msgpack")
    child.mail.post(msgspec.msgpack.encode({"type": "Nonsense"}))
    submit = wire.Submit.of(request("damaged"))
    child.mail.post(undecodable(submit, hints={"namespace": [1]}))
    assert "hints" in (child.ending("damaged").error or "")
    child.post(wire.Cancel("neighbour", FinishReason.TIMEOUT))
    assert child.ending("neighbour").finish_reason is FinishReason.TIMEOUT


def test_statistics_of_a_core_that_stalls_do_not_stop_the_mail(child: Child) -> None:
    fault = Fault(FaultKind.STALL)
    backend(child.client.pool).faults.add(fault)
    child.post(wire.AskStats(0))
    child.until(lambda message: isinstance(message, wire.Answer))
    child.post(wire.Submit.of(request("stalled", 3)))
    child.mail.flush()
    try:
        assert fault.stalled.wait(WAIT_S)
        child.post(wire.AskStats(1))
        child.post(wire.Submit("bad", np.array([99], dtype=np.int32).tobytes(), Limits(), Hints(), None, Draw()))
        heard: list[wire.FromEngine] = []
        child.until(lambda message: heard.append(message) is None and isinstance(message, wire.Step))
        assert not any(isinstance(message, wire.Answer) for message in heard)
    finally:
        fault.release.set()
    answer = child.until(lambda message: isinstance(message, wire.Answer))
    assert isinstance(answer, wire.Answer)
    assert answer.number == 1
    assert answer.error is None


def test_statistics_that_can_not_be_had_are_answered(
    client: ProcessClient, child: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(timeout_s: float = 0) -> list[Any]:
        raise TimeoutError

    monkeypatch.setattr(child.client.pool, "stats", hang)
    child.post(wire.AskStats(5))
    answer = child.until(lambda message: isinstance(message, wire.Answer))
    assert isinstance(answer, wire.Answer)
    assert "TimeoutError" in (answer.error or "")
    with ThreadPoolExecutor(4) as callers:  # of one that has some, everybody gets his own
        assert all(len(stats) == 1 for stats in callers.map(lambda _: client.stats(), range(8)))
    assert not client._questions
    client._take(wire.Answer(99))  # whoever asked this has left


@pytest.mark.req("R32")
def test_signals_to_the_whole_group_are_the_parents_business(client: ProcessClient) -> None:
    listener = running(client, "r")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a service manager signals all of a unit
        os.kill(client.process.pid, number)
    assert goes_on(client, "r", listener)
    assert is_serving(client)
    client.close()
    assert client.process.returncode == 0


def test_a_child_that_fails_ends_at_once_with_its_reason() -> None:
    command = [sys.executable, "-m", "tokenmill.entrypoints.process", "no address"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert child.stdin is not None
    with child.stdin:  # open until the child is gone: its watch of us is still reading
        assert os.strerror(errno.EINVAL) in child.stderr.read()
        assert child.wait(WAIT_S) == 1
    child.stderr.close()


# -- a start that fails -----------------------------------------------------------------------------------------------


@pytest.mark.req("R32")
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"extra": {"nonsense": 1}}, ConfigError, "nonsense"),
        ({"extra": OPTIONS, "kv_cache_tokens": 0}, ConfigError, "kv_cache_tokens must be at least 1"),
        ({"extra": {"max_context": "long"}}, ModelLoadError, "TypeError: .*str"),
    ],
)
def test_a_start_that_fails_says_how(options: dict[str, Any], error: type[TokenmillError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        ProcessClient("fake", options)
    assert type(caught.value) is error


KINDS_OF_ERROR = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, TokenmillError)]


OF_NUMBERS = (errors.OutOfKV, errors.TooManyTokens)
"""Errors that are made of numbers: their text arrives, as that of a `ModelLoadError`."""


@pytest.mark.parametrize("kind", KINDS_OF_ERROR)
def test_errors_arrive_as_what_they_were(kind: type[TokenmillError]) -> None:
    error = kind(3, 2) if kind in OF_NUMBERS else kind("a reason")
    arrived = carried(error)
    assert type(arrived) is (ModelLoadError if kind in OF_NUMBERS else kind)
    assert str(arrived) == str(error)


def test_errors_of_others_arrive_as_load_errors() -> None:
    class Unknown(TokenmillError):
        pass

    for error, text in [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (Unknown("what"), "what"),
        (OSError("caf\udce9"), "OSError: caf\\udce9"),
    ]:
        arrived = carried(error)
        assert type(arrived) is ModelLoadError
        assert str(arrived) == text


def carried(error: Exception) -> TokenmillError:
    message = wire.decode_from_engine(wire.encode(wire.Failed.of(error)))
    assert isinstance(message, wire.Failed)
    return message.error()


def test_an_engine_process_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    client = make("process")
    os.kill(client.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(process, "CLOSE_S", 0.1)
    client.close()
    assert client.process.poll() == -signal.SIGKILL


# -- another child in place of one that died --------------------------------------------------------------------------


def test_stacks_that_cannot_be_read_hold_up_nothing(client: ProcessClient) -> None:
    child = client._child
    (child.folder / STACKS).unlink()
    (child.folder / STACKS).mkdir()
    assert "Is a directory" in child.stacks()
    assert is_serving(client)


def kill(client: ProcessClient) -> None:
    """Kill the child, and wait for the next one to take requests."""
    dead = client.process
    os.kill(dead.pid, signal.SIGKILL)
    wait(client, lambda: client.process is not dead and bool(client.cores_alive))


@pytest.mark.req("R32", "G18")
def test_a_child_that_dies_is_replaced(client: ProcessClient) -> None:
    for turn in range(2):
        listener = running(client, f"r{turn}")
        os.kill(client.process.pid, signal.SIGKILL)
        assert listener.result()[1] is FinishReason.ERROR
        assert not client.cores_alive
        with pytest.raises(EngineDead, match="exit code -9"):
            client.submit(request("too early"), Listener())
        with pytest.raises(EngineDead):
            client.stats()
        wait(client, lambda: bool(client.cores_alive))
        assert is_serving(client)


@pytest.mark.req("R32")
def test_a_child_that_can_not_be_started_again_is_given_up(
    client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "RETRY_S", 0.0)
    client._start = wire.encode(wire.Start("nowhere", {}, None))
    os.kill(client.process.pid, signal.SIGKILL)
    client._thread.join(WAIT_S)
    assert not client._thread.is_alive()
    assert client.is_lost
    with pytest.raises(EngineDead):
        client.submit(request("r"), Listener())


@pytest.mark.req("R32", "R42")
def test_whoever_follows_a_core_follows_the_next_child(client: ProcessClient) -> None:
    heard: list[events.Event] = []
    views: list[CoreView] = []

    def make_view(snapshot: events.CoreSnapshot) -> CoreView:
        views.append(CoreView(snapshot))
        return views[0]

    client.subscribe(0, make_view)
    client.subscribe(0, lambda _: heard.append)
    running(client, "r")
    kill(client)
    ended = [one for one in heard if isinstance(one, events.RequestEvent) and one.phase is events.Phase.ENDED]
    assert [(one.request_id, one.finish_reason) for one in ended] == [("r", FinishReason.ERROR)]
    assert is_serving(client)
    assert sum(isinstance(event, events.StartEvent) for event in heard) == 1
    assert [view.snapshot() for view in views] == client.snapshots()


@pytest.mark.req("R32")
def test_a_subscriber_that_raises_is_dropped(client: ProcessClient, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: events.Event) -> None:
        raise RuntimeError("a bug in a subscriber")

    client.subscribe(0, lambda _: fail)
    assert is_serving(client)
    assert caplog.text.count("a subscriber failed and is dropped") == 1
    assert is_serving(client)


@pytest.mark.req("R32")
def test_kv_leaves_and_enters_an_engine_process(client: ProcessClient) -> None:
    def one(name: str, *, owner: str | None) -> Request:
        return Request(name, list(range(1, 49)), Limits(max_new_tokens=2), Hints(owner=owner, namespace=("a", 1)))

    assert results(client, [one("first", owner="session")])["first"][1] is FinishReason.LENGTH
    exported = client.export_kv(0, "session", at_once=True).result(WAIT_S)
    assert exported is not None
    assert client.replay_s(0, 1000).result(WAIT_S) is None, "of one prompt"
    assert client.export_kv(0, "nobody").result(WAIT_S) is None
    kill(client)
    fresh = one("fresh", owner=None)
    assert results(client, [fresh])["fresh"][1] is FinishReason.LENGTH
    assert fresh.num_cached == 0
    kill(client)
    assert client.import_kv(0, *exported, Hints(owner="session", namespace=("a", 1))).result(WAIT_S)
    again = one("again", owner="session")
    assert results(client, [again])["again"][1] is FinishReason.LENGTH
    assert again.num_cached == 47
    assert again.verdict is not None
    assert again.verdict.num_cached == 47


@pytest.mark.req("R32")
def test_a_child_that_does_not_answer_is_silent(client: ProcessClient) -> None:
    assert client.seconds_silent < 5.0
    os.kill(client.process.pid, signal.SIGSTOP)
    began = client._pulse_at
    wait(client, lambda: client.seconds_silent > 0.5)
    assert time.monotonic() - began > 0.5
    os.kill(client.process.pid, signal.SIGCONT)
    wait(client, lambda: client.seconds_silent == 0.0)


# -- callers that leave, subscriptions that come and go ---------------------------------------------------------------


@pytest.mark.req("R32", "G18")
def test_an_answer_that_nobody_waits_for_any_more_costs_nothing(client: ProcessClient) -> None:
    os.kill(client.process.pid, signal.SIGSTOP)
    abandoned = client.export_kv(0, "session")
    assert abandoned.cancel()
    os.kill(client.process.pid, signal.SIGCONT)
    assert is_serving(client)
    os.kill(client.process.pid, signal.SIGSTOP)
    assert client.export_kv(0, "session").cancel()
    kill(client)
    assert is_serving(client)


class Guarded(dict[int, Any]):
    """A dict that may be changed under a lock only."""

    def __init__(self, lock: Any) -> None:
        super().__init__()
        self._lock = lock

    def __setitem__(self, number: int, value: Any) -> None:
        assert self._lock.locked()
        super().__setitem__(number, value)


@pytest.mark.req("R32", "R42")
def test_a_subscription_and_a_restart_do_not_meet_halfway(client: ProcessClient) -> None:
    client._following = Guarded(client._lock)
    heard: list[events.Event] = []
    client.subscribe(0, lambda _: heard.append)
    assert is_serving(client)
    assert heard
    os.kill(client.process.pid, signal.SIGKILL)
    wait(client, lambda: not client.cores_alive)
    with pytest.raises(EngineDead):
        client.subscribe(0, lambda _: heard.append)
    assert len(client._following) == 1


def test_a_subscription_that_ends_at_once_ends_in_the_child(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    subscribed, ended = threading.Event(), threading.Event()
    subscribe = child.client.subscribe

    def slowly(core: int, make_subscriber: Any) -> Callable[[], None]:
        end = subscribe(core, make_subscriber)
        subscribed.set()
        assert ended.wait(WAIT_S)
        return end

    monkeypatch.setattr(child.client, "subscribe", slowly)
    child.post(wire.Follow(1, core=0))
    child.until(lambda message: isinstance(message, wire.Answer))
    assert subscribed.wait(WAIT_S)
    child.post(wire.Unfollow(1))
    child.post(wire.ExportKV(2, core=0, owner="nobody", at_once=False))
    child.until(lambda message: isinstance(message, wire.Answer) and message.number == 2)
    ended.set()
    bus = child.client.pool.cores[0].events
    wait(child, lambda: not bus.is_heard)


def test_every_question_is_answered(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    def error_of(question: wire.Question) -> str:
        child.post(question)
        answer = child.until(lambda message: isinstance(message, wire.Answer) and message.number == question.number)
        assert isinstance(answer, wire.Answer)
        return answer.error or ""

    assert "IndexError" in error_of(wire.Follow(1, core=7))
    assert "IndexError" in error_of(wire.ExportKV(2, core=7, owner="session", at_once=True))
    monkeypatch.setattr(child.client, "snapshots", lambda: [object()])
    assert "TypeError" in error_of(wire.AskSnapshots(3))
    monkeypatch.setattr(child.client, "export_kv", lambda *_, **__: done((np.zeros(1, dtype=np.int32), object())))
    assert "TypeError" in error_of(wire.ExportKV(4, core=0, owner="session", at_once=True))
    assert not child.engine._following


def test_a_subscriber_that_raises_is_told_nothing_more_by_the_child(client: ProcessClient) -> None:
    def fail(event: events.Event) -> None:
        raise RuntimeError("a bug in a subscriber")

    told: list[int] = []
    take = client._take

    def listen(message: wire.FromEngine) -> None:
        if isinstance(message, wire.Told):
            told.append(message.number)
        take(message)

    client._take = listen  # type: ignore[method-assign]
    client.subscribe(0, lambda _: fail)
    assert is_serving(client)
    client.stats()  # by then it has been told that nobody follows
    told.clear()
    assert is_serving(client)
    assert not told


# -- a child that can't be started, or that is not needed any more ----------------------------------------------------


def folders(where: Path) -> list[str]:
    return [path.name for path in where.iterdir()]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, empty. Its path is short enough for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.req("R32")
def test_a_child_that_can_not_be_started_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(EngineDead, match=r"could not be started: .*No such file"):
            ProcessClient("fake")
    assert folders(temporary) == []
    long = temporary / ("a" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with pytest.raises(EngineDead, match=r"could not be started: .*is longer than"):
        ProcessClient("fake")
    assert folders(long) == []
    assert len(os.listdir("/proc/self/fd")) == open_files


@pytest.mark.req("R32", "G18")
def test_a_child_that_can_not_be_started_again_at_once_is_tried_again(
    client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "RETRY_S", 0.0)
    start, failures = process._Child.start, [EngineDead("no memory to fork"), EngineDead("no memory to fork")]

    def start_at_last() -> process._Child:
        if failures:
            raise failures.pop()
        return start()

    monkeypatch.setattr(process._Child, "start", start_at_last)
    kill(client)
    assert not failures
    assert is_serving(client)


def test_a_child_that_is_loading_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CLOSE_S", WAIT_S)
    client = make("process")
    start = process._Child.start

    def start_stopped() -> process._Child:
        child = start()
        os.kill(child.process.pid, signal.SIGSTOP)
        return child

    monkeypatch.setattr(process._Child, "start", start_stopped)
    dead = client.process
    os.kill(dead.pid, signal.SIGKILL)
    wait(client, lambda: client.process is not dead)
    began = time.monotonic()
    client.close()
    assert time.monotonic() - began < WAIT_S
    assert client.process.returncode == -signal.SIGKILL


def test_the_child_imports_from_where_its_parent_does(tmp_path: Path) -> None:
    """A script that has found the package by a path of its own, in a folder with a module of a well-known name."""
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('the wrong one')\n")
    source = Path(process.__file__).parents[2]
    script = f"""
import sys
sys.path[:] = [{str(source)!r}] + [path for path in sys.path if path and path != {str(source)!r}]
from tokenmill.entrypoints.process import ProcessClient
ProcessClient("fake").close()
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr


@pytest.mark.req("R32", "R42")
def test_what_the_child_logs_is_logged_here_at_the_parents_level(caplog: pytest.LogCaptureFixture) -> None:
    def is_logged(text: str) -> bool:
        return any(text in record.getMessage() for record in caplog.records)

    wrong = undecodable(wire.Cancel("nobody", FinishReason.CANCELLED), reason="nonsense")
    for level in ("DEBUG", "ERROR"):
        caplog.clear()
        with caplog.at_level(level, "tokenmill"):
            client = make("process")
            try:
                client._child.mail.post(wrong)
                client.stats()  # answered after the complaints
                assert is_logged("could not do what a message says")
                assert is_logged("request nobody is ended") == (level == "DEBUG")
            finally:
                client.close()
    (record,) = [one for one in caplog.records if "could not do" in one.getMessage()]
    assert record.name == process.__name__
    assert record.levelname == "ERROR"
    assert "Traceback" in record.getMessage()


# -- several workers --------------------------------------------------------------------------------------------------


class Degraded:
    """An engine process with two cores, of which the first one hangs; a request on the second one still runs."""

    def __init__(self, folder: Path) -> None:
        file = folder / "hang"
        extra = {**OPTIONS, "max_context": 1 << 16, "hang_file": str(file)}
        options = {"extra": extra, "hang_timeout_s": 1.0, "kv_cache_tokens": 1 << 18, "workers": 2}
        self.client = ProcessClient("fake", options)
        self.pid = self.client.process.pid
        file.touch()
        hung, self.running = Listener(), Listener()
        self.client.submit(request("hung", LONG, temperature=0), hung, core=0)
        wait(self.client, lambda: not file.exists())
        self.client.submit(request("running", 60_000, temperature=0), self.running, core=1)
        assert hung.result()[1] is FinishReason.ERROR
        assert "hangs" in (hung.outputs[-1].error or "")
        wait(self.client, lambda: self.client.cores_alive == [1])

    def retire(self) -> None:
        """End the last request, and wait until the process is being replaced."""
        assert goes_on(self.client, "running", self.running)
        wait(self.client, lambda: self.client._retired is not None)


@pytest.fixture
def degraded(tmp_path: Path) -> Iterator[Degraded]:
    made = Degraded(tmp_path)
    try:
        yield made
    finally:
        made.client.close()


@pytest.mark.req("R32")
def test_a_process_that_lost_a_core_is_replaced_when_idle_and_holds_requests(degraded: Degraded) -> None:
    client = degraded.client
    assert client.process.pid == degraded.pid, "others still have requests there"
    degraded.retire()
    assert client.cores_alive == [0, 1]
    held = {name: Listener() for name in ("held", "cancelled", "bound")}
    for name, listener in held.items():
        tokens, core = LONG if name == "cancelled" else 3, 0 if name == "bound" else None
        client.submit(request(name, tokens, temperature=0), listener, core)
    client.cancel("cancelled")
    with pytest.raises(InvalidRequest, match="already running"):
        client.submit(request("held"), Listener())
    assert held["cancelled"].result()[1] is FinishReason.CANCELLED
    assert [held[name].result()[1] for name in ("held", "bound")] == [FinishReason.LENGTH] * 2
    assert client.process.pid != degraded.pid
    assert client.cores_alive == [0, 1]


@pytest.mark.req("R32")
@pytest.mark.parametrize("why", ["no process", "closed"])
def test_held_requests_end_if_no_process_comes(degraded: Degraded, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise EngineDead("no more processes")

    client, held = degraded.client, Listener()
    monkeypatch.setattr(process, "RETRY_S", 0.0)
    tried = threading.Event()

    def new_child() -> None:
        client.submit(request("held"), held)
        tried.set()
        monkeypatch.setattr(client, "_new_child", refuse)
        if why == "closed":
            client._is_closed.set()
        refuse()

    monkeypatch.setattr(client, "_new_child", new_child)
    degraded.retire()
    assert tried.wait(WAIT_S)
    assert held.result()[1] is (FinishReason.SHUTDOWN if why == "closed" else FinishReason.ERROR)
    with pytest.raises(EngineDead):
        client.submit(request("more"), Listener())
