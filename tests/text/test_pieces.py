"""Long texts tokenized in pieces, against `tokenizers` on the whole; and the lower bound on how many ids there are."""

from __future__ import annotations

import random
import threading
import time
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.text.test_gguf import BYTE, CONTROL, NORMAL, byte_level_metadata, write
from tokenmill.backends.gguf_file import GGUFFile
from tokenmill.backends.library import fetch_alias
from tokenmill.config import DEFAULT_MODEL
from tokenmill.errors import ContextOverflow, TokenizeFailed, TooManyTokens
from tokenmill.text import hf, pieces
from tokenmill.text.gguf import PRE_TOKENIZERS, gguf_tokenizer
from tokenmill.text.hf import HuggingFaceTokenizer
from tokenmill.text.pieces import LLAMA3, NFC_SHRINKS, O200K
from tokenmill.text.template import ChatTemplate

SMALL = 6
"""Characters of a piece, in these tests."""
CORPUS = ["the cat sat on the mat, don't you see 1984 of them? naïve 日本 привет  x\n\t--- ######## "] * 40
WORDS = ["the", "cat", "The", "HELLO", "don't", "I'll", "1984", "3.14", "naïve", "日本", "한국어", "привет", "مرحبا",
         "😀", "e\u0301", "\u212a", "\u1112\u1161\u11ab", "\u03b1\u0313\u0301\u0345", "\ufe70", "½", "²", "_", "▁",
         ".", "...", "'s", "-----", "########", "\u00a0", "\u180e", "\x1c", "\x04", "\n", "\t", "\r\n", " \n",
         "<|end|>", "<|im_end|>", "</s>", "a b"]  # fmt: skip
SPACES = ["", " ", " ", "  "]
spaced_words = st.sampled_from([word + space for word in WORDS for space in SPACES])
texts = st.lists(spaced_words, min_size=8, max_size=30).map("".join)


