"""The steps of sampling on [rows, vocab] tensors. What a row gets depends on that row alone."""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = float("-inf")
LARGEST = torch.finfo(torch.float32).max


def saturate(edited: Tensor, before: Tensor) -> Tensor:
    """Logits that an edit has driven out of float32's range stop at its end; those that were banned stay so."""
    return edited.clamp(-LARGEST, LARGEST).masked_fill(before == NEVER, NEVER)


def penalize(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Repetition over prompt and output (`seen`), presence and frequency over the output (`counts`)."""
    factor = torch.where(seen, repetition[:, None], torch.ones_like(logits))
    repeated = saturate(torch.where(logits > 0, logits / factor, logits * factor), logits)
    return saturate(repeated - frequency[:, None] * counts - presence[:, None] * (counts > 0), logits)


def tax(logits: Tensor, taxes: Tensor) -> Tensor:
    """Single logits less what the rules take off them; infinity bans."""
    return saturate(logits - taxes, logits).masked_fill(taxes.isinf(), NEVER)


def cool(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits divided by the temperature. The largest becomes 0, so that none can overflow upwards."""
    return (logits - logits.max(dim=-1, keepdim=True).values) / temperature[:, None]


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
    inside_p = (before < top_p[:, None]) | (rank == 0)
    inside_min = ordered >= ordered[:, :1] + min_p[:, None].log()
    return kept_k.masked_fill(~(inside_p & inside_min), NEVER)


def exclude_top_choices(ordered: Tensor, threshold: Tensor, struck: Tensor) -> Tensor:
    """XTC on logits in falling order: where `struck`, drop the tokens above the threshold but the least likely one."""
    probs = ordered.softmax(dim=-1)
    above = probs >= threshold[:, None]
    next_above = torch.cat([above[:, 1:], torch.zeros_like(above[:, :1])], dim=-1)
    return ordered.masked_fill(above & next_above & struck[:, None], NEVER)


def draw(logits: Tensor, uniform: Tensor) -> Tensor:
    """Column of the token that a number in [0, 1) falls on, by the running sum of the probabilities."""
    weights = (logits - logits.max(dim=-1, keepdim=True).values).exp().to(torch.float64)
    running = weights.cumsum(dim=-1)
    wanted = uniform.to(torch.float64)[:, None] * running[:, -1:]
    column = (running <= wanted).sum(dim=-1)
    # Rounding may point past the last token that has any weight.
    last = logits.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(column, last)
