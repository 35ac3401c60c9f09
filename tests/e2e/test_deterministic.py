"""Deterministic mode on a real model: the same ids alone, in a crowd, after preemption, and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill import open_model
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, ModelHandle
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.params import SamplingParams
from tokenmill.text.model_text import open_text

NEW = 10
TEXTS = [
    "The capital of France is",
    "Once upon a time there was",
    "def fibonacci(n):",
    "Water boils at",
    "My favourite colour is blue because",
    "1, 2, 3, 4,",
    "The best way to learn a language is to",
    "Dear Sir or Madam,",
]


@pytest.fixture(scope="module")
def model(default_model: Path) -> Iterator[ModelHandle]:
    opened = open_model(str(default_model), deterministic=True, device="cpu")
    yield opened
    opened.close()


def requests(model: ModelHandle) -> list[Request]:
    """Eight greedy ones and eight seeded ones, with prompts of 3 to 30 tokens."""
    tokenizer = open_text(model).tokenizer
    made = []
    for i, text in enumerate([*TEXTS, *TEXTS]):
        prompt = tokenizer.encode(text * (1 + i % 3))
        params = SamplingParams(temperature=0) if i < len(TEXTS) else SamplingParams(temperature=0.8, top_p=0.9)
        made.append(Request(f"r{i}", prompt, Limits(max_new_tokens=NEW), draw=Draw(params=params, seed=100 + i)))
    return made


def run(model: ModelHandle, crowd: list[Request], cells: int = 2048, **config: int) -> tuple[list[list[int]], int]:
    """What each says, and how often one was preempted. No step is cut short because the machine is busy."""
    settings = EngineConfig(**{"max_num_seqs": 16, "target_tick_ms": 60_000, **config})
    engine = EngineCore(model.new_backend(BackendLimits(num_cells=cells, max_seqs=64)), model.info, settings)
    for request in crowd:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    engine.close()
    return [request.output for request in crowd], sum(request.num_preemptions for request in crowd)


@pytest.mark.fault("E01", "E02", "O04")
@pytest.mark.req("G12", "R6")
def test_identical_alone_in_a_crowd_preempted_and_replayed(model: ModelHandle) -> None:
    alone = [run(model, [request])[0][0] for request in requests(model)]
    crowd, _ = run(model, requests(model))
    assert crowd == alone
    chunked, _ = run(model, requests(model), prefill_chunk=7, max_num_batched_tokens=24)
    assert chunked == alone
    squeezed, preemptions = run(model, requests(model), cells=112, admission_margin=0)
    assert preemptions > 0
    assert squeezed == alone
    replayed = []
    for request, output in zip(requests(model), alone, strict=True):  # from the middle of its own answer
        log = [*request.tokens, *output[: NEW // 2]]
        rest = Request(request.request_id, log, Limits(max_new_tokens=NEW - NEW // 2), draw=request.draw)
        replayed.append(rest)
    outputs, _ = run(model, replayed)
    assert [[*whole[: NEW // 2], *rest] for whole, rest in zip(alone, outputs, strict=True)] == alone
    assert len({tuple(output) for output in alone}) > 12
