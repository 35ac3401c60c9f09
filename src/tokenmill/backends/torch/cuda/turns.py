"""`OutputTurns`: where the graphs of decode steps leave logits, and the ids of the largest ones.

A graph writes to the same addresses each time, so a step's results would be gone with the next one. Two sets of buffers
take turns, one for each step that may be in flight; whoever still wants a step after that keeps a copy of its logits.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.backends.torch.backend import TorchStep
from tokenmill.backends.torch.cuda.memory import NUM_TURNS


@dataclass(frozen=True)
class GraphOutputs:
    """What graphs of one turn write to."""

    turn: int
    logits: Tensor
    """[rows, vocab]"""
    ids: Tensor
    """Where each row's largest logit is."""

    def first(self, count: int) -> GraphOutputs:
        """Of the first so many rows."""
        return GraphOutputs(self.turn, self.logits[:count], self.ids[:count])


class OutputTurns:
    """The buffers of one backend."""

    def __init__(self, num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._outputs = [
            GraphOutputs(
                turn,
                torch.empty(num_rows, vocab_size, dtype=dtype, device=device),
                torch.empty(num_rows, dtype=torch.int32, device=device),
            )
            for turn in range(NUM_TURNS)
        ]
        self._owners: list[weakref.ref[TorchStep] | None] = [None] * NUM_TURNS
        self._turn = 0

    def clear(self) -> None:
        """Let go of the memory."""
        self._outputs.clear()

    def begin(self, step: TorchStep) -> GraphOutputs:
        """The buffers for what this step computes next."""
        self._turn = (self._turn + 1) % NUM_TURNS
        outputs, owner = self._outputs[self._turn], self._owners[self._turn]
        before = None if owner is None else owner()
        if before is not None:
            address = outputs.logits.data_ptr()
            before.logits_parts = [part.clone() if part.data_ptr() == address else part for part in before.logits_parts]
        self._owners[self._turn] = weakref.ref(step)
        return outputs
