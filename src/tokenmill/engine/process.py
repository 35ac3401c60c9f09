"""The engine in a process of its own: `ProcessClient` here, `python -m tokenmill.engine.process ADDRESS` there.

They talk over a private unix socket. Neither outlives the other: the child ends when its standard input, a pipe from
the parent, is closed by whatever ends the parent; the parent tells every waiting caller when the child is gone. The
engine process is a disposable cache: all it knows can be computed again from token ids.

A mistake costs its own request only. What can't be sent is refused on the caller's thread; a message that fails in the
child ends the request it is about; a sink that raises loses the request it listens to.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, IntArray, ModelInfo
from tokenmill.engine import wire
from tokenmill.engine.client import ThreadClient, done
from tokenmill.engine.core import check_cancel
from tokenmill.engine.events import CoreSnapshot
from tokenmill.engine.pool import MakeSubscriber, Sink, Sinks, tell
from tokenmill.engine.request import Hints, Request, check_request
from tokenmill.engine.wire import Mailroom
from tokenmill.errors import ConfigError, EngineDead, InvalidRequest, TokenmillError, Unsupported
from tokenmill.outputs import FinishReason, StepResult

log = logging.getLogger(__name__)

HEARTBEAT_MS = 250
"""How often each side looks whether the other one is there."""
CLOSE_S = 5.0
STATS_S = 10.0


class ProcessClient:
    """An `EngineClient` whose engine lives in a child process. Safe to use from any thread."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        config: EngineConfig = EngineConfig(),
        limits: BackendLimits = BackendLimits(),
        *,
        num_cores: int = 1,
    ) -> None:
        start = wire.pack(wire.Start(model, dict(options or {}), config, limits, num_cores), wrong=ConfigError)
        self._num_cores = num_cores
        self._folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))  # for this user's eyes only
        address = f"ipc://{self._folder / 'engine'}"
        self._mail = Mailroom(address, bind=True)
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._sinks = Sinks()
        self._questions: dict[int, Future[list[Any]]] = {}
        self._numbers = itertools.count()
        self._gone: str | None = None
        self._ready: Future[wire.Ready] = Future()
        command = [sys.executable, "-m", "tokenmill.engine.process", address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._thread = threading.Thread(target=self._serve, name="tokenmill-process-client", daemon=True)
        self._thread.start()
        self._mail.post(start)
        try:
            ready = self._ready.result()
        except BaseException:
            self.close()
            raise
        self._info = ModelInfo(model, ready.vocab_size, 0, ready.max_model_len, ())

    @property
    def max_model_len(self) -> int:
        return self._info.max_context

    @property
    def num_cores(self) -> int:
        return self._num_cores

    @property
    def cores_alive(self) -> list[int]:
        return list(range(self._num_cores)) if self._gone is None else []

    @property
    def seconds_silent(self) -> float:
        return 0.0  # the process does not tell

    def release(self, owner: str) -> None:
        with self._lock:
            if self._gone is None:
                self._mail.post(wire.pack(wire.Release(owner)))

    def export_kv(self, core: int, owner: str) -> Future[tuple[IntArray, bytes] | None]:  # noqa: ARG002
        return done(None)  # KV stays in its process: a session whose process is gone is replayed

    def import_kv(self, core: int, tokens: IntArray, state: bytes, hints: Hints) -> Future[bool]:  # noqa: ARG002
        return done(False)

    def submit(self, request: Request, sink: Sink, core: int | None = None) -> None:
        check_request(request, self._info, self.max_model_len)
        message = wire.pack(wire.Submit.of(request, core))
        with self._lock:
            if self._gone is not None:
                raise EngineDead(self._gone)
            if request.request_id in self._requests:
                raise InvalidRequest(f"request {request.request_id} is already running")
            self._requests[request.request_id] = request
            self._sinks.add(request.request_id, sink)
            self._mail.post(message)

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        check_cancel(reason)
        self._post_about(wire.Cancel(request_id, reason))

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._post_about(wire.Finish(request_id, keep_tokens))

    def _post_about(self, message: wire.Cancel | wire.Finish) -> None:
        """Post it if its request is running; else there is nothing to end."""
        with self._lock:
            if message.request_id in self._requests:
                self._mail.post(wire.pack(message))

    def stats(self) -> list[Any]:
        """The cores' statistics, as dictionaries."""
        answer: Future[list[Any]] = Future()
        with self._lock:
            if self._gone is not None:
                raise EngineDead(self._gone)
            number = next(self._numbers)
            self._questions[number] = answer
            self._mail.post(wire.encode(wire.AskStats(number)))
        try:
            return answer.result(timeout=STATS_S)
        finally:
            with self._lock:
                self._questions.pop(number, None)

    def snapshots(self) -> list[CoreSnapshot | None]:
        raise Unsupported("the slot view is not available from an engine process; use stats()")

    def subscribe(self, core: int, make: MakeSubscriber) -> Callable[[], None]:  # noqa: ARG002
        raise Unsupported("events are not available from an engine process; run the engine on threads")

    def close(self) -> None:
        """Stop the engine process; requests that were not done end with `shutdown`."""
        with self._lock:
            if self._gone is None:
                self._gone = "the engine was closed"
        self._mail.post(wire.encode(wire.Close()))
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Carry messages until the child is gone. Whatever ends this, it leaves no child and nobody waiting."""
        try:
            while self.process.poll() is None:
                self._read(HEARTBEAT_MS)
            self._read(0)
        except Exception:
            log.exception("the mail of engine process %d failed; the process is ended", self.process.pid)
        finally:
            self._reap()
            self._end_all()
            self._mail.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, timeout_ms: int) -> None:
        for message in self._mail.receive(timeout_ms):
            self._take(wire.decode_from_engine(message))

    def _take(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Step):
            self._hear(message)
        elif isinstance(message, wire.Stats):
            self._answer(message)
        elif isinstance(message, wire.Ready):
            self._ready.set_result(message)
        else:
            self._ready.set_exception(message.error())

    def _hear(self, message: wire.Step) -> None:
        """Hand a step result to the sinks of its requests."""
        result = message.result()
        with self._lock:
            for request_id, facts in message.facts.items():
                if (request := self._requests.get(request_id)) is not None:
                    request.num_cached = facts.num_cached
                    request.prompt_logprobs = facts.prompt_logprobs
                    request.embedding = facts.embedding
            parts = self._sinks.route(result)
            for place in result.ends:
                self._requests.pop(result.request_ids[place], None)
        for sink, part in parts:
            if unheard := tell(sink, part):
                with self._lock:
                    self._sinks.drop(unheard)
                for request_id in unheard:
                    self.cancel(request_id)

    def _answer(self, message: wire.Stats) -> None:
        with self._lock:
            question = self._questions.pop(message.number, None)
        if question is None:  # whoever asked has left
            return
        if message.error is None:
            question.set_result(message.stats)
        else:
            question.set_exception(EngineDead(message.error))

    def _reap(self) -> None:
        """Kill the child if it is still running, and wait for it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _end_all(self) -> None:
        code = self.process.returncode
        with self._lock:
            closed = self._gone is not None
            gone = self._gone = self._gone or f"the engine process ended with exit code {code}"
            reason = FinishReason.SHUTDOWN if closed else FinishReason.ERROR
            ends = [StepResult.of_end(request_id, reason, gone) for request_id in self._requests]
            parts = [part for end in ends for part in self._sinks.route(end)]
            self._requests = {}
            questions, self._questions = self._questions, {}
        for sink, part in parts:
            tell(sink, part)
        for question in questions.values():
            question.set_exception(EngineDead(gone))
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
        self._going = True

    def run(self) -> None:
        while self._going:
            for message in self._mail.receive(HEARTBEAT_MS):
                self._obey(message)
        self._mail.close()

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
        if isinstance(message, wire.Start):
            self._start(message)
        elif self._client is None or isinstance(message, wire.Close):
            self._stop()
        elif isinstance(message, wire.Submit):
            request = message.request()
            self._requests[request.request_id] = request
            try:
                self._client.submit(request, self._tell, message.core)
            except BaseException:
                del self._requests[request.request_id]
                raise
        elif isinstance(message, wire.Cancel):
            self._client.cancel(message.request_id, message.reason)
        elif isinstance(message, wire.Finish):
            self._client.finish(message.request_id, message.keep_tokens)
        elif isinstance(message, wire.Release):
            self._client.release(message.owner)
        else:
            # A core answers between two steps, and a step may hang; the mail must not.
            args = (self._client, message.number)
            threading.Thread(target=self._tell_stats, args=args, name="tokenmill-stats", daemon=True).start()

    def _fail(self, envelope: wire.Envelope, error: Exception) -> None:
        """Let the parent hear of a message that failed."""
        if envelope.type == wire.Start.__name__:
            self._mail.post(wire.encode(wire.Failed.of(error)))  # and wait for the parent to close
        elif envelope.request_id is not None and envelope.type == wire.Submit.__name__:
            self._mail.post(wire.failed(envelope.request_id, str(error)))
        elif envelope.request_id is not None and self._client is not None:
            log.warning("request %s is ended: %s", envelope.request_id, error)
            with contextlib.suppress(EngineDead):  # then it has had its ending
                self._client.cancel(envelope.request_id, FinishReason.ERROR)

    def _start(self, start: wire.Start) -> None:
        from tokenmill.backends.loading import open_model  # with all that reading a model's files takes

        model = open_model(start.model, **start.options)
        self._client = ThreadClient(model, start.config, start.limits, num_cores=start.num_cores)
        self._mail.post(wire.encode(wire.Ready(self._client.max_model_len, model.info.vocab_size)))

    def _tell(self, result: StepResult) -> None:
        """On a core's thread."""
        facts = {}
        for place, request_id in enumerate(result.request_ids):
            if place in result.ends:
                self._started.discard(request_id)
                if (request := self._requests.pop(request_id, None)) is not None:
                    facts[request_id] = wire.Facts(request.num_cached, request.prompt_logprobs, request.embedding)
            elif request_id not in self._started:
                self._started.add(request_id)
                facts[request_id] = wire.Facts(self._requests[request_id].num_cached)
        self._mail.post(wire.encode(wire.Step.of(result, facts)))

    def _tell_stats(self, client: ThreadClient, number: int) -> None:
        """On a thread of its own, for one answer."""
        try:
            stats = [None if one is None else asdict(one) for one in client.stats()]
        except (TokenmillError, TimeoutError) as error:
            self._mail.post(wire.encode(wire.Stats(number, None, f"no statistics: {type(error).__name__} {error}")))
        else:
            self._mail.post(wire.encode(wire.Stats(number, stats)))

    def _stop(self) -> None:
        if self._client is not None:
            self._client.close()
        self._going = False


def end_with_parent() -> None:
    """End this process when the parent's end of standard input is closed, whatever closed it."""

    def watch() -> None:
        # Not through `sys.stdin`: its lock, held by a thread that waits for ever, makes the interpreter abort.
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="tokenmill-parent-watch", daemon=True).start()


def main(address: str) -> None:
    """Be the engine process. Leaves by `os._exit` however it ends: no thread of an engine can hold it up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides what it means
    code = 1
    try:
        end_with_parent()
        EngineProcess(address).run()
        sys.stdout.flush()
        code = 0
    except BaseException:
        log.exception("the engine process failed")
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1])
