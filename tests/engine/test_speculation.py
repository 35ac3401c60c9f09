"""Speculation: whatever is proposed, a request says what it says without, and no KV of a wrong guess is left (R33)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.conformance.operations import RandomChooser
from tests.engine.helpers import VOCAB, Transcript, assert_clean, make_engine, run, ticks_of, timed_engine
from tests.engine.speculating import Oracle, said_alone, speculate
from tests.engine.workload import play, workload
from tests.planting import PlantedBug, plant
from tokenmill.contract import IntArray
from tokenmill.engine import results, rows, scheduler
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import VerifiedEvent
from tokenmill.engine.request import Draw, Hints, Limits, Request
from tokenmill.engine.speculation import LONGEST_MATCH, LookupProposer, Proposal, SuffixIndex
from tokenmill.engine.view import CoreView
from tokenmill.errors import TokenmillError
from tokenmill.params import SamplingParams
from tokenmill.sampling import state

pytestmark = pytest.mark.req("R33")

ROOMY = {"num_cells": 4096, "max_seqs": 64}


def set_up_oracle(engine: EngineCore) -> None:
    speculate(engine, Oracle(said_alone))


@pytest.mark.parametrize("depth", [0, 1])
def test_random_workloads_say_the_same_with_wrong_and_right_proposals(depth: int) -> None:
    for seed in range(25):
        load = workload(RandomChooser(seed), depth)
        load.engine["speculation"] = "lookup"
        play(load, prepare=set_up_oracle)


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    {"temperature": 0, "dry_multiplier": 5.0, "dry_allowed_length": 1, "allowed_token_ids": (1, 2, 3, 4)},
    {"temperature": 1.0, "min_tokens": 6},
    {"temperature": 0.8, "logprobs": 3},
    {"temperature": 1.0, "xtc_probability": 0.5, "xtc_threshold": 0.05, "min_p": 0.02},
    {"temperature": 0, "logit_bias": {3: 2.0}, "banned_token_ids": (5,), "logprobs": 0},
]


def requests_of(seed: int, speculation: str) -> list[Request]:
    """40 prompts, some of them twice with another choice, as n > 1 makes them."""
    choose = random.Random(seed)
    made = []
    for i in range(40):
        prompt = [choose.randrange(VOCAB) for _ in range(choose.randint(1, 20))]
        params = PARAMS[i % len(PARAMS)]
        mode = speculation if i % 4 else "off"  # ordinary requests among them
        draw = Draw(params=SamplingParams(speculation=mode, **params), seed=i // 3, choice=i % 3)
        stop = frozenset(choose.sample(range(VOCAB), 20 if "min_tokens" in params else 2)) if i % 2 else frozenset()
        limits = Limits(max_new_tokens=choose.randint(1, 24), stop_ids=stop, min_new_tokens=params.get("min_tokens", 0))
        made.append(Request(f"r{i}", prompt, limits, Hints(key=f"k{i % 3}"), draw))
    return made


def outcome(engine: EngineCore, requests: list[Request]) -> tuple[dict[str, Any], Transcript]:
    scores: dict[str, list[Any]] = {}
    transcript = Transcript()
    for request in requests:
        engine.add(request)
    for _ in range(500):
        if not engine.has_work:
            break
        result = engine.step()
        for token in result:
            if token.token_id is not None:
                scores.setdefault(token.request_id, []).append((token.token_id, token.logprobs))
        transcript.add(result)
    assert not engine.has_work, "requests starve"
    return scores, transcript


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("seed", range(5))
def test_200_requests_draw_the_same_tokens_and_scores(depth: int, seed: int) -> None:
    """Greedy and seeded, with penalties, rules, bias, log-probabilities and stop tokens, mixed with ordinary ones."""
    plain = make_engine(depth=depth, fake=ROOMY)
    expected, ends = outcome(plain, requests_of(seed, "off"))
    engine = make_engine(depth=depth, fake=ROOMY)
    verified: list[VerifiedEvent] = []
    engine.events.subscribe(lambda event: verified.append(event) if isinstance(event, VerifiedEvent) else None)
    view = CoreView(engine.snapshot())
    engine.events.subscribe(view)
    speculate(engine, Oracle(lambda request: [token for token, _ in expected[request.request_id]]))
    got, got_ends = outcome(engine, requests_of(seed, "lookup"))
    assert got == expected
    assert got_ends.reasons == ends.reasons
    assert sum(sum(event.num_drawn) for event in verified) > 60, "proposals were accepted"
    assert sum(sum(event.num_proposed) - sum(event.num_agreed) for event in verified) > 30, "others were rejected"
    assert view.snapshot() == engine.snapshot()
    assert_clean(engine)


BUGS = [
    PlantedBug(
        "one token too many is accepted",
        results,
        "_num_common",
        "next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))",
        "next((i + 1 for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(others)))",
    ),
    PlantedBug(
        "KV of a rejected token is left behind",
        scheduler.Scheduler,
        "_roll_back",
        "self.kv.trim(int(self.rows.seq[row]), length)",
        "pass",
    ),
    PlantedBug(
        "a rejected token counts as computed",
        scheduler.Scheduler,
        "_roll_back",
        "self.rows.roll_back(row, length)",
        "pass",
    ),
    PlantedBug(
        "the wrong position's key",
        rows.RunningRows,
        "_proposed",
        "self.num_tokens[more_rows] + within[is_behind]",
        "self.num_tokens[more_rows]",
    ),
    PlantedBug(
        "penalties without the proposed tokens",
        state.SamplingState,
        "_log",
        "[*self._logs[row], *proposed] if proposed else self._logs[row]",
        "self._logs[row]",
    ),
    PlantedBug(
        "rules without the proposed tokens",
        state.SamplingState,
        "taxes",
        "_following(rule, proposed.get(place, ()))",
        "rule",
    ),
    PlantedBug(
        "stop tokens are banned for too long",
        state.SamplingState,
        "edits",
        "len(self._logs[row]) + len(proposed.get(place, ()))",
        "len(self._logs[row])",
    ),
    PlantedBug(
        "draws from the wrong logits",
        rows.RunningRows,
        "_proposed",
        "is_behind.nonzero()[0].astype(np.int32)",
        "is_behind.nonzero()[0].astype(np.int32) - 1",
    ),
    PlantedBug(
        "a request that speculates is submitted ahead",
        rows.RunningRows,
        "owed",
        "self.needs_history | self.speculates",
        "self.needs_history",
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_found(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_at_both_depths() -> None:
        for depth in (0, 1):
            test_200_requests_draw_the_same_tokens_and_scores(depth, 0)

    plant(bug, monkeypatch)
    with pytest.raises((AssertionError, TokenmillError, RuntimeError, KeyError, IndexError, ValueError)):
        draw_at_both_depths()


# -- lookup -----------------------------------------------------------------------------------------------------------


def tokens_of(*runs: Sequence[int]) -> IntArray:
    return np.array([token for run in runs for token in run], dtype=np.int32)


def test_what_followed_the_longest_and_latest_match_is_proposed() -> None:
    index = SuffixIndex(64)
    index.add(tokens_of([1, 2, 3, 4, 5, 6, 7], [9, 9, 3, 4, 8, 8, 8], [3, 4]))
    assert index.find(tokens_of([3, 4]), 2) == Proposal((8, 8), 2)
    assert index.find(tokens_of([2, 3, 4]), 3) == Proposal((5, 6, 7), 3)
    assert index.find(tokens_of([50, 51]), 3).tokens == ()
    assert index.find(tokens_of([4]), 3).tokens == ()


def test_a_log_that_repeats_itself_goes_on_doing_so() -> None:
    index = SuffixIndex(64)
    log = tokens_of([7, 1, 2, 3] * 3)
    index.add(log)
    assert index.find(log, 6).tokens == (7, 1, 2, 3, 7, 1)


def test_an_index_agrees_with_a_search_of_the_log() -> None:
    """Whatever is written over: a proposal followed a match that is in the ring, and the longest one is found."""
    choose = np.random.default_rng(1)
    index, log = SuffixIndex(256), np.zeros(0, dtype=np.int32)
    for _ in range(300):
        new = choose.integers(0, 6, choose.integers(1, 9)).astype(np.int32)
        log = np.concatenate([log, new])
        index.add(new)
        found = index.find(log[-LONGEST_MATCH:], 4)
        held = log[-256:].tolist()
        if found.tokens:
            match, tokens = held[len(held) - found.match :], list(found.tokens)
            whole = match + tokens
            places = [i for i in range(len(held)) if held[i : i + found.match] == match]
            period = [i for i in places[:-1] if (held[i + found.match :] * 4)[:4] == tokens]
            assert period or any(held[i : i + len(whole)] == whole for i in places), "it was never said"
        else:
            pair = held[-2:]
            assert pair not in [held[i : i + 2] for i in range(len(held) - 3)][-8:], "the latest pairs are found"


def said(name: str, tokens: Sequence[int], key: str, namespace: str | None = None) -> Request:
    return Request(name, tokens, Limits(), Hints(key=key, namespace=namespace))


def test_what_one_key_has_said_is_never_proposed_to_another() -> None:
    proposer = LookupProposer()
    secret = list(range(100, 130))
    proposer.keep(said("a", secret, "alice"))
    asks = secret[:8]
    assert proposer.propose([said("b", asks, "alice")], [4])[0].tokens == (108, 109, 110, 111)
    assert proposer.propose([said("c", asks, "bob")], [4])[0].tokens == ()
    assert proposer.propose([said("d", asks, "alice", "salt")], [4])[0].tokens == ()
    proposer.forget(said("b", asks, "alice"))
    assert proposer.propose([said("e", [1, 2], "alice")], [4])[0].tokens == (), "it is found by what was said alone"


def test_a_million_tokens_take_little_memory_and_little_time() -> None:
    proposer = LookupProposer()
    choose = np.random.default_rng(0)
    for i in range(300):
        proposer.keep(said(f"r{i}", choose.integers(0, 40_000, 4096).tolist(), f"key {i % 3}"))
    assert proposer.num_bytes < 64 << 20
    index = SuffixIndex(1 << 20)
    index.add(choose.integers(0, 200, 1_100_000).astype(np.int32))
    assert index.num_bytes < 64 << 20
    tail = index.latest()[-LONGEST_MATCH:]
    began = time.process_time()
    for _ in range(200):
        index.find(tail, 7)
    assert (time.process_time() - began) / 200 < 1e-3, "a search of the whole log would take longer"


def test_a_prediction_is_proposed_from_the_first_token_on() -> None:
    predicted = (10, 11, 12, 13, 14, 15)
    params = SamplingParams(temperature=0, prediction_token_ids=predicted)
    request = Request("r", [1, 2, 3], Limits(), draw=Draw(params=params, seed=0))
    proposer = LookupProposer()
    assert proposer.propose([request], [4])[0].tokens == predicted[:4]
    request.tokens += [10, 11]
    assert proposer.propose([request], [4])[0].tokens == predicted[2:]
    request.tokens += [99, 13, 14]
    assert proposer.propose([request], [4])[0].tokens == (15,), "it goes on behind what was said otherwise"


# -- how much is worth it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "per_token", "num_requests", "pays"),
    [(0.01, 0.0001, 1, True), (0.0002, 0.01, 1, False), (0.001, 0.01, 8, False)],
)
def test_tokens_are_proposed_where_rows_are_cheap(base: float, per_token: float, num_requests: int, pays: bool) -> None:
    """A right guess pays where a row costs less than it brings: not if a step costs what its tokens do."""
    fake = {"max_context": 256, "num_cells": 4096, "max_seqs": 16}
    engine, clock = timed_engine(0, (base, per_token, 0.0), fake, max_num_seqs=8, speculation="auto")
    engine.scheduler.speculation.proposers["lookup"] = Oracle(said_alone, wrong=0.0, missing=0.0)
    for i in range(num_requests):
        engine.add(Request(f"r{i}", [1, 2, 3 + i], Limits(max_new_tokens=60)))
    ticks = ticks_of(engine)
    run(engine)
    num_proposed = sum(tick.plan.num_proposed for tick in ticks)
    assert (num_proposed > 40) == pays
    plain, plain_clock = timed_engine(0, (base, per_token, 0.0), fake, max_num_seqs=8)
    for i in range(num_requests):
        plain.add(Request(f"r{i}", [1, 2, 3 + i], Limits(max_new_tokens=60)))
    run(plain)
    assert clock.now < plain_clock.now * (0.5 if pays else 1.05)


def test_wrong_guesses_are_given_up() -> None:
    """A proposer that is always wrong costs next to nothing: it is asked, and no more computed."""
    fake = {"max_context": 256, "num_cells": 4096, "max_seqs": 16}
    engine, clock = timed_engine(0, (0.01, 0.002, 0.0), fake, max_num_seqs=8, speculation="auto")
    oracle = Oracle(lambda request: [(token + 1) % VOCAB for token in said_alone(request)], wrong=0.0, missing=0.0)
    engine.scheduler.speculation.proposers["lookup"] = oracle
    engine.add(Request("r", [1, 2, 3], Limits(max_new_tokens=60)))
    run(engine)
    plain, plain_clock = timed_engine(0, (0.01, 0.002, 0.0), fake, max_num_seqs=8)
    plain.add(Request("r", [1, 2, 3], Limits(max_new_tokens=60)))
    run(plain)
    assert oracle.num_asked > 40
    assert clock.now < 1.05 * plain_clock.now


def test_a_backend_that_cannot_roll_back_gets_no_proposals() -> None:
    engine = make_engine(fake={"partial_rm": False}, speculation="lookup")
    oracle = speculate(engine, Oracle(said_alone))
    engine.add(Request("r", [1, 2, 3], Limits(max_new_tokens=8)))
    run(engine)
    assert oracle.num_asked == 0


def test_auto_leaves_requests_ahead_where_steps_are_submitted_ahead() -> None:
    engine = make_engine(depth=1, speculation="auto")
    oracle = speculate(engine, Oracle(said_alone))
    engine.add(Request("r", [1, 2, 3], Limits(max_new_tokens=8)))
    run(engine)
    assert oracle.num_asked == 0
