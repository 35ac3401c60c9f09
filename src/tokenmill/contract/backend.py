"""`Backend`: two launches and one wait, so that a device never waits for Python.

    forward(batch) ──> Forward ──┐                          (launch: returns at once)
                                 ├─ sample(forward, rows) ──> Sampling     (launch: returns at once)
    collect(handle) <────────────┴──────────────────────────┘              (the only wait)

`decode(batch)` is the synchronous convenience: forward and collect in one call. One thread owns a backend; forwards
run in the order they were submitted, on one stream.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, overload

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract.batch import Batch, IntArray
from tokenmill.contract.kv import Capabilities, KVMemory, LayerKV
from tokenmill.errors import ConfigError, InvalidOperation

KV_SHARE = 0.25
"""Of the memory that is free, how much KV may take by default."""
LEAST_SEQS, MOST_SEQS = 256, 4096
CELLS_PER_SEQ = 64
"""Cells for each sequence id: a short conversation has as many that no other one shares."""
UNKNOWN_FREE_BYTES = 2 << 30
"""Taken for free where the system does not tell."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, when everything is in use."""

    weights: int
    kv: int
    activations: int
    """What a step needs while it runs."""
    other: int = 0
    """Tokenizer, tables, code: what is there whatever the settings are."""
    loading: int = 0
    """What reading the weights takes on the way, while nothing of the rest is there yet."""

    @property
    def total(self) -> int:
        """At the most."""
        return self.weights + max(self.kv + self.activations + self.other, self.loading)

    def with_draft(self, draft: MemoryPlan) -> MemoryPlan:
        """With a draft model beside it, loaded after it."""
        return MemoryPlan(
            weights=self.weights + draft.weights,
            kv=self.kv + draft.kv,
            activations=self.activations + draft.activations,
            other=self.other + draft.other,
            loading=max(self.loading, draft.loading),
        )

    def times(self, workers: int) -> MemoryPlan:
        """For so many backends on the same weights: each has KV and activations of its own."""
        return replace(self, kv=workers * self.kv, activations=workers * self.activations)