def trained(pre_tokenizer: Any, normalizer: Any = None, *, model: str = "BPE", special: Any = ("<|end|>",)) -> str:
    """A byte-level BPE, or another model, as the JSON of a file."""
    kinds: dict[str, tuple[Any, Any]] = {
        "BPE": (models.BPE(), trainers.BpeTrainer),
        "Unigram": (models.Unigram(), trainers.UnigramTrainer),
        "WordPiece": (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer),
    }
    empty, trainer = kinds[model]
    tokenizer = Tokenizer(empty)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    options: dict[str, Any] = {"unk_token": "[UNK]"} if model == "Unigram" else {}
    options |= {"special_tokens": [*special, "[UNK]"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    tokenizer.train_from_iterator(CORPUS, trainer(vocab_size=500, show_progress=False, **options))
    return str(tokenizer.to_str())


def with_bytes(*splits: Any) -> Any:
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def split(expression: str, behavior: str = "isolated") -> Any:
    return pre_tokenizers.Split(Regex(expression), behavior)


def with_post_processor(source: str) -> str:
    tokenizer = Tokenizer.from_str(source)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A [UNK]", special_tokens=[("<|end|>", 0), ("[UNK]", 1)]
    )
    return str(tokenizer.to_str())


def with_added(source: str, *tokens: AddedToken) -> str:
    tokenizer = Tokenizer.from_str(source)
    tokenizer.add_tokens(list(tokens))
    return str(tokenizer.to_str())


def with_truncation(source: str) -> str:
    tokenizer = Tokenizer.from_str(source)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    return str(tokenizer.to_str())


def sentencepiece(tmp_path: Path, *more: str, prefix: bool = True) -> HuggingFaceTokenizer:
    """As GGUF files of Llama 2 have it, with these tokens as well."""
    words = ["▁", "▁t", "he", "▁the", "▁▁", "▁▁▁", "ca", "t", "▁cat", "19", "84", *"abcdehnostHELO.'-#1984", *more]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)],
        "tokenizer.ggml.scores": [-float(place) for place in range(len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    return gguf_tokenizer(GGUFFile(write(tmp_path / "s.gguf", metadata)))


def byte_level_gguf(tmp_path: Path, cut: str) -> HuggingFaceTokenizer:
    source = Tokenizer.from_str(
        trained(pre_tokenizers.ByteLevel(add_prefix_space=False), special=["a", "b", "<|end|>"])
    )
    metadata = {**byte_level_metadata(source), "tokenizer.ggml.pre": cut}
    return gguf_tokenizer(GGUFFile(write(tmp_path / "b.gguf", metadata)))


@cache
def default_tokenizer() -> HuggingFaceTokenizer:
    return gguf_tokenizer(GGUFFile(fetch_alias(DEFAULT_MODEL)))


def wrapped(source: str) -> Callable[[Path], HuggingFaceTokenizer]:
    return lambda _: HuggingFaceTokenizer(source)


BYTES = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
FOR_GGUF = trained(pre_tokenizers.ByteLevel(add_prefix_space=False), special=["<|a|>", "<|b|>", "<|end|>"])
DISTINCT = {pre: name for name, pre in PRE_TOKENIZERS.items()}.values()
"""One name of each pre-tokenizer."""
CUTTABLE: dict[str, Callable[[Path], HuggingFaceTokenizer]] = {
    DEFAULT_MODEL: lambda _: default_tokenizer(),
    **{f"gguf {name}": lambda path, name=name: byte_level_gguf(path, name) for name in DISTINCT},
    "gguf llama": sentencepiece,
    "gguf llama, no prefix": lambda path: sentencepiece(path, prefix=False),
    "bytes": wrapped(BYTES),
    "bytes, prefix": wrapped(trained(pre_tokenizers.ByteLevel(add_prefix_space=True))),
    "bytes, BOS and EOS": wrapped(with_post_processor(BYTES)),
    "bytes, truncated": wrapped(with_truncation(BYTES)),
    "bytes, added tokens": wrapped(
        with_added(
            BYTES,
            AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("  ", normalized=False),
            AddedToken("cat", single_word=True),
        )
    ),
    "digits and bytes": wrapped(
        trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]))
    ),
    "llama3, NFC": wrapped(trained(with_bytes(split(LLAMA3)), normalizers.NFC())),
    "o200k": wrapped(trained(with_bytes(split(O200K)))),
    "metaspace": wrapped(trained(pre_tokenizers.Metaspace())),
    "metaspace, first": wrapped(trained(pre_tokenizers.Metaspace(prepend_scheme="first"))),
    "metaspace, never, NFKC": wrapped(trained(pre_tokenizers.Metaspace(prepend_scheme="never"), normalizers.NFKC())),
    "unigram": wrapped(
        trained(
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]), model="Unigram"
        )
    ),
    "words": wrapped(trained(pre_tokenizers.Whitespace(), model="WordPiece")),
    "punctuation and bytes": wrapped(
        trained(pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(False)]))
    ),
}
WHOLE: dict[str, Callable[[Path], HuggingFaceTokenizer]] = {
    "an unknown expression": wrapped(trained(with_bytes(split(r"\s?\w+ \w+|\s+|[^\s\w]+")))),
    "one word": wrapped(trained(with_bytes())),
    "merged with the next": wrapped(trained(with_bytes(split(LLAMA3, "merged_with_next")))),
    "stripped": wrapped(trained(pre_tokenizers.ByteLevel(False), normalizers.Strip())),
    "collapsed": wrapped(trained(pre_tokenizers.ByteLevel(False), normalizers.Replace(Regex(" +"), " "))),
    "bytes first": wrapped(
        trained(pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(False, use_regex=False), split(LLAMA3)]))
    ),
    "a token of two words": wrapped(with_added(BYTES, AddedToken("the cat", normalized=False))),
    "a token that takes spaces": wrapped(with_added(BYTES, AddedToken("cat", rstrip=True, normalized=False))),
    "a token for a space": wrapped(with_added(BYTES, AddedToken(" ", normalized=False))),
    "gguf llama, a token of two words": lambda path: sentencepiece(path, "t▁", "t▁c", "cat▁t"),
    "unsplit metaspace": wrapped(trained(pre_tokenizers.Metaspace(split=False))),
    "bert": wrapped(trained(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(), model="WordPiece")),
}

