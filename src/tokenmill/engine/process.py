"""The engine in a process of its own: `ProcessClient` here, `python -m tokenmill.engine.process ADDRESS` there.

They talk over a private unix socket. Neither outlives the other: the child ends when its standard input, a pipe from
the parent, is closed by whatever ends the parent; the parent tells every waiting caller when the child is gone. The
engine process is a disposable cache: all it knows can be computed again from token ids.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.core import BackendLimits, ModelInfo
from tokenmill.engine import wire
from tokenmill.engine.client import ThreadClient
from tokenmill.engine.mailroom import Mailroom
from tokenmill.engine.pool import Sink
from tokenmill.engine.request import Request, check_request
from tokenmill.errors import EngineDead, ModelNotFound, TokenmillError
from tokenmill.outputs import FinishReason, GeneratedToken

HEARTBEAT_MS = 250
"""How often each side looks whether the other one is there."""
CLOSE_S = 5.0


class ProcessClient:
    """An `EngineClient` whose engine lives in a child process. Safe to use from any thread."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any] | None = None,
        config: EngineConfig = EngineConfig(),
        limits: BackendLimits = BackendLimits(),
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tokenmill-"))  # for this user's eyes only
        address = f"ipc://{self._folder / 'engine'}"
        self._mail = Mailroom(address, bind=True)
        self._lock = threading.Lock()
        self._requests: dict[str, tuple[Request, Sink]] = {}
        self._questions: dict[int, Future[Any]] = {}
        self._gone: EngineDead | None = None
        self._ready: Future[wire.Ready] = Future()
        command = [sys.executable, "-m", "tokenmill.engine.process", address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)
        self._thread = threading.Thread(target=self._serve, name="tokenmill-process-client", daemon=True)
        self._thread.start()
        self._mail.post(wire.encode(wire.Start(model, dict(options or {}), config, limits)))
        try:
            ready = self._ready.result()
        except BaseException:
            self.close()
            raise
        self._info = ModelInfo(model, ready.vocab_size, 0, ready.max_model_len, ())

    @property
    def max_model_len(self) -> int:
        return self._info.max_context

    def submit(self, request: Request, sink: Sink) -> None:
        check_request(request, self._info, self.max_model_len)
        with self._lock:
            if self._gone is not None:
                raise self._gone
            if request.request_id in self._requests:
                taken = f"request {request.request_id} is running already"
                sink(GeneratedToken(request.request_id, None, FinishReason.ERROR, taken))
                return
            self._requests[request.request_id] = (request, sink)
            self._mail.post(wire.encode(wire.Submit.of(request)))

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED) -> None:
        self._mail.post(wire.encode(wire.Cancel(request_id, reason)))

    def finish(self, request_id: str, keep_tokens: int) -> None:
        self._mail.post(wire.encode(wire.Finish(request_id, keep_tokens)))

    def stats(self) -> list[Any]:
        """The cores' statistics, as dictionaries."""
        answer: Future[list[Any]] = Future()
        with self._lock:
            if self._gone is not None:
                raise self._gone
            number = len(self._questions)
            while number in self._questions:
                number += 1
            self._questions[number] = answer
            self._mail.post(wire.encode(wire.AskStats(number)))
        return answer.result(timeout=10)

    def close(self) -> None:
        """Stop the engine process; requests that were not done end with `shutdown`."""
        with self._lock:
            if self._gone is None:
                self._gone = EngineDead("the engine was closed")
        self._mail.post(wire.encode(wire.Close()))
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self.process.kill()
            self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Carry messages until the child is gone, then tell whoever is left."""
        while self.process.poll() is None:
            self._read(HEARTBEAT_MS)
        self._read(0)
        self._end_all()
        self._mail.close()
        if self.process.stdin is not None:
            self.process.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, timeout_ms: int) -> None:
        for message in self._mail.receive(timeout_ms):
            self._take(wire.decode_from_engine(message))

    def _take(self, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Token):
            token = message.token
            with self._lock:
                found = self._requests.get(token.request_id)
                if found is not None and token.is_finished:
                    del self._requests[token.request_id]
            if found is not None:
                found[0].num_cached = message.num_cached
                found[0].prompt_logprobs = message.prompt_logprobs
                found[0].embedding = message.embedding
                found[1](token)
        elif isinstance(message, wire.Stats):
            self._questions.pop(message.number).set_result(message.stats)
        elif isinstance(message, wire.Ready):
            self._ready.set_result(message)
        else:
            self._ready.set_exception(ModelNotFound(message.reason))

    def _end_all(self) -> None:
        code = self.process.returncode
        with self._lock:
            closed = self._gone is not None
            self._gone = self._gone or EngineDead(f"the engine process ended with exit code {code}")
            left, self._requests = self._requests, {}
        reason = FinishReason.SHUTDOWN if closed else FinishReason.ERROR
        for request_id, (_, sink) in left.items():
            sink(GeneratedToken(request_id, None, reason, str(self._gone)))
        for question in self._questions.values():
            question.set_exception(self._gone)
        if not self._ready.done():
            self._ready.set_exception(self._gone)


class EngineProcess:
    """The child's side: a `ThreadClient` behind a mailroom."""

    def __init__(self, address: str) -> None:
        self._mail = Mailroom(address, bind=False)
        self._client: ThreadClient | None = None
        self._going = True

    def run(self) -> None:
        while self._going:
            for message in self._mail.receive(HEARTBEAT_MS):
                self._take(wire.decode_for_engine(message))
        self._mail.close()

    def _take(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Start):
            self._start(message)
        elif self._client is None or isinstance(message, wire.Close):
            self._stop()
        elif isinstance(message, wire.Submit):
            self._submit(self._client, message)
        elif isinstance(message, wire.Cancel):
            self._client.cancel(message.request_id, message.reason)
        elif isinstance(message, wire.Finish):
            self._client.finish(message.request_id, message.keep_tokens)
        else:
            stats = [None if one is None else asdict(one) for one in self._client.stats()]
            self._mail.post(wire.encode(wire.Stats(message.number, stats)))

    def _start(self, start: wire.Start) -> None:
        from tokenmill import open_model

        try:
            model = open_model(start.model, **start.options)
            self._client = ThreadClient(model, start.config, start.limits)
        except TokenmillError as error:
            self._mail.post(wire.encode(wire.Failed(str(error))))
            self._going = False
            return
        self._mail.post(wire.encode(wire.Ready(self._client.max_model_len, model.info.vocab_size)))

    def _submit(self, client: ThreadClient, message: wire.Submit) -> None:
        try:
            request = message.request()
            client.submit(request, lambda token: self._tell(request, token))
        except TokenmillError as error:
            failed = GeneratedToken(message.request_id, None, FinishReason.ERROR, str(error))
            self._mail.post(wire.encode(wire.Token(failed)))

    def _tell(self, request: Request, token: GeneratedToken) -> None:
        scores = request.prompt_logprobs if token.is_finished else []
        embedding = request.embedding if token.is_finished else []
        self._mail.post(wire.encode(wire.Token(token, request.num_cached, scores, embedding)))

    def _stop(self) -> None:
        if self._client is not None:
            self._client.close()
        self._going = False


def end_with_parent() -> None:
    """End this process when the parent's end of standard input is closed, whatever closed it."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, name="tokenmill-parent-watch", daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    EngineProcess(sys.argv[1]).run()
    sys.stdout.flush()
    os._exit(0)
