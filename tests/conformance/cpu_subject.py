"""The cpu backend as a subject: a decoder whose logits depend on nothing but the cells a token sees.

As in `torch_subject.py`, every layer reads only the half of the hidden state that the embedding writes, and the norms
do (next to) nothing. Embeddings are whole numbers up to 127, which the kernels round to themselves; what is left of
their rounding is that of attention's output and of the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from tests.conformance.subjects import Cells, Subject
from tokenmill.backends.checkpoints import StoredTensor
from tokenmill.backends.cpu.backend import CPUKV, KV_DTYPES, SCALE_BYTES, CPUBackend, CPUDecoder, CPUStep, layer_kv
from tokenmill.backends.cpu.bindings import INT8, library
from tokenmill.backends.cpu.packing import NativeWeights, as_kind
from tokenmill.backends.fake import FakeConfig, FaultKind, FaultPlan
from tokenmill.backends.families.config import DecoderConfig, LayerConfig
from tokenmill.backends.families.names import HF_NAMES, Shape, in_file, shapes
from tokenmill.backends.families.rope import Rope
from tokenmill.contract import Batch, Capabilities, IntArray
from tokenmill.errors import ForwardFailed, OutOfKV
from tokenmill.kv.paged import PagedKV, Segment
from tokenmill.kv.paged_backend import WeightsGate

HIDDEN, READ = 64, 32
"""The first `READ` dimensions are the embedding's; what layers add goes to the others. 32 are rounded together."""
HEADS, KV_HEADS, DIM = 4, 2, 16
EPS = 1e10
"""So large that a norm divides by a constant, which its weight makes good for."""
LARGEST = 127
SCALES = {"q": 0.001, "k": 0.001, "v": 0.02, "o": 0.4, "gate": 0.002, "up": 0.002, "down": 0.1, "head": 0.25}
"""Attention that sees everything about alike, and a head to which a cell more or less is worth whole numbers."""

FloatArray = NDArray[np.float64]


class CPUFaults(CPUBackend):
    """A cpu backend that can be told to fail, as the fake one."""

    faults: FaultPlan

    def _begin(self, batch: Batch, number: int) -> CPUStep:
        step = super()._begin(batch, number)
        step.struck = self.faults.strike(np.maximum(batch.token, 0), batch)  # type: ignore[attr-defined]
        if FaultKind.OUT_OF_KV in step.struck:  # type: ignore[attr-defined]
            raise OutOfKV(len(batch), 0)
        return step

    def _run(self, step: CPUStep, batch: Batch, segment: Segment, slots: IntArray) -> None:
        super()._run(step, batch, segment, slots)
        struck = step.struck  # type: ignore[attr-defined]
        if FaultKind.NAN in struck:
            _, matched = struck[FaultKind.NAN]
            # As a real model would have it: not only the results are no numbers, the keys and values are not either.
            bad = slots[matched[segment.tokens]]
            for cells in (*self._storage.keys, *self._storage.values):
                if cells.dtype == np.int8:  # its scale, then
                    cells[bad, :, -SCALE_BYTES:] = np.frombuffer(np.float32(np.nan).tobytes(), np.int8)
                else:
                    cells[bad] = np.nan
            self._storage.holds_bad_numbers = True
            if step.logits_parts:
                logits = np.concatenate(step.logits_parts)
                logits[np.flatnonzero(matched[step.output_ids])] = np.nan
                step.logits_parts = [logits]

    def _launched(self, step: CPUStep) -> None:
        super()._launched(step)
        struck = step.struck  # type: ignore[attr-defined]
        if FaultKind.FATAL in struck or FaultKind.FAIL in struck:
            raise ForwardFailed("told to fail", fatal=FaultKind.FATAL in struck)

    def _wait(self, step: CPUStep) -> None:
        struck = step.struck  # type: ignore[attr-defined]
        if FaultKind.LATE_FATAL in struck or FaultKind.LATE_FAIL in struck:
            raise ForwardFailed("told to fail at collect", fatal=FaultKind.LATE_FATAL in struck)
        super()._wait(step)


class MadeUp:
    """Weights as a checkpoint."""

    where, is_quantised = "made up", False

    def __init__(self, values: Mapping[str, NDArray[np.float32]]) -> None:
        self._values = {in_file(own, HF_NAMES): value for own, value in values.items()}

    def shapes(self) -> Mapping[str, Shape]:
        return {name: value.shape for name, value in self._values.items()}

    def dtype_of(self, name: str) -> str:  # noqa: ARG002
        return "F32"

    def load(self, name: str) -> StoredTensor:
        value = self._values[name]
        return StoredTensor("F32", value.shape, value)


def decoder_config(vocab_size: int, max_context: int, windows: tuple[int | None, ...]) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        max_context=max_context,
        rms_eps=EPS,
        layers=tuple(LayerConfig(rope=Rope(dim=DIM, theta=100.0), window=window) for window in windows),
    )


