"""`CostModel`: predicts the duration of a step and bounds prefill chunks by it. Owned by the engine core's thread.

Steps of two kinds have costs of their own: those that only decode (a replayed CUDA graph, say) and those with prompt
tokens (launched kernel by kernel). For each kind

    seconds = fixed + per_token * tokens + per_cell * cells read by attention

Proposed tokens cost what steps that verify some took beyond decoding, for each of them: the median of the latest.
A single line through both would charge the launch cost of prompt steps to their tokens, and chunks would collapse.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

import numpy as np

from tokenmill.engine.plan import Draft

MIN_SHARE = 0.5
"""Where decoding alone takes most of the target, prefill may take this fraction of its time."""
FIRST_CHUNK = 32
WINDOW = 64
"""Steps of a kind that its fit is made from."""
ENOUGH = 3
"""Observations before a prediction is made."""
ROUNDS = 6
DAMPING = 0.02
"""Strength of the previous slopes: the data decide once sizes vary by more than about 15 %."""
FADING = 0.95
"""Of the slopes, each time that they allow less than the smallest chunk."""
TOLERANCE = 0.01
"""Residuals below this fraction of a typical step weigh alike."""
FORGET = 0.98


FEW_STEPS = 33
LONG_AGO = 64
"""Decode steps after which what is known of proposed tokens is doubted: a few are tried again."""
LEAST = 0.02
"""A proposed token costs this fraction of a decode token's step at least."""
GUESSED = 0.25
"""What a proposed token costs before that is known, as a fraction of what a step costs whatever is in it."""


@dataclass(frozen=True)
class Price:
    """Seconds of a step as it is, and of each proposed token beside it."""

    base: float
    each: float
    is_guessed: bool = False
    """Nothing was verified yet, or not for long."""


class StepFit:
    """Duration of one kind of step, fitted to the latest ones.

    Least absolute deviations, by iteratively reweighted least squares: a compilation, a swapped-out process or a slow
    start moves the fit only once such steps are the majority. Steps of one size can't tell the fixed cost from the
    slopes; then the previous slopes hold.
    """

    def __init__(self) -> None:
        self._steps = np.zeros((WINDOW, 3))  # tokens, cells, seconds
        self._num_prefill = np.zeros(WINDOW, dtype=np.int64)
        self._num_observed = 0
        self._fixed, self._slopes = 0.0, np.zeros(2)
        self._is_stale = False

    def observe(self, num_tokens: int, attention: float, seconds: float, num_prefill: int) -> None:
        place = self._num_observed % WINDOW
        self._steps[place] = num_tokens, attention, seconds
        self._num_prefill[place] = num_prefill
        self._num_observed += 1
        self._is_stale = True

    def assume(self, per_token: float) -> None:
        """Start from this slope until the steps differ enough in size to tell."""
        self._slopes = np.array([per_token, 0.0])
        self._is_stale = True

    def doubt(self) -> None:
        """Chunks are as small as they get, so nothing will show that the slopes are too large: let them fade."""
        self._slopes = FADING * self._slopes
        self._is_stale = True

    @property
    def is_known(self) -> bool:
        return self._num_observed >= ENOUGH

    @property
    def largest_prefill(self) -> int:
        """Most prompt tokens in one of the latest steps."""
        return int(self._num_prefill.max())

    @property
    def slopes(self) -> tuple[float, float]:
        """Seconds per token and per cell."""
        self._fit()
        return float(self._slopes[0]), float(self._slopes[1])

    def predict(self, num_tokens: int, attention: float) -> float | None:
        """Seconds for such a step; None before enough of them were seen."""
        if not self.is_known:
            return None
        per_token, per_cell = self.slopes
        return self._fixed + per_token * num_tokens + per_cell * attention

    def _fit(self) -> None:
        if not self._is_stale:
            return
        self._is_stale = False
        tokens, cells, seconds = self._steps[: min(self._num_observed, WINDOW)].T
        scale = np.maximum([tokens.mean(), cells.mean()], 1.0)
        sizes = np.stack([tokens, cells]) / scale[:, None]
        before = slopes = self._slopes * scale
        floor = TOLERANCE * float(np.median(seconds)) + 1e-9
        weights = np.full(len(seconds), 1 / len(seconds))
        for _ in range(ROUNDS):
            center, typical = sizes @ weights, seconds @ weights
            off = sizes - center[:, None]
            gram = (off * weights) @ off.T + DAMPING * np.eye(2)
            change = np.linalg.solve(gram, (off * weights) @ (seconds - typical - before @ off))
            slopes = np.maximum(before + change, 0.0)
            fixed = float(typical - slopes @ center)
            weights = 1 / np.maximum(np.abs(seconds - fixed - slopes @ sizes), floor)
            weights /= weights.sum()
        self._fixed, self._slopes = fixed, slopes / scale


