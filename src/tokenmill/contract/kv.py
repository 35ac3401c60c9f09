"""`KVMemory`: the engine's interface to a backend's KV cache, with llama.cpp's operations.

A *cell* holds the keys and values of one token: it has a position and the set of sequences that hold it. A token sees
a cell when their sequence sets intersect and the cell's position is not after its own (and inside the layer's window).
Cells are handed out in blocks; a block size of 1 is llama.cpp's unified memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from tokenmill.contract.batch import Batch
from tokenmill.errors import ConfigError

ANY = -1
"""As in llama.h: any sequence; as p0, from the start; as p1, to the end."""


@dataclass(frozen=True)
class Capabilities:
    """Optional features of a backend. The engine adapts to them in one place, the KV manager."""

    partial_rm: bool = True
    """`seq_rm` can remove part of a sequence (recurrent memory cannot: it returns False)."""
    partial_cp: bool = True
    """`seq_cp` can copy part of a sequence."""
    shift: bool = True
    """`seq_add` is supported."""
    state_bytes: bool = False
    """`export` and `import_` are supported."""
    max_seqs: int = 256
    """Number of sequence ids and of sampling rows."""
    depth: int = 0
    """Number of forwards that may be in flight beyond the oldest uncollected one."""
    deterministic: bool = False
    """A row's result is independent of the rest of the batch."""
    parked_cells: int | None = None
    """Cap on parked cells if they slow down every step; None if they do not."""


@dataclass(frozen=True)
class LayerKV:
    """KV layout of one layer. A family describes its layers as a tuple of these."""

    kind: Literal["full", "window", "state", "shared"] = "full"
    window: int | None = None
    """A token at position p sees positions p - window + 1 to p; positions themselves never change."""
    num_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1
    dtype_bytes: int = 4

    @property
    def bytes_per_token(self) -> int:
        """KV bytes per token in this layer."""
        if self.kind in ("state", "shared"):
            return 0
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype_bytes


@dataclass(frozen=True)
class KVStats:
    """A snapshot of KV usage, in cells."""

    num_cells: int
    free_cells: int
    """Cells in free blocks, as returned by `free()`."""
    held_cells: int
    """Cells held by at least one sequence; less than num_cells - free_cells if blocks are partially filled."""
    referenced_cells: int
    """Sum of all sequence lengths; more than held_cells if sequences share cells."""
    num_seqs: int
    """Sequences with at least one cell."""


def check_size(num_cells: int, block_size: int) -> None:
    """Raise `ConfigError` unless a memory of this size holds at least one block."""
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, not {block_size}")
    if num_cells < block_size:
        raise ConfigError(f"KV memory of {num_cells} cells is smaller than one block of {block_size}")


class KVMemory(Protocol):
    """Sequence operations on KV cells. Owned by the thread that owns the backend.

    Positions of a sequence are contiguous, and a new token goes to `seq_pos_max + 1` (0 for an empty sequence). Ranges
    are half open, [p0, p1); `ANY` as p0 means from the start, as p1 to the end. A call that raises changes nothing.
    """

    @property
    def block_size(self) -> int:
        """Cells per block."""
        ...

    def seq_rm(self, seq: int, p0: int = ANY, p1: int = ANY) -> bool:
        """Remove a tail, a head or all of a sequence (`ANY`: of every sequence).

        Returns False, with nothing changed, if partial removal is not supported. A hole is `InvalidOperation`.
        """
        ...

    def seq_cp(self, src: int, dst: int, p0: int = ANY, p1: int = ANY) -> None:
        """Share src's cells in the range with the empty sequence `dst`. Copies no data."""
        ...

    def seq_keep(self, seq: int) -> None:
        """Remove all other sequences."""
        ...

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Shift the positions of a whole sequence, as after removing its head. Shared cells: `InvalidOperation`."""
        ...

    def seq_pos_min(self, seq: int) -> int:
        """Lowest position of the sequence, -1 if empty."""
        ...

    def seq_pos_max(self, seq: int) -> int:
        """Highest position of the sequence, -1 if empty."""
        ...

    def clear(self) -> None:
        """Remove everything."""
        ...

    def free(self) -> int:
        """Allocatable cells, in whole blocks."""
        ...

    def exclusive(self, seqs: Collection[int]) -> int:
        """Cells that removing all of these sequences would free, in whole blocks: those not shared with others."""
        ...

    def needed(self, batch: Batch) -> int:
        """Cells that this batch would allocate. If needed <= free, running it does not raise `OutOfKV`."""
        ...

    def update(self) -> None:
        """Apply deferred data changes (position shifts) now instead of before the next forward."""
        ...

    def stats(self) -> KVStats: ...

    def export(self, seq: int) -> bytes:
        """Serialize the sequence's cells for `import_` (requires `Capabilities.state_bytes`)."""
        ...

    def import_(self, seq: int, state: bytes) -> None:
        """Restore the empty sequence from `export`'s bytes. `OutOfKV` if they do not fit."""
        ...
