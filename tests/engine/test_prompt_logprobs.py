"""What a prompt's own tokens were worth, whatever chunks, neighbours and cached prefixes there are."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.helpers import VOCAB, assert_clean, backend_of, make_engine, request, run
from tokenmill.backends.fake import FakeBackend, FakeConfig, Fault, FaultKind
from tokenmill.contract import BatchBuilder, Output
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.engine.scheduler import SCORED_CHUNK
from tokenmill.outputs import TokenLogprobs
from tokenmill.params import SamplingParams

PROMPT = tuple((i * i) % VOCAB for i in range(150))


def expected(prompt: tuple[int, ...], count: int) -> list[TokenLogprobs]:
    """From the logits of every token, on a fresh backend."""
    builder = BatchBuilder()
    for pos, token in enumerate(prompt):
        builder.add(token, pos, 0, Output.LOGITS)
    with FakeBackend(FakeConfig(vocab_size=VOCAB)) as backend:
        logits = backend.decode(builder.build()).logits.astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = []
    for row, token in zip(logprobs, prompt[1:], strict=False):
        top = np.argsort(-row, kind="stable")[:count]
        found.append(TokenLogprobs(float(row[token]), tuple((int(i), float(row[i])) for i in top)))
    return found


def scored(name: str, prompt: tuple[int, ...] = PROMPT, count: int = 2) -> Request:
    draw = Draw(params=SamplingParams(temperature=0, prompt_logprobs=count), seed=1)
    return Request(name, prompt, Limits(max_new_tokens=3), draw=draw)


def assert_scores(one: Request, count: int = 2) -> None:
    wanted = expected(tuple(one.tokens[: one.num_prompt]), count)
    assert len(one.prompt_logprobs) == len(wanted)
    for got, want in zip(one.prompt_logprobs, wanted, strict=True):
        assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
        assert [token for token, _ in got.top] == [token for token, _ in want.top]


@pytest.mark.req("R29")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [512, 7])
def test_scores_are_those_of_a_fresh_pass(depth: int, chunk: int) -> None:
    engine = make_engine(depth=depth, prefill_chunk=chunk)
    engine.add(request("cached", PROMPT, max_new_tokens=30))
    for _ in range(4):
        engine.step()
    one, short = scored("one"), scored("short", (5, 6), count=0)
    engine.add(one)
    engine.add(short)
    run(engine)
    assert_scores(one)
    assert_scores(short, count=0)
    assert one.num_cached == 0, "a prompt that is scored has to be computed"
    follower = request("follower", (*PROMPT, 1), max_new_tokens=1)
    engine.add(follower)
    run(engine)
    assert follower.num_cached == len(PROMPT), "what it computed is there for others"
    assert_clean(engine)


@pytest.mark.req("R29")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.LATE_FAIL])
def test_scores_survive_failures_and_preemption(depth: int, kind: FaultKind) -> None:
    fake = {"num_cells": 240, "block_size": 4, "max_context": 200, "max_seqs": 8}
    engine = make_engine(depth=depth, fake=fake, admission_margin=0, prefill_chunk=16)
    backend_of(engine).faults.add(Fault(kind, after=3))
    first = request("first", tuple([9] * 40), max_new_tokens=60)
    one = scored("one", PROMPT[:120])
    engine.add(first)
    engine.add(one)
    run(engine)
    assert_scores(one)
    assert_clean(engine)


@pytest.mark.req("R29")
@pytest.mark.parametrize("depth", [0, 1])
def test_scores_of_a_prompt_that_was_preempted_midway_count_once(depth: int) -> None:
    """Beside a neighbour that decodes it had chunks of 10; alone it begins again with larger ones."""
    engine = make_engine(depth=depth, prefill_chunk=10)
    neighbour, one = request("neighbour", (7,), max_new_tokens=6), scored("one")
    engine.add(neighbour)
    engine.step()
    engine.add(one)
    while not neighbour.is_finished:
        engine.step()
    num_known = len(one.prompt_logprobs)
    assert 0 < num_known < SCORED_CHUNK
    engine.scheduler._preempt(one)
    run(engine)
    assert one.num_preemptions == 1
    assert_scores(one)
