"""`Backend`: two asynchronous launches and one wait, so that the device never idles while Python runs.

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
"""Default KV budget, as a fraction of free memory."""
LEAST_SEQS, MOST_SEQS = 256, 4096
CELLS_PER_SEQ = 64
"""Cells per sequence id: roughly the unshared part of a short conversation."""
UNKNOWN_FREE_BYTES = 2 << 30
"""Assumed free memory on systems that do not report it."""


@dataclass(frozen=True)
class MemoryPlan:
    """Planned memory in bytes, at full load."""

    weights: int
    kv: int
    activations: int
    """Temporary buffers of a step."""
    other: int = 0
    """Fixed overhead: tokenizer, tables, code."""
    loading: int = 0
    """Peak while weights are being read, before KV memory and buffers are allocated."""

    @property
    def total(self) -> int:
        """Peak memory."""
        return self.weights + max(self.kv + self.activations + self.other, self.loading)

    def with_draft(self, draft: MemoryPlan) -> MemoryPlan:
        """The plan including a draft model, which is loaded second."""
        return MemoryPlan(
            weights=self.weights + draft.weights,
            kv=self.kv + draft.kv,
            activations=self.activations + draft.activations,
            other=self.other + draft.other,
            loading=max(self.loading, draft.loading),
        )

    def times(self, workers: int) -> MemoryPlan:
        """The plan for this many backends on shared weights; KV memory and activations are per backend."""
        return replace(self, kv=workers * self.kv, activations=workers * self.activations)


def cells_for(num_seqs: int, context: int, block_size: int) -> int:
    """KV cells needed to run this many requests of this length concurrently.

    Requests are rounded up to whole blocks; two spare blocks keep the last one from running out.
    """
    blocks = -(-(context + 1) // block_size)
    return (num_seqs * blocks + 2) * block_size


def seqs_for(num_cells: int, num_running: int) -> int:
    """Sequence ids for this many cells; enough that cells run out first, since parked KV needs an id, too."""
    return max(LEAST_SEQS, 2 * num_running, min(num_cells // CELLS_PER_SEQ, MOST_SEQS))


def num_processors() -> int:
    """Processors available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_host_bytes() -> int:
    """Available host memory, including reclaimable page cache where the kernel reports it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # ValueError: unknown sysconf name
        num_pages = os.sysconf("SC_AVPHYS_PAGES")
        if num_pages > 0:
            return num_pages * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN_FREE_BYTES


def trim_host_memory() -> None:
    """Return freed memory to the operating system, after a phase with high temporary usage.

    glibc keeps freed memory in per-thread arenas: tens of megabytes after a model was loaded.
    """
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: not glibc
        ctypes.CDLL(None).malloc_trim(0)


FloatArray = NDArray[np.float32]
Mask = NDArray[np.uint32]
"""[rows, ceil(vocab / 32)] bits, lowest bit first; a set bit allows the token. The layout that llguidance writes."""

BAD_ROW = -1
"""Returned by a `Sampler` for a row with a NaN or without a finite allowed logit: the request fails."""


@dataclass(frozen=True)
class DecodeOutput:
    """Results of a batch's output rows, on the host."""

    logits: FloatArray
    """[k, vocab]: row k belongs to batch index `output_ids[k]`."""
    output_ids: IntArray
    hidden: FloatArray
    """[k, hidden]: row k belongs to batch index `hidden_ids[k]`."""
    hidden_ids: IntArray


@dataclass(frozen=True)
class Sampled:
    """One token id per sampled row, `BAD_ROW` if sampling failed; logprobs and the like in `extras`.

    Inside a backend the arrays are its own kind (numpy or torch); `collect` returns numpy arrays.
    """

    ids: Any
    extras: Mapping[str, Any] = field(default_factory=dict)


class Sampler(Protocol):
    """Samples token ids where the logits live. Implemented by the sampling layer, called by the backend."""

    def __call__(self, logits: Any, mask: Any | None, threads: Any | None = None) -> Sampled:
        """`logits`: [rows, vocab], a numpy array or a device tensor; `mask`: a `Mask`, on the host.

        threads: a `backends.cpu.bindings.Pool` that is idle during the call.
        """
        ...


