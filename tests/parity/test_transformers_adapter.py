"""Models that run through transformers give what transformers gives: logits and greedy ids, for every family."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.parity.decoders import DECODERS, own_logits, save_tiny
from tokenmill import open_model
from tokenmill.backends.torch.transformers_adapter import TransformersModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, BatchBuilder, Output
from tokenmill.engine.core import EngineCore
from tokenmill.engine.events import Phase, RequestEvent
from tokenmill.engine.request import Limits, Request

TOLERANCE = 1e-3
NUM_NEW = 64
RNG = random.Random(2)
PROMPTS = [[RNG.randrange(3, 150) for _ in range(n)] for n in (1, 3, 7, 12, 20, 33, 9, 26)]


def opened(family: str, folder: Path) -> TransformersModel:
    path = save_tiny(family, folder / family)
    model = open_model(str(path), device="cpu", model_impl="transformers", block_size=4)
    assert isinstance(model, TransformersModel)
    return model


def chunked_logits(model: TransformersModel, tokens: list[int], chunk: int) -> np.ndarray:
    """The logits of every token of a sequence that shares its batches with another one."""
    parts = []
    with model.new_backend(BackendLimits(num_cells=512, max_seqs=4)) as backend:
        for begin in range(0, len(tokens), chunk):
            batch = BatchBuilder()
            for pos, token in enumerate(tokens[begin : begin + chunk], begin):
                batch.add(token, pos, 0, Output.LOGITS)
                batch.add(tokens[-pos], pos, 1)
            parts.append(backend.decode(batch.build()).logits)
    return np.concatenate(parts)


def is_preemption(event: object) -> bool:
    return isinstance(event, RequestEvent) and event.phase is Phase.PREEMPTED


def answers(model: TransformersModel) -> tuple[list[list[int]], int]:
    """Prompts with their greedy answers, all in one engine that is short of KV; and how often one was preempted."""
    config = EngineConfig(max_num_seqs=8, prefill_chunk=16, prefix_caching=False)
    limits = BackendLimits(num_cells=288, max_seqs=8)  # too few for all prompts with their answers
    engine = EngineCore(model.new_backend(limits), model.info, config)
    preempted: list[object] = []
    engine.events.subscribe(lambda event: preempted.append(event) if is_preemption(event) else None)
    requests = [Request(f"r{i}", prompt, Limits(max_new_tokens=NUM_NEW)) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.close()
    return [request.tokens for request in requests], len(preempted)


@pytest.mark.req("R21", "R47")
@pytest.mark.parametrize("family", DECODERS)
def test_logits_and_greedy_ids_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = opened(family, tmp_path)
    tokens = [token for prompt in PROMPTS[3:6] for token in prompt]
    wanted = own_logits(family, tokens).numpy()
    worst = np.abs(chunked_logits(model, tokens, chunk=13) - wanted).max()
    assert worst < TOLERANCE, f"{family}: {worst}"
    assert wanted.std() > 0.5  # the weights are wide enough for a mistake to show
    found, num_preempted = answers(model)
    assert num_preempted > 0
    for tokens, prompt in zip(found, PROMPTS, strict=True):
        assert tokens[: len(prompt)] == prompt
        ids = own_logits(family, tokens[:-1]).argmax(dim=-1).tolist()
        assert tokens[len(prompt) :] == ids[len(prompt) - 1 :], f"{family}: greedy ids after {len(prompt)} tokens"
