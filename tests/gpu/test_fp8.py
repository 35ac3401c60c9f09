"""Keys and values of 8 bits: half the memory, nearly the same logits, and everything else as with 16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.conformance.story import refused
from tests.gpu.card import needs_card
from tests.gpu.test_engine import engine_of, prompts, request, run
from tests.parity.checkpoints import LIMITS, TOKENS, all_logits, logits_of, save
from tokenmill import open_model
from tokenmill.backends.torch.footprint import FP8
from tokenmill.backends.torch.model import BaseTorchModel
from tokenmill.contract import BatchBuilder, Output
from tokenmill.errors import ConfigError

pytestmark = needs_card()

TOLERANCE = 0.3
"""Of all logits together, against transformers in float32; 16 bits are allowed 0.1."""


def opened(folder: Path, **options: object) -> BaseTorchModel:
    model = open_model(str(save("qwen2", folder)), device="cuda", kv_cache_dtype="fp8", **options)
    assert isinstance(model, BaseTorchModel)
    return model


def test_half_the_memory_and_nearly_the_same_logits(tmp_path: Path) -> None:
    model = opened(tmp_path)
    wide = open_model(str(tmp_path), device="cuda")
    assert 2 * model.info.kv_bytes_per_token == wide.info.kv_bytes_per_token
    assert model.info.form != wide.info.form
    wanted = logits_of("qwen2", TOKENS).numpy()
    for chunk in (150, 31, 1):
        found = all_logits(model, TOKENS, chunk)
        error = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
        assert error < TOLERANCE, error


def test_exported_cells_go_on_as_they_were(tmp_path: Path) -> None:
    with opened(tmp_path).new_backend(LIMITS) as backend:
        backend.decode(BatchBuilder().add_run(TOKENS[:70], 0, 0).build())
        backend.kv.import_(1, backend.kv.export(0))
        backend.kv.seq_cp(0, 2)
        batch = BatchBuilder()
        for seq in range(3):
            batch.add(TOKENS[70], 70, seq, Output.LOGITS)
        first, *others = backend.decode(batch.build()).logits
        for other in others:
            assert np.array_equal(first, other)
        backend.kv.seq_rm(1, 0, 5)
        backend.kv.seq_add(1, 5, 71, -5)
        shifted = backend.decode(BatchBuilder().add(TOKENS[71], 66, 1, Output.LOGITS).build()).logits
        assert np.isfinite(shifted).all()


def test_an_engine_runs_on_it(tmp_path: Path) -> None:
    model = opened(tmp_path, block_size=64)
    engine = engine_of(model)
    said = run(engine, *(request(f"r{i}", prompt, 60) for i, prompt in enumerate(prompts(20, 70, 130))))
    engine.close()
    assert [len(ids) for ids in said] == [60, 60, 60]


def test_large_numbers_stay_numbers() -> None:
    from tokenmill.backends.torch.kernels.islands import turn_and_store

    qkv = torch.full((1, 3 * 64), 3e4, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.zeros(4, 1, 64, device="cuda", dtype=torch.uint8).view(FP8) for _ in range(2))
    one, none = torch.ones(1, 32, device="cuda"), torch.zeros(1, 32, device="cuda")
    where = torch.zeros(1, dtype=torch.int32, device="cuda")
    turn_and_store(qkv, where, where, (one, none), None, None, 1e-6, keys, values, 1)
    assert torch.equal(keys.float()[0], torch.full((1, 64), 448.0, device="cuda"))
    assert torch.equal(values.float()[0], torch.full((1, 64), 448.0, device="cuda"))


def test_turned_keys_stay_numbers(tmp_path: Path) -> None:
    """Two numbers of 440 may become one of 622 when they are turned."""
    with opened(tmp_path).new_backend(LIMITS) as backend:
        backend.decode(BatchBuilder().add_run(TOKENS[:70], 0, 0).build())
        for keys in backend._storage.keys:
            keys.view(torch.uint8).fill_(0x7E)  # 448
        backend.kv.seq_rm(0, 0, 5)
        backend.kv.seq_add(0, 5, 70, -5)
        backend.kv.update()
        assert all(bool(keys.float().isfinite().all()) for keys in backend._storage.keys)


def test_it_is_for_weights_of_16_bits(tmp_path: Path) -> None:
    with refused(ConfigError, "16-bit weights"):
        opened(tmp_path, dtype="float32")
