"""Rotary positions on tensors: cosines and sines of positions, and vectors rotated by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.backends.families.rope import Rope, frequencies


class Rotations:
    """The rotations of a decoder's layers: different RoPE settings are computed once each."""

    def __init__(self, ropes: Sequence[Rope | None], device: torch.device) -> None:
        self._different = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        found = [frequencies(rope) for rope in self._different]
        self._frequencies = [(torch.from_numpy(inv_freq).to(device), scale) for inv_freq, scale in found]
        self.index = [None if rope is None else self._different.index(rope) for rope in ropes]
        """Of each layer among the different rotations; None: it has none."""
        half = self._different[0].dim // 2 if self._different else 0
        nothing = torch.zeros(half, device=device)
        self.inv_freq = torch.stack([nothing if i is None else self._frequencies[i][0] for i in self.index])
        """[layers, rotated dims / 2]: angle a position, 0 where a layer has none."""

    def of(self, pos: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines of the different rotations, each [tokens, 1, rotated dims / 2]."""
        return [rotations(pos, inv_freq, scale) for inv_freq, scale in self._frequencies]


def rotations(pos: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [tokens, 1, dim / 2]."""
    angle = pos.to(torch.float32)[:, None, None] * inv_freq
    return angle.cos() * scale, angle.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, dim] with the pairs (i, i + rotated / 2) turned by their angles; later dimensions stay."""
    rotated = 2 * cos.shape[-1]
    first, second = x[..., :rotated].float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return turned if rotated == x.shape[-1] else torch.cat((turned, x[..., rotated:]), dim=-1)
