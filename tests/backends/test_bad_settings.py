"""Settings and weights that make no sense are refused by name, before memory is spent on them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.checkpoints import TOKENS, TOLERANCE, all_logits, logits_of, save
from tests.parity.gguf_files import put, write
from tokenmill import open_model
from tokenmill.backends.torch import loader as opening
from tokenmill.backends.torch.model import TorchModel
from tokenmill.errors import ModelLoadError


def opened(path: Path) -> TorchModel:
    model = open_model(str(path), device="cpu")
    assert isinstance(model, TorchModel)
    return model


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        opened(path)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


# -- config.json ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    return {name: save(name, root / name) for name in ("llama", "mistral", "qwen2")}


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with other settings; `...` takes a key away."""
    shutil.copytree(folder, to)
    config = {**json.loads((to / "config.json").read_text()), **changes}
    (to / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return to


def yarn(**changes: Any) -> dict[str, Any]:
    settings = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    return {"rope_parameters": {**settings, **changes}}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ..., "max_window_layers": 1}

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads"),
    ("llama", {"num_key_value_heads": [2]}, "num_key_value_heads"),
    ("llama", {"num_key_value_heads": 1.5}, "num_key_value_heads"),
    ("llama", {"num_key_value_heads": True}, "num_key_value_heads"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads"),
    ("llama", {"head_dim": "8"}, "head_dim"),
    ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number above 0, not '1e-6'"),
    ("llama", {"rms_norm_eps": [1e-6]}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
    ("llama", {"rope_parameters": ..., "rope_theta": "10000"}, "rope_theta must be a number above 1"),
    ("llama", {"rope_parameters": ..., "rope_theta": 0}, "rope_theta must be a number above 1, not 0"),
    ("llama", {"rope_parameters": {"rope_type": ["yarn"]}}, "rope_type must be a string"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor must be a number above 0, not 0"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "has no factor"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 1e-60}}, "invalid RoPE settings"),
    ("llama", {"rope_parameters": {**LLAMA3, "factor": "8"}}, "factor must be a number"),
    ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 0}}, "low_freq_factor must be a number above 0"),
    ("llama", yarn(factor="4"), "factor must be a number"),
    ("llama", yarn(factor=-4), "factor must be a number above 0, not -4"),
    ("llama", yarn(original_max_position_embeddings="64"), "original_max_position_embeddings"),
    ("llama", yarn(rope_theta=1), "rope_theta must be a number above 1, not 1"),
    ("llama", yarn(rope_theta=1e300), "invalid RoPE settings"),
    ("llama", yarn(truncate="no"), "truncate must be true or false"),
    ("llama", yarn(mscale=-1000.0, mscale_all_dim=1.0), "invalid RoPE settings"),
    ("llama", {"quantization_config": "awq"}, "is quantized"),
    ("llama", {"quantization_config": ["awq"]}, "is quantized"),
    ("llama", {"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
    ("llama", {"hidden_act": ["silu"]}, "hidden_act must be a string"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ("llama", {"max_position_embeddings": 1}, "max_position_embeddings"),
    ("llama", {"max_position_embeddings": 2**40}, "max_position_embeddings"),
    ("llama", {"num_hidden_layers": 10**18}, "num_hidden_layers"),
    ("llama", {"intermediate_size": 1e13}, "has shape (80, 48), not (10000000000000, 48)"),
    ("llama", {"vocab_size": 2**62}, "has shape (160, 48)"),
    ("mistral", {"sliding_window": "7"}, "sliding_window must be an integer of at least 1, not '7'"),
    ("mistral", {"sliding_window": 0}, "sliding_window must be an integer of at least 1, not 0"),
    ("qwen2", {**SLIDING, "sliding_window": 0}, "sliding_window"),
    ("qwen2", {**SLIDING, "layer_types": 5}, "layer_types must be a list of 3"),
    ("qwen2", {**SLIDING, "layer_types": ["full_attention"]}, "layer_types must be a list of 3"),
    ("qwen2", {**SLIDING, "layer_types": [["full_attention"]] * 3}, "layer_types must be a list of 3"),
    ("qwen2", {**SLIDING, "max_window_layers": None}, "has no max_window_layers"),
    ("qwen2", {**SLIDING, "max_window_layers": "1"}, "max_window_layers"),
]


@pytest.mark.parametrize(("family", "changes", "saying"), BAD)
def test_settings_that_make_no_sense(
    family: str, changes: dict[str, Any], saying: str, good: dict[str, Path], tmp_path: Path
) -> None:
    assert saying in refused(changed(good[family], tmp_path / "model", **changes))


def test_whole_floats_are_numbers_and_nulls_are_nothing(good: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(good["llama"], tmp_path / "model", num_key_value_heads=2.0, head_dim=8.0, rope_scaling=None)
    assert np.abs(all_logits(opened(folder), TOKENS, 64) - logits_of("llama", TOKENS).numpy()).max() < TOLERANCE


@pytest.mark.parametrize("num_layers", [9_999, 200_000])
def test_a_false_count_of_layers_is_found_at_once(num_layers: int, good: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(good["llama"], tmp_path / "model", num_hidden_layers=num_layers)
    began = time.monotonic()
    assert "missing" in refused(folder) or num_layers > 10_000
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("error", [RuntimeError("can't allocate memory\nmore"), MemoryError()])
def test_weights_that_do_not_fit(error: Exception, good: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(opening, "DecoderWeights", full)
    assert "the weights need 0.0 GiB of memory on cpu and cannot be loaded" in refused(good["llama"])


# -- weights ----------------------------------------------------------------------------------------------------------

NORM = "model.norm.weight"


def with_tensor(folder: Path, to: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    shutil.copytree(folder, to)
    content = {name: value.clone() for name, value in load_file(to / "model.safetensors").items()}
    content[NORM] = change(content[NORM])
    save_file(content, to / "model.safetensors")
    return to


@pytest.mark.parametrize("name", ["I8", "I64", "BOOL", "C64"])
def test_weights_are_floating_point_numbers(name: str, good: dict[str, Path], tmp_path: Path) -> None:
    dtype = {"I8": torch.int8, "I64": torch.int64, "BOOL": torch.bool, "C64": torch.complex64}[name]
    folder = with_tensor(good["llama"], tmp_path / "model", lambda value: value.to(dtype))
    assert f"{NORM} has the type {name}, which is not a floating point type" in refused(folder)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_weights_are_finite(bad: float, good: dict[str, Path], tmp_path: Path) -> None:
    def spoil(value: torch.Tensor) -> torch.Tensor:
        value = value.double()
        value[3] = bad  # 1e300 is a number in float64, and none in the weights' float32
        return value

    folder = with_tensor(good["llama"], tmp_path / "model", spoil)
    assert f"{NORM} has non-finite values as torch.float32" in refused(folder)


def test_the_whole_model_goes_before_other_safetensors_files(good: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(good["llama"], tmp_path / "model"))
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert np.abs(all_logits(opened(folder), TOKENS, 64) - logits_of("llama", TOKENS).numpy()).max() < TOLERANCE
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert opened(folder).info.vocab_size == 160
    (folder / "model-00001-of-00001.safetensors").rename(folder / "weights.safetensors")
    (folder / "consolidated.safetensors").unlink()
    assert opened(folder).info.vocab_size == 160


# -- GGUF -------------------------------------------------------------------------------------------------------------

GGUF_BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"attention__head_count_kv": [2, 2, 1]},
        "head_count_kv must be an integer, or a list with the same one for each of 3",
    ),
    (
        {"attention__head_count_kv": [2, 2]},
        "head_count_kv must be an integer, or a list with the same one for each of 3",
    ),
    ({"attention__head_count_kv": "2"}, "head_count_kv"),
    ({"attention__head_count_kv": 0}, "head_count_kv"),
    ({"attention__key_length": 8.5}, "key_length"),
    ({"attention__key_length": "8"}, "key_length"),
    ({"attention__layer_norm_rms_epsilon": "small"}, "layer_norm_rms_epsilon must be a number above 0, not 'small'"),
    ({"attention__layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon"),
    ({"attention__layer_norm_rms_epsilon": None}, "has no llama.attention.layer_norm_rms_epsilon"),
    ({"attention__sliding_window": [4, 4, 4]}, "sliding_window"),
    ({"attention__sliding_window": -1}, "sliding_window"),
    ({"block_count": True}, "block_count"),
    ({"block_count": 200_000}, "block_count"),
    ({"block_count": 2**62}, "block_count"),
    ({"context_length": 0}, "context_length must be an integer from 2"),
    ({"context_length": None}, "has no llama.context_length"),
    ({"feed_forward_length": 2**62}, "has shape"),
    ({"rope__dimension_count": "8"}, "dimension_count"),
    ({"rope__freq_base": "10000"}, "freq_base must be a number above 1, not '10000'"),
    ({"rope__freq_base": 0.0}, "freq_base must be a number above 1"),
    ({"rope__scaling__type": 5}, "rope.scaling.type must be a string"),
    ({"rope__scaling__factor": 0.0}, "rope.scaling.factor must be a number above 0"),
    ({"rope__scale_linear": -2.0}, "rope.scale_linear must be a number above 0"),
    ({"rope__scaling__type": "yarn", "rope__scaling__original_context_length": "64"}, "original_context_length"),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": -4.0}, "rope.scaling.factor"),
    ({"rope__scaling__type": "yarn", "rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor must be -1 or 1"),
    ({"rope__scaling__yarn_attn_factor": 2.0}, "yarn_attn_factor must be 1, not 2.0"),
    ({"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier must be 0, not 0.1"),
    ({"rope__scaling__alpha": 2.0}, "rope.scaling.alpha is not supported"),
]


@pytest.mark.parametrize(("changes", "saying"), GGUF_BAD)
def test_metadata_that_makes_no_sense(changes: dict[str, Any], saying: str, tmp_path: Path) -> None:
    path = write("llama", tmp_path / "model.gguf", "llama", change=lambda writer: put(writer, "llama", **changes))
    assert saying in refused(path)


def test_the_same_number_for_every_layer_is_a_number(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        put(writer, "llama", attention__head_count_kv=[2, 2, 2], feed_forward_length=[80] * 3)

    model = opened(write("llama", tmp_path / "model.gguf", "llama", change=change))
    assert np.abs(all_logits(model, TOKENS, 64) - logits_of("llama", TOKENS).numpy()).max() < TOLERANCE


@pytest.mark.parametrize(
    ("num_rows", "saying"),
    [(2**58, "is corrupt: tensor 'token_embd.weight' has shape"), (3_000_000_000, "is truncated: token_embd.weight")],
)
def test_an_embedding_larger_than_the_file(num_rows: int, saying: str, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.tensors[0]["token_embd.weight"].shape = (num_rows, 48)

    assert saying in refused(write("llama", tmp_path / "m.gguf", "llama", change=change))


@pytest.mark.parametrize(
    ("values", "saying"),
    [
        ([1.0] * 3, "rope_freqs.weight has shape (3,), not (4,)"),
        ([0.0] * 4, "rope_freqs.weight must be positive"),
        ([1.0, 1.0, float("nan"), 1.0], "rope_freqs.weight must be positive"),
    ],
)
def test_frequencies_that_make_no_sense(values: list[float], saying: str, tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(values, dtype=np.float32))

    assert saying in refused(write("llama", tmp_path / "model.gguf", "llama", change=change))


def test_a_tensor_that_is_there_twice(tmp_path: Path) -> None:
    path = write("llama", tmp_path / "model.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    assert "duplicate tensor 'blk.0.attn_q.weight'" in refused(path)


def test_values_of_a_gguf_file_are_finite(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        norm = np.ones(48, dtype=np.float32)
        norm[5] = np.inf
        writer.tensors[0]["output_norm.weight"].tensor = norm

    path = write("llama", tmp_path / "model.gguf", "llama", change=change)
    assert "output_norm.weight has non-finite values" in refused(path)
