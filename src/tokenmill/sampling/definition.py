"""What sampling is, one row at a time, in plain numpy: every sampler draws these ids and gives these log-probabilities.

Also how numpy logits are sampled where there is no C library. What makes exact agreement possible:

- Logits are edited, cooled and exponentiated in float32, one rounding per operation, in the order written here.
- A token's weight, at most 1 for the likeliest one, is a multiple of 2^-33. Sums of up to 2^20 weights are exact in
  float64, whatever the order: they depend neither on the width of vectors nor on blocks or threads.
- Tokens are ordered by their cooled logits, equal ones by their ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.contract import BAD_ROW, Mask, Sampled, unpack_mask
from tokenmill.contract import draws as arithmetic
from tokenmill.contract.backend import FloatArray
from tokenmill.contract.draws import MOMENT_TO_UNIT, Draws, TokenLists

Row = NDArray[np.float32]
Weights = NDArray[np.float64]

NEVER = np.float32(-np.inf)
LARGEST = np.finfo(np.float32).max
EXP = tuple(map(np.float32, arithmetic.EXP))
LEAST, TO_INTEGER, TO_UNIT = map(np.float32, (arithmetic.LEAST, arithmetic.TO_INTEGER, arithmetic.TO_UNIT))
LOG2_E, LN2_HIGH, LN2_LOW = map(np.float32, (arithmetic.LOG2_E, arithmetic.LN2_HIGH, arithmetic.LN2_LOW))


def sample(draws: Draws, logits: FloatArray, mask: Mask | None) -> Sampled:
    """The `Sampler` of a step, row by row."""
    num_rows, vocab = logits.shape
    ids = np.full(num_rows, BAD_ROW, dtype=np.int32)
    count = min(draws.num_logprobs, vocab)
    extras: dict[str, Any] = {} if count < 0 else {
        "logprob": np.full(num_rows, np.nan, dtype=np.float32),
        "top_logprobs": np.full((num_rows, count), np.nan, dtype=np.float32),
        "top_ids": np.full((num_rows, count), BAD_ROW, dtype=np.int32),
    }  # fmt: skip
    allowed = None if mask is None else unpack_mask(mask, vocab)
    first, second = draws.uniforms()
    for i, draw in enumerate(draws.table):
        if not np.isfinite(logits[i].max()):
            continue
        row = edited(draws, i, logits[i], None if allowed is None else allowed[i])
        if not np.isfinite(row.max()):
            continue
        ids[i] = row.argmax() if draw["temperature"] == 0 else drawn(row, draw, first[i], second[i])
        if draw["num_logprobs"] >= 0:
            logprobs = log_softmax(logits[i])
            extras["logprob"][i] = logprobs[ids[i]]
            top = extras["top_ids"][i, : draw["num_logprobs"]]
            top[:] = np.argsort(-logits[i], kind="stable")[: len(top)]
            extras["top_logprobs"][i, : len(top)] = logprobs[top]
    return Sampled(ids, extras)


# -- edits ------------------------------------------------------------------------------------------------------------


def edited(draws: Draws, i: int, logits: Row, mask: NDArray[np.bool_] | None) -> Row:
    """A row's logits with its mask, allow-list, bias and bans, penalties and rules applied, in this order."""
    logits = logits.copy() if mask is None else np.where(mask, logits, NEVER)
    if (allowed := _of_row(draws.allowed, i)) is not None:
        kept = np.full_like(logits, NEVER)
        kept[allowed[0]] = logits[allowed[0]]
        logits = kept
    if (edits := _of_row(draws.edits, i)) is not None:
        logits[edits[0]] += edits[1]
    draw = draws.table[i]
    if draw["has_penalties"] and (history := _of_row(draws.history, i)) is not None:
        seen, counts = np.unique(history[0], return_counts=True)
        in_prompt = np.bincount(history[0][: draw["num_prompt"]], minlength=len(logits))[seen]
        logits[seen] = penalized(logits[seen], (counts - in_prompt).astype(np.float32), draw)
    if (taxes := _of_row(draws.taxes, i)) is not None:
        token, tax = taxes
        logits[token] = np.where(np.isinf(tax), NEVER, saturated(logits[token] - tax, logits[token]))
    return logits


def _of_row(lists: TokenLists | None, i: int) -> tuple[NDArray[np.int32], Any] | None:
    """Tokens and numbers of a row, if it has any."""
    if lists is None or lists.begin[i] == lists.begin[i + 1]:
        return None
    there = slice(lists.begin[i], lists.begin[i + 1])
    return lists.token[there], None if lists.value is None else lists.value[there]


def penalized(logits: Row, counts: Row, draw: np.void) -> Row:
    """Logits of tokens of the log: repetition for all of them, the others by `counts` in the output."""
    repetition, presence, frequency = (draw[f"{name}_penalty"] for name in ("repetition", "presence", "frequency"))
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        repeated = saturated(np.where(logits > 0, logits / repetition, logits * repetition), logits)
    return saturated((repeated - frequency * counts) - presence * (counts > 0).astype(np.float32), logits)


