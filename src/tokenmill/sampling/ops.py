"""The steps of sampling on [rows, vocab] tensors, and the random numbers they draw with.

What a row gets depends on that row alone. `philox` is Philox4x32-10, a counter-based generator: the draw of a token
depends on its key and nothing else. It is written with integer operators that numpy and torch share, so one function
serves both and gives the same bits. Values are 32-bit words kept in 64-bit signed integers.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch import Tensor

Words = TypeVar("Words", bound=Any)
"""An int64 array, numpy's or torch's."""

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def _multiply(a: int, b: Words) -> tuple[Words, Words]:
    """High and low word of the 64-bit product, without leaving 63 bits."""
    low_part, high_part = b * (a & 0xFFFF), b * (a >> 16)
    high = ((low_part >> 16) + high_part) >> 16
    low = (low_part + ((high_part & 0xFFFF) << 16)) & WORD
    return high, low


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def uniforms(seed: Words, choice: Words, attempt: Words, position: Words) -> tuple[Any, Any]:
    """Two numbers in [0, 1) with 53 bits each: the first draws the token, the second is for whoever needs another.

    `seed` may use 63 bits, the others 32.
    """
    zero = position * 0
    x0, x1, x2, x3 = philox((position, choice, attempt, zero), (seed & WORD, (seed >> 32) & WORD))
    return _to_unit(x0, x1), _to_unit(x2, x3)


def _to_unit(high: Words, low: Words) -> Any:
    bits: Any = (high >> 5) * (1 << 26) + (low >> 6)
    exact = bits.double() if hasattr(bits, "double") else bits  # torch would go to 32 bits by itself
    return exact * (1.0 / (1 << 53))


NEVER = float("-inf")
LARGEST = torch.finfo(torch.float32).max
LEAST = -85.0
"""Logits this far below the largest weigh nothing."""
BLOCK = 64
"""Columns that are looked at together first."""


def saturate(edited: Tensor, before: Tensor) -> Tensor:
    """Logits that an edit has driven out of float32's range stop at its end; those that were banned stay so."""
    return edited.clamp(-LARGEST, LARGEST).masked_fill(before == NEVER, NEVER)


def penalize(logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Logits of tokens seen in prompt or output: repetition for all of them, the others by `counts` in the output."""
    factor = repetition[:, None]
    repeated = saturate(torch.where(logits > 0, logits / factor, logits * factor), logits)
    return saturate(repeated - frequency[:, None] * counts - presence[:, None] * (counts > 0), logits)


def tax(logits: Tensor, taxes: Tensor) -> Tensor:
    """Single logits less what the rules take off them; infinity bans."""
    return saturate(logits - taxes, logits).masked_fill(taxes.isinf(), NEVER)


def likeliest(logits: Tensor, few: int) -> tuple[Tensor, Tensor]:
    """The `few` largest logits of each row and where they are; in falling order, equal ones by their ids.

    They lie in the blocks with the `few` largest maxima, so that most of a long row is only looked at once.
    """
    num_blocks, vocab = logits.shape[-1] // BLOCK, logits.shape[-1]
    if 2 * few >= num_blocks:
        values, ids = logits.topk(few, dim=-1)
    else:
        blocks = logits[:, : num_blocks * BLOCK].reshape(-1, num_blocks, BLOCK)
        found = blocks.amax(dim=-1).topk(few, dim=-1).indices[..., None]
        inside = torch.arange(BLOCK, device=logits.device)
        ids = (found * BLOCK + inside).flatten(1)
        tail = torch.arange(num_blocks * BLOCK, vocab, device=logits.device)
        ids = torch.cat((ids, tail.expand(len(ids), -1)), dim=-1)
        values, place = logits.gather(-1, ids).topk(few, dim=-1)
        ids = ids.gather(-1, place)
    by_id = ids.argsort(dim=-1)
    values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
    values, by_value = values.sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def cool(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits divided by the temperature. The largest becomes 0, so that none can overflow upwards."""
    return (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])


