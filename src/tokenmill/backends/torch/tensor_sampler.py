"""Sampling on tensors, where they are: on a card in Triton kernels, elsewhere in torch.

On the CPU every operation is that of `tokenmill.sampling.definition` on [rows, vocab] tensors, to the last bit. On a
card logits are edited in torch without waiting for it, and one kernel does the whole draw: the same tokens, but where
the rounding of a sum decides.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tokenmill.backends.torch.kernels.device import largest, masked, upload
from tokenmill.contract import BAD_ROW, Mask, Sampled
from tokenmill.contract.draws import (
    EXP,
    KEY,
    LEAST,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    MOMENT_TO_UNIT,
    TO_INTEGER,
    TO_UNIT,
    Draws,
    TokenLists,
)

NEVER = float("-inf")
LARGEST = torch.finfo(torch.float32).max
DRAW_FIELDS = (*KEY, "temperature", "top_k", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold")
"""What the kernel is told of each row, as int64; floats are given by their bits as float32."""


@torch.inference_mode()
def sample(draws: Draws, logits: Tensor, mask: Mask | None) -> Sampled:
    """The ids of a step's draws; ids and log-probabilities are on the device of the logits."""
    if logits.is_cuda:
        return _sample_on_card(draws, logits, mask)
    raw = logits.to(torch.float32)
    changed = edited(draws, raw, mask)
    (top, _), (top_left, ids) = largest(raw), largest(changed)
    bad = ~top.isfinite() | ~top_left.isfinite()
    is_random = column(draws, "temperature", raw) > 0
    ids = torch.where(is_random, _drawn(draws, changed.masked_fill(bad[:, None], 0.0)), ids)
    extras = _logprobs(draws, raw, ids, log_softmax(raw)) if draws.num_logprobs >= 0 else {}
    return Sampled(torch.where(bad, BAD_ROW, ids).to(torch.int32), extras)


def _sample_on_card(draws: Draws, raw: Tensor, mask: Mask | None) -> Sampled:
    from tokenmill.backends.torch.kernels.drawing import draw  # needs triton

    table = draws.table
    told = np.zeros((len(table), len(DRAW_FIELDS)), dtype=np.int64)
    for i, name in enumerate(DRAW_FIELDS):
        told[:, i] = table[name] if table[name].dtype == np.int64 else table[name].view(np.int32)
    options = {
        "is_filtered": bool(table["is_filtered"].any()),
        "is_typical": bool((table["typical_p"] < 1).any()),
    }
    has_edits = any(lists is not None for lists in (draws.allowed, draws.edits, draws.history, draws.taxes))
    if not has_edits and draws.num_logprobs < 0:
        logits = raw if mask is None else masked(raw, mask)
        return Sampled(draw(logits, upload(told, raw.device), BAD_ROW, **options))
    # A row that has a NaN fails, whatever is masked.
    bad = ~largest(raw)[0].isfinite()
    changed = edited(draws, raw, mask)
    bad |= ~largest(changed)[0].isfinite()
    ids = draw(changed.masked_fill(bad[:, None], 0.0), upload(told, raw.device), BAD_ROW, **options).to(torch.int64)
    extras: dict[str, Tensor] = {}
    if draws.num_logprobs >= 0:
        extras = _logprobs(draws, raw, ids, raw.to(torch.float32).log_softmax(dim=-1))
    return Sampled(torch.where(bad, BAD_ROW, ids).to(torch.int32), extras)


def _logprobs(draws: Draws, raw: Tensor, ids: Tensor, logprobs: Tensor) -> dict[str, Tensor]:
    """Of the drawn tokens and of the likeliest ones of every row, under the model's own distribution."""
    count = min(draws.num_logprobs, raw.shape[-1])
    top_ids = logprobs.topk(count, dim=-1).indices if raw.is_cuda else in_order(raw)[1][:, :count]
    chosen = logprobs.gather(-1, ids[:, None])[:, 0]
    return {"logprob": chosen, "top_logprobs": logprobs.gather(-1, top_ids), "top_ids": top_ids}


