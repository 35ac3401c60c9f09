"""Two workers on the default model: one set of weights, KV within the plan, and the answers of one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_workers import pool_of
from tests.llamacpp import needs_llamacpp
from tokenmill import LLM, SamplingParams, open_model

TEXTS = ["The capital of France is", "Once upon a time there was"]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CELLS = 2048


@pytest.mark.req("B9")
@pytest.mark.parametrize("name", ["torch", pytest.param("llamacpp", marks=needs_llamacpp)])
def test_two_workers_share_the_weights_and_say_what_one_says(default_model: Path, name: str) -> None:
    """Each prompt is alone on its worker, as it is on one worker that runs them in turn."""
    handle: Any = open_model(str(default_model), backend=name, device="cpu")
    try:
        with LLM(handle, num_threads=1, kv_cache_tokens=CELLS, max_num_seqs=2) as llm:
            alone = [llm.generate(text, PARAMS)[0].outputs[0].token_ids for text in TEXTS]
        with LLM(handle, workers=2, num_threads=2, kv_cache_tokens=CELLS, max_num_seqs=2) as llm:
            together = [one.outputs[0].token_ids for one in llm.generate(TEXTS, PARAMS)]
            pool, limits = pool_of(llm), llm.opened.limits
            assert [one.core._executor.backend.kv.stats().num_cells for one in pool.cores] == [CELLS // 2] * 2
            assert all(stats is not None and stats.tick > 0 for stats in pool.stats())
            assert limits.num_threads == 1
    finally:
        handle.close()
    assert together == alone
