"""`PagedBackend`: the rules of a backend over `PagedKV`: which calls are legal, what a failure undoes.

What is left to a backend is the computing itself: begin a step, run one segment of it, sample rows, wait. The fake
backend does it in numpy, the torch backend on a device.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from tokenmill.core.backend import (
    Backend,
    DecodeOutput,
    Forward,
    Mask,
    Sampled,
    SampleRows,
    Sampling,
    check_rows,
)
from tokenmill.core.batch import Batch, IntArray, Output, asking_for, num_asking_for
from tokenmill.core.kv import Capabilities
from tokenmill.core.paged import PagedKV
from tokenmill.core.segments import Segment
from tokenmill.core.steps import Step, StepQueue, again
from tokenmill.core.weights_gate import WeightsGate
from tokenmill.errors import BackendClosed, ForwardFailed, InvalidBatch, InvalidOperation


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
            raise InvalidOperation("a step is sampled before it is collected and before the next forward, not after")
        step.raise_failure()
        check_rows(rows, step.num_logits, self.capabilities.max_seqs, self._vocab_size, mask)
        sampled = self._sample(step, rows, mask)
        self._has_sampled[rows.table_row] = True
        step.sampled_rows.append(rows.table_row)
        return PagedSampling(step, sampled)

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