def resized(logits: Tensor, vocab_size: int) -> Tensor:
    """Logits of a draft model, whose vocabulary may be padded to another size."""
    missing = vocab_size - logits.shape[1]
    if missing == 0:
        return logits
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=NEVER)
    return logits[:, :vocab_size].contiguous()


def column(draws: Draws, name: str, like: Tensor) -> Tensor:
    """A parameter of all rows, on the device."""
    return upload(draws.table[name], like.device)


# -- edits ------------------------------------------------------------------------------------------------------------


def edited(draws: Draws, raw: Tensor, mask: Mask | None) -> Tensor:
    """The logits with masks, allow-lists, bias and bans, penalties and rules applied, in this order; `raw` stays."""
    logits = raw.to(torch.float32, copy=True) if mask is None else masked(raw, mask).to(torch.float32)
    if draws.allowed is not None:
        _keep_only(logits, draws.allowed)
    if draws.edits is not None:
        at = _places(draws.edits, logits)
        logits[at] += _values(draws.edits, logits)
    if draws.history is not None:
        _penalize(draws, draws.history, logits)
    if draws.taxes is not None:
        at = _places(draws.taxes, logits)
        logits[at] = taxed(logits[at], _values(draws.taxes, logits))
    return logits


def _places(lists: TokenLists, like: Tensor) -> tuple[Tensor, Tensor]:
    return upload(lists.places, like.device), upload(lists.token.astype(np.int64), like.device)


def _values(lists: TokenLists, like: Tensor) -> Tensor:
    assert lists.value is not None, "these lists have a number for each token"
    return upload(lists.value, like.device)


def _keep_only(logits: Tensor, allowed: TokenLists) -> None:
    """Rule out all tokens but those listed, in the rows that have a list."""
    at = _places(allowed, logits)
    kept = logits[at]
    # Not by assignment, which would wait for the copy of the number.
    logits.index_fill_(0, upload(np.flatnonzero(allowed.counts), logits.device), NEVER)
    logits[at] = kept


def _penalize(draws: Draws, history: TokenLists, logits: Tensor) -> None:
    """Penalties on the tokens of each row's log, each of them once."""
    places = history.places
    is_output = np.arange(len(places)) - history.begin[places] >= draws.table["num_prompt"][places]
    keys, firsts = np.unique(places * logits.shape[1] + history.token, return_inverse=True)
    counts = np.bincount(firsts.ravel(), weights=is_output, minlength=len(keys)).astype(np.float32)
    rows, tokens = np.divmod(keys, logits.shape[1])
    at = (upload(rows, logits.device), upload(tokens, logits.device))
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = (upload(draws.table[name][rows], logits.device) for name in names)
    logits[at] = penalized(logits[at], upload(counts, logits.device), *penalties)


