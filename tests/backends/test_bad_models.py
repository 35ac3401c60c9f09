"""Models that can't be loaded: one clear line each, exit code 3, no traceback, and no code of theirs is run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.checkpoints import save
from tests.parity.gguf_files import write
from tokenmill.backends.loading import open_model
from tokenmill.cli.main import main


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


def config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    content = {name: value.clone() for name, value in load_file(path).items()}  # the file is mapped
    change(content)
    save_file(content, path)


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def bin_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def misshapen(content: dict[str, torch.Tensor]) -> None:
    content["model.norm.weight"] = torch.zeros(7)


def code_of_its_own(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('code was run')")
    config(folder, model_type="evil", auto_map={"AutoModelForCausalLM": "evil.Evil"})


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated safetensors": (lambda f: cut(f / "model.safetensors", 0.6), "is corrupt or truncated"),
    "safetensors of nothing": (lambda f: (f / "model.safetensors").write_bytes(b""), "is corrupt or truncated"),
    "unknown family": (lambda f: config(f, model_type="gpt99"), "'gpt99' is not supported by our families, nor by"),
    "wrong shape": (lambda f: tensors(f, misshapen), "model.norm.weight has shape (7,), not (48,)"),
    "missing tensor": (lambda f: tensors(f, lambda t: t.pop("model.norm.weight")), "model.norm.weight is missing"),
    "unexpected tensor": (
        lambda f: tensors(f, lambda t: t.update({"extra.weight": torch.zeros(2)})),
        "extra.weight is not expected",
    ),
    "missing tokenizer": (str, "has no tokenizer.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "only .bin files": (bin_only, "only pickled weights"),
    "code of its own": (code_of_its_own, "requires custom code (auto_map"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config that is no JSON": (lambda f: (f / "config.json").write_text("{"), "is not valid JSON"),
    "config without sizes": (lambda f: config(f, hidden_size=None), "config.json has no hidden_size"),
    "config with a size of no number": (
        lambda f: config(f, hidden_size="48"),
        "config.json: hidden_size must be an integer of at least 1, not '48'",
    ),
    "config that is a list": (lambda f: (f / "config.json").write_text("[1]"), "must contain a JSON object, not [1]"),
    "config that is nested": (lambda f: (f / "config.json").write_text("[" * 100_000), "is nested too deep"),
    "quantised in another way": (
        lambda f: config(f, quantization_config={"quant_method": "awq"}),
        "is quantized with 'awq'",
    ),
    "quantised with a word": (lambda f: config(f, quantization_config="awq"), "is quantized with"),
    "index of a number": (
        lambda f: (f / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 1}})),
        "is not a weight index: weight_map names 1",
    ),
    "index of nothing": (
        lambda f: (f / "model.safetensors.index.json").write_text(json.dumps({"a": 1})),
        "is not a weight index",
    ),
    "index that leads elsewhere": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "../other/model.safetensors"}})
        ),
        "weight_map names '../other/model.safetensors', which is not a .safetensors file beside it",
    ),
    "missing part without an index": (
        lambda f: (f / "model.safetensors").rename(f / "model-00001-of-00002.safetensors"),
        "has no model-00002-of-00002.safetensors, which is a part of the model",
    ),
    "missing shard": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "gone.safetensors"}})
        ),
        "has no gone.safetensors",
    ),
}


def fails(model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """Run the command line in this process; the one line it says."""
    monkeypatch.setattr(sys, "argv", ["tokenmill", "generate", "hi", "-m", model, *more])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.fault("M01", "M04", "M05", "M08")
@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories(
    case: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, saying = BROKEN[case]
    damage(folder)
    assert saying in fails(str(folder), capsys, monkeypatch)


@pytest.mark.fault("M04")
def test_code_of_a_family_that_does_not_need_it_is_ignored(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('code was run')")
    config(folder, auto_map={"AutoModelForCausalLM": "evil.Evil"})
    open_model(str(folder)).close()


@pytest.mark.parametrize("share", [0.0001, 0.05, 0.5, 0.99])
def test_truncated_gguf(
    share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("llama", tmp_path / "model.gguf", "llama")
    cut(path, share)
    line = fails(str(path), capsys, monkeypatch)
    assert "truncated" in line or "not a GGUF file" in line


@pytest.mark.fault("M08")
def test_gguf_of_another_architecture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    line = fails(str(tmp_path / "m.gguf"), capsys, monkeypatch, "--backend", "torch")
    assert "architecture 'mamba', which is not supported; supported: gemma2, gemma3, " in line
    assert "no model '/nowhere'" in fails("/nowhere", capsys, monkeypatch)


def test_as_a_user_sees_it(folder: Path) -> None:
    code_of_its_own(folder)
    command = [str(Path(sys.executable).with_name("tokenmill")), "generate", "hi", "-m", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert done.stdout == ""
    assert done.stderr.startswith("tokenmill: ")
    assert len(done.stderr.splitlines()) == 1
