"""Sampling once more, one row at a time, in plain numpy: what the batched one must agree with."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tokenmill.params import SamplingParams

Row = np.ndarray
ROUNDING = 1e-5
"""What sums and edited logits in float32 may be off by."""


def softmax(logits: Row) -> Row:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def edited(logits: Row, params: SamplingParams, log: list[int], num_prompt: int, stop_ids: frozenset[int]) -> Row:
    """Bias, bans, allow-list, min_tokens, penalties, then DRY."""
    logits = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        for token in range(len(logits)):
            if token not in params.allowed_token_ids:
                logits[token] = -np.inf
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    for token in params.banned_token_ids:
        logits[token] = -np.inf
    if len(log) < num_prompt + params.min_tokens:
        for token in stop_ids:
            logits[token] = -np.inf
    output = log[num_prompt:]
    for token in set(log):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.dry_multiplier:
        for token, tax in dry(log, params).items():
            logits[token] -= tax
    return logits


def dry(log: list[int], params: SamplingParams) -> dict[int, float]:
    """For every token: the longest suffix of the log that was followed by it before."""
    window = log[-params.dry_range :] if params.dry_range else log
    taxed: dict[int, float] = {}
    for token in set(window):
        longest = 0
        for place in range(1, len(window)):
            if window[place] != token:
                continue
            length = 0
            while length < place and window[place - 1 - length] == window[len(window) - 1 - length]:
                length += 1
            longest = max(longest, length)
        if longest >= params.dry_allowed_length:
            taxed[token] = params.dry_multiplier * params.dry_base ** (longest - params.dry_allowed_length)
    return taxed


def kept(logits: Row, params: SamplingParams) -> list[int]:
    """The tokens that temperature and the filters leave, without XTC."""
    scaled = logits / params.temperature
    tokens = [token for token in range(len(scaled)) if scaled[token] > -np.inf]
    if params.typical_p < 1:
        probs = softmax(scaled)
        entropy = -sum(probs[t] * math.log(probs[t]) for t in tokens if probs[t] > 0)
        tokens.sort(key=lambda t: abs(-math.log(probs[t]) - entropy) if probs[t] > 0 else math.inf)
        tokens = _until(tokens, [probs[t] for t in tokens], params.typical_p)
    tokens.sort(key=lambda t: (-scaled[t], t))
    if params.top_k > 0:
        tokens = tokens[: params.top_k]
    if params.top_p < 1:
        among = np.full_like(scaled, -np.inf)
        among[tokens] = scaled[tokens]
        probs = softmax(among)
        tokens = _until(tokens, [probs[t] for t in tokens], params.top_p)
    best = max(scaled[t] for t in tokens)
    return [t for t in tokens if params.min_p == 0 or scaled[t] >= best + math.log(params.min_p)]


def _until(tokens: list[int], probs: list[float], mass: float) -> list[int]:
    total, chosen = 0.0, []
    for token, prob in zip(tokens, probs, strict=True):
        if total >= mass and chosen:
            break
        chosen.append(token)
        total += prob
    return chosen


def distribution(logits: Row, params: SamplingParams) -> Row:
    """Probability of each token, without XTC."""
    among = np.full(len(logits), -np.inf)
    tokens = kept(logits, params)
    among[tokens] = logits[tokens] / params.temperature
    return softmax(among)


def may_be_drawn(edited: Row, params: SamplingParams, first: float, second: float) -> set[int]:
    """The token that these two random numbers draw; more than one where rounding decides, none if there is none.

    `edited` are the logits after `edited()`. The numbers are compared with running sums, and so are the thresholds:
    each may be off by `ROUNDING`.
    """
    if not np.isfinite(edited.max()):
        return set()
    if params.temperature < 1e-5:
        return set(np.flatnonzero(edited >= edited.max() - ROUNDING).tolist())
    found = set()
    for nudge in (-ROUNDING, 0.0, ROUNDING):
        tokens = _candidates(edited, params, nudge, second < params.xtc_probability)
        probs = softmax(edited[tokens] / params.temperature)
        for number in (first - ROUNDING, first, first + ROUNDING):
            found.add(_fall(tokens, probs, number))
    return found


def _candidates(edited: Row, params: SamplingParams, nudge: float, is_struck: bool) -> list[int]:
    """The tokens among which one is drawn, in the order of the draw, with all thresholds nudged."""
    nudged = {
        name: min(max(value + nudge, 1e-9), 1.0)
        for name in ("top_p", "typical_p", "min_p")
        if 0 < (value := getattr(params, name)) < 1
    }
    tokens = kept(edited, replace(params, **nudged))
    is_filtered = params.top_k > 0 or params.top_p < 1 or params.typical_p < 1 or params.xtc_probability > 0
    if not is_filtered:
        return sorted(tokens)
    if is_struck:
        probs = softmax(edited[tokens] / params.temperature)
        above = [token for token, prob in zip(tokens, probs, strict=True) if prob >= params.xtc_threshold + nudge]
        tokens = [token for token in tokens if token not in above[:-1]]
    return tokens


def _fall(tokens: list[int], probs: Row, number: float) -> int:
    total = 0.0
    for token, prob in zip(tokens, probs.tolist(), strict=True):
        total += prob
        if number < total:
            return token
    return tokens[-1]
