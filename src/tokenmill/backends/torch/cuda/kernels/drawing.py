"""From logits to ids in few passes: the largest logit of each row, or the one that a random number falls on.

A row is cut into chunks. Their maxima give the largest logit; their sums of weights say in which of them the number
falls, and only that one is looked at again. As in `sampling.ops.draw`: running sums of exp((logit - largest) / T), and
as in `sampling.philox`: Philox4x32-10, keyed by what names the token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
NUM_TOLD = tl.constexpr(5)
"""Numbers that are told of a row that is drawn."""
LEAST = tl.constexpr(-85.0)
"""As `sampling.ops.LEAST`: logits this far below the largest weigh nothing."""
NEGLIGIBLE = tl.constexpr(2.4321986e-37)
"""2 * exp(LEAST)"""


@triton.jit
def _maxima(logits, tops, places, vocab, stride, chunk: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    column = part * chunk + tl.arange(0, chunk)
    values = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf"))
    values = values.to(tl.float32)
    values = tl.where(values != values, float("inf"), values)
    top = tl.max(values, 0)
    at = row * tl.num_programs(0) + part
    tl.store(tops + at, top)
    tl.store(places + at, tl.min(tl.where(values == top, column, 2147483647), 0))


@triton.jit
def _best(tops, places, num_parts, parts: tl.constexpr, row):
    part = tl.arange(0, parts)
    at = row * num_parts + part
    values = tl.load(tops + at, mask=part < num_parts, other=float("-inf"))
    top = tl.max(values, 0)
    place = tl.load(places + at, mask=part < num_parts, other=2147483647)
    best = tl.min(tl.where(values == top, place, 2147483647), 0)
    return top, best


@triton.jit
def _largest(tops, places, values, ids, num_parts, parts: tl.constexpr):
    row = tl.program_id(0)
    top, best = _best(tops, places, num_parts, parts, row)
    tl.store(values + row, top)
    tl.store(ids + row, best.to(tl.int64))


@triton.jit
def _greedy(tops, places, ids, num_parts, bad_row: tl.constexpr, parts: tl.constexpr):
    row = tl.program_id(0)
    top, best = _best(tops, places, num_parts, parts, row)
    tl.store(ids + row, tl.where((top == float("inf")) | (top == float("-inf")), bad_row, best))


@triton.jit
def _weights(logits, top, temperature):
    cooled = (logits.to(tl.float32) - top) / temperature
    weight = tl.exp(tl.maximum(cooled, LEAST))
    return tl.where(weight > NEGLIGIBLE, weight, 0.0)


@triton.jit
def _temperature(told, row):
    bits = tl.load(told + row * NUM_TOLD + NUM_TOLD - 1)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _masses(logits, told, tops, masses, vocab, stride, num_parts, chunk: tl.constexpr, parts: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    temperature = _temperature(told, row)
    if temperature > 0:
        each = tl.arange(0, parts)
        top = tl.max(tl.load(tops + row * num_parts + each, mask=each < num_parts, other=float("-inf")), 0)
        column = part * chunk + tl.arange(0, chunk)
        values = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf"))
        tl.store(masses + row * num_parts + part, tl.sum(_weights(values, top, temperature), 0))


@triton.jit
def _uniform(key_of):
    x0, x1, _, _ = tl.philox(
        tl.load(key_of), tl.load(key_of + 3).to(tl.uint32), tl.load(key_of + 1).to(tl.uint32),
        tl.load(key_of + 2).to(tl.uint32), tl.full([], 0, tl.uint32),
    )  # fmt: skip
    bits = (x0 >> 5).to(tl.int64) * 67108864 + (x1 >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _draw(
    logits, told, tops, places, masses, ids, vocab, stride, num_parts,
    bad_row: tl.constexpr, chunk: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = _temperature(told, row)
    top, best = _best(tops, places, num_parts, parts, row)
    is_bad = (top == float("inf")) | (top == float("-inf"))
    chosen = tl.where(is_bad, bad_row, best)
    if (temperature > 0) & (is_bad == 0):
        each = tl.arange(0, parts)
        mass = tl.load(masses + row * num_parts + each, mask=each < num_parts, other=0.0).to(tl.float64)
        wanted = _uniform(told + row * NUM_TOLD) * tl.sum(mass, 0)
        running = tl.cumsum(mass, 0)
        part = tl.sum((running <= wanted).to(tl.int32), 0)
        part = tl.minimum(part, tl.max(tl.where(mass > 0, each, 0), 0))
        before = tl.sum(tl.where(each < part, mass, 0.0), 0)
        inside = tl.arange(0, chunk)
        column = part * chunk + inside
        values = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf"))
        weight = _weights(values, top, temperature).to(tl.float64)
        falls = tl.sum((tl.cumsum(weight, 0) <= wanted - before).to(tl.int32), 0)
        falls = tl.minimum(falls, tl.max(tl.where(weight > 0, inside, 0), 0))
        chosen = part * chunk + falls
    tl.store(ids + row, chosen)


def _chunk_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab = logits.shape
    num_parts = triton.cdiv(vocab, CHUNK)
    tops = torch.empty(rows, num_parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, num_parts, dtype=torch.int32, device=logits.device)
    _maxima[(num_parts, rows)](logits, tops, places, vocab, logits.stride(0), chunk=CHUNK, num_warps=8)
    return tops, places


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest logit and the first place where it is. A NaN counts as infinite."""
    tops, places = _chunk_maxima(logits)
    rows, num_parts = tops.shape
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _largest[(rows,)](tops, places, values, ids, num_parts, parts=triton.next_power_of_2(num_parts), num_warps=1)
    return values, ids


def greedy(logits: Tensor, bad_row: int, out: Tensor | None = None) -> Tensor:
    """Where each row's largest logit is, `bad_row` where that is not finite."""
    tops, places = _chunk_maxima(logits)
    rows, num_parts = tops.shape
    ids = torch.empty(rows, dtype=torch.int32, device=logits.device) if out is None else out
    parts = triton.next_power_of_2(num_parts)
    _greedy[(rows,)](tops, places, ids, num_parts, bad_row=bad_row, parts=parts, num_warps=1)
    return ids


def draw(logits: Tensor, told: Tensor, bad_row: int) -> Tensor:
    """The id each row's random number falls on, its largest logit at temperature 0, `bad_row` without a finite one.

    told: int64, [rows, 5]: seed, choice, attempt, position and the bits of the temperature, a float32.
    """
    tops, places = _chunk_maxima(logits)
    (rows, vocab), num_parts = logits.shape, tops.shape[1]
    masses = torch.empty(rows, num_parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    sizes = {"chunk": CHUNK, "parts": triton.next_power_of_2(num_parts), "num_warps": 8}
    _masses[(num_parts, rows)](logits, told, tops, masses, vocab, logits.stride(0), num_parts, **sizes)
    _draw[(rows,)](
        logits, told, tops, places, masses, ids, vocab, logits.stride(0), num_parts,
        bad_row=bad_row, **sizes,
    )  # fmt: skip
    return ids