WOULD_BE_SAFE = {"merged with the next", "collapsed", "a token for a space", "bert"}
"""Nothing is known of these, though cuts would do no harm."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", SMALL)
    monkeypatch.setattr(pieces, "SEARCH_CHARS", 4)


def check_ids(ours: HuggingFaceTokenizer, text: str) -> None:
    """Those of `tokenizers` on the whole text, in every way to encode it."""
    users, templates = ours._for_users, ours._for_templates
    assert ours.encode(text) == users.encode(text).ids
    assert ours.encode(text, add_special=False) == users.encode(text, add_special_tokens=False).ids
    assert ours.encode_template(text) == templates.encode(text, add_special_tokens=False).ids
    assert ours.min_num_tokens(text) <= len(ours.encode(text, add_special=False))


@pytest.mark.parametrize("name", [*CUTTABLE, *WHOLE])
def test_21_1_ids_of_the_pieces_are_ids_of_the_whole(name: str, tmp_path: Path) -> None:
    ours = {**CUTTABLE, **WHOLE}[name](tmp_path)
    assert (ours._cuts is None) == (name in WHOLE)
    num_cuts = 0

    @given(text=texts)
    @settings(max_examples=50, deadline=None, derandomize=True)
    def check(text: str) -> None:
        nonlocal num_cuts
        num_cuts += 0 if ours._cuts is None else len(list(ours._cuts.pieces(text))) - 1
        check_ids(ours, text)

    check()
    assert (num_cuts > 40) == (name in CUTTABLE)
    check_ids(ours, " ".join(["the cat"] * 50))


@pytest.mark.parametrize("name", sorted(WHOLE.keys() - WOULD_BE_SAFE))
def test_21_1_whole_texts_would_differ_in_pieces(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These tokenizers get their texts whole for a reason."""
    ours = WHOLE[name](tmp_path)
    monkeypatch.setattr(ours, "_cuts", pieces.Cuts(drops_space="gguf" in name))
    rng = random.Random(0)
    samples = ["".join(rng.choice(WORDS) + rng.choice(SPACES) for _ in range(20)) for _ in range(100)]
    samples.append("satin the cat")
    assert any(ours.encode(text) != ours._for_users.encode(text).ids for text in samples)


def test_21_1_a_text_without_a_place_to_cut_stays_whole(tmp_path: Path) -> None:
    ours = CUTTABLE[DEFAULT_MODEL](tmp_path)
    assert ours._cuts is not None
    for text in ("a" * 1000, " " * 1000, "a  " * 300, "日本" * 300, "a\nb" * 300, ". , " * 300):
        assert list(ours._cuts.pieces(text)) == [text]
        check_ids(ours, text)


def test_21_1_stand_ins_for_special_tokens_are_not_cut(tmp_path: Path) -> None:
    ours = CUTTABLE[DEFAULT_MODEL](tmp_path)
    text = "".join(f"<|im_start|>user\nthe cat sat on the mat <|im_start|> of {i}<|im_end|>\n" for i in range(50))
    ids = ours.encode_template(text)
    places = [(at, at + 12) for at in range(len(text)) if text.startswith("<|im_start|>user", at)]
    start = ours.special_tokens["<|im_start|>"]
    assert ids.count(start) == 100
    assert ours.encode_template(text, places).count(start) == 50


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CUTTABLE)
def test_21_1_a_limit_is_exact(name: str, tmp_path: Path) -> None:
    ours = CUTTABLE[name](tmp_path)
    text = "the cat sat on 1984 mats " * 9
    for encode in (ours.encode_template, lambda text, **options: ours.encode(text, add_special=False, **options)):
        ids = encode(text)
        assert encode(text, limit=len(ids)) == ids
        with pytest.raises(TooManyTokens) as caught:
            encode(text, limit=len(ids) - 1)
        assert caught.value.at_least == len(ids)
        with pytest.raises(TooManyTokens) as caught:
            encode(text, limit=3)
        assert 3 < caught.value.at_least < len(ids)


