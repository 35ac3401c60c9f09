"""Deterministic arithmetic: every token is computed in a tile of the same shape, whatever else the batch holds.

A kernel's order of additions depends on the shapes it is given, not on the values. So a step runs in tiles of `ROWS`
tokens (the last one filled up), and attention reads cells in chunks of `CHUNK`, combined in order. A cell that a token
does not see adds an exact zero. What is left is the assumption that one row of a matrix product does not depend on the
other rows or on its place among them; `rows_are_independent` checks that on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.contract import IntArray
from tokenmill.kv.tables import BlockTables

ROWS = 16
"""Tokens in a tile."""
CHUNK = 256
"""Cells read at once."""


class TiledAttention:
    """The attention of one tile: each token for itself, over chunks of cells in order."""

    def __init__(
        self, kv: TorchKV, tables: BlockTables, lead: IntArray, pos: IntArray, windows: Sequence[int | None]
    ) -> None:
        self._kv = kv
        self._windows = windows
        device = kv.keys[0].device
        base, block_size = tables.base[lead], tables.block_size
        num_chunks = int(-(-(pos + 1 - base).max() // CHUNK))
        index = np.arange(num_chunks * CHUNK)
        # A row of the table may be shorter than the chunks reach: what is outside is not seen.
        column = np.minimum(index // block_size, tables.table.shape[1] - 1)
        slots = tables.table[lead[:, None], column] * block_size + index % block_size
        cell_pos = base[:, None] + index
        sees = (cell_pos >= tables.start[lead][:, None]) & (cell_pos <= pos[:, None])
        self._slots = torch.split(torch.from_numpy(slots.astype(np.int64)).to(device), CHUNK, dim=1)
        self._sees = {
            window: torch.split(torch.from_numpy(_inside(sees, cell_pos, pos, window)).to(device), CHUNK, dim=1)
            for window in set(windows)
        }

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        num_tokens, num_heads, dim = q.shape
        num_kv = keys.shape[1]
        folded = (q.float() * dim**-0.5).view(num_tokens, num_kv, num_heads // num_kv, dim)
        best = torch.full((*folded.shape[:3], 1), -torch.inf, device=q.device)
        total = torch.zeros_like(best)
        out = torch.zeros(*folded.shape[:3], values.shape[2], device=q.device)
        for slots, sees in zip(self._slots, self._sees[self._windows[layer]], strict=True):
            # [tokens, kv heads, ...]: one product of a fixed shape for each token and KV head.
            scores = folded @ keys[slots].float().permute(0, 2, 3, 1)
            scores = scores.masked_fill(~sees[:, None, None], -torch.inf)
            highest = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
            reference = torch.where(highest.isfinite(), highest, 0.0)
            weights = torch.exp(scores - reference)
            fade = torch.exp(best - reference)
            total = total * fade + weights.sum(dim=-1, keepdim=True)
            out = out * fade + weights @ values[slots].float().transpose(1, 2)
            best = highest
        return (out / total).view(q.shape).to(q.dtype)


def _inside(sees: NDArray[np.bool_], cell_pos: IntArray, pos: IntArray, window: int | None) -> NDArray[np.bool_]:
    return sees if window is None else sees & (cell_pos > pos[:, None] - window)


def rows_are_independent(weights: Iterable[Tensor]) -> bool:
    """Does a row of its product with each weight come out the same at every place of a tile, among any other rows?"""
    generator = torch.Generator().manual_seed(0)
    for weight in {tuple(weight.shape): weight for weight in weights}.values():
        tile = torch.randn(ROWS, weight.shape[1], generator=generator, dtype=weight.dtype)
        row = tile[0].clone()
        wanted = F.linear(tile, weight)[0]
        for place in range(1, ROWS):
            tile = torch.randn(ROWS, weight.shape[1], generator=generator, dtype=weight.dtype)
            tile[place] = row
            if not torch.equal(F.linear(tile, weight)[place], wanted):
                return False
    return True
