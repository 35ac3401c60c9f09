"""Seeded requests say the same alone, in a crowd, after preemption, at both depths and in any place of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from tests.engine.helpers import VOCAB, Transcript, assert_clean, make_engine, run
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.errors import InvalidRequest
from tokenmill.outputs import FinishReason
from tokenmill.params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "top_p": {"top_p": 0.8, "temperature": 1.5},
    "top_k": {"top_k": 7, "min_p": 0.02},
    "typical": {"typical_p": 0.7},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "dry": {"dry_multiplier": 1.5, "dry_allowed_length": 1},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    "bias": {"logit_bias": {5: 4.0}, "banned_token_ids": (1, 2, 3)},
    "min_tokens": {"min_tokens": 6, "max_tokens": 40},
    "greedy": {"temperature": 0},
}
STOPS = frozenset({11, 12, 13, 14})
NEW = 20


def make(
    name: str, kind: str, seed: int = 77, choice: int = 0, attempt: int = 0, prefix: Sequence[int] = ()
) -> Request:
    params = SamplingParams(**KINDS[kind], attempt=attempt)
    prompt = [3, 1, len(kind), 4]
    limits = Limits(max_new_tokens=NEW, stop_ids=STOPS, min_new_tokens=params.min_tokens)
    return Request(name, prompt, limits, draw=Draw(params=params, seed=seed, choice=choice, prefix=tuple(prefix)))


@cache
def alone(kind: str) -> list[int]:
    engine = make_engine()
    engine.add(make(kind, kind))
    return run(engine).tokens[kind]


def crowd(engine: EngineCore) -> Transcript:
    transcript = Transcript()
    for i, kind in enumerate(KINDS):
        engine.add(make(kind, kind))
        engine.add(make(f"other {i}", kind, seed=i))
        transcript.add(engine.step())
    return run(engine, transcript)


@pytest.mark.fault("E03")
@pytest.mark.req("G12", "R6", "R29")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cells", [512, 100])
def test_a_seeded_request_never_notices_its_neighbours(depth: int, cells: int) -> None:
    """With 100 cells there is room for four requests of twenty-odd tokens: the others are preempted and resumed."""
    fake = {"num_cells": cells, "block_size": 4, "max_context": 64, "max_seqs": 32}
    engine = make_engine(depth=depth, fake=fake, max_num_seqs=12, admission_margin=0)
    transcript = crowd(engine)
    for kind in KINDS:
        assert transcript.tokens[kind] == alone(kind), kind
    assert_clean(engine)


@pytest.mark.fault("E03")
@pytest.mark.req("G20")
def test_choices_and_attempts_of_one_seed_differ_and_are_their_own() -> None:
    engine = make_engine(max_num_seqs=8)
    for choice in range(4):
        engine.add(make(f"choice {choice}", "plain", choice=choice))
    engine.add(make("again", "plain", attempt=1))
    said = run(engine).tokens
    assert len({tuple(tokens) for tokens in said.values()}) == 5
    assert said["choice 0"] == alone("plain")
    engine.add(make("choice 2 alone", "plain", choice=2))
    assert run(engine).tokens["choice 2 alone"] == said["choice 2"]


@pytest.mark.req("R43")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_resumes_after_any_part_of_it(depth: int, kind: str) -> None:
    """And even after its end: a draw ends it. One step computes the prompt and what is there of the output."""
    output = alone(kind)
    for count in range(1, len(output) + 1):
        engine = make_engine(depth=depth)
        engine.add(make("r", kind, prefix=output[:count]))
        assert run(engine).tokens["r"] == output
        assert depth or engine.scheduler.tick == max(1, len(output) - count)
        assert_clean(engine)


@pytest.mark.req("R43")
def test_an_output_begins_with_tokens_that_would_not_be_drawn() -> None:
    drawn = alone("plain")
    other = [token for token in range(20, 30) if token != drawn[0]][:3]
    engine = make_engine()
    engine.add(make("r", "plain", prefix=other))
    engine.add(make("drawn", "plain"))
    said = run(engine).tokens
    assert said["r"][:3] == other
    assert said["drawn"] == drawn
    engine.add(make("again", "plain", prefix=said["r"][:5]))
    assert run(engine).tokens["again"] == said["r"]
    for outside in (-1, VOCAB):
        with pytest.raises(InvalidRequest, match="outside the vocabulary"):
            engine.add(make("outside", "plain", prefix=[1, outside]))


def test_an_unseeded_request_gets_a_seed_that_can_be_told() -> None:
    first, second = Draw(), Draw()
    assert first.seed != second.seed
    assert 0 <= first.seed < 1 << 63


@pytest.mark.req("R29")
@pytest.mark.parametrize("depth", [0, 1])
def test_log_probabilities_come_with_the_tokens_that_asked(depth: int) -> None:
    engine = make_engine(depth=depth)
    limits = Limits(max_new_tokens=5)
    engine.add(Request("with", [1, 2], limits, draw=Draw(params=SamplingParams(temperature=0, logprobs=3), seed=1)))
    engine.add(Request("without", [1, 2], limits, draw=Draw(params=SamplingParams(temperature=0), seed=1)))
    seen = {"with": 0, "without": 0}
    while engine.has_work:
        for output in engine.step():
            if output.request_id == "without":
                assert output.logprobs is None
                continue
            assert output.logprobs is not None
            assert output.logprobs.top[0] == (output.token_id, pytest.approx(output.logprobs.logprob))
            assert len(output.logprobs.top) == 3
            seen["with"] += 1
    assert seen["with"] == 5


@pytest.mark.req("R29")
def test_stop_tokens_wait_for_min_tokens() -> None:
    engine = make_engine()
    everything = tuple(range(VOCAB))
    request = Request(
        "r",
        [1],
        Limits(max_new_tokens=9, stop_ids=STOPS, min_new_tokens=4),
        draw=Draw(params=SamplingParams(min_tokens=4, logit_bias=dict.fromkeys(STOPS, 50.0)), seed=3),
    )
    engine.add(request)
    transcript = run(engine)
    assert transcript.reasons["r"] is FinishReason.STOP
    assert len(transcript.tokens["r"]) == 5
    assert not STOPS & set(transcript.tokens["r"][:4])
    assert set(transcript.tokens["r"]) <= set(everything)
