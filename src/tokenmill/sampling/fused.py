"""Draws that a device does in kernels of its own, where it has them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

DRAW_FIELDS = ("seed", "choice", "attempt", "position", "temperature")
"""The first four are the key, as `philox.uniforms` takes it; a temperature is given by the bits of a float32."""


class FusedDraw(Protocol):
    """Rows that have a temperature and nothing else."""

    def __call__(self, logits: Tensor, told: Tensor, bad_row: int) -> Tensor:
        """The id that each row's random number falls on; the largest logit's at temperature 0.

        told: int64, [rows, fields]: `DRAW_FIELDS` of each row, in one piece, since every upload costs the host.
        """
        ...


def fused_draw(device: torch.device) -> FusedDraw | None:
    """None where `ops` is all there is."""
    if device.type != "cuda":
        return None
    from tokenmill.backends.torch.cuda.kernels.drawing import draw  # needs triton

    return draw
