"""`FakeBackend`: a complete backend whose "model" is a hash of everything a token can see.

The logits of a token are a hash of the (token, position) pairs visible to it, read cell by cell through the block
tables. Whatever goes wrong with KV (a stale cell, a missing copy, a wrong position, a neighbour's token) changes them,
so a test that compares ids sees it. It needs no model, runs thousands of steps a second, and can be told to fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tokenmill.core.backend import (
    Backend,
    BackendLimits,
    DecodeOutput,
    FloatArray,
    Forward,
    Mask,
    ModelInfo,
    Sampled,
    SampleRows,
    Sampling,
    check_rows,
    greedy,
)
from tokenmill.core.batch import Batch, IntArray, Output
from tokenmill.core.faults import Fault, FaultKind, FaultPlan
from tokenmill.core.kv import Capabilities, LayerKV
from tokenmill.core.paged import PagedKV
from tokenmill.core.steps import Step, StepQueue, again
from tokenmill.errors import BackendClosed, ForwardFailed, InvalidBatch, InvalidOperation, OutOfKV

HashArray = NDArray[np.uint64]

NEVER_SAMPLED = -1


@dataclass(frozen=True)
class FakeConfig:
    """Everything about a fake model and its memory that a test may want otherwise."""

    vocab_size: int = 256
    hidden_size: int = 16
    max_context: int = 4096
    windows: tuple[int | None, ...] = (None,)
    """One entry a layer: its attention window, None for full attention."""
    num_cells: int = 4096
    block_size: int = 16
    ubatch_size: int = 2048
    max_seqs: int = 256
    depth: int = 0
    partial_rm: bool = True
    partial_cp: bool = True
    shift: bool = True
    state_bytes: bool = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            partial_rm=self.partial_rm,
            partial_cp=self.partial_cp,
            shift=self.shift,
            state_bytes=self.state_bytes,
            max_seqs=self.max_seqs,
            depth=self.depth,
            deterministic=True,
        )


class FakeForward(Step):
    """A submitted step. The work is done at launch; `late` is what its collect will find."""

    def __init__(self, owner: FakeBackend, number: int, output: DecodeOutput, late: Mapping[FaultKind, Fault]) -> None:
        super().__init__(number)
        self.owner = owner
        self.output = output
        self.late = late
        self.sampled_rows: list[IntArray] = []

    @property
    def output_ids(self) -> IntArray:
        return self.output.output_ids


@dataclass(frozen=True)
class FakeSampling:
    forward: FakeForward
    sampled: Sampled


class FakeBackend(Backend):
    """See the module's docstring. One thread owns it, as any backend."""

    def __init__(self, config: FakeConfig = FakeConfig()) -> None:
        self.config = config
        self.faults = FaultPlan()
        self._storage = FakeStorage(config.num_cells // config.block_size, config.block_size)
        self._kv = PagedKV(config.num_cells, config.max_context, config.block_size, config.capabilities, self._storage)
        self._steps: StepQueue[FakeForward] = StepQueue(config.depth)
        self._last_sampled: IntArray = np.full(config.max_seqs, NEVER_SAMPLED, dtype=np.int32)
        self._latest: FakeForward | None = None
        self._lost: ForwardFailed | None = None
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self.config.capabilities

    @property
    def kv(self) -> PagedKV:
        return self._kv

    # -- launches -----------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> FakeForward:
        self._check_usable()
        self._steps.check_room()
        token = self._resolve_tokens(batch)
        self._kv.update()
        plan = self._kv.prepare(batch)
        faults = self.faults.strike(token, batch)
        if FaultKind.OUT_OF_KV in faults:
            raise OutOfKV(plan.num_blocks * self._kv.block_size, 0)
        output = self._empty_output(batch)
        try:
            for demand in plan.demands:
                slots = self._kv.apply(demand)
                self._run_segment(batch, token, demand.segment.tokens, demand.segment.token_lead, slots, output)
            self._raise_planned_failure(faults)
        except BaseException:
            self._kv.rollback()
            raise
        self._kv.commit()
        if FaultKind.NAN in faults:
            matched = faults[FaultKind.NAN][1]
            output.logits[matched[output.output_ids]] = np.nan
            output.hidden[matched[output.hidden_ids]] = np.nan
        step = FakeForward(self, plan.step, output, {kind: fault for kind, (fault, _) in faults.items()})
        self._steps.submit(step)
        self._latest = step
        return step

    def sample(self, forward: Forward, rows: SampleRows, mask: Mask | None = None) -> FakeSampling:
        self._check_usable()
        step = self._own(forward)
        if step is not self._latest or step.collected:
            raise InvalidOperation("a step is sampled before it is collected and before the next forward, not after")
        step.raise_failure()
        check_rows(rows, len(step.output_ids), self.config.max_seqs, self.config.vocab_size, mask)
        sampler = rows.sampler or greedy
        sampled = sampler(step.output.logits[rows.logits_row], mask)
        # A bad row's request is over; at depth 1 its next token is in flight already and must be some valid id.
        self._last_sampled[rows.table_row] = np.maximum(sampled.ids, 0)
        step.sampled_rows.append(rows.table_row)
        return FakeSampling(step, sampled)

    # -- the wait -----------------------------------------------------------------------------------------------------

    @overload
    def collect(self, handle: Forward) -> DecodeOutput: ...
    @overload
    def collect(self, handle: Sampling) -> Sampled: ...
    def collect(self, handle: Forward | Sampling) -> DecodeOutput | Sampled:
        self._check_open()
        step = self._own(handle.forward if isinstance(handle, FakeSampling) else handle)
        self._steps.check_turn(step)
        if not step.collected:
            self._wait(step)
        return handle.sampled if isinstance(handle, FakeSampling) else step.output

    def _wait(self, step: FakeForward) -> None:
        if FaultKind.STALL in step.late:
            step.late[FaultKind.STALL].stalled.set()
            step.late[FaultKind.STALL].release.wait()
        fatal = FaultKind.LATE_FATAL in step.late
        if not fatal and FaultKind.LATE_FAIL not in step.late:
            self._steps.settle(step)
            return
        failure = ForwardFailed("the fake backend was told to fail at collect", fatal=fatal)
        self._lost = failure if fatal else self._lost
        for failed in self._steps.fail(failure):
            for rows in failed.sampled_rows:
                self._last_sampled[rows] = NEVER_SAMPLED
        self._kv.forget(step.number)
        raise failure

    def close(self) -> None:
        self._closed = True

    # -- the model ----------------------------------------------------------------------------------------------------

    def _run_segment(
        self, batch: Batch, token: IntArray, tokens: slice, lead: IntArray, slots: IntArray, output: DecodeOutput
    ) -> None:
        for begin in range(tokens.start, tokens.stop, self.config.ubatch_size):
            ubatch = slice(begin, min(begin + self.config.ubatch_size, tokens.stop))
            inside = slice(ubatch.start - tokens.start, ubatch.stop - tokens.start)
            self._storage.store(slots[inside], token[ubatch], batch.pos[ubatch])
            wanted = np.flatnonzero(batch.output[ubatch])
            if len(wanted) == 0:
                continue
            context = self._hash_visible(lead[inside][wanted], batch.pos[ubatch][wanted])
            index = wanted + begin
            for kind, ids, rows in (
                (Output.LOGITS, output.output_ids, output.logits),
                (Output.HIDDEN, output.hidden_ids, output.hidden),
            ):
                flagged = (batch.output[index] & np.uint8(kind)) != 0
                rows[np.searchsorted(ids, index[flagged])] = spread(context[flagged], rows.shape[1], salt=int(kind))

    def _hash_visible(self, lead: IntArray, pos: IntArray) -> HashArray:
        """One hash per token over all cells it sees, layer by layer."""
        total = np.zeros(len(pos), dtype=np.uint64)
        first = self._kv.tables.start[lead]
        for layer, window in enumerate(self.config.windows):
            low = first if window is None else np.maximum(first, pos - window + 1)
            values = self._storage.value[self._kv.tables.slots(lead, low, pos + 1)]
            run_starts = np.concatenate([[0], np.cumsum(pos + 1 - low)[:-1]])
            total += mix(np.add.reduceat(values, run_starts) + np.uint64(layer))
        return total

    def _empty_output(self, batch: Batch) -> DecodeOutput:
        output_ids, hidden_ids = batch.rows(Output.LOGITS), batch.rows(Output.HIDDEN)
        return DecodeOutput(
            logits=np.zeros((len(output_ids), self.config.vocab_size), dtype=np.float32),
            output_ids=output_ids,
            hidden=np.zeros((len(hidden_ids), self.config.hidden_size), dtype=np.float32),
            hidden_ids=hidden_ids,
        )

    # -- checks -------------------------------------------------------------------------------------------------------

    def _resolve_tokens(self, batch: Batch) -> IntArray:
        if batch.token.max() >= self.config.vocab_size:
            raise InvalidBatch(f"token {batch.token.max()} is outside the vocabulary of {self.config.vocab_size}")
        pending = batch.token < 0
        if not pending.any():
            return batch.token
        rows = -1 - batch.token[pending]
        if rows.max() >= self.config.max_seqs or (self._last_sampled[rows] == NEVER_SAMPLED).any():
            raise InvalidBatch("a token names a row in which nothing was sampled")
        token = batch.token.copy()
        token[pending] = self._last_sampled[rows]
        return token

    def _raise_planned_failure(self, faults: Mapping[FaultKind, object]) -> None:
        if FaultKind.FATAL in faults:
            self._lost = ForwardFailed("the fake backend was told to fail for good", fatal=True)
            raise self._lost
        if FaultKind.FAIL in faults:
            raise ForwardFailed("the fake backend was told to fail")

    def _own(self, forward: Forward | Sampling) -> FakeForward:
        if not isinstance(forward, FakeForward) or forward.owner is not self:
            raise InvalidOperation(f"{type(forward).__name__} is no handle of this backend")
        return forward

    def _check_usable(self) -> None:
        self._check_open()
        if self._lost is not None:
            raise again(self._lost)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendClosed("the backend was closed")


class FakeStorage:
    """Token and position of every cell, and their hash: what keys and values are to a real model."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self.token: IntArray = np.zeros(num_blocks * block_size, dtype=np.int32)
        self.pos: IntArray = np.zeros(num_blocks * block_size, dtype=np.int32)
        self.value: HashArray = np.zeros(num_blocks * block_size, dtype=np.uint64)

    def store(self, slots: IntArray, token: IntArray, pos: IntArray) -> None:
        self.token[slots], self.pos[slots] = token, pos
        self.value[slots] = hash_cell(token, pos)

    def copy_blocks(self, src: IntArray, dst: IntArray) -> None:
        for array in (self.token, self.pos, self.value):
            blocks = array.reshape(-1, self._block_size)
            blocks[dst] = blocks[src]

    def shift(self, slots: IntArray, delta: int) -> None:
        self.store(slots, self.token[slots], self.pos[slots] + delta)

    def read(self, slots: IntArray) -> bytes:
        return np.stack([self.token[slots], self.pos[slots]]).astype("<i4").tobytes()

    def write(self, slots: IntArray, data: memoryview) -> None:
        if len(data) != len(slots) * 8:
            raise InvalidOperation(f"{len(data)} bytes for {len(slots)} cells of 8 bytes")
        token, pos = np.frombuffer(data, dtype="<i4").reshape(2, len(slots)).astype(np.int32)
        self.store(slots, token, pos)


class FakeModel:
    """The fake backend's `ModelHandle`: what all its engine cores share is its configuration."""

    def __init__(self, config: FakeConfig = FakeConfig()) -> None:
        self.config = config
        self.path: Path | None = None
        self.weights_version = 0

    @property
    def info(self) -> ModelInfo:
        layers = tuple(LayerKV("full" if window is None else "window", window) for window in self.config.windows)
        return ModelInfo("fake", self.config.vocab_size, self.config.hidden_size, self.config.max_context, layers)

    @property
    def kv_budget_bytes(self) -> int:
        return 16 << 20

    def new_backend(self, limits: BackendLimits) -> FakeBackend:
        return FakeBackend(
            replace(self.config, num_cells=limits.num_cells, max_seqs=limits.max_seqs, ubatch_size=limits.ubatch_size)
        )

    def close(self) -> None:
        """Nothing to free."""


def mix(x: HashArray) -> HashArray:
    """The finaliser of splitmix64: every bit of the input changes about half the bits of the result."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_cell(token: IntArray, pos: IntArray) -> HashArray:
    """The hash of a cell. A context's hash is the sum of its cells', so it does not depend on where they lie."""
    return mix((token.astype(np.uint64) << np.uint64(32)) + pos.astype(np.uint64) + np.uint64(1))


def spread(context: HashArray, width: int, salt: int) -> FloatArray:
    """[rows, width] numbers in [-8, 8) from one hash per row."""
    columns = np.arange(width, dtype=np.uint64) + np.uint64(salt << 32)
    bits = mix(context[:, None] + mix(columns)[None, :])
    return ((bits >> np.uint64(40)).astype(np.float32) / np.float32(1 << 20) - np.float32(8)).astype(np.float32)
