"""`python -m benchmarks.adapter` on a tiny model, as a directory and as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.adapter import as_directory, main
from tests.parity.checkpoints import all_logits, save
from tests.parity.gguf_files import write
from tokenmill import open_model
from tokenmill.backends.torch.model import TorchModel


def test_both_paths_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save("llama", tmp_path / "model")
    assert (
        main([str(folder), "--sequences", "1", "3", "--rounds", "2", "--steps", "2", "--threads", "1", "--json"]) == 0
    )
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["num_seqs"] for row in rows] == [1, 3]
    assert all(row["native"] > 0 and row["adapter"] > 0 and row["ratio"] > 0 for row in rows)


def test_a_gguf_file_becomes_a_directory_with_the_same_weights(tmp_path: Path) -> None:
    gguf = write("llama", tmp_path / "model.gguf", "llama")
    folder = tmp_path / "model"
    folder.mkdir()
    models = [open_model(str(path), device="cpu", dtype="float32") for path in (gguf, as_directory(gguf, folder))]
    logits = [all_logits(model, [1, 2, 3, 50, 7], 5) for model in models if isinstance(model, TorchModel)]
    assert abs(logits[0] - logits[1]).max() < 1e-4
