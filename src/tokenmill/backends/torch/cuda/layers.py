"""`CudaDecoder`: the generic decoder as CUDA runs it, over a state that all layers add to in place.

`LayerOps` are the parts of a layer around its attention: in plain torch, in kernels of ours between cuBLAS's products,
and, for a single row, in kernels instead of them. `Switches` turns each optimisation off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.backends.torch.attention import Attention
from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.cuda.inputs import StepInputs
from tokenmill.backends.torch.decoder import Decoder
from tokenmill.backends.torch.footprint import GATED_BYTES
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.rope import rotate, rotations
from tokenmill.backends.torch.weights import DecoderWeights, LayerWeights, Linear
from tokenmill.kernels.islands import embed, gate, norm, one_row_product, turn_and_store


@dataclass(frozen=True, kw_only=True)
class Switches:
    """Everything is on by default; off means plain torch."""

    graphs: bool = True
    """Decode steps are replayed as CUDA graphs. Needs `attention` and `islands`."""
    attention: bool = True
    """Attention reads paged KV where it is; off gathers it first."""
    islands: bool = True
    """Norms, rope with the KV store, and gates are one kernel each."""
    one_row: bool = True
    """A step of a single token multiplies with kernels of its own. Needs `islands`."""


class LayerOps(Protocol):
    """Made anew for each step. `x` is [tokens, hidden], the state that layers add to, in place."""

    def embed(self, sampled: Tensor, x: Tensor) -> None:
        """The state before the first layer; `sampled` is the token table."""
        ...

    def qkv(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """[tokens, (heads + 2 KV heads) * dim]: normed and multiplied."""
        ...

    def store(self, number: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        """Put turned keys, and values, into their slots; gives the turned queries, [tokens, heads, dim]."""
        ...

    def add_product(self, linear: Linear, inner: Tensor, x: Tensor) -> None:
        """Add inner times the matrix to x."""
        ...

    def gated(self, layer: LayerWeights, x: Tensor) -> Tensor:
        """[tokens, intermediate]: normed, multiplied and gated."""
        ...


class PlainOps:
    """Torch alone."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, turns: tuple[Tensor, Tensor], kv: TorchKV,
        inputs: StepInputs,
    ) -> None:  # fmt: skip
        self._config = config
        self._weights = weights
        self._kv = kv
        self._inputs = inputs
        self._slots = inputs.slot.long()
        pos = inputs.pos.long()
        self._cos, self._sin = (turn[pos][:, None] for turn in turns)

    def embed(self, sampled: Tensor, x: Tensor) -> None:
        token = self._inputs.token.long()
        known = torch.where(token < 0, sampled[(-1 - token).clamp(min=0)].clamp(min=0), token)
        x.copy_(F.embedding(known, self._weights.embed))

    def qkv(self, layer: LayerWeights, x: Tensor) -> Tensor:
        return layer.qkv(self._norm(x, layer.attn_norm))

    def store(self, number: int, layer: LayerWeights, qkv: Tensor) -> Tensor:
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        self._kv.store(number, self._slots, rotate(k, self._cos, self._sin), v)
        return rotate(q, self._cos, self._sin)

    def add_product(self, linear: Linear, inner: Tensor, x: Tensor) -> None:
        x.add_(linear(inner))

    def gated(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
        return F.silu(gate) * up

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._config.rms_eps)


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


class CudaDecoder(Decoder):
    """Weights and what is done with them. Shared by all backends of a model; keeps no state of its own."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, switches: Switches = Switches()) -> None:
        super().__init__(config, weights)
        self.switches = switches
        pos = torch.arange(config.max_context, device=self.device)
        cos, sin = rotations(pos, self.inv_freq, self._rope_scale)
        self._turns = cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def run(
        self,
        inputs: StepInputs,
        sampled: Tensor,
        x: Tensor,
        kv: TorchKV,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """All layers over `x`, [tokens, hidden], which becomes the state after each; keys and values go to their slots.

        Returns the last state, still to be normed: of all tokens, or of those `wanted`, for which alone the last layer
        is finished.
        """
        ops = self._ops(inputs, kv)
        ops.embed(sampled, x)
        for number, layer in enumerate(self.weights.layers):
            q = ops.store(number, layer, ops.qkv(layer, x))
            if wanted is not None and number == self.config.num_layers - 1:
                if not len(wanted):
                    return x[:0]
                attended, x = attention(number, q).flatten(1)[wanted], x[wanted]
            else:
                attended = attention(number, q).flatten(1)
            ops.add_product(layer.o, attended, x)
            ops.add_product(layer.down, ops.gated(layer, x), x)
        return x

    def _ops(self, inputs: StepInputs, kv: TorchKV) -> LayerOps:
        if not self.switches.islands:
            return PlainOps(self.config, self.weights, self._turns, kv, inputs)
        kind = OneRowOps if self._is_one_row(inputs.token) else FusedOps
        return kind(self.config, self.weights, self._turns, kv, inputs)

    def normed(self, hidden: Tensor) -> Tensor:
        if not self.switches.islands:
            return super().normed(hidden)
        return norm(hidden.contiguous(), self.weights.norm, self.config.rms_eps)

    def logits_of(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, vocab] in the weights' own type, of states that are still to be normed."""
        head, gain = self.weights.head.weight, self.weights.norm
        if self._is_one_row(hidden):
            return one_row_product(hidden, head, gain=gain, eps=self.config.rms_eps, out=out)
        return torch.mm(self.normed(hidden), head.t(), out=out)

    def _is_one_row(self, rows: Tensor) -> bool:
        return len(rows) == 1 and self.switches.islands and self.switches.one_row
