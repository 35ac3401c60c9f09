"""The benchmark of `max_step_ms`: a slowed model computes the same, more slowly; rounds and ratios."""

from __future__ import annotations

import asyncio
import time

import pytest

from benchmarks.prefill import Prefill, Slowed, measure_cancels, measure_prefill
from tokenmill import LLM, SamplingParams
from tokenmill.backends.fake import FakeConfig, FakeModel

MODEL = FakeModel(FakeConfig(vocab_size=258, max_context=8192))


def test_a_slowed_model_takes_its_time_and_says_the_same() -> None:
    answers, took = [], []
    for model in (MODEL, Slowed(MODEL, 20.0)):
        with LLM(model, kv_cache_tokens=4096) as llm:
            began = time.perf_counter()
            (output,) = llm.generate([[1, 2, 3] * 300], SamplingParams(max_tokens=8, temperature=0))
            took.append(time.perf_counter() - began)
        answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]
    assert took[1] > took[0]


def test_rounds_of_throughput() -> None:
    found = measure_prefill(MODEL, 500.0, num_rounds=2, count=2, num_tokens=64)
    assert found.keys() == {"wall time", "CPU time"}
    assert all(len(one.bounded) == len(one.unbounded) == len(one.again) == 2 for one in found.values())
    assert Prefill([9.0], [8.0], [10.0]).ratios == [1.0]
    assert Prefill([9.0], [8.0], [10.0]).noise == [1.25]


def test_a_prompt_is_cancelled_before_it_is_computed() -> None:
    took = asyncio.run(measure_cancels(Slowed(MODEL, 200.0), 5.0, num_cancels=1, num_tokens=8000))
    assert len(took) == 1
    assert took[0] > 0
    with pytest.raises(RuntimeError, match="before it could be cancelled"):
        asyncio.run(measure_cancels(MODEL, 50.0, num_cancels=1, num_tokens=16))
