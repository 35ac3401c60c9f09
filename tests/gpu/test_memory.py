"""How much of the card KV may take, and what is refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.conformance.story import refused
from tests.gpu.card import needs_card
from tests.parity.checkpoints import save
from tokenmill import open_model
from tokenmill.config import EngineConfig
from tokenmill.contract import BackendLimits
from tokenmill.entrypoints.fit import check_memory
from tokenmill.entrypoints.options import choose_limits
from tokenmill.errors import ConfigError

pytestmark = needs_card()


def test_kv_takes_what_the_largest_step_leaves(tmp_path: Path) -> None:
    model = open_model(str(save("qwen3", tmp_path)), device="cuda")
    free = torch.cuda.mem_get_info()[0]
    assert 0.8 * free < model.kv_budget_bytes < free
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    limits = choose_limits(model, config, None)
    check_memory(model, limits, config.max_num_seqs)
    with model.new_backend(limits) as backend:
        assert backend.kv.free() >= limits.num_cells


def test_a_closed_backend_gives_its_memory_back(tmp_path: Path) -> None:
    model = open_model(str(save("qwen3", tmp_path)), device="cuda")
    model.new_backend(BackendLimits(num_cells=1 << 10)).close()  # what libraries allocate once stays
    before = torch.cuda.memory_allocated()
    backend = model.new_backend(BackendLimits(num_cells=1 << 20))
    assert torch.cuda.memory_allocated() - before > 1 << 28
    backend.close()
    assert torch.cuda.memory_allocated() - before < 1 << 26


def test_too_much_is_refused_with_numbers(tmp_path: Path) -> None:
    model = open_model(str(save("qwen3", tmp_path)), device="cuda")
    with refused(ConfigError, "8,589,934,592 tokens"):
        check_memory(model, BackendLimits(num_cells=1 << 33), 8)


def test_what_is_planned_for_a_step_is_what_it_takes() -> None:
    """`tokenmill fit` can run none, so it works it out."""
    from benchmarks.gpu import SHAPES, random_model
    from tokenmill.backends.torch.cuda.layers import Switches
    from tokenmill.backends.torch.footprint import cuda_step_bytes

    for name in SHAPES:
        model = random_model(name, Switches())
        planned, taken = cuda_step_bytes(SHAPES[name], 8192, 256, 2), model.step_bytes
        assert 0.9 * taken < planned < 1.4 * taken, (name, planned, taken)
        model.close()
        del model
        torch.cuda.empty_cache()
