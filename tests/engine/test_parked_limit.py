"""Where parked KV slows steps down, what plain requests leave behind is limited while others run."""

from __future__ import annotations

import pytest

from tests.engine.helpers import make_engine, request, run
from tokenmill.engine.core import EngineCore

PROMPT = 18
"""And two new tokens, of which the last has no KV: 19 cells, in 5 blocks of 4."""


def answer(engine: EngineCore, number: int, owner: str | None = None) -> None:
    engine.add(request(f"r{number}", [number, *range(PROMPT - 1)], max_new_tokens=2, owner=owner))
    run(engine)
    engine.check_integrity()


@pytest.mark.req("R4")
def test_the_oldest_goes_from_its_end_when_another_starts() -> None:
    engine = make_engine(fake={"parked_cells": 32})
    for number in range(3):
        answer(engine, number)
    # When r2 started, r0 and r1 had 40 cells: r0 lost 8. What r2 left behind is no reason by itself.
    assert [view.num_tokens for view in engine.kv.parked_views()] == [11, 19, 19]
    answer(engine, 3)  # r0 goes, and the end of r1
    assert [view.num_tokens for view in engine.kv.parked_views()] == [11, 19, 19]


def test_nothing_stays_where_nothing_may() -> None:
    engine = make_engine(fake={"parked_cells": 0})
    for number in range(4):
        answer(engine, number)
        assert engine.kv.num_parked == 1


@pytest.mark.req("R4")
def test_sessions_keep_theirs() -> None:
    engine = make_engine(fake={"parked_cells": 0})
    for number in range(3):
        answer(engine, number, owner=f"session {number}")
    answer(engine, 3)
    assert engine.kv.num_parked == 4


def test_without_a_limit_all_stays() -> None:
    engine = make_engine()
    for number in range(4):
        answer(engine, number)
    assert engine.kv.num_parked_tokens == 4 * (PROMPT + 1)
