"""The generic decoder: one forward pass over a flat list of tokens of any number of sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill.backends.torch.attention import Attention
from tokenmill.backends.torch.config import DecoderConfig
from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.backends.torch.rope import frequencies, rotate, rotations
from tokenmill.backends.torch.weights import DecoderWeights, LayerWeights


class Decoder:
    """Weights and what is done with them. Shared by all backends of a model; keeps no state of its own."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights) -> None:
        self.config = config
        self.weights = weights
        inv_freq, self._rope_scale = frequencies(config.rope)
        self.inv_freq = inv_freq.to(weights.embed.device)

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
        x = F.embedding(token, self.weights.embed)
        cos, sin = rotations(pos, self.inv_freq, self._rope_scale)
        for i, layer in enumerate(self.weights.layers):
            q, k, v = self._qkv(layer, self._norm(x, layer.attn_norm))
            kv.store(i, slots, rotate(k, cos, sin), v)
            x = x + layer.o(attention(i, rotate(q, cos, sin)).flatten(1))
            x = x + self._mlp(layer, self._norm(x, layer.mlp_norm))
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """The last norm: what embeddings are made of."""
        return self._norm(hidden, self.weights.norm)

    def logits(self, normed: Tensor) -> Tensor:
        """[rows, vocab] in float32."""
        return self.weights.head(normed).float()

    def _qkv(self, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = layer.qkv(x).view(len(x), -1, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        return q, k, v

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(F.silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_eps)
