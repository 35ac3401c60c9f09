"""`load_format="dummy"`: a model from its config.json alone, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parity.checkpoints import TOKENS, all_logits, save
from tokenmill import LLM, open_model
from tokenmill.backends.cpu.model import CPUModel
from tokenmill.backends.loading import describe_model
from tokenmill.backends.torch.model import TorchModel
from tokenmill.contract import BackendLimits
from tokenmill.entrypoints.fit import plan_fit
from tokenmill.errors import ConfigError, ModelLoadError
from tokenmill.params import SamplingParams


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with a config.json, and nothing else."""
    (tmp_path / "alone").mkdir()
    config = json.loads((save("qwen2", tmp_path / "whole") / "config.json").read_text())
    (tmp_path / "alone" / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    return tmp_path / "alone"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_config_is_enough_to_generate(dtype: str, folder: Path) -> None:
    if dtype == "int8":  # the kernels hold weights in groups of 32
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **sizes, "head_dim": 32}))
    with LLM(str(folder), load_format="dummy", dtype=dtype, device="cpu", kv_cache_tokens=256) as llm:
        params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
        (output,) = llm.generate(["what is left of a model without weights"], params)
        assert len(output.outputs[0].token_ids) == 5


def test_weights_are_random_and_the_same_each_time(folder: Path) -> None:
    models = [open_model(str(folder), load_format="dummy", device="cpu") for _ in range(2)]
    logits = [all_logits(model, TOKENS[:20], 20) for model in models if isinstance(model, TorchModel)]
    assert np.array_equal(*logits)
    assert np.isfinite(logits[0]).all()
    assert np.unique(logits[0]).size > logits[0].size // 2
    assert logits[0].std() > 0.01


def test_no_two_rows_and_no_two_matrices_are_the_same(folder: Path) -> None:
    model = open_model(str(folder), load_format="dummy", device="cpu")
    assert isinstance(model, TorchModel)
    matrices = [view.numpy() for view in model.decoder.weights.views.values() if view.ndim == 2]
    rows = [row[:40].tobytes() for matrix in matrices for row in matrix]
    assert len(set(rows)) == len(rows) > 300
    assert 0.018 < np.std(matrices[0]) < 0.022


def test_a_plan_needs_no_weights(folder: Path) -> None:
    fit = plan_fit(str(folder), 1, 64, free_bytes=1 << 30, load_format="dummy", device="cpu")
    assert fit.plan.weights > 0


def test_without_dummy_weights_are_required(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="has no weights"):
        open_model(str(folder))


def test_what_cannot_be_random(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    needed = r"requires the torch or cpu backend and a directory with a config.json: .*m\.gguf"
    with pytest.raises(ConfigError, match=needed):
        open_model(str(tmp_path / "m.gguf"), load_format="dummy")
    with pytest.raises(ConfigError, match="requires the torch or cpu backend"):
        open_model(str(folder), load_format="dummy", backend="llamacpp")
    with pytest.raises(ConfigError, match="load_format 'pt' is not supported; supported: auto, dummy"):
        open_model(str(folder), load_format="pt")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "granite", "olmo2", "phi3, longrope", "smollm3"])
def test_every_family_is_made_and_planned(variant: str, dtype: str, tmp_path: Path) -> None:
    changes = {} if variant.startswith(("gemma", "phi3")) else {"hidden_size": 96}  # heads for the kernels
    config = json.loads((save(variant, tmp_path / "whole") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    options: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "dtype": dtype}
    model, before = open_model(str(tmp_path), **options), describe_model(str(tmp_path), **options)
    assert isinstance(model, CPUModel if dtype == "int8" else TorchModel)
    logits = all_logits(model, TOKENS[:20], 20)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.001
    limits = BackendLimits(num_cells=256)
    assert before.memory(limits, 8) == model.memory(limits, 8)
    assert before.max_context == model.info.max_context