def keep_typical(logits: Tensor, mass: Tensor) -> Tensor:
    """Locally typical sampling: the tokens whose surprise is nearest to the entropy, up to `mass`."""
    logprobs = logits.log_softmax(dim=-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs.nan_to_num(neginf=0.0)).sum(dim=-1, keepdim=True)
    oddness, order = (-logprobs - entropy).abs().sort(dim=-1, stable=True)
    before = probs.gather(-1, order).cumsum(dim=-1) - probs.gather(-1, order)
    dropped = (before >= mass[:, None]) | oddness.isinf()
    dropped[:, 0] = False
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), NEVER)


def keep_likely(ordered: Tensor, total: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab: int) -> Tensor:
    """Top-k, then top-p among what is left, then min-p, on logits in falling order.

    `total` is the log-sum-exp of the whole row of `vocab` logits, of which `ordered` may be only the beginning; a top-k
    has to end inside it.
    """
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    inside_k = rank < top_k[:, None]
    kept_k = ordered.masked_fill(~inside_k, NEVER)
    # With a top-k the mass is that of the k tokens, else that of the row.
    whole = torch.where(top_k >= vocab, total, kept_k.logsumexp(dim=-1))
    probs = (kept_k - whole[:, None]).exp()
    before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
    # A sum of rounded probabilities may reach 1 before the last token.
    inside_p = (before < top_p[:, None]) | (top_p[:, None] >= 1) | (rank == 0)
    inside_min = ordered >= ordered[:, :1] + min_p[:, None].log()
    return kept_k.masked_fill(~(inside_p & inside_min), NEVER)


def exclude_top_choices(ordered: Tensor, threshold: Tensor, struck: Tensor) -> Tensor:
    """XTC on logits in falling order: where `struck`, drop the tokens above the threshold but the least likely one."""
    probs = ordered.softmax(dim=-1)
    above = (probs >= threshold[:, None]) & (ordered > NEVER)  # at threshold 0, what is excluded already is not above
    next_above = torch.cat([above[:, 1:], torch.zeros_like(above[:, :1])], dim=-1)
    return ordered.masked_fill(above & next_above & struck[:, None], NEVER)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Column of the token that a number in [0, 1) falls on, by the running sum of the probabilities.

    First the block of columns that it falls on, then the column in it: sums run over few numbers, in float64.
    """
    weights = _weights(logits - logits.amax(dim=-1, keepdim=True))
    missing = -weights.shape[-1] % BLOCK
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    blocks = weights.reshape(len(weights), -1, BLOCK)
    sums = blocks.sum(dim=-1).to(torch.float64)
    wanted = uniform.to(torch.float64)[:, None] * sums.sum(dim=-1, keepdim=True)
    block, before = _fall(sums, wanted)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0].to(torch.float64)
    column, _ = _fall(inside, wanted - before[:, None])
    return block * BLOCK + column


def mass(logits: Tensor) -> Tensor:
    """The logarithm of the sum of what logits weigh."""
    top = logits.amax(dim=-1, keepdim=True)
    return _weights(logits - top).sum(dim=-1).log() + top[:, 0]


def _weights(logits: Tensor) -> Tensor:
    """What logits weigh; the largest is 0. Nobody draws what weighs next to nothing, and such numbers are slow."""
    weights = logits.clamp(min=LEAST).exp_()
    return torch.nn.functional.threshold(weights, 2 * math.exp(LEAST), 0.0, inplace=True)


def _fall(weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """On which of the weights a number falls that is less than their sum, and the sum of those before it."""
    running = weights.cumsum(dim=-1)
    place = (running <= wanted).sum(dim=-1)
    # Rounding may point past the last one that is not 0.
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    place = torch.minimum(place, last)
    at = place[:, None]
    return place, (running.gather(-1, at) - weights.gather(-1, at))[:, 0]
