"""The torch backend as a subject: a decoder whose logits depend on nothing but the cells a token sees.

In a real decoder the keys of a deeper layer depend on what their token saw when it was computed, so a fresh prefill
says nothing about a sequence whose head was cut off. Here every layer reads only the half of the hidden state that the
embedding writes, and the norms do (next to) nothing; so what is owed follows from the visible cells alone, in numpy.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from tests.conformance.subjects import Cells, Subject
from tokenmill.backends.fake import FakeConfig, FaultKind, FaultPlan
from tokenmill.backends.families.config import DecoderConfig, LayerConfig
from tokenmill.backends.families.rope import Rope
from tokenmill.backends.torch.backend import DenseBackend, TorchBackend, TorchStep
from tokenmill.backends.torch.decoder import Decoder
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.weights import DecoderWeights
from tokenmill.contract import Batch, Capabilities, IntArray
from tokenmill.errors import ForwardFailed, OutOfKV
from tokenmill.kv.paged import PagedKV, Segment
from tokenmill.kv.paged_backend import WeightsGate

HIDDEN, READ = 16, 8
"""The first `READ` dimensions are the embedding's; what layers add goes to the others."""
HEADS, KV_HEADS, DIM = 4, 2, 8
EPS = 1e10
"""So large that a norm divides by a constant, which its weight makes good for."""

SMALL_ONES = ("gate", "up", "down")
"""So that logits stay small enough for float32 to hold them to the tolerance."""

FloatArray = NDArray[np.float64]


class Faults(TorchBackend):  # type: ignore[type-arg]
    """A torch backend that can be told to fail, as the fake one. To be mixed into one of them."""

    faults: FaultPlan

    def _begin(self, batch: Batch, number: int) -> TorchStep:
        step = super()._begin(batch, number)
        step.struck = self.faults.strike(np.maximum(batch.token, 0), batch)  # type: ignore[attr-defined]
        if FaultKind.OUT_OF_KV in step.struck:  # type: ignore[attr-defined]
            raise OutOfKV(len(batch), 0)
        return step

    def _run(self, step: TorchStep, batch: Batch, segment: Segment, slots: IntArray) -> None:
        super()._run(step, batch, segment, slots)
        struck = step.struck  # type: ignore[attr-defined]
        if FaultKind.NAN in struck:
            _, matched = struck[FaultKind.NAN]
            # As a real model would have it: not only the results are no numbers, the keys and values are not either.
            bad = self._to_device(slots[matched[segment.tokens]])
            nan = torch.full((len(bad), KV_HEADS, DIM), torch.nan, device=self._device)
            for layer in range(len(self._storage.keys)):
                self._storage.store(layer, bad, nan, nan)
            self._storage.holds_bad_numbers = True
            rows = self._to_device(np.flatnonzero(matched[step.output_ids]))
            logits = torch.cat(step.logits_parts)
            logits[rows] = torch.nan
            step.logits_parts = [logits]

    def _launched(self, step: TorchStep) -> None:
        super()._launched(step)
        struck = step.struck  # type: ignore[attr-defined]
        if FaultKind.FATAL in struck or FaultKind.FAIL in struck:
            raise ForwardFailed("told to fail", fatal=FaultKind.FATAL in struck)

    def _wait(self, step: TorchStep) -> None:
        struck = step.struck  # type: ignore[attr-defined]
        if FaultKind.LATE_FATAL in struck or FaultKind.LATE_FAIL in struck:
            raise ForwardFailed("told to fail at collect", fatal=FaultKind.LATE_FATAL in struck)
        super()._wait(step)


def decoder_config(config: FakeConfig) -> DecoderConfig:
    return DecoderConfig(
        family="llama",
        vocab_size=config.vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=12,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        max_context=config.max_context,
        rms_eps=EPS,
        layers=tuple(LayerConfig(rope=Rope(dim=DIM, theta=100.0), window=window) for window in config.windows),
    )


@cache
def make_decoder(vocab_size: int, max_context: int, windows: tuple[int | None, ...]) -> Decoder:
    config = decoder_config(FakeConfig(vocab_size=vocab_size, max_context=max_context, windows=windows))
    weights = DecoderWeights(config, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    for name, view in weights.views.items():
        kind = name.partition(".")[0]
        if "norm" in name:
            view.fill_(math.sqrt(EPS))
        else:
            view.copy_(torch.randn(view.shape, generator=generator) * (0.25 if kind in SMALL_ONES else 0.6))
        if kind in ("q", "k", "v"):
            view[:, READ:] = 0
        if kind in ("o", "down"):
            view[:READ] = 0
    weights.embed[:, READ:] = 0
    return Decoder(config, weights)


class FaultyDenseBackend(Faults, DenseBackend):  # type: ignore[misc]
    """A dense backend that can be told to fail."""


def make(config: FakeConfig, deterministic: bool = False) -> Faults:
    decoder = make_decoder(config.vocab_size, config.max_context, config.windows)
    return make_backend(FaultyDenseBackend, decoder, config, deterministic)


def make_backend(kind: type[Faults], decoder: Decoder, config: FakeConfig, deterministic: bool = False) -> Faults:
    num_blocks = config.num_cells // config.block_size
    layers = decoder.config.layer_kv(4)
    storage = TorchKV(layers, num_blocks, config.block_size, decoder.inv_freq, torch.float32, decoder.device)
    given = config.capabilities
    capabilities = Capabilities(
        partial_rm=given.partial_rm, partial_cp=given.partial_cp, shift=given.shift, state_bytes=given.state_bytes,
        max_seqs=given.max_seqs, depth=given.depth, deterministic=deterministic,
    )  # fmt: skip
    kv = PagedKV(config.num_cells, config.max_context, config.block_size, capabilities, storage)
    backend = kind(decoder, kv, storage, WeightsGate(), ubatch_size=config.ubatch_size, num_threads=1)
    backend.faults = FaultPlan()
    return backend


def make_deterministic(config: FakeConfig) -> Faults:
    return make(config, deterministic=True)


# -- what is owed, in numpy -------------------------------------------------------------------------------------------


def owed_hidden(config: FakeConfig, layers: list[Cells]) -> FloatArray:
    """The cell with the highest position is the token itself."""
    decoder = make_decoder(config.vocab_size, config.max_context, config.windows)
    weight = {name: view.double().numpy() for name, view in decoder.weights.views.items()}
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
    head = make_decoder(config.vocab_size, config.max_context, config.windows).weights.views["head"].double().numpy()
    return np.asarray(head @ owed_hidden(config, layers), dtype=np.float32)


def hidden_oracle(config: FakeConfig, layers: list[Cells]) -> NDArray[np.float32]:
    return np.asarray(owed_hidden(config, layers), dtype=np.float32)


TOLERANCE = 2e-3
"""Logits are up to a hundred; a wrong cell changes them by whole numbers."""
TORCH = Subject("torch", make, oracle, hidden_oracle, TOLERANCE, can_fail=True)
TORCH_DETERMINISTIC = Subject(
    "torch, deterministic", make_deterministic, oracle, hidden_oracle, TOLERANCE, can_fail=True
)
