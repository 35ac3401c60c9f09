"""Attention of single tokens over paged KV, split over the context so that one long sequence fills the card.

The query heads that share a KV head are packed into one tile, so that each cell is read once. A cell is named by its
index in its sequence's row of blocks. What a token does not see is not even loaded, so it need not be a number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
SMALLEST_DOT = 16
"""Sides of the matrices that the tensor cores multiply."""
TILE = 64
"""Cells read at once."""
MOST_SPLITS = 16


@triton.jit
def _attend(
    q, keys, values, out, parts, weights,
    row_of, last_of, first_of, tables, width_of,
    q_stride, cell_stride, scale, num_splits,
    dim: tl.constexpr, dim_padded: tl.constexpr, group: tl.constexpr, group_padded: tl.constexpr,
    block_size: tl.constexpr, window: tl.constexpr, is_split: tl.constexpr, tile: tl.constexpr,
    is_fp8: tl.constexpr,
):  # fmt: skip
    kv_head, run, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv = tl.num_programs(0)
    last = tl.load(last_of + run)
    first = tl.load(first_of + run)
    if window > 0:
        first = tl.maximum(first, last - window + 1)
    row = tl.load(row_of + run).to(tl.int64)
    table = tables + run.to(tl.int64) * tl.load(width_of)
    begin = first // tile * tile
    share = tl.cdiv(tl.cdiv(last + 1 - begin, tile), num_splits) * tile
    begin += split * share
    end = tl.minimum(begin + share, last + 1)

    member = tl.arange(0, group_padded)
    d = tl.arange(0, dim_padded)
    heads = kv_head * group + member
    is_query = (member < group)[:, None] & (d < dim)[None, :]
    query = tl.load(q + row * q_stride + heads[:, None] * dim + d[None, :], mask=is_query, other=0.0)
    if is_fp8:  # widened to float16 in one instruction, to bfloat16 in many
        query = query.to(tl.float16)
    best = tl.full([group_padded], float("-inf"), tl.float32)
    total = tl.zeros([group_padded], tl.float32)
    found = tl.zeros([group_padded, dim_padded], tl.float32)
    for at in range(begin, end, tile):
        cell = at + tl.arange(0, tile)
        sees = (cell >= first) & (cell < end)
        if block_size % tile == 0:
            block = tl.load(table + at // block_size).to(tl.int64)
        else:
            block = tl.load(table + cell // block_size, mask=sees, other=0).to(tl.int64)
        place = (block * block_size + cell % block_size) * cell_stride + kv_head * dim
        wanted = sees[:, None] & (d < dim)[None, :]
        key = tl.load(keys + place[:, None] + d[None, :], mask=wanted, other=0.0).to(query.dtype)
        value = tl.load(values + place[:, None] + d[None, :], mask=wanted, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = tl.where(sees[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1) * scale)
        share_of = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(best - higher)
        total = total * fade + tl.sum(share_of, 1)
        found = found * fade[:, None]
        found = tl.dot(share_of.to(value.dtype), value, found, input_precision="ieee")
        best = higher
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    if not is_split:
        place = row * (num_kv * group) * dim + heads[:, None] * dim + d[None, :]
        tl.store(out + place, found.to(out.dtype.element_ty), mask=is_query)
    else:
        part = (run * (num_kv * group) + heads).to(tl.int64) * num_splits + split
        tl.store(parts + part[:, None] * dim + d[None, :], found, mask=is_query)
        tl.store(weights + part, tl.where(total > 0, best + tl.log2(total), float("-inf")), mask=member < group)


@triton.jit
def _combine(
    parts, weights, out, row_of, num_splits,
    dim: tl.constexpr, dim_padded: tl.constexpr, splits_padded: tl.constexpr,
):  # fmt: skip
    head, run = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    row = tl.load(row_of + run).to(tl.int64)
    split = tl.arange(0, splits_padded)
    d = tl.arange(0, dim_padded)
    part = (run * num_heads + head).to(tl.int64) * num_splits + split
    weight = tl.load(weights + part, mask=split < num_splits, other=float("-inf"))
    highest = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(highest == float("-inf"), 0.0, highest))
    wanted = (split < num_splits)[:, None] & (d < dim)[None, :]
    found = tl.load(parts + part[:, None] * dim + d[None, :], mask=wanted, other=0.0)
    total = tl.sum(share, 0)
    found = tl.sum(found * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * num_heads * dim + head * dim + d, found.to(out.dtype.element_ty), mask=d < dim)


def num_splits_for(num_runs: int, num_kv_heads: int, num_processors: int) -> int:
    """Parts that each context is cut into, so that few sequences fill the card, too."""
    return max(1, min(4 * num_processors // (num_runs * num_kv_heads), MOST_SPLITS))


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor,
    row_of: Tensor, last_of: Tensor, first_of: Tensor, tables: Tensor, width_of: Tensor,
    *, block_size: int, window: int | None, num_splits: int,
) -> None:  # fmt: skip
    """For each run r, the token in row `row_of[r]` reads the cells `first_of[r]` to `last_of[r]`, its own.

    q: [tokens, heads, dim] (rows may be apart), out: the same without gaps; keys, values: [slots, KV heads, dim];
    tables: [runs, width] blocks, the width being on the device, too. A run whose last cell is -1 reads nothing.
    """
    num_runs, (num_heads, dim), num_kv = len(row_of), q.shape[1:], keys.shape[1]
    group = num_heads // num_kv
    parts = weights = out
    if num_splits > 1:
        parts = torch.empty(num_runs, num_heads, num_splits, dim, dtype=torch.float32, device=q.device)
        weights = torch.empty(num_runs, num_heads, num_splits, dtype=torch.float32, device=q.device)
    dim_padded = max(SMALLEST_DOT, triton.next_power_of_2(dim))
    _attend[(num_kv, num_runs, num_splits)](
        q, keys, values, out, parts, weights,
        row_of, last_of, first_of, tables, width_of,
        q.stride(0), keys.stride(0), dim**-0.5 * LOG2_E, num_splits,
        dim=dim, dim_padded=dim_padded,
        group=group, group_padded=max(SMALLEST_DOT, triton.next_power_of_2(group)),
        block_size=block_size, window=window or 0, is_split=num_splits > 1, tile=TILE,
        is_fp8=keys.itemsize == 1,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    if num_splits > 1:
        _combine[(num_heads, num_runs)](
            parts, weights, out, row_of, num_splits,
            dim=dim, dim_padded=dim_padded, splits_padded=triton.next_power_of_2(num_splits),
            num_warps=2,
        )  # fmt: skip
