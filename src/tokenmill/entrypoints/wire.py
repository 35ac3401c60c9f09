"""What goes between a process and its engine process: msgpack through msgspec, never pickle. Imported where used.

The functions here keep no state and are safe on any thread. What is for the engine process goes through `pack`, so that
a value that can't be carried is its caller's mistake, told on the caller's thread. `Mailroom` owns the socket, on
one thread; all others hand it messages.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import zmq

from tokenmill import errors
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, IntArray, ModelInfo
from tokenmill.engine.events import (
    CellsEvent,
    Event,
    FailedStepEvent,
    ParkedEvent,
    ProposalEvent,
    RequestEvent,
    StartEvent,
    TickEvent,
    VerifiedEvent,
)
from tokenmill.engine.plan import StepShape
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.errors import IntegrityError, InvalidRequest, ModelLoadError, TokenmillError
from tokenmill.outputs import CacheVerdict, End, FinishReason, StepResult, TokenLogprobs
from tokenmill.params import Pooling


class Start(msgspec.Struct, tag=True):
    """The first message: which model to open, and how to run it."""

    model: str
    options: dict[str, Any]
    """Of `EngineOptions`, those that can be sent."""
    config: EngineConfig | None
    offline: bool = False
    log_level: int = logging.WARNING
    """What is less important is not logged."""


class Submit(msgspec.Struct, tag=True):
    """A request. Its namespace travels beside its hints: msgpack has no tuples, and a list is not hashable."""

    request_id: str
    prompt: bytes
    """Its ids as int32: a list of them would be converted one by one."""
    limits: Limits
    hints: Hints
    namespace: Any
    draw: Draw
    pooling: Pooling | None = None
    core: int | None = None

    @classmethod
    def of(cls, request: Request, core: int | None = None) -> Submit:
        """`InvalidRequest` if the namespace would arrive as something else."""
        namespace = plain_namespace(request.hints)
        hints = replace(request.hints, namespace=None)
        return cls(
            request.request_id,
            request.tokens.array.tobytes(),
            request.limits,
            hints,
            namespace,
            request.draw,
            request.pooling,
            core,
        )

    def request(self) -> Request:
        hints = with_namespace(self.hints, self.namespace)
        prompt = np.frombuffer(self.prompt, dtype=np.int32)
        return Request(self.request_id, prompt, self.limits, hints, self.draw, self.pooling)


class Cancel(msgspec.Struct, tag=True):
    request_id: str
    reason: FinishReason


class Finish(msgspec.Struct, tag=True):
    request_id: str
    keep_tokens: int


class Release(msgspec.Struct, tag=True):
    owner: str


class AskStats(msgspec.Struct, tag=True):
    number: int


class AskSnapshots(msgspec.Struct, tag=True):
    number: int


class AskReplay(msgspec.Struct, tag=True):
    """How long computing so many tokens would take."""

    number: int
    core: int
    num_tokens: int


class ExportKV(msgspec.Struct, tag=True):
    number: int
    core: int
    owner: str
    at_once: bool


class ImportKV(msgspec.Struct, tag=True):
    number: int
    core: int
    kv: ExportedKV
    hints: Hints
    namespace: Any


class Follow(msgspec.Struct, tag=True):
    """Send a snapshot of a core as the answer, and every event after it under the same number."""

    number: int
    core: int


class Unfollow(msgspec.Struct, tag=True):
    number: int


class Close(msgspec.Struct, tag=True):
    pass


class ExportedKV(msgspec.Struct):
    """KV of a session: its token ids as 32-bit integers, and its bytes."""

    tokens: bytes
    state: bytes

    @classmethod
    def of(cls, tokens: IntArray, state: bytes) -> ExportedKV:
        return cls(np.ascontiguousarray(tokens, dtype=np.int32).tobytes(), state)

    @property
    def token_ids(self) -> IntArray:
        return np.frombuffer(self.tokens, dtype=np.int32)


class Ready(msgspec.Struct, tag=True):
    """The model is loaded; what the parent has to know of it."""

    info: ModelInfo
    path: str | None
    config: EngineConfig
    limits: BackendLimits
    max_model_len: int
    has_vocab: bool = False
    """Does its backend have a tokenizer of its own?"""


class Pulse(msgspec.Struct, tag=True):
    """Sent at each heartbeat."""

    cores_alive: list[int]
    seconds_silent: float
    started: list[str] = []
    """Requests that have left the queue, but have no token yet."""


class Logged(msgspec.Struct, tag=True):
    """A log record of the engine process, for the parent's log."""

    logger: str
    level: int
    text: str
    """With the traceback, where there is one."""

    @classmethod
    def of(cls, record: logging.LogRecord, text: str) -> Logged:
        return cls(record.name, record.levelno, _printable(text))


