"""`Linear`: the one seam through which all weights are multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Linear:
    """Rows times a weight matrix."""

    weight: Tensor
    """[out, in]"""
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
