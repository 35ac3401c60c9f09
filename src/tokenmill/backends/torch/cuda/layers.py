"""`CudaDecoder`: the generic decoder as CUDA runs it, over a state that all layers add to in place.

`LayerOps` are the parts of a layer around its attention: in plain torch, in kernels of ours between cuBLAS's products,
and, for a single row, in kernels instead of them. `Switches` turns each optimisation off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.backends.families.config import DecoderConfig
from tokenmill.backends.torch.attention import Attention
from tokenmill.backends.torch.cuda.inputs import StepInputs
from tokenmill.backends.torch.decoder import Decoder, activated, rms_norm, scaled_logits
from tokenmill.backends.torch.footprint import GATED_BYTES
from tokenmill.backends.torch.kernels.islands import (
    add,
    embed,
    few_rows_product,
    gate,
    norm,
    scale_logits,
    turn_and_store,
)
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.model import ModelDecoder
from tokenmill.backends.torch.rotations import rotate
from tokenmill.backends.torch.weights import DecoderWeights, Linear

LayerTurns = Sequence[tuple[Tensor, Tensor] | None]
"""Of each layer: cosines and sines of all positions, [context, rotated dims / 2]; None: it has no rotation."""


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
    """A step of a single token, or of two in a small model, multiplies with kernels of its own. Needs `islands`."""


class AnyCudaDecoder(ModelDecoder, Protocol):
    """What a backend on a card must know of its decoder."""

    @property
    def switches(self) -> Switches: ...

    @property
    def is_capped(self) -> bool:
        """Does attention have soft caps in any layer?"""
        ...

    def run(
        self,
        inputs: StepInputs,
        sampled: Tensor,
        x: Tensor,
        kv: TorchKV,
        attention: Attention,
        wanted: Tensor | None = None,
    ) -> Tensor: ...

    def normed(self, hidden: Tensor) -> Tensor: ...

    def logits_of(self, hidden: Tensor, out: Tensor | None = None) -> Tensor: ...


class LayerOps(Protocol):
    """Made anew for each step. `x` is [tokens, hidden], the state that layers add to, in place."""

    def embed(self, sampled: Tensor, x: Tensor) -> None:
        """The state before the first layer; `sampled` is the token table."""
        ...

    def qkv(self, number: int, x: Tensor) -> Tensor:
        """[tokens, (heads + 2 KV heads) * dim]: normed and multiplied."""
        ...

    def store(self, number: int, qkv: Tensor) -> Tensor:
        """Put turned keys, and values, into their slots; gives the turned queries, [tokens, heads, dim]."""
        ...

    def add_product(self, number: int, linear: Linear, inner: Tensor, post_norm: Tensor | None, x: Tensor) -> None:
        """Add inner times the matrix to x, with the norm and the factor that the layer has for that."""
        ...

    def gated(self, number: int, x: Tensor) -> Tensor:
        """[tokens, intermediate]: normed, multiplied and gated."""
        ...


class PlainOps:
    """Torch alone."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, turns: LayerTurns, kv: TorchKV, inputs: StepInputs
    ) -> None:
        self._config = config
        self._weights = weights
        self._kv = kv
        self._inputs = inputs
        self._slots = inputs.slot.long()
        self._turns = turns
        self._pos = inputs.pos.long()

    def embed(self, sampled: Tensor, x: Tensor) -> None:
        token = self._inputs.token.long()
        known = torch.where(token < 0, sampled[(-1 - token).clamp(min=0)].clamp(min=0), token)
        x.copy_(F.embedding(known, self._weights.embed) * self._config.embed_scale)

    def qkv(self, number: int, x: Tensor) -> Tensor:
        weights = self._weights.layers[number]
        return weights.qkv(self._norm(x, weights.attn_norm))

    def store(self, number: int, qkv: Tensor) -> Tensor:
        config, weights, turns = self._config, self._weights.layers[number], self._turns[number]
        parts = torch.split(qkv, [config.query_size, config.kv_size, config.kv_size], dim=1)
        if config.layers[number].qk_norm == "projection":
            parts = self._norm(parts[0], weights.q_norm), self._norm(parts[1], weights.k_norm), parts[2]
        q, k, v = (part.reshape(len(part), -1, config.head_dim) for part in parts)
        if config.layers[number].qk_norm == "head":
            q, k = self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)
        if turns is not None:
            cos, sin = (turn[self._pos][:, None] for turn in turns)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self._kv.store(number, self._slots, k, v)
        return q

    def add_product(self, number: int, linear: Linear, inner: Tensor, post_norm: Tensor | None, x: Tensor) -> None:
        x.add_(self._norm(linear(inner), post_norm), alpha=self._config.layers[number].residual_scale)

    def gated(self, number: int, x: Tensor) -> Tensor:
        weights = self._weights.layers[number]
        gate, up = weights.gate_up(self._norm(x, weights.mlp_norm)).chunk(2, dim=-1)
        return activated(self._config.layers[number], gate) * up

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm(x, weight, self._config.rms_eps)


