"""The engine's property test can fail: each of these small faults is found by it."""

from __future__ import annotations

import pytest

from tests.conformance.operations import RandomChooser
from tests.engine.workload import play, workload
from tests.planting import PlantedBug, plant
from tokenmill.engine import kv_manager, plan, policies, prefix, results, rows, scheduler

pytestmark = pytest.mark.slow

BUGS = [
    PlantedBug(
        "tokens given to a row's next tenant",
        rows.RunningRows,
        "settle",
        "self.lease[plan.sampled_rows] == plan.sampled_leases",
        "self.lease[plan.sampled_rows] != -1",
    ),
    PlantedBug("sampled token not awaited", rows.RunningRows, "input_tokens", "self.pending[rows] > 0", "rows < 0"),
    PlantedBug(
        "undo forgets the tokens", rows.RunningRows, "undo", "self.num_computed[rows] -= plan.counts[still]", "pass"
    ),
    PlantedBug(
        "undo forgets the samples",
        rows.RunningRows,
        "undo",
        "self.pending[plan.sampled_rows[self.lease[plan.sampled_rows] == plan.sampled_leases]] -= 1",
        "pass",
    ),
    PlantedBug("budget never used up", plan.Draft, "_give", "self.budget -= count", "pass"),
    PlantedBug("prefill before decode", scheduler.Scheduler, "schedule", "self._decode", "self._prefill"),
    PlantedBug("prompt matched to its last token", kv_manager.KVManager, "match", "tokens[:-1]", "tokens"),
    PlantedBug(
        "prefix one token too long",
        kv_manager.KVManager,
        "_start",
        "return seq, match.length",
        "return seq, match.length + 1",
    ),
    PlantedBug(
        "parked KV claims more than it holds",
        kv_manager.KVManager,
        "park",
        "min(self.length(seq), len(tokens))",
        "len(tokens)",
    ),
    PlantedBug("sequence ids leak", kv_manager.KVManager, "_free", "self._free_seqs.append(seq)", "pass"),
    PlantedBug("released KV stays", kv_manager.KVManager, "_free", "self.kv.seq_rm(seq)", "pass"),
    PlantedBug(
        "eviction forgets the index", kv_manager.KVManager, "_unpark", "self.index.remove(parked.entry)", "pass"
    ),
    PlantedBug(
        "running neighbour taken at its word",
        prefix.PrefixIndex,
        "match",
        "min(matched, entry.num_computed())",
        "matched",
    ),
    PlantedBug("split edge loses its entries", prefix.PrefixIndex, "_split", "dict(node.entries)", "{}"),
    PlantedBug(
        "stop token before its time",
        results.Results,
        "_completed_by",
        "len(request.tokens) - request.num_prompt > request.limits.min_new_tokens",
        "len(request.tokens) - request.num_prompt > 0",
    ),
    PlantedBug("cells promised twice", scheduler.Scheduler, "_make_room_before", "draft.cells + cells", "0"),
    PlantedBug(
        "parked KV trusted after a loss",
        kv_manager.KVManager,
        "resync",
        "self._evict(parked, FAILURE, by=None)",
        "pass",
    ),
    PlantedBug("running KV trusted after a loss", scheduler.Scheduler, "resync", "self.kv.length", "int"),
    PlantedBug(
        "an idle key earns credit",
        policies.FairShare,
        "enter",
        "max(self._served.get(key, floor), floor)",
        "self._served.get(key, 0)",
    ),
    PlantedBug("tokens charged twice", policies.Order, "settle", "self._rows.uncharged[row] = 0", "pass"),
    PlantedBug(
        "a class does not age", policies.Order, "started", "self._last_start[_class_of(request)] = tick", "pass"
    ),
    PlantedBug(
        "a deadline rings late", policies.Deadlines, "ringing", "self._alarms[0][0] <= now", "self._alarms[0][0] < now"
    ),
    PlantedBug(
        "the first prompt is the victim",
        scheduler.Scheduler,
        "_decode",
        "self._preempt(victim)",
        "self._preempt(self.order.sort(self.rows.running(), self.tick)[0])",
    ),
    PlantedBug(
        "the queue's tokens leak",
        policies.WaitingQueue,
        "remove",
        "self.num_tokens -= self._lengths.pop(request.arrival)",
        "pass",
    ),
    PlantedBug(
        "a prompt's quota is forgotten",
        scheduler.Scheduler,
        "_most",
        "request.limits.max_tokens_per_step or most",
        "most",
    ),
]


@pytest.mark.req("R5", "R8", "R11", "R12", "R14")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(bug, monkeypatch)
    with pytest.raises(Exception) as caught:
        play_many()
    assert not isinstance(caught.value, (NameError, SyntaxError)), "the bug crashes instead of misbehaving"


def play_many() -> None:
    for seed in range(400):
        for depth in (0, 1):
            play(workload(RandomChooser(seed), depth))
