"""Speculation: whatever is proposed, a request says what it says without, and no KV of a wrong guess is left (R33)."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.conformance.operations import RandomChooser
from tests.engine.helpers import (
    VOCAB,
    Transcript,
    assert_clean,
    make_engine,
    run,
    ticks_of,
    timed_engine,
)
from tests.engine.speculating import Oracle, draft_model, said_alone, speculate, verify_all
from tests.engine.workload import play, workload
from tests.planting import PlantedBug, plant
from tokenmill.backends.fake import FakeConfig, FakeModel, Fault, FaultKind
from tokenmill.contract import BackendLimits
from tokenmill.engine import proposers, results, rows, scheduler
from tokenmill.engine.core import DraftModel, EngineCore
from tokenmill.engine.cost_model import CostLine, Price
from tokenmill.engine.events import VerifiedEvent
from tokenmill.engine.proposers import LONGEST_MATCH, LookupProposer, Proposal, SuffixIndex
from tokenmill.engine.request import BACKGROUND, Draw, Hints, Limits, Request
from tokenmill.engine.view import CoreView
from tokenmill.errors import ConfigError, ForwardFailed, TokenmillError
from tokenmill.kv import paged_backend
from tokenmill.params import SamplingParams
from tokenmill.sampling import state

pytestmark = pytest.mark.req("R33")

ROOMY = {"num_cells": 4096, "max_seqs": 64}


def set_up_oracle(engine: EngineCore) -> None:
    speculate(engine, Oracle(said_alone))


@pytest.mark.parametrize("depth", [0, 1])
def test_random_workloads_say_the_same_with_wrong_and_right_proposals(depth: int) -> None:
    """Under preemption, cancels, forks and faults."""
    for seed in range(25):
        load = workload(RandomChooser(seed), depth)
        load.engine["speculation"] = "lookup"
        play(load, prepare=set_up_oracle)


@pytest.mark.parametrize("depth", [0, 1])
def test_random_workloads_say_the_same_with_a_draft_model(depth: int) -> None:
    for seed in range(100, 112):
        load = workload(RandomChooser(seed), depth)
        vocab_size, num_cells = (VOCAB, 4096) if seed % 2 else (VOCAB + 1, 48)
        draft = draft_model(vocab_size, depth=seed % 3 % 2, num_cells=num_cells, max_seqs=64 if seed % 2 else 4)
        load.engine |= {"speculation": "draft", "draft": draft}
        play(load, prepare=verify_all)


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


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_that_look_up_draw_the_same_tokens_and_scores(depth: int) -> None:
    """What the lookup itself finds, in logs that repeat a lot: there are few tokens to choose from."""
    num_proposed = 0
    for seed in range(5):
        expected, ends = outcome(make_engine(depth=depth, fake=ROOMY), requests_of(seed, "off"))
        engine = make_engine(depth=depth, fake=ROOMY)
        verify_all(engine)
        requests = requests_of(seed, "lookup")
        got, got_ends = outcome(engine, requests)
        assert got == expected
        assert got_ends.reasons == ends.reasons
        num_proposed += sum(one.num_proposed for one in requests)
        assert_clean(engine)
    assert num_proposed > 50


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("mode", ["lookup", "draft"])
def test_a_stop_string_and_a_rewind_leave_no_kv_of_proposals(depth: int, mode: str) -> None:
    """An answer is cut where its text ends, with proposals behind that in flight; its session goes on from there."""

    def said(speculation: str) -> list[list[int]]:
        engine = make_engine(depth=depth, fake=ROOMY, draft=draft_model(depth=depth))
        if speculation == "lookup":
            engine.scheduler.speculation.use(Oracle(said_alone))
        verify_all(engine)
        draw = Draw(params=SamplingParams(speculation=speculation, temperature=0))
        first = Request("first", [1, 2, 3], Limits(max_new_tokens=40), Hints(owner="session"), draw)
        engine.add(first)
        while len(first.output) < 12:
            engine.step()
        engine.finish("first", 9)
        run(engine)
        outputs = [first.output]
        for name, log in (("goes on", [*first.tokens, 7]), ("rewound", [*first.tokens[:8], 9])):
            request = Request(name, log, Limits(max_new_tokens=20), Hints(owner="session"), draw)
            engine.add(request)
            run(engine)
            assert request.num_cached >= 7
            assert (request.num_agreed > 0) == (speculation != "off")
            outputs.append(request.output)
        assert_clean(engine)
        return outputs

    assert said(mode) == said("off")


# -- a draft model -----------------------------------------------------------------------------------------------------


def outcome_with_draft(depth: int, seed: int, draft: DraftModel, **config: Any) -> tuple[int, int]:
    """Draw the requests of a seed with and without a draft model; how many of its tokens were right and wrong."""
    expected, ends = outcome(make_engine(depth=depth, fake=ROOMY), requests_of(seed, "off"))
    engine = make_engine(depth=depth, fake=ROOMY, draft=draft, **config)
    verify_all(engine)
    verified: list[VerifiedEvent] = []
    engine.events.subscribe(lambda event: verified.append(event) if isinstance(event, VerifiedEvent) else None)
    got, got_ends = outcome(engine, requests_of(seed, "draft"))
    assert got == expected
    assert got_ends.reasons == ends.reasons
    assert {name for event in verified for name in event.proposers} <= {"draft"}
    assert_clean(engine)
    engine.close()
    num_right = sum(sum(event.num_agreed) for event in verified)
    return num_right, sum(sum(event.num_proposed) for event in verified) - num_right


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("draft_depth", [0, 1])
def test_a_draft_model_that_says_the_same_is_right(depth: int, draft_depth: int) -> None:
    """Seeded requests, too: it draws with their keys, penalties and rules."""
    num_right, num_wrong = outcome_with_draft(depth, 1, draft_model(depth=draft_depth))
    assert num_right > 150
    assert num_wrong < num_right / 4, "what lies behind a request's end"


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB + 3])
def test_drafts_are_verified_before_the_host_has_seen_them(vocab_size: int) -> None:
    """With both models a step ahead: right and wrong ones, beside requests that do not speculate."""

    def requests(mode: str) -> list[Request]:
        made = requests_of(7, mode)
        return [one for one in made if not one.draw.params.needs_history]

    expected, ends = outcome(make_engine(depth=1, fake=ROOMY), requests("off"))
    engine = make_engine(depth=1, fake=ROOMY, draft=draft_model(vocab_size, depth=1))
    verify_all(engine)
    drafter, named = engine._drafter, Counter[str]()
    assert drafter is not None
    await_drafts = drafter.await_drafts

    def count() -> Any:
        named["drafts"] += 0 if drafter._round is None else sum(len(one.rows) for one in drafter._round.flights)
        return await_drafts()

    drafter.await_drafts = count  # type: ignore[method-assign]
    asked = requests("draft")
    got, got_ends = outcome(engine, asked)
    assert got == expected
    assert got_ends.reasons == ends.reasons
    assert named["drafts"] > 25
    num_agreed, num_proposed = sum(one.num_agreed for one in asked), sum(one.num_proposed for one in asked)
    assert (num_agreed > 0.7 * num_proposed) == (vocab_size == VOCAB)
    assert_clean(engine)
    engine.close()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("vocab_size", [VOCAB - 3, VOCAB + 3])
def test_a_draft_model_that_says_something_else_changes_nothing(depth: int, vocab_size: int) -> None:
    for seed in range(2):
        _, num_wrong = outcome_with_draft(depth, seed, draft_model(vocab_size))
        assert num_wrong > 100


def test_a_draft_model_with_little_memory_drafts_for_some() -> None:
    num_right, _ = outcome_with_draft(0, 0, draft_model(num_cells=64, max_seqs=3))
    assert num_right > 10


def test_a_draft_model_that_fails_is_given_up() -> None:
    draft = draft_model()
    engine = make_engine(fake=ROOMY, draft=draft)
    verify_all(engine)
    engine._drafter._backend.faults.add(Fault(FaultKind.FAIL, after=3))  # type: ignore[union-attr]
    expected, _ = outcome(make_engine(fake=ROOMY), requests_of(0, "off"))
    got, _ = outcome(engine, requests_of(0, "draft"))
    assert got == expected
    assert engine.failure is None
    assert_clean(engine)


@pytest.mark.parametrize("draft_depth", [0, 1])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_request_that_the_draft_model_cannot_draw_for_goes_on_without(draft_depth: int, penalty: float) -> None:
    """Its logits are no numbers for one request; others are drafted for all the same, as is that one later."""

    def requests(mode: str) -> list[Request]:
        draw = Draw(params=SamplingParams(speculation=mode, temperature=0, repetition_penalty=penalty))
        prompts = {"bad": [9, 2, 3], "good": [1, 2, 3]}
        return [Request(name, prompt, Limits(max_new_tokens=24), draw=draw) for name, prompt in prompts.items()]

    expected, _ = outcome(make_engine(fake=ROOMY), requests("off"))
    engine = make_engine(fake=ROOMY, draft=draft_model(depth=draft_depth))
    verify_all(engine)
    engine._drafter._backend.faults.add(Fault(FaultKind.NAN, token=9))  # type: ignore[union-attr]
    verified: list[VerifiedEvent] = []
    engine.events.subscribe(lambda event: verified.append(event) if isinstance(event, VerifiedEvent) else None)
    got, _ = outcome(engine, requests("draft"))
    assert got == expected
    assert engine.failure is None
    assert len({row for event in verified for row in event.rows}) == 2, "both are drafted for"
    assert_clean(engine)


def test_a_draft_model_that_raises_anything_is_given_up() -> None:
    engine = make_engine(fake=ROOMY, draft=draft_model())
    verify_all(engine)

    def fail(_: object) -> None:
        raise ValueError("an unexpected one")

    engine._drafter._backend.forward = fail  # type: ignore[union-attr,method-assign]
    expected, _ = outcome(make_engine(fake=ROOMY), requests_of(0, "off"))
    got, _ = outcome(engine, requests_of(0, "draft"))
    assert got == expected
    assert engine.failure is None
    assert_clean(engine)


def test_a_draft_model_that_fails_at_a_request_s_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(fake=ROOMY, draft=draft_model(VOCAB + 3))
    verify_all(engine)
    drafter = engine._drafter
    assert drafter is not None

    def fail(*_: object) -> None:
        raise ForwardFailed("lost", fatal=True)

    monkeypatch.setattr(drafter._kv, "park", fail)
    expected, _ = outcome(make_engine(fake=ROOMY), requests_of(0, "off"))
    got, _ = outcome(engine, requests_of(0, "draft"))
    assert got == expected
    assert engine.failure is None
    assert not drafter.can_propose(Request("r", [1], Limits()))
    assert_clean(engine)


def test_a_draft_model_that_cannot_roll_back_is_rejected() -> None:
    """One with a recurrent state: every draft that is not said would be the last."""
    model = FakeModel(FakeConfig(vocab_size=VOCAB, max_context=256, block_size=4, partial_rm=False))
    with pytest.raises(ConfigError, match="draft_model cannot be rolled back"):
        make_engine(draft=DraftModel(model, BackendLimits(num_cells=4096, max_seqs=64)))


@pytest.mark.parametrize("reason", ["failed", "context"])
def test_requests_that_cannot_be_drafted_for_are_submitted_ahead(reason: str) -> None:
    """A draft model that was given up, or whose context is over, does not hold up steps at depth 1 for good."""
    engine, _ = timed_engine(1, STEP_S, FAST, draft_s=(0.001, 0.0, 0.0), max_num_seqs=8, speculation="draft")
    drafter = engine._drafter
    assert drafter is not None
    if reason == "failed":
        drafter.close()
    else:
        drafter._max_context = 8
    engine.add(Request("r", [1, 2, 3], Limits(max_new_tokens=100)))
    ahead = []
    while engine.has_work:
        engine.step()
        ahead.append(len(engine._in_flight))
    assert sum(ahead[20:80]) >= 58


def test_a_long_prompt_does_not_keep_others_from_being_drafted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the draft model catches up with it, those that are caught up with go on."""
    monkeypatch.setattr(proposers, "MOST_CAUGHT_UP", 16)
    engine = make_engine(fake=ROOMY, draft=draft_model(), speculation="draft")
    verify_all(engine)
    long = Request("long", [token % VOCAB for token in range(120)], Limits(max_new_tokens=40))
    short = Request("short", [1, 2, 3], Limits(max_new_tokens=40))
    engine.add(long)
    engine.step()
    engine.add(short)
    for _ in range(4):
        engine.step()
    assert long.num_proposed == 0, "it is still caught up with"
    assert short.num_agreed > 0
    run(engine)
    assert long.num_agreed > 0
    assert_clean(engine)