TILE_ROWS = 256
"""Whole tiles of cuBLAS's."""


class FusedOps:
    """`LayerOps` for any number of rows: one kernel between two products."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, turns: LayerTurns, kv: TorchKV, inputs: StepInputs
    ) -> None:
        self._config = config
        self._weights = weights
        self._turns = turns
        self._kv = kv
        self._inputs = inputs

    def embed(self, sampled: Tensor, x: Tensor) -> None:
        embed(self._inputs.token, sampled, self._weights.embed, x, self._config.embed_scale)

    def qkv(self, number: int, x: Tensor) -> Tensor:
        weights = self._weights.layers[number]
        return weights.qkv(self._norm(x, weights.attn_norm))

    def store(self, number: int, qkv: Tensor) -> Tensor:
        config, inputs, weights = self._config, self._inputs, self._weights.layers[number]
        gains = weights.q_norm, weights.k_norm
        if config.layers[number].qk_norm == "projection":
            sizes = [config.query_size, config.kv_size, config.kv_size]
            for part, gain in zip(torch.split(qkv, sizes, dim=1), gains, strict=False):
                norm(part, gain, config.rms_eps, in_place=True)  # type: ignore[arg-type]
            gains = None, None
        turn_and_store(
            qkv, inputs.pos, inputs.slot, self._turns[number], *gains, config.rms_eps,
            self._kv.keys[number], self._kv.values[number], config.num_heads,
        )  # fmt: skip
        return qkv.view(len(qkv), -1, config.head_dim)[:, : config.num_heads]

    def add_product(self, number: int, linear: Linear, inner: Tensor, post_norm: Tensor | None, x: Tensor) -> None:
        factor = self._config.layers[number].residual_scale
        if post_norm is not None or factor != 1.0:
            add(self._product(linear, inner), post_norm, self._config.rms_eps, factor, x)
        else:
            self._add(linear, inner, x)

    def gated(self, number: int, x: Tensor) -> Tensor:
        weights, activation = self._weights.layers[number], self._config.layers[number].activation
        normed = self._norm(x, weights.mlp_norm)
        inner = torch.empty(len(x), self._config.intermediate_size, dtype=x.dtype, device=x.device)
        at_a_time = max(GATED_BYTES // (2 * inner.stride(0) * inner.itemsize) // TILE_ROWS, 1) * TILE_ROWS
        for begin in range(0, len(x), at_a_time):
            rows = slice(begin, begin + at_a_time)
            gate(weights.gate_up(normed[rows]), inner[rows], activation)
        return inner

    def _product(self, linear: Linear, inner: Tensor) -> Tensor:
        return linear(inner)

    def _add(self, linear: Linear, inner: Tensor, x: Tensor) -> None:
        x.addmm_(inner, linear.weight.t())
        if linear.bias is not None:
            x.add_(linear.bias)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else norm(x, weight, self._config.rms_eps)


TWO_ROWS_WIDTH = 2048
"""Widest hidden state of which two rows are multiplied so: cuBLAS reads large matrices as fast."""


class FewRowsOps(FusedOps):
    """`LayerOps` for a row or two: norm, gate and residual ride along with the products."""

    def qkv(self, number: int, x: Tensor) -> Tensor:
        weights = self._weights.layers[number]
        return few_rows_product(
            x, weights.qkv.weight, weights.qkv.bias, gain=weights.attn_norm, eps=self._config.rms_eps
        )

    def gated(self, number: int, x: Tensor) -> Tensor:
        weights = self._weights.layers[number]
        return few_rows_product(
            x, weights.gate_up.weight, weights.gate_up.bias, gain=weights.mlp_norm, eps=self._config.rms_eps,
            gates=True, activation=self._config.layers[number].activation,
        )  # fmt: skip

    def _product(self, linear: Linear, inner: Tensor) -> Tensor:
        return few_rows_product(inner, linear.weight, linear.bias)

    def _add(self, linear: Linear, inner: Tensor, x: Tensor) -> None:
        few_rows_product(inner, linear.weight, linear.bias, add_to=x)


class CudaDecoder(Decoder):
    """Weights and what is done with them. Shared by all backends of a model; keeps no state of its own."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, switches: Switches = Switches()) -> None:
        super().__init__(config, weights)
        self.switches = switches
        turns = self._rotations.of(torch.arange(config.max_context, device=self.device))
        tables = [(cos[:, 0].contiguous(), sin[:, 0].contiguous()) for cos, sin in turns]
        self._turns: LayerTurns = [None if i is None else tables[i] for i in self._rotations.index]

    @property
    def is_capped(self) -> bool:
        return any(layer.attention_softcap is not None for layer in self.config.layers)

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
            q = ops.store(number, ops.qkv(number, x))
            if wanted is not None and number == self.config.num_layers - 1:
                if not len(wanted):
                    return x[:0]
                attended, x = attention(number, q, self._scorings[number]).flatten(1)[wanted], x[wanted]
            else:
                attended = attention(number, q, self._scorings[number]).flatten(1)
            ops.add_product(number, layer.o, attended, layer.attn_post_norm, x)
            ops.add_product(number, layer.down, ops.gated(number, x), layer.mlp_post_norm, x)
        return x

    def _ops(self, inputs: StepInputs, kv: TorchKV) -> LayerOps:
        if not self.switches.islands:
            return PlainOps(self.config, self.weights, self._turns, kv, inputs)
        is_few = self._is_one_row(inputs.token) or self._is_two_rows(inputs.token)
        kind = FewRowsOps if is_few else FusedOps
        return kind(self.config, self.weights, self._turns, kv, inputs)

    def normed(self, hidden: Tensor) -> Tensor:
        if not self.switches.islands:
            return super().normed(hidden)
        return norm(hidden.contiguous(), self.weights.norm, self.config.rms_eps)

    def logits_of(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[rows, vocab] in the weights' own type, of states that are still to be normed."""
        head, gain = self.weights.head.weight, self.weights.norm
        if self._is_one_row(hidden):
            logits = few_rows_product(hidden, head, gain=gain, eps=self.config.rms_eps, out=out)
        else:
            logits = torch.mm(self.normed(hidden), head.t(), out=out)
        if self.config.logit_scale == 1.0 and self.config.logit_softcap is None:
            return logits
        if not self.switches.islands:
            return scaled_logits(self.config, logits)
        return scale_logits(logits, self.config.logit_scale, self.config.logit_softcap)

    def _is_one_row(self, rows: Tensor) -> bool:
        return len(rows) == 1 and self.switches.islands and self.switches.one_row

    def _is_two_rows(self, rows: Tensor) -> bool:
        is_narrow = self.config.hidden_size <= TWO_ROWS_WIDTH
        return len(rows) == 2 and is_narrow and self.switches.islands and self.switches.one_row
