"""From logits to ids without a sort and without waiting: the largest logit of each row, or the one drawn at random.

A row is cut into chunks. Their maxima give the largest logit; their sums of weights say in which of them the random
number falls, and only that one is looked at again. As in `tensor_sampler.draw`: running sums of
exp((logit - largest) / T), and as in `contract.draws.uniforms`: Philox4x32-10, keyed by what names the token.

Filtered rows are drawn in order of likelihood. Both their cut and their draw are weighted quantiles of the
sorted row, found by an 8-way search over the order-preserving integer keys of the logits (`_search`). Tokens of equal
logits come in order of their ids; how many of them are inside follows from their common weight. Typical-p orders tokens
by the distance of their surprise from the entropy instead; what it drops is gone before anything else looks at the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
SEARCHED, SEARCH_WARPS = 4096, 16
"""Columns that a search looks at together, and the warps that do."""
NUM_FIELDS = tl.constexpr(11)
"""Of `tensor_sampler.DRAW_FIELDS`, in this order."""
TEMPERATURE, TOP_K, TOP_P, MIN_P = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
TYPICAL_P, XTC_PROBABILITY, XTC_THRESHOLD = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
WEIGHT, COUNT, TYPICALITY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a search sums up, and in which order."""
LEAST = tl.constexpr(-84.306853)
"""Of cooled logits; what weighs less than twice exp(-85) of the largest weighs nothing."""

EVEN_PASSES = tl.constexpr(2)
"""Of a search, the passes that cut the range evenly by value."""
WIDEST = tl.constexpr(32.0)
"""The range that they cut, at most: it begins at minus infinity when nothing is known."""


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
def _weights(logits, top, coldness):
    """What logits weigh beside the largest one; coldness: 1 / temperature."""
    cooled = (logits.to(tl.float32) - top) * coldness
    return tl.where(cooled > LEAST, tl.exp(cooled), 0.0)


@triton.jit
def _float(told, row, field: tl.constexpr):
    bits = tl.load(told + row * NUM_FIELDS + field)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _is_filtered(told, row, vocab):
    """Is it drawn in order of likelihood?"""
    is_cut = (tl.load(told + row * NUM_FIELDS + TOP_K) < vocab) | (_float(told, row, TOP_P) < 1)
    return is_cut | (_float(told, row, TYPICAL_P) < 1) | (_float(told, row, XTC_PROBABILITY) > 0)


@triton.jit
def _likely(weights, told, row, vocab):
    """Weights of a row that is drawn in order of its ids: nothing below min-p of the largest, which weighs 1."""
    floor = tl.where(_is_filtered(told, row, vocab), 0.0, _float(told, row, MIN_P))
    return tl.where(weights >= floor, weights, 0.0)


