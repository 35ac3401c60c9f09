"""Attention over paged KV, in two kernels. A cell is named by its index in its sequence's row of blocks.

`decode_attention` is for single tokens, split over the context so that one long sequence fills the card. The query
heads that share a KV head are packed into one tile, so that each cell is read once. What a token does not see is not
even loaded, so it need not be a number.

`prefill_attention` is for runs of tokens: prompts, and chunks of them that go on where a cache ends. A program takes
some consecutive tokens of one run and one head. Tiles of cells that all its tokens see need no mask. Where a block of
KV is a tile, the copy engine fetches it whole; otherwise cells are gathered.

`add_far_attention` is for what lies far behind a long chunk of a prompt: all its tokens see all of that, so cuDNN's
attention computes it, in pieces of few sizes, 1.3 times as fast as a kernel of ours. Softmaxes over parts of a context
add up by their sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

LOG2_E = 1.4426950408889634
SMALLEST_DOT = 16
"""Sides of the matrices that the tensor cores multiply."""
TILE = 64
"""Cells read at once."""
MOST_SPLITS = 32
WIDE_DIM = 128
"""Heads beyond it leave room for fewer tiles in shared memory."""
WIDE_GROUP = 4
"""Query heads of a KV head beyond which two warps read faster than four, measured."""


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))  # 2 / log(2)


@triton.jit
def _attend(
    q, keys, values, out, parts, weights,
    row_of, last_of, first_of, tables, width_of,
    q_stride, cell_stride, scale, cap_scale, num_splits,
    dim: tl.constexpr, dim_padded: tl.constexpr, group: tl.constexpr, group_padded: tl.constexpr,
    block_size: tl.constexpr, window: tl.constexpr, is_split: tl.constexpr, tile: tl.constexpr,
    is_fp8: tl.constexpr, is_capped: tl.constexpr,
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
    is_query = (member < group)[:, None] & (d < dim)[None, :] & (row >= 0)
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
        if is_capped:
            scores = _tanh(scores * cap_scale)
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
    wanted = (split < num_splits)[:, None] & (d < dim)[None, :] & (row >= 0)
    found = tl.load(parts + part[:, None] * dim + d[None, :], mask=wanted, other=0.0)
    total = tl.sum(share, 0)
    found = tl.sum(found * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    is_wanted = (d < dim) & (row >= 0)
    tl.store(out + row * num_heads * dim + head * dim + d, found.to(out.dtype.element_ty), mask=is_wanted)


def num_splits_for(num_runs: int, num_kv_heads: int, num_processors: int) -> int:
    """Parts that each context is cut into, so that few sequences fill the card, too.

    Powers of two alone, each of which is a kernel of its own: all are compiled with the graphs.
    """
    wanted = max(1, min(4 * num_processors // (num_runs * num_kv_heads), MOST_SPLITS))
    return 1 << (wanted.bit_length() - 1)


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor,
    row_of: Tensor, last_of: Tensor, first_of: Tensor, tables: Tensor, width_of: Tensor,
    *, block_size: int, window: int | None, num_splits: int, scale: float | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    """For each run r, the token in row `row_of[r]` reads the cells `first_of[r]` to `last_of[r]`, its own.

    q: [tokens, heads, dim] (rows may be apart), out: the same without gaps; keys, values: [slots, KV heads, dim];
    tables: [runs, width] blocks, the width being on the device, too. A run whose last cell is -1 reads nothing, and one
    whose row is -1 writes nothing, either. Scores are multiplied by `scale` (default: 1 / sqrt(dim)) and bounded
    smoothly by `softcap`.
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
        q.stride(0), keys.stride(0), *_scales(dim, scale, softcap), num_splits,
        dim=dim, dim_padded=dim_padded,
        group=group, group_padded=max(SMALLEST_DOT, triton.next_power_of_2(group)),
        block_size=block_size, window=window or 0, is_split=num_splits > 1, tile=TILE,
        is_fp8=keys.itemsize == 1, is_capped=softcap is not None,
        num_warps=2 if group > WIDE_GROUP and dim <= WIDE_DIM else 4, num_stages=_num_stages(dim, keys.itemsize),
    )  # fmt: skip
    if num_splits > 1:
        _combine[(num_heads, num_runs)](
            parts, weights, out, row_of, num_splits,
            dim=dim, dim_padded=dim_padded, splits_padded=triton.next_power_of_2(num_splits),
            num_warps=2,
        )  # fmt: skip


def _scales(dim: int, scale: float | None, softcap: float | None) -> tuple[float, float]:
    """What scores are multiplied with for powers of two; and with a soft cap, which is that, what with before."""
    scale = dim**-0.5 if scale is None else scale
    return (scale * LOG2_E, 1.0) if softcap is None else (softcap * LOG2_E, scale / softcap)


def _num_stages(dim: int, itemsize: int) -> int:
    """Tiles of keys and values that are in shared memory at a time, as far as they fit."""
    if dim <= WIDE_DIM:
        return 3
    return 2 if itemsize <= 2 else 1


