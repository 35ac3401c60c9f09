"""`Tokenizer`: what the engine's callers need of one, and the simplest: a token a byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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

    def inner_texts(self, *, skip_special: bool = True) -> Mapping[int, str]:
        """For any token, the text that it adds after other text, whatever that is; empty unless that is known.

        Whole characters only: bytes of a character depend on the tokens around them.
        """
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for inside a text; part of a character, it may be. Empty if there is no such token."""
        ...


class InnerTexts(dict[int, str]):
    """`Tokenizer.inner_texts`, each decoded when it is first asked for: a token of a stream costs a lookup then."""

    def __init__(self, decode: Callable[[list[int]], str], example: int | None) -> None:
        """`example`: any token that is text. None: the text of a token depends on those before it."""
        super().__init__()
        self._decode = decode
        self._before = [] if example is None or not decode([example]) else [example]

    def __missing__(self, token: int) -> str:
        text = ""
        # Decoders strip a first space. A token that has no text by itself would be no context for the next one.
        if self._before and self._decode([token]):
            before = self._decode(self._before)
            text = self._decode([*self._before, token]).removeprefix(before)
        self[token] = found = "" if "\ufffd" in text else text
        return found


def to_utf8(text: str) -> bytes:
    """The text's bytes; `TokenizeFailed` if it has lone surrogates."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizeFailed(f"the text is not valid Unicode: {error.reason} at {error.start}") from None


def check_text(text: str) -> str:
    """The text itself; `TokenizeFailed` if it has lone surrogates."""
    to_utf8(text)
    return text


class ByteTokenizer:
    """Token i is byte i; 256 ends a generation. For the fake model and for tests."""

    EOS = 256

    def __init__(self, vocab_size: int = 257) -> None:
        self._vocab_size = vocab_size
        self._inner_texts = [InnerTexts(partial(self.decode, skip_special=skips), 0) for skips in (False, True)]

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
        return self.encode_template(text, limit=limit)

    def encode_template(self, text: str, special: Places | None = None, *, limit: int | None = None) -> list[int]:  # noqa: ARG002 (it has none)
        ids = list(to_utf8(text))
        if limit is not None and len(ids) > limit:
            raise TooManyTokens(len(ids), limit)
        outside = next((i for i in ids if i >= self._vocab_size), None)
        if outside is not None:
            raise TokenizeFailed(f"byte {outside} is outside this vocabulary of {self._vocab_size}")
        return ids

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

    def inner_texts(self, *, skip_special: bool = True) -> Mapping[int, str]:
        return self._inner_texts[skip_special]

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<|{token}|>".encode()