def test_a_draft_model_finds_the_prefix_it_has_computed() -> None:
    """A conversation's next turn: what the draft model has computed of it is not computed again."""
    engine = make_engine(fake=ROOMY, draft=draft_model(), speculation="draft")
    verify_all(engine)
    backend, computed = engine._drafter._backend, list[int]()  # type: ignore[union-attr]
    assert backend is not None
    forward = backend.forward
    backend.forward = lambda batch: computed.append(len(batch)) or forward(batch)  # type: ignore[method-assign,func-returns-value]
    first = Request("a", list(range(40)), Limits(max_new_tokens=8))
    engine.add(first)
    run(engine)
    assert computed[0] > 40
    computed.clear()
    engine.add(Request("b", [*first.tokens, 7, 8, 9], Limits(max_new_tokens=8)))
    run(engine)
    assert computed[0] <= 8
    assert_clean(engine)


BUGS = [
    PlantedBug(
        "one token too many is accepted",
        results,
        "num_common",
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
        "np.append(log, np.array(proposed, dtype=np.int32)) if proposed else log",
        "log",
    ),
    PlantedBug(
        "rules without the proposed tokens",
        state.SamplingState,
        "taxes",
        "_following(rule, proposed)",
        "rule",
    ),
    PlantedBug(
        "stop tokens are banned for too long",
        state.SamplingState,
        "edits",
        "len(self._logs[row]) + len(proposed)",
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


DRAFT_BUGS = [
    PlantedBug(
        "the draft model keeps the KV of what was not said",
        proposers.DraftProposer,
        "_trim_to_log",
        "self._kv.trim(held.seq, held.num_computed)",
        "pass",
    ),
    PlantedBug(
        "drafts are drawn with another position's key",
        proposers.DraftProposer,
        "_draft",
        "self._sampler_of(rows[places], lengths[places] + np.int32(i), before)",
        "self._sampler_of(rows[places], lengths[places], before)",
    ),
    PlantedBug(
        "ids of the wrong rows are taken from the other token table",
        paged_backend.PagedBackend,
        "_take_ids",
        "table[table_row]",
        "table[table_row[::-1]]",
    ),
    PlantedBug(
        "drafts are overwritten by those of the next position",
        proposers._Round,
        "table_rows",
        "len(self.turns) if self.keeps_two and position % 2 else 0",
        "0",
    ),
]


@pytest.mark.parametrize("bug", DRAFT_BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_of_drafting_are_found(bug: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    def draft_right_and_wrong() -> None:
        test_a_draft_model_that_says_the_same_is_right(0, 0)
        test_a_draft_model_that_says_something_else_changes_nothing(0, VOCAB + 3)
        for vocab_size in (VOCAB, VOCAB + 3):
            test_drafts_are_verified_before_the_host_has_seen_them(vocab_size)

    plant(bug, monkeypatch)
    with pytest.raises((AssertionError, TokenmillError)):
        draft_right_and_wrong()


# -- lookup -----------------------------------------------------------------------------------------------------------


def tokens_of(*runs: Sequence[int]) -> list[int]:
    return [token for run in runs for token in run]


def test_what_followed_the_longest_and_latest_match_is_proposed() -> None:
    index = SuffixIndex(64)
    index.add(tokens_of([1, 2, 3, 4, 5, 6, 7], [9, 9, 3, 4, 8, 8, 8], [3, 4]))
    assert index.find(tokens_of([3, 4]), 2) == Proposal((8, 8), 2, support=0), "another place says something else"
    assert index.find(tokens_of([2, 3, 4]), 3) == Proposal((5, 6, 7), 3, support=0)
    assert index.find(tokens_of([5, 6]), 1) == Proposal((7,), 2)
    assert index.find(tokens_of([8, 8]), 1).support == 0
    index.add([0, 1, 2, 3])
    assert index.find(tokens_of([1, 2]), 1) == Proposal((3,), 2, support=2), "all places say so"
    assert index.find(tokens_of([50, 51]), 3).tokens == ()
    assert index.find(tokens_of([4]), 3).tokens == ()


def test_a_log_that_repeats_itself_goes_on_doing_so() -> None:
    index = SuffixIndex(64)
    log = tokens_of([7, 1, 2, 3] * 3)
    index.add(log)
    assert index.find(log, 6).tokens == (7, 1, 2, 3, 7, 1)


def test_an_index_agrees_with_a_search_of_the_log() -> None:
    """Whatever is overwritten: a proposal followed a match that is in the ring; recent pairs are found as a rule."""
    choose = np.random.default_rng(1)
    index, log, num_missed = SuffixIndex(256), np.zeros(0, dtype=np.int32), 0
    for _ in range(300):
        new = choose.integers(0, 6, choose.integers(1, 9)).astype(np.int32)
        log = np.concatenate([log, new])
        index.add(new)
        found = index.find(log[-LONGEST_MATCH:].tolist(), 4)
        held = log[-256:].tolist()
        if found.tokens:
            match, tokens = held[len(held) - found.match :], list(found.tokens)
            whole = match + tokens
            places = [i for i in range(len(held)) if held[i : i + found.match] == match]
            period = [i for i in places[:-1] if (held[i + found.match :] * 4)[:4] == tokens]
            assert period or any(held[i : i + len(whole)] == whole for i in places), "it was never said"
        else:
            num_missed += held[-2:] in [held[i : i + 2] for i in range(len(held) - 3)][-8:]
    assert num_missed < 6, "a hash collision is rare"


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
    tail = index.latest()[-LONGEST_MATCH:].tolist()
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


FAST = {"max_context": 512, "num_cells": 8192, "max_seqs": 16}
STEP_S = (0.01, 0.0005, 0.0)
"""Of a model for which rows are cheap."""


def seconds_of(depth: int, mode: str, draft_s: tuple[float, float, float] | None, *, num_new: int = 200) -> float:
    """Until one request has said so much, with a draft model that is always right."""
    engine, clock = timed_engine(depth, STEP_S, FAST, draft_s=draft_s, max_num_seqs=8, speculation=mode)
    engine.add(Request("r", [1, 2, 3], Limits(max_new_tokens=num_new)))
    run(engine)
    assert engine.failure is None
    return clock.now


@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_model_pays_if_it_is_fast(depth: int) -> None:
    without = seconds_of(depth, "off", None)
    assert seconds_of(depth, "draft", (0.001, 0.0, 0.0)) < 0.5 * without


@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_model_that_is_slow_costs_little(depth: int) -> None:
    """It takes as long as the model itself: it is paused, and tried again after longer and longer times."""
    without = seconds_of(depth, "off", None, num_new=400)
    assert seconds_of(depth, "draft", (0.02, 0.0, 0.0), num_new=400) < 1.08 * without


@pytest.mark.parametrize("depth", [0, 1])
def test_a_draft_model_that_is_slow_at_first_is_used_all_the_same(depth: int) -> None:
    """The first call behind the prompt takes half a second, as where kernels are compiled."""
    engine, clock = timed_engine(depth, STEP_S, FAST, draft_s=(0.001, 0.0, 0.0), max_num_seqs=8, speculation="draft")
    drafter = engine._drafter
    assert drafter is not None
    draft, sampler_of, num_calls = drafter._draft, drafter._sampler_of, Counter[str]()

    def count(*args: Any) -> Any:
        num_calls["draft"] += 1
        return draft(*args)

    def compile_once(*args: Any) -> Any:
        clock.now += 0.5 if num_calls["draft"] == 2 and not num_calls["compiled"] else 0.0
        num_calls["compiled"] = num_calls["draft"] // 2
        return sampler_of(*args)

    drafter._draft, drafter._sampler_of = count, compile_once  # type: ignore[method-assign]
    request = Request("r", [1, 2, 3], Limits(max_new_tokens=400))
    engine.add(request)
    run(engine)
    assert request.num_agreed > 150


def test_auto_drafts_where_nothing_is_found_and_looks_up_where_it_is_surer() -> None:
    engine, _ = timed_engine(0, STEP_S, FAST, draft_s=(0.002, 0.0, 0.0), max_num_seqs=8, speculation="auto")
    names: Counter[str] = Counter()
    engine.events.subscribe(lambda event: names.update(event.proposers) if isinstance(event, VerifiedEvent) else None)
    engine.add(Request("new", [1, 2, 3], Limits(max_new_tokens=60)))
    run(engine)
    assert names["draft"] > 5
    names.clear()
    said = tuple(said_alone(Request("", [1, 2, 3], Limits())))
    predicted = SamplingParams(temperature=0, prediction_token_ids=said)
    engine.add(Request("predicted", [1, 2, 3], Limits(max_new_tokens=60), draw=Draw(params=predicted, seed=0)))
    run(engine)
    assert names["lookup"] > names["draft"]


def test_a_request_that_nothing_is_proposed_for_is_submitted_ahead() -> None:
    """At depth 1: it gives its place ahead up only while that pays."""
    engine, _ = timed_engine(1, STEP_S, FAST, max_num_seqs=8, speculation="lookup")
    said = said_alone(Request("", [1, 2, 3], Limits()))
    oracle = speculate_from(engine, lambda request: said if len(request.output) > 40 else ())
    engine.add(Request("r", [1, 2, 3], Limits(max_new_tokens=60)))
    ahead, steps = [], ticks_of(engine)
    while engine.has_work:
        engine.step()
        ahead.append(len(engine._in_flight))
    assert sum(ahead[8:36]) > 24, "a step is in flight after each call while nothing is proposed"
    assert oracle.num_asked > 20, "it is looked up for all the same"
    assert len(steps) < 52, "what is found in the end is verified several tokens at a time"


def speculate_from(engine: EngineCore, known: Any) -> Oracle:
    oracle = Oracle(known, wrong=0.0, missing=0.0)
    engine.scheduler.speculation.proposers["lookup"] = oracle
    return oracle


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


# -- what it must not use up ------------------------------------------------------------------------------------------


def test_background_requests_get_no_proposals_beside_others() -> None:
    """They have only the time that others leave; alone they speculate as all do."""
    engine, _ = timed_engine(0, STEP_S, FAST, max_num_seqs=8, speculation="lookup", background_slowdown=2.0)
    speculate(engine, Oracle(said_alone, wrong=0.0, missing=0.0))
    off = Draw(params=SamplingParams(speculation="off", temperature=0))
    other = Request("other", [4, 5, 6], Limits(max_new_tokens=40), draw=off)
    line = Request("line", [1, 2, 3], Limits(max_new_tokens=60), Hints(priority=BACKGROUND))
    engine.add(other)
    engine.add(line)
    while not other.is_finished:
        engine.step()
    assert len(line.output) > 10, "it decodes beside the other one"
    assert line.num_proposed == 0
    run(engine)
    assert line.num_agreed > 0


def test_proposals_are_within_the_request_s_own_bounds() -> None:
    """Its tokens per step, and its length: the last token is drawn in any case."""
    engine = make_engine(fake=ROOMY, speculation="lookup")
    speculate(engine, Oracle(said_alone, wrong=0.0, missing=0.0))
    ticks = ticks_of(engine)
    slow = Request("slow", [1, 2, 3], Limits(max_new_tokens=20, max_tokens_per_step=3))
    engine.add(slow)
    run(engine)
    assert slow.num_agreed > 0
    assert max(int(tick.plan.counts.max()) for tick in ticks) == 3
    short = Request("short", [4, 5, 6], Limits(max_new_tokens=2))
    engine.add(short)
    run(engine)
    assert short.num_proposed == 0


def test_a_draft_model_stops_at_its_own_context() -> None:
    model = FakeModel(FakeConfig(vocab_size=VOCAB, max_context=16, block_size=4))
    engine = make_engine(
        fake=ROOMY, draft=DraftModel(model, BackendLimits(num_cells=4096, max_seqs=64, max_context=16))
    )
    verify_all(engine)
    for name in ("first", "second"):  # the second one shows that the first has not broken it
        draw = Draw(params=SamplingParams(speculation="draft", temperature=0))
        request = Request(name, [1, 2, 3], Limits(max_new_tokens=40), draw=draw)
        engine.add(request)
        run(engine)
        assert 0 < request.num_proposed <= 13
    assert engine._drafter is not None
    assert engine._drafter.can_propose(Request("r", [1], Limits()))
    assert_clean(engine)


def test_a_request_does_not_inherit_what_was_learnt_of_another_in_its_row() -> None:
    engine = make_engine(fake=ROOMY, speculation="lookup")
    acceptance = engine.scheduler.speculation._acceptance["lookup"]
    fresh = acceptance.chances(0, Proposal((1,), 8), 1)
    acceptance.learn(0, Proposal((1,), 8), 0, 1)
    shared = acceptance.chances(1, Proposal((1,), 8), 1)
    assert acceptance.chances(0, Proposal((1,), 8), 1) < shared < fresh
    engine.add(Request("r", [1, 2, 3], Limits(max_new_tokens=4)))
    engine.step()
    assert acceptance.chances(0, Proposal((1,), 8), 1) == shared


def test_logs_of_many_keys_are_bounded_together() -> None:
    proposer = LookupProposer(most_shared=1 << 13)
    for number in range(20):
        proposer.keep(Request("r", list(range(100)), Limits(), Hints(key=f"k{number}")))
    assert proposer.num_bytes <= 2 * SuffixIndex().num_bytes
    tail = Request("t", list(range(50)), Limits(), Hints(key="k19"))
    assert proposer.propose([tail], [3])[0].tokens == (50, 51, 52), "the latest ones are there"


def test_nothing_is_kept_of_requests_that_are_over() -> None:
    engine = make_engine(fake=ROOMY, speculation="lookup")
    engine.scheduler.cost.price = lambda _: Price(1.0, CostLine())  # type: ignore[method-assign]
    for number in range(3):
        engine.add(Request(f"r{number}", [1, 2, 3] * 5, Limits(max_new_tokens=20)))
    engine.step()
    engine.step()
    lookup = engine.scheduler.speculation.proposers["lookup"]
    assert isinstance(lookup, LookupProposer)
    assert lookup._own
    engine.cancel("r0")
    run(engine)
    assert not lookup._own


def test_a_draft_model_that_does_not_pay_is_tried_again() -> None:
    engine, _ = timed_engine(0, STEP_S, FAST, draft_s=(0.02, 0.0, 0.0), max_num_seqs=8, speculation="draft")
    request = Request("r", [1, 2, 3], Limits(max_new_tokens=400))
    engine.add(request)
    while len(request.output) < 40:
        engine.step()
    before = request.num_proposed
    run(engine)
    assert before < request.num_proposed < before + 20, "a few tokens each time, ever more rarely"
