"""The flood of long prompts: what is posted, what is measured meanwhile, and what is told of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.flood import (
    FAR_ABOVE_BYTES,
    SHAPES,
    attack,
    attack_table,
    flood_body,
    largest_prompt,
    percentile_of,
    run_phase,
    table,
)
from tests.server.serving import running
from tokenmill import AsyncLLM
from tokenmill.backends.fake import FakeConfig, FakeModel
from tokenmill.bench.load_clients import Target, serving
from tokenmill.server.config import ServerConfig


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_have_the_size_that_was_asked_for(shape: str) -> None:
    body = json.loads(flood_body("m", shape, 10_000))
    texts = [message["content"] for message in body["messages"]]
    assert sum(map(len, texts)) == (FAR_ABOVE_BYTES if shape == "far above" else 10_000)
    assert len(texts) == SHAPES[shape]
    assert body["messages"][0]["role"] == "user"
    assert (" " in texts[0]) == (shape != "one run")


def test_percentiles_of_a_histogram() -> None:
    assert percentile_of({0.1: 98, 1.0: 99, float("inf"): 100}, 0.99) == 1.0
    assert percentile_of({0.1: 98, 1.0: 98, float("inf"): 100}, 0.99) == float("inf")
    assert percentile_of({0.1: 0, float("inf"): 0}, 0.99) == 0.1


def test_a_server_under_a_flood_and_without() -> None:
    model = FakeModel(FakeConfig(vocab_size=258, max_context=8192))
    with running(AsyncLLM(model, kv_cache_tokens=32_768), ServerConfig()) as server:
        target = Target(f"http://127.0.0.1:{server.port}")
        assert 8000 < asyncio.run(largest_prompt(target, "fake")) <= 8192  # a byte is a token here
        flooded = run_phase(target, "fake", "one message", flood_body("fake", "one message", 100_000), 2, 1.0)
        control = run_phase(target, "fake", "none", None, 2, 0.2)
    assert set(flooded.statuses) == {"400"}
    assert flooded.num_tokens > 0
    assert 0 < flooded.itl_p50 <= flooded.itl_p99 <= flooded.itl_max
    assert control.statuses == {}
    assert "400" in table([flooded, control])


@pytest.mark.slow
def test_connections_are_held_while_streams_are_measured() -> None:
    """And a round says how the streams fared with them and without."""
    with serving("fake", ["--log-level", "warning"]) as server:
        one = attack(server, "fake", "slow", 0.3)
    assert one.held.num_fds >= one.idle.num_fds + 150, "the sockets of the streams may not all be closed yet"
    assert min(one.before_ms, one.attacked_ms, one.after_ms, one.held.rss_kib) > 0
    assert one.ratio == pytest.approx(2 * one.attacked_ms / (one.before_ms + one.after_ms))
    assert "A/A" in attack_table("slow", [one, one])