def saturated(edited: Row, before: Row) -> Row:
    """Logits that an edit has driven out of float32's range stop at its end; those that were banned stay so."""
    return np.where(before == NEVER, NEVER, np.clip(edited, -LARGEST, LARGEST))


# -- weights ----------------------------------------------------------------------------------------------------------


def weights(logits: Row) -> Weights:
    """exp(logit) of logits that are at most 0, as multiples of 2^-33."""
    live = logits >= LEAST
    x = np.where(live, logits, np.float32(0))
    n = (x * LOG2_E + TO_INTEGER) - TO_INTEGER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = EXP[0] * r + EXP[1]
    for c in EXP[2:]:
        p = p * r + c
    p = (p * (r * r) + r) + np.float32(1)
    weight = (p.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)
    weight = np.where(weight < TO_UNIT, (weight + TO_UNIT) - TO_UNIT, weight)
    return np.where(live, weight, np.float32(0)).astype(np.float64)


def cooled(logits: Row, temperature: np.float32) -> Row:
    """Logits divided by the temperature. The largest becomes 0, so that none can overflow upwards."""
    with np.errstate(over="ignore"):
        return np.asarray((logits - logits.max()) / temperature)


def log_softmax(logits: Row) -> Row:
    """Log-probabilities."""
    below = cooled(logits, np.float32(1))
    return np.asarray((below.astype(np.float64) - np.log(weights(below).sum())).astype(np.float32))


# -- draws ------------------------------------------------------------------------------------------------------------


def drawn(logits: Row, draw: np.void, first: float, second: float) -> int:
    """The token that two random numbers draw from edited logits."""
    scaled = cooled(logits, draw["temperature"])
    if not draw["is_filtered"]:
        weight = weights(scaled)
        return falls_on(np.where(weight >= draw["min_p"], weight, 0.0), first)
    if draw["typical_p"] < 1:
        scaled = keep_typical(scaled, draw["typical_p"])
    tokens = keep_likely(scaled, draw)
    if second < draw["xtc_probability"]:
        tokens = exclude_top_choices(tokens, weights(scaled[tokens]), draw["xtc_threshold"])
    # The first one left is the largest, and weighs 1.
    return int(tokens[falls_on(weights(scaled[tokens] - scaled[tokens[0]]), first)])


def keep_typical(logits: Row, mass: np.float32) -> Row:
    """Locally typical sampling: the tokens whose surprise is nearest to the entropy, up to `mass`.

    The surprise of a token less the entropy is the mean logit less its own.
    """
    weight = weights(logits)
    moments = weight * np.where(weight > 0, logits, 0)
    mean = np.float32(((moments + MOMENT_TO_UNIT) - MOMENT_TO_UNIT).sum() / weight.sum())
    order = np.argsort(np.abs(logits - mean), kind="stable")[: np.count_nonzero(logits > NEVER)]
    tokens = order[: _num_inside(weight[order], mass * weight.sum())]
    kept = np.full_like(logits, NEVER)
    kept[tokens] = logits[tokens] - logits[tokens].max()
    return kept


def keep_likely(logits: Row, draw: np.void) -> NDArray[np.intp]:
    """Top-k, then top-p among what is left, then min-p: the tokens that stay, in order of likelihood."""
    order = np.argsort(-logits, kind="stable")[: np.count_nonzero(logits > NEVER)]
    order = order[: draw["top_k"]]
    weight = weights(logits[order])
    if draw["top_p"] < 1:
        order = order[: _num_inside(weight, np.float64(draw["top_p"]) * weight.sum())]
        weight = weight[: len(order)]
    kept: NDArray[np.intp] = order[weight >= draw["min_p"]]
    return kept


def _num_inside(weight: Weights, mass: float) -> int:
    """How many tokens come before the mass is reached; never none."""
    before = np.cumsum(weight) - weight
    return max(1, int(np.count_nonzero(before < mass)))


def exclude_top_choices(tokens: NDArray[np.intp], weight: Weights, threshold: np.float32) -> NDArray[np.intp]:
    """XTC on tokens in order of likelihood: drop those above the threshold but the least likely one."""
    above = weight >= np.float64(threshold) * weight.sum()
    kept: NDArray[np.intp] = tokens[~(above & np.append(above[1:], False))]
    return kept


def falls_on(weight: Weights, uniform: float) -> int:
    """On which of the weights a number in [0, 1) falls, by their running sum."""
    running = np.cumsum(weight)
    place = int(np.searchsorted(running, uniform * running[-1], side="right"))
    return min(place, int(np.flatnonzero(weight)[-1]))  # rounding may point past the last one that is not 0
