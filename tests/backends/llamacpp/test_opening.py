"""Which backend opens what, with which options; and files that can't be opened: one line, exit code 3."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.backends.llamacpp.files import write_attention
from tests.backends.test_bad_models import cut, fails
from tokenmill import LLM, SamplingParams, open_model
from tokenmill.contract import BackendLimits, BatchBuilder
from tokenmill.entrypoints.fit import limits_for, plan_fit
from tokenmill.errors import ConfigError, ModelLoadError, Unsupported
from tokenmill.text.tokenizer import ByteTokenizer

LLAMACPP = ("--backend", "llamacpp")


# -- files that can't be opened ---------------------------------------------------------------------------------------


def no_gguf(path: Path) -> None:
    path.write_bytes(b"this is a text, and no model at all")


def unknown_architecture(path: Path) -> None:
    write_attention(path, "gpt99")


def cut_in_the_header(path: Path) -> None:
    cut(write_attention(path), 0.002)


def cut_in_the_tensors(path: Path) -> None:
    cut(write_attention(path), 0.9)


def a_tensor_missing(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_block_count, writer.add_context_length, writer.add_embedding_length, writer.add_head_count):
        add(4)
    writer.add_feed_forward_length(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(8)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("damage", "saying"),
    [
        (no_gguf, "is not a GGUF file"),
        (cut_in_the_header, "truncated"),
        (cut_in_the_tensors, "is truncated: blk.1.ffn_gate.weight needs bytes up to"),
        (unknown_architecture, "unknown model architecture: 'gpt99'"),
        (a_tensor_missing, "tensor 'token_embd.weight' not found"),
    ],
)
def test_a_bad_file_is_one_line(
    damage: Any, saying: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(tmp_path / "bad.gguf")
    line = fails(str(tmp_path / "bad.gguf"), capsys, monkeypatch, *LLAMACPP)
    assert saying in line
    assert str(tmp_path / "bad.gguf") in line


@pytest.mark.fault("L11")
def test_more_cells_than_memory_are_one_line(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = fails(str(small), capsys, monkeypatch, *LLAMACPP, "--extra", "n_ctx=2000000000")
    assert "n_ctx 2,000,000,000 needs" in line
    assert "would fit" in line


def test_as_a_user_sees_it(tmp_path: Path) -> None:
    """In a process of its own, where nothing is between llama.cpp and the terminal."""
    unknown_architecture(tmp_path / "bad.gguf")
    command = [sys.executable, "-m", "tokenmill", "generate", "hi", "-m", str(tmp_path / "bad.gguf"), *LLAMACPP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("model", ["small.gguf", "mamba.gguf"])
def test_without_the_extra_it_says_how_to_get_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for by name, or by the rule for a file that torch can't do."""
    path = write_attention(tmp_path / model, "mamba" if model == "mamba.gguf" else "llama")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "llama_cpp" else find_spec(name, *more)
    )
    more = LLAMACPP if model == "small.gguf" else ()
    assert "pip install 'tokenmill[llamacpp]'" in fails(str(path), capsys, monkeypatch, *more)


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_what_torch_has_goes_to_torch_and_all_else_to_llama_cpp(
    small: Path, mamba: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tokenmill.backends"):
        for path in (small, mamba):
            opened = open_model(str(path), device="cpu")
            assert ("llamacpp" in type(opened).__module__) == (path is mamba)
            opened.close()
    assert "small.gguf: backend torch (its weights are floats)" in caplog.text
    assert "mamba.gguf: backend llamacpp (mamba is not one of gemma2, gemma3, " in caplog.text


def test_options_that_do_not_go_together_are_refused(small: Path) -> None:
    for options, saying in (
        ({"dtype": "int8"}, "does not convert weights"),
        ({"deterministic": True}, "depends on the batch"),
        ({"device": "tpu"}, "not supported by llama.cpp"),
        ({"n_ubatch": 0}, "n_ubatch must be an integer of at least 1, not 0"),
        ({"type_k": "q3"}, "type_k 'q3' is not supported; supported: f32, f16, q8_0, q4_0"),
        ({"type_v": "q8_0", "flash_attn": False}, "requires flash attention"),
        ({"use_mmap": "yes"}, "use_mmap must be true or false"),
        ({"threads": 2}, "unknown option threads; supported by llama.cpp: flash_attn"),
    ):
        with pytest.raises(ConfigError, match=saying):
            open_model(str(small), backend="llamacpp", **options)
    with pytest.raises(ConfigError, match="is a directory"):
        open_model(str(small.parent.parent), backend="llamacpp")


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"type_k": "q8_0", "type_v": "q8_0"},
        {"type_k": "q4_0", "type_v": "q4_0"},
        {"n_ubatch": 3, "n_batch": 7},
        {"n_threads": 2, "n_threads_batch": 1},
        {"use_mmap": False, "use_mlock": True},
        {"flash_attn": False, "repack": False, "n_gpu_layers": 0},
    ],
    ids=str,
)
def test_options_are_taken_and_the_words_stay(small: Path, options: dict[str, Any]) -> None:
    """KV in four bits has its own numbers; all else must not change what is said."""
    prompt, params = list(range(40, 60)), SamplingParams(temperature=0, max_tokens=8)
    said = []
    for extra in ({"n_threads": 1}, {"n_threads": 1, **options}):
        with LLM(str(small), backend="llamacpp", extra=extra, tokenizer=ByteTokenizer(), kv_cache_tokens=512) as llm:
            said.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
    assert len(said[1]) == 8
    assert said[0] == said[1] or options.get("type_k") == "q4_0"


