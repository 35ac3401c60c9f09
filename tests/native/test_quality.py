"""What rounding costs: perplexity of the default model in each form, beside float32 of the same file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks.agreement import compare_forms, in_chunks, llama_cpp_logits, perplexity
from tests.llamacpp import needs_llamacpp
from tokenmill import open_model
from tokenmill.backends.cpu.bindings import library
from tokenmill.backends.library import pull
from tokenmill.bench.shapes import quantize
from tokenmill.contract import ModelHandle
from tokenmill.text.model_text import open_text

NUM_TOKENS = 2000


@needs_llamacpp
@pytest.mark.parametrize("quantization", ["Q4_K_M", "IQ4_XS"])
def test_a_requantized_file_has_llama_cpps_perplexity(quantization: str, tmp_path: Path) -> None:
    """On any mix of types that llama.cpp makes of the default model. Both round activations, each in its own way: that
    moves the perplexity of 500 tokens by up to 0.7 % in either direction, of the whole text by less.
    """
    if library() is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    path = tmp_path / "model.gguf"
    quantize(pull("smollm2-135m"), path, quantization)
    model = open_model(str(path), device="cpu")
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = open_text(model).tokenizer.encode(text)
    ours, theirs = perplexity(in_chunks(model, tokens), tokens), perplexity(llama_cpp_logits(path, tokens), tokens)
    assert abs(ours / theirs - 1) < 0.005


@cache
def exact() -> ModelHandle:
    return open_model("smollm2-135m", device="cpu", dtype="float32")


@pytest.mark.parametrize("dtype", ["auto", "int8", "int4"])
def test_perplexity_is_within_two_percent_of_float32(dtype: str) -> None:
    if library() is None:
        pytest.skip("the kernels are not built: there is no C compiler")
    model = open_model("smollm2-135m", device="cpu", dtype=dtype)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = open_text(model).tokenizer.encode(text)[:NUM_TOKENS]
    found = perplexity(in_chunks(model, tokens), tokens)
    other = compare_forms(model, exact(), "float32", tokens)
    assert abs(found / other.perplexity - 1) < 0.02
    assert other.top1_where_clear > 0.97
