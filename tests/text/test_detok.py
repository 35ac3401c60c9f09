"""Three kinds of tokenizers, piece by piece: the pieces join to what the tokenizer shows of the whole."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tokenmill.text.detok import MOST_BROKEN, MOST_UNFINISHED, UNFINISHED, Detokenizer
from tokenmill.text.hf import HuggingFaceTokenizer
from tokenmill.text.tokenizer import ByteTokenizer
from tokenmill.text.tokenizer import Tokenizer as AnyTokenizer

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "a", "b", "▁a", "ab", UNFINISHED, "x" + UNFINISHED, "é"]


def byte_fallback() -> HuggingFaceTokenizer:
    """As Llama 2 has it: what is no piece is written in bytes."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *BYTES, *PIECES])}
    merges = [("a", "b"), ("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return HuggingFaceTokenizer(tokenizer.to_str())


def byte_level() -> HuggingFaceTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat 猫 é là 😀😁 日本語 "] * 40, trainer)
    return HuggingFaceTokenizer(tokenizer.to_str())


BYTE, FALLBACK, LEVEL = ByteTokenizer(260), byte_fallback(), byte_level()
KINDS = {"bytes": BYTE, "byte-fallback": FALLBACK, "byte-level": LEVEL}
TEXTS = ["a", "b", "ab", " ", "\n", "é", "€", "😀", "日本", UNFINISHED]


def byte_ids(kind: str, data: bytes) -> list[int]:
    """A token for each byte."""
    if kind == "bytes":
        return list(data)
    if kind == "byte-fallback":
        return [len(SPECIAL) + byte for byte in data]
    names = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that byte-level BPE names by itself
    others = [byte for byte in range(256) if byte not in names]
    vocabulary = LEVEL._for_users.get_vocab()
    return [vocabulary[chr(byte if byte in names else 256 + others.index(byte))] for byte in data]


def fallback_ids(data: bytes) -> list[int]:
    return byte_ids("byte-fallback", data)


def token_lists(vocab_size: int, first_byte: int) -> st.SearchStrategy[list[int]]:
    """Tokens at random, broken bytes, and special tokens in between."""
    some_bytes = st.sampled_from(b"\x80\x9f\xe2\x82\xac\xf0\xff\xef\xbf\xbd a\n")
    any_token = st.one_of(
        st.integers(0, vocab_size - 1),
        some_bytes.map(lambda byte: first_byte + byte),
        st.sampled_from([0, 1, 2, vocab_size - 1]),
    )
    return st.lists(any_token, max_size=40)


def stream(tokenizer: AnyTokenizer, tokens: Sequence[int], skip_special: bool = True) -> list[str]:
    """One piece for each token, and what the end brings."""
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def without_taking_back(tokens: list[int], skip_special: bool) -> str:
    """A pattern: a broken run of bytes is one U+FFFD a byte, or keeps the whole characters that it begins with."""
    kept = [token for token in tokens if token >= len(SPECIAL) or not skip_special]
    pattern = ""
    for is_bytes, run in itertools.groupby(kept, lambda token: 0 <= token - len(SPECIAL) < 256):
        if not is_bytes:
            pattern += re.escape("".join([*SPECIAL, *BYTES, *PIECES][token] for token in run).replace("▁", " "))
            continue
        data = bytes(token - len(SPECIAL) for token in run)
        length = max(end for end in range(len(data) + 1) if is_utf8(data[:end]))
        whole, broken = data[:length].decode(), len(data) - length
        # Behind a true U+FFFD nobody can tell how many bytes are broken.
        count = "+" if broken and whole.endswith(UNFINISHED) else f"{{{broken}}}"
        as_decoded = f"|{UNFINISHED}{{{len(data)}}}" if broken else ""
        pattern += f"({re.escape(whole)}{UNFINISHED}{count}{as_decoded})"
    return pattern


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.req("R31", "G10")
@pytest.mark.parametrize("kind", KINDS)
@given(parts=st.lists(st.sampled_from(TEXTS), max_size=12))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_text_comes_back_and_each_character_at_once(kind: str, parts: list[str]) -> None:
    text, tokenizer = "".join(parts), KINDS[kind]
    tokens = tokenizer.encode(text)
    pieces = stream(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) == text
    for end in range(len(tokens)):
        seen, so_far = "".join(pieces[: end + 1]), tokenizer.decode(tokens[: end + 1])
        assert text.startswith(seen)
        if UNFINISHED not in so_far:
            assert seen == so_far, "a whole character waits"


@pytest.mark.fault("E07")
@pytest.mark.req("R31", "G10")
@given(tokens=token_lists(260, 0), skip_special=st.booleans())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_bytes_join_to_the_whole(tokens: list[int], skip_special: bool) -> None:
    assert "".join(stream(BYTE, tokens, skip_special)) == BYTE.decode(tokens, skip_special=skip_special)


@pytest.mark.fault("E07")
@pytest.mark.req("R31", "G10")
@given(tokens=token_lists(LEVEL.vocab_size, len(SPECIAL)), skip_special=st.booleans())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_any_byte_level_tokens_join_to_the_whole(tokens: list[int], skip_special: bool) -> None:
    assert "".join(stream(LEVEL, tokens, skip_special)) == LEVEL.decode(tokens, skip_special=skip_special)


@pytest.mark.fault("E07")
@pytest.mark.req("R31", "G10")
@given(tokens=token_lists(FALLBACK.vocab_size, len(SPECIAL)), skip_special=st.booleans())
@example(tokens=fallback_ids("😀😀".encode()), skip_special=True)
@example(tokens=fallback_ids("\n日本語".encode()), skip_special=True)
@example(tokens=fallback_ids(f"é{UNFINISHED}😀".encode()), skip_special=True)
@example(tokens=fallback_ids(b"\xf0\x9f"), skip_special=True)
@example(tokens=fallback_ids(b"\xff" + "😀".encode() * 3), skip_special=True)
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_any_byte_fallback_tokens_join_to_the_whole(tokens: list[int], skip_special: bool) -> None:
    """Equal to `decode`, save that characters which were shown before their run of bytes broke are not taken back."""
    joined = "".join(stream(FALLBACK, tokens, skip_special))
    whole = FALLBACK.decode(tokens, skip_special=skip_special)
    if joined != whole:
        pattern = re.compile(without_taking_back(tokens, skip_special))
        assert pattern.fullmatch(joined) or pattern.fullmatch(" " + joined), "no more than the first space is stripped"


def test_a_broken_run_keeps_what_was_shown_of_it() -> None:
    assert stream(FALLBACK, fallback_ids(b"\n\xf0b")) == ["\n", "", "", f"{UNFINISHED}{UNFINISHED}"]
    a = FALLBACK.encode("a")[-1]
    assert stream(FALLBACK, [*fallback_ids("€".encode() + b"\xe2"), a]) == ["", "", "€", "", f"{UNFINISHED} a", ""]


def test_a_character_is_shown_as_soon_as_it_is_complete() -> None:
    detokenizer = Detokenizer(BYTE)
    assert [detokenizer.push(token) for token in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert [detokenizer.push(token) for token in [0xE2, 0x82]] == ["", ""]
    assert detokenizer.num_open == 2
    assert detokenizer.flush() == UNFINISHED
    assert detokenizer.num_open == 0
    assert stream(FALLBACK, fallback_ids("\né€😀".encode())) == ["\n", "", "é", "", "", "€", "", "", "", "😀", ""]


@pytest.mark.parametrize("run", [b"\x80", b"\xe2", b"\xff", "😀".encode(), b"a"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_never_make_a_character_are_not_held_for_ever(kind: str, run: bytes) -> None:
    tokenizer, tokens = KINDS[kind], byte_ids(kind, b"\xff" + run * 400)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for count, token in enumerate(tokens, start=1):
        shown += detokenizer.push(token)
        assert detokenizer.num_open <= MOST_UNFINISHED
        assert len(detokenizer._held) <= MOST_BROKEN
        if count <= MOST_BROKEN or kind != "byte-fallback":
            assert tokenizer.decode(tokens[:count]).startswith(shown)
            assert len(tokenizer.decode(tokens[:count])) - len(shown) <= MOST_UNFINISHED
    if kind != "byte-fallback":
        assert shown + detokenizer.flush() == tokenizer.decode(tokens)
    end = tokenizer.encode(" b", add_special=False)
    assert "".join(detokenizer.push(token) for token in end).endswith(" b")


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_without_end_cost_no_more_each(kind: str) -> None:
    """Skipped from the beginning, after text, and inside a character."""
    tokenizer = KINDS[kind]
    special = 258 if kind == "bytes" else 2
    many, euro = [special] * 4000, byte_ids(kind, "€".encode())
    tokens = [*many, *tokenizer.encode("a b"), *many, *euro[:1], *many, *euro[1:]]
    begin = time.process_time()
    pieces = stream(tokenizer, tokens)
    assert time.process_time() - begin < 2  # about 0.1 s; with a growing window, minutes
    assert "".join(pieces) == tokenizer.decode(tokens)


def with_decoder(decoder: Any) -> HuggingFaceTokenizer:
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *BYTES, *PIECES, "##b", "b</w>", "."])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoder
    return HuggingFaceTokenizer(tokenizer.to_str())


STRIP_END = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)])
ACROSS_TOKENS = decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")])
LOOKS_AROUND = [decoders.WordPiece(), decoders.BPEDecoder(), decoders.CTC(), STRIP_END, ACROSS_TOKENS, None]


