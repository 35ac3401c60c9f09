"""The engine in a process of its own: `ProcessClient` here, `python -m tokenmill.entrypoints.process ADDRESS` there.

The engine process loads the weights and runs the engine's threads; this one never touches them, and the two share no
interpreter lock. They talk over a private unix socket: one message per step. Neither outlives the other: the child ends
when its standard input, a pipe from the parent, is closed by whatever ends the parent. When the child ends, every
waiting caller is told, and another one is started: all that an engine process knows can be computed again. A child that
has lost some of its cores runs on for the requests of the others, and is replaced once it is idle; requests that come
meanwhile wait for the next one.

A mistake costs its own request only. What can't be sent is refused on the caller's thread; a message that fails in the
child ends the request it is about; a sink that raises loses the request it listens to.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, IntArray, ModelHandle, ModelInfo
from tokenmill.engine.client import ThreadClient
from tokenmill.engine.core import check_cancel
from tokenmill.engine.events import CoreSnapshot, CoreStats, Event, Phase, RequestEvent, StartEvent, Subscriber
from tokenmill.engine.pool import ANSWER_S, MakeSubscriber, Sink, Sinks, tell
from tokenmill.engine.request import Hints, Request, RequestState, check_request
from tokenmill.entrypoints import wire
from tokenmill.entrypoints.fit import plan_one_session
from tokenmill.entrypoints.options import load_for_engine, num_workers
from tokenmill.entrypoints.wire import Mailroom
from tokenmill.errors import ConfigError, EngineDead, InsufficientMemory, InvalidRequest, TokenmillError
from tokenmill.outputs import FinishReason, StepResult
from tokenmill.text.grammar import GrammarCompiler
from tokenmill.text.llamacpp import Vocab
from tokenmill.text.model_text import open_text

log = logging.getLogger("tokenmill.entrypoints.process")  # in the child `__name__` is another

T = TypeVar("T")

PACKAGE = "tokenmill"
"""Whose log the child's records belong to."""
IPC = "ipc://"
HEARTBEAT_S = 0.25
"""How often each side looks whether the other one is there."""
CLOSE_S = 5.0
GRACE_S = 1.0
"""How much later than its hang timeout a process is killed that abandons no core by itself: it can't run Python."""
MIN_LOOKS = 8
"""How often this process must have looked for a sign of life in vain: while it was stopped itself, it has not."""
STACKS = "stacks"
"""File in the folder of a child to which it writes its stacks on SIGUSR1; works while a step holds the GIL."""
STACKS_S = 1.0
"""How long that may take."""
MAX_FAILED_STARTS, RETRY_S = 3, 1.0
"""Restarts in a row that may fail to load the model before the engine is given up, and the pause after each."""


@dataclass(frozen=True)
class RemoteModel:
    """What is known here of a model that an engine process has loaded."""

    info: ModelInfo
    path: Path | None
    weights_version: int = 0
    """Nobody here can replace them."""
    has_vocab: bool = False

    @property
    def vocab(self) -> Vocab | None:
        """llama.cpp's own idea of the file's tokens, if it computes the model: opened here without the weights."""
        if not self.has_vocab or self.path is None:
            return None
        from tokenmill.backends.llamacpp.model import open_vocab  # with packages of the extra `llamacpp`

        return open_vocab(self.path)

    def close(self) -> None:
        """The engine process goes with its client."""


@dataclass
class _Following:
    """A subscription to a core's events, which outlives the engine process."""

    core: int
    make: MakeSubscriber
    subscriber: Subscriber | None = None
    running: dict[str, RequestEvent] = field(default_factory=dict)
    """The latest event of each request that has not ended."""

    def begin(self, snapshot: CoreSnapshot) -> None:
        """A snapshot has come: the first one, or that of the engine that took the place of the one before."""
        if self.subscriber is None:
            self.subscriber = self.make(snapshot)
        else:
            self.subscriber(StartEvent(time.monotonic(), len(snapshot.slots), snapshot.num_cells))

    def hear(self, event: Event) -> None:
        if isinstance(event, RequestEvent):
            if event.phase is Phase.ENDED:
                self.running.pop(event.request_id, None)
            else:
                self.running[event.request_id] = event
        if self.subscriber is not None:
            self.subscriber(event)

    def end_all(self) -> None:
        """The engine process has ended, and with it all that ran there."""
        for event in list(self.running.values()):
            self.hear(replace(event, phase=Phase.ENDED, at=time.monotonic(), finish_reason=FinishReason.ERROR))