def penalized(logits: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Logits of tokens of the log: repetition for all of them, the others by `counts` in the output."""
    repeated = saturated(torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    return saturated(repeated - frequency * counts - presence * (counts > 0), logits)


def taxed(logits: Tensor, taxes: Tensor) -> Tensor:
    """Single logits less what the rules take off them; infinity bans."""
    return saturated(logits - taxes, logits).masked_fill(taxes.isinf(), NEVER)


def saturated(edited: Tensor, before: Tensor) -> Tensor:
    """Logits that an edit has driven out of float32's range stop at its end; those that were banned stay so."""
    return edited.clamp(-LARGEST, LARGEST).masked_fill(before == NEVER, NEVER)


# -- weights ----------------------------------------------------------------------------------------------------------


def weights(logits: Tensor) -> Tensor:
    """exp(logit) of logits that are at most 0, as multiples of 2^-33 in float64."""
    live = logits >= LEAST
    x = logits.masked_fill(~live, 0.0)
    n = (x * LOG2_E + TO_INTEGER) - TO_INTEGER
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = EXP[0] * r + EXP[1]
    for c in EXP[2:]:
        p = p * r + c
    p = (p * (r * r) + r) + 1.0
    weight = (p.view(torch.int32) + (n.to(torch.int32) << 23)).view(torch.float32)
    weight = torch.where(weight < TO_UNIT, (weight + TO_UNIT) - TO_UNIT, weight)
    return weight.masked_fill(~live, 0.0).to(torch.float64)


def cooled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits divided by the temperature. The largest becomes 0, so that none can overflow upwards."""
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities."""
    below = logits - logits.amax(dim=-1, keepdim=True)
    return (below.to(torch.float64) - weights(below).sum(dim=-1, keepdim=True).log()).to(torch.float32)


def in_order(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits in falling order and their tokens; equal ones by their ids."""
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    return values, order


# -- draws ------------------------------------------------------------------------------------------------------------


def _drawn(draws: Draws, logits: Tensor) -> Tensor:
    """A token for each row; of no meaning for greedy ones."""
    temperature = column(draws, "temperature", logits)
    scaled = cooled(logits, torch.where(temperature > 0, temperature, 1.0))
    first, second = (upload(numbers, logits.device) for numbers in draws.uniforms())
    min_p = column(draws, "min_p", logits)
    in_vocabulary_order = draw(scaled.masked_fill(weights(scaled) < min_p[:, None], NEVER), first)
    typical_p = column(draws, "typical_p", logits)
    scaled = torch.where(typical_p[:, None] < 1, keep_typical(scaled, typical_p), scaled)
    values, order = in_order(scaled)
    kept = keep_likely(values, column(draws, "top_k", logits), column(draws, "top_p", logits), min_p)
    is_struck = second < column(draws, "xtc_probability", logits)
    kept = exclude_top_choices(kept, column(draws, "xtc_threshold", logits), is_struck)
    by_likelihood = order.gather(-1, draw(kept, first)[:, None])[:, 0]
    return torch.where(column(draws, "is_filtered", logits) > 0, by_likelihood, in_vocabulary_order)


def keep_typical(logits: Tensor, mass: Tensor) -> Tensor:
    """Locally typical sampling: the tokens whose surprise is nearest to the entropy, up to `mass`; the largest is 0."""
    weight = weights(logits)
    moments = weight * logits.masked_fill(weight == 0, 0.0)
    total = weight.sum(dim=-1, keepdim=True)
    mean = (((moments + MOMENT_TO_UNIT) - MOMENT_TO_UNIT).sum(dim=-1, keepdim=True) / total).to(torch.float32)
    oddness, order = (logits - mean).abs().sort(dim=-1, stable=True)
    ordered = weight.gather(-1, order)
    before = ordered.cumsum(dim=-1) - ordered
    dropped = (before >= mass[:, None].to(torch.float64) * total) | oddness.isinf()
    dropped[:, 0] = False
    kept = logits.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), NEVER)
    return kept - kept.amax(dim=-1, keepdim=True)


def keep_likely(ordered: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Top-k, then top-p among what is left, then min-p, on logits in falling order of which the first is 0."""
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    kept = ordered.masked_fill(rank >= top_k[:, None], NEVER)
    weight = weights(kept)
    mass = top_p[:, None].to(torch.float64) * weight.sum(dim=-1, keepdim=True)
    before = weight.cumsum(dim=-1) - weight
    inside = (before < mass) | (top_p[:, None] >= 1) | (rank == 0)
    return kept.masked_fill(~(inside & (weight >= min_p[:, None])), NEVER)


def exclude_top_choices(ordered: Tensor, threshold: Tensor, struck: Tensor) -> Tensor:
    """XTC on logits in falling order: where `struck`, drop the tokens above the threshold but the least likely one."""
    weight = weights(ordered)
    floor = threshold[:, None].to(torch.float64) * weight.sum(dim=-1, keepdim=True)
    above = (weight >= floor) & (ordered > NEVER)  # at threshold 0, what is excluded already is not above
    next_above = torch.cat([above[:, 1:], torch.zeros_like(above[:, :1])], dim=-1)
    return ordered.masked_fill(above & next_above & struck[:, None], NEVER)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Column of the token that a number in [0, 1) falls on, by the running sum of the weights."""
    weight = weights(logits - logits.amax(dim=-1, keepdim=True))
    running = weight.cumsum(dim=-1)
    place = (running <= uniform[:, None] * running[:, -1:]).sum(dim=-1)
    # Rounding may point past the last one that is not 0.
    last = weight.shape[-1] - 1 - (weight > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(place, last)
