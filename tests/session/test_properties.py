"""Whatever happens to whatever tree of sessions: every answer is that of its log computed anew, and nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from tests.conformance.operations import RandomChooser
from tests.session.tree import grow


@pytest.mark.req("B1", "B2", "R4", "R5", "R6", "R9", "G3", "G4", "G6", "G15")
@pytest.mark.parametrize("depth", [0, 1])
def test_random_trees_of_sessions(depth: int) -> None:
    for seed in range(60):
        try:
            asyncio.run(asyncio.wait_for(grow(RandomChooser(seed), depth, 40), 60))
        except Exception as error:
            raise AssertionError(f"seed {seed}, depth {depth}: {error}") from error
