"""Prefixes: found in microseconds, shared and not computed twice, never across namespaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.counting import calls_during
from tests.engine.helpers import alone, assert_clean, make_engine, request, run
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import TickEvent
from tokenmill.engine.prefix import Entry, PrefixIndex

tokens_strategy = st.lists(st.integers(0, 3), min_size=1, max_size=8)


def entry(seq: int, tokens: list[int], computed: int | None = None, namespace: str | None = None) -> Entry:
    length = len(tokens) if computed is None else computed
    array = np.array(tokens, dtype=np.int32)
    return Entry(seq, array, namespace, lambda: length, parked=computed is None)


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(
    stored=st.lists(st.tuples(tokens_strategy, st.integers(0, 9), st.booleans()), max_size=8),
    removals=st.lists(st.integers(0, 7), max_size=4),
    wanted=tokens_strategy,
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_match_finds_the_longest_usable_prefix(
    stored: list[tuple[list[int], int, bool]], removals: list[int], wanted: list[int]
) -> None:
    index = PrefixIndex()
    entries = [entry(i, toks, None if parked else min(n, len(toks))) for i, (toks, n, parked) in enumerate(stored)]
    for one, (_, n, _) in zip(entries, stored, strict=True):
        one.owner = "session" if n % 2 else None
        index.insert(one)
        index.check_integrity()
    for i in removals:
        if i < len(entries) and entries[i].node is not None:
            index.remove(entries[i])
            index.check_integrity()
    live = [one for one in entries if one.node is not None]
    match = index.match(np.array(wanted, dtype=np.int32))
    common = {one: shared(one.tokens.tolist(), wanted) for one in live}
    assert match.length == max((min(common[one], one.num_computed()) for one in live), default=0)
    assert match.coming == max(common.values(), default=0)
    if match.length:
        assert match.entry in live
        assert min(common[match.entry], match.entry.num_computed()) == match.length
    check_questions(index, live, wanted)
    whole = index.match(np.array(wanted, dtype=np.int32), whole_only=True)
    fitting = [len(one.tokens) for one in live if one.parked and common[one] == len(one.tokens)]
    assert whole.length == max(fitting, default=0)


def check_questions(index: PrefixIndex, live: list[Entry], wanted: list[int]) -> None:
    """Compare what the index says of its entries with what their tokens say."""
    logs = {one: one.tokens.tolist() for one in live}
    array = np.array(wanted, dtype=np.int32)
    assert set(index.covering(array, None)) == {one for one in live if logs[one][: len(wanted)] == wanted}
    assert set(index.covered(array, None)) == {one for one in live if wanted[: len(logs[one])] == logs[one]}
    for one in live:
        held = [min(shared(logs[one], logs[other]), other.num_computed()) for other in live if other is not one]
        assert index.num_exclusive(one) == len(logs[one]) - max(held, default=0)

    def beginnings(some: list[Entry]) -> set[tuple[int, ...]]:
        return {tuple(logs[one][:end]) for one in some if one.parked for end in range(1, len(logs[one]) + 1)}

    owned = beginnings([one for one in live if one.owner is not None])
    assert index.num_parked_tokens == len(beginnings(live))
    assert index.num_plain_tokens == len(beginnings(live) - owned)


@pytest.mark.fault("E08")
def test_namespaces_never_match() -> None:
    index = PrefixIndex()
    index.insert(entry(0, [1, 2, 3], namespace="old weights"))
    assert index.match(np.array([1, 2, 3], dtype=np.int32), "old weights").length == 3
    assert index.match(np.array([1, 2, 3], dtype=np.int32), "new weights").length == 0
    assert index.match(np.array([1, 2, 3], dtype=np.int32)).length == 0


def test_a_lookup_among_a_million_tokens_is_no_scan() -> None:
    """Counted, not timed: a lookup among 1,000 entries of 1,000 tokens makes as many calls as one among ten."""
    rng = np.random.default_rng(0)
    system = rng.integers(0, 50_000, 400).tolist()
    logs = [[*system, *rng.integers(0, 50_000, 600).tolist()] for _ in range(1000)]
    small, large = PrefixIndex(), PrefixIndex()
    for i, log in enumerate(logs):
        large.insert(entry(i, log))
        if i < 10:
            small.insert(entry(i, log))
    assert sum(len(one.tokens) for one in large.entries()) == 1_000_000
    wanted = np.array([*logs[5][:700], 1, 2, 3], dtype=np.int32)
    assert large.match(wanted).length == small.match(wanted).length == 700
    few = calls_during(lambda: small.match(wanted))
    assert calls_during(lambda: large.match(wanted)) <= few + 2
    assert few < 60


def test_saying_where_a_prompt_differs_looks_at_one_entry() -> None:
    """Prompts that begin with the same system prompt are many, and each new one is told where it leaves them."""

    index = PrefixIndex()
    for i in range(500):
        tokens = np.array([1, 2, 3, 100 + i, 7], dtype=np.int32)
        index.insert(Entry(i, tokens, None, lambda: 5, parked=True))
    asked = np.array([1, 2, 3, 9], dtype=np.int32)
    found = index.divergence(asked, None, 2)
    assert found is not None
    assert (found.at, found.held, found.asked) == (3, (599, 7), (9,))
    assert calls_during(lambda: index.divergence(asked, None, 2)) < 30
    assert index.divergence(np.array([1, 2], dtype=np.int32), None, 2) is None
    assert index.divergence(np.array([1, 2, 3, 100, 7, 8], dtype=np.int32), None, 2) is None


def computed_tokens(engine: Any) -> list[int]:
    """The tokens of each step, as a list that grows while the engine runs."""
    counts: list[int] = []
    engine.events.subscribe(
        lambda event: counts.append(event.plan.num_tokens) if isinstance(event, TickEvent) else None
    )
    return counts


@pytest.mark.req("G19")
@pytest.mark.parametrize("depth", [0, 1])
def test_sixteen_requests_with_one_prefix_compute_it_once(depth: int) -> None:
    system = tuple(int(token) for token in np.random.default_rng(1).integers(0, 64, 1000))
    fake = {"num_cells": 4096, "max_context": 2048, "max_seqs": 64}
    engine = make_engine(depth=depth, fake=fake, max_num_seqs=16, max_num_batched_tokens=2048, prefill_chunk=512)
    counts = computed_tokens(engine)
    prompts = {f"r{i}": (*system, i, i + 1, i + 2) for i in range(16)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_new_tokens=4))
    transcript = run(engine)
    for name, prompt in prompts.items():
        assert transcript.tokens[name] == alone(prompt, 4)
    # The prefix once, the tails, and three more tokens each (the last one is never computed).
    surplus = 0 if depth == 0 else 16
    assert 1000 + 16 * 3 + 16 * 3 <= sum(counts) <= 1000 + 16 * 3 + 16 * 3 + surplus
    assert_clean(engine)


def test_a_finished_request_leaves_its_kv_to_the_next_turn() -> None:
    engine = make_engine()
    first = request("first", tuple(range(30)), max_new_tokens=6)
    engine.add(first)
    run(engine)
    turn = request("turn", (*first.tokens, 50, 51), max_new_tokens=3)
    engine.add(turn)
    assert run(engine).tokens["turn"] == alone(tuple(turn.tokens[:38]), 3)
    assert turn.num_cached == 35
    assert engine.stats().num_parked == 1, "the longer log took the shorter one's place"


@pytest.mark.fault("E08")
def test_salted_requests_share_nothing() -> None:
    engine = make_engine()
    prompt = tuple(range(30))
    for salt in ("a", "b", "a"):
        one = request(f"r{salt}{engine.scheduler.tick}", prompt, max_new_tokens=2, namespace=salt)
        engine.add(one)
        run(engine)
        assert one.num_cached == (29 if engine.scheduler.tick > 4 else 0)


def test_sessions_are_evicted_last() -> None:
    engine = make_engine(fake={"num_cells": 96, "block_size": 4, "max_context": 80}, max_num_seqs=2)
    engine.add(request("session", tuple(range(30)), max_new_tokens=2, owner="s"))
    run(engine)
    engine.add(request("plain", tuple(range(40, 60)), max_new_tokens=2))
    run(engine)
    engine.add(request("big", tuple([7] * 50), max_new_tokens=2))
    run(engine)
    again = request("again", (*range(30), 9), max_new_tokens=2, owner="s")
    engine.add(again)
    run(engine)
    assert again.num_cached == 30
    engine.kv.drop_owner("s")
    assert_clean(engine)


def test_memory_that_can_not_share_parts_reuses_whole_sequences() -> None:
    fake = {"partial_rm": False, "partial_cp": False, "shift": False}
    engine = make_engine(fake=fake)
    first = request("first", (1, 2, 3, 4, 5, 6), max_new_tokens=4)
    engine.add(first)
    run(engine)
    turn = request("turn", (*first.tokens, 9), max_new_tokens=4)
    other = request("other", (1, 2, 3, 9), max_new_tokens=4)
    engine.add(turn)
    engine.add(other)
    transcript = run(engine)
    assert turn.num_cached == 9
    assert other.num_cached == 0
    assert transcript.tokens["turn"] == alone(tuple(turn.tokens[:11]), 4)
    assert transcript.tokens["other"] == alone((1, 2, 3, 9), 4)
    assert_clean(engine)


@pytest.mark.req("R8")
@pytest.mark.parametrize(("running", "waiting"), [("salt", None), (None, "salt"), ("salt", "pepper")])
def test_a_running_prompt_is_shared_only_within_its_namespace(running: str | None, waiting: str | None) -> None:
    engine = make_engine()
    prompt = tuple(range(40))
    engine.add(request("runs", prompt, max_new_tokens=30, namespace=running))
    engine.step()
    stranger = request("stranger", (*prompt, 50), max_new_tokens=2, namespace=waiting)
    friend = request("friend", (*prompt, 51), max_new_tokens=2, namespace=running)
    for one in (stranger, friend):
        engine.add(one)
    run(engine)
    assert (stranger.num_cached, friend.num_cached) == (0, 40)


# -- who is evicted ---------------------------------------------------------------------------------------------------


def engine_with_three_sessions() -> EngineCore:
    """Three of 21 tokens each in 72 of 96 cells, used in the order of their names."""
    engine = make_engine(fake={"num_cells": 96, "block_size": 4, "max_context": 88}, max_num_seqs=1)
    for number, owner in enumerate("abc"):
        engine.add(request(owner, tuple([10 * number + 1] * 20), max_new_tokens=2, owner=owner))
        run(engine)
    return engine


def parked(engine: EngineCore) -> dict[str | None, int]:
    return {view.owner: view.num_tokens for view in engine.kv.parked_views()}


@pytest.mark.req("R4")
def test_the_least_recently_used_session_is_evicted_first() -> None:
    engine = engine_with_three_sessions()
    engine.add(request("large", tuple([50] * 40), max_new_tokens=1))
    engine.step()
    assert parked(engine) == {"a": 1, "b": 21, "c": 21, None: 40}
    engine.add(request("larger", tuple([51] * 60), max_new_tokens=1))
    engine.step()
    assert parked(engine) == {"b": 5, "c": 21, None: 60}, "after the plain request and the rest of the first session"


@pytest.mark.req("R4")
def test_a_copy_of_a_sessions_kv_counts_as_use() -> None:
    engine = engine_with_three_sessions()
    engine.add(request("fork", (*[1] * 15, 60), max_new_tokens=1))
    run(engine)
    engine.add(request("large", tuple([50] * 40), max_new_tokens=1))
    engine.step()
    assert parked(engine) == {"a": 21, "b": 1, "c": 21, None: 40}


@pytest.mark.req("R4")
@pytest.mark.parametrize("owner", [None, "other"])
def test_a_sessions_kv_is_not_taken_over_by_other_requests(owner: str | None) -> None:
    engine = make_engine()
    first = request("first", tuple(range(20)), max_new_tokens=3, owner="s")
    engine.add(first)
    run(engine)
    other = request("other", (*first.tokens[:-1], 50, 51), max_new_tokens=2, owner=owner)
    engine.add(other)
    run(engine)
    assert other.num_cached == 22
    assert parked(engine) == {"s": 22, owner: 25}
