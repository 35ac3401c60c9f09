"""A model whose layers have states: what can't be cut or copied in part is replayed, and nobody can tell."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.llamacpp.files import VOCAB
from tokenmill import LLM, SamplingParams, SessionService
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, BatchBuilder
from tokenmill.errors import Unsupported
from tokenmill.outputs import OutputDelta
from tokenmill.text.tokenizer import ByteTokenizer

LIMITS = BackendLimits(num_cells=256, max_seqs=1000, num_threads=1)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
OPTIONS: dict[str, Any] = {"tokenizer": ByteTokenizer(VOCAB), "kv_cache_tokens": 2048, "num_threads": 1}


def test_its_capabilities_say_what_it_can_not(recurrent: Any) -> None:
    with recurrent.new_backend(LIMITS) as backend:
        found = backend.capabilities
        assert (found.partial_rm, found.partial_cp, found.shift) == (False, False, False)
        assert found.max_seqs == 64  # each has a state from the beginning
        backend.decode(BatchBuilder().add_run([1, 2, 3], 0, 0).build())
        assert backend.kv.seq_rm(0, 2) is False
        assert backend._context.seq_pos_max(0) == 2
        with pytest.raises(Unsupported):
            backend.kv.seq_cp(0, 1, 0, 2)


@pytest.mark.req("R22")
def test_whole_sequences_are_copied_and_travel_as_bytes(recurrent: Any) -> None:
    with recurrent.new_backend(LIMITS) as backend:
        backend.decode(BatchBuilder().add_run([1, 2, 3], 0, 0).build())
        backend.kv.seq_cp(0, 1)
        backend.kv.import_(2, backend.kv.export(0))
        builder = BatchBuilder()
        for seq in range(3):
            builder.add(4, 3, seq, 1)
        rows = backend.decode(builder.build()).logits
        fresh = backend.decode(BatchBuilder().add_run([1, 2, 3, 4], 0, 5).build()).logits[0]
    assert np.abs(rows - fresh).max() < 1e-3
    assert np.abs(rows).max() > 1


@pytest.mark.req("R4", "R5", "R7", "G4")
def test_five_turns_each_as_if_all_were_computed_anew(mamba: Path) -> None:
    """Turns end by length, by a stop token, by cancel: sometimes the state goes on, sometimes the log is replayed."""
    with LLM(str(mamba), config=EngineConfig(prefix_caching=False), **OPTIONS) as fresh:
        asyncio.run(talk(mamba, fresh))


async def talk(path: Path, fresh: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    reused = 0
    async with asyncio.timeout(60), SessionService(str(path), **OPTIONS) as service:
        name = await service.create_session(sampling_params=params)
        session = service._model().queue.find(name)
        for turn in range(5):
            await service.append_input(name, [10 * turn + i for i in range(5)])
            log = session.log.tokens.tolist()
            expected = fresh.generate([log], LONG)[0].outputs[0].token_ids
            chunks = await answer(service, name, stop_at=expected[3] if turn == 1 else None, cancels=turn == 3)
            ids = [token for chunk in chunks for token in chunk.token_ids]
            assert ids == expected[: len(ids)]
            assert len(ids) >= 1
            usage = chunks[-1].usage
            assert usage is not None
            reused += usage.cached_tokens
    assert reused > 0


async def answer(service: SessionService, name: str, *, stop_at: int | None, cancels: bool) -> list[OutputDelta]:
    more: dict[str, Any] = {} if stop_at is None else {"stop_token_ids": (stop_at,)}
    stream = await service.generate_stream(name, **(more | ({"max_tokens": 100} if cancels else {})))
    chunks = [await anext(stream)]
    if cancels:
        await service.cancel_generate(name)
    chunks += [chunk async for chunk in stream]
    return chunks


def test_a_crowd_says_what_each_says_alone(mamba: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[number, *range(3, 3 + number)] for number in range(8)]
    with LLM(str(mamba), max_num_batched_tokens=8, max_num_seqs=4, **OPTIONS) as llm:
        together = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
        alone = [llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts]
    assert together == alone
