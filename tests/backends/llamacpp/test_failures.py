"""When llama.cpp fails: no trace is left, requests end with a typed error, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.llamacpp.files import VOCAB, spoil, write_attention
from tokenmill import LLM, AsyncLLM, SamplingParams, open_model
from tokenmill.contract import BAD_ROW, BackendLimits, BatchBuilder, SampleRows
from tokenmill.errors import ForwardFailed, InvalidBatch
from tokenmill.text.tokenizer import ByteTokenizer

LIMITS = BackendLimits(num_cells=256, max_seqs=8, ubatch_size=4, num_threads=1)
PARAMS = SamplingParams(temperature=0, max_tokens=6)
OPTIONS: dict[str, Any] = {"backend": "llamacpp", "kv_cache_tokens": 512, "num_threads": 1}
ERROR_INSIDE = -3
BAD_TOKEN = 255


def fail_with(code: int, monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool]) -> None:
    """Let llama_decode compute, and then give a code; `when` is asked with the number of each call."""
    from tokenmill.backends.llamacpp.native import NativeContext

    compute, calls = NativeContext._decode, iter(range(1 << 30))

    def decode(self: Any) -> int:
        done = compute(self)
        return code if when(next(calls)) else done

    monkeypatch.setattr(NativeContext, "_decode", decode)


def abort_after(backend: Any, num_nodes: int) -> Any:
    """Let llama.cpp itself stop in the middle of a batch, when so many nodes of its graphs are computed."""
    import llama_cpp as llama

    left = iter(range(num_nodes))
    callback = llama.ggml_abort_callback(lambda _: next(left, None) is None)
    llama.llama_set_abort_callback(backend._context._pointer, callback, None)
    return callback


@pytest.mark.req("R24")
@pytest.mark.parametrize("num_nodes", [1, 40, 80, 120])
def test_what_was_computed_before_an_abort_is_removed(model: Any, num_nodes: int) -> None:
    """Five ubatches; those that were done when it stopped would stay in llama.cpp's memory."""
    batch = BatchBuilder().add_run(list(range(30, 50)), 5, 0).build()
    with model.new_backend(LIMITS) as backend, model.new_backend(LIMITS) as other:
        for one in (backend, other):
            one.decode(BatchBuilder().add_run([1, 2, 3, 4, 5], 0, 0).build())
        callbacks = [abort_after(backend, num_nodes)]  # C keeps no reference
        with pytest.raises(ForwardFailed, match=r"was aborted \(code 2\)") as failure:
            backend.decode(batch)
        assert not failure.value.fatal
        assert backend._context.seq_pos_max(0) == backend.kv.seq_pos_max(0) == 4
        callbacks.append(abort_after(backend, 1 << 30))
        again, expected = backend.decode(batch).logits, other.decode(batch).logits
    assert np.array_equal(again, expected)


