"""When requests are sent: all at once, or at random with a given rate."""

from __future__ import annotations

import math

import numpy as np


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds from the start to each of `count` requests.

    `rate` is requests a second; infinite means all at once. The times between them are drawn from a gamma distribution
    of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is more even, infinite is a metronome.
    All are stretched so that the last one comes at count / rate: whatever the seed, a run sends as much in as long.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"rate and burstiness must be positive, not {rate:g} and {burstiness:g}")
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        gaps = np.full(count, 1 / rate)
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    moments = np.cumsum(gaps)
    if count and moments[-1] > 0:
        moments *= count / rate / moments[-1]
    return [float(moment) for moment in moments]