class Failed(msgspec.Struct, tag=True):
    """The model could not be loaded: the class of the error and its text."""

    kind: str
    reason: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """An error that is none of tokenmill's own keeps its name in its text."""
        if isinstance(error, TokenmillError):
            return cls(type(error).__name__, _printable(str(error)))
        return cls(ModelLoadError.__name__, _printable(f"{type(error).__name__}: {error}"))

    def error(self) -> TokenmillError:
        """The error again; a `ModelLoadError` if its class is not to be had."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, TokenmillError):
            try:
                return kind(self.reason)
            except TypeError:  # it is made of more than a text
                pass
        return ModelLoadError(self.reason)


class Facts(msgspec.Struct, omit_defaults=True):
    """What else is to be known of a request: sent with its first token and with its end."""

    num_cached: int = 0
    verdict: CacheVerdict | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent once."""
    embedding: list[float] = []
    num_proposed: int = 0
    num_agreed: int = 0


class Step(msgspec.Struct, tag=True):
    """A step result: the columns as they are, and facts by request."""

    request_ids: list[str]
    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None] | None
    ends: dict[int, End]
    facts: dict[str, Facts] = {}

    @classmethod
    def of(cls, result: StepResult, facts: dict[str, Facts]) -> Step:
        ends = {
            place: end if end.error is None else End(end.finish_reason, _printable(end.error))
            for place, end in result.ends.items()
        }
        return cls(result.request_ids, result.token_ids, result.logprobs, ends, facts)

    def result(self) -> StepResult:
        return StepResult(self.request_ids, self.token_ids, self.logprobs, self.ends)


class Answer(msgspec.Struct, tag=True):
    """To the question of this number."""

    number: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    """Encoded; None where the question has no other answer."""
    error: str | None = None
    """Why there is none."""


class Tick(msgspec.Struct, tag=True, array_like=True):
    """A `TickEvent`, its arrays as bytes."""

    tick: int
    rows: bytes
    counts: bytes
    sampled_rows: bytes
    num_decode: int
    num_proposed: int
    requests: tuple[str | None, ...]
    at: float
    schedule_s: float
    step_s: float
    num_running: int
    num_waiting: int
    free_cells: int
    num_parked: int
    prefill_s: float
    mask_s: float

    @classmethod
    def of(cls, event: TickEvent) -> Tick:
        plan = event.plan
        return cls(
            plan.tick, plan.rows.tobytes(), plan.counts.tobytes(), plan.sampled_rows.tobytes(), plan.num_decode,
            plan.num_proposed, event.requests, event.at, event.schedule_s, event.step_s, event.num_running,
            event.num_waiting, event.free_cells, event.num_parked, event.prefill_s, event.mask_s,
        )  # fmt: skip

    def event(self) -> TickEvent:
        rows, counts, sampled = (
            np.frombuffer(column, dtype=np.int32) for column in (self.rows, self.counts, self.sampled_rows)
        )
        shape = StepShape(self.tick, rows, counts, sampled, self.num_decode, num_proposed=self.num_proposed)
        return TickEvent(
            shape, self.requests, self.at, self.schedule_s, self.step_s, self.num_running, self.num_waiting,
            self.free_cells, self.num_parked, self.prefill_s, self.mask_s,
        )  # fmt: skip


class Told(msgspec.Struct, tag=True, omit_defaults=True):
    """An event of a core that is followed: one of these."""

    number: int
    tick: Tick | None = None
    request: RequestEvent | None = None
    proposal: ProposalEvent | None = None
    verified: VerifiedEvent | None = None
    parked: ParkedEvent | None = None
    cells: CellsEvent | None = None
    failed_step: FailedStepEvent | None = None
    start: StartEvent | None = None

    @classmethod
    def of(cls, number: int, event: Event) -> Told:
        if isinstance(event, TickEvent):
            return cls(number, tick=Tick.of(event))
        if isinstance(event, RequestEvent):
            return cls(number, request=event)
        if isinstance(event, ProposalEvent):
            return cls(number, proposal=event)
        if isinstance(event, VerifiedEvent):
            return cls(number, verified=event)
        if isinstance(event, ParkedEvent):
            return cls(number, parked=event)
        if isinstance(event, CellsEvent):
            return cls(number, cells=event)
        if isinstance(event, FailedStepEvent):
            return cls(number, failed_step=event)
        return cls(number, start=event)

    def event(self) -> Event:
        if self.tick is not None:
            return self.tick.event()
        changed = self.request or self.proposal or self.verified or self.parked or self.cells
        event = changed or self.failed_step or self.start
        if event is None:
            raise IntegrityError("an engine process sent an event without contents")
        return event


