"""Whatever runs together: every request says what it says alone, the rules hold in every tick, nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance.operations import RandomChooser
from tests.conformance.test_state_machine import HypothesisChooser
from tests.conformance.torch_subject import make_deterministic
from tests.engine.workload import play, workload

REQUIREMENTS = ("R5", "R8", "R11", "R12", "R14", "R16", "R17", "R18", "G7", "G9", "G11")


@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("depth", [0, 1])
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_nobody_notices_anybody_else(depth: int, data: st.DataObject) -> None:
    play(workload(HypothesisChooser(data), depth))


@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_notices_anybody_else_in_seeded_runs(depth: int) -> None:
    for seed in range(150):
        try:
            play(workload(RandomChooser(seed), depth))
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error


@pytest.mark.req(*REQUIREMENTS)
@pytest.mark.parametrize("depth", [0, 1])
def test_nobody_notices_anybody_else_on_torch(depth: int) -> None:
    """In deterministic mode ids can be compared; the model is small, its KV and its arithmetic are real."""
    for seed in range(1000, 1025):
        try:
            play(workload(RandomChooser(seed), depth), make_deterministic)
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error
