"""Tokenizers out of GGUF metadata, against llama.cpp and references written here; and files that are damaged."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.llamacpp import needs_llamacpp
from tests.text.vocabularies import pieces_of, train, unicode_texts
from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.errors import ModelLoadError
from tokenmill.text.gguf import PRE_TOKENIZERS, gguf_tokenizer
from tokenmill.text.hf import HuggingFaceTokenizer

NORMAL, CONTROL, USER, BYTE = 1, 3, 4, 6
WORDS = ["the", "cat", "sat", "on", "a", "mat", "1984", "naïve", "日本", "😀", "don't", "  ", "\n", "\t"]


def write(path: Path, metadata: dict[str, Any]) -> Path:
    """A GGUF file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        else:
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def texts(count: int = 300) -> list[str]:
    rng = random.Random(4)
    return ["".join(rng.choice([*WORDS, " ", " "]) for _ in range(rng.randint(1, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=380, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 50, trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Any) -> dict[str, Any]:
    content = json.loads(tokenizer.to_str())
    vocabulary = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(vocabulary) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
    }


def test_byte_level_bpe_gives_the_ids_it_was_made_from(tmp_path: Path, byte_level: Any) -> None:
    metadata = byte_level_metadata(byte_level)
    ours = gguf_tokenizer(GGUFFile(write(tmp_path / "t.gguf", metadata)))
    for text in texts():
        assert ours.encode(text) == byte_level.encode(text).ids
        assert ours.decode(ours.encode(text)) == text
    assert ours.eos_ids == {0, 2}
    assert ours.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert 2 not in ours.encode("<|im_end|>")
    with_bos = {**metadata, "tokenizer.ggml.add_bos_token": True}
    assert gguf_tokenizer(GGUFFile(write(tmp_path / "b.gguf", with_bos))).encode("a")[0] == 1


# -- as llama.cpp does it ---------------------------------------------------------------------------------------------


def check_against_llamacpp(path: Path, texts: list[str]) -> HuggingFaceTokenizer:
    from tokenmill.backends.llamacpp.model import open_vocab

    ours, theirs = gguf_tokenizer(GGUFFile(path)), open_vocab(path)
    for text in texts:
        assert ours.encode(text) == theirs.tokenize(text.encode(), add_special=True, parse_special=False), ascii(text)
        meant = theirs.tokenize(text.encode(), add_special=False, parse_special=True)
        assert ours.encode_template(text) == meant, ascii(text)
    assert ours.eos_ids == theirs.end_ids
    return ours


@pytest.fixture(scope="module")
def across_everything() -> Any:
    """Byte-level BPE whose merges reach across any split, so that a wrong one shows in the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(unicode_texts(2000, seed=1), trainer)
    metadata = byte_level_metadata(tokenizer)
    metadata["tokenizer.ggml.tokens"] += UNMERGED
    metadata["tokenizer.ggml.token_type"] += [NORMAL] * len(UNMERGED)
    return metadata


UNMERGED = ["qqq", "Ġqqq"]
"""Tokens that no merges make: only some pre-tokenizers have their parts looked up whole."""


@needs_llamacpp
@pytest.mark.parametrize("name", [None, *PRE_TOKENIZERS])
def test_ids_of_byte_level_bpe_are_those_of_llama_cpp(tmp_path: Path, across_everything: Any, name: str | None) -> None:
    key = "tokenizer.ggml.pre"
    metadata = {**across_everything, key: name}
    if name is None:
        del metadata[key]
    check_against_llamacpp(write(tmp_path / "t.gguf", metadata), unicode_texts(150, more=("qqq", " qqq")))


GEMMA = (("<start_of_turn>", CONTROL), ("<end_of_turn>", CONTROL), ("[@BOS@]", USER), ("<table>", USER),
         *((" " * count, USER) for count in range(2, 9)), *(("\n" * count, USER) for count in range(2, 6)))  # fmt: skip
PHI3 = (("<|endoftext|>", CONTROL), ("<|assistant|>", CONTROL), ("<|user|>", USER), ("<|end|>", CONTROL))


@needs_llamacpp
@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({}, ()),
        ({"tokenizer.ggml.add_space_prefix": False}, ()),
        ({"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}, ()),
        ({"tokenizer.ggml.add_space_prefix": False}, GEMMA),
        ({"general.name": "Phi-3 mini"}, PHI3),
        ({"general.name": "another"}, PHI3),
    ],
    ids=["llama", "no prefix", "EOS", "gemma", "phi3", "not phi3"],
)
def test_ids_of_sentencepiece_are_those_of_llama_cpp(
    tmp_path: Path, changes: dict[str, Any], added: tuple[tuple[str, int], ...]
) -> None:
    pieces = pieces_of(train("bpe"))
    known = {piece.piece for piece in pieces}
    added = tuple((text, kind) for text, kind in added if text not in known)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*(piece.piece for piece in pieces), *(text for text, _ in added)],
        "tokenizer.ggml.scores": [*(piece.score for piece in pieces), *(-1000.0 for _ in added)],
        "tokenizer.ggml.token_type": [*(piece.type for piece in pieces), *(kind for _, kind in added)],
        **changes,
    }
    texts = unicode_texts(400, more=("<unk>", "</s>", " ", "\n", *(text for text, _ in added)))
    if "Phi" in changes.get("general.name", ""):  # llama.cpp strips ASCII's spaces only
        texts = [text for text in texts if not any(one.isspace() and not one.isascii() for one in text)]
    check_against_llamacpp(write(tmp_path / "s.gguf", metadata), texts)


def sentencepiece_reference(text: str, scores: dict[str, float], ids: dict[str, int]) -> list[int]:
    """As SentencePiece does it: join the neighbours whose union has the best score, leftmost first, until none is."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        unions = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in scores]
        if not unions:
            break
        place = -max(unions)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    found: list[int] = []
    for piece in pieces:
        found += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return found


def test_sentencepiece_by_its_scores(tmp_path: Path) -> None:
    rng = random.Random(0)
    pieces = sorted({*"▁abcde", "▁a", "ab", "abc", "bc", "cd", "de", "▁ab", "cde", "abcd", "ea", "▁e"})
    scores = {piece: -float(place) for place, piece in enumerate(rng.sample(pieces, len(pieces)))}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [scores.get(token, 0.0) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    ours = gguf_tokenizer(GGUFFile(write(tmp_path / "s.gguf", metadata)))
    ids = {token: number for number, token in enumerate(tokens)}
    for _ in range(400):
        text = "".join(rng.choice("abcde é") for _ in range(rng.randint(1, 14)))
        assert ours.encode(text, add_special=False) == sentencepiece_reference(text, scores, ids), text
        assert ours.encode(text)[0] == 1
        assert ours.decode(ours.encode(text)) == text


def test_what_is_not_known_is_an_error_not_a_guess(tmp_path: Path, byte_level: Any) -> None:
    metadata = byte_level_metadata(byte_level)
    for change, saying in [
        ({"tokenizer.ggml.pre": "martian"}, "pre-tokenizer 'martian' is not supported; supported: .*default"),
        ({"tokenizer.ggml.model": "wordlist"}, "type 'wordlist'; supported"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "2 token types"),
    ]:
        with pytest.raises(ModelLoadError, match=saying):
            gguf_tokenizer(GGUFFile(write(tmp_path / "x.gguf", {**metadata, **change})))
    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        gguf_tokenizer(GGUFFile(write(tmp_path / "n.gguf", {"general.name": "x"})))


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be read: Is a directory"):
        GGUFFile(tmp_path)
    with pytest.raises(ModelLoadError, match="cannot be read: No such file"):
        GGUFFile(tmp_path / "missing.gguf")


def test_damaged_files_are_told(tmp_path: Path, byte_level: Any) -> None:
    whole = write(tmp_path / "t.gguf", byte_level_metadata(byte_level)).read_bytes()
    path = tmp_path / "damaged.gguf"
    for content in (b"", b"GGUF", b"ELF" + whole[3:], whole[:4] + b"\x09\0\0\0" + whole[8:]):
        path.write_bytes(content)
        with pytest.raises(ModelLoadError, match="GGUF"):
            GGUFFile(path)
    rng = random.Random(0)
    for _ in range(200):
        path.write_bytes(whole[: rng.randrange(24, len(whole) - 8)])
        with pytest.raises(ModelLoadError, match=r"damaged|cut short"):
            GGUFFile(path)
    for _ in range(300):  # any byte may be wrong: an error or a file, never anything else
        at = rng.randrange(8, 2000)
        path.write_bytes(whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :])
        with contextlib.suppress(ModelLoadError):
            gguf_tokenizer(GGUFFile(path))
