"""The suite can fail: each of these small faults in the KV code is found by it."""

from __future__ import annotations

import pytest

from tests.conformance.checks import CHECKS
from tests.conformance.random_driver import drive
from tests.conformance.subjects import FAKE
from tests.planting import PlantedBug, plant
from tokenmill.backends import fake
from tokenmill.kv import paged, tables

BUGS = [
    PlantedBug(
        "seq_rm off by one", paged.PagedKV, "seq_rm", "self.tables.cut_tail(s, lo)", "self.tables.cut_tail(s, lo + 1)"
    ),
    PlantedBug("shared block written without a copy", paged, "_must_copy", "refs > holders", "False"),
    PlantedBug(
        "last holder of a block copies it too", paged, "_must_copy", "refs_left[block] = refs - holders", "pass"
    ),
    PlantedBug("block left by others written over", paged, "_must_copy", "reach < left.get(block, 0)", "False"),
    PlantedBug("block left by all never freed", paged.PagedKV, "commit", "self.tables.pool.give_back(blocks)", "pass"),
    PlantedBug("missing rollback", paged.PagedKV, "rollback", "reversed(self._applied)", "()"),
    PlantedBug(
        "rollback forgets copied blocks",
        paged.PagedKV,
        "rollback",
        "np.add.at(self.tables.pool.refs, undo.copied, segment.holders[copy])",
        "pass",
    ),
    PlantedBug("stale tail", tables.BlockTables, "cut_tail", "keep, end", "keep, self.end[seq]"),
    PlantedBug("wrong window edge", fake.FakeBackend, "_hash_visible", "pos - window + 1", "pos - window"),
    PlantedBug("double free", tables.BlockPool, "release", "self.refs[blocks] == 0", "self.refs[blocks] <= 1"),
    PlantedBug("blocks never freed", tables.BlockPool, "give_back", "self.num_free += len(blocks)", "pass"),
    PlantedBug(
        "position gap accepted",
        paged.PagedKV,
        "_check",
        "segment.token_pos != expected",
        "segment.token_pos < expected",
    ),
    PlantedBug(
        "seq_cp moves positions",
        tables.BlockTables,
        "share",
        "self.base[src] + first * self.block_size",
        "self.base[src]",
    ),
    PlantedBug(
        "seq_cp shares one block too few",
        tables.BlockTables,
        "share",
        "-(-(p1 - int(self.base[src])) // self.block_size)",
        "(p1 - int(self.base[src])) // self.block_size",
    ),
    PlantedBug("only one shift done", paged.PagedKV, "update", "del self._shifts[0]", "self._shifts.clear()"),
    PlantedBug("shift never reaches the data", paged.PagedKV, "update", "self._storage.shift(slots, delta)", "pass"),
    PlantedBug(
        "shared cells shifted",
        tables.BlockTables,
        "shares_cells",
        "self.active()",
        "()",
    ),
    PlantedBug(
        "failed step kept",
        paged.PagedKV,
        "forget",
        "self._step_of_slot[self.tables.slots_of(seq)] >= step",
        "self._step_of_slot[self.tables.slots_of(seq)] > step",
    ),
    PlantedBug("companions left behind", paged, "_place", "tables.follow(lead, others)", "pass"),
    PlantedBug("parting sequences not cut", paged, "cut_into_segments", "companions.get(seq, group) != group", "False"),
    PlantedBug(
        "head cut frees nothing", tables.BlockTables, "cut_head", "self.pool.release(self.table[seq, :gone])", "pass"
    ),
]


@pytest.mark.req("R22", "R23", "R24", "R25", "R26", "R47")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    with pytest.raises(Exception) as caught:
        run_the_suite()
    assert not isinstance(caught.value.__cause__ or caught.value, (NameError, SyntaxError)), "planted badly"


def run_the_suite() -> None:
    """The random walks first: they should find most of it by themselves."""
    for seed in range(40):
        for depth in (0, 1):
            drive(FAKE, seed, depth)
    for check in CHECKS:
        check.run(FAKE)