@pytest.mark.req("R24", "G17")
def test_a_state_that_can_not_go_back_is_fatal(recurrent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with recurrent.new_backend(LIMITS) as backend:
        backend.decode(BatchBuilder().add_run([1, 2, 3], 0, 0).build())
        with monkeypatch.context() as patch:
            fail_with(ERROR_INSIDE, patch, lambda _: True)
            with pytest.raises(ForwardFailed, match="cannot be restored") as failure:
                backend.decode(BatchBuilder().add(4, 3, 0, 1).build())
        assert failure.value.fatal
        with pytest.raises(ForwardFailed):
            backend.decode(BatchBuilder().add(4, 3, 0, 1).build())


def test_a_new_sequence_can_go_back_to_nothing(recurrent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with recurrent.new_backend(LIMITS) as backend:
        batch = BatchBuilder().add_run([1, 2, 3], 0, 0).build()
        expected = backend.decode(batch).logits
        backend.kv.seq_rm(0)
        with monkeypatch.context() as patch:
            fail_with(ERROR_INSIDE, patch, lambda _: True)
            with pytest.raises(ForwardFailed, match=r"code -3") as failure:
                backend.decode(batch)
        assert not failure.value.fatal
        assert np.array_equal(backend.decode(batch).logits, expected)


def test_what_llama_cpp_refuses_is_an_invalid_batch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with model.new_backend(LIMITS) as backend:
        fail_with(-1, monkeypatch, lambda _: True)
        with pytest.raises(InvalidBatch, match=r"llama\.cpp rejected the batch"):
            backend.decode(BatchBuilder().add(1, 0, 0, 1).build())
        assert backend.kv.stats().num_seqs == 0


@pytest.fixture
def spoilt(tmp_path: Path) -> Path:
    return spoil(write_attention(tmp_path / "spoilt.gguf"), BAD_TOKEN)


@pytest.mark.req("R24")
@pytest.mark.parametrize("extra", [{}, {"kv_unified": False, "flash_attn": False}], ids=["unified", "streams"])
def test_a_token_that_is_no_number_fails_its_own_request_only(spoilt: Path, extra: dict[str, bool]) -> None:
    with LLM(str(spoilt), tokenizer=ByteTokenizer(VOCAB), max_model_len=128, extra=extra, **OPTIONS) as llm:
        (wanted,) = llm.generate([[4, 5]], PARAMS)
        llm.engine.kv.evict_all()
        bad, good = llm.generate([[1, BAD_TOKEN, 3], [4, 5]], PARAMS)
        next_there = llm.generate([[9]], PARAMS)[0]  # beside cells that held what is no number
        again = llm.generate([[4, 5, 6]], PARAMS)[0]
    assert bad.outputs[0].finish_reason == "error"
    assert good.outputs[0].token_ids == wanted.outputs[0].token_ids
    assert again.error is None
    assert next_there.error is None


@pytest.mark.req("R24")
def test_a_memory_full_of_what_is_no_number_is_given_up(spoilt: Path) -> None:
    """Without flash attention such keys and values reach everybody: it must not stay so for ever."""
    model = open_model(str(spoilt), backend="llamacpp", n_threads=1, flash_attn=False)
    rows = SampleRows(np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32))
    with model.new_backend(LIMITS) as backend:
        for seq, tokens in enumerate([[1, BAD_TOKEN], [4, 5]]):
            step = backend.forward(BatchBuilder().add_run(tokens, 0, seq).build())
            assert backend.collect(backend.sample(step, rows)).ids[0] == BAD_ROW
        with pytest.raises(ForwardFailed, match="contains NaN") as failure:
            backend.forward(BatchBuilder().add(1, 2, 1).build())
        assert failure.value.fatal
    model.close()


@pytest.mark.req("G5")
def test_one_failure_of_a_batch_costs_nobody_anything(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is undone, and its requests are run alone."""
    with LLM(str(small), backend="llamacpp", tokenizer=ByteTokenizer(VOCAB), kv_cache_tokens=512, num_threads=1) as llm:
        prompts = [[1, 2, 3], [4, 5, 6, 7]]
        wanted = [out.outputs[0].token_ids for out in llm.generate(prompts, PARAMS)]
        llm.engine.kv.evict_all()
        fail_with(ERROR_INSIDE, monkeypatch, lambda number: number == 2)
        outs = llm.generate(prompts, PARAMS)
    assert [out.outputs[0].token_ids for out in outs] == wanted
    assert all(out.error is None for out in outs)


async def last_of(outputs: AsyncIterator[Any]) -> Any:
    return [output async for output in outputs][-1]


@pytest.mark.req("R49")
def test_an_engine_that_is_lost_ends_its_requests_and_is_replaced(mamba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that can't go back: those who run end with an error, and the next one finds a new engine."""

    async def play() -> tuple[Any, Any]:
        model = open_model(str(mamba), backend="llamacpp", n_threads=1)
        async with AsyncLLM(model, tokenizer=ByteTokenizer(VOCAB), kv_cache_tokens=512) as llm:
            with monkeypatch.context() as patch:
                fail_with(ERROR_INSIDE, patch, lambda number: number >= 3)
                lost = await last_of(llm.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=50)))
            found = await last_of(llm.generate([1, 2, 3], PARAMS))
        model.close()
        return lost, found

    async def in_time() -> tuple[Any, Any]:
        async with asyncio.timeout(60):
            return await play()

    lost, found = asyncio.run(in_time())
    assert lost.finished
    assert lost.outputs[0].finish_reason == "error"
    assert lost.error
    assert found.outputs[0].finish_reason == "length"
    assert len(found.outputs[0].token_ids) == 6
