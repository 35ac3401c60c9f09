"""What a user is told after an answer: how many tokens, how fast."""

from __future__ import annotations

import time


class Stopwatch:
    """Counts from the question to the first token and to the last."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._first: float | None = None

    def note_token(self) -> None:
        if self._first is None:
            self._first = time.monotonic()

    def summary(self, num_tokens: int, num_cached: int) -> str:
        """One line. The rate is that of the tokens after the first, which also waited for the prompt."""
        now = time.monotonic()
        first = self._first if self._first is not None else now
        rate = f", {(num_tokens - 1) / (now - first):.1f} tok/s" if num_tokens > 1 and now > first else ""
        reused = f", {num_cached} prompt tokens cached" if num_cached else ""
        return f"{num_tokens} tokens{rate}, TTFT {first - self._began:.2f} s{reused}"
