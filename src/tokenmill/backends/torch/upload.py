"""`upload`: from the host's numbers to a device's, without waiting for what the device is doing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """The same numbers on a device. On the CPU it is the same memory, elsewhere the host may change its own at once."""
    there = torch.from_numpy(np.ascontiguousarray(numbers))
    if device.type == "cpu":
        return there
    # A copy from memory that is not pinned would wait until everything before it is done.
    return there.pin_memory().to(device, non_blocking=True)
