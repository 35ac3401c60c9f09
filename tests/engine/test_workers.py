"""Several workers: one set of weights, with KV memory, threads and request limits divided between engine cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.checkpoints import save
from tokenmill import LLM, open_model
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.contract.backend import num_processors
from tokenmill.engine.client import QueuedClient, ThreadClient
from tokenmill.engine.pool import EnginePool
from tokenmill.entrypoints.fit import plan_fit
from tokenmill.entrypoints.options import load_for_engine
from tokenmill.errors import ConfigError, Unsupported
from tokenmill.params import SamplingParams
from tokenmill.text.tokenizer import ByteTokenizer

WAIT_S = 20
FAKE: dict[str, Any] = {"vocab_size": 64, "max_context": 256, "block_size": 16}


def pool_of(llm: LLM) -> EnginePool:
    assert isinstance(llm._client, QueuedClient)
    assert isinstance(llm._client._client, ThreadClient)
    return llm._client._client.pool


def shares(**options: Any) -> tuple[EngineConfig, BackendLimits]:
    """What one core of an engine with these options gets."""
    _, config, limits = load_for_engine(FakeModel(FakeConfig(**FAKE)), options)
    return config, limits


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_the_kv_of_all_workers_is_never_more_than_was_asked_for(workers: int) -> None:
    for asked in (1000, 1024, 1039, 4096):
        with LLM("fake", extra=FAKE, workers=workers, kv_cache_tokens=asked) as llm:
            cores = [llm.engine] if workers == 1 else [one.core for one in pool_of(llm).cores]
            cells = [core._executor.backend.kv.stats().num_cells for core in cores]
        assert len(cells) == workers
        assert asked - 16 * workers < sum(cells) <= asked


def test_limits_on_requests_and_threads_are_divided() -> None:
    config, limits = shares(
        workers=3, max_num_seqs=32, max_queue=100, max_queue_tokens=1000, num_threads=8, kv_cache_tokens=3000
    )
    assert (config.max_num_seqs, config.max_queue, config.max_queue_tokens) == (11, 34, 334)
    assert (limits.num_running, limits.num_threads, limits.num_cells) == (11, 2, 992)
    assert shares(workers=2 * num_processors())[1].num_threads == 1
    assert shares()[1].num_threads is None, "the backend knows best how many threads one core should have"


def test_the_default_kv_cache_is_the_same_for_any_number_of_workers() -> None:
    """The model's budget is for all of them together."""
    model = FakeModel(FakeConfig(**FAKE | {"max_context": 1 << 20}))
    _, _, alone = load_for_engine(model, {})
    _, _, share = load_for_engine(model, {"workers": 4})
    assert alone.num_cells - 4 * 16 < 4 * share.num_cells <= alone.num_cells


def test_workers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers must be at least 1, not 0"):
        shares(workers=0)
    with pytest.raises(ConfigError, match="kv_cache_tokens must be at least 64, not 63"):
        shares(workers=4, kv_cache_tokens=63)
    with pytest.raises(ConfigError, match="n_ctx is a size of one context; with several workers use kv_cache_tokens"):
        load_for_engine("fake", {"workers": 2, "extra": {"n_ctx": 512}})
    with pytest.raises(ConfigError, match="one engine core uses a whole GPU"):
        load_for_engine("some/model", {"workers": 2, "device": "cuda"})


@pytest.mark.req("R11")
def test_an_llm_with_workers_says_what_one_without_says() -> None:
    prompts = [[1 + i % 5, 2, 3 + i] for i in range(24)]
    params = SamplingParams(temperature=0, max_tokens=12)
    said = []
    for workers in (1, 3):
        with LLM("fake", extra=FAKE, workers=workers, kv_cache_tokens=4096) as llm:
            said.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
            if workers > 1:
                assert all(stats and stats.tick > 0 for stats in pool_of(llm).stats()), "a core had nothing to do"
                with pytest.raises(Unsupported, match="use one worker"):
                    _ = llm.engine
    assert said[0] == said[1]


@pytest.mark.req("B9")
def test_workers_take_what_was_planned_for_them(tmp_path: Path) -> None:
    """Weights once, KV and activations for each; and a plan that does not fit is refused."""
    path = str(save("qwen3", tmp_path))
    planned = plan_fit(path, 4, 100, free_bytes=1 << 40, workers=2, dtype="float32", device="cpu")
    one = plan_fit(path, 2, 100, free_bytes=1 << 40, dtype="float32", device="cpu")
    assert planned.plan == one.plan.times(2)
    assert (planned.plan.weights, planned.plan.kv) == (one.plan.weights, 2 * one.plan.kv)
    model: Any = open_model(path, dtype="float32", device="cpu")
    with LLM(model, tokenizer=ByteTokenizer(), workers=2, max_num_seqs=4, max_model_len=100) as llm:
        backends = [one.core._executor.backend for one in pool_of(llm).cores]
        assert sum(backend._storage.num_bytes for backend in backends) == planned.plan.kv  # type: ignore[attr-defined]
        assert len({id(backend._decoder.weights) for backend in backends}) == 1  # type: ignore[attr-defined]
    num_cells = model.free_bytes // model.info.kv_bytes_per_token // 2 + 16
    with pytest.raises(ConfigError, match="are free"):
        LLM(model, tokenizer=ByteTokenizer(), workers=2, kv_cache_tokens=4 * num_cells)
