"""`PagedBackend`: the rules of a backend over `PagedKV`: which calls are legal, what a failure undoes.

What is left to a backend is the computing itself: begin a step, run one segment of it, sample rows, wait. The fake
backend does it in numpy, the torch backend on a device. `StepQueue` keeps the steps in flight; `WeightsGate` lets steps
compute side by side and gives a replacement of weights the model alone.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract.backend import (
    Backend,
    DecodeOutput,
    Forward,
    Mask,
    Sampled,
    SampleRows,
    Sampling,
    check_rows,
)
from tokenmill.contract.batch import Batch, IntArray, Output, asking_for, num_asking_for
from tokenmill.contract.kv import Capabilities
from tokenmill.errors import BackendClosed, ConfigError, ForwardFailed, InvalidBatch, InvalidOperation, StaleKV
from tokenmill.kv.paged import PagedKV, Segment


class Step:
    """A submitted forward: what all backends' `Forward` handles have in common."""

    def __init__(self, number: int) -> None:
        self.number = number
        """The KV memory's name for what this step wrote."""
        self.collected = False
        self.failure: ForwardFailed | None = None

    def raise_failure(self) -> None:
        """Raise the step's failure, if it has one, with a traceback of its own each time."""
        if self.failure is not None:
            raise again(self.failure)


AnyStep = TypeVar("AnyStep", bound=Step)


class StepQueue(Generic[AnyStep]):
    """Keeps steps in order and within the depth; a failed step takes the later ones with it."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._steps: deque[AnyStep] = deque()

    def check_room(self) -> None:
        """Raise unless one more step may be submitted now."""
        if len(self._steps) > self._depth:
            raise InvalidOperation(f"{len(self._steps)} steps in flight at depth {self._depth}; collect one first")

    def submit(self, step: AnyStep) -> None:
        self._steps.append(step)

    def check_turn(self, step: AnyStep) -> None:
        """Raise unless this step may be collected now: it has been before, or it is the oldest one."""
        step.raise_failure()
        if not step.collected and (not self._steps or self._steps[0] is not step):
            raise InvalidOperation("steps must be collected in the order of submission")

    def settle(self, step: AnyStep) -> None:
        """The oldest step is done."""
        if not step.collected:
            self._steps.popleft()
            step.collected = True

    def fail(self, failure: ForwardFailed) -> list[AnyStep]:
        """The oldest step failed: it and all later ones are over. Returns them."""
        failed = list(self._steps)
        self._steps.clear()
        for step in failed:
            step.failure = failure if step is failed[0] else _discarded(failure)
        return failed

    def __len__(self) -> int:
        return len(self._steps)


def again(failure: ForwardFailed) -> ForwardFailed:
    """The same failure, to be raised once more."""
    copy = ForwardFailed(str(failure), fatal=failure.fatal)
    copy.__cause__ = failure
    return copy


def _discarded(cause: ForwardFailed) -> ForwardFailed:
    discarded = ForwardFailed(f"discarded: it followed a failed step ({cause})", fatal=cause.fatal)
    discarded.__cause__ = cause
    return discarded


class WeightsGate:
    """Shared by all backends of a model. Any thread."""

    def __init__(self) -> None:
        self.version = 0
        """Grows with each replacement."""
        self._changed = threading.Condition()
        self._num_computing = 0
        self._num_replacing = 0

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Hold the weights still while a step uses them. A waiting replacement goes first."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_replacing)
            self._num_computing += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_computing -= 1
                self._changed.notify_all()

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Wait for running steps, keep new ones out, and count the version up."""
        with self._changed:
            self._num_replacing += 1
            try:
                self._changed.wait_for(lambda: not self._num_computing)
                yield
                self.version += 1
            finally:
                self._num_replacing -= 1
                self._changed.notify_all()

    def check(self, version: int, *, is_empty: Callable[[], bool]) -> int:
        """The current version, if KV of the given one may go on with it: only an empty memory may change over."""
        if version != self.version and not is_empty():
            raise StaleKV(f"the weights were replaced: KV has version {version}, the weights {self.version}")
        return self.version


