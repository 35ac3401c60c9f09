"""`FakeBackend`: a complete backend whose "model" is a hash of everything a token can see.

The logits of a token are a hash of the (token, position) pairs visible to it, read cell by cell through the block
tables. Whatever goes wrong with KV (a stale cell, a missing copy, a wrong position, a neighbour's token) changes them,
so a test that compares ids sees it. It needs no model, runs thousands of steps a second, and can be told to fail.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract.backend import (
    BackendLimits,
    DecodeOutput,
    FloatArray,
    Mask,
    MemoryPlan,
    ModelInfo,
    Sampled,
    SampleRows,
    StepSizes,
    greedy,
)
from tokenmill.contract.batch import Batch, IntArray, Output
from tokenmill.contract.kv import Capabilities, LayerKV
from tokenmill.errors import ForwardFailed, InvalidOperation, OutOfKV
from tokenmill.kv.paged import PagedKV, Segment
from tokenmill.kv.paged_backend import PagedBackend, PagedStep, WeightsGate


class FaultKind(Enum):
    FAIL = "the forward raises ForwardFailed"
    FATAL = "the forward raises ForwardFailed(fatal=True), and the backend is lost"
    LATE_FAIL = "the forward is submitted, its collect raises ForwardFailed"
    LATE_FATAL = "the forward is submitted, its collect raises ForwardFailed(fatal=True)"
    OUT_OF_KV = "the forward raises OutOfKV, though there is room"
    NAN = "the logits and hidden rows of the matching sequences are NaN"
    STALL = "the collect waits until `release` is set"


@dataclass(eq=False)
class Fault:
    """Strikes the next `times` batches that match; None of both `token` and `seq` matches every batch."""

    kind: FaultKind
    token: int | None = None
    """Match the sequences that have this token in the batch."""
    seq: int | None = None
    """Match this sequence."""
    times: int | None = 1
    """How many batches to strike; None for all of them."""
    after: int = 0
    """How many matching batches to let pass first."""
    release: threading.Event = field(default_factory=threading.Event)
    """STALL only: set it to let the collect go on."""
    stalled: threading.Event = field(default_factory=threading.Event)
    """STALL only: set when the collect has begun to wait."""

    def matching(self, token: IntArray, batch: Batch) -> NDArray[np.bool_]:
        """[tokens]: which tokens of the batch belong to a sequence that this fault matches."""
        if self.seq is not None:
            matched = {self.seq}
        elif self.token is not None:
            matched = set(batch.seq_ids[token == self.token].ravel().tolist()) - {-1}
        else:
            return np.ones(len(batch), dtype=bool)
        return np.asarray(np.isin(batch.seq_ids, list(matched)).any(axis=1))


class FaultPlan:
    """The faults still to come."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, fault: Fault) -> None:
        self._faults.append(fault)

    def remove(self, fault: Fault) -> None:
        self._faults.remove(fault)

    def strike(self, token: IntArray, batch: Batch) -> dict[FaultKind, tuple[Fault, NDArray[np.bool_]]]:
        """The faults that strike this batch, with the tokens they match; counts them down."""
        struck: dict[FaultKind, tuple[Fault, NDArray[np.bool_]]] = {}
        for fault in list(self._faults):
            matched = fault.matching(token, batch)
            if not matched.any():
                continue
            if fault.after > 0:
                fault.after -= 1
                continue
            struck[fault.kind] = (fault, matched)
            if fault.times is not None:
                fault.times -= 1
                if fault.times == 0:
                    self._faults.remove(fault)
        return struck


HashArray = NDArray[np.uint64]
Struck = Mapping[FaultKind, tuple[Fault, NDArray[np.bool_]]]
"""What strikes a step, and which of its tokens."""


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
    parked_cells: int | None = None
    hang_file: str | None = None
    """When this file exists, a step removes it and never returns: a fault that reaches an engine process, too."""
    hang_holds_gil: bool = False
    """Does that step keep the interpreter lock?"""
    step_us: int = 0
    """Least time (us) that a step takes, as on a device..."""
    token_us: int = 0
    """...and as much more for each of its tokens."""

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
            parked_cells=self.parked_cells,
        )


class FakeForward(PagedStep):
    """A submitted step. The work is done at launch; `faults` is what strikes it, some of it only when collected."""

    def __init__(self, owner: FakeBackend, batch: Batch, number: int, struck: Struck) -> None:
        super().__init__(owner, batch, number)
        self.struck = struck
        config = owner.config
        self.ready_at = time.monotonic() + (config.step_us + config.token_us * len(batch)) / 1e6
        self.logits: FloatArray = np.zeros((len(self.output_ids), config.vocab_size), dtype=np.float32)
        self.hidden: FloatArray = np.zeros((len(self.hidden_ids), config.hidden_size), dtype=np.float32)


