"""A byte-level BPE made for the test: ids and text of a real tokenizer, piece by piece."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tokenmill.errors import ModelLoadError, TokenizeFailed
from tokenmill.text import hf
from tokenmill.text.detok import Detokenizer
from tokenmill.text.hf import HuggingFaceTokenizer


def make_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|bos|>", "<|end|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the 猫 sat é là 😀 "] * 40, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return str(tokenizer.to_str())


JSON = make_json()
TOKENIZER = HuggingFaceTokenizer(JSON)


class NeverParsed:
    """Stands for the package's class where a tokenizer is at hand."""

    def __new__(cls, model: models.Model) -> Any:
        return Tokenizer(model)

    @staticmethod
    def from_str(_: str) -> Any:
        raise AssertionError("vocabulary and merges are there twice")


def test_the_tokenizer_for_users_shares_the_models_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    built = Tokenizer.from_str(JSON)
    monkeypatch.setattr(hf, "RustTokenizer", NeverParsed)
    own = HuggingFaceTokenizer(built)
    for text in ("the cat <|end|> sat", "<|bos|>", "猫 é"):
        assert own.encode(text) == TOKENIZER.encode(text)
        assert own.encode_template(text) == TOKENIZER.encode_template(text)


def test_added_tokens_keep_their_numbers_where_a_file_leaves_some_out() -> None:
    content = json.loads(JSON)
    last = {**content["added_tokens"][-1], "content": "<|far|>", "id": 500}
    content["added_tokens"].append(last)
    written = json.dumps(content)
    own = HuggingFaceTokenizer(written)
    number = Tokenizer.from_str(written).token_to_id("<|far|>")
    assert own.encode_template("a<|far|>")[-1:] == [number]
    assert number not in own.encode("a<|far|>")


def test_special_tokens_that_a_user_types_stay_text() -> None:
    typed = TOKENIZER.encode("a <|end|> b")
    assert typed[0] == 0
    assert 1 not in typed
    assert TOKENIZER.decode(typed) == "a <|end|> b"
    assert TOKENIZER.encode_template("a<|end|>")[-1] == 1
    assert 0 not in TOKENIZER.encode("a", add_special=False)


@pytest.mark.req("R31", "G10")
@given(tokens=st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30), skip_special=st.booleans())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_pieces_join_to_the_whole(tokens: list[int], skip_special: bool) -> None:
    """Any tokens at all, halves of characters included."""
    detokenizer = Detokenizer(TOKENIZER, skip_special=skip_special)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == TOKENIZER.decode(tokens, skip_special=skip_special)


@given(text=st.text(max_size=40))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_text_survives_the_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_every_end_of_sequence_id_is_found(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(JSON)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert HuggingFaceTokenizer.from_directory(tmp_path).eos_ids == {1, 2, 7}


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json"):
        HuggingFaceTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="is not a valid tokenizer"):
        HuggingFaceTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text(JSON)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is not valid JSON"):
        HuggingFaceTokenizer.from_directory(tmp_path)
    with pytest.raises(TokenizeFailed, match="not valid Unicode"):
        TOKENIZER.encode("a\ud800")


@pytest.mark.req("G16")
def test_the_first_users_do_not_race(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(JSON)
    tokenizer = HuggingFaceTokenizer.from_directory(tmp_path)
    with ThreadPoolExecutor(16) as threads:
        found = set(threads.map(lambda _: tuple(tokenizer.encode("the cat <|end|> sat")), range(200)))
    assert found == {tuple(TOKENIZER.encode("the cat <|end|> sat"))}
