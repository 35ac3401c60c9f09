"""Whatever happens to whatever tree of sessions: every answer is that of its log computed anew, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.operations import RandomChooser
from tests.session.tree import grow, run_within

pytestmark = pytest.mark.slow


@pytest.mark.req("B1", "B2", "R4", "R5", "R6", "R9", "G3", "G4", "G6", "G15")
@pytest.mark.parametrize("depth", [0, 1])
def test_random_trees_of_sessions(depth: int) -> None:
    for seed in range(30):
        try:
            run_within(60, grow(RandomChooser(seed), depth, 40))
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error


@pytest.mark.req("B1", "B2", "R4", "R5", "R6", "R9", "G3", "G4", "G6", "G15")
@pytest.mark.parametrize("depth", [0, 1])
def test_random_trees_of_sessions_with_a_store(depth: int, tmp_path: Path) -> None:
    """With restarts: the disk is as it must be after each operation."""
    for seed in range(12):
        try:
            run_within(60, grow(RandomChooser(seed), depth, 60, tmp_path / str(seed)))
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error
