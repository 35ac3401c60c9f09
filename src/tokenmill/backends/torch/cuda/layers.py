"""`LayerOps`: the parts of a layer around its attention. Here in plain torch; `fused.py` has them in kernels."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.cuda.inputs import StepInputs
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.matmul import Linear
from tokenmill.backends.torch.rope import rotate
from tokenmill.backends.torch.weights import DecoderWeights, LayerWeights


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
