"""Requests come at the rate and with the burstiness that were asked for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tokenmill.bench.workloads import arrivals

COUNT, RATE = 20_000, 50.0


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrivals(3, math.inf) == [0.0, 0.0, 0.0]
    assert arrivals(0, math.inf) == []
    assert arrivals(0, RATE) == []


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_the_gaps_are_those_of_a_gamma_distribution(burstiness: float) -> None:
    moments = arrivals(COUNT, RATE, burstiness, seed=7)
    assert moments == sorted(moments)
    gaps = np.diff([0.0, *moments])
    assert gaps.mean() == pytest.approx(1 / RATE)
    variation = gaps.std() / gaps.mean()  # of a gamma distribution: 1 / sqrt(shape)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.03)


def test_burstiness_1_is_a_poisson_process() -> None:
    counts = np.histogram(arrivals(COUNT, RATE, seed=3), bins=np.arange(0, COUNT / RATE))[0]
    assert counts.mean() == pytest.approx(RATE, rel=0.02)
    assert counts.var() == pytest.approx(RATE, rel=0.2)


def test_infinite_burstiness_is_a_metronome() -> None:
    assert arrivals(4, 2.0, math.inf) == pytest.approx([0.5, 1.0, 1.5, 2.0])


def test_the_seed_decides_when_and_never_how_long() -> None:
    assert arrivals(100, RATE, seed=1) == arrivals(100, RATE, seed=1)
    assert arrivals(100, RATE, seed=1) != arrivals(100, RATE, seed=2)
    assert arrivals(100, RATE, seed=1)[-1] == pytest.approx(arrivals(100, RATE, seed=2)[-1]) == pytest.approx(2.0)


@pytest.mark.parametrize(("rate", "burstiness"), [(0.0, 1.0), (-1.0, 1.0), (1.0, 0.0)])
def test_what_is_not_positive_is_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        arrivals(1, rate, burstiness)
