"""A weight matrix times one row: bound by reading the matrix, so everything else of the layer rides along.

The norm before the product is a scale of its result, the gate and the residual stand at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _multiply(
    x, weight, bias, gain, out, eps, num_out, width,
    rows: tl.constexpr, block: tl.constexpr,
    normed: tl.constexpr, biased: tl.constexpr, gates: tl.constexpr, adds: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    start = weight + row.to(tl.int64)[:, None] * width
    is_row = (row < num_out)[:, None]
    total = tl.zeros([rows, block], tl.float32)
    up_total = tl.zeros([rows, block], tl.float32)
    squares = tl.zeros([block], tl.float32)
    for at in range(0, width, block):
        k = at + tl.arange(0, block)
        inside = k < width
        values = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
        if normed:
            squares += values * values
            values *= tl.load(gain + k, mask=inside, other=0.0).to(tl.float32)
        wanted = is_row & inside[None, :]
        part = tl.load(start + k[None, :], mask=wanted, other=0.0, eviction_policy="evict_first")
        total += part.to(tl.float32) * values[None, :]
        if gates:
            up = start + num_out.to(tl.int64) * width
            part = tl.load(up + k[None, :], mask=wanted, other=0.0, eviction_policy="evict_first")
            up_total += part.to(tl.float32) * values[None, :]
    result = tl.sum(total, 1)
    if normed:
        scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        result *= scale
    if biased:
        result += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)
    if gates:
        other = tl.sum(up_total, 1)
        if normed:
            other *= scale
        if biased:
            other += tl.load(bias + num_out + row, mask=row < num_out, other=0.0).to(tl.float32)
        result = result / (1.0 + tl.exp(-result)) * other
    if adds:
        result += tl.load(out + row, mask=row < num_out, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < num_out)


def _tile(num_out: int) -> tuple[int, int]:
    """Rows and columns that a program takes at a time, measured: few rows of small matrices, so that all can work."""
    if num_out <= 2048:
        return 2, 1024
    return (4, 512) if num_out <= 8192 else (8, 256)


def one_row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    gates: bool = False,
    add_to: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """[1, out]: x times the matrix; x normed first where there is a `gain`, the result added to `add_to` in place.

    With `gates` the matrix is gate and up, one above the other, and the result is silu(gate) * up. It is written to
    `out` where that is given.
    """
    num_out = weight.shape[0] // 2 if gates else weight.shape[0]
    width = weight.shape[1]
    out = add_to if add_to is not None else out
    if out is None:
        out = torch.empty(1, num_out, dtype=x.dtype, device=x.device)
    rows, block = _tile(num_out)
    _multiply[(triton.cdiv(num_out, rows),)](
        x, weight, bias if bias is not None else x, gain if gain is not None else x, out, eps, num_out, width,
        rows=rows, block=block,
        normed=gain is not None, biased=bias is not None, gates=gates, adds=add_to is not None,
        num_warps=4,
    )  # fmt: skip
    return out