class Envelope(msgspec.Struct):
    """What can be read of a message whose contents can't: its kind, and which request or question it is about."""

    type: str = ""
    request_id: str | None = None
    number: int | None = None


Question = AskStats | AskSnapshots | AskReplay | ExportKV | ImportKV | Follow
ToEngine = Start | Submit | Cancel | Finish | Release | Question | Unfollow | Close
FromEngine = Ready | Failed | Step | Answer | Told | Pulse | Logged

encode = msgspec.msgpack.Encoder().encode
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_value = msgspec.msgpack.decode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode

_CAN_NOT_BE_CARRIED = (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError)


def pack(message: ToEngine, wrong: type[TokenmillError] = InvalidRequest) -> bytes:
    """Encode a message that the engine process is sure to be able to read; if there is none, `wrong` is raised."""
    try:
        packed = encode(message)
        decode_for_engine(packed)  # what encodes may still be of a wrong type, which only the reader looks at
    except _CAN_NOT_BE_CARRIED as error:
        raise wrong(f"{type(message).__name__} cannot be sent to the engine process: {error}") from None
    return packed


def read_envelope(message: bytes) -> Envelope:
    """As much as can be read; nothing of a message that is none."""
    try:
        return _decode_envelope(message)
    except msgspec.MsgspecError:
        return Envelope()


def failed(request_id: str, reason: str) -> bytes:
    """The message that ends a request which never reached the engine."""
    return encode(Step.of(StepResult.of_end(request_id, FinishReason.ERROR, _printable(reason)), {}))


def no_answer(number: int, error: BaseException) -> bytes:
    """The message that answers a question with the error it has led to."""
    return encode(Answer(number, error=_printable(f"{type(error).__name__}: {error}")))


def plain_namespace(hints: Hints) -> Hashable:
    """The namespace of a request, or `InvalidRequest` if it would arrive as something else."""
    if not _is_plain(hints.namespace):
        raise InvalidRequest(
            "a namespace for an engine process must consist of strings, bytes, numbers, None and tuples of them, "
            f"not {hints.namespace!r}"
        )
    return hints.namespace


def with_namespace(hints: Hints, namespace: Any) -> Hints:
    """Hints as they were before they were sent."""
    return replace(hints, namespace=_with_tuples(namespace))


def _is_plain(value: Hashable) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, str | bytes | int | float)


def _with_tuples(value: Any) -> Any:
    """What was a tuple before it was sent is one again."""
    return tuple(_with_tuples(one) for one in value) if isinstance(value, list) else value


def _printable(text: str) -> str:
    """File names and the texts of errors may hold lone surrogates, which no message can carry."""
    return text.encode("utf-8", "backslashreplace").decode()


class Mailroom:
    """A PAIR socket with an outbox that any thread may fill. `receive` is for the one thread that owns it."""

    def __init__(self, address: str, *, bind: bool) -> None:
        self._context = zmq.Context()
        try:
            self._socket = self._context.socket(zmq.PAIR)
            self._socket.setsockopt(zmq.LINGER, 1000)
            # Nothing is dropped and nobody blocks: what is in flight is bounded by the requests in flight.
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            (self._socket.bind if bind else self._socket.connect)(address)
            self._wake_read, self._wake_write = os.pipe()
        except BaseException:  # no descriptor left, for one
            self._context.destroy(linger=0)
            raise
        self._outbox: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._is_woken = False
        """There is something in the pipe that wakes the owner: one byte is enough."""
        os.set_blocking(self._wake_read, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def post(self, message: bytes) -> None:
        """On any thread: send this soon."""
        with self._lock:
            if self._closed:
                return
            self._outbox.append(message)
            if not self._is_woken:
                self._is_woken = True
                os.write(self._wake_write, b"!")

    def receive(self, timeout_ms: int) -> Iterator[bytes]:
        """Send what was posted, and give what has come, waiting for either.

        What is posted while messages are handled leaves before the next one is given: a reader that can't keep up
        must still be able to say "stop".
        """
        awake = dict(self._poller.poll(timeout_ms))
        if self._wake_read in awake:
            os.read(self._wake_read, 1)
            self._is_woken = False  # before the outbox is looked at: what is posted later wakes again
        self.flush()
        while self._socket.poll(0, zmq.POLLIN):
            yield self._socket.recv()
            self.flush()

    def flush(self) -> None:
        """Send what can be sent: nothing can while the other side is not there."""
        while self._outbox:
            try:
                self._socket.send(self._outbox[0], zmq.NOBLOCK)
            except zmq.Again:
                return
            self._outbox.popleft()

    def close(self) -> None:
        """On the owning thread, once. What is posted later goes nowhere."""
        with self._lock:
            self._closed = True
        self.flush()
        self._socket.close()
        self._context.term()
        os.close(self._wake_read)
        os.close(self._wake_write)