BLOCK_SIZE = 16
"""Cells that are handed out together, unless told otherwise."""
PAGED_EXTRAS = frozenset({"block_size", "depth", "kv_cache_dtype", "model_impl"})
"""Names in `LoadOptions.extra` that backends of this kind know."""


def check_extras(extra: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that no paged backend has, or of a wrong value."""
    unknown = set(extra) - PAGED_EXTRAS
    if unknown:
        raise ConfigError(f"unknown option {', '.join(sorted(unknown))}")
    block_size, depth = extra.get("block_size", BLOCK_SIZE), extra.get("depth")
    if type(block_size) is not int or block_size < 1:  # bool is a subclass of int
        raise ConfigError(f"block_size must be an integer of at least 1, not {block_size!r}")
    if depth is not None and (type(depth) is not int or depth not in (0, 1)):
        raise ConfigError(f"depth must be 0 or 1, not {depth!r}")


class PagedStep(Step):
    """A submitted step of a `PagedBackend`. Each backend adds what its results are kept in."""

    def __init__(self, owner: Any, batch: Batch, number: int) -> None:
        super().__init__(number)
        self.owner = owner
        self._output = batch.output.copy()
        self.num_logits = num_asking_for(self._output, Output.LOGITS)
        self.num_hidden = num_asking_for(self._output, Output.HIDDEN)
        self.sampled_rows: list[IntArray] = []
        """Rows of the token table that this step has written."""

    @cached_property
    def output_ids(self) -> IntArray:
        """Batch index of each logits row."""
        return asking_for(self._output, Output.LOGITS)

    @cached_property
    def hidden_ids(self) -> IntArray:
        return asking_for(self._output, Output.HIDDEN)


S = TypeVar("S", bound=PagedStep)


@dataclass(frozen=True)
class PagedSampling(Generic[S]):
    """A submitted sampling."""

    forward: S
    sampled: Sampled


class PagedBackend(Backend, Generic[S]):
    """A backend whose memory is a `PagedKV`. One thread owns it, as any backend."""

    _last_sampled: Any
    """The token table: an id for each row, where ids are sampled (numpy or torch)."""

    def __init__(self, kv: PagedKV, vocab_size: int, gate: WeightsGate) -> None:
        self._kv = kv
        self._gate = gate
        self._version = gate.version
        """Of the weights under which all KV in this memory was computed."""
        self._vocab_size = vocab_size
        self._steps: StepQueue[S] = StepQueue(kv.capabilities.depth)
        self._has_sampled: NDArray[np.bool_] = np.zeros(kv.capabilities.max_seqs, dtype=bool)
        """Rows of the token table that hold an id."""
        self._latest: S | None = None
        self._lost: ForwardFailed | None = None
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._kv.capabilities

    @property
    def kv(self) -> PagedKV:
        return self._kv

    # -- what a backend computes --------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, batch: Batch, number: int) -> S:
        """A step for this batch; its slots have been planned, nothing is applied."""

    @abstractmethod
    def _run(self, step: S, batch: Batch, segment: Segment, slots: IntArray) -> None:
        """Compute one segment; `slots` says where each token's keys and values go. May raise anything."""

    @abstractmethod
    def _launched(self, step: S) -> None:
        """All segments are on their way. May raise as `_run` may."""

    @abstractmethod
    def _sample(self, step: S, rows: SampleRows, mask: Mask | None) -> Sampled:
        """Draw ids from logits rows and remember them in the token table."""

    @abstractmethod
    def _wait(self, step: S) -> None:
        """Wait until the step is done; `ForwardFailed` if it turns out to have failed."""

    @abstractmethod
    def _output(self, step: S) -> DecodeOutput:
        """The step's logits and hidden rows, on the host."""

    @abstractmethod
    def _on_host(self, sampled: Sampled) -> Sampled:
        """Sampled ids and extras as numpy arrays."""

    def _free(self) -> None:
        """Give memory back when the backend is closed."""

    # -- launches -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> S:
        self._check_usable()
        self._steps.check_room()
        self._check_tokens(batch)
        with self._gate.computing():
            self._version = self._gate.check(self._version, is_empty=self._is_empty)
            return self._submit(batch)

    def _is_empty(self) -> bool:
        return not self._kv.tables.num_blocks.any()

    def _submit(self, batch: Batch) -> S:
        """Run a batch whose tokens are fine, all or nothing."""
        self._kv.update()
        plan = self._kv.prepare(batch)
        step = self._begin(batch, plan.step)
        try:
            for demand in plan.demands:
                slots = self._kv.apply(demand)
                self._run(step, batch, demand.segment, slots)
            self._launched(step)
        except BaseException as error:
            self._kv.rollback()
            if isinstance(error, ForwardFailed) and error.fatal:
                self._lost = error
            raise
        self._kv.commit()
        self._steps.submit(step)
        self._latest = step
        return step

    def sample(self, forward: Forward, rows: SampleRows, mask: Mask | None = None) -> PagedSampling[S]:
        self._check_usable()
        step = self._own(forward)
        if step is not self._latest or step.collected:
            raise InvalidOperation("a step must be sampled before it is collected and before the next forward")
        step.raise_failure()
        check_rows(rows, step.num_logits, self.capabilities.max_seqs, self._vocab_size, mask)
        sampled = self._sample(step, rows, mask)
        self._has_sampled[rows.table_row] = True
        step.sampled_rows.append(rows.table_row)
        return PagedSampling(step, sampled)

    def take_sampled(self, source: Backend, source_row: IntArray, table_row: IntArray) -> bool:
        self._check_usable()
        if not isinstance(source, PagedBackend) or not self._reaches(source._last_sampled):
            return False
        if not source._has_sampled[source_row].all():
            raise InvalidOperation("nothing was sampled in a row of the other token table")
        self._take_ids(source._last_sampled, source_row, table_row)
        self._has_sampled[table_row] = True
        return True

    def _reaches(self, table: Any) -> bool:
        """Can ids of this token table be copied without a detour?"""
        return isinstance(table, np.ndarray)

    def _take_ids(self, table: Any, table_row: IntArray, own_row: IntArray) -> None:
        """Copy rows of another token table that is within reach."""
        self._last_sampled[own_row] = np.clip(table[table_row], 0, self._vocab_size - 1)

    # -- the wait -----------------------------------------------------------------------------------------------------

    @overload
    def collect(self, handle: Forward) -> DecodeOutput: ...
    @overload
    def collect(self, handle: Sampling) -> Sampled: ...
    def collect(self, handle: Forward | Sampling) -> DecodeOutput | Sampled:
        self._check_open()
        step = self._own(handle.forward if isinstance(handle, PagedSampling) else handle)
        self._steps.check_turn(step)
        if not step.collected:
            self._settle(step)
        return self._on_host(handle.sampled) if isinstance(handle, PagedSampling) else self._output(step)

    def _settle(self, step: S) -> None:
        try:
            self._wait(step)
        except ForwardFailed as failure:
            self._lost = failure if failure.fatal else self._lost
            for failed in self._steps.fail(failure):
                for rows in failed.sampled_rows:
                    self._has_sampled[rows] = False
            self._kv.forget(step.number)
            raise
        self._steps.settle(step)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._latest = None  # it knows its backend: together they would stay until somebody looks for such pairs
            self._free()

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_tokens(self, batch: Batch) -> None:
        """Every token is one of the vocabulary, or names a row in which something was sampled."""
        lowest, highest = batch.token.min(), batch.token.max()
        if highest >= self._vocab_size:
            raise InvalidBatch(f"token {highest} is outside the vocabulary of {self._vocab_size}")
        if lowest < 0:
            pending = batch.token if highest < 0 else batch.token[batch.token < 0]
            if -1 - lowest >= len(self._has_sampled) or not self._has_sampled[-1 - pending].all():
                raise InvalidBatch("a token names a row in which nothing was sampled")

    def _own(self, forward: Any) -> S:
        if not isinstance(forward, PagedStep) or forward.owner is not self:
            raise InvalidOperation(f"{type(forward).__name__} is no handle of this backend")
        return forward  # type: ignore[return-value]

    def _check_usable(self) -> None:
        self._check_open()
        if self._lost is not None:
            raise again(self._lost)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed("the backend was closed")