@pytest.mark.req("R31")
@pytest.mark.parametrize("decoder", LOOKS_AROUND)
def test_a_decoder_that_looks_at_other_tokens_is_always_asked(decoder: Any) -> None:
    texts = with_decoder(decoder).inner_texts()
    assert not any(texts[token] for token in range(len(SPECIAL) + len(BYTES) + len(PIECES)))


@pytest.mark.req("R31")
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_of_a_stream_is_decoded_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are detokenized on the event loop, tens of thousands of tokens a second: a known token is a lookup."""
    tokenizer = KINDS[kind]
    tokens = tokenizer.encode("a a aa a\n", add_special=False) * 3
    expected = stream(tokenizer, tokens)
    monkeypatch.setattr(type(tokenizer), "decode", lambda *_, **__: pytest.fail("it was decoded again"))
    detokenizer = Detokenizer(tokenizer)
    detokenizer._context, detokenizer._before = tokens[:1], None  # the first token of a text is always decoded
    assert [detokenizer.push(token) for token in tokens[1:]] == expected[1:-1]


@pytest.mark.req("R31")
@pytest.mark.parametrize("skip_special", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_token_is_the_same_after_any_other(kind: str, skip_special: bool) -> None:
    tokenizer = KINDS[kind]
    texts = tokenizer.inner_texts(skip_special=skip_special)
    vocabulary = range(tokenizer.vocab_size)
    before = [token for token in vocabulary if texts[token]]
    assert len(before) > 100 if kind != "byte-fallback" else before
    for first in before[::7]:
        shown = tokenizer.decode([first], skip_special=skip_special)
        for token in before:
            assert tokenizer.decode([first, token], skip_special=skip_special) == shown + texts[token]