@dataclass(frozen=True)
class _Child:
    """An engine process, and the socket it is reached by."""

    process: subprocess.Popen[bytes]
    mail: Mailroom
    folder: Path

    @classmethod
    def start(cls) -> _Child:
        """`EngineDead` if it can't be started; then nothing of it is left."""
        # It imports what this process would, from the same places: not from the working directory (-P) unless we do.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with contextlib.ExitStack() as undo:
            try:
                folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))  # for this user's eyes only
                undo.callback(shutil.rmtree, folder, ignore_errors=True)
                address = f"{IPC}{folder / 'engine'}"
                mail = Mailroom(address, bind=True)
                undo.callback(mail.close)
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tokenmill.entrypoints.process", address],
                    stdin=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C reaches a terminal's whole group; the parent decides what it means
                )
            except (OSError, zmq.ZMQError) as error:
                raise EngineDead(f"the engine process could not be started: {error}") from error
            undo.pop_all()
        return cls(process, mail, folder)

    def stacks(self) -> str:
        """Have it write the stacks of its threads, which needs no GIL, and read them."""
        path, deadline = self.folder / STACKS, time.monotonic() + STACKS_S
        self.process.send_signal(signal.SIGUSR1)
        found, before = "", None
        try:
            while (found != before or not found) and time.monotonic() < deadline:  # until it has written all, or can't
                time.sleep(STACKS_S / 20)
                before, found = found, path.read_text(errors="replace") if path.exists() else ""
        except OSError as error:  # no descriptor left: it is replaced without them
            return f"(none: {error})"
        return found or "(none: it does not react to signals)"

    def end(self) -> None:
        """Kill it if it is still running, wait for it, and leave nothing of it behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.mail.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ProcessClient:
    """An `EngineClient` whose engine runs in a child process. Safe to use from any thread.

    `options` are `EngineOptions`. A child that dies is replaced; meanwhile, and for good if the model can't be loaded
    any more, calls raise `EngineDead`.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        *,
        offline: bool = False,
    ) -> None:
        given = dict(options or {})
        config = given.pop("config", None)
        level = logging.getLogger(PACKAGE).getEffectiveLevel()
        self._start = wire.pack(wire.Start(model, given, config, offline, level), wrong=ConfigError)
        self._num_cores = num_workers(given)
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._sinks = Sinks()
        self._questions: dict[int, Callable[[wire.Answer], None]] = {}
        self._following: dict[int, _Following] = {}
        self._numbers = itertools.count()
        self._is_closed = threading.Event()
        self._gone: str | None = "the engine process is starting"
        """Why no request can be sent now."""
        self._retired: _Child | None = None
        """A child that is being replaced though it has cores left. Until the next one is ready, requests are held."""
        self._held: list[bytes] = []
        """Messages about requests for the next child."""
        self._cores_alive: list[int] = []
        self._silent_s, self._pulse_at = 0.0, time.monotonic()
        self._num_looks = 0
        """Since the last sign of life."""
        self._hang_timeout_s: float | None = None
        self._num_failed_starts = 0
        self._ready: Future[wire.Ready] = Future()
        self._child = self._new_child()
        self._thread = threading.Thread(target=self._serve, name="tokenmill-process-client", daemon=True)
        self._thread.start()
        try:
            ready = self._ready.result()
        except BaseException:
            self.close()
            raise
        path = None if ready.path is None else Path(ready.path)
        self.model = RemoteModel(ready.info, path, has_vocab=ready.has_vocab)
        self.config: EngineConfig = ready.config
        self.limits: BackendLimits = ready.limits
        self._max_model_len = ready.max_model_len

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The engine process."""
        return self._child.process

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def num_cores(self) -> int:
        return self._num_cores

    @property
    def cores_alive(self) -> list[int]:
        if self._retired is not None:
            return list(range(self._num_cores))  # the next child will have them
        return self._cores_alive if self._gone is None else []

    @property
    def seconds_silent(self) -> float:
        """What the process last said, and how much longer than a heartbeat it has said nothing."""
        return self._silent_s + max(0.0, time.monotonic() - self._pulse_at - 2 * HEARTBEAT_S)

    @property
    def is_hung(self) -> bool:
        return False  # it is killed and replaced

    @property
    def is_lost(self) -> bool:
        return not self._is_closed.is_set() and not self._thread.is_alive()

    def submit(self, request: Request, sink: Sink, core: int | None = None) -> None:
        check_request(request, self.model.info, self.max_model_len)
        message = wire.pack(wire.Submit.of(request, core))
        with self._lock:
            if self._gone is not None and self._retired is None:
                raise EngineDead(self._gone)
            if request.request_id in self._requests:
                raise InvalidRequest(f"request {request.request_id} is already running")
            self._requests[request.request_id] = request
            self._sinks.add(request.request_id, sink)
            self._send(message)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        check_cancel(reason)
        self._post_about(wire.Cancel(request_id, reason))

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._post_about(wire.Finish(request_id, keep_tokens))

    def _post_about(self, message: wire.Cancel | wire.Finish) -> None:
        """Post it if its request is running; else there is nothing to end."""
        with self._lock:
            if message.request_id in self._requests:
                self._send(wire.pack(message))

    def _send(self, message: bytes) -> None:
        """Post a message about a request, or hold it for the next child. Under the lock."""
        if self._retired is None:
            self._child.mail.post(message)
        else:
            self._held.append(message)

    def release(self, owner: str) -> None:
        with self._lock:
            if self._gone is None:
                self._child.mail.post(wire.pack(wire.Release(owner)))

    def replay_s(self, core: int, num_tokens: int) -> Future[float | None]:
        question = partial(wire.AskReplay, core=core, num_tokens=num_tokens)
        return self._ask(question, partial(wire.decode_value, type=float | None))

    def export_kv(self, core: int, owner: str, *, at_once: bool = False) -> Future[tuple[IntArray, bytes] | None]:
        def read(raw: msgspec.Raw) -> tuple[IntArray, bytes] | None:
            kv = wire.decode_value(raw, type=wire.ExportedKV | None)
            return None if kv is None else (kv.token_ids, kv.state)

        return self._ask(partial(wire.ExportKV, core=core, owner=owner, at_once=at_once), read)

    def import_kv(self, core: int, tokens: IntArray, state: bytes, hints: Hints) -> Future[bool]:
        namespace, hints = wire.plain_namespace(hints), replace(hints, namespace=None)
        kv = wire.ExportedKV.of(tokens, state)
        question = partial(wire.ImportKV, core=core, kv=kv, hints=hints, namespace=namespace)
        return self._ask(question, partial(wire.decode_value, type=bool))

    def stats(self) -> list[CoreStats | None]:
        read = partial(wire.decode_value, type=list[CoreStats | None])
        found: list[CoreStats | None] = self._ask(wire.AskStats, read).result(ANSWER_S)
        return found

    def snapshots(self) -> list[CoreSnapshot | None]:
        read = partial(wire.decode_value, type=list[CoreSnapshot | None])
        found: list[CoreSnapshot | None] = self._ask(wire.AskSnapshots, read).result(ANSWER_S)
        return found

    def subscribe(self, core: int, make: MakeSubscriber) -> Callable[[], None]:
        """As with every client; the subscriber is called on the thread that reads the socket."""
        following = _Following(core, make)
        number = next(self._numbers)

        def begin(raw: msgspec.Raw) -> None:
            following.begin(wire.decode_value(raw, type=CoreSnapshot))

        try:
            self._ask(partial(wire.Follow, core=core), begin, number, following).result(ANSWER_S)
        except BaseException:
            self._unfollow(number)
            raise
        return partial(self._unfollow, number)

    def _unfollow(self, number: int) -> None:
        """End a subscription, unless it has ended."""
        with self._lock:
            if self._following.pop(number, None) is not None and self._gone is None:
                self._child.mail.post(wire.encode(wire.Unfollow(number)))

    def _ask(
        self,
        make: Callable[[int], wire.Question],
        read: Callable[[msgspec.Raw], T],
        number: int | None = None,
        following: _Following | None = None,
    ) -> Future[T]:
        """Send a question; its answer is read on the thread that hears it. `EngineDead` if there is no engine.

        `following`: the subscription that the question begins. It is noted together with it, so that an engine process
        that starts meanwhile follows it either again or not yet.
        """
        number = next(self._numbers) if number is None else number
        answer: Future[T] = Future()

        def take(message: wire.Answer) -> None:
            if not answer.set_running_or_notify_cancel():  # nobody waits for it any more
                return
            if message.error is not None:
                answer.set_exception(EngineDead(message.error))
                return
            try:
                answer.set_result(read(message.value))
            except Exception as error:
                answer.set_exception(error)

        message = wire.encode(make(number))
        with self._lock:
            if self._gone is not None:
                answer.set_exception(EngineDead(self._gone))
            else:
                self._questions[number] = take
                if following is not None:
                    self._following[number] = following
                self._child.mail.post(message)
        return answer

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop the engine process, which is killed if it does not stop in time (default: `CLOSE_S`)."""
        with self._lock:
            is_loading = self._gone is not None and not self._is_closed.is_set()
            self._gone = "the engine was closed"
            self._is_closed.set()
            self._child.mail.post(wire.encode(wire.Close()))
            if is_loading:  # it reads no message before that is done, and nothing runs there
                self._child.process.kill()
        self._thread.join(CLOSE_S if timeout_s is None else timeout_s)
        if self._thread.is_alive():
            self._child.process.kill()
            self._thread.join()
        return True

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _new_child(self) -> _Child:
        child = _Child.start()
        child.mail.post(self._start)
        return child

    def _serve(self) -> None:
        """Carry messages, from one child after the other. Whatever ends this, it leaves no child and nobody waiting."""
        goes_on = True
        while goes_on:
            child, why = self._child, ""
            try:
                while child.process.poll() is None and not why:
                    self._read(child, HEARTBEAT_S)
                    why = self._why_hung(child)
                self._read(child, 0)
            except Exception:
                log.exception("the messages of engine process %d failed; the process is ended", child.process.pid)
                self._num_failed_starts = MAX_FAILED_STARTS  # a bug, which another process would meet again
            finally:
                child.end()
                self._end_all(why or f"the engine process ended with exit code {child.process.returncode}", child)
            goes_on = self._start_again()
        self._end_all(self._gone or "")  # requests that were held for a child that has not come

    def _why_hung(self, child: _Child) -> str:
        """Nothing unless the child has stopped to run Python; while it does, it abandons its own cores."""
        silent_s = time.monotonic() - self._pulse_at
        self._num_looks += 1
        if self._gone is not None or self._hang_timeout_s is None or silent_s < self._hang_timeout_s + GRACE_S:
            return ""
        if self._num_looks < MIN_LOOKS:
            return ""
        why = f"engine process {child.process.pid} hangs: no sign of life for {silent_s:.1f} s"
        log.critical("%s; it is killed. Stacks of all its threads:\n%s", why, child.stacks())
        return why

    def _start_again(self) -> bool:
        """Start another child. False if the engine is closed or given up."""
        if self._ready.exception() is not None:
            return False
        while self._num_failed_starts < MAX_FAILED_STARTS:
            if self._is_closed.wait(RETRY_S * self._num_failed_starts):
                return False
            log.warning("%s; another one is started", self._gone)
            self._num_failed_starts += 1  # until it is ready
            try:
                child = self._new_child()
            except EngineDead as error:
                with self._lock:
                    self._gone = self._gone if self._is_closed.is_set() else str(error)
                continue
            with self._lock:
                if not self._is_closed.is_set():
                    self._child = child
                    return True
            child.end()
            return False
        log.error("%s; the engine is given up", self._gone)
        return False

    def _read(self, child: _Child, timeout_s: float) -> None:
        for message in child.mail.receive(int(1000 * timeout_s)):
            self._take(wire.decode_from_engine(message))

    def _take(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Step):
            self._hear(message)
        elif isinstance(message, wire.Told):
            if (following := self._following.get(message.number)) is not None:
                self._tell(message.number, partial(following.hear, message.event()))
        elif isinstance(message, wire.Pulse):
            self._cores_alive, self._silent_s = message.cores_alive, message.seconds_silent
            self._pulse_at, self._num_looks = time.monotonic(), 0
            with self._lock:
                if not message.cores_alive:  # it is about to end
                    self._gone = self._gone or "all cores of the engine process have failed"
                elif len(message.cores_alive) < self._num_cores and not self._requests and self._gone is None:
                    self._gone = f"engine process {self._child.process.pid} has lost a core and is replaced"
                    self._retired = self._child
                    self._child.process.kill()
            for request_id in message.started:
                self._note_started(request_id)
        elif isinstance(message, wire.Answer):
            with self._lock:
                take = self._questions.pop(message.number, None)
            if take is not None:
                take(message)
        elif isinstance(message, wire.Logged):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        elif isinstance(message, wire.Ready):
            self._begin(message)
        elif not self._ready.done():
            self._ready.set_exception(message.error())
            self._child.process.kill()
        else:
            log.error("the engine process could not be started again: %s", message.reason)
            self._child.process.kill()

    def _begin(self, ready: wire.Ready) -> None:
        """A child has loaded the model: requests may come, once the subscriptions to its cores are back."""
        self._cores_alive, self._silent_s, self._pulse_at = list(range(self._num_cores)), 0.0, time.monotonic()
        self._num_looks = 0
        self._hang_timeout_s = ready.config.hang_timeout_s
        with self._lock:
            for number, following in self._following.items():
                self._questions[number] = partial(self._follow_again, number, following)
                self._child.mail.post(wire.encode(wire.Follow(number, following.core)))
            self._num_failed_starts = 0
            if not self._is_closed.is_set():
                self._gone = None
            held, self._held, self._retired = self._held, [], None
            for message in held:
                self._send(message)
        if not self._ready.done():
            self._ready.set_result(ready)

    def _follow_again(self, number: int, following: _Following, answer: wire.Answer) -> None:
        if answer.error is None:
            snapshot = wire.decode_value(answer.value, type=CoreSnapshot)
            self._tell(number, partial(following.begin, snapshot))

    def _tell(self, number: int, event: Callable[[], None]) -> None:
        """Call a subscriber; one that raises is dropped."""
        try:
            event()
        except Exception:
            log.exception("a subscriber failed and is dropped")
            self._unfollow(number)

    def _note_started(self, request_id: str) -> None:
        """A request has left the queue in the child: its queue timeout is over here, too."""
        request = self._requests.get(request_id)
        if request is not None and request.state is RequestState.WAITING:
            request.become(RequestState.RUNNING)

    def _hear(self, message: wire.Step) -> None:
        """Hand a step result to the sinks of its requests."""
        result = message.result()
        with self._lock:
            for request_id, facts in message.facts.items():
                if (request := self._requests.get(request_id)) is not None:
                    self._note_started(request_id)
                    request.num_cached, request.verdict = facts.num_cached, facts.verdict
                    if facts.prompt_logprobs is not None:
                        request.prompt_logprobs = facts.prompt_logprobs
                    request.embedding = facts.embedding
                    request.num_proposed, request.num_agreed = facts.num_proposed, facts.num_agreed
            parts = self._sinks.route(result)
            for place in result.ends:
                self._requests.pop(result.request_ids[place], None)
        for sink, part in parts:
            if unheard := tell(sink, part):
                with self._lock:
                    self._sinks.drop(unheard)
                for request_id in unheard:
                    self.cancel(request_id)

    def _end_all(self, why: str, child: _Child | None = None) -> None:
        """Tell every caller that the child is gone; of one that was retired when idle, requests wait for the next."""
        with self._lock:
            closed = self._is_closed.is_set()
            are_held = not closed and child is not None and child is self._retired
            if not closed and not are_held:
                self._gone = why
            gone, parts = self._gone or "", []
            if not are_held:
                reason = FinishReason.SHUTDOWN if closed else FinishReason.ERROR
                ends = [StepResult.of_end(request_id, reason, gone) for request_id in self._requests]
                parts = [part for end in ends for part in self._sinks.route(end)]
                self._requests, self._held, self._retired = {}, [], None
            questions, self._questions = self._questions, {}
            all_following = list(self._following.items())
        for sink, part in parts:
            tell(sink, part)
        for number, take in questions.items():
            take(wire.Answer(number, error=gone))
        for number, following in all_following:
            self._tell(number, following.end_all)
        if not self._ready.done():
            self._ready.set_exception(EngineDead(gone))