def test_21_1_tokenizing_stops_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = CUTTABLE[DEFAULT_MODEL](tmp_path)
    seen: list[str] = []

    def count(tokenizer: Any, text: str) -> list[int]:
        seen.append(text)
        return list(tokenizer.encode(text).ids)

    monkeypatch.setattr(hf, "_ids_of", count)
    with pytest.raises(TooManyTokens):
        ours.encode("the cat " * 1000, limit=1000)
    assert 1000 < sum(len(ours._for_users.encode(one).ids) for one in seen) < 1010
    seen.clear()
    text = "\n" + 80 * " " + "x"  # one long token after the other: as few as there can be
    with pytest.raises(TooManyTokens) as caught:
        ours.encode(text * 1000, limit=100)
    assert caught.value.at_least == -(-82_000 // 81)
    assert not seen  # by the length alone


def test_21_1_the_bound_leaves_out_bytes_that_become_no_token(tmp_path: Path) -> None:
    """The default model's vocabulary has no control characters like this one: a megabyte of them is no token at all."""
    ours = CUTTABLE[DEFAULT_MODEL](tmp_path)
    assert ours.encode("\x04" * 100_000) == []
    assert ours.min_num_tokens("\x04" * 100_000) == 0
    assert ours.encode("\x04" * 100_000, limit=0) == []
    longest = max(ours._for_users.get_vocab(), key=len)
    text = ours.decode([ours._for_users.token_to_id(longest)])
    assert ours.min_num_tokens(text * 50) == 50  # the best bound there is


def test_21_1_what_has_no_bound_is_not_refused_by_its_length(tmp_path: Path) -> None:
    unknown = HuggingFaceTokenizer(trained(pre_tokenizers.Whitespace(), model="WordPiece"))
    assert len(unknown.encode("☃" * 50)) == 1
    assert unknown.min_num_tokens("☃" * 50) == 0
    assert HuggingFaceTokenizer(BYTES).min_num_tokens("☃" * 50) > 0
    swallows = HuggingFaceTokenizer(with_added(BYTES, AddedToken("<mask>", lstrip=True, normalized=False)))
    assert len(swallows.encode(" " * 5000 + "<mask>", limit=1)) == 1
    drops = HuggingFaceTokenizer(trained(with_bytes(pre_tokenizers.WhitespaceSplit())))
    assert drops.encode(" " * 5000, limit=0) == []


def test_21_1_a_vocabulary_without_added_tokens_or_any() -> None:
    few = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    for tokenizer in (few, Tokenizer(models.BPE())):
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        ours = HuggingFaceTokenizer(str(tokenizer.to_str()))
        check_ids(ours, "ab abc " * 50)
        assert ours.min_num_tokens("ab" * 50) == (50 if tokenizer is few else 0)


LAST_DECOMPOSED = 0x30000
"""No character from here on has another spelling."""


def test_21_1_nfc_shrinks_no_more_than_the_bound_says() -> None:
    """Every character, however it may be spelt by others: the longest spelling against what NFC makes of it."""
    spelt: dict[str, int] = {}
    characters = [chr(code) for code in chain(range(0xD800), range(0xE000, LAST_DECOMPOSED))]
    for character in characters:
        single = unicodedata.normalize("NFD", character)
        if len(single) == 1:
            spelt[single] = max(spelt.get(single, 0), len(character.encode()))
    for character in characters:
        longest = sum(spelt[part] for part in unicodedata.normalize("NFD", character))
        assert longest <= NFC_SHRINKS * len(unicodedata.normalize("NFC", character).encode()), hex(ord(character))


def test_21_1_a_chat_is_refused_by_its_length_before_it_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = HuggingFaceTokenizer(BYTES)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}<|end|>{% endfor %}", tokenizer)
    messages = [{"role": "user", "content": "the cat sat"}] * 3
    ids = template.encode(messages)
    assert template.encode(messages, len(ids)) == ids
    with pytest.raises(TooManyTokens):
        template.encode(messages, len(ids) - 1)
    monkeypatch.setattr(template, "_rendered_guarded", None)
    with pytest.raises(TooManyTokens) as caught:
        template.encode([{"role": "user", "content": "#" * 10_000}], 100)
    assert caught.value.at_least > 500
    assert not isinstance(caught.value, ContextOverflow)


# -- other threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["english", "one run of letters", "lots of spaces"])
def test_21_1_other_threads_run_while_a_text_is_tokenized(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter lock is not held: a thread that wants it a thousand times a second gets it all the time."""
    monkeypatch.setattr(pieces, "PIECE_CHARS", 1 << 15)
    monkeypatch.setattr(pieces, "SEARCH_CHARS", 1 << 16)
    ours = CUTTABLE[DEFAULT_MODEL](tmp_path)
    text = {"english": "The quick brown fox. ", "one run of letters": "a", "lots of spaces": "x" + 50 * " "}[kind]
    text = (text * 600_000)[:600_000]
    tokenizing = threading.Thread(target=ours.encode, args=(text,))
    num_turns = 0
    tokenizing.start()
    while tokenizing.is_alive():
        time.sleep(0.001)
        num_turns += 1
    assert num_turns > 20  # `tokenizers.encode` lets it have two


def test_21_1_a_panic_of_the_package_is_a_refused_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    class Panics:
        def encode_batch_fast(self, *_: Any, **__: Any) -> Any:
            raise PanicException("retry-limit-in-match over")

    with pytest.raises(TokenizeFailed, match="retry-limit-in-match over"):
        hf._ids_of(Panics(), "text")


def test_the_byte_alphabet_is_that_of_the_package() -> None:
    assert set(pieces.BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())
    spelt = [(decoders.ByteLevel().decode([character]), byte) for character, byte in pieces.BYTE_OF.items()]
    assert all(text == chr(byte) for text, byte in spelt if byte < 128)
