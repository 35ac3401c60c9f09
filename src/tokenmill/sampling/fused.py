"""Draws that a device does in kernels of its own, where it has them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

DRAW_FIELDS = ("seed", "choice", "attempt", "position", "temperature", "top_k", "top_p", "min_p")
"""The first four are the key, as `philox.uniforms` takes it; floats are given by their bits as float32."""


class FusedDraw(Protocol):
    """Rows with a temperature, a top-k, a top-p and a min-p."""

    def __call__(self, logits: Tensor, told: Tensor, bad_row: int, *, is_filtered: bool = False) -> Tensor:
        """The id that each row's random number falls on; the largest logit's at temperature 0.

        told: int64, [rows, fields]: `DRAW_FIELDS` of each row, in one piece, since every upload costs the host.
        is_filtered: some row has a top-k or a top-p.
        """
        ...


def fused_draw(device: torch.device) -> FusedDraw | None:
    """None where `ops` is all there is."""
    if device.type != "cuda":
        return None
    from tokenmill.kernels.drawing import draw  # needs triton

    return draw
