"""`Rates`: what an engine did in the last seconds. Used where it runs, and by whoever follows it from afar."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import floor

WINDOW_S = 10
LEAST_S = 0.5
"""A rate over less than this is noise."""


@dataclass(frozen=True)
class RateView:
    """By the second, but for the hit rate."""

    ticks: float = 0.0
    generated_tokens: float = 0.0
    prefill_tokens: float = 0.0
    hit_rate: float | None = None
    """Cached prompt tokens of those of the requests that started; None if none did."""


@dataclass
class _Second:
    number: int
    num_ticks: int = 0
    num_generated: int = 0
    num_prefill: int = 0
    num_prompt: int = 0
    num_cached: int = 0


class Rates:
    """Sums by second of the last `WINDOW_S`. One thread fills it."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S + 1)
        self._began: float | None = None

    def note_tick(self, at: float, num_generated: int, num_prefill: int) -> None:
        second = self._second(at)
        second.num_ticks += 1
        second.num_generated += num_generated
        second.num_prefill += num_prefill

    def note_start(self, at: float, num_prompt: int, num_cached: int) -> None:
        """A request started with so much of its prompt cached."""
        second = self._second(at)
        second.num_prompt += num_prompt
        second.num_cached += num_cached

    def now(self, at: float) -> RateView:
        first = floor(at) - WINDOW_S + 1
        seconds = [one for one in list(self._seconds) if first <= one.number <= at]
        if self._began is None or not seconds:
            return RateView()
        span = max(at - max(first, self._began), LEAST_S)
        prompt = sum(one.num_prompt for one in seconds)
        return RateView(
            ticks=sum(one.num_ticks for one in seconds) / span,
            generated_tokens=sum(one.num_generated for one in seconds) / span,
            prefill_tokens=sum(one.num_prefill for one in seconds) / span,
            hit_rate=sum(one.num_cached for one in seconds) / prompt if prompt else None,
        )

    def _second(self, at: float) -> _Second:
        number = floor(at)
        if self._began is None:
            self._began = at
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]