@dataclass(frozen=True)
class SampleRows:
    """The rows of a forward's logits to sample, and where to store each id on the device."""

    logits_row: IntArray
    """Indices into the rows of the forward's logits."""
    table_row: IntArray
    """Row of the backend's token table, each at most once: a later batch names this id as `last_sampled(table_row)`.

    May be shorter than `logits_row`; ids of the remaining rows are returned but not stored.
    """
    sampler: Sampler | None = None
    """None for greedy."""


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
    """A compute backend. `docs/contract.md` explains the rules; the conformance suite checks them."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def kv(self) -> KVMemory: ...

    def forward(self, batch: Batch) -> Forward:
        """Launch one forward pass over the batch, all or nothing.

        Raises `InvalidBatch`, `OutOfKV` or `ForwardFailed` with KV memory unchanged; `StaleKV` while memory holds KV of
        replaced weights.
        """
        ...

    def sample(self, forward: Forward, rows: SampleRows, mask: Mask | None = None) -> Sampling:
        """Launch sampling of some logits rows, before the next forward; ids are stored in the token table."""
        ...

    def take_sampled(self, source: Backend, source_row: IntArray, table_row: IntArray) -> bool:
        """Launch a copy of rows of another backend's token table to rows of this one's, as they are behind what was
        launched there so far; a later batch may name them. Ids outside this vocabulary become some id of it.

        False where this backend cannot reach the other's table; nothing is done then.
        """
        ...

    @overload
    def collect(self, handle: Forward) -> DecodeOutput: ...
    @overload
    def collect(self, handle: Sampling) -> Sampled: ...
    def collect(self, handle: Forward | Sampling) -> DecodeOutput | Sampled:
        """Wait for a handle and copy its results to the host. Steps are collected in submission order.

        A failure that surfaces only here raises `ForwardFailed`: cells written by that step and all later ones are
        dropped from every sequence, and the later handles fail as well.
        """
        ...

    def close(self) -> None:
        """Free all resources. Explicit and idempotent; never left to the garbage collector."""
        ...

    def decode(self, batch: Batch) -> DecodeOutput:
        """Run a batch and wait for its logits and hidden states."""
        return self.collect(self.forward(batch))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class ModelInfo:
    """Model properties that the engine needs, independent of the family."""

    name: str
    vocab_size: int
    hidden_size: int
    max_context: int
    """Maximum number of positions."""
    layers: tuple[LayerKV, ...]
    form: str = ""
    """Format of weights and KV: exported KV of another form cannot be imported."""
    deterministic: bool = False
    """Whether results are bit-identical in any batch."""

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self.layers)


@dataclass(frozen=True)
class BackendLimits:
    """Resource limits of one engine core's backend."""

    num_cells: int = 4096
    max_seqs: int = 256
    ubatch_size: int = 2048
    """Tokens computed at once inside one forward; does not affect results."""
    max_context: int | None = None
    """Maximum positions of a sequence; None for the model's limit."""
    num_running: int | None = None
    """Maximum running sequences; None if unknown."""
    num_threads: int | None = None
    """Threads per forward pass; None for the backend's default."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Engine defaults for a model on its device; None for the engine's own default."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk: int | None = None
    min_prefill_chunk: int | None = None
    target_tick_ms: float | None = None
    offline_tick_ms: float | None = None
    """Replaces `target_tick_ms` for offline use (`LLM`), where inter-token latency does not matter."""
    max_step_ms: float | None = None
    """Not applied to offline use."""
    max_queue: int | None = None
    speculation: str | None = None


BACKENDS = ("auto", "cpu", "torch", "llamacpp", "fake")
LOAD_FORMATS = ("auto", "dummy")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load a model. Backend-specific options are in `extra`."""

    backend: str = "auto"
    """`auto` selects by file format."""
    dtype: str = "auto"
    """Of weights and activations."""
    device: str = "auto"
    """`auto` selects CUDA if available."""
    deterministic: bool = False
    """Batch-invariant arithmetic: bit-identical results in any batch."""
    load_format: str = "auto"
    """`dummy`: random weights from the configuration alone, to benchmark a model's shape."""
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend {self.backend!r} is not supported; supported: {', '.join(BACKENDS)}")
        if self.load_format not in LOAD_FORMATS:
            supported = ", ".join(LOAD_FORMATS)
            raise ConfigError(f"load_format {self.load_format!r} is not supported; supported: {supported}")


class Model(Protocol):
    """A loaded model, whether its weights are in this process or in an engine process."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def path(self) -> Path | None:
        """Directory or file of the model and its tokenizer; None if there is none."""
        ...

    @property
    def weights_version(self) -> int:
        """Incremented when a weight is replaced, which invalidates all KV."""
        ...

    def close(self) -> None: ...


class ModelHandle(Model, Protocol):
    """A loaded model: one copy of the weights, shared by the backends of all engine cores."""

    @property
    def kv_budget_bytes(self) -> int:
        """Default KV budget, given the memory that is free now."""
        ...

    @property
    def free_bytes(self) -> int:
        """Free memory on the model's device."""
        ...

    @property
    def block_size(self) -> int:
        """KV cells per block."""
        ...

    @property
    def step_sizes(self) -> StepSizes:
        """Defaults for step sizes and speculation."""
        ...

    def memory(self, limits: BackendLimits, num_rows: int) -> MemoryPlan:
        """Memory plan of a backend with these limits and up to `num_rows` logits rows per step."""
        ...

    def new_backend(self, limits: BackendLimits) -> Backend:
        """A backend with its own KV memory on the shared weights."""
        ...

    def replace_weight(self, name: str, value: Any) -> None:
        """Replace the values of one tensor. Waits for running steps; invalidates all KV.

        `InvalidOperation`, with nothing changed, if the tensor does not exist or the shape differs.
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
    """Raise `InvalidOperation` unless rows and mask fit the logits. Called by backends."""
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
    """The default `Sampler` of numpy backends: argmax, the lowest id among equals."""
    ids = logits.argmax(axis=1).astype(np.int32)  # argmax prefers NaN
    best = logits[np.arange(len(ids)), ids]
    if mask is not None:
        is_allowed = (mask[np.arange(len(ids)), ids // 32] >> (ids % 32).astype(np.uint32)) & 1
        # Only rows whose argmax is masked out need a second look.
        again = np.flatnonzero((is_allowed == 0) & ~np.isnan(best))
        if len(again):
            allowed = np.where(unpack_mask(mask[again], logits.shape[1]), logits[again], np.float32(-np.inf))
            ids[again] = allowed.argmax(axis=1)
            best[again] = allowed[np.arange(len(again)), ids[again]]
    ids[~np.isfinite(best)] = BAD_ROW
    return Sampled(ids)
