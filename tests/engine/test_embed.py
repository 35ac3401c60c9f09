"""Embeddings: hidden states pooled over chunks, preemption, the prefix cache, and every client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from tests.engine.helpers import VOCAB, alone, assert_clean, backend_of, make_engine, request, run, ticks_of
from tests.engine.test_clients import KINDS, client_of
from tests.engine.test_pool import Listener
from tokenmill import LLM, AsyncLLM
from tokenmill.backends.fake import FakeBackend, FakeConfig, Fault, FaultKind
from tokenmill.contract import BatchBuilder, Output
from tokenmill.engine.client import InlineClient
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Limits, Request
from tokenmill.errors import InvalidRequest, RequestFailed
from tokenmill.outputs import FinishReason
from tokenmill.params import Pooling

LONG = [(7 * i) % VOCAB for i in range(90)]


def hidden_of(prompt: Sequence[int]) -> np.ndarray:
    """The hidden states of all tokens of a prompt, computed in one pass."""
    with FakeBackend(FakeConfig(vocab_size=VOCAB)) as backend:
        batch = BatchBuilder()
        for pos, token in enumerate(prompt):
            batch.add(token, pos, 0, Output.HIDDEN)
        return backend.decode(batch.build()).hidden


def embedding(name: str, prompt: Sequence[int], pooling: Pooling) -> Request:
    return Request(name, prompt, Limits(max_new_tokens=1), pooling=pooling)


def check(one: Request) -> None:
    hidden = hidden_of(one.tokens)
    wanted = hidden[-1] if one.pooling is Pooling.LAST else hidden.mean(axis=0)
    assert one.finish_reason is FinishReason.STOP
    assert np.allclose(one.embedding, wanted, atol=1e-5)


def fill(engine: EngineCore) -> list[Request]:
    """Embeddings of many lengths among requests that generate."""
    requests = []
    for i, pooling in enumerate([Pooling.LAST, Pooling.MEAN] * 4):
        requests.append(embedding(f"e{i}", LONG[: 1 + (11 * i) % 90], pooling))
        engine.add(requests[-1])
        engine.add(request(f"g{i}", LONG[: 5 + i], max_new_tokens=8))
    return requests


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cells", [512, 128])
def test_chunked_crowded_and_preempted(depth: int, cells: int) -> None:
    engine = make_engine(depth=depth, fake={"num_cells": cells}, prefill_chunk=16, max_num_batched_tokens=40)
    requests = fill(engine)
    said = run(engine)
    for one in requests:
        check(one)
        assert said.tokens[one.request_id] == []
    alone = make_engine()
    for i in range(8):
        alone.add(request(f"g{i}", LONG[: 5 + i], max_new_tokens=8))
    assert {name: tokens for name, tokens in run(alone).tokens.items() if tokens} == {
        name: tokens for name, tokens in said.tokens.items() if tokens
    }
    assert_clean(engine)


def test_the_last_token_reads_the_prefix_cache_and_the_mean_does_not() -> None:
    engine = make_engine()
    engine.add(request("first", LONG, max_new_tokens=2))
    run(engine)
    last, mean = embedding("last", LONG, Pooling.LAST), embedding("mean", LONG, Pooling.MEAN)
    for one in (last, mean):
        engine.add(one)
        run(engine)
        check(one)
    assert last.num_cached == len(LONG) - 1
    assert mean.num_cached == 0


@pytest.mark.parametrize("kind", [FaultKind.FAIL, FaultKind.LATE_FAIL])
@pytest.mark.parametrize("depth", [0, 1])
def test_steps_that_fail_leave_the_mean_right(kind: FaultKind, depth: int) -> None:
    engine = make_engine(depth=depth, prefill_chunk=16, max_num_batched_tokens=40)
    backend_of(engine).faults.add(Fault(kind, after=2))
    requests = fill(engine)
    run(engine)
    for one in requests:
        check(one)
    assert_clean(engine)


def test_hidden_states_that_are_not_finite_fail_their_request_alone() -> None:
    engine = make_engine()
    backend_of(engine).faults.add(Fault(FaultKind.NAN, token=63))
    bad, good = embedding("bad", [1, 63], Pooling.MEAN), embedding("good", [1, 2], Pooling.MEAN)
    for one in (bad, good):
        engine.add(one)
    run(engine)
    assert bad.finish_reason is FinishReason.ERROR
    check(good)
    assert_clean(engine)


@pytest.mark.req("R32")
@pytest.mark.parametrize("kind", KINDS)
def test_over_every_client(kind: str) -> None:
    with client_of(kind) as client:
        one, heard = embedding("one", LONG, Pooling.MEAN), Listener()
        client.submit(one, heard)
        if isinstance(client, InlineClient):
            client.run(heard.ended.is_set)
        assert heard.result()[1] is FinishReason.STOP
        assert np.allclose(one.embedding, hidden_of(LONG).mean(axis=0), atol=1e-5)


def test_from_text_to_vectors() -> None:
    with LLM("fake") as llm:
        outs = llm.embed(["hello", [104, 101, 108, 108, 111], "other"], pooling="mean")
        assert outs[0].outputs.embedding == outs[1].outputs.embedding != outs[2].outputs.embedding
        assert np.isclose(np.linalg.norm(outs[0].outputs.embedding), 1)
        assert outs[0].usage.prompt_tokens == 5
        raw = llm.embed("hello", pooling="last", normalize=False)[0].outputs.embedding
        assert not np.isclose(np.linalg.norm(raw), 1)
        with pytest.raises(InvalidRequest, match="pooling 'max' is not supported; supported: 'last', 'mean'"):
            llm.embed("hello", pooling="max")
        with pytest.raises(InvalidRequest, match="empty"):
            llm.embed([""])

    async def online() -> list[float]:
        async with AsyncLLM("fake") as remote:
            return (await remote.embed("hello", pooling="mean")).outputs.embedding

    assert asyncio.run(online()) == outs[0].outputs.embedding


def test_a_text_as_long_as_the_context() -> None:
    with LLM("fake", max_model_len=64) as llm:
        assert len(llm.embed([[1] * 64])) == 1
        with pytest.raises(InvalidRequest, match="maximum context length is"):
            llm.embed([[1] * 65])


def test_a_failure_is_told() -> None:
    with LLM("fake", config=None) as llm:
        backend_of(llm.engine).faults.add(Fault(FaultKind.NAN))
        with pytest.raises(RequestFailed, match="not finite"):
            llm.embed("hello")


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_that_served_an_embedding_decodes_text_afterwards(depth: int) -> None:
    engine = make_engine(depth=depth, max_num_seqs=1)
    ticks = ticks_of(engine)
    engine.add(embedding("vector", LONG[:20], Pooling.MEAN))
    run(engine)
    said = request("text", (5, 6, 7), max_new_tokens=6)
    engine.add(said)
    begin = len(ticks)
    run(engine)
    assert [tick.plan.num_decode for tick in ticks[begin : begin + 6]] == [0, 1, 1, 1, 1, 1]
    assert said.output == alone((5, 6, 7), 6)
    again = embedding("again", LONG[:20], Pooling.MEAN)
    engine.add(again)
    run(engine)
    check(again)


def test_an_embedding_that_is_cancelled_while_its_step_is_in_flight_hurts_nobody() -> None:
    engine = make_engine(depth=1)
    gone, stays = embedding("gone", LONG[:20], Pooling.MEAN), embedding("stays", LONG[:30], Pooling.MEAN)
    engine.add(gone)
    engine.add(stays)
    engine.step()
    engine.cancel("gone")
    run(engine)
    assert gone.finish_reason is FinishReason.CANCELLED
    assert not gone.embedding
    check(stays)


def test_a_caller_who_leaves_ends_the_embedding() -> None:
    async def play() -> None:
        async with AsyncLLM("fake") as llm:
            asked = asyncio.create_task(llm.embed("hello"))
            await asyncio.sleep(0)  # it waits for the engine now
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert (await llm.embed("hello")).outputs.embedding

    asyncio.run(play())