def weights_of(config: DecoderConfig) -> dict[str, NDArray[np.float32]]:
    random, found = np.random.default_rng(5), {}
    for own, shape in shapes(config).items():
        kind = own.partition(".")[0]
        value = random.standard_normal(shape) * SCALES.get(kind, 1.0)
        if "norm" in kind:
            value = np.full(shape, math.sqrt(EPS))
        if kind in ("q", "k", "v", "gate", "up"):
            value[:, READ:] = 0
        if kind in ("o", "down"):
            value[:READ] = 0
        if kind == "embed":
            value = random.integers(-LARGEST, LARGEST + 1, shape).astype(np.float64)
            value[:, 0], value[:, READ:] = LARGEST, 0
        found[own] = value.astype(np.float32)
    return found


@cache
def made(
    vocab_size: int, max_context: int, windows: tuple[int | None, ...]
) -> tuple[CPUDecoder, dict[str, FloatArray]]:
    """The decoder, and its weights as the kernels have rounded them."""
    config, lib = decoder_config(vocab_size, max_context, windows), library()
    values = weights_of(config)
    weights = NativeWeights(lib, config, INT8)
    weights.load(MadeUp(values), HF_NAMES, lambda *_: None)
    rounded = {
        own: (as_kind(value, INT8).values() if value.ndim == 2 else value).astype(np.float64)
        for own, value in values.items()
    }
    return CPUDecoder(lib, config, weights), rounded


def make(config: FakeConfig, kv_cache_dtype: str = "auto") -> CPUFaults:
    decoder, _ = made(config.vocab_size, config.max_context, config.windows)
    num_blocks = config.num_cells // config.block_size
    dtype = KV_DTYPES[kv_cache_dtype]
    storage = CPUKV(
        decoder.lib, layer_kv(decoder.config, dtype), num_blocks, config.block_size, decoder.inv_freq, dtype
    )
    given = config.capabilities
    capabilities = Capabilities(
        partial_rm=given.partial_rm, partial_cp=given.partial_cp, shift=given.shift, state_bytes=given.state_bytes,
        max_seqs=given.max_seqs, depth=given.depth, deterministic=True,
    )  # fmt: skip
    kv = PagedKV(config.num_cells, config.max_context, config.block_size, capabilities, storage)
    backend = CPUFaults(decoder, kv, storage, WeightsGate(), ubatch_size=config.ubatch_size, num_threads=1)
    backend.faults = FaultPlan()
    return backend


# -- what is owed, in numpy -------------------------------------------------------------------------------------------


def owed_hidden(config: FakeConfig, layers: list[Cells]) -> FloatArray:
    """The cell with the highest position is the token itself."""
    _, weight = made(config.vocab_size, config.max_context, config.windows)
    token, pos = max(layers[0], key=lambda cell: cell[1])
    x = weight["embed"][token].copy()
    for i, cells in enumerate(layers):
        embedded = weight["embed"][[cell[0] for cell in cells]]
        where = np.array([cell[1] for cell in cells])
        q = turned((weight[f"q.{i}"] @ x).reshape(1, HEADS, DIM), np.array([pos]))[0]
        k = turned((embedded @ weight[f"k.{i}"].T).reshape(-1, KV_HEADS, DIM), where)
        v = (embedded @ weight[f"v.{i}"].T).reshape(-1, KV_HEADS, DIM)
        heads = []
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = k[:, kv_head] @ q[head] / math.sqrt(DIM)
            shares = np.exp(scores - scores.max())
            heads.append(shares / shares.sum() @ v[:, kv_head])
        x = x + weight[f"o.{i}"] @ np.concatenate(heads)
        gate, up = weight[f"gate.{i}"] @ x, weight[f"up.{i}"] @ x
        x = x + weight[f"down.{i}"] @ (gate / (1 + np.exp(-gate)) * up)
    return x


def turned(x: FloatArray, pos: NDArray[np.int64]) -> FloatArray:
    """Each pair (i, i + dim / 2) as a complex number, turned by its angle."""
    angle = pos[:, None, None] * 100.0 ** (-np.arange(DIM // 2) * 2 / DIM)
    pairs = (x[..., : DIM // 2] + 1j * x[..., DIM // 2 :]) * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def oracle(config: FakeConfig, layers: list[Cells]) -> NDArray[np.float32]:
    _, weight = made(config.vocab_size, config.max_context, config.windows)
    return np.asarray(weight["head"] @ owed_hidden(config, layers), dtype=np.float32)


def hidden_oracle(config: FakeConfig, layers: list[Cells]) -> NDArray[np.float32]:
    return np.asarray(owed_hidden(config, layers), dtype=np.float32)


TOLERANCE = 2.5
"""Of logits up to 400. One cell of twenty is worth more than four."""
CPU = Subject("cpu", make, oracle, hidden_oracle, TOLERANCE, can_fail=True)
CPU_INT8_KV = Subject(
    "cpu-int8-kv", partial(make, kv_cache_dtype="int8"), oracle, hidden_oracle, TOLERANCE, can_fail=True, num_seeds=5
)
