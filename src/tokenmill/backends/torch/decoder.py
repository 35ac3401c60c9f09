"""The generic decoder: one forward pass over a flat list of tokens of any number of sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.backends.families.config import DecoderConfig, LayerConfig
from tokenmill.backends.torch.attention import Attention, Scoring
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.rotations import Rotations, rotate
from tokenmill.backends.torch.weights import DecoderWeights, LayerWeights


class Decoder:
    """Weights and what is done with them. Shared by all backends of a model; keeps no state of its own."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        self._rotations = Rotations([layer.rope for layer in config.layers], weights.embed.device)
        self._scorings = [Scoring(layer.attention_scale, layer.attention_softcap) for layer in config.layers]

    @property
    def inv_freq(self) -> Tensor:
        """[layers, rotated dims / 2]: what keys are rotated by, for each position."""
        return self._rotations.inv_freq

    @property
    def device(self) -> torch.device:
        return self.weights.embed.device

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values are kept in."""
        return self.weights.embed.dtype

    @property
    def about(self) -> str:
        """How the weights are held, for people."""
        return f"weights in {str(self.kv_dtype).removeprefix('torch.')} on {self.device}"

    @property
    def names(self) -> list[str]:
        """The decoder's own names of its tensors."""
        return list(self.weights.views)

    def replace(self, own: str, value: Tensor) -> None:
        """New values for one tensor, in place."""
        self.weights.replace(own, value)

    def hidden(self, token: Tensor, pos: Tensor, slots: Tensor, kv: TorchKV, attention: Attention) -> Tensor:
        """[tokens, hidden]: run all layers; keys and values go into the slots. Still to be normed."""
        x = self._embedded(token)
        if self.config.embed_scale != 1.0:
            x = x * self.config.embed_scale
        turns = self._rotations.of(pos)
        for i, (layer, weights) in enumerate(zip(self.config.layers, self.weights.layers, strict=True)):
            q, k, v = self._qkv(layer, weights, self._norm(x, weights.attn_norm))
            rope = self._rotations.index[i]
            if rope is not None:
                q, k = rotate(q, *turns[rope]), rotate(k, *turns[rope])
            kv.store(i, slots, k, v)
            read = weights.o(attention(i, q, self._scorings[i]).flatten(1))
            x = x + self._added(layer, read, weights.attn_post_norm)
            inner = self._mlp(layer, weights, self._norm(x, weights.mlp_norm))
            x = x + self._added(layer, inner, weights.mlp_post_norm)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """The last norm: what embeddings are made of."""
        return self._norm(hidden, self.weights.norm)

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, vocab] in float32."""
        return scaled_logits(self.config, self.weights.head(normed).float())

    def _embedded(self, token: Tensor) -> Tensor:
        return F.embedding(token, self.weights.embed)

    def _qkv(self, layer: LayerConfig, weights: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config, qkv = self.config, weights.qkv(x)
        if layer.qk_norm == "projection":
            parts = torch.split(qkv, [config.query_size, config.kv_size, config.kv_size], dim=1)
            normed = self._norm(parts[0], weights.q_norm), self._norm(parts[1], weights.k_norm), parts[2]
            qkv = torch.cat(normed, dim=1)
        heads = qkv.view(len(x), -1, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.qk_norm == "head":
            q, k = self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)
        return q, k, v

    def _mlp(self, layer: LayerConfig, weights: LayerWeights, x: Tensor) -> Tensor:
        gate, up = weights.gate_up(x).chunk(2, dim=-1)
        return weights.down(activated(layer, gate) * up)

    def _added(self, layer: LayerConfig, out: Tensor, post_norm: Tensor | None) -> Tensor:
        """What attention or MLP add to the residual stream."""
        out = self._norm(out, post_norm)
        return out if layer.residual_scale == 1.0 else out * layer.residual_scale

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return rms_norm(x, weight, self.config.rms_eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Over the last dimension; without a weight there is no norm."""
    if weight is None:
        return x
    if weight.dtype != x.dtype:
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x, weight.shape, weight, eps)


def activated(layer: LayerConfig, gate: Tensor) -> Tensor:
    return F.silu(gate) if layer.activation == "silu" else F.gelu(gate, approximate="tanh")


def scaled_logits(config: DecoderConfig, logits: Tensor) -> Tensor:
    """The head's products with the configuration's factor and soft cap."""
    if config.logit_scale != 1.0:
        logits = logits * config.logit_scale
    if config.logit_softcap is not None:
        logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
    return logits
