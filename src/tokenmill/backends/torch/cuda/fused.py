"""The parts of a layer in kernels of ours: between cuBLAS's products, and, for a single row, instead of them."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.cuda.inputs import StepInputs
from tokenmill.backends.torch.cuda.kernels.islands import embed, gate, norm, turn_and_store
from tokenmill.backends.torch.cuda.kernels.one_row import one_row_product
from tokenmill.backends.torch.cuda.memory import GATED_BYTES
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.matmul import Linear
from tokenmill.backends.torch.weights import DecoderWeights, LayerWeights

TILE_ROWS = 256
"""Whole tiles of cuBLAS's."""


class FusedOps:
    """`LayerOps` for any number of rows: one kernel between two products."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, turns: tuple[Tensor, Tensor], kv: TorchKV,
        inputs: StepInputs,
    ) -> None:  # fmt: skip
        self._config = config
        self._weights = weights
        self._turns = turns
        self._kv = kv
        self._inputs = inputs

    def embed(self, sampled: Tensor, x: Tensor) -> None:
        embed(self._inputs.token, sampled, self._weights.embed, x)

    def qkv(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return layer.qkv(norm(x, layer.attn_norm, self._config.rms_eps))

    def store(self, number: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        config, inputs = self._config, self._inputs
        turn_and_store(
            qkv, inputs.pos, inputs.slot, *self._turns, layer.q_norm, layer.k_norm, config.rms_eps,
            self._kv.keys[number], self._kv.values[number], config.num_heads,
        )  # fmt: skip
        return qkv.view(len(qkv), -1, config.head_dim)[:, : config.num_heads]

    def add_product(self, linear: Linear, inner: Tensor, x: Tensor) -> None:
        x.addmm_(inner, linear.weight.t())
        if linear.bias is not None:
            x.add_(linear.bias)

    def gated(self, layer: LayerWeights, x: Tensor) -> Tensor:
        normed = norm(x, layer.mlp_norm, self._config.rms_eps)
        inner = torch.empty(len(x), self._config.intermediate_size, dtype=x.dtype, device=x.device)
        at_a_time = max(GATED_BYTES // (2 * inner.stride(0) * inner.itemsize) // TILE_ROWS, 1) * TILE_ROWS
        for begin in range(0, len(x), at_a_time):
            rows = slice(begin, begin + at_a_time)
            gate(layer.gate_up(normed[rows]), inner[rows])
        return inner


class OneRowOps(FusedOps):
    """`LayerOps` for a single row: norm, gate and residual ride along with the products."""

    def qkv(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return one_row_product(x, layer.qkv.weight, layer.qkv.bias, gain=layer.attn_norm, eps=self._config.rms_eps)

    def add_product(self, linear: Linear, inner: Tensor, x: Tensor) -> None:
        one_row_product(inner, linear.weight, linear.bias, add_to=x)

    def gated(self, layer: LayerWeights, x: Tensor) -> Tensor:
        weight, bias = layer.gate_up.weight, layer.gate_up.bias
        return one_row_product(x, weight, bias, gain=layer.mlp_norm, eps=self._config.rms_eps, gates=True)
