"""What stands between the large products of a layer, each in one pass: embedding, norm, rope with the store, gate.

`few_rows_product` is a weight matrix times one row or two: bound by reading the matrix, so everything else of the layer
rides along. The norm before the product is a scale of its result, the gate and the residual stand at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 1024
"""Columns of a gate that one program takes."""
HEADS = 8
"""Heads that one program turns and stores."""


@triton.jit
def _embed(token_of, sampled, table, out, width, scale, block: tl.constexpr, scaled: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_of + row)
    if token < 0:
        # A bad row's request is over, but its next token may be in flight already, and must be some valid id.
        token = tl.maximum(tl.load(sampled - 1 - token), 0)
    token = token.to(tl.int64)
    for at in range(0, width, block):
        column = at + tl.arange(0, block)
        values = tl.load(table + token * width + column, mask=column < width, other=0.0)
        if scaled:
            values = (values.to(tl.float32) * scale).to(out.dtype.element_ty)
        tl.store(out + row * width + column, values, mask=column < width)


def embed(token: Tensor, sampled: Tensor, table: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """Rows of the embedding times a factor; a token below 0 stands for `sampled[-1 - token]`."""
    _embed[(len(token),)](
        token, sampled, table, out, table.shape[1], scale, block=1024, scaled=scale != 1.0, num_warps=4
    )


@triton.jit
def _norm(x, weight, out, width, stride, eps, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    values = tl.load(x + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(out + row * stride + column, (values * scale * gain).to(out.dtype.element_ty), mask=column < width)


def norm(x: Tensor, weight: Tensor, eps: float, *, in_place: bool = False) -> Tensor:
    """RMS norm of each row; only in place, rows may be apart."""
    out, width = x if in_place else torch.empty_like(x), x.shape[1]
    num_warps = 8 if width > 2048 else 4
    _norm[(len(x),)](x, weight, out, width, x.stride(0), eps, block=triton.next_power_of_2(width), num_warps=num_warps)
    return out


@triton.jit
def _add(y, weight, x, width, eps, factor, block: tl.constexpr, normed: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    values = tl.load(y + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    if normed:
        gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, 0) / width + eps) * gain
        values = values.to(y.dtype.element_ty).to(tl.float32)  # as if the normed rows had been stored in between
    state = tl.load(x + row * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(x + row * width + column, (state + values * factor).to(x.dtype.element_ty), mask=column < width)


def add(y: Tensor, weight: Tensor | None, eps: float, factor: float, x: Tensor) -> None:
    """Add the rows of y, normed where there is a weight, times a factor, to those of x."""
    width = x.shape[1]
    _add[(len(x),)](
        y, x if weight is None else weight, x, width, eps, factor,
        block=triton.next_power_of_2(width), normed=weight is not None, num_warps=8 if width > 2048 else 4,
    )  # fmt: skip


@triton.jit
def _scale_logits(logits, count, scale, softcap, block: tl.constexpr, capped: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    values = tl.load(logits + at, mask=at < count, other=0.0).to(tl.float32) * scale
    if capped:
        values = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * values / softcap)))
    tl.store(logits + at, values.to(logits.dtype.element_ty), mask=at < count)


def scale_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Logits times a factor, bounded smoothly by a soft cap; in place."""
    count = logits.numel()
    _scale_logits[(triton.cdiv(count, WIDE),)](
        logits, count, scale, softcap or 1.0, block=WIDE, capped=softcap is not None, num_warps=4
    )
    return logits


