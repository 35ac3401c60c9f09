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
    loading: int = 0
    """What reading the weights takes on the way, while nothing of the rest is there yet."""

    @property
    def total(self) -> int:
        """At the most."""
        return self.weights + max(self.kv + self.activations + self.other, self.loading)


def cells_for(num_seqs: int, context: int, block_size: int) -> int:
    """KV cells with which so many requests of this length run at the same time.

    Each has whole blocks; two more are kept, so that the last one always finds room.
    """
    blocks = -(-(context + 1) // block_size)
    return (num_seqs * blocks + 2) * block_size