class EngineProcess:
    """The child's side: a `ThreadClient` behind a mailroom. `run` is for the thread that made it."""

    def __init__(self, address: str) -> None:
        self._mail = Mailroom(address, bind=False)
        self._client: ThreadClient | None = None
        self._requests: dict[str, Request] = {}
        """Those that run, for what the parent is to know of them."""
        self._started: set[str] = set()
        """Those whose first token has been sent."""
        self._following: dict[int, Callable[[], None]] = {}
        """The calls that end subscriptions; of one that has not begun yet, one that does nothing."""
        self._told_alive: list[int] = []
        """The cores that the parent was last told are alive."""
        self._compiling: dict[str, FinishReason | None] = {}
        """Requests whose grammars are being compiled, and why those were cancelled that were."""
        self._grammars: Future[GrammarCompiler] = Future()
        """From the model's tokenizer, which is read once the engine is ready."""
        self._lock = threading.Lock()
        """Around the subscriptions and the requests whose grammars are being compiled."""
        self._going = True

    def log(self, record: logging.LogRecord, text: str) -> None:
        """On any thread: let the parent log it, where and how its own records are."""
        self._mail.post(wire.encode(wire.Logged.of(record, text)))

    def run(self) -> None:
        pulse_at = 0.0
        try:
            while self._going:
                for message in self._mail.receive(int(1000 * HEARTBEAT_S)):
                    self._obey(message)
                if self._going and self._client is not None and time.monotonic() >= pulse_at:
                    pulse_at = time.monotonic() + HEARTBEAT_S
                    self._pulse(self._client)
        finally:
            self._mail.close()  # sends what was posted: why it ends is among it

    def _pulse(self, client: ThreadClient) -> None:
        """Tell how the cores are. With none left this process is of no use: its parent starts another one."""
        self._post_pulse(client)
        if not client.cores_alive:
            raise EngineDead("all engine cores have failed")

    def _post_pulse(self, client: ThreadClient) -> None:
        started = [
            name
            for name, request in list(self._requests.items())
            if name not in self._started and request.state is not RequestState.WAITING
        ]
        self._told_alive = client.cores_alive
        self._mail.post(wire.encode(wire.Pulse(self._told_alive, client.seconds_silent, started)))

    def _obey(self, message: bytes) -> None:
        """Do what a message says. If that fails it costs at most the message's own request, never the process."""
        try:
            self._take(wire.decode_for_engine(message))
        except TokenmillError as error:
            self._fail(wire.read_envelope(message), error)
        except Exception as error:  # a bug; but others have requests here
            log.exception("the engine process could not do what a message says")
            self._fail(wire.read_envelope(message), error)

    def _take(self, message: wire.ToEngine) -> None:
        client = self._client
        if isinstance(message, wire.Start):
            self._start(message)
        elif client is None or isinstance(message, wire.Close):
            self._stop()
        elif isinstance(message, wire.Submit):
            self._take_request(client, message.request(), message.core)
        elif isinstance(message, wire.Cancel):
            with self._lock:
                if is_compiling := message.request_id in self._compiling:
                    self._compiling[message.request_id] = message.reason
            if not is_compiling:
                client.cancel(message.request_id, message.reason)
        elif isinstance(message, wire.Finish):
            client.finish(message.request_id, message.keep_tokens)
        elif isinstance(message, wire.Release):
            client.release(message.owner)
        elif isinstance(message, wire.Unfollow):
            with self._lock:
                end = self._following.pop(message.number, _nothing)
            end()
        else:
            self._take_question(client, message)

    def _take_request(self, client: ThreadClient, request: Request, core: int | None) -> None:
        """Submit a request; if its grammar has to be compiled first, on a thread: tokens of others are sent here."""
        outputs = request.draw.params.structured_outputs
        if outputs is None:
            self._submit(client, request, core)
            return
        grammar = self._grammars.result().cached(outputs) if self._grammars.done() else None
        if grammar is not None:
            request.grammar = grammar.start()
            self._submit(client, request, core)
            return
        self._compiling[request.request_id] = None
        compiling = threading.Thread(
            target=self._compile, args=(client, request, core), name="tokenmill-compile", daemon=True
        )
        compiling.start()

    def _submit(self, client: ThreadClient, request: Request, core: int | None) -> None:
        """To the core of its session, unless that one is lost: the parent may not have heard of it yet."""
        self._requests[request.request_id] = request
        try:
            client.submit(request, self._tell, core if core in client.cores_alive else None)
        except BaseException:
            del self._requests[request.request_id]
            raise

    def _compile(self, client: ThreadClient, request: Request, core: int | None) -> None:
        """On a thread of its own, for one request. The parent has compiled it too: it is valid."""
        outputs, name = request.draw.params.structured_outputs, request.request_id
        try:
            if outputs is not None:
                request.grammar = self._grammars.result().compile(outputs).start()
            with self._lock:
                reason = self._compiling.pop(name)
                if reason is None:
                    self._submit(client, request, core)
            if reason is not None:
                self._mail.post(wire.encode(wire.Step.of(StepResult.of_end(name, reason, None), {})))
        except Exception as error:
            self._compiling.pop(name, None)
            self._mail.post(wire.failed(name, str(error)))

    def _take_question(self, client: ThreadClient, message: wire.Question) -> None:
        """A core answers between two steps, and a step may hang; the reading of messages must not."""
        if isinstance(message, wire.AskReplay):
            predicted = client.replay_s(message.core, message.num_tokens)
            predicted.add_done_callback(partial(self._answer, message.number))
        elif isinstance(message, wire.ExportKV):
            exported = client.export_kv(message.core, message.owner, at_once=message.at_once)
            exported.add_done_callback(partial(self._answer, message.number))
        elif isinstance(message, wire.ImportKV):
            hints = wire.with_namespace(message.hints, message.namespace)
            imported = client.import_kv(message.core, message.kv.token_ids, message.kv.state, hints)
            imported.add_done_callback(partial(self._answer, message.number))
        else:
            asked: Callable[[], Any]
            if isinstance(message, wire.Follow):
                self._following[message.number] = _nothing  # it may be ended before it has begun
                asked = partial(self._follow, client, message)
            else:
                asked = client.stats if isinstance(message, wire.AskStats) else client.snapshots
            thread = threading.Thread(
                target=self._answer_with, args=(message.number, asked), name="tokenmill-answer", daemon=True
            )
            thread.start()

    def _answer_with(self, number: int, asked: Callable[[], Any]) -> None:
        """On a thread of its own, for one answer."""
        answer: Future[Any] = Future()
        try:
            answer.set_result(asked())
        except Exception as error:  # a bug, too: whoever asked waits for an answer
            answer.set_exception(error)
        self._answer(number, answer)

    def _answer(self, number: int, answer: Future[Any]) -> None:
        """On whatever thread has the answer."""
        try:
            value = answer.result()
            if value is _SENT:
                return
            if isinstance(value, tuple):
                value = wire.ExportedKV.of(*value)
            message = wire.encode(wire.Answer(number, msgspec.Raw(wire.encode(value))))
        except Exception as error:
            message = wire.no_answer(number, error)
        self._mail.post(message)

    def _follow(self, client: ThreadClient, message: wire.Follow) -> object:
        """The answer is the snapshot, which has been sent by then."""
        number = message.number

        def make(snapshot: CoreSnapshot) -> Subscriber:
            """On the core's thread: nothing happens between the snapshot and the first event."""
            self._mail.post(wire.encode(wire.Answer(number, msgspec.Raw(wire.encode(snapshot)))))
            return lambda event: self._mail.post(wire.encode(wire.Told.of(number, event)))

        try:
            end = client.subscribe(message.core, make)
        except BaseException:
            with self._lock:
                self._following.pop(number, None)
            raise
        with self._lock:
            if is_wanted := number in self._following:
                self._following[number] = end
        if not is_wanted:
            end()
        return _SENT

    def _fail(self, envelope: wire.Envelope, error: Exception) -> None:
        """Let the parent hear of a message that failed."""
        if envelope.type == wire.Start.__name__:
            self._mail.post(wire.encode(wire.Failed.of(error)))  # and wait for the parent to close
        elif envelope.number is not None:
            self._mail.post(wire.no_answer(envelope.number, error))
        elif envelope.request_id is not None and envelope.type == wire.Submit.__name__:
            self._mail.post(wire.failed(envelope.request_id, str(error)))
        elif envelope.request_id is not None and self._client is not None:
            log.warning("request %s is ended: %s", envelope.request_id, error)
            with contextlib.suppress(EngineDead):  # then it has had its ending
                self._client.cancel(envelope.request_id, FinishReason.ERROR)

    def _start(self, start: wire.Start) -> None:
        logging.getLogger(PACKAGE).setLevel(start.log_level)
        options = start.options if start.config is None else {**start.options, "config": start.config}
        if start.model != "fake" and not (fit := plan_one_session(start.model, options)).fits:
            raise InsufficientMemory(fit.shortage(start.model))
        loaded = load_for_engine(start.model, options, offline=start.offline)
        model, config, limits = loaded.model, loaded.config, loaded.limits
        client = ThreadClient(model, config, limits, loaded.draft, num_cores=num_workers(options))
        path = None if model.path is None else str(model.path)
        has_vocab = getattr(model, "vocab", None) is not None
        ready = wire.Ready(model.info, path, config, limits, client.max_model_len, has_vocab)
        self._client = client
        self._mail.post(wire.encode(ready))
        opening = threading.Thread(target=self._open_grammars, args=(model,), name="tokenmill-grammars", daemon=True)
        opening.start()

    def _open_grammars(self, model: ModelHandle) -> None:
        """On a thread of its own: structured outputs need the model's tokenizer, which nothing else here does."""
        try:
            grammars = open_text(model).grammars(model.info.vocab_size)
            if grammars.is_available:
                grammars.warm()
            self._grammars.set_result(grammars)
        except Exception as error:
            self._grammars.set_exception(error)

    def _tell(self, result: StepResult) -> None:
        """On a core's thread, or the supervisor's."""
        if result.ends and self._client is not None and self._client.cores_alive != self._told_alive:
            self._post_pulse(self._client)  # first: the next request may follow at once, and be meant for that core
        facts = {}
        for place in result.ends:
            request_id = result.request_ids[place]
            if (request := self._requests.pop(request_id, None)) is not None:
                facts[request_id] = self._facts(request, is_first=request_id not in self._started)
            self._started.discard(request_id)
        for request_id in result.request_ids:
            if request_id not in self._started and (request := self._requests.get(request_id)) is not None:
                self._started.add(request_id)
                facts[request_id] = self._facts(request, is_first=True)
        self._mail.post(wire.encode(wire.Step.of(result, facts)))

    def _facts(self, request: Request, *, is_first: bool) -> wire.Facts:
        scores = request.prompt_logprobs if is_first and request.prompt_logprobs else None
        return wire.Facts(
            request.num_cached, request.verdict, scores, request.embedding, request.num_proposed, request.num_agreed
        )

    def _stop(self) -> None:
        if self._client is not None:
            self._client.close()
        self._going = False


