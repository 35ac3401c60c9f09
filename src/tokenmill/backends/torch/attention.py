"""Attention over paged KV in plain torch: many sequences of different lengths, no loop over sequences.

The tokens of a step fall into groups of runs: a run is what one sequence has in the step, and those of about the same
number of tokens over about the same number of cells form a group (decodes over short contexts, decodes over long ones,
a prompt). A group's blocks are gathered side by side, padded to the longest, and one kernel does it.
What each token may see is worked out once a step; a layer only gathers and multiplies.

Deterministic arithmetic (`TiledAttention`): every token is computed in a tile of the same shape, whatever the batch
holds. A kernel's order of additions depends on the shapes it is given, not on the values. So a step runs in tiles of
`ROWS` tokens (the last one filled up), and attention reads cells in chunks of `CHUNK`, combined in order. A cell that a
token does not see adds an exact zero. What is left is the assumption that one row of a matrix product does not depend
on the other rows or on its place among them; `rows_are_independent` checks that on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tokenmill.backends.torch.kv_storage import TorchKV
from tokenmill.contract import IntArray
from tokenmill.kv.tables import BlockTables


@dataclass(frozen=True)
class Scoring:
    """What a layer does to its scores before the softmax."""

    scale: float | None = None
    """Factor on the dot products; None: 1 / sqrt(dim)."""
    softcap: float | None = None
    """Bounds scores smoothly to plus and minus this value."""
    sinks: Tensor | None = None
    """[heads]: the score of a virtual cell that takes its share of the softmax and has no value."""

    @property
    def is_explicit(self) -> bool:
        """Torch's fused attention can do neither soft caps nor sinks."""
        return self.softcap is not None or self.sinks is not None


PLAIN = Scoring()


