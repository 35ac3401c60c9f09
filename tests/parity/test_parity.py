"""The torch backend against transformers: logits, greedy ids, windows, hidden states, for every family and variant."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity.checkpoints import LIMITS, TOKENS, TOLERANCE, VARIANTS, all_logits, logits_of, reference, save
from tokenmill import open_model
from tokenmill.backends.torch.model import TorchModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BatchBuilder, Output
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Limits, Request


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: save(name, root / str(i)) for i, name in enumerate(VARIANTS)}


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(variant: str, folders: dict[str, Path]) -> Iterator[TorchModel]:
    opened = open_model(str(folders[variant]), device="cpu")
    assert isinstance(opened, TorchModel)
    yield opened
    opened.close()


@pytest.mark.req("R21", "R47")
@pytest.mark.parametrize("chunk", [150, 31, 1])
def test_logits_are_those_of_transformers(variant: str, model: TorchModel, chunk: int) -> None:
    tokens = TOKENS if chunk > 1 else TOKENS[:40]
    wanted = logits_of(variant, tokens).numpy()
    worst = np.abs(all_logits(model, tokens, chunk) - wanted).max()
    assert worst < TOLERANCE, f"{variant}: {worst}"
    assert wanted.std() > 0.5  # the weights are wide enough for a mistake to show


@pytest.mark.req("R21")
def test_greedy_ids_are_those_of_transformers_in_one_batch(variant: str, model: TorchModel) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(160) for _ in range(n)] for n in (1, 3, 7, 12, 20, 33, 50, 64)]
    config = EngineConfig(max_num_seqs=8, prefill_chunk=16, prefix_caching=False)
    engine = EngineCore(model.new_backend(LIMITS), model.info, config)
    requests = [Request(f"r{i}", prompt, Limits(max_new_tokens=64)) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    for request, prompt in zip(requests, prompts, strict=True):
        with torch.no_grad():
            wanted = reference(variant).generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0].tolist()
        assert request.tokens == wanted
    engine.close()


@pytest.mark.parametrize("variant", ["llama", "qwen3"], indirect=True)
def test_hidden_rows_are_the_last_hidden_state(variant: str, model: TorchModel) -> None:
    with torch.no_grad():
        wanted = reference(variant).model(torch.tensor([TOKENS])).last_hidden_state[0].numpy()
    batch = BatchBuilder()
    for pos, token in enumerate(TOKENS):
        batch.add(token, pos, 0, Output.HIDDEN)
    with model.new_backend(LIMITS) as backend:
        assert np.abs(backend.decode(batch.build()).hidden - wanted).max() < TOLERANCE
