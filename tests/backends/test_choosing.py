"""Which backend opens a model, what it says if a package is missing, and what is read of its files without torch."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.parity.checkpoints import TOKENS, all_logits, save
from tests.parity.gguf_files import write
from tokenmill import open_model
from tokenmill.backends import loading
from tokenmill.backends.checkpoints import SafetensorsSource
from tokenmill.backends.cpu.bindings import library
from tokenmill.backends.cpu.model import CPUModel
from tokenmill.backends.gguf_file import TYPES
from tokenmill.backends.loading import choose_backend
from tokenmill.backends.torch.weights import as_tensor
from tokenmill.contract.backend import LoadOptions
from tokenmill.errors import ConfigError, ModelLoadError

needs_kernels = pytest.mark.skipif(library() is None, reason="the kernels are not built: there is no C compiler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3", tmp_path_factory.mktemp("choosing"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("files")
    types = {kind: gguf.GGMLQuantizationType[kind] for kind in ("Q8_0", "F16")}
    return {kind: write("qwen3", made / f"{kind}.gguf", "qwen3", number) for kind, number in types.items()}


@needs_kernels
def test_auto_takes_the_cpu_backend_for_quantized_weights(folder: Path, files: dict[str, Path]) -> None:
    def chosen(path: Path, **options: str) -> str:
        return choose_backend(path, LoadOptions(**{"device": "cpu", **options})).backend  # type: ignore[arg-type]

    assert chosen(files["Q8_0"]) == "cpu"
    assert chosen(files["F16"]) == chosen(folder) == "torch"
    assert chosen(folder, dtype="int4") == chosen(files["F16"], dtype="int8") == "cpu"
    assert chosen(files["Q8_0"], dtype="float32") == chosen(files["Q8_0"], device="cuda") == "torch"


def test_without_torch_one_line_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = loading.is_installed
    monkeypatch.setattr(loading, "is_installed", lambda name: name != "torch" and found(name))
    with pytest.raises(
        ModelLoadError, match=r"its weights are floats; .*'tokenmill\[torch\]', or use dtype int8"
    ) as one:
        open_model(str(folder), device="cpu")
    assert "\n" not in str(one.value)
    with pytest.raises(ModelLoadError, match=r"pip install 'tokenmill\[torch\]'$"):
        open_model(str(folder), device="cpu", dtype="bfloat16")


@needs_kernels
def test_the_cpu_backend_refuses_what_it_does_not_have(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'float32' requires the torch backend"):
        open_model(str(folder), backend="cpu", dtype="float32")
    with pytest.raises(ConfigError, match="supported on the CPU only, not on device 'cuda'"):
        open_model(str(folder), dtype="int8", device="cuda")
    with pytest.raises(ConfigError, match="dtype 'int8' is not supported by the torch backend"):
        open_model(str(folder), backend="torch", dtype="int8", device="cpu")


@needs_kernels
def test_the_cpu_backend_rounds_a_directory_to_8_bits(folder: Path) -> None:
    asked, given = open_model(str(folder), backend="cpu"), open_model(str(folder), dtype="int8", device="cpu")
    assert isinstance(asked, CPUModel)
    assert (all_logits(asked, TOKENS[:20], 7) == all_logits(given, TOKENS[:20], 20)).all()


def test_types_of_gguf_tensors_are_those_of_the_package() -> None:
    assert {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()} == TYPES


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_floats_of_every_type_are_read_without_torch(dtype: torch.dtype, tmp_path: Path) -> None:
    value = torch.linspace(-3, 3, 33).reshape(3, 11).to(dtype)
    save_file({"odd": torch.zeros(3, dtype=torch.uint8), "x": value}, tmp_path / "model.safetensors")
    stored = SafetensorsSource(tmp_path).load("x")
    assert torch.equal(as_tensor(stored, "here", "x"), value)
    assert (stored.values("here", "x") == value.float().numpy()).all()
    assert stored.values("here", "x").dtype == np.float32
