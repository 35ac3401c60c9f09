"""`Tokenizer`: what the engine's callers need of one, and the simplest: a token a byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tokenmill.errors import TokenizeFailed, TooManyTokens

Places = list[tuple[int, int]]
"""Parts of a text: where each begins and ends, in order."""


class Tokenizer(Protocol):
    """Text to ids and back. Safe to use from several threads."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a generation."""
        ...

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Text of each special token -> its id."""
        ...

    def min_num_tokens(self, text: str) -> int:
        """A lower bound on the number of ids of a text, without tokenizing it; 0 if nothing is known."""
        ...

    def encode(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:
        """Ids of the text. Special tokens that a user has typed stay text; `add_special` adds BOS and the like.

        `TooManyTokens` if the text has more than `limit` of them, as soon as that is known.
        """
        ...

    def encode_template(self, text: str, special: Places | None = None, *, limit: int | None = None) -> list[int]:
        """Ids of what a chat template wrote: nothing is added, and special tokens in it are meant.

        With `special`, only those at these places are, and all others stay text. `limit` as in `encode`.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids; what is no valid UTF-8 becomes U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for inside a text; part of a character, it may be. Empty if there is no such token."""
        ...


def to_utf8(text: str) -> bytes:
    """The text's bytes; `TokenizeFailed` if it has lone surrogates."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizeFailed(f"the text is not valid Unicode: {error.reason} at {error.start}") from None


class ByteTokenizer:
    """Token i is byte i; 256 ends a generation. For the fake model and for tests."""

    EOS = 256

    def __init__(self, vocab_size: int = 257) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({self.EOS}) if self._vocab_size > self.EOS else frozenset()

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return {}

    def min_num_tokens(self, text: str) -> int:
        return len(to_utf8(text))

    def encode(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:  # noqa: ARG002
        if limit is not None and (least := self.min_num_tokens(text)) > limit:
            raise TooManyTokens(least, limit)
        ids = list(to_utf8(text))
        outside = next((i for i in ids if i >= self._vocab_size), None)
        if outside is not None:
            raise TokenizeFailed(f"byte {outside} is outside this vocabulary of {self._vocab_size}")
        return ids

    def encode_template(self, text: str, special: Places | None = None, *, limit: int | None = None) -> list[int]:  # noqa: ARG002 (it has none)
        return self.encode(text, limit=limit)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        pieces, run = [], bytearray()
        for token in ids:
            if token < 256:
                run.append(token)
                continue
            pieces.append(run.decode("utf-8", errors="replace"))
            run.clear()
            if not skip_special:
                pieces.append(f"<|{token}|>")
        pieces.append(run.decode("utf-8", errors="replace"))
        return "".join(pieces)

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<|{token}|>".encode()
