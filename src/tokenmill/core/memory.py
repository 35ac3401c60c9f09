"""`MemoryPlan`: what a model and one engine core take in memory, worked out before anything is allocated."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

KV_SHARE = 0.25
"""Of the memory that is free, how much KV may take by default."""
LEAST_SEQS, MOST_SEQS = 256, 4096
CELLS_PER_SEQ = 64
"""Cells for each sequence id: a short conversation has as many that no other one shares."""
UNKNOWN_FREE_BYTES = 2 << 30
"""Taken for free where the system does not tell."""


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


def seqs_for(num_cells: int, num_running: int) -> int:
    """Sequence ids for so many cells, so that cells run out before ids do: parked KV needs an id, too."""
    return max(LEAST_SEQS, 2 * num_running, min(num_cells // CELLS_PER_SEQ, MOST_SEQS))


def free_host_bytes() -> int:
    """Host memory that can be had: with what the kernel would drop from its caches, where it says how much that is."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # ValueError: a system that does not know the name
        num_pages = os.sysconf("SC_AVPHYS_PAGES")
        if num_pages > 0:
            return num_pages * os.sysconf("SC_PAGE_SIZE")
    return UNKNOWN_FREE_BYTES
