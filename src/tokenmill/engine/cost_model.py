"""How long a step will take, learnt from the steps so far, and how large a prefill chunk may be because of it.

Seconds = a + b * tokens + c * cells read, fitted by least squares with slow forgetting. A chunk is never more than
twice the largest one measured, so that a model with few observations is not trusted far beyond them.
"""

from __future__ import annotations

import math

import numpy as np

from tokenmill.engine.plan import Draft

MIN_CHUNK = 8
"""Prefill tokens given whatever they cost: prompts must finish, too."""
MIN_SHARE = 0.5
"""Where decoding alone takes most of the target, prefill may take this part of its time."""
FIRST_CHUNK = 32
FORGET = 0.98
HELD_UP = 10.0
"""A step that took longer than so many times what was to be expected was held up: the machine was busy or asleep."""
SURE_AFTER = 16
"""Steps before anything is to be expected."""
TOKENS, CELLS = 1e3, 1e6


class CostModel:
    """Predicts the duration of a step. `error` is what it has been off by lately, as a fraction."""

    def __init__(self) -> None:
        # Decaying sums of 1, t, c, tt, tc, cc and of s, ts, cs: t tokens, c cells, s seconds.
        self._moments = [0.0] * 6
        self._products = [0.0] * 3
        self._coefficients: tuple[float, float, float] | None = None
        self._num_observed = 0
        self.error = 0.0
        self.largest_prefill = 0
        """Most prefill tokens measured in one step."""

    def observe(self, num_tokens: int, attention: float, seconds: float, num_prefill: int) -> None:
        if num_prefill:
            self._check_prediction(num_tokens, attention, seconds)
            self.largest_prefill = max(self.largest_prefill, num_prefill)
        seconds = self._without_delay(num_tokens, attention, seconds)
        t, c = num_tokens / TOKENS, attention / CELLS
        self._moments = [FORGET * m + x for m, x in zip(self._moments, (1.0, t, c, t * t, t * c, c * c), strict=True)]
        self._products = [FORGET * p + x * seconds for p, x in zip(self._products, (1.0, t, c), strict=True)]
        self._num_observed += 1
        self._coefficients = None

    def _without_delay(self, num_tokens: int, attention: float, seconds: float) -> float:
        """One step that was held up for long must not make a hundred others seem slow; many that are slow still do."""
        is_long = seconds * self._moments[0] > HELD_UP * self._products[0]  # beside the average: quick to find out
        if not is_long or self._num_observed < SURE_AFTER:
            return seconds
        expected = self.predict(num_tokens, attention)
        return min(seconds, HELD_UP * expected) if expected else seconds

    def _check_prediction(self, num_tokens: int, attention: float, seconds: float) -> None:
        predicted = self.predict(num_tokens, attention)
        if predicted is not None and seconds > 0:
            self.error = max(abs(predicted - seconds) / seconds, FORGET * self.error)

    def predict(self, num_tokens: int, attention: float) -> float | None:
        """Seconds for such a step; None before there is anything to go by."""
        if self._num_observed < 3:
            return None
        base, per_token, per_cell = self._fit()
        return base + per_token * num_tokens + per_cell * attention

    def _fit(self) -> tuple[float, float, float]:
        """Seconds a step, a token, a cell. A little damping keeps steps that are all alike from spoiling it."""
        if self._coefficients is None:
            n, t, c, tt, tc, cc = self._moments
            matrix = np.array([[n, t, c], [t, tt, tc], [c, tc, cc]])
            damping = np.eye(3) * (1e-9 * (n + tt + cc) + 1e-12)
            base, per_token, per_cell = (max(0.0, float(x)) for x in np.linalg.solve(matrix + damping, self._products))
            self._coefficients = (base, per_token / TOKENS, per_cell / CELLS)
        return self._coefficients

    def largest_chunk(self, draft: Draft, num_computed: int, target_s: float) -> int:
        """Prefill tokens at position `num_computed` that fit beside what the step already holds."""
        already = draft.num_tokens - len(draft.decodes)
        limit = max(FIRST_CHUNK, 2 * self.largest_prefill) - already
        least = MIN_CHUNK if already == 0 else 0
        so_far = self.predict(draft.num_tokens, draft.attention)
        decoding = self.predict(len(draft.decodes), draft.decode_attention)
        if so_far is None or decoding is None:
            return max(least, FIRST_CHUNK - already)
        _, per_token, per_cell = self._fit()
        # so far + n * linear + n^2 * square <= allowed
        room = max(target_s, (1 + MIN_SHARE) * decoding) - so_far
        linear, square = per_token + per_cell * num_computed, per_cell / 2
        if room <= 0:
            return least
        if square > 0:
            fits = (math.sqrt(linear * linear + 4 * square * room) - linear) / (2 * square)
        else:
            fits = room / linear if linear > 0 else limit
        return max(least, int(min(fits, limit)))