@triton.jit
def _masses(logits, told, tops, masses, vocab, stride, num_parts, chunk: tl.constexpr, parts: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    temperature = _float(told, row, TEMPERATURE)
    if temperature > 0:
        each = tl.arange(0, parts)
        top = tl.max(tl.load(tops + row * num_parts + each, mask=each < num_parts, other=float("-inf")), 0)
        column = part * chunk + tl.arange(0, chunk)
        values = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf"))
        weights = _likely(_weights(values, top, 1 / temperature), told, row, vocab)
        tl.store(masses + row * num_parts + part, tl.sum(weights, 0))


@triton.jit
def _uniforms(key_of):
    """Two numbers in [0, 1): the first draws the token, the second decides on XTC."""
    x0, x1, x2, x3 = tl.philox(
        tl.load(key_of), tl.load(key_of + 3).to(tl.uint32), tl.load(key_of + 1).to(tl.uint32),
        tl.load(key_of + 2).to(tl.uint32), tl.full([], 0, tl.uint32),
    )  # fmt: skip
    return _to_unit(x0, x1), _to_unit(x2, x3)


@triton.jit
def _to_unit(high, low):
    bits = (high >> 5).to(tl.int64) * 67108864 + (low >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _draw(
    logits, told, tops, places, masses, ids, vocab, stride, num_parts,
    bad_row: tl.constexpr, chunk: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = _float(told, row, TEMPERATURE)
    top, best = _best(tops, places, num_parts, parts, row)
    is_bad = (top == float("inf")) | (top == float("-inf"))
    chosen = tl.where(is_bad, bad_row, best)
    if (temperature > 0) & (is_bad == 0) & (_is_filtered(told, row, vocab) == 0):
        each = tl.arange(0, parts)
        mass = tl.load(masses + row * num_parts + each, mask=each < num_parts, other=0.0).to(tl.float64)
        uniform, _ = _uniforms(told + row * NUM_FIELDS)
        wanted = uniform * tl.sum(mass, 0)
        running = tl.cumsum(mass, 0)
        part = tl.sum((running <= wanted).to(tl.int32), 0)
        part = tl.minimum(part, tl.max(tl.where(mass > 0, each, 0), 0))
        before = tl.sum(tl.where(each < part, mass, 0.0), 0)
        inside = tl.arange(0, chunk)
        column = part * chunk + inside
        values = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf"))
        weight = _likely(_weights(values, top, 1 / temperature), told, row, vocab).to(tl.float64)
        falls = tl.sum((tl.cumsum(weight, 0) <= wanted - before).to(tl.int32), 0)
        falls = tl.minimum(falls, tl.max(tl.where(weight > 0, inside, 0), 0))
        chosen = part * chunk + falls
    tl.store(ids + row, chosen)


# -- rows in order of likelihood --------------------------------------------------------------------------------------


@triton.jit
def _key(values, shift: tl.constexpr):
    """Integers in the order of the logits; `shift`: low bits of a float32 that their type does not use."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> shift


@triton.jit
def _value(key, shift: tl.constexpr):
    """The logit of a key, given as an int64 so that sums of keys can't overflow."""
    key = key.to(tl.int32)
    bits = (key << shift) | tl.where(key < 0, (1 << shift) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _typicality(values, top, coldness, typical):
    """How near cooled logits are to `typical`, the expected one: 0 or less."""
    return -tl.abs((values - top) * coldness - typical)


@triton.jit
def _bound(low, high, eighth: tl.constexpr, num_passes, shift: tl.constexpr):
    """A key in (low, high], one of seven that cut the range into eight.

    The first passes cut it evenly by value: half of all keys are those of numbers around 0, where few logits are.
    """
    by_key = tl.minimum(low + eighth * ((high - low + 7) // 8), high)
    ceiling = _value(high - 1, shift)
    floor = tl.maximum(_value(low, shift), ceiling - WIDEST)
    by_value = _key(floor + (ceiling - floor) * (eighth / 8), shift).to(tl.int64)
    by_value = tl.minimum(tl.maximum(by_value, low + 1), high)
    return tl.where(num_passes < EVEN_PASSES, by_value, by_key)


@triton.jit
def _search(
    line, top, coldness, typical, low, high, above, wanted,
    by: tl.constexpr, vocab: tl.constexpr, shift: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, high) with a sum over all keys from it on that exceeds `wanted`; the sum beyond it.

    By WEIGHT or COUNT: keys of the logits, sums of their weights or of tokens. By TYPICALITY: weights again, keys of
    `_typicality`. From `low` on the sum exceeds `wanted`; from `high` on it is `above`, and does not.
    """
    num_passes = 0
    while high - low > 1:
        k1, k2 = _bound(low, high, 1, num_passes, shift), _bound(low, high, 2, num_passes, shift)
        k3, k4 = _bound(low, high, 3, num_passes, shift), _bound(low, high, 4, num_passes, shift)
        k5, k6 = _bound(low, high, 5, num_passes, shift), _bound(low, high, 6, num_passes, shift)
        k7 = _bound(low, high, 7, num_passes, shift)
        v1, v2, v3, v4 = _value(k1, shift), _value(k2, shift), _value(k3, shift), _value(k4, shift)
        v5, v6, v7 = _value(k5, shift), _value(k6, shift), _value(k7, shift)
        s1 = tl.zeros([chunk], tl.float32)
        s2, s3, s4, s5, s6, s7 = s1, s1, s1, s1, s1, s1
        for start in range(0, vocab, chunk):
            column = start + tl.arange(0, chunk)
            values = tl.load(line + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            weight = tl.where(column < vocab, 1.0, 0.0) if by == COUNT else _weights(values, top, coldness)
            if by == TYPICALITY:
                values = _typicality(values, top, coldness, typical)
            s1 += tl.where(values >= v1, weight, 0.0)
            s2 += tl.where(values >= v2, weight, 0.0)
            s3 += tl.where(values >= v3, weight, 0.0)
            s4 += tl.where(values >= v4, weight, 0.0)
            s5 += tl.where(values >= v5, weight, 0.0)
            s6 += tl.where(values >= v6, weight, 0.0)
            s7 += tl.where(values >= v7, weight, 0.0)
        g1, g2 = tl.sum(s1.to(tl.float64), 0), tl.sum(s2.to(tl.float64), 0)
        g3, g4 = tl.sum(s3.to(tl.float64), 0), tl.sum(s4.to(tl.float64), 0)
        g5, g6, g7 = tl.sum(s5.to(tl.float64), 0), tl.sum(s6.to(tl.float64), 0), tl.sum(s7.to(tl.float64), 0)
        above = tl.where(g1 <= wanted, g1, tl.where(g2 <= wanted, g2, tl.where(g3 <= wanted, g3, tl.where(
            g4 <= wanted, g4, tl.where(g5 <= wanted, g5, tl.where(g6 <= wanted, g6, tl.where(
                g7 <= wanted, g7, above)))))))  # fmt: skip
        high = tl.where(g1 <= wanted, k1, tl.where(g2 <= wanted, k2, tl.where(g3 <= wanted, k3, tl.where(
            g4 <= wanted, k4, tl.where(g5 <= wanted, k5, tl.where(g6 <= wanted, k6, tl.where(
                g7 <= wanted, k7, high)))))))  # fmt: skip
        low = tl.where(g7 > wanted, k7, tl.where(g6 > wanted, k6, tl.where(g5 > wanted, k5, tl.where(
            g4 > wanted, k4, tl.where(g3 > wanted, k3, tl.where(g2 > wanted, k2, tl.where(
                g1 > wanted, k1, low)))))))  # fmt: skip
        num_passes += 1
    return low, above


@triton.jit
def _total(line, top, coldness, beyond, floor, vocab: tl.constexpr, chunk: tl.constexpr):
    """What the tokens with larger logits than `beyond` weigh together that weigh at least `floor` each."""
    total = tl.zeros([chunk], tl.float32)
    for start in range(0, vocab, chunk):
        column = start + tl.arange(0, chunk)
        values = tl.load(line + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        weight = _weights(values, top, coldness)
        total += tl.where((values > beyond) & (weight >= floor), weight, 0.0)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _lightest(line, top, coldness, floor, vocab: tl.constexpr, chunk: tl.constexpr):
    """The least weight of a token that weighs at least `floor`."""
    least = tl.full([chunk], float("inf"), tl.float32)
    for start in range(0, vocab, chunk):
        column = start + tl.arange(0, chunk)
        values = tl.load(line + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        weight = _weights(values, top, coldness)
        least = tl.minimum(least, tl.where((weight >= floor) & (weight > 0), weight, float("inf")))
    return tl.min(least, 0)


@triton.jit
def _nth(
    line, top, coldness, typical, wanted, n, by: tl.constexpr, vocab: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Where the n-th logit (or typicality) of this value is, the first being 0; the last one if there are fewer."""
    place, seen = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, vocab, chunk):
        column = start + tl.arange(0, chunk)
        values = tl.load(line + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        if by == TYPICALITY:
            values = _typicality(values, top, coldness, typical)
        is_one = ((values == wanted) & (column < vocab)).to(tl.int32)
        if seen <= n:
            inside = is_one * (seen + tl.cumsum(is_one, 0) <= n + 1).to(tl.int32)
            place = tl.maximum(place, tl.max(tl.where(inside > 0, column, 0), 0))
        seen += tl.sum(is_one, 0)
    return place


@triton.jit
def _draw_likely(
    logits, told, tops, places, masses, ids, stride, num_parts,
    vocab: tl.constexpr, shift: tl.constexpr, chunk: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature = _float(told, row, TEMPERATURE)
    top, _ = _best(tops, places, num_parts, parts, row)
    is_bad = (top == float("inf")) | (top == float("-inf"))
    if (temperature > 0) & (is_bad == 0) & _is_filtered(told, row, vocab):
        line = logits + row.to(tl.int64) * stride
        top_k = tl.load(told + row * NUM_FIELDS + TOP_K)
        top_p, min_p = _float(told, row, TOP_P).to(tl.float64), _float(told, row, MIN_P)
        coldness, nowhere = 1 / temperature, tl.full([], float("-inf"), tl.float32)
        high = _key(top, shift).to(tl.int64) + 1
        lowest = _key(top + 1.01 * LEAST * temperature, shift).to(tl.int64) - 1  # nothing weighs anything below
        nothing = tl.zeros([], tl.float64)
        low, kept = lowest, nothing
        if top_k < vocab:
            bottom = _key(nowhere, shift).to(tl.int64)
            fewer = (top_k - 1).to(tl.float64)
            low, count = _search(line, top, coldness, 0.0, bottom, high, nothing, fewer, COUNT, vocab, shift, chunk)
            # The mass beyond the last key, and that of as many of its tokens as there is room for.
            beyond = _total(line, top, coldness, _value(low, shift), 0.0, vocab, chunk)
            last = _weights(_value(low, shift), top, coldness).to(tl.float64)
            kept = beyond + (top_k.to(tl.float64) - count) * last
            low = tl.maximum(low, lowest)
        else:
            each = tl.arange(0, parts)
            mass = tl.load(masses + row * num_parts + each, mask=each < num_parts, other=0.0)
            kept = tl.sum(mass.to(tl.float64), 0)
        if top_p < 1:
            wanted = top_p * kept
            # Were all tokens as light as this, they would not weigh what top-p cuts off: it cuts off lighter ones.
            light = (0.5 * (1 - top_p) * kept / tl.minimum(top_k, vocab).to(tl.float64)).to(tl.float32)
            low = tl.maximum(low, _key(top + tl.log(light) * temperature, shift).to(tl.int64) - 1)
            low, beyond = _search(line, top, coldness, 0.0, low, high, nothing, wanted, WEIGHT, vocab, shift, chunk)
            last = _weights(_value(low, shift), top, coldness).to(tl.float64)
            kept = beyond + tl.ceil((wanted - beyond) / last) * last
        if min_p > 0:
            likely = _total(line, top, coldness, nowhere, min_p, vocab, chunk)
            kept = tl.minimum(kept, likely)
        uniform, second = _uniforms(told + row * NUM_FIELDS)
        dropped = nothing
        if second < _float(told, row, XTC_PROBABILITY).to(tl.float64):
            # Of the tokens above the threshold, which come first, only the last stays.
            floor = (_float(told, row, XTC_THRESHOLD).to(tl.float64) * kept).to(tl.float32)
            above = tl.minimum(_total(line, top, coldness, nowhere, floor, vocab, chunk), kept)
            floor = tl.maximum(tl.maximum(floor, _weights(_value(low, shift), top, coldness)), min_p)
            dropped = tl.maximum(above - _lightest(line, top, coldness, floor, vocab, chunk).to(tl.float64), 0.0)
        wanted = dropped + uniform * (kept - dropped)
        drawn, beyond = _search(line, top, coldness, 0.0, low, high, nothing, wanted, WEIGHT, vocab, shift, chunk)
        value = _value(drawn, shift)
        last = _weights(value, top, coldness).to(tl.float64)
        nth = tl.floor((wanted - beyond) / last).to(tl.int32)
        tl.store(ids + row, _nth(line, top, coldness, 0.0, value, nth, WEIGHT, vocab, chunk))


@triton.jit
def _keep_typical(
    logits, told, tops, places, out, stride, num_parts,
    vocab: tl.constexpr, chunk: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """Copy a row; what is not typical becomes minus infinity."""
    row = tl.program_id(0)
    temperature, mass = _float(told, row, TEMPERATURE), _float(told, row, TYPICAL_P).to(tl.float64)
    top, _ = _best(tops, places, num_parts, parts, row)
    line, to = logits + row.to(tl.int64) * stride, out + row.to(tl.int64) * vocab
    is_bad = (top == float("inf")) | (top == float("-inf"))
    least, last = tl.full([], float("-inf"), tl.float32), tl.full([], vocab, tl.int32)
    coldness, typical = tl.full([], 1.0, tl.float32), tl.full([], 0.0, tl.float32)
    if (temperature > 0) & (is_bad == 0) & (mass < 1):
        coldness = 1 / temperature
        # The surprise of a token is log(total) - cooled, the entropy log(total) - (the mean of cooled).
        total, moment = tl.zeros([chunk], tl.float32), tl.zeros([chunk], tl.float32)
        for start in range(0, vocab, chunk):
            column = start + tl.arange(0, chunk)
            values = tl.load(line + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            weight = _weights(values, top, coldness)
            total += weight
            moment += tl.where(weight > 0, weight * (values - top) * coldness, 0.0)
        whole = tl.sum(total.to(tl.float64), 0)
        typical = (tl.sum(moment.to(tl.float64), 0) / whole).to(tl.float32)
        low, high = _key(tl.full([], float("-inf"), tl.float32), 0).to(tl.int64), tl.full([], 1, tl.int64)
        wanted, nothing = mass * whole, tl.zeros([], tl.float64)
        key, before = _search(
            line, top, coldness, typical, low, high, nothing, wanted, TYPICALITY, vocab, 0, chunk
        )  # fmt: skip
        least = _value(key, 0)
        # Tokens as typical as the last one have its weight: that of one side of the mean, as a rule.
        weight = tl.zeros([chunk], tl.float32)
        for start in range(0, vocab, chunk):
            column = start + tl.arange(0, chunk)
            values = tl.load(line + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
            is_one = _typicality(values, top, coldness, typical) == least
            weight = tl.maximum(weight, tl.where(is_one, _weights(values, top, coldness), 0.0))
        common = tl.max(weight, 0).to(tl.float64)
        count = tl.maximum(tl.ceil((wanted - before) / tl.where(common > 0, common, 1.0)), 1.0)
        last = _nth(line, top, coldness, typical, least, count.to(tl.int32) - 1, TYPICALITY, vocab, chunk)
    for start in range(0, vocab, chunk):
        column = start + tl.arange(0, chunk)
        kept = tl.load(line + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
        near = _typicality(kept, top, coldness, typical)
        stays = (near > least) | ((near == least) & (column <= last)) | (near != near)
        kept = tl.where(stays, kept, float("-inf")).to(out.dtype.element_ty)
        tl.store(to + column, kept, mask=column < vocab)


@triton.jit
def _masked(logits, words, out, vocab, stride, num_words, chunk: tl.constexpr):
    """Copy a row; what its mask does not allow becomes minus infinity, but for a NaN: its row has failed."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = part * chunk + tl.arange(0, chunk)
    values = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    word = tl.load(words + row * num_words + column // 32, mask=column < vocab, other=0)
    stays = (((word >> (column % 32)) & 1) != 0) | (values != values)
    kept = tl.where(stays, values, float("-inf")).to(out.dtype.element_ty)
    tl.store(out + row * vocab + column, kept, mask=column < vocab)


def masked(logits: Tensor, words: Tensor) -> Tensor:
    """A copy without the logits that the masks rule out. words: int32, [rows, ceil(vocab / 32)], lowest bit first."""
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=logits.dtype, device=logits.device)
    grid = (triton.cdiv(vocab, CHUNK), rows)
    _masked[grid](logits, words, out, vocab, logits.stride(0), words.shape[1], chunk=CHUNK, num_warps=8)
    return out


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


def keep_typical(logits: Tensor, told: Tensor) -> Tensor:
    """A copy in which rows with a typical-p have lost the tokens that are not typical; `told` as for `draw`."""
    tops, places = _chunk_maxima(logits)
    (rows, vocab), num_parts = logits.shape, tops.shape[1]
    out = torch.empty(rows, vocab, dtype=logits.dtype, device=logits.device)
    _keep_typical[(rows,)](
        logits, told, tops, places, out, logits.stride(0), num_parts,
        vocab=vocab, chunk=SEARCHED, parts=triton.next_power_of_2(num_parts), num_warps=SEARCH_WARPS,
    )  # fmt: skip
    return out


def draw(logits: Tensor, told: Tensor, bad_row: int, *, is_filtered: bool = False, is_typical: bool = False) -> Tensor:
    """The id each row's random number falls on, its largest logit at temperature 0, `bad_row` without a finite one.

    told: int64, [rows, 11]: `tensor_sampler.DRAW_FIELDS`; is_filtered: some row has a top-k, a top-p, a typical-p or
    XTC; is_typical: some row has a typical-p.
    """
    if is_typical:
        logits = keep_typical(logits, told)
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
    if is_filtered:
        sizes |= {"chunk": SEARCHED, "num_warps": SEARCH_WARPS}
        unused_bits = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}[logits.dtype]
        _draw_likely[(rows,)](
            logits,
            told,
            tops,
            places,
            masses,
            ids,
            logits.stride(0),
            num_parts,
            vocab=vocab,
            shift=unused_bits,
            **sizes,
        )
    return ids
