"""The session tests can fail: each of these small faults is found by the random trees."""

from __future__ import annotations

import asyncio

import pytest

from tests.conformance.operations import RandomChooser
from tests.planting import PlantedBug, plant
from tests.session.tree import grow
from tokenmill.session.service import SessionService
from tokenmill.session.session import Session
from tokenmill.session.turns import TokenLog
from tokenmill.session.upkeep import Upkeep

BUGS = [
    PlantedBug("forks share one log", TokenLog, "copy", "self.tokens[:], list(self.turns)", "self.tokens, self.turns"),
    PlantedBug(
        "a cut keeps one token too many", TokenLog, "cut_at_turn",
        "0 if end is None else end", "0 if end is None else end + 1",
    ),
    PlantedBug("regenerate repeats itself", Session, "drop_answer", "self.attempt += 1", "self.attempt += 0"),
    PlantedBug(
        "the stop token is not in the log", Session, "take_answer",
        "self.log.add(len(self.log), output.token_ids, turn)",
        "self.log.add(len(self.log), [i for i in output.token_ids if i != stop], turn)",
    ),
    PlantedBug(
        "an edit keeps the answers after it", Session, "edit", "self.rewind(text, turn, None)", "pass",
    ),
    PlantedBug(
        "ended sessions keep their KV", Upkeep, "end", "loaded.client.release(session.session_id)", "pass"
    ),
    PlantedBug(
        "a fork draws with its parent's seed and attempt forgotten", SessionService, "answer",
        "session.attempt", "0",
    ),
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    for seed in range(40):
        for depth in (0, 1):
            try:
                asyncio.run(asyncio.wait_for(grow(RandomChooser(seed), depth, 40), 20))
            except Exception:
                return
    pytest.fail("nothing noticed it")
