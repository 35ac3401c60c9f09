"""Models that run through transformers on a card: logits and ids are those of transformers, with and without graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.gpu.card import needs_card
from tests.parity.decoders import own_logits, save_tiny
from tokenmill import open_model
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, BatchBuilder, ModelHandle, Output
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Limits, Request

pytestmark = needs_card()

TOLERANCE = 1e-2
PROMPTS = [[(7 * i + 3 * j) % 140 + 3 for j in range(n)] for i, n in enumerate((1, 3, 12, 20, 33, 9))]
ON_KERNELS = ("llama", "gemma2", "qwen3", "olmo2", "cohere", "stablelm")
"""Windows, soft caps, norms and scales of their own; a logit scale; partial rotation."""
NOT_CAPTURED = ("mixtral", "qwen3_moe")
"""Experts are chosen on the host."""
IN_PLAIN_TORCH = ("gpt_oss", "deepseek_v3")
"""Sinks; keys and values of different sizes."""


def opened(family: str, folder: Path) -> ModelHandle:
    torch.backends.cuda.matmul.allow_tf32 = False
    path = save_tiny(family, folder / family)
    return open_model(str(path), device="cuda", dtype="float32", model_impl="transformers")


def worst_error(model: ModelHandle, family: str) -> float:
    """Of the logits of a sequence computed in chunks, beside another one."""
    tokens, parts = PROMPTS[4] + PROMPTS[3], []
    with model.new_backend(BackendLimits(num_cells=512, max_seqs=4, num_running=4)) as backend:
        for begin in range(0, len(tokens), 13):
            batch = BatchBuilder()
            for pos, token in enumerate(tokens[begin : begin + 13], begin):
                batch.add(token, pos, 0, Output.LOGITS)
                batch.add(tokens[-pos], pos, 1)
            parts.append(backend.decode(batch.build()).logits)
    return float(np.abs(np.concatenate(parts) - own_logits(family, tokens).numpy()).max())


def answers(model: ModelHandle) -> list[list[int]]:
    engine = EngineCore(
        model.new_backend(BackendLimits(num_cells=2048, max_seqs=16, num_running=8)),
        model.info,
        EngineConfig(max_num_seqs=8, prefill_chunk=16),
    )
    requests = [Request(f"r{i}", prompt, Limits(max_new_tokens=24)) for i, prompt in enumerate(PROMPTS)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    engine.close()
    return [request.tokens for request in requests]


def check(family: str, folder: Path, kind: str, has_graphs: bool) -> None:
    model = opened(family, folder)
    assert type(model).__name__ == kind, family
    worst = worst_error(model, family)
    assert worst < TOLERANCE, f"{family}: {worst}"
    for tokens, prompt in zip(answers(model), PROMPTS, strict=True):
        logits = own_logits(family, tokens[:-1])[len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens[len(prompt) :])[:, None])[:, 0]
        assert (logits.amax(dim=1) - chosen).max() < TOLERANCE, family  # the best one, or as good
    if kind == "AdaptedCudaModel":
        assert model.decoder.switches.graphs == has_graphs, family  # type: ignore[attr-defined]


def test_adapted_models_run_on_our_kernels_in_graphs(tmp_path: Path) -> None:
    for family in ON_KERNELS:
        check(family, tmp_path, "AdaptedCudaModel", has_graphs=True)


def test_adapted_models_that_cannot_be_captured_are_launched_kernel_by_kernel(tmp_path: Path) -> None:
    for family in NOT_CAPTURED:
        check(family, tmp_path, "AdaptedCudaModel", has_graphs=False)


def test_adapted_models_with_other_attention_run_in_plain_torch(tmp_path: Path) -> None:
    for family in IN_PLAIN_TORCH:
        check(family, tmp_path, "TransformersModel", has_graphs=False)
