"""The torch backend on CUDA: the same numbers as on the CPU, steps submitted ahead.

All tests of this folder are skipped where there is no card; `python -m tests.gpu` runs them where pytest is missing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.gpu.card import needs_card
from tests.parity.checkpoints import LIMITS, TOKENS, all_logits, logits_of, save
from tokenmill import open_model
from tokenmill.backends.torch.cuda.graphs import DecodeShape
from tokenmill.backends.torch.model import BaseTorchModel
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits, BatchBuilder, Output, Sampled, SampleRows
from tokenmill.engine.core import EngineCore
from tokenmill.engine.request import Draw, Limits, Request
from tokenmill.params import SamplingParams

pytestmark = needs_card()

BFLOAT16_TOLERANCE = 0.1
"""Of all logits together, against transformers in float32: weights of standard deviation 0.4 are hard on 8 bits."""
VARIANTS = ["llama", "llama, llama3 rope", "mistral, window", "qwen2", "qwen3 tied, yarn"]


def opened(variant: str, folder: Path, **options: object) -> BaseTorchModel:
    model = open_model(str(save(variant, folder)), **options)
    assert isinstance(model, BaseTorchModel)
    return model


def test_logits_in_float32(tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for i, variant in enumerate(VARIANTS):
        model = opened(variant, tmp_path / str(i), device="cuda", dtype="float32")
        for chunk in (150, 31):
            worst = np.abs(all_logits(model, TOKENS, chunk) - logits_of(variant, TOKENS).numpy()).max()
            assert worst < 1e-2, f"{variant}: {worst}"


FAMILIES = ["gemma2", "gemma3", "granite", "granite with biases", "olmo2", "phi3", "phi3, longrope", "phi3, window",
            "smollm3", "smollm3, window"]  # fmt: skip
IN_FLOAT32 = ("gemma2", "gemma3", "phi3", "olmo2")
NUM_PROMPT, NUM_SEQS = 100, 3


def prompt_and_decodes(model: BaseTorchModel, checks_graphs: bool = False) -> np.ndarray:
    """Logits of one sequence's prompt, in chunks, and of decodes of several: alone at first, then together."""
    parts = []
    with model.new_backend(LIMITS) as backend:
        for seq in range(NUM_SEQS):
            for begin in range(0, NUM_PROMPT, 40):
                batch = BatchBuilder()
                for pos in range(begin, min(begin + 40, NUM_PROMPT)):
                    batch.add(TOKENS[(pos + seq) % 150], pos, seq, Output.LOGITS if seq == 0 else Output.NONE)
                parts.append(backend.decode(batch.build()).logits)
        for pos in range(NUM_PROMPT, NUM_PROMPT + 12):
            for seqs in ([0], range(1, NUM_SEQS)):
                batch = BatchBuilder()
                for seq in seqs:
                    batch.add(TOKENS[(pos * 7 + seq) % 150], pos, seq, Output.LOGITS)
                parts.append(backend.decode(batch.build()).logits)
        if checks_graphs:
            shapes = set(backend._graphs._graphs)  # type: ignore[attr-defined]
            assert {shape.num_tokens for shape in shapes if isinstance(shape, DecodeShape)} >= {1, 2}
    return np.concatenate(parts)


def test_families_give_the_logits_of_the_cpu(tmp_path: Path) -> None:
    """In bfloat16, and some in float32, with prompts in chunks, and decodes as graphs."""
    from tokenmill.backends.torch.cuda.model import CudaModel  # needs triton

    torch.backends.cuda.matmul.allow_tf32 = False
    for i, variant in enumerate(FAMILIES):
        wanted = prompt_and_decodes(opened(variant, tmp_path / f"cpu {i}", device="cpu", dtype="float32"))
        for dtype, tolerance in (("bfloat16", 1.5 * BFLOAT16_TOLERANCE), ("float32", 1e-4)):
            if dtype == "float32" and variant not in IN_FLOAT32:
                continue
            model = opened(variant, tmp_path / f"{dtype} {i}", device="cuda", dtype=dtype)
            assert isinstance(model, CudaModel)
            found = prompt_and_decodes(model, checks_graphs=True)
            worst = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
            assert worst < tolerance, f"{variant} in {dtype}: {worst}"


def said(model: BaseTorchModel, depth: int) -> list[list[int]]:
    config = EngineConfig(max_num_seqs=8, prefill_chunk=16, depth=depth)
    engine = EngineCore(model.new_backend(LIMITS), model.info, config)
    requests = []
    for i in range(8):
        params = SamplingParams(temperature=0) if i % 2 else SamplingParams(top_p=0.9, temperature=0.7)
        draw = Draw(params=params, seed=i)
        requests.append(Request(f"r{i}", TOKENS[: 5 + 7 * i], Limits(max_new_tokens=40), draw=draw))
        engine.add(requests[-1])
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    engine.close()
    return [request.output for request in requests]


def test_the_engine_at_both_depths_says_what_it_says_on_the_cpu(tmp_path: Path) -> None:
    on_cpu = said(opened("llama", tmp_path / "cpu", device="cpu"), 0)
    model = opened("llama", tmp_path / "cuda", device="cuda", dtype="float32")
    assert model.new_backend(LIMITS).capabilities.depth == 1
    ahead, step_by_step = said(model, 1), said(model, 0)
    agree = sum(a == b for one, two in zip(on_cpu, ahead, strict=True) for a, b in zip(one, two, strict=True))
    assert agree / sum(map(len, on_cpu)) > 0.95
    assert ahead == step_by_step


def test_bfloat16_is_the_default(tmp_path: Path) -> None:
    model = opened("qwen2", tmp_path)
    assert model.decoder.weights.embed.dtype is torch.bfloat16
    logits = all_logits(model, TOKENS, 64)
    wanted = logits_of("qwen2", TOKENS).numpy()
    assert np.linalg.norm(logits - wanted) / np.linalg.norm(wanted) < BFLOAT16_TOLERANCE


def test_a_sampler_may_give_ids_of_any_kind_for_any_rows(tmp_path: Path) -> None:
    """More rows of logits than the token table has, and ids in torch's own type."""
    model = opened("llama", tmp_path, device="cuda", dtype="float32")
    with model.new_backend(BackendLimits(num_cells=512, max_seqs=4)) as backend:
        batch = BatchBuilder()
        for i in range(6):
            batch.add(TOKENS[i], i, 0, Output.LOGITS)
        forward = backend.forward(batch.build())
        chosen = np.arange(4, dtype=np.int32)
        rows = SampleRows(chosen, chosen, lambda logits, _: Sampled(logits.argmax(dim=-1)))
        found = backend.collect(backend.sample(forward, rows)).ids
        assert found.tolist() == backend.collect(forward).logits[:4].argmax(axis=1).tolist()
