"""What rounding costs: perplexity of the default model in each form, beside float32 of the same file."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks.agreement import compare_forms, in_chunks, perplexity
from tokenmill import open_model
from tokenmill.backends.torch.native.bindings import library
from tokenmill.contract import ModelHandle
from tokenmill.text.model_text import open_text

NUM_TOKENS = 500


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
