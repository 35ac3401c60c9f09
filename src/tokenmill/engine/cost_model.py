"""How long a step will take, learnt from the steps so far, and how large a prefill chunk may be because of it.

Seconds = a + b * tokens + c * cells read, fitted by least squares with slow forgetting. A chunk is never more than
twice the largest one measured, so that a model with few observations is not trusted far beyond them.
"""

from __future__ import annotations

import math

import numpy as np

from tokenmill.engine.plan import Draft

MIN_CHUNK = 8
"""Prefill tokens given even when decoding alone takes longer than the target: prompts must finish, too."""
FIRST_CHUNK = 32
FORGET = 0.98
TOKENS, CELLS = 1e3, 1e6


class CostModel:
    """Predicts the duration of a step. `error` is what it has been off by lately, as a fraction."""

    def __init__(self) -> None:
        self._moments = np.eye(3) * 1e-9
        self._products = np.zeros(3)
        self._coefficients: tuple[float, float, float] | None = None
        self._num_observed = 0
        self.error = 0.0
        self.largest_prefill = 0
        """Most prefill tokens measured in one step."""

    def observe(self, num_tokens: int, attention: float, seconds: float, num_prefill: int) -> None:
        predicted = self.predict(num_tokens, attention)
        if predicted is not None and seconds > 0:
            self.error = max(abs(predicted - seconds) / seconds, FORGET * self.error)
        features = np.array([1.0, num_tokens / TOKENS, attention / CELLS])
        self._moments = FORGET * self._moments + np.outer(features, features)
        self._products = FORGET * self._products + features * seconds
        self._num_observed += 1
        self._coefficients = None
        self.largest_prefill = max(self.largest_prefill, num_prefill)

    def predict(self, num_tokens: int, attention: float) -> float | None:
        """Seconds for such a step; None before there is anything to go by."""
        if self._num_observed < 3:
            return None
        if self._coefficients is None:
            solved = np.linalg.solve(self._moments + np.eye(3) * 1e-9 * np.trace(self._moments), self._products)
            base, per_token, per_cell = (max(0.0, float(c)) for c in solved)
            self._coefficients = (base, per_token / TOKENS, per_cell / CELLS)
        base, per_token, per_cell = self._coefficients
        return base + per_token * num_tokens + per_cell * attention

    def largest_chunk(self, draft: Draft, num_computed: int, target_s: float) -> int:
        """Prefill tokens at position `num_computed` that fit beside what the step already holds."""
        already = draft.num_tokens - len(draft.decodes)
        limit = max(FIRST_CHUNK, 2 * self.largest_prefill) - already
        least = MIN_CHUNK if already == 0 else 0
        base = self.predict(draft.num_tokens, draft.attention)
        if base is None or self._coefficients is None:
            return max(least, FIRST_CHUNK - already)
        _, per_token, per_cell = self._coefficients
        # base + n * linear + n^2 * square <= target
        room, linear, square = target_s - base, per_token + per_cell * num_computed, per_cell / 2
        if room <= 0:
            return least
        if square > 0:
            fits = (math.sqrt(linear * linear + 4 * square * room) - linear) / (2 * square)
        else:
            fits = room / linear if linear > 0 else limit
        return max(least, int(min(fits, limit)))
