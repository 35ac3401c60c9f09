"""`KVMemory`: what the engine may ask of a backend's key/value memory, in llama.cpp's words.

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
"""As in llama.h: any sequence, from the start, or to the end."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do. The engine adapts to it in one place, its KV manager."""

    partial_rm: bool = True
    """`seq_rm` can remove part of a sequence (recurrent memory can't: it returns False)."""
    partial_cp: bool = True
    """`seq_cp` can copy part of a sequence."""
    shift: bool = True
    """`seq_add` works."""
    state_bytes: bool = False
    """`export` and `import_` work."""
    max_seqs: int = 256
    """Sequence ids and sampling rows are numbered below this."""
    depth: int = 0
    """How many forwards may be submitted before the oldest one is collected, beyond that one."""
    deterministic: bool = False
    """A row's result does not depend on what else is in the batch."""
    parked_cells: int | None = None
    """Most parked cells that are worth keeping where they slow all steps down; None where they do not."""


@dataclass(frozen=True)
class LayerKV:
    """What one layer of a model keeps per token. A family describes its layers as a tuple of these."""

    kind: Literal["full", "window", "state", "shared"] = "full"
    window: int | None = None
    """A token at position p sees positions p - window + 1 to p; positions themselves never change."""
    num_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1
    dtype_bytes: int = 4

    @property
    def bytes_per_token(self) -> int:
        """KV bytes that one more token costs in this layer."""
        if self.kind in ("state", "shared"):
            return 0
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype_bytes


@dataclass(frozen=True)
class KVStats:
    """A snapshot of KV use, in cells."""

    num_cells: int
    free_cells: int
    """Cells in free blocks: what `free()` says."""
    held_cells: int
    """Cells that at least one sequence holds. Less than num_cells - free_cells where blocks are partly filled."""
    referenced_cells: int
    """Sum of all sequences' lengths. More than held_cells where sequences share."""
    num_seqs: int
    """Sequences that hold at least one cell."""


def check_size(num_cells: int, block_size: int) -> None:
    """Raise `ConfigError` unless a memory of this size can hold anything."""
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, not {block_size}")
    if num_cells < block_size:
        raise ConfigError(f"KV memory of {num_cells} cells is smaller than one block of {block_size}")


class KVMemory(Protocol):
    """Sequence-wise operations on KV cells. One thread owns a memory: the one that owns its backend.

    Positions of a sequence are contiguous, and a new token goes to `seq_pos_max + 1` (0 in an empty sequence). Ranges
    are half open, [p0, p1); `ANY` as p0 means from the start, as p1 to the end. A call that raises changes nothing.
    """

    @property
    def block_size(self) -> int:
        """Cells are handed out in blocks of this many."""
        ...

    def seq_rm(self, seq: int, p0: int = ANY, p1: int = ANY) -> bool:
        """Remove a tail, a head or all of a sequence (`ANY`: of each sequence).

        False, with nothing changed, if the memory can't remove part of a sequence. A hole is `InvalidOperation`.
        """
        ...

    def seq_cp(self, src: int, dst: int, p0: int = ANY, p1: int = ANY) -> None:
        """Let the empty sequence `dst` hold src's cells in the range as well. Copies no data."""
        ...

    def seq_keep(self, seq: int) -> None:
        """Remove every other sequence."""
        ...

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        """Shift the positions of a whole sequence, as after removing its head. Shared cells are `InvalidOperation`."""
        ...

    def seq_pos_min(self, seq: int) -> int:
        """Smallest position the sequence holds, -1 if none."""
        ...

    def seq_pos_max(self, seq: int) -> int:
        """Largest position the sequence holds, -1 if none."""
        ...

    def clear(self) -> None:
        """Remove everything."""
        ...

    def free(self) -> int:
        """Cells that can still be handed out, counted in whole blocks."""
        ...

    def exclusive(self, seqs: Collection[int]) -> int:
        """Cells that removing all of these sequences would free, counted in whole blocks: no other one holds them."""
        ...

    def needed(self, batch: Batch) -> int:
        """Cells that running this batch would take. If needed <= free, running it does not raise `OutOfKV`."""
        ...

    def update(self) -> None:
        """Carry out deferred work on the data (position shifts) now; the next forward does it otherwise."""
        ...

    def stats(self) -> KVStats: ...

    def export(self, seq: int) -> bytes:
        """The sequence's cells as bytes that `import_` takes (needs `Capabilities.state_bytes`)."""
        ...

    def import_(self, seq: int, state: bytes) -> None:
        """Fill the empty sequence from `export`'s bytes. `OutOfKV` if there is no room."""
        ...
