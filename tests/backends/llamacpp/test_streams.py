"""Streams: who gets one, who leaves it, who is moved; and that nothing said depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.llamacpp.files import VOCAB
from tokenmill import LLM, SamplingParams, open_model
from tokenmill.backends.llamacpp.native import NativeContext
from tokenmill.backends.llamacpp.streams import PATIENCE, StreamedContext
from tokenmill.contract import BackendLimits, BatchBuilder
from tokenmill.text.tokenizer import ByteTokenizer

STREAM = 256
FOUR = BackendLimits(num_cells=4 * STREAM, max_seqs=16, max_context=STREAM, num_running=4, num_threads=1)
TEXTS = [[(7 * seq + i) % 250 for i in range(40)] for seq in range(6)]


@pytest.fixture
def backend(model: Any) -> Iterator[Any]:
    """Four streams."""
    with model.new_backend(FOUR) as made:
        yield made


@pytest.mark.parametrize(
    ("num_cells", "option", "has_streams"),
    [(4 * STREAM, None, True), (4 * STREAM - 1, None, False), (4 * STREAM, True, False), (STREAM, False, True)],
)
def test_all_that_run_have_a_stream_or_none(
    small: Path, num_cells: int, option: bool | None, has_streams: bool
) -> None:
    given = {} if option is None else {"kv_unified": option}
    opened = open_model(str(small), backend="llamacpp", **given)
    limits = BackendLimits(num_cells=num_cells, max_context=200, num_running=4)
    with opened.new_backend(limits) as made:
        assert isinstance(made._context, StreamedContext if has_streams else NativeContext)
        assert (made.capabilities.parked_cells is None) == has_streams
    opened.close()


def test_states_of_recurrent_models_are_no_streams(recurrent: Any) -> None:
    with recurrent.new_backend(FOUR) as made:
        assert isinstance(made._context, NativeContext)


def fresh(model: Any, tokens: list[int]) -> Any:
    with model.new_backend(BackendLimits(num_cells=STREAM, num_threads=1)) as other:
        return other.decode(BatchBuilder().add_run(tokens, 0, 0).build()).logits[0]


def step(backend: Any, seqs: dict[int, int]) -> Any:
    """The token 1 for each of these sequences, at its position."""
    builder = BatchBuilder()
    for seq, pos in seqs.items():
        builder.add(1, pos, seq, 1)
    return backend.decode(builder.build()).logits


@pytest.mark.req("R8")
def test_those_that_run_are_moved_side_by_side(model: Any, backend: Any) -> None:
    context = backend._context
    for seq in range(4):
        backend.decode(BatchBuilder().add_run(TEXTS[seq], 0, seq).build())
    backend.kv.seq_rm(1)
    assert context._stream_of == {0: 0, 2: 2, 3: 3}
    for i in range(PATIENCE):
        step(backend, {3: 40 + i, 0: 40 + i})  # in another order than their streams
    assert context._stream_of == {0: 0, 2: 2, 3: 3}
    rows = step(backend, {3: 40 + PATIENCE, 0: 40 + PATIENCE})
    assert sorted(context._stream_of[seq] for seq in (0, 3)) in ([0, 1], [2, 3])
    for row, seq in zip(rows, (3, 0), strict=True):
        assert np.abs(row - fresh(model, [*TEXTS[seq], *[1] * (PATIENCE + 1)])).max() < 0.05
    assert np.abs(step(backend, {2: 40})[0] - fresh(model, [*TEXTS[2], 1])).max() < 0.05


@pytest.mark.req("R8")
def test_the_same_crowd_again_and_again_until_one_of_them_changes(model: Any, backend: Any) -> None:
    """Three in another order than their streams; a step like the one before looks nothing up."""
    context, told = backend._context, {2: list(TEXTS[2]), 0: list(TEXTS[0]), 1: list(TEXTS[1])}
    for seq in range(3):
        backend.decode(BatchBuilder().add_run(TEXTS[seq], 0, seq).build())

    def goes_on() -> bool:
        before = context._crowd
        rows = step(backend, {seq: len(tokens) for seq, tokens in told.items()})
        for row, tokens in zip(rows, told.values(), strict=True):
            tokens.append(1)
            assert np.abs(row - fresh(model, tokens)).max() < 0.05
        return before is context._crowd

    assert [goes_on() for _ in range(3)] == [False, True, True]
    backend.kv.seq_rm(0)  # it comes back as another, in another stream
    backend.kv.seq_cp(1, 3)
    told = {2: told[2], 3: list(told[1]), 1: told[1]}
    assert [goes_on() for _ in range(3)] == [False, True, True]
    backend.kv.seq_rm(3, 20)
    told[3] = told[3][:20]
    assert goes_on()


@pytest.mark.req("R4", "R8")
def test_whoever_has_no_stream_left_is_kept_as_bytes(model: Any, backend: Any) -> None:
    """Six sequences on four streams, one of them a copy of part of another; all go on, even in one step."""
    for seq in range(5):
        backend.decode(BatchBuilder().add_run(TEXTS[seq], 0, seq).build())
    backend.kv.seq_cp(0, 5, 0, 17)
    assert sorted(backend._context._stream_of) == [1, 2, 3, 4]
    assert sorted(backend._context._kept) == [0, 5]
    told = [*TEXTS[:5], TEXTS[0][:17]]
    rows = step(backend, {seq: len(tokens) for seq, tokens in enumerate(told)})
    for row, tokens in zip(rows, told, strict=True):
        assert np.abs(row - fresh(model, [*tokens, 1])).max() < 0.05
    backend.kv.check_integrity()
    for seq in range(6):
        backend.kv.seq_rm(seq)
    assert not backend._context._stream_of
    assert not backend._context._kept


@pytest.mark.req("R4")
def test_requests_come_and_go_on_few_streams(small: Path) -> None:
    """As many as run have streams; the KV of those that have ended is kept for whoever begins alike."""
    with LLM(
        str(small),
        backend="llamacpp",
        tokenizer=ByteTokenizer(VOCAB),
        max_num_seqs=3,
        max_model_len=STREAM,
        num_threads=1,
    ) as llm:
        context = llm.engine._executor.backend._context
        assert isinstance(context, StreamedContext)
        params = SamplingParams(temperature=0, max_tokens=4)
        alone = [llm.generate([[number, *range(50)]], params)[0] for number in range(9)]
        assert len(context._kept) == 6
        again = llm.generate([[number, *range(50)] for number in range(9)], params)
        for first, second in zip(alone, again, strict=True):
            assert second.outputs[0].token_ids == first.outputs[0].token_ids
            assert second.usage.cached_tokens == 50
        llm.engine.check_integrity()
        llm.engine.kv.evict_all()
        assert not context._kept
        assert not context._stream_of
