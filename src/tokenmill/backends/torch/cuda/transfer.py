"""Between host and card without waiting: what is uploaded lies in pinned memory, and downloads are only launched."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.errors import IntegrityError

ALIGNED = 4
"""Sections begin at multiples of so many numbers: 16 bytes."""
NUM_BUFFERS = 3
"""Host buffers that take turns: a step's own may still be on its way when the next step is written."""


def download(tensor: Tensor) -> Tensor:
    """A copy on the host that is there once everything launched so far is done."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class InputBuffer:
    """A step's numbers, in one piece: written on the host section by section, sent with one copy.

    A section of the same sizes before it lies at the same address on the card in every step, which graphs rely on.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._card = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._hosts = [torch.zeros(capacity, dtype=torch.int32, pin_memory=True) for _ in range(NUM_BUFFERS)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._sent: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._turn = 0
        self._used = 0

    def begin(self) -> None:
        """Start a step with a host buffer that has been sent."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        self._used = 0
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()

    def section(self, size: int) -> tuple[NDArray[np.int32], Tensor]:
        """Room for so many numbers: where to write them, and where they will be on the card."""
        begin, end = self._used, self._used + size
        if end > len(self._card):
            raise IntegrityError(f"{end} numbers for a step, but there is room for {len(self._card)}")
        self._used = -(-end // ALIGNED) * ALIGNED
        return self._arrays[self._turn][begin:end], self._card[begin:end]

    def put(self, numbers: NDArray[np.generic], size: int | None = None, filler: int = 0) -> Tensor:
        """A section with these numbers, filled up to a size."""
        there, on_card = self.section(len(numbers) if size is None else size)
        there[: len(numbers)] = numbers
        there[len(numbers) :] = filler
        return on_card

    def send(self) -> None:
        """Copy all sections of this step to the card."""
        used = min(self._used, len(self._card))
        self._card[:used].copy_(self._hosts[self._turn][:used], non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._sent[self._turn] = event