@triton.jit
def _turn_and_store(
    qkv, pos_of, slot_of, cos_of, sin_of, q_gain, k_gain, keys, values, eps,
    num_heads: tl.constexpr, num_kv: tl.constexpr, dim: tl.constexpr, half: tl.constexpr, turned: tl.constexpr,
    normed: tl.constexpr, heads: tl.constexpr, largest: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    d = tl.arange(0, half)
    inside = (d < dim // 2)[None, :] & (head < num_heads + 2 * num_kv)[:, None]
    is_query, is_value = head < num_heads, head >= num_heads + num_kv
    # Pairs (i, i + turned / 2) of the first dimensions are turned; the others are pairs that stay as they are.
    one, other = d, dim // 2 + d  # without a choice, so that the compiler sees that they are contiguous
    if turned > 0 and turned < dim:
        one = tl.where(d < turned // 2, d, d + turned // 2)
        other = tl.where(d < turned // 2, d + turned // 2, d + dim // 2)
    at = qkv + token * ((num_heads + 2 * num_kv) * dim) + head[:, None] * dim
    first = tl.load(at + one[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + other[None, :], mask=inside, other=0.0).to(tl.float32)
    if normed:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / dim + eps)
        scale = tl.where(is_value, 1.0, scale)[:, None]
        gain_at = d < dim // 2
        q1 = tl.load(q_gain + one, mask=gain_at, other=0.0).to(tl.float32)[None, :]
        q2 = tl.load(q_gain + other, mask=gain_at, other=0.0).to(tl.float32)[None, :]
        k1 = tl.load(k_gain + one, mask=gain_at, other=0.0).to(tl.float32)[None, :]
        k2 = tl.load(k_gain + other, mask=gain_at, other=0.0).to(tl.float32)[None, :]
        first = first * scale * tl.where(is_query[:, None], q1, tl.where(is_value[:, None], 1.0, k1))
        second = second * scale * tl.where(is_query[:, None], q2, tl.where(is_value[:, None], 1.0, k2))
        # As if the normed heads had been stored in between.
        first = first.to(qkv.dtype.element_ty).to(tl.float32)
        second = second.to(qkv.dtype.element_ty).to(tl.float32)
    place = tl.load(pos_of + token).to(tl.int64) * (turned // 2) + d
    cos = tl.load(cos_of + place, mask=d < turned // 2, other=1.0)[None, :]
    sin = tl.load(sin_of + place, mask=d < turned // 2, other=0.0)[None, :]
    cos = tl.where(is_value[:, None], 1.0, cos)
    sin = tl.where(is_value[:, None], 0.0, sin)
    kind = qkv.dtype.element_ty
    low, high = (first * cos - second * sin).to(kind), (second * cos + first * sin).to(kind)
    queries = inside & is_query[:, None]
    tl.store(at + one[None, :], low, mask=queries)
    tl.store(at + other[None, :], high, mask=queries)
    if keys.dtype.element_ty.is_fp8():  # a number too large would become none
        low = tl.clamp(low.to(tl.float32), -largest, largest)
        high = tl.clamp(high.to(tl.float32), -largest, largest)
    slot = tl.load(slot_of + token).to(tl.int64)
    is_kept = inside & (slot >= 0)
    cell = slot * (num_kv * dim)
    key_at = cell + (head - num_heads)[:, None] * dim
    is_key = is_kept & (~is_query & ~is_value)[:, None]
    tl.store(keys + key_at + one[None, :], low, mask=is_key)
    tl.store(keys + key_at + other[None, :], high, mask=is_key)
    value_at = cell + (head - num_heads - num_kv)[:, None] * dim
    tl.store(values + value_at + one[None, :], low, mask=is_kept & is_value[:, None])
    tl.store(values + value_at + other[None, :], high, mask=is_kept & is_value[:, None])


def turn_and_store(
    qkv: Tensor, pos: Tensor, slot: Tensor, turns: tuple[Tensor, Tensor] | None,
    q_gain: Tensor | None, k_gain: Tensor | None, eps: float, keys: Tensor, values: Tensor, num_heads: int,
) -> None:  # fmt: skip
    """Norm (where there are gains) and turn queries and keys; queries stay in `qkv`, keys and values go to their slots.

    qkv: [tokens, (heads + 2 KV heads) * dim]; turns: cosines and sines, [positions, turned dims / 2], None turns
    nothing. A slot below 0 is nowhere.
    """
    num_kv, dim = keys.shape[1:]
    turned = 0 if turns is None else 2 * turns[0].shape[1]
    grid = (len(qkv), triton.cdiv(num_heads + 2 * num_kv, HEADS))
    _turn_and_store[grid](
        qkv, pos, slot, *(turns or (qkv, qkv)),
        q_gain if q_gain is not None else qkv, k_gain if k_gain is not None else qkv, keys, values, eps,
        num_heads=num_heads, num_kv=num_kv, dim=dim, half=triton.next_power_of_2(dim // 2), turned=turned,
        normed=q_gain is not None, heads=HEADS, largest=torch.finfo(keys.dtype).max, num_warps=2,
    )  # fmt: skip


@triton.jit
def _store(
    key, value, slot_of, keys, values, key_row, key_head, value_row, value_head,
    num_kv: tl.constexpr, dim: tl.constexpr, dim_padded: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_of + row).to(tl.int64)
    d = tl.arange(0, dim_padded)
    inside = (d < dim) & (slot >= 0)
    to = (slot * num_kv + head) * dim + d
    new_key = tl.load(key + row * key_row + head * key_head + d, mask=inside, other=0.0)
    new_value = tl.load(value + row * value_row + head * value_head + d, mask=inside, other=0.0)
    tl.store(keys + to, new_key.to(keys.dtype.element_ty), mask=inside)
    tl.store(values + to, new_value.to(values.dtype.element_ty), mask=inside)


def store(key: Tensor, value: Tensor, slot: Tensor, keys: Tensor, values: Tensor) -> None:
    """Put keys and values, [tokens, KV heads, dim] each, into their slots. A slot below 0 is nowhere."""
    num_kv, dim = keys.shape[1:]
    key, value = (one if one.stride(2) == 1 else one.contiguous() for one in (key, value))
    _store[(len(key), num_kv)](
        key, value, slot, keys, values, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        num_kv=num_kv, dim=dim, dim_padded=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip


@triton.jit
def _activated(x, is_gelu: tl.constexpr):
    """silu(x), or gelu(x) in its tanh approximation, which is x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))."""
    slope = x
    if is_gelu:
        slope = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-slope))


@triton.jit
def _gate(both, out, width, block: tl.constexpr, is_gelu: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(both + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (_activated(gate, is_gelu) * up).to(out.dtype.element_ty), mask=inside)


def gate(both: Tensor, out: Tensor, activation: str = "silu") -> None:
    """The activation of gate, times up, where a row of `both` holds gate and up side by side."""
    width = out.shape[1]
    is_gelu = activation == "gelu_tanh"
    _gate[(len(both), triton.cdiv(width, WIDE))](both, out, width, block=WIDE, is_gelu=is_gelu, num_warps=4)


@triton.jit
def _with(values, place: tl.constexpr, value):
    """The tuple with another value at this place."""
    return values[:place] + (value,) + values[place + 1 :]  # noqa: RUF005


@triton.jit
def _multiply(
    x, weight, bias, gain, out, eps, num_out, width,
    tokens: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
    normed: tl.constexpr, biased: tl.constexpr, gates: tl.constexpr, adds: tl.constexpr,
    is_gelu: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    start = weight + row.to(tl.int64)[:, None] * width
    is_row = (row < num_out)[:, None]
    totals = (tl.zeros([rows, block], tl.float32),) * tokens
    up_totals = (tl.zeros([rows, block], tl.float32),) * tokens
    squares = (tl.zeros([block], tl.float32),) * tokens
    for at in range(0, width, block):
        k = at + tl.arange(0, block)
        inside = k < width
        values = ()
        for i in tl.static_range(tokens):
            value = tl.load(x + i * width + k, mask=inside, other=0.0).to(tl.float32)
            if normed:
                squares = _with(squares, i, squares[i] + value * value)
                value *= tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)
            values = values + (value,)  # type: ignore[assignment]  # noqa: RUF005
        wanted = is_row & inside[None, :]
        part = tl.load(start + k[None, :], mask=wanted, other=0.0, eviction_policy="evict_first").to(tl.float32)
        for i in tl.static_range(tokens):
            totals = _with(totals, i, totals[i] + part * values[i][None, :])
        if gates:
            up = start + num_out.to(tl.int64) * width
            part = tl.load(up + k[None, :], mask=wanted, other=0.0, eviction_policy="evict_first").to(tl.float32)
            for i in tl.static_range(tokens):
                up_totals = _with(up_totals, i, up_totals[i] + part * values[i][None, :])
    for i in tl.static_range(tokens):
        result = tl.sum(totals[i], 1)
        if normed:
            scale = tl.rsqrt(tl.sum(squares[i], 0) / width + eps)
            result *= scale
        if biased:
            result += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)
        if gates:
            other = tl.sum(up_totals[i], 1)
            if normed:
                other *= scale
            if biased:
                other += tl.load(bias + num_out + row, mask=row < num_out, other=0.0).to(tl.float32)
            result = _activated(result, is_gelu) * other
        places = out + i * num_out + row
        if adds:
            result += tl.load(places, mask=row < num_out, other=0.0).to(tl.float32)
        tl.store(places, result.to(out.dtype.element_ty), mask=row < num_out)


def _tile(num_out: int, num_rows: int) -> tuple[int, int]:
    """Rows and columns of the matrix that a program takes at a time, measured: few rows of small ones, so that all can
    work.
    """
    if num_out <= 2048:
        return 2, 1024
    return (4, 512 // num_rows) if num_out <= 8192 else (8, 256)


def few_rows_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    gates: bool = False,
    activation: str = "silu",
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[rows, out]: x, of one row or two, times the matrix.

    x is normed first where there is a `gain`; the result is added to `add_to` in place, where that is given.

    With `gates` the matrix is gate and up, one above the other, and the result is the activation of gate, times up.
    It is written to `out` where that is given.
    """
    num_out = weight.shape[0] // 2 if gates else weight.shape[0]
    width = weight.shape[1]
    out = add_to if add_to is not None else out
    if out is None:
        out = torch.empty(len(x), num_out, dtype=x.dtype, device=x.device)
    rows, block = _tile(num_out, len(x))
    _multiply[(triton.cdiv(num_out, rows),)](
        x, weight, bias if bias is not None else x, gain if gain is not None else x, out, eps, num_out, width,
        tokens=len(x), rows=rows, block=block,
        normed=gain is not None, biased=bias is not None, gates=gates, adds=add_to is not None,
        is_gelu=activation == "gelu_tanh",
        num_warps=4,
    )  # fmt: skip
    return out
