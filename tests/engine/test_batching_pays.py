"""Continuous batching: so many requests together take hardly more steps than one. Seconds are for `tokenmill bench`."""

from __future__ import annotations

import pytest

from tokenmill import LLM, SamplingParams

PROMPTS = [f"Tell me about the number {i}." for i in range(16)]


@pytest.mark.slow
@pytest.mark.req("R44")
def test_sixteen_requests_take_about_as_many_steps_as_one() -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM("smollm2-135m", max_num_seqs=16, kv_cache_tokens=4096, speculation="off") as llm:

        def num_steps(prompts: list[str]) -> int:
            before = llm.engine.scheduler.tick
            llm.generate(prompts, params)
            return llm.engine.scheduler.tick - before

        together = num_steps(PROMPTS)
        one_by_one = sum(num_steps([prompt]) for prompt in PROMPTS)
    assert together <= 28
    assert one_by_one / together >= 12
