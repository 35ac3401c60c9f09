"""`Tally`: a histogram that one thread fills and others may read: a list of counts and a sum, nothing else."""

from __future__ import annotations

from bisect import bisect_left

SHORT_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
"""Steps, and the time from a token to the next."""
LONG_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
"""What a whole request or one of its phases takes."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Tally:
    """How many values there were up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each bucket by itself; the last one has no bound."""
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """So many values that are the same."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def merge(self, other: Tally) -> None:
        """Add another one's values, as they are now."""
        for place, count in enumerate(other.counts.copy()):
            self.counts[place] += count
        self.total += other.total

    def cumulative(self) -> list[tuple[str, int]]:
        """Prometheus' buckets: each bound, as text, with the number of values up to it."""
        buckets, so_far = [], 0
        for bound, count in zip((*map(_text, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return buckets


def _text(bound: float) -> str:
    return repr(float(bound))
