"""`Detokenizer`: tokens in, text out, never half a character.

A token may hold part of a character, and what a token says may depend on those before it. So a short window of tokens
is decoded twice, without and with the new ones; the difference is new text. Where it ends in U+FFFD the last bytes may
still become a character, and are held back.
"""

from __future__ import annotations

from tokenmill.text.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
MOST_UNFINISHED = 3
"""A character has at most four bytes, so at most three of them can be waiting for the rest."""


class Detokenizer:
    """The text of one growing list of tokens."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context: list[int] = []
        """Tokens whose text has been given out, as far as the next ones may depend on them."""
        self._held: list[int] = []
        self._num_given = 0
        """Characters of the held tokens' text that have been given out."""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while it is part of a character."""
        self._held.append(token)
        text = self._text()
        if text.endswith(UNFINISHED):
            given = max(self._num_given, len(text) - MOST_UNFINISHED)
            new, self._num_given = text[self._num_given : given], given
            return new
        new = text[self._num_given :]
        if new:
            self._context, self._held, self._num_given = self._held, [], 0
        return new

    def flush(self) -> str:
        """What is still held, as the tokenizer shows it at the end of a text."""
        new = self._text()[self._num_given :] if self._held else ""
        self._context, self._held, self._num_given = self._held, [], 0
        return new

    @property
    def is_holding(self) -> bool:
        """Are there tokens whose text is not complete?"""
        return bool(self._held)

    def _text(self) -> str:
        """The text of the held tokens, in the light of those before them."""
        before = self._decode(self._context)
        return self._decode([*self._context, *self._held])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special) if ids else ""