_SENT = object()
"""Instead of an answer that has been sent."""


def _nothing() -> None:
    """Ends a subscription that has ended, or has not begun."""


def end_with_parent(address: str) -> None:
    """End this process when the parent's end of standard input is closed, whatever closed it; the socket goes, too."""
    socket = Path(address.removeprefix(IPC))

    def watch() -> None:
        # Not through `sys.stdin`: its lock, held by a thread that waits for ever, makes the interpreter abort.
        while os.read(0, 4096):
            pass
        with contextlib.suppress(OSError):  # the parent has removed them
            socket.unlink(missing_ok=True)
            (socket.parent / STACKS).unlink(missing_ok=True)
            socket.parent.rmdir()
        os._exit(1)

    threading.Thread(target=watch, name="tokenmill-parent-watch", daemon=True).start()


class _ToParent(logging.Handler):
    def __init__(self, engine: EngineProcess) -> None:
        super().__init__()
        self._engine = engine

    def emit(self, record: logging.LogRecord) -> None:
        self._engine.log(record, self.format(record))


@contextlib.contextmanager
def _logging_to(engine: EngineProcess) -> Iterator[None]:
    """Inside, what is logged here is the parent's to write."""
    handler = _ToParent(engine)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def dump_stacks_on_signal(address: str) -> None:
    """On SIGUSR1, write the stacks of all threads to a file beside the socket. In C: it works while the GIL is held."""
    socket = Path(address.removeprefix(IPC))
    if socket.is_absolute():  # else the parent's folder is not known
        faulthandler.register(signal.SIGUSR1, (socket.parent / STACKS).open("w"), all_threads=True)


def main(address: str) -> None:
    """Be the engine process. Leaves by `os._exit` however it ends: no thread of an engine can hold it up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to all of a service's processes; the parent decides what it means
    code = 1
    try:
        end_with_parent(address)
        dump_stacks_on_signal(address)
        engine = EngineProcess(address)
        with _logging_to(engine):
            engine.run()
        sys.stdout.flush()
        code = 0
    except BaseException:
        log.exception("the engine process failed")  # on standard error: no more messages are sent
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