def test_a_split_file_is_the_whole_model(small: Path, tmp_path: Path) -> None:
    write_attention(tmp_path / "small.gguf", part_tensors=8)
    assert len(list(tmp_path.iterdir())) == 3
    prompt, params = list(range(40, 60)), SamplingParams(temperature=0, max_tokens=8)
    said, weights = [], []
    for path in (small, tmp_path):
        with LLM(str(path), backend="llamacpp", tokenizer=ByteTokenizer(), kv_cache_tokens=512, num_threads=1) as llm:
            said.append(llm.generate([prompt], params)[0].outputs[0].token_ids)
            weights.append(llm.opened.model.memory(BackendLimits(num_cells=512), 1).weights)
    assert said[0] == said[1]
    assert weights[1] >= weights[0]


def test_cells_are_what_n_ctx_says(small: Path) -> None:
    with LLM(str(small), backend="llamacpp", extra={"n_ctx": 300}, tokenizer=ByteTokenizer()) as llm:
        assert llm.engine.kv.num_cells == 300


def test_what_is_quantised_takes_less(small: Path) -> None:
    limits = BackendLimits(num_cells=1000)
    sizes = {}
    for kind in ("f16", "q8_0", "q4_0"):
        opened = open_model(str(small), backend="llamacpp", type_k=kind, type_v=kind)
        sizes[kind] = opened.memory(limits, 1).kv
        opened.close()
    assert sizes["f16"] == 1000 * 2 * 1 * (32 + 32) * 2  # layers, heads, keys and values, bytes
    assert sizes["q8_0"] < 0.6 * sizes["f16"]
    assert sizes["q4_0"] < 0.6 * sizes["q8_0"]


def test_fit_plans_by_the_same_arithmetic(small: Path, mamba: Path) -> None:
    fit = plan_fit(str(small), 4, 128, free_bytes=None, backend="llamacpp", extra={"n_ubatch": 64})
    opened = open_model(str(small), backend="llamacpp", n_ubatch=64)
    assert fit.plan == opened.memory(limits_for(4, 128, 1), 4)
    assert fit.kv_bytes_per_token == opened.info.kv_bytes_per_token == 2 * 1 * (32 + 32) * 2
    assert fit.fits
    opened.close()
    recurrent = plan_fit(str(mamba), 4, 128, free_bytes=None)
    assert recurrent.kv_bytes_per_token == 0
    assert recurrent.plan.kv == 64 * 4 * 2 * (128 * 8 + 3 * 128)  # states, bytes, layers, numbers


def test_weights_can_not_be_replaced(model: Any) -> None:
    with pytest.raises(Unsupported, match="use the torch backend"):
        model.replace_weight("output.weight", 1)
    assert model.weights_version == 0


def test_native_lines_stay_in_the_log(
    small: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "tokenmill.backends.llamacpp"):
        opened = open_model(str(small), backend="llamacpp", n_threads=1)
        with opened.new_backend(BackendLimits(num_cells=256)) as backend:
            backend.decode(BatchBuilder().add_run([1, 2, 3], 0, 0).build())
        opened.close()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert "n_ctx" in caplog.text
    assert max(record.levelno for record in caplog.records) <= logging.INFO


def test_a_closed_model_makes_no_more_backends(small: Path) -> None:
    opened = open_model(str(small), backend="llamacpp")
    opened.close()
    opened.close()
    with pytest.raises(ModelLoadError, match="closed"):
        opened.new_backend(BackendLimits(num_cells=256))
