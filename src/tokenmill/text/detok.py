"""`Detokenizer`: tokens in, text out, never half a character.

A token may hold part of a character, and what a token says may depend on those before it. So a short window of tokens
is decoded, and what is new in its text is given out. Where the text ends in U+FFFD the last tokens may still become a
character, and are held back: never more than three, since a character has at most four bytes.

Two kinds of decoders are told apart by what they do, not by their names:

- byte-level ones show what is no UTF-8 part by part: only the last U+FFFD of a text can still become a character;
- byte-fallback ones (SentencePiece) judge a run of byte tokens as a whole: valid, or one U+FFFD for each byte. There
  the next character, while it is incomplete, turns the text before it into U+FFFD for the moment.

What has been given out stays. So where a run of byte tokens begins with whole characters and then breaks, those remain
and each byte behind them is a U+FFFD, while `decode` shows all of the run as U+FFFD. And after `MOST_BROKEN` broken
bytes the next ones of a run are judged anew. In all other cases the pieces join to what `decode` gives for all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.text.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
MOST_UNFINISHED = 3
"""Tokens that can be waiting for the rest of a character, which has at most four bytes."""
MOST_BROKEN = 64
"""Tokens in a row without a whole character that are remembered; what comes then is judged anew."""


class Detokenizer:
    """The text of one growing list of tokens."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._inner_texts = tokenizer.inner_texts(skip_special=skip_special)
        self._context: list[int] = []
        """Tokens whose text has been given out, as far as the next ones may depend on them."""
        self._before: str | None = ""
        """The context's text; None: not decoded yet, but not empty."""
        self._last: list[int] = []
        """The tokens whose text was given out last."""
        self._held: list[list[int]] = []
        """Tokens at the end that may be unfinished, each with the silent ones (skipped, without text) after it."""
        self._text = ""
        """Text of the held tokens."""
        self._num_given = 0
        """Characters of that text that have been given out."""
        self.is_whole = True
        """Is all text given out?"""

    def push(self, token: int) -> str:
        """The text that this token completes; empty while it is part of a character."""
        if self.is_whole:  # as after most tokens: two ways that come to the same as the general one, in fewer steps
            before = self._before
            if before != "" and (text := self._inner_texts[token]):
                self._context = self._last = [token]
                self._before = None
                return text
            decode, skip_special = self._tokenizer.decode, self._skip_special
            if before is None:
                before = self._before = decode(self._context, skip_special=skip_special)
            text = decode([*self._context, token], skip_special=skip_special)
            if len(text) > len(before) and not text.endswith(UNFINISHED) and text.startswith(before):
                alone = decode([token], skip_special=skip_special) if self._context else text
                if alone:
                    self._context = self._last = [token]
                    self._before = alone
                    return text[len(before) :]
        return self._push_part(token)

    def _push_part(self, token: int) -> str:
        """The general way, for a token that may be part of a character or follows one that is."""
        text = self._text_of([*self._held, [token]])
        if text == self._text and self._is_silent(token):
            if self._held:
                self._held[-1].append(token)
            return ""
        self._held.append([token])
        self.is_whole = False
        # A run of bytes that becomes valid has fewer characters than it had bytes: so it may end in a true U+FFFD.
        completes = not text.endswith(UNFINISHED) or len(text) < len(self._text)
        self._text = text
        if completes:
            return self.flush()
        new = self._give(self._num_certain())
        return new + self._forget() if len(self._held) > MOST_BROKEN else new

    def flush(self) -> str:
        """All of the held text, as the tokenizer shows it at the end of a text; its tokens become the context."""
        new = self._give(len(self._text))
        if self._held:
            last, self._last = self._last, _flat(self._held)
            self._context, self._before = self._last, self._decode(self._last)
            if not self._before:  # a space, which decoders strip from the beginning: it needs something in front
                self._context = [*last, *self._last]
                self._before = self._decode(self._context)
        self._held, self._text, self._num_given, self.is_whole = [], "", 0, True
        return new

    @property
    def num_open(self) -> int:
        """How many of the last tokens have text that is not complete."""
        return sum(map(len, self._held[-MOST_UNFINISHED:]))

    # -- giving out ---------------------------------------------------------------------------------------------------

    def _give(self, count: int) -> str:
        """The held text up to `count` characters, less what has been given out."""
        new = self._text[self._num_given : count]
        self._num_given = max(self._num_given, count)
        return new

    def _num_certain(self) -> int:
        """Characters of the held text that no later token can change."""
        certain = len(self._text.rstrip(UNFINISHED))
        if len(self._held) <= MOST_UNFINISHED:
            return certain
        old = self._text_of(self._held[:-MOST_UNFINISHED])
        return max(certain, min(len(old), len(self._text)))

    def _forget(self) -> str:
        """Shorten an endless row of broken tokens to the last ones; gives out what would not be the same without."""
        rest = self._text[self._num_given :]
        self._held = self._held[-MOST_UNFINISHED:]
        self._context, self._before = [], ""
        self._text = self._text_of(self._held)
        if not self._text.endswith(rest):  # byte-fallback: these bytes would be valid without those before them
            self.flush()
            return rest
        self._num_given = len(self._text) - len(rest)
        return ""

    # -- the tokenizer ------------------------------------------------------------------------------------------------

    def _text_of(self, held: list[list[int]]) -> str:
        """The text of held tokens, in the light of those before them."""
        tokens = _flat(held)
        text, before = self._decode([*self._context, *tokens]), self._before or ""
        if text.startswith(before):
            return text[len(before) :]
        return self._decode(tokens)  # a broken run of bytes began in the context, whose text is out: the rest by itself

    def _is_silent(self, token: int) -> bool:
        """Has this token no text at all? Twice, since a first space may be stripped."""
        return not self._decode([token, token])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special) if ids else ""


def _flat(held: list[list[int]]) -> list[int]:
    """The tokens in one list. One silent token says as much as any number of them."""
    return [token for tokens in held for token in tokens[:2]]


class StopStrings:
    """Text in pieces; gives out what can't be the beginning of a stop string.

    The stop string that is complete first ends the text; of several that end at the same character, the longest. So how
    the text is cut into pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._include = include
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text, if one did."""

    def passes(self, text: str) -> bool:
        """Does `push` give out all of this text, and nothing else? That is known where no stop string begins in it."""
        return not self._held and self.found is None and self._first_characters.isdisjoint(text)

    def push(self, text: str) -> str:
        """The text that may be shown now. Once a stop string is found, nothing more comes."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        ends = [(begin + len(stop), stop) for stop in self._stops if (begin := self._held.find(stop)) >= 0]
        if ends:
            end, self.found = min(ends, key=lambda one: (one[0], -len(one[1])))
            shown = self._held[: end if self._include else end - len(self.found)]
            self._held = ""
            return shown
        keep = self._longest_beginning()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The text is over: what was held is no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _longest_beginning(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        for length in range(min(len(self._held), max(map(len, self._stops)) - 1), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