class Attention(Protocol):
    """What a step's attention does in one layer; made anew for each step."""

    def __call__(self, layer: int, q: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """[tokens, heads, dim] to the same shape: what each token reads of the cells it sees."""
        ...


class AttentionMaker(Protocol):
    """Makes the attention of a step, once its slots are known."""

    def __call__(self, kv: TorchKV, tables: BlockTables, lead: IntArray, pos: IntArray) -> Attention: ...


@dataclass(frozen=True)
class Group:
    """Runs of tokens that are computed together. C runs of at most Q tokens, over at most L cells each."""

    query: Tensor
    """[C, Q]: the tokens of each run, padded with its first one."""
    token: Tensor
    """The tokens once each, in the order of `place`."""
    place: Tensor
    """Where in [C * Q] each of them is computed."""
    blocks: Tensor
    """[C * blocks]: the blocks of each run's sequence."""
    masks: dict[int | None, Tensor]
    """Window -> what is added to the scores, [C, Q, L]."""
    is_causal: bool
    """A single run over exactly its own cells: the kernel's own mask will do where there is no window."""


class GatherAttention:
    """The attention of one step; see the module's docstring."""

    def __init__(
        self, kv: TorchKV, tables: BlockTables, lead: IntArray, pos: IntArray, windows: Sequence[int | None]
    ) -> None:
        self._kv = kv
        self._windows = windows
        like = kv.keys[0]
        self._groups = [
            _group(runs, tables, pos, set(windows), like) for runs in _groups_of_runs(runs_of(lead, pos), tables)
        ]

    def __call__(self, layer: int, q: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        """[tokens, heads, key dim] to [tokens, heads, value dim]."""
        out = q.new_empty(*q.shape[:2], self._kv.values[layer].shape[2])
        for group in self._groups:
            keys, values = self._gather(self._kv.keys[layer], group), self._gather(self._kv.values[layer], group)
            found = _attend(q[group.query], keys, values, group, self._windows[layer], scoring)
            out[group.token] = found.flatten(0, 1)[group.place]
        return out

    def _gather(self, cells: Tensor, group: Group) -> Tensor:
        """[C, L, heads, dim]: the cells of a group's runs."""
        blocks = cells.view(-1, self._kv.block_size, *cells.shape[1:]).index_select(0, group.blocks)
        return blocks.view(len(group.query), -1, *cells.shape[1:])


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, group: Group, window: int | None, scoring: Scoring = PLAIN
) -> Tensor:
    """[C, Q, heads, value dim]. The heads that share a KV head are more queries to it, so nothing is repeated."""
    num_runs, num_queries, num_heads, dim = q.shape
    num_kv = keys.shape[2]
    shared = num_heads // num_kv
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if num_runs == 1:
        # KV heads as batch, the heads that share them as heads: views all through.
        folded = q.view(num_queries, num_kv, shared, dim).permute(1, 2, 0, 3)
        one, other = (kv[0][:, None].expand(-1, shared, -1, -1) for kv in (keys, values))
        is_causal = group.is_causal and window is None
        if is_causal:
            one, other = one[:, :, :num_queries], other[:, :, :num_queries]
        mask = None if is_causal else group.masks[window]
        if scoring.is_explicit:
            sinks = None if scoring.sinks is None else scoring.sinks.view(num_kv, shared, 1, 1)
            out = _attend_explicitly(folded, one, other, mask, scoring, sinks)
        else:
            out = F.scaled_dot_product_attention(
                folded, one, other, attn_mask=mask, is_causal=is_causal, scale=scoring.scale
            )
        return out.permute(2, 0, 1, 3).reshape(1, num_queries, num_heads, -1)
    folded = q.view(num_runs, num_queries, num_kv, shared, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    mask = group.masks[window][:, None, :, None].expand(-1, -1, -1, shared, -1).flatten(2, 3)
    if scoring.is_explicit:
        sinks = scoring.sinks
        if sinks is not None:
            sinks = sinks.view(num_kv, 1, shared).expand(-1, num_queries, -1).reshape(num_kv, -1, 1)
        out = _attend_explicitly(folded, keys, values, mask, scoring, sinks)
    else:
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scoring.scale)
    out = out.view(num_runs, num_kv, num_queries, shared, -1).permute(0, 2, 1, 3, 4)
    return out.reshape(num_runs, num_queries, num_heads, -1)


def _attend_explicitly(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """Attention with the scores in hand, in float32. Without a mask, query i sees the cells up to the i-th."""
    scale = q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = (q @ keys.transpose(-1, -2)).float() * scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is None:
        scores = scores.masked_fill(
            ~torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), -torch.inf
        )
    else:
        scores = scores + mask.float()
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    shares = torch.softmax(scores, dim=-1).to(values.dtype)
    return (shares if sinks is None else shares[..., :-1]) @ values


# -- once a step ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive tokens of one sequence each, as arrays."""

    seq: IntArray
    tokens: NDArray[np.int64]
    """All tokens of the step, run after run."""
    begin: NDArray[np.int64]
    """Where in `tokens` each run begins."""
    count: NDArray[np.int64]

    def take(self, chosen: NDArray[np.intp]) -> Runs:
        return Runs(self.seq[chosen], self.tokens, self.begin[chosen], self.count[chosen])


def runs_of(lead: IntArray, pos: IntArray) -> Runs:
    """The tokens of each sequence, wherever they stand in the batch, in order of position."""
    tokens = np.lexsort((pos, lead))
    seq, begin, count = np.unique(lead[tokens], return_index=True, return_counts=True)
    return Runs(seq, tokens, begin, count)


def _groups_of_runs(runs: Runs, tables: BlockTables) -> list[Runs]:
    """Runs with those of at most twice their tokens and blocks, so that padding at most doubles each."""
    size = np.ceil(np.log2(runs.count)).astype(np.int64)
    size = 64 * size + np.ceil(np.log2(tables.num_blocks[runs.seq])).astype(np.int64)
    kinds = np.unique(size)
    return [runs] if len(kinds) == 1 else [runs.take(np.flatnonzero(size == kind)) for kind in kinds]


def _group(runs: Runs, tables: BlockTables, pos: IntArray, windows: set[int | None], like: Tensor) -> Group:
    """`like` is a tensor of the device and dtype that attention works in."""
    device = like.device
    most = int(runs.count.max())
    offset = np.arange(most)
    is_real = offset < runs.count[:, None]
    query = runs.tokens[runs.begin[:, None] + np.where(is_real, offset, 0)]
    query_pos = pos[query]
    end = query_pos.max(axis=1) + 1
    num_blocks = int((-(-(end - tables.base[runs.seq]) // tables.block_size)).max())
    blocks = tables.table[runs.seq, :num_blocks]
    is_causal = bool(len(runs.seq) == 1 and most == end[0] and tables.base[runs.seq[0]] == 0)
    masks = {
        window: torch.from_numpy(_mask(tables, runs.seq, query_pos, num_blocks, window)).to(like)
        for window in windows
        if not (is_causal and window is None)
    }
    real = is_real.ravel()
    return Group(
        query=torch.from_numpy(query).to(device),
        token=torch.from_numpy(query.ravel()[real]).to(device),
        place=torch.from_numpy(np.flatnonzero(real)).to(device),
        blocks=torch.from_numpy(blocks.ravel().astype(np.int64)).to(device),
        masks=masks,
        is_causal=is_causal,
    )


def _mask(
    tables: BlockTables, seq: IntArray, query_pos: IntArray, num_blocks: int, window: int | None
) -> NDArray[np.float32]:
    """[C, Q, L]: 0 where a token sees a cell, -inf where it does not."""
    cell_pos = tables.base[seq][:, None] + np.arange(num_blocks * tables.block_size)
    is_held = cell_pos >= tables.start[seq][:, None]
    sees = is_held[:, None, :] & (cell_pos[:, None, :] <= query_pos[:, :, None])
    if window is not None:
        sees &= cell_pos[:, None, :] > query_pos[:, :, None] - window
    return np.where(sees, np.float32(0), np.float32(-np.inf))


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

    def __call__(self, layer: int, q: Tensor, scoring: Scoring = PLAIN) -> Tensor:
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        num_tokens, num_heads, dim = q.shape
        num_kv = keys.shape[1]
        scale = dim**-0.5 if scoring.scale is None else scoring.scale
        folded = (q.float() * scale).view(num_tokens, num_kv, num_heads // num_kv, dim)
        best = torch.full((*folded.shape[:3], 1), -torch.inf, device=q.device)
        total = torch.zeros_like(best)
        out = torch.zeros(*folded.shape[:3], values.shape[2], device=q.device)
        for slots, sees in zip(self._slots, self._sees[self._windows[layer]], strict=True):
            # [tokens, kv heads, ...]: one product of a fixed shape for each token and KV head.
            scores = folded @ keys[slots].float().permute(0, 2, 3, 1)
            if scoring.softcap is not None:
                scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
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
