"""Text from tokens, at every boundary: characters, special tokens, stop strings."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenmill.errors import TokenizeFailed
from tokenmill.outputs import End, FinishReason, OutputDelta
from tokenmill.params import SamplingParams
from tokenmill.pipeline.output import TextStage
from tokenmill.text.detok import StopStrings
from tokenmill.text.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer(260)
PIECES = ["a", "b", "ab", " ", "é", "€", "😀", "\ufffd", "END", "EN"]

stop_lists = st.lists(st.text("abE", min_size=1, max_size=4), max_size=3)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the first stop string that is complete, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@pytest.mark.fault("E09")
@pytest.mark.req("G14")
@given(pieces=st.lists(st.text("abE ", max_size=3), max_size=12), stops=stop_lists, include=st.booleans())
@settings(max_examples=500, deadline=None, derandomize=True)
def test_a_stop_string_never_leaks_and_ends_the_text_where_it_is_complete(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopStrings(stops, include=include)
    shown = ""
    for piece in pieces:
        passes = matcher.passes(piece)
        new = matcher.push(piece)
        assert new == piece or not passes
        shown += new
        if not include:
            assert not any(stop in shown for stop in stops)
    shown += matcher.flush()
    assert (shown, matcher.found) == naive("".join(pieces), stops, include)


@pytest.mark.fault("E09")
@pytest.mark.req("G14")
@given(
    text=st.text("abcX", max_size=7), stops=st.lists(st.text("abcX", min_size=1, max_size=4), min_size=1, max_size=3)
)
@example(text="abcX", stops=["abcX", "bc"])
@example(text="abc", stops=["ab", "abc"])
@settings(max_examples=100, deadline=None, derandomize=True)
def test_how_the_text_is_cut_makes_no_difference(text: str, stops: list[str]) -> None:
    """Every way to cut the text into pieces."""
    for include in (False, True):
        expected = naive(text, stops, include)
        for cuts in itertools.product((False, True), repeat=max(0, len(text) - 1)):
            matcher = StopStrings(stops, include=include)
            places = [0, *(i + 1 for i, is_cut in enumerate(cuts) if is_cut), len(text)]
            shown = "".join(matcher.push(text[begin:end]) for begin, end in itertools.pairwise(places))
            assert (shown + matcher.flush(), matcher.found) == expected


def play(tokens: list[int], params: SamplingParams, end: FinishReason) -> list[OutputDelta]:
    """All deltas of a request whose last token carries `end`; stops early if a stop string is found."""
    stage = TextStage(TOKENIZER, params, TOKENIZER.eos_ids)
    deltas: list[OutputDelta] = []
    for i, token in enumerate(tokens):
        is_last = i == len(tokens) - 1
        delta = stage.push(token, End(end) if is_last else None)
        deltas += [delta] if delta is not None else []
        if stage.has_ended:
            return deltas
    raise AssertionError("it has not ended")


def assert_continuous(deltas: list[OutputDelta]) -> None:
    """Tokens follow each other, and each delta but the last has the text of its own."""
    num_tokens = 0
    for delta in deltas:
        assert delta.offset == num_tokens
        num_tokens += len(delta.token_ids)


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
    assert_continuous(deltas)
    joined = "".join(delta.text for delta in deltas)
    expected, stop = naive(text, stops, include=False)
    assert deltas[-1].finish_reason == ("stop" if stop else "length")
    assert joined == expected
    assert deltas[-1].stop_reason == stop
    keep = deltas[-1].offset + len(deltas[-1].token_ids)
    assert [token for delta in deltas for token in delta.token_ids] == tokens[:keep]
    if stop is None:
        assert keep == len(tokens)
    else:
        assert joined.startswith(TOKENIZER.decode(tokens[:keep]))
        assert len(TOKENIZER.decode(tokens[: keep + 1])) > len(joined) or tokens[keep] >= 0x80


def test_the_stop_token_is_no_text_but_its_reason() -> None:
    deltas = play([*b"hi", ByteTokenizer.EOS], SamplingParams(skip_special_tokens=False), FinishReason.STOP)
    assert "".join(delta.text for delta in deltas) == "hi"
    assert deltas[-1].stop_reason == ByteTokenizer.EOS


def test_an_end_without_a_token_brings_what_was_held() -> None:
    params = SamplingParams(stop="END")
    stage = TextStage(TOKENIZER, params, frozenset())
    shown = [delta for token in b"so EN" if (delta := stage.push(token, None)) is not None]
    assert "".join(delta.text for delta in shown) == "so "
    last = stage.push(None, End(FinishReason.CANCELLED, "why"))
    assert last is not None
    assert (last.text, last.token_ids, last.offset) == ("EN", list(b"EN"), 3)
    assert (last.finish_reason, last.error) == ("cancelled", "why")


@pytest.mark.req("R30", "G4")
@pytest.mark.parametrize("end", list(FinishReason))
def test_a_stop_string_that_only_the_end_completes_is_cut_off_too(end: FinishReason) -> None:
    """A broken character is shown at the end; what stands behind the stop string that it completes goes."""
    tokens = [*b"so E", 0xE2]
    stage = TextStage(TOKENIZER, SamplingParams(stop=("E\ufffd",)), TOKENIZER.eos_ids)
    deltas = [delta for token in tokens if (delta := stage.push(token, None)) is not None]
    assert not any(delta.finish_reason for delta in deltas)
    last_token = ByteTokenizer.EOS if end is FinishReason.STOP else None
    last = stage.push(last_token, End(end))
    assert last is not None
    assert "".join(delta.text for delta in [*deltas, last]) == "so "
    assert (last.finish_reason, last.stop_reason) == ("stop", "E\ufffd")
    assert stage.num_settled == last.offset + len(last.token_ids) == len(b"so ")


@pytest.mark.req("R30", "G4")
def test_in_a_row_of_broken_bytes_the_tokens_before_the_stop_string_are_kept() -> None:
    stage = TextStage(TOKENIZER, SamplingParams(stop=("\ufffd\ufffda",)), TOKENIZER.eos_ids)
    tokens = [*b"so ", *[0x80] * 20, *b"a"]
    deltas = [delta for token in tokens if (delta := stage.push(token, None)) is not None]
    assert "".join(delta.text for delta in deltas) == "so " + "\ufffd" * 18
    assert 3 + 16 <= stage.num_settled <= 3 + 18


def test_bytes_and_bad_text() -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode("<|256|> é")) == "<|256|> é"
    with pytest.raises(TokenizeFailed, match="surrogates not allowed"):
        ByteTokenizer().encode("a\ud800")
    with pytest.raises(TokenizeFailed, match="outside this vocabulary"):
        ByteTokenizer(64).encode("a")
