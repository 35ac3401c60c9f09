"""`CostModel`: what it learns of steps, and what it does not believe."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill.engine.cost_model import CostModel
from tokenmill.engine.plan import Draft

NUM_DECODES = 8
TARGET_S = 0.1


def seconds(num_tokens: int, attention: float, slowness: float = 1.0) -> float:
    return slowness * (0.008 + 0.0006 * num_tokens + 4e-9 * attention)


def live(model: CostModel, num_steps: int, slowness: float = 1.0) -> None:
    """Steps of 8 decodes, every other one with a chunk of a prompt."""
    for step in range(num_steps):
        num_prefill = (step % 2) * (20 + step % 7 * 10)
        tokens, attention = NUM_DECODES + num_prefill, 1e4 * NUM_DECODES + 3e3 * num_prefill
        model.observe(tokens, attention, seconds(tokens, attention, slowness), num_prefill)


def chunk(model: CostModel) -> int:
    """The largest one beside 8 decodes."""
    draft = Draft(2048)
    draft.give_decodes(np.arange(NUM_DECODES, dtype=np.int32), NUM_DECODES, 1e4 * NUM_DECODES)
    return model.largest_chunk(draft, 1000, TARGET_S)


def test_it_learns_what_steps_take() -> None:
    model = CostModel()
    live(model, 100)
    assert model.predict(68, 2.6e5) == pytest.approx(seconds(68, 2.6e5), rel=0.05)
    size = chunk(model)
    assert seconds(NUM_DECODES + size, 1e4 * NUM_DECODES + 1e3 * size) == pytest.approx(TARGET_S, rel=0.1)


def test_a_process_that_was_stopped_does_not_believe_its_steps_slow() -> None:
    model = CostModel()
    live(model, 100)
    model.observe(NUM_DECODES, 1e4 * NUM_DECODES, 20.0, 0)
    alone = model.predict(NUM_DECODES, 1e4 * NUM_DECODES)
    assert alone is not None
    assert alone < 2 * seconds(NUM_DECODES, 1e4 * NUM_DECODES)
    size = chunk(model)
    assert seconds(NUM_DECODES + size, 1e4 * NUM_DECODES + 1e3 * size) < 1.3 * TARGET_S


@pytest.mark.parametrize("slowness", [4.0, 30.0])
def test_a_machine_that_has_become_slower_is_believed(slowness: float) -> None:
    model = CostModel()
    live(model, 100)
    live(model, 100, slowness)
    assert model.predict(68, 2.6e5) == pytest.approx(seconds(68, 2.6e5, slowness), rel=0.3)
