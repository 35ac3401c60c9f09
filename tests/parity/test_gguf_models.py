"""GGUF files of every family give the logits of the checkpoints they were written from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.parity.checkpoints import TOKENS, TOLERANCE, all_logits, logits_of
from tests.parity.gguf_files import write
from tokenmill import open_model
from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.torch.gguf_source import dequantise
from tokenmill.backends.torch.model import TorchModel
from tokenmill.errors import ModelLoadError

FILES = [
    ("llama", "llama"),
    ("llama tied", "llama"),
    ("llama, other base", "llama"),
    ("llama, one KV head", "llama"),
    ("llama, yarn rope", "llama"),
    ("llama, llama3 rope", "llama"),
    ("llama, heads of their own size", "llama"),
    ("mistral", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("qwen3 tied, yarn", "qwen3"),
]
QUANTISED = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def opened(path: Path) -> TorchModel:
    model = open_model(str(path), device="cpu")
    assert isinstance(model, TorchModel)
    return model


@pytest.mark.req("R21")
@pytest.mark.parametrize(("variant", "arch"), FILES)
def test_logits_are_those_of_transformers(variant: str, arch: str, tmp_path: Path) -> None:
    model = opened(write(variant, tmp_path / "model.gguf", arch))
    assert np.abs(all_logits(model, TOKENS, 64) - logits_of(variant, TOKENS).numpy()).max() < TOLERANCE


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_tensors_have_the_values_the_format_gives_them(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    rows = np.random.default_rng(0).normal(size=(6, 256)).astype(np.float32)
    data = gguf.quants.quantize(rows, number)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "t.gguf")
    values = dequantise(file, file.tensors["x"])
    assert torch.equal(values, torch.from_numpy(gguf.quants.dequantize(data, number)))
    assert (values - torch.from_numpy(rows)).abs().max() < 0.5


@pytest.mark.parametrize("kind", list(gguf.GGMLQuantizationType))
def test_every_type_is_read_or_refused_by_name(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    raw = np.zeros((2, 2 * block_bytes), dtype=np.uint8)
    writer.add_tensor("x", raw, raw_shape=(2, 2 * block_bytes), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "t.gguf")
    try:
        values = dequantise(file, file.tensors["x"])
    except ModelLoadError as error:
        assert kind.name in str(error)  # noqa: PT017
    else:
        assert tuple(values.shape) == (2, 2 * per_block)
