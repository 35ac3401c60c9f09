"""Draws that a device does in kernels of its own, where it has them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class FusedDraw(Protocol):
    """Rows that have a temperature and nothing else."""

    def __call__(self, logits: Tensor, temperature: Tensor, keys: Tensor, bad_row: int) -> Tensor:
        """The id that each row's random number falls on; the largest logit's at temperature 0.

        keys: int64, [rows, 4]: seed, choice, attempt and position, as `philox.uniforms` takes them.
        """
        ...


def fused_draw(device: torch.device) -> FusedDraw | None:
    """None where `ops` is all there is."""
    if device.type != "cuda":
        return None
    from tokenmill.backends.torch.cuda.kernels.drawing import draw  # needs triton

    return draw