QUERIES = 64
"""Tokens of a run that are computed together."""


@triton.jit
def _read(
    begin, end, query, best, total, found, own, first, keys, values, table, column, cell_stride, scale, cap_scale,
    dim: tl.constexpr, dim_padded: tl.constexpr, block_size: tl.constexpr, window: tl.constexpr,
    tile: tl.constexpr, by_block: tl.constexpr, masked: tl.constexpr, is_capped: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, dim_padded)
    # The number of a block is loaded a tile ahead: waiting for it would cost the copies a stage of their pipeline.
    # Masked tiles are few, and their values take more shared memory: with a third stage only one program would fit.
    looks_ahead: tl.constexpr = by_block and not masked
    ahead = tl.load(table + begin // tile, mask=begin < end, other=0) if looks_ahead else 0
    for at in range(begin, end, tile):
        cell = at + tl.arange(0, tile)
        held = (cell >= first) & (cell < end)
        if by_block:
            block = ahead if looks_ahead else tl.load(table + at // tile)
            if looks_ahead:
                ahead = tl.load(table + at // tile + 1, mask=at + tile < end, other=0)
            key = keys.load([block * tile, column]).to(query.dtype)
        else:
            blocks = tl.load(table + cell // block_size, mask=held, other=0).to(tl.int64)
            place = (blocks * block_size + cell % block_size) * cell_stride + column
            wanted = held[:, None] & (d < dim)[None, :]
            key = tl.load(keys + place[:, None] + d[None, :], mask=wanted, other=0.0).to(query.dtype)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if is_capped:
            scores = _tanh(scores * cap_scale)
        if masked:
            sees = held[None, :] & (cell[None, :] <= own[:, None])
            if window > 0:
                sees = sees & (cell[None, :] > own[:, None] - window)
            scores = tl.where(sees, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1) * scale)
        # A row may see nothing of a masked tile, nor of those before.
        reference = tl.where(higher == float("-inf"), 0.0, higher) if masked else higher
        share = tl.exp2(scores * scale - reference[:, None])
        fade = tl.exp2(best - reference)
        total = total * fade + tl.sum(share, 1)
        found = found * fade[:, None]
        if by_block:
            value = values.load([block * tile, column]).to(query.dtype)
            if masked:  # what nobody has written yet may be no number
                value = tl.where(held[:, None], value, 0.0)
        else:
            value = tl.load(values + place[:, None] + d[None, :], mask=wanted, other=0.0).to(query.dtype)
        found = tl.dot(share.to(value.dtype), value, found, input_precision="ieee")
        best = higher
    return best, total, found


@triton.jit
def _attend_runs(
    q, keys, values, out, sums,
    order, run_begin, run_count, run_index, run_first, tile_run, tile_offset, tables, width_of,
    q_stride, out_stride, cell_stride, scale, cap_scale,
    dim: tl.constexpr, dim_padded: tl.constexpr, group: tl.constexpr, block_size: tl.constexpr,
    window: tl.constexpr, queries: tl.constexpr, tile: tl.constexpr, by_block: tl.constexpr, is_fp8: tl.constexpr,
    is_capped: tl.constexpr, keeps_sums: tl.constexpr,
):  # fmt: skip
    head, number = tl.program_id(0), tl.program_id(1)
    run = tl.load(tile_run + number)
    offset = tl.load(tile_offset + number)
    count = tl.load(run_count + run)
    index = tl.load(run_index + run) + offset
    first = tl.load(run_first + run)
    table = tables + run.to(tl.int64) * tl.load(width_of)
    m = tl.arange(0, queries)
    is_real = offset + m < count
    row = tl.load(order + tl.load(run_begin + run) + offset + m, mask=is_real, other=0).to(tl.int64)
    own = index + m
    d = tl.arange(0, dim_padded)
    is_query = is_real[:, None] & (d < dim)[None, :]
    query = tl.load(q + row[:, None] * q_stride + head * dim + d[None, :], mask=is_query, other=0.0)
    if is_fp8:  # as in `decode_attention`
        query = query.to(tl.float16)
    best = tl.full([queries], float("-inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    found = tl.zeros([queries, dim_padded], tl.float32)

    end = index + tl.minimum(queries, count - offset)
    low = first
    if window > 0:
        low = tl.maximum(first, index - window + 1)
    low = low // tile * tile
    seen_by_all = low
    if window == 0:
        seen_by_all = tl.where(first % tile > 0, low, (index + 1) // tile * tile)
    column = head // group * dim
    best, total, found = _read(
        low, seen_by_all, query, best, total, found, own, first, keys, values, table, column, cell_stride, scale,
        cap_scale, dim, dim_padded, block_size, window, tile, by_block, False, is_capped,
    )  # fmt: skip
    best, total, found = _read(
        seen_by_all, end, query, best, total, found, own, first, keys, values, table, column, cell_stride, scale,
        cap_scale, dim, dim_padded, block_size, window, tile, by_block, True, is_capped,
    )  # fmt: skip
    found = found / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + row[:, None] * out_stride + head * dim + d[None, :], found.to(out.dtype.element_ty), mask=is_query)
    if keeps_sums:
        tl.store(sums + row * tl.num_programs(0) + head, best + tl.log2(total), mask=is_real)


def by_block(cells: Tensor, block_size: int) -> Any | None:
    """Keys or values as the copy engine reads them, a block and head at a time; None where it can't."""
    num_kv, dim = cells.shape[1:]
    is_power = dim == max(SMALLEST_DOT, triton.next_power_of_2(dim))
    if block_size != TILE or not is_power or cells.dtype.itemsize > 2:
        return None
    return TensorDescriptor.from_tensor(cells.view(-1, num_kv * dim), [TILE, dim])


def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, blocks: tuple[Any, Any] | None, out: Tensor,
    order: Tensor, run_begin: Tensor, run_count: Tensor, run_index: Tensor, run_first: Tensor,
    tile_run: Tensor, tile_offset: Tensor, tables: Tensor, width_of: Tensor,
    *, block_size: int, window: int | None, scale: float | None = None, softcap: float | None = None,
    sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Run r is the tokens in rows `order[run_begin[r] : + run_count[r]]`, from cell `run_index[r]` of its sequence on.

    A token sees the cells from `run_first[r]` to its own. Tiles (a run, an offset in it) are `QUERIES` tokens each;
    `blocks` is `by_block` of keys and values; q, keys, values, out, tables, scale, softcap as in `decode_attention`.
    `sums`, [tokens, heads], gets the binary logarithm of each softmax's sum.
    """
    (num_heads, dim), num_kv = q.shape[1:], keys.shape[1]
    _attend_runs[(num_heads, len(tile_run))](
        q, *(blocks or (keys, values)), out, out if sums is None else sums,
        order, run_begin, run_count, run_index, run_first, tile_run, tile_offset, tables, width_of,
        q.stride(0), out.stride(0), keys.stride(0), *_scales(dim, scale, softcap),
        dim=dim, dim_padded=max(SMALLEST_DOT, triton.next_power_of_2(dim)), group=num_heads // num_kv,
        block_size=block_size, window=window or 0, queries=QUERIES, tile=TILE, by_block=blocks is not None,
        is_fp8=keys.itemsize == 1, is_capped=softcap is not None, keeps_sums=sums is not None,
        num_warps=4 if dim <= WIDE_DIM else 8, num_stages=_num_stages(dim, keys.itemsize),
    )  # fmt: skip


def add_far_attention(
    q: Tensor, keys: Tensor, values: Tensor, out: Tensor, sums: Tensor, blocks: Tensor,
    *, block_size: int, sizes: Sequence[int], scale: float | None = None,
) -> None:  # fmt: skip
    """Let tokens read the cells of these blocks as well, all of them, in pieces of these sizes, the largest first.

    q, out: [tokens, heads, dim]; sums: [tokens, heads], as `prefill_attention` left them; the rest as there.
    """
    done, num_cells = 0, len(blocks) * block_size
    while done < num_cells:
        size = next(size for size in sizes if size <= num_cells - done)
        piece = blocks[done // block_size : (done + size) // block_size]
        key, value = (_gathered(cells, piece, block_size) for cells in (keys, values))
        part, part_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q.transpose(0, 1)[None], key, value, None, True, scale=q.shape[2] ** -0.5 if scale is None else scale
        )
        _add_part[(len(q), q.shape[1])](
            out, sums, part, part_sums, out.stride(0), out.stride(1), sums.stride(0), part.stride(2), part.stride(1),
            part_sums.stride(2), part_sums.stride(1), dim=q.shape[2], num_warps=1,
        )  # fmt: skip
        done += size


def _gathered(cells: Tensor, blocks: Tensor, block_size: int) -> Tensor:
    """[1, KV heads, cells, dim]: the cells of some blocks."""
    found = cells.view(-1, block_size, *cells.shape[1:]).index_select(0, blocks)
    return found.flatten(0, 1).transpose(0, 1)[None]


@triton.jit
def _add_part(
    out, sums, part, part_sums, out_row, out_head, sums_row, part_row, part_head, part_sums_row, part_sums_head,
    dim: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, dim)
    ours = tl.load(sums + row * sums_row + head)
    theirs = tl.load(part_sums + row * part_sums_row + head * part_sums_head) * 1.4426950408889634  # to powers of two
    highest = tl.maximum(ours, theirs)
    weight, other_weight = tl.exp2(ours - highest), tl.exp2(theirs - highest)
    total = weight + other_weight
    found = tl.load(out + row * out_row + head * out_head + d).to(tl.float32) * weight
    found += tl.load(part + row * part_row + head * part_head + d).to(tl.float32) * other_weight
    tl.store(out + row * out_row + head * out_head + d, (found / total).to(out.dtype.element_ty))
    tl.store(sums + row * sums_row + head, highest + tl.log2(total))
