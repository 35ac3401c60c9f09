"""`MemoryPlan`: what a model and one engine core take in memory, worked out before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes, when everything is in use."""

    weights: int
    kv: int
    activations: int
    """What a step needs while it runs."""
    other: int = 0
    """Tokenizer, tables, code: what is there whatever the settings are."""

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.other


def cells_for(num_seqs: int, context: int, block_size: int) -> int:
    """KV cells with which so many requests of this length run at the same time.

    Each has whole blocks; two more are kept, so that the last one always finds room.
    """
    blocks = -(-(context + 1) // block_size)
    return (num_seqs * blocks + 2) * block_size
