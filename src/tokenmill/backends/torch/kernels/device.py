"""What sampler and backends need on any device: `upload` without a wait, `largest` of each row, `masked` logits."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NEVER = np.float32(-np.inf)


def upload(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """The same numbers on a device. On the CPU it is the same memory, elsewhere the host may change its own at once."""
    there = torch.from_numpy(np.ascontiguousarray(numbers))
    if device.type == "cpu":
        return there
    # A copy from memory that is not pinned would wait until everything before it is done.
    return there.pin_memory().to(device, non_blocking=True)


def upload_beside(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """As `upload`, to a busy card: the copy runs beside its work, and what is launched from now on waits for it."""
    copying, computing = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(copying):
        there = upload(numbers, device)
    computing.wait_stream(copying)
    there.record_stream(computing)
    return there


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def masked(logits: Tensor, mask: NDArray[np.uint32]) -> Tensor:
    """A copy of the logits without those that the masks rule out, in one operation and without a wait.

    mask: [rows, ceil(vocab / 32)] bits on the host, lowest bit first, as of `contract.Mask`.
    """
    if logits.device.type == "cuda":
        from tokenmill.backends.torch.kernels import drawing  # needs triton

        return drawing.masked(logits, upload_beside(mask.view(np.int32), logits.device))
    octets = np.ascontiguousarray(mask, dtype="<u4").view(np.uint8)
    allowed = np.unpackbits(octets, axis=1, count=logits.shape[1], bitorder="little").view(np.bool_)
    if logits.device.type == "cpu" and logits.dtype is torch.float32:  # numpy wakes no other threads for it
        return torch.from_numpy(np.where(allowed, logits.numpy(), NEVER))
    return logits.masked_fill(~upload(allowed, logits.device), float(NEVER))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and where it is. A NaN is larger than everything.

    Of equal ones it is the first, wherever that is promised: numpy and our kernel do, torch does not.
    """
    if logits.device.type == "cpu" and logits.dtype is torch.float32:  # numpy is ten times as fast
        ids = torch.from_numpy(logits.numpy().argmax(axis=-1))
        return logits.gather(-1, ids[:, None])[:, 0], ids
    if logits.device.type == "cuda":
        from tokenmill.backends.torch.kernels import drawing  # needs triton

        return drawing.largest(logits)
    values, ids = logits.max(dim=-1)
    return values, ids


def largest_allowed(logits: Tensor, mask: NDArray[np.uint32]) -> tuple[Tensor, Tensor]:
    """`largest` of what the masks allow. On the CPU, only rows whose largest logit is ruled out are looked at again."""
    if logits.device.type != "cpu":
        return largest(masked(logits, mask))
    values, ids = largest(logits)
    places = ids.numpy()
    is_allowed = (mask[np.arange(len(mask)), places // 32] >> (places % 32).astype(np.uint32)) & 1
    wrong = np.flatnonzero((is_allowed == 0) & ~values.isnan().numpy())
    if len(wrong):
        at = torch.from_numpy(wrong)
        values[at], ids[at] = largest(masked(logits[at], mask[wrong]))
    return values, ids
