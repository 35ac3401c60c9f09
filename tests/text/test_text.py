"""Text from tokens, at every boundary: characters, special tokens, stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.engine.outputs import OutputStream, TextDelta
from tokenmill.errors import TokenizeFailed
from tokenmill.outputs import FinishReason, GeneratedToken
from tokenmill.params import SamplingParams
from tokenmill.text.detok import Detokenizer
from tokenmill.text.stops import StopStrings
from tokenmill.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer(260)
PIECES = ["a", "b", "ab", " ", "é", "€", "😀", "\ufffd", "END", "EN"]

token_lists = st.one_of(
    st.lists(st.integers(0, 259), max_size=24),
    st.lists(st.sampled_from(PIECES), max_size=12).map(lambda parts: TOKENIZER.encode("".join(parts))),
)


@pytest.mark.req("R31", "G10")
@given(tokens=token_lists, skip_special=st.booleans())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_the_pieces_join_to_the_whole_and_no_character_is_split(tokens: list[int], skip_special: bool) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special=skip_special)
    pieces = [detokenizer.push(token) for token in tokens]
    whole = TOKENIZER.decode(tokens, skip_special=skip_special)
    assert "".join(pieces) + detokenizer.flush() == whole
    shown = ""
    for piece in pieces:
        shown += piece
        assert whole.startswith(shown), "what was shown had to be taken back"


def test_a_character_is_shown_as_soon_as_it_is_complete() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.push(token) for token in "a€b".encode()] == ["a", "", "", "€", "b"]
    assert [detokenizer.push(token) for token in [0xE2, 0x82]] == ["", ""]
    assert detokenizer.is_holding
    assert detokenizer.flush() == "\ufffd"


stop_lists = st.lists(st.text("abE", min_size=1, max_size=4), max_size=3)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Look for the stop strings in the whole text; the first one, the longest of those that begin there."""
    found = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    place, _, stop = min(found)
    return text[: place + len(stop)] if include else text[:place], stop


@pytest.mark.req("G14")
@given(pieces=st.lists(st.text("abE ", max_size=3), max_size=12), stops=stop_lists, include=st.booleans())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_a_stop_string_never_leaks_and_ends_the_text_at_its_first_place(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopStrings(stops, include=include)
    shown = ""
    seen = ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.found is not None:
            break
        assert not any(stop in shown for stop in stops)
    # What comes in one piece may hold a longer stop string that begins at the same place.
    expected, stop = naive(seen, stops, include)
    assert (shown if matcher.found else shown + matcher.flush()) == expected
    assert matcher.found == stop


def play(tokens: list[int], params: SamplingParams, end: FinishReason) -> list[TextDelta]:
    """All deltas of a request whose last token carries `end`; stops early if a stop string is found."""
    stream = OutputStream(TOKENIZER, params, TOKENIZER.eos_ids)
    deltas = []
    for i, token in enumerate(tokens):
        is_last = i == len(tokens) - 1
        deltas.append(stream.push(GeneratedToken("r", token, end if is_last else None)))
        if deltas[-1].keep_tokens is not None:
            return deltas
    if end in (FinishReason.CANCELLED, FinishReason.ERROR):
        deltas.append(stream.push(GeneratedToken("r", None, end)))
    return deltas


@pytest.mark.req("B10", "R30", "G14", "G4")
@given(
    parts=st.lists(st.sampled_from(PIECES), min_size=1, max_size=10),
    stops=st.lists(st.sampled_from(PIECES), max_size=2),
)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_the_stream_is_the_text(parts: list[str], stops: list[str]) -> None:
    text = "".join(parts)
    tokens = TOKENIZER.encode(text)
    params = SamplingParams(stop=tuple(stops))
    deltas = play(tokens, params, FinishReason.LENGTH)
    joined = "".join(delta.text for delta in deltas)
    expected, stop = naive(text, stops, include=False)
    assert deltas[-1].finish_reason is (FinishReason.STOP if stop else FinishReason.LENGTH)
    if stop is None or len(stops) < 2:
        assert joined == expected
        assert deltas[-1].stop_reason == stop
    else:
        assert text.startswith(joined)
        assert not any(one in joined for one in stops)
    keep = deltas[-1].keep_tokens
    if keep is not None:
        assert joined.startswith(TOKENIZER.decode(tokens[:keep]))
        assert len(TOKENIZER.decode(tokens[: keep + 1])) > len(joined) or tokens[keep] >= 0x80


def test_the_stop_token_is_no_text_but_its_reason() -> None:
    deltas = play([*b"hi", ByteTokenizer.EOS], SamplingParams(skip_special_tokens=False), FinishReason.STOP)
    assert "".join(delta.text for delta in deltas) == "hi"
    assert deltas[-1].stop_reason == ByteTokenizer.EOS


def test_an_end_without_a_token_brings_what_was_held() -> None:
    params = SamplingParams(stop="END")
    deltas = play(list(b"so EN"), params, FinishReason.CANCELLED)
    stream = OutputStream(TOKENIZER, params, frozenset())
    shown = [stream.push(GeneratedToken("r", token)).text for token in b"so EN"]
    assert "".join(shown) == "so "
    assert stream.push(GeneratedToken("r", None, FinishReason.CANCELLED)).text == "EN"
    assert deltas


def test_bytes_and_bad_text() -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode("<|256|> é")) == "<|256|> é"
    with pytest.raises(TokenizeFailed, match="surrogates not allowed"):
        ByteTokenizer().encode("a\ud800")
    with pytest.raises(TokenizeFailed, match="outside this vocabulary"):
        ByteTokenizer(64).encode("a")
