"""`LlamaTokenizer`: llama.cpp's own tokenizer behind our protocol, for GGUF files whose kind is not known here.

How llama.cpp cuts such a text is not known either, so texts stay whole. The interpreter lock is released meanwhile.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

from tokenmill.errors import TokenizeFailed, TooManyTokens
from tokenmill.text.pieces import LengthBound
from tokenmill.text.tokenizer import InnerTexts, Places, to_utf8

RUN_CHARS = 8192
"""Of a text that llama.cpp cuts by expressions, no aligned window of this size may have characters of one class only.

It matches most of those expressions by recursion: a run of some 20,000 letters or spaces overflows the stack, which
ends the process.
"""
CLASSES = {"M": "L", "S": "P"}
"""First letters of Unicode categories that expressions match together with another one."""


class Vocab(Protocol):
    """What a model opened by llama.cpp knows of its tokens."""

    @property
    def size(self) -> int: ...

    @property
    def end_ids(self) -> frozenset[int]: ...

    @property
    def special(self) -> Mapping[str, int]: ...

    @property
    def uses_expressions(self) -> bool:
        """Does llama.cpp cut texts by regular expressions first?"""
        ...

    @property
    def keeps_text(self) -> bool:
        """Is every byte of a text in one of its tokens, unless the vocabulary lacks the byte?"""
        ...

    def tokenize(self, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]: ...
    def detokenize(self, ids: list[int], *, skip_special: bool) -> bytes: ...
    def piece(self, token: int) -> bytes: ...


class LlamaTokenizer:
    """Safe to use from several threads, as long as the model is open."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._inner_texts = InnerTexts(self.decode, None)

    @cached_property
    def _bound(self) -> LengthBound | None:
        if not self._vocab.keeps_text:
            return None
        pieces = [self._vocab.piece(token) for token in range(self._vocab.size)]
        known = {piece for piece in pieces if len(piece) == 1}
        missing = bytes(byte for byte in range(256) if bytes([byte]) not in known)
        return LengthBound(max(map(len, pieces), default=1), missing)

    @property
    def vocab_size(self) -> int:
        return self._vocab.size

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._vocab.end_ids

    @property
    def special_tokens(self) -> Mapping[str, int]:
        return self._vocab.special

    def min_num_tokens(self, text: str) -> int:
        return 0 if self._bound is None else self._bound.min_num_tokens(to_utf8(text))

    def encode(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:
        return self._tokenize(text, limit, add_special=add_special)

    def encode_template(self, text: str, special: Places | None = None, *, limit: int | None = None) -> list[int]:
        if special is None:
            return self._tokenize(text, limit, parse_special=True)
        self._check_length(text, limit)
        ids, at = [], 0
        for start, end in [*special, (len(text), len(text))]:
            ids += self._tokenize(text[at:start]) if start > at else []
            ids += [self._vocab.special[text[start:end]]] if end > start else []
            if limit is not None and len(ids) > limit:
                raise TooManyTokens(len(ids), limit)
            at = end
        return ids

    def _tokenize(
        self, text: str, limit: int | None = None, *, add_special: bool = False, parse_special: bool = False
    ) -> list[int]:
        self._check_length(text, limit)
        if self._vocab.uses_expressions:
            _check_runs(text)
        ids = self._vocab.tokenize(to_utf8(text), add_special=add_special, parse_special=parse_special)
        if limit is not None and len(ids) > limit:
            raise TooManyTokens(len(ids), limit)
        return ids

    def _check_length(self, text: str, limit: int | None) -> None:
        # Short texts need no bound: it takes a look at the whole vocabulary.
        if limit is not None and 4 * len(text) > limit and (least := self.min_num_tokens(text)) > limit:
            raise TooManyTokens(least, limit)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        known = [token for token in ids if 0 <= token < self._vocab.size]
        return self._vocab.detokenize(known, skip_special=skip_special).decode("utf-8", errors="replace")

    def inner_texts(self, *, skip_special: bool = True) -> Mapping[int, str]:  # noqa: ARG002
        return self._inner_texts  # what its decoder does with a space is not known

    def token_bytes(self, token: int) -> bytes:
        return self._vocab.piece(token)


def _check_runs(text: str) -> None:
    """Raise `TokenizeFailed` if there is a run of characters that is too long for llama.cpp's expressions."""
    for start in range(0, len(text) - RUN_CHARS + 1, RUN_CHARS):
        window = text[start : start + RUN_CHARS]
        if len(window.split(None, 1)) < 2 and len({_class_of(character) for character in set(window)}) == 1:
            what = f"a run of {RUN_CHARS} or more characters of one kind, near character {start}"
            raise TokenizeFailed(
                f"the text contains {what}: the tokenizer of this model cannot process it; insert spaces"
            )


def _class_of(character: str) -> str:
    """A letter, a digit, a space, or anything else."""
    first = "Z" if character.isspace() else unicodedata.category(character)[0]
    return CLASSES.get(first, first)
