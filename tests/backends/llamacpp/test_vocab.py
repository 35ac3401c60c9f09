"""llama.cpp's own tokenizer, for files that cut text in a way that is not known to tokenmill."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.backends.llamacpp.files import write_attention
from tests.text.test_gguf import byte_level, byte_level_metadata  # noqa: F401 (a fixture)
from tokenmill import LLM, SamplingParams, open_model
from tokenmill.errors import ModelLoadError, TokenizeFailed, TooManyTokens
from tokenmill.text.llamacpp import LlamaTokenizer
from tokenmill.text.model_text import open_text

TEXT = "the cat sat on 1984 naïve mats 日本 😀 <|im_end|>"


@pytest.fixture
def odd(byte_level: Any, tmp_path: Path) -> Path:  # noqa: F811
    """A file that cuts text as Falcon does."""
    metadata = {**byte_level_metadata(byte_level), "tokenizer.ggml.pre": "deepseek-coder"}
    return write_attention(tmp_path / "odd.gguf", tokenizer=metadata)


def test_it_stands_in_where_ours_does_not_know_the_cut(odd: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened = open_model(str(odd), backend="llamacpp", n_threads=1)
    with caplog.at_level(logging.INFO):
        text = open_text(opened)
    assert isinstance(text.tokenizer, LlamaTokenizer)
    assert "pre-tokenizer 'deepseek-coder' is not supported" in caplog.text
    ids = text.tokenizer.encode(TEXT, add_special=False)
    assert text.tokenizer.decode(ids) == TEXT
    assert b"".join(text.tokenizer.token_bytes(token) for token in ids) == TEXT.encode()
    end = text.tokenizer.special_tokens["<|im_end|>"]
    assert end not in ids
    assert end in text.tokenizer.encode_template(TEXT)
    assert end in text.tokenizer.eos_ids
    assert text.tokenizer.token_bytes(10**6) == b""
    assert text.tokenizer.decode([end, *ids]) == TEXT
    opened.close()


def test_21_1_long_texts(byte_level: Any, tmp_path: Path) -> None:  # noqa: F811
    """A limit holds, by the length alone where that is enough; what would end the process is refused."""
    metadata = {**byte_level_metadata(byte_level), "tokenizer.ggml.pre": "deepseek-llm"}
    opened = open_model(str(write_attention(tmp_path / "long.gguf", tokenizer=metadata)), backend="llamacpp")
    tokenizer = open_text(opened).tokenizer
    assert isinstance(tokenizer, LlamaTokenizer)
    text = TEXT * 2000
    ids = tokenizer.encode(text, add_special=False)
    assert tokenizer.decode(ids) == text
    assert 0 < tokenizer.min_num_tokens(text) < len(ids)
    places = [(at, at + len("<|im_end|>")) for at in range(len(text)) if text.startswith("<|im_end|>", at)]
    templates: list[list[Any]] = [[text], [text, places]]
    for arguments in templates:
        ids = tokenizer.encode_template(*arguments)
        assert tokenizer.encode_template(*arguments, limit=len(ids)) == ids
        for limit in (len(ids) - 1, 5):
            with pytest.raises(TooManyTokens) as caught:
                tokenizer.encode_template(*arguments, limit=limit)
            assert limit < caught.value.at_least <= len(ids)
    for run in ("a", " ", "1", "-", "日", "e\u0301"):
        assert tokenizer.encode((run * 5000)[:5000])
        with pytest.raises(TokenizeFailed, match="characters of one kind"):
            tokenizer.encode("the cat " + run * 50_000)
    assert tokenizer.encode("日本。" * 20_000)
    opened.close()


@pytest.mark.parametrize("engine", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_it_serves_an_engine(odd: Path, engine: str) -> None:
    with LLM(str(odd), backend="llamacpp", engine=engine, num_threads=1, kv_cache_tokens=512) as llm:
        (out,) = llm.generate("the cat", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert isinstance(llm.get_tokenizer(), LlamaTokenizer)
        assert out.outputs[0].text == llm.get_tokenizer().decode(out.outputs[0].token_ids)


def test_without_llama_cpp_such_a_file_is_refused(odd: Path) -> None:
    opened = open_model(str(odd), backend="torch", device="cpu")
    with pytest.raises(ModelLoadError, match="pre-tokenizer 'deepseek-coder'"):
        open_text(opened)
