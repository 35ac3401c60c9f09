"""Sessions on the default model: twenty turns, each computing only what is new, each exact."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tokenmill import LLM, SamplingParams, SessionService, open_model

NUM_TURNS = 20
AGREEMENT = {"torch": 1e-3, "llamacpp": 1.5}
"""The stated agreement of log-probabilities, computed in two ways (docs/kv.md, docs/llamacpp.md)."""
QUESTIONS = ["What is the capital of Japan?", "Tell me more.", "Why is that so?", "And what about Italy?"]


@pytest.mark.req("B1", "R2", "R4", "R5", "G4", "G15")
def test_twenty_turns_compute_what_is_new_and_agree_with_a_fresh_prefill(
    default_model: Path, backend: dict[str, Any]
) -> None:
    model = open_model(str(default_model), **backend)
    params = SamplingParams(temperature=0, max_tokens=8)
    every = {"torch": 1, "llamacpp": 3}[backend["backend"]]  # its prefill is slow; 3 meets all four kinds of endings

    async def talk(fresh: LLM) -> None:
        async with SessionService(model, kv_cache_tokens=4096) as service:
            name = await service.create_session(sampling_params=params)
            session = service._model().queue.find(name)
            known = 0
            for turn in range(NUM_TURNS):
                total = await service.append_input(name, QUESTIONS[turn % len(QUESTIONS)])
                first, usage = await first_logprobs(service, name, turn)
                computed = usage.prompt_tokens - usage.cached_tokens
                assert computed <= total - known + 1, f"turn {turn}: {computed} tokens for {total - known} new ones"
                if turn % every == 0:
                    check_fresh(fresh, session.log.tokens.tolist()[:total], first)
                known = len(session.log)
            assert len(session.log.turns) == 2 * NUM_TURNS

    async def first_logprobs(service: SessionService, name: str, turn: int) -> Any:
        """The answer, ended in a different way each time; log-probabilities of its first token, and what it cost."""
        kinds: list[dict[str, Any]] = [
            {}, {"stop": ("a",)}, {"stop_token_ids": (28,)}, {"max_tokens": 100, "ignore_eos": True},
        ]  # fmt: skip
        stream = await service.generate_stream(name, **{**kinds[turn % 4], "logprobs": 5})
        chunks = [await anext(stream)]
        if turn % 4 == 3:
            await service.cancel_generate(name)
        chunks += [chunk async for chunk in stream]
        scores = [score for chunk in chunks for score in chunk.logprobs or ()]
        return (scores[0] if scores else None), chunks[-1].usage

    def check_fresh(fresh: LLM, log: list[int], first: Any) -> None:
        (out,) = fresh.generate([log], SamplingParams(temperature=0, max_tokens=1, logprobs=5, ignore_eos=True))
        assert out.usage.cached_tokens == 0
        assert out.outputs[0].logprobs is not None
        if first is None:  # a stop string took even the first token back
            return
        wanted = out.outputs[0].logprobs[0]
        (token, best), (_, second) = wanted.top[:2]
        assert abs(dict(first.top)[token] - best) < AGREEMENT[backend["backend"]]
        if backend["backend"] == "torch":
            assert [token for token, _ in first.top] == [token for token, _ in wanted.top]
        elif best - second > 2 * AGREEMENT["llamacpp"]:
            assert first.top[0][0] == token

    from tokenmill.config import EngineConfig

    with LLM(model, config=EngineConfig(prefix_caching=False), kv_cache_tokens=2048) as fresh:
        asyncio.run(talk(fresh))
    model.close()
