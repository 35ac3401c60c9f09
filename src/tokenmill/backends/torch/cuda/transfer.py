"""Between host and card without waiting: what is uploaded lies in pinned memory, and downloads are only launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.errors import IntegrityError

ALIGNED = 4
NUM_BUFFERS = 3
"""Host buffers that take turns: a step's own may still be on its way when the next step is written."""


def download(tensor: Tensor) -> Tensor:
    """A copy on the host that is there once everything launched so far is done."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class InputBuffer:
    """A step's numbers, in one piece: written on the host, sent with one copy."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.card = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=True) for _ in range(NUM_BUFFERS)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._sent = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]  # type: ignore[no-untyped-call]
        self._stream = torch.cuda.current_stream(device)
        self._turn = 0
        self._ends: list[tuple[int, Tensor, Tensor] | None] = [None] * NUM_BUFFERS
        """What was last sent from each buffer, as parts of it and of the card's: mostly it is as much again."""

    def begin(self) -> NDArray[np.int32]:
        """What a step is to be written to: a host buffer that has been sent."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        self._sent[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> None:
        """Copy the first so many numbers of this step to the same places on the card."""
        parts = self._ends[self._turn]
        if parts is None or parts[0] != count:
            parts = self._ends[self._turn] = (count, self.card[:count], self._hosts[self._turn][:count])
        parts[1].copy_(parts[2], non_blocking=True)
        self._sent[self._turn].record(self._stream)


class Sections:
    """Parts of a step's numbers, one after the other."""

    def __init__(self, buffer: InputBuffer) -> None:
        self._buffer = buffer
        self._there = buffer.begin()
        self._used = 0

    def room(self, size: int) -> tuple[NDArray[np.int32], Tensor]:
        """Room for so many numbers: where to write them, and where they will be on the card."""
        begin, end = self._used, self._used + size
        if end > len(self._there):
            raise IntegrityError(f"{end} numbers for a step, but there is room for {len(self._there)}")
        self._used = aligned(end)
        return self._there[begin:end], self._buffer.card[begin:end]

    def put(self, numbers: NDArray[Any]) -> Tensor:
        """These numbers, as they will be on the card."""
        there, on_card = self.room(len(numbers))
        there[:] = numbers
        return on_card

    def send(self) -> None:
        self._buffer.send(min(self._used, len(self._there)))


def aligned(count: int) -> int:
    """Sections begin at multiples of 16 bytes."""
    return -(-count // ALIGNED) * ALIGNED