class CostModel:
    """Predicts the duration of steps. `error` is its latest relative error on steps with prompt tokens, decaying."""

    def __init__(self, min_chunk: int = 8) -> None:
        self.error = 0.0
        self._min_chunk = min_chunk
        """Prompt tokens given whatever they cost: prompts must finish, too."""
        self._decode, self._prefill = StepFit(), StepFit()
        self._each_proposed: deque[float] = deque(maxlen=FEW_STEPS)
        """Seconds that each proposed token took, in the latest steps that had some and no prompts..."""
        self._since_proposed = 0
        """...and the decode steps since."""

    def observe(
        self, num_tokens: int, attention: float, seconds: float, num_prefill: int, num_proposed: int = 0
    ) -> None:
        """Learn from a step of so many tokens, `num_prefill` of them of prompts, `num_proposed` to be verified."""
        if num_proposed and not num_prefill:
            self._observe_proposed(num_tokens, attention, seconds, num_proposed)
            return
        kind = self._kind(num_prefill)
        self._since_proposed += not num_prefill
        if num_prefill:
            predicted = kind.predict(num_tokens, attention)
            if predicted is None:  # all that it took beyond decoding is charged to the tokens, for now
                decoding = self._decode.predict(num_tokens - num_prefill, 0.0) or 0.0
                kind.assume(max(0.0, seconds - decoding) / num_prefill)
            elif seconds > 0:
                self.error = max(abs(predicted - seconds) / seconds, FORGET * self.error)
        kind.observe(num_tokens, attention, seconds, num_prefill)

    def predict(self, num_tokens: int, attention: float, num_prefill: int = 0, num_proposed: int = 0) -> float | None:
        """Seconds for such a step; None before enough of its kind were seen."""
        if num_prefill or not num_proposed:
            return self._kind(num_prefill).predict(num_tokens, attention)
        decoding = self._decode.predict(num_tokens - num_proposed, attention)
        each = statistics.median(self._each_proposed) if self._each_proposed else 0.0
        return None if decoding is None else decoding + num_proposed * max(0.0, each)

    def _observe_proposed(self, num_tokens: int, attention: float, seconds: float, num_proposed: int) -> None:
        decoding = self._decode.predict(num_tokens - num_proposed, attention * (1 - num_proposed / num_tokens))
        if decoding is not None:
            self._each_proposed.append((seconds - decoding) / num_proposed)
            self._since_proposed = 0

    def _kind(self, num_prefill: int) -> StepFit:
        return self._prefill if num_prefill else self._decode

    def price(self, draft: Draft) -> Price | None:
        """What proposed tokens cost beside what the step already holds; None before its own cost is known."""
        per_cell, num_tokens = draft.attention / max(draft.num_tokens, 1), draft.num_tokens
        kind = self._prefill if draft.chunks else self._decode
        base = kind.predict(num_tokens, draft.attention)
        if not base:
            return None
        if draft.chunks:
            each, read = self._prefill.slopes
            return Price(base, each + read * per_cell)
        if len(self._each_proposed) < ENOUGH or self._since_proposed > LONG_AGO:
            return Price(base, base * GUESSED / (1 + GUESSED * num_tokens), is_guessed=True)
        return Price(base, max(statistics.median(self._each_proposed), LEAST * base / num_tokens))

    def largest_chunk(self, draft: Draft, num_computed: int, target_s: float) -> int:
        """Prefill tokens at position `num_computed` that fit beside what the step already holds.

        At most twice what was measured lately, so that a fit is not trusted far beyond its observations.
        """
        already = draft.num_tokens - len(draft.decodes)
        limit = max(FIRST_CHUNK, self._min_chunk, 2 * self._prefill.largest_prefill) - already
        least = self._min_chunk - already
        decoding = self._decode.predict(len(draft.decodes), draft.decode_attention) or 0.0
        allowed = max(target_s, (1 + MIN_SHARE) * decoding)
        so_far = self._prefill.predict(draft.num_tokens, draft.attention)
        if so_far is None:  # a prompt token costs no more than one that is decoded, or than those seen so far
            per_token = decoding / len(draft.decodes) if len(draft.decodes) else self._prefill.slopes[0]
            chunk = _tokens_in(allowed - decoding, per_token, 0.0, 0, limit + already) - already
            return max(0, min(limit, max(chunk, least)))
        per_token, per_cell = self._prefill.slopes
        chunk = _tokens_in(allowed - so_far, per_token, per_cell, num_computed, limit)
        # Any prompt token costs this much more than decoding alone: a chunk is worth that once it takes as long itself.
        entry = (self._prefill.predict(len(draft.decodes), draft.decode_attention) or 0.0) - decoding
        worthwhile = _tokens_in(entry, per_token, per_cell, num_computed, limit + already) - already
        if max(chunk, worthwhile) < least:
            self._prefill.doubt()
        return max(0, min(limit, max(chunk, worthwhile, least)))


def _tokens_in(seconds: float, per_token: float, per_cell: float, num_computed: int, most: int) -> int:
    """How many tokens from position `num_computed` on are computed in this time: n * linear + n^2 * square."""
    linear, square = per_token + per_cell * num_computed, per_cell / 2
    if seconds <= 0:
        return 0
    if linear * most + square * most * most <= seconds:
        return most
    return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)))