class FakeBackend(PagedBackend[FakeForward]):
    """See the module's docstring. One thread owns it, as any backend."""

    def __init__(self, config: FakeConfig = FakeConfig(), gate: WeightsGate | None = None) -> None:
        self.config = config
        self.faults = FaultPlan()
        self._storage = FakeStorage(config.num_cells // config.block_size, config.block_size)
        kv = PagedKV(config.num_cells, config.max_context, config.block_size, config.capabilities, self._storage)
        super().__init__(kv, config.vocab_size, gate or WeightsGate())
        self._last_sampled: IntArray = np.zeros(config.max_seqs, dtype=np.int32)

    def _begin(self, batch: Batch, number: int) -> FakeForward:
        struck = self.faults.strike(self._tokens(batch), batch)
        if FaultKind.OUT_OF_KV in struck:
            raise OutOfKV(len(batch), 0)
        return FakeForward(self, batch, number, struck)

    def _launched(self, step: FakeForward) -> None:
        if FaultKind.FATAL in step.struck:
            raise ForwardFailed("the fake backend was told to fail for good", fatal=True)
        if FaultKind.FAIL in step.struck:
            raise ForwardFailed("the fake backend was told to fail")
        if FaultKind.NAN in step.struck:
            _, matched = step.struck[FaultKind.NAN]
            step.logits[matched[step.output_ids]] = np.nan
            step.hidden[matched[step.hidden_ids]] = np.nan

    def _sample(self, step: FakeForward, rows: SampleRows, mask: Mask | None) -> Sampled:
        sampled = (rows.sampler or greedy)(step.logits[rows.logits_row], mask)
        # A bad row's request is over; at depth 1 its next token is in flight already and must be some valid id.
        self._last_sampled[rows.table_row] = np.maximum(sampled.ids[: len(rows.table_row)], 0)
        return sampled

    def _takes_hang(self) -> bool:
        """Was the file removed by this step? Of several cores that find it, one removes it."""
        if self.config.hang_file is None:
            return False
        try:
            os.unlink(self.config.hang_file)
        except FileNotFoundError:
            return False
        return True

    def _wait(self, step: FakeForward) -> None:
        if self._takes_hang():
            never, _ = os.pipe()
            library = ctypes.PyDLL(None) if self.config.hang_holds_gil else ctypes.CDLL(None)
            library.read(never, ctypes.create_string_buffer(1), 1)
        if FaultKind.STALL in step.struck:
            fault, _ = step.struck[FaultKind.STALL]
            fault.stalled.set()
            fault.release.wait()
        if (early_s := step.ready_at - time.monotonic()) > 0:
            time.sleep(early_s)
        if FaultKind.LATE_FATAL in step.struck or FaultKind.LATE_FAIL in step.struck:
            fatal = FaultKind.LATE_FATAL in step.struck
            raise ForwardFailed("the fake backend was told to fail at collect", fatal=fatal)

    def _output(self, step: FakeForward) -> DecodeOutput:
        return DecodeOutput(step.logits, step.output_ids, step.hidden, step.hidden_ids)

    def _on_host(self, sampled: Sampled) -> Sampled:
        return sampled

    # -- the model ----------------------------------------------------------------------------------------------------

    def _run(self, step: FakeForward, batch: Batch, segment: Segment, slots: IntArray) -> None:
        token, tokens = self._tokens(batch), segment.tokens
        for begin in range(tokens.start, tokens.stop, self.config.ubatch_size):
            ubatch = slice(begin, min(begin + self.config.ubatch_size, tokens.stop))
            inside = slice(ubatch.start - tokens.start, ubatch.stop - tokens.start)
            self._storage.store(slots[inside], token[ubatch], batch.pos[ubatch], self._version)
            wanted = np.flatnonzero(batch.output[ubatch])
            if len(wanted) == 0:
                continue
            context = self._hash_visible(segment.token_lead[inside][wanted], batch.pos[ubatch][wanted])
            index = wanted + begin
            for kind, ids, rows in (
                (Output.LOGITS, step.output_ids, step.logits),
                (Output.HIDDEN, step.hidden_ids, step.hidden),
            ):
                flagged = (batch.output[index] & np.uint8(kind)) != 0
                rows[np.searchsorted(ids, index[flagged])] = spread(context[flagged], rows.shape[1], salt=int(kind))

    def _hash_visible(self, lead: IntArray, pos: IntArray) -> HashArray:
        """One hash per token over all cells it sees, layer by layer."""
        total = np.full(len(pos), self._version, dtype=np.uint64)
        first = self._kv.tables.start[lead]
        for layer, window in enumerate(self.config.windows):
            low = first if window is None else np.maximum(first, pos - window + 1)
            values = self._storage.value[self._kv.tables.slots(lead, low, pos + 1)]
            run_starts = np.concatenate([[0], np.cumsum(pos + 1 - low)[:-1]])
            total += mix(np.add.reduceat(values, run_starts) + np.uint64(layer))
        return total

    def _tokens(self, batch: Batch) -> IntArray:
        """The batch's tokens, those from the token table filled in."""
        pending = batch.token < 0
        if not pending.any():
            return batch.token
        token = batch.token.copy()
        token[pending] = self._last_sampled[-1 - batch.token[pending]]
        return token


class FakeStorage:
    """Token and position of every cell, and their hash: what keys and values are to a real model."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self.token: IntArray = np.zeros(num_blocks * block_size, dtype=np.int32)
        self.pos: IntArray = np.zeros(num_blocks * block_size, dtype=np.int32)
        self.version: IntArray = np.zeros(num_blocks * block_size, dtype=np.int32)
        self.value: HashArray = np.zeros(num_blocks * block_size, dtype=np.uint64)

    def store(self, slots: IntArray, token: IntArray, pos: IntArray, version: int) -> None:
        """Put tokens into cells; what they are worth depends on the version of the weights."""
        self.token[slots], self.pos[slots], self.version[slots] = token, pos, version
        self.value[slots] = hash_cell(token, pos) + np.uint64(version)

    def hand_out(self, blocks: IntArray) -> None:
        """What was in them is never read."""

    def copy_blocks(self, src: IntArray, dst: IntArray) -> None:
        for array in (self.token, self.pos, self.version, self.value):
            blocks = array.reshape(-1, self._block_size)
            blocks[dst] = blocks[src]

    def shift(self, slots: IntArray, delta: int) -> None:
        self.store(slots, self.token[slots], self.pos[slots] + delta, int(self.version[slots[0]]))

    def read(self, slots: IntArray) -> bytes:
        return np.stack([self.token[slots], self.pos[slots]]).astype("<i4").tobytes()

    def write(self, slots: IntArray, data: memoryview) -> None:
        if len(data) != len(slots) * 8:
            raise InvalidOperation(f"{len(data)} bytes for {len(slots)} cells of 8 bytes")
        token, pos = np.frombuffer(data, dtype="<i4").reshape(2, len(slots)).astype(np.int32)
        self.store(slots, token, pos, 0)


class FakeModel:
    """The fake backend's `ModelHandle`: what all its engine cores share is its configuration and one weight."""

    def __init__(self, config: FakeConfig = FakeConfig()) -> None:
        self.config = config
        self.path: Path | None = None
        self._gate = WeightsGate()

    @property
    def weights_version(self) -> int:
        return self._gate.version

    def replace_weight(self, name: str, value: object) -> None:  # noqa: ARG002 (its version is its value)
        """Its only weight is called "salt"; after each replacement all logits are others."""
        if name != "salt":
            raise InvalidOperation(f"the model has no tensor {name!r}")
        with self._gate.replacing():
            pass

    @property
    def info(self) -> ModelInfo:
        layers = tuple(LayerKV("full" if window is None else "window", window) for window in self.config.windows)
        return ModelInfo(
            "fake", self.config.vocab_size, self.config.hidden_size, self.config.max_context, layers, deterministic=True
        )

    @property
    def step_sizes(self) -> StepSizes:
        return StepSizes()

    @property
    def kv_budget_bytes(self) -> int:
        return 16 << 20

    @property
    def free_bytes(self) -> int:
        return 1 << 40

    @property
    def block_size(self) -> int:
        return self.config.block_size

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:  # noqa: ARG002
        return MemoryPlan(0, limits.num_cells * self.info.kv_bytes_per_token, 0)

    def new_backend(self, limits: BackendLimits) -> FakeBackend:
        return FakeBackend(
            replace(self.config, num_cells=limits.num_cells, max_seqs=limits.max_seqs, ubatch_size=limits.ubatch_size),
            self._gate,
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
