"""The torch model's own checks: new weights, options, and how much memory there is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parity.checkpoints import save
from tokenmill import open_model
from tokenmill.backends.torch.footprint import free_bytes
from tokenmill.backends.torch.model import TorchModel
from tokenmill.errors import ConfigError, InvalidOperation

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("checks") / "model")


def opened(folder: Path, **options: Any) -> TorchModel:
    model = open_model(str(folder), device="cpu", **options)
    assert isinstance(model, TorchModel)
    return model


def too_large(dtype: torch.dtype, value: float) -> torch.Tensor:
    tensor = torch.ones(48, dtype=dtype)
    tensor[7] = value
    return tensor


@pytest.mark.req("R45")
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float32", too_large(torch.float64, 1e300)),
        ("float16", too_large(torch.float32, 1e6)),
        ("float32", too_large(torch.float32, torch.nan)),
        ("float32", torch.ones(48, dtype=torch.int64)),
        ("float32", torch.ones(48, dtype=torch.complex64)),
        ("float32", "ones"),
        ("float32", [[1.0, 2.0], [3.0]]),
        ("float32", [1.0, "two"]),
        ("float32", None),
        ("float32", np.array(["one"] * 48)),
    ],
)
def test_new_weights_are_checked_before_anything_is_written(dtype: str, value: Any, folder: Path) -> None:
    model = opened(folder, dtype=dtype)
    before = model.decoder.weights.norm.clone()
    with pytest.raises(InvalidOperation):
        model.replace_weight(NORM, value)
    assert torch.equal(model.decoder.weights.norm, before)
    assert model.weights_version == 0


@pytest.mark.parametrize(
    "options",
    [
        *({"block_size": value} for value in (0, -1, "x", 1.5, None, True)),
        *({"depth": value} for value in ("x", -1, 2, 0.5)),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], folder: Path) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        opened(folder, **options)


def test_options_that_do(folder: Path) -> None:
    assert opened(folder, block_size=1, depth=1).info.vocab_size == 160
    assert opened(folder, depth=None).info.vocab_size == 160


def test_the_kernels_caches_count_as_free(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    model = opened(folder)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert model.kv_budget_bytes == 1 << 20


def test_systems_that_do_not_say_how_much_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    def unknown(name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(Path, "read_text", missing)
    pages = {"SC_AVPHYS_PAGES": 3, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert free_bytes(torch.device("cpu")) == 3 * 4096
    monkeypatch.setattr(os, "sysconf", unknown)
    assert free_bytes(torch.device("cpu")) == 2 << 30
