"""GGUF files of every family give the logits of the checkpoints they were written from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.llamacpp import needs_llamacpp
from tests.parity.checkpoints import TOKENS, TOLERANCE, all_logits, logits_of, save
from tests.parity.gguf_files import put, write
from tokenmill import open_model
from tokenmill.backends.checkpoints import config_of, stored
from tokenmill.backends.families.rope import frequencies
from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.torch.model import TorchModel
from tokenmill.errors import ModelLoadError

FILES = [
    ("llama", "llama"),
    ("llama tied", "llama"),
    ("llama, other base", "llama"),
    ("llama, one KV head", "llama"),
    ("llama, yarn rope", "llama"),
    ("llama, yarn with mscale", "llama"),
    ("llama, llama3 rope", "llama"),
    ("llama, heads of their own size", "llama"),
    ("mistral", "llama"),
    ("qwen2", "qwen2"),
    ("qwen3", "qwen3"),
    ("qwen3 tied, yarn", "qwen3"),
    ("gemma2 of a GGUF file", "gemma2"),
    ("gemma3 of a GGUF file", "gemma3"),
    ("phi3", "phi3"),
    ("phi3, window", "phi3"),
    ("phi3, longrope", "phi3"),
    ("smollm3 of a GGUF file", "smollm3"),
    ("granite", "granite"),
    ("granite with biases", "granite"),
    ("olmo2", "olmo2"),
]
AS_IN_LLAMACPP = [(variant, arch) for variant, arch in FILES if arch not in ("llama", "qwen2", "qwen3")]
AS_IN_LLAMACPP.remove(("phi3, window", "phi3"))  # which llama.cpp ignores
LLAMACPP_TOLERANCE = 0.02
"""Of all logits together: it keeps keys and values in half precision, and looks gelu up in a table."""
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


def without_vocabulary(writer: Any) -> None:
    writer.add_vocab_size(160)
    writer.add_string("tokenizer.ggml.model", "no_vocab")


@pytest.mark.fault("E05")
@needs_llamacpp
@pytest.mark.req("R21")
@pytest.mark.parametrize(("variant", "arch"), AS_IN_LLAMACPP)
def test_logits_are_those_of_llamacpp(variant: str, arch: str, tmp_path: Path) -> None:
    path = write(variant, tmp_path / "model.gguf", arch, change=without_vocabulary)
    theirs = open_model(str(path), backend="llamacpp", n_threads=1)
    found, wanted = all_logits(opened(path), TOKENS, 64), all_logits(theirs, TOKENS, 64)
    theirs.close()
    assert np.linalg.norm(found - wanted) / np.linalg.norm(wanted) < LLAMACPP_TOLERANCE


def test_granite_without_rope(tmp_path: Path) -> None:
    """To llama.cpp, files that are not made for RoPE have none."""
    change = lambda writer: put(writer, "granite", rope__scaling__finetuned=False)  # noqa: E731
    assert not config_of(GGUFFile(write("granite", tmp_path / "model.gguf", "granite", change=change))).ropes


def test_layers_of_olmo_with_a_window_are_not_stretched(tmp_path: Path) -> None:
    """OLMo 3 has the same architecture in GGUF files: every fourth layer sees all, by yarn."""
    yarn = {f"rope__scaling__{name}": value for name, value in GGUF_YARN.items()}
    change = lambda writer: put(writer, "olmo2", attention__sliding_window=9, block_count=5, **yarn)  # noqa: E731
    config = config_of(GGUFFile(write("olmo2", tmp_path / "model.gguf", "olmo2", change=change)))
    assert config.windows == (9, 9, 9, None, 9)
    assert [layer.rope.kind for layer in config.layers if layer.rope] == ["default"] * 3 + ["yarn", "default"]


@pytest.mark.parametrize("key_length", [16, None])
def test_sizes_that_do_not_go_together_are_refused(key_length: int | None, tmp_path: Path) -> None:
    """More heads than dimensions, in the number of layers whose attention scale goes by their quotient."""
    sizes = {"block_count": 46, "embedding_length": 8, "attention__head_count": 16}
    change = lambda writer: put(writer, "gemma2", attention__key_length=key_length, **sizes)  # noqa: E731
    path = write("gemma2 of a GGUF file", tmp_path / "model.gguf", "gemma2", change=change)
    with pytest.raises(ModelLoadError):
        open_model(str(path), device="cpu")


def test_a_split_file_is_the_whole_model(tmp_path: Path) -> None:
    path = write("llama", tmp_path / "model.gguf", "llama", part_tensors=10)
    assert len(GGUFFile(path).paths) == len(list(tmp_path.iterdir())) > 2
    assert np.abs(all_logits(opened(path), TOKENS, 64) - logits_of("llama", TOKENS).numpy()).max() < TOLERANCE
    assert np.array_equal(all_logits(opened(tmp_path), TOKENS, 64), all_logits(opened(path), TOKENS, 64))


def part(first: Path, number: int) -> Path:
    return first.with_name(first.name.replace("00001-of", f"{number:05}-of"))


def swap(first: Path) -> Path:
    aside = part(first, 2).rename(first.with_name("aside"))
    part(first, 3).rename(part(first, 2))
    aside.rename(part(first, 3))
    return first


def remove(first: Path) -> Path:
    part(first, 2).unlink()
    return first


def truncate(first: Path) -> Path:
    last = part(first, 3)
    last.write_bytes(last.read_bytes()[:-99])
    return first


SPLIT_WRONGLY: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a later part": (lambda first: part(first, 2), "is one of 3 parts; open the first one, model-00001-of-00003.gguf"),
    "missing": (remove, "has no model-00002-of-00003.gguf, which is a part of the model"),
    "renamed": (lambda first: first.rename(first.with_name("x.gguf")), "must be named like one: x-00001-of-00003.gguf"),
    "swapped": (swap, "is part 2 of a split file, not 1"),
    "truncated": (truncate, "model-00003-of-00003.gguf is truncated"),
}


@pytest.mark.parametrize("case", SPLIT_WRONGLY)
def test_split_files_that_are_rejected(case: str, tmp_path: Path) -> None:
    damage, says = SPLIT_WRONGLY[case]
    path = damage(write("llama", tmp_path / "model.gguf", "llama", part_tensors=13))
    with pytest.raises(ModelLoadError, match=says):
        opened(path)


STRETCH = 1.0 + 0.1 * math.log(4.0)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GGUF_YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
SCALINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**GGUF_YARN, "attn_factor": 1.3}, {**YARN, "attention_factor": 1.3 * STRETCH}),
    ({**GGUF_YARN, "yarn_beta_fast": 8.0, "yarn_beta_slow": 3.0}, {**YARN, "beta_fast": 8.0, "beta_slow": 3.0}),
    (
        {**GGUF_YARN, "attn_factor": 0.8, "yarn_beta_fast": 16.0, "yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0},
        {**YARN, "attention_factor": 0.8 * STRETCH, "beta_fast": 16.0},
    ),
    ({"type": "linear", "factor": 4.0, "finetuned": True}, {"rope_type": "linear", "factor": 4.0}),
    ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # to llama.cpp, scaling is linear by default
    ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
]


def directory(path: Path, rope: dict[str, Any]) -> Path:
    """The llama checkpoint as a directory, with other rope settings."""
    folder = save("llama", path)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10_000.0, **rope}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.req("R21")
@pytest.mark.parametrize(("scaling", "rope"), SCALINGS)
def test_rope_scaling_is_that_of_the_same_checkpoint_as_a_directory(
    scaling: dict[str, Any], rope: dict[str, Any], tmp_path: Path
) -> None:
    names = {f"rope__scaling__{name}": value for name, value in scaling.items()}
    file = write("llama", tmp_path / "model.gguf", "llama", change=lambda writer: put(writer, "llama", **names))
    wanted = all_logits(opened(directory(tmp_path / "model", rope)), TOKENS, 64)
    assert np.abs(all_logits(opened(file), TOKENS, 64) - wanted).max() < TOLERANCE
    if rope["rope_type"] != "default":  # the settings make a difference that a test can see
        assert np.abs(wanted - logits_of("llama", TOKENS).numpy()).max() > 0.1


def test_the_older_name_of_linear_scaling(tmp_path: Path) -> None:
    change = lambda writer: put(writer, "llama", rope__scale_linear=4.0)  # noqa: E731
    model = opened(write("llama, linear rope", tmp_path / "model.gguf", "llama", change=change))
    wanted = logits_of("llama, linear rope", TOKENS).numpy()
    assert np.abs(all_logits(model, TOKENS, 64) - wanted).max() < TOLERANCE


def test_attention_factors_are_not_only_for_yarn(tmp_path: Path) -> None:
    change = lambda writer: put(writer, "llama", rope__scaling__attn_factor=1.5)  # noqa: E731
    path = write("llama", tmp_path / "model.gguf", "llama", change=change)
    (rope,) = config_of(GGUFFile(path)).ropes
    assert frequencies(rope)[1] == 1.5


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
    values = stored(file, file.tensors["x"]).values("t.gguf", "x")
    assert (values == gguf.quants.dequantize(data, number)).all()
    assert np.abs(values - rows).max() < 0.5


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
        values = stored(file, file.tensors["x"]).values("t.gguf", "x")
    except ModelLoadError as error:
        assert kind.name in str(error)  # noqa: PT017
    else:
        assert tuple(values.shape) == (2, 2 * per_block)
