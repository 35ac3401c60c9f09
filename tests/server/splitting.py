"""Answers as their parts, whole and cut into smaller ones: for the stages that turn parts into a dialect's words."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tokenmill.outputs import TurnPart

PIECES = st.lists(
    st.one_of(
        st.builds(lambda text: ("content", text), st.text(max_size=6)),
        st.builds(lambda text: ("reasoning", text), st.text(max_size=6)),
        st.builds(lambda value: ("call", json.dumps({"a": value})), st.text(max_size=6)),
    ),
    max_size=6,
)
"""What an answer says: content, reasoning, or the arguments of a call."""


def whole_and_split(pieces: list[tuple[str, str]], data: st.DataObject) -> tuple[list[TurnPart], list[TurnPart]]:
    """The parts of an answer: each text in one part, and each cut anywhere, into empty ones, too."""
    whole, split = [], []
    for number, (kind, text) in enumerate(pieces):
        start = [TurnPart("call", "", number, f"id{number}", "f")] if kind == "call" else []
        said: Any = "arguments" if kind == "call" else kind
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
        texts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole += [*start, TurnPart(said, text, number)]
        split += [*start, *(TurnPart(said, one, number) for one in texts)]
    return whole, split