def cells_for(num_seqs: int, context: int, block_size: int) -> int:
    """KV cells with which so many requests of this length run at the same time.

    Each has whole blocks; two more are kept, so that the last one always finds room.
    """
    blocks = -(-(context + 1) // block_size)
    return (num_seqs * blocks + 2) * block_size


def seqs_for(num_cells: int, num_running: int) -> int:
    """Sequence ids for so many cells, so that cells run out before ids do: parked KV needs an id, too."""
    return max(LEAST_SEQS, 2 * num_running, min(num_cells // CELLS_PER_SEQ, MOST_SEQS))


def num_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_host_bytes() -> int:
    """Host memory that can be had: with what the kernel would drop from its caches, where it says how much that is."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # ValueError: a system that does not know the name
        num_pages = os.sysconf("SC_AVPHYS_PAGES")
        if num_pages > 0:
            return num_pages * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN_FREE_BYTES


def trim_host_memory() -> None:
    """Give memory that was freed back to the operating system, after work that took much of it for a while.

    The C library keeps it, for each thread: after a model was loaded that is tens of megabytes that are not used again.
    """
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not glibc
        ctypes.CDLL(None).malloc_trim(0)


FloatArray = NDArray[np.float32]
Mask = NDArray[np.uint32]
"""[rows, ceil(vocab / 32)] bits, lowest bit first; a set bit allows the token. The layout grammar engines write."""

BAD_ROW = -1
"""The id a `Sampler` gives for a row with a NaN, or whose best allowed logit is infinite: its request has failed."""


@dataclass(frozen=True)
class DecodeOutput:
    """What the flagged tokens of a batch gave, on the host."""

    logits: FloatArray
    """[k, vocab]: row k belongs to batch index `output_ids[k]`."""
    output_ids: IntArray
    hidden: FloatArray
    """[k, hidden]: row k belongs to batch index `hidden_ids[k]`."""
    hidden_ids: IntArray


@dataclass(frozen=True)
class Sampled:
    """One token id per sampled row, `BAD_ROW` where none can be had; logprobs and the like in `extras`.

    Inside the backend the arrays are its own (numpy or torch); `collect` gives numpy ones.
    """

    ids: Any
    extras: Mapping[str, Any] = field(default_factory=dict)


class Sampler(Protocol):
    """Turns logits into ids where the logits are. The sampling layer implements it; the backend only calls it."""

    def __call__(self, logits: Any, mask: Any | None, threads: Any | None = None) -> Sampled:
        """`logits`: [rows, vocab], of numpy or on the device; `mask`: a `Mask`, on the host.

        threads: a `backends.cpu.bindings.Pool` that has nothing else to do meanwhile.
        """
        ...


@dataclass(frozen=True)
class SampleRows:
    """Which rows of a forward's logits to sample, and where the backend remembers each id."""

    logits_row: IntArray
    """Row k of the forward's logits."""
    table_row: IntArray
    """Row of the backend's token table, no row twice: a later batch names this id as `last_sampled(table_row)`.

    May be shorter than `logits_row`: the ids of the logits rows beyond it are returned, not remembered.
    """
    sampler: Sampler | None = None
    """None takes the largest logit."""


class Forward(Protocol):
    """A submitted forward pass; its results may still be on the device. Opaque to the engine."""

    @property
    def output_ids(self) -> IntArray:
        """Batch index of each logits row, known at launch."""
        ...


class Sampling(Protocol):
    """A submitted sampling of a `Forward`. Opaque to the engine."""

    @property
    def forward(self) -> Forward: ...


class Backend(Protocol):
    """Compute behind the contract. `docs/contract.md` explains each rule; the conformance suite checks it."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def kv(self) -> KVMemory: ...

    def forward(self, batch: Batch) -> Forward:
        """Launch one pass over the batch, all or nothing.

        Raises `InvalidBatch`, `OutOfKV` or `ForwardFailed` with KV memory exactly as it was; `StaleKV` if the weights
        were replaced since memory was filled, until it is empty.
        """
        ...

    def sample(self, forward: Forward, rows: SampleRows, mask: Mask | None = None) -> Sampling:
        """Launch the sampling of some logits rows, before the next forward; their ids go to the token table."""
        ...

    @overload
    def collect(self, handle: Forward) -> DecodeOutput: ...
    @overload
    def collect(self, handle: Sampling) -> Sampled: ...
    def collect(self, handle: Forward | Sampling) -> DecodeOutput | Sampled:
        """Wait for a handle and bring its results to the host. Steps are collected in the order they were submitted.

        A failure found only now raises `ForwardFailed`: the cells written by that step and by every later one are
        gone from every sequence, and the later steps' handles fail too.
        """
        ...

    def close(self) -> None:
        """Free everything. Explicit and idempotent; never left to the garbage collector."""
        ...

    def decode(self, batch: Batch) -> DecodeOutput:
        """Run a batch and wait for its logits and hidden rows."""
        return self.collect(self.forward(batch))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class ModelInfo:
    """What the engine needs to know of a model, whatever its family."""

    name: str
    vocab_size: int
    hidden_size: int
    max_context: int
    """Positions are numbered below this."""
    layers: tuple[LayerKV, ...]
    form: str = ""
    """How weights and KV are held: KV bytes of another form are of no use."""
    deterministic: bool = False
    """Is what it computes bit-identical in any batch?"""

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)


@dataclass(frozen=True)
class BackendLimits:
    """The memory one engine core gives to its backend."""

    num_cells: int = 4096
    max_seqs: int = 256
    ubatch_size: int = 2048
    """Tokens computed at once inside one forward; the result does not depend on it."""
    max_context: int | None = None
    """Positions that a sequence may have; None: as many as the model knows."""
    num_running: int | None = None
    """Sequences that run at the same time; None: not known."""
    num_threads: int | None = None
    """Processor threads one forward may use; None leaves it to the backend."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Settings of an engine that suit a model where it is: how large steps are, how long. None: the engine's own."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk: int | None = None
    min_prefill_chunk: int | None = None
    target_tick_ms: float | None = None
    offline_tick_ms: float | None = None
    """Replaces `target_tick_ms` in offline use (`LLM`), where inter-token latency does not matter."""
    max_step_ms: float | None = None
    """Not applied in offline use."""
    max_queue: int | None = None
    speculation: str | None = None


BACKENDS = ("auto", "cpu", "torch", "llamacpp", "fake")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is to be loaded. What only one kind of model knows is in `extra`."""

    backend: str = "auto"
    """`auto` takes what suits the model's files."""
    dtype: str = "auto"
    """Of weights and activations."""
    device: str = "auto"
    """`auto` takes CUDA where there is one."""
    deterministic: bool = False
    """Batch-invariant arithmetic: bit-identical results in any batch."""
    load_format: str = "auto"
    """`dummy`: random weights from the configuration alone, for benchmarks of a model's shape."""
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend {self.backend!r} is not supported; supported: {', '.join(BACKENDS)}")
        if self.load_format not in LOAD_FORMATS:
            supported = ", ".join(LOAD_FORMATS)
            raise ConfigError(f"load_format {self.load_format!r} is not supported; supported: {supported}")


class Model(Protocol):
    """What is known of a loaded model wherever its weights are: in this process or in an engine's own."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def path(self) -> Path | None:
        """Where its files are, the tokenizer among them; None if it has none."""
        ...

    @property
    def weights_version(self) -> int:
        """Grows when a weight is replaced; KV computed under another version is worthless."""
        ...

    def close(self) -> None: ...


class ModelHandle(Model, Protocol):
    """A loaded model: weights once, shared by the backends of all engine cores."""

    @property
    def kv_budget_bytes(self) -> int:
        """What KV memory may take by default, of the memory that is free now."""
        ...

    @property
    def free_bytes(self) -> int:
        """Memory that is free now, where the model is."""
        ...

    @property
    def block_size(self) -> int:
        """KV cells that are handed out together."""
        ...

    @property
    def step_sizes(self) -> StepSizes:
        """Defaults of an engine's step sizes and speculation."""
        ...

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        """What weights and a backend with these limits take; so many rows of logits are wanted in a step."""
        ...

    def new_backend(self, limits: BackendLimits) -> Backend:
        """A backend with KV memory of its own, over the shared weights."""
        ...

    def replace_weight(self, name: str, value: Any) -> None:
        """New values for one tensor. Waits for running steps; KV of the old weights is invalid from then on.

        `InvalidOperation` if there is no such tensor, or if the value does not fit; nothing has changed then.
        """
        ...


def pack_mask(allowed: NDArray[np.bool_]) -> Mask:
    """[rows, vocab] booleans to the packed layout of `Mask`."""
    rows, vocab = allowed.shape
    padded = np.zeros((rows, -(-vocab // 32) * 32), dtype=bool)
    padded[:, :vocab] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def unpack_mask(mask: Mask, vocab: int) -> NDArray[np.bool_]:
    """The packed layout of `Mask` back to [rows, vocab] booleans."""
    octets = np.ascontiguousarray(mask, dtype="<u4").view(np.uint8)
    return np.unpackbits(octets, axis=1, count=vocab, bitorder="little").astype(bool)


def check_rows(rows: SampleRows, num_logits: int, max_rows: int, vocab: int, mask: Mask | None) -> None:
    """Raise `InvalidOperation` unless the rows and the mask fit the logits. For backends."""
    count = len(rows.logits_row)
    if len(rows.table_row) > count:
        raise InvalidOperation(f"{count} logits rows, but {len(rows.table_row)} rows of the token table")
    if count == 0:
        return
    if not 0 <= rows.logits_row.min() <= rows.logits_row.max() < num_logits:
        raise InvalidOperation(f"logits rows must be from 0 to {num_logits - 1}")
    if len(rows.table_row):
        if not 0 <= rows.table_row.min() <= rows.table_row.max() < max_rows:
            raise InvalidOperation(f"rows of the token table must be from 0 to {max_rows - 1}")
        if np.bincount(rows.table_row).max() > 1:
            raise InvalidOperation("two ids cannot be written to the same row of the token table")
    if mask is not None and mask.shape != (count, -(-vocab // 32)):
        raise InvalidOperation(f"the mask has shape {mask.shape}, not {(count, -(-vocab // 32))}")


def greedy(logits: FloatArray, mask: Mask | None) -> Sampled:
    """The `Sampler` of numpy backends when a request asks for none: the largest logit, the first of equal ones."""
    ids = logits.argmax(axis=1).astype(np.int32)  # to it, a NaN is larger than everything
    best = logits[np.arange(len(ids)), ids]
    if mask is not None:
        is_allowed = (mask[np.arange(len(ids)), ids // 32] >> (ids % 32).astype(np.uint32)) & 1
        # Only rows whose largest logit is ruled out are looked at again.
        again = np.flatnonzero((is_allowed == 0) & ~np.isnan(best))
        if len(again):
            allowed = np.where(unpack_mask(mask[again], logits.shape[1]), logits[again], np.float32(-np.inf))
            ids[again] = allowed.argmax(axis=1)
            best[again] = allowed[np.arange(len(again)), ids[again]]
    ids[~np.isfinite(best)] = BAD_ROW
    return Sampled(ids)
