"""`Guard`: tells a caller's characters from a template's, whatever the template does with them.

Every character of a caller's string is replaced by a stand-in, a private-use character, before the template runs. So in
what it renders, special tokens are its own: a caller's can't match, not in part, not across two strings, not after
trimming, slicing or joining. Afterwards the stand-ins are put back.

Templates look into strings (`'</think>' in content`, `content.split(...)`). `GuardedText` answers as the caller's
string would. What it does not know is done by `str` on the stand-ins: the answer may differ then, but never what is
guarded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from tokenmill.errors import InvalidRequest

STAND_INS = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""The private-use planes."""
LONG_CHARS = 1 << 14
MOST_CHARS = 1 << 26
"""Of a text that a template puts together, and of the whole prompt: several times the longest body."""


class Guard:
    """The stand-ins of one rendering: each character gets the next one that is free when it is first met."""

    def __init__(self, taken: Collection[str] = "") -> None:
        """`taken`: characters that the template itself may write."""
        self._free = (code for code in chain(*STAND_INS) if chr(code) not in taken)
        self._to_stand_in = _Table(self._next)
        self._to_character: dict[int, str] = {}

    def text(self, plain: str) -> GuardedText:
        """A caller's string, guarded."""
        guarded = GuardedText(_translated(plain, self._to_stand_in), self)
        guarded._plain = plain
        return guarded

    def plain(self, raw: str) -> str:
        """The text with the stand-ins put back."""
        return _translated(raw_of(raw), self._to_character)

    def guards(self, character: str) -> bool:
        """Is this a stand-in?"""
        return ord(character) in self._to_character

    def _next(self, code: int) -> str:
        number = next(self._free, None)
        if number is None:
            raise InvalidRequest("the messages contain too many distinct characters to be separated from the template")
        self._to_character[number] = chr(code)
        return chr(number)


class _Table(dict[int, str]):
    """For `str.translate`: what is not there is made."""

    def __init__(self, make: Callable[[int], str]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, code: int) -> str:
        self[code] = made = self._make(code)
        return made


def _translated(text: str, table: Mapping[int, str]) -> str:
    """`text.translate(table)`, which holds the interpreter lock too long for a long text: numpy takes a tenth of it."""
    if len(text) < LONG_CHARS:
        return text.translate(table)
    codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
    new_codes = np.zeros(sys.maxunicode + 1, dtype="<u4")
    new_codes[codes] = 1
    for code in np.flatnonzero(new_codes).tolist():
        try:
            new_codes[code] = ord(table[code])
        except KeyError:
            new_codes[code] = code
    return bytes(new_codes[codes]).decode("utf-32-le", errors="surrogatepass")


class GuardedText(str):
    """A string of stand-ins (a caller's characters) and others (a template's) that looks like the plain text."""

    # All names begin with an underscore: the sandbox keeps templates from them.
    _raw: str
    _guard: Guard

    def __new__(cls, raw: str, guard: Guard) -> GuardedText:
        self = super().__new__(cls, raw)
        self._raw = raw
        self._guard = guard
        return self

    @cached_property
    def _plain(self) -> str:
        return self._guard.plain(self._raw)

    def _like(self, raw: str) -> GuardedText:
        return GuardedText(raw, self._guard)

    def __str__(self) -> str:
        return self

    def __repr__(self) -> str:
        return self._guard.text(repr(self._plain))

    def __hash__(self) -> int:
        return hash(self._plain)

    def __iter__(self) -> Iterator[str]:
        return map(self._like, self._raw)

    def __getitem__(self, key: Any) -> str:
        return self._like(self._raw[key])

    def __add__(self, other: Any) -> str:
        return self._like(self._raw + raw_of(other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: Any) -> str:
        return self._like(raw_of(other) + self._raw) if isinstance(other, str) else NotImplemented

    def strip(self, chars: str | None = None, /) -> str:
        return self._like(raw_of(self.lstrip(chars).rstrip(chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._like(self._raw[len(self) - len(self._plain.lstrip(plain_of(chars))) :])

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._like(self._raw[: len(self._plain.rstrip(plain_of(chars)))])

    def removeprefix(self, prefix: str, /) -> str:
        return self._like(self._raw[len(prefix) :]) if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self._like(self._raw[: len(self) - len(suffix)]) if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._cut(self._plain.split(plain_of(sep), maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: Any = -1) -> list[str]:
        return self._cut(self._plain.rsplit(plain_of(sep), maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._cut(self._plain.splitlines(keepends))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._cut(self._plain.partition(plain_of(sep)))
        return first, middle, last

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        first, middle, last = self._cut(self._plain.rpartition(plain_of(sep)))
        return first, middle, last

    def replace(self, old: str, new: str, count: Any = -1, /) -> str:
        if not old:  # between all characters: whose they are then is hard to say, so all of them are guarded
            return self._guard.text(self._plain.replace("", plain_of(new), count))
        return self._like(raw_of(new).join(map(raw_of, self.split(old, count))))

    def _cut(self, parts: Iterable[str], between: str | None = None) -> list[str]:
        """The places of these parts, which follow each other in the text: with `between`, or whitespace, in between."""
        plain, at = self._plain, 0
        cut: list[str] = []
        for part in parts:
            start = at if between else plain.index(part, at)
            cut.append(self._like(self._raw[start : start + len(part)]))
            at = start + len(part) + len(between or "")
        return cut


def guard_of(value: Any) -> Guard | None:
    """The guard of a guarded text."""
    return value._guard if isinstance(value, GuardedText) else None


def plain_of(value: Any) -> Any:
    """A guarded text as its caller wrote it; anything else as it is."""
    return value._plain if isinstance(value, GuardedText) else value


def raw_of(value: str) -> str:
    """A guarded text with its stand-ins, as a `str`; any other text as it is."""
    return value._raw if isinstance(value, GuardedText) else value


def joined(pieces: Iterable[str]) -> str:
    """The pieces as one text: guarded, if one of them is."""
    parts, num_chars = [], 0
    for piece in pieces:
        parts.append(piece)
        num_chars += len(piece)
        if num_chars > MOST_CHARS:
            raise InvalidRequest(f"the chat template writes more than {MOST_CHARS:,} characters")
    guard = next((part._guard for part in parts if isinstance(part, GuardedText)), None)
    return "".join(parts) if guard is None else GuardedText("".join(map(raw_of, parts)), guard)


def _looking(name: str) -> Callable[..., Any]:
    """A method that only looks at the text: at the plain one."""
    method = getattr(str, name)
    return lambda self, *args: method(self._plain, *map(plain_of, args))


def _changing_case(name: str) -> Callable[..., str]:
    """A method that changes letters: each stays the caller's or the template's."""
    method = getattr(str, name)

    def changed(self: GuardedText) -> str:
        guard, new = self._guard, method(self._plain)
        if len(new) != len(self):  # "ß" has become "SS"
            return guard.text(new)
        changes = zip(self._raw, raw_of(guard.text(new)), new, strict=True)
        return self._like("".join(guarded if guard.guards(was) else now for was, guarded, now in changes))

    return changed


for _name in ("__contains__", "__eq__", "__ge__", "__gt__", "__le__", "__lt__", "__ne__", "count", "endswith", "find",
              "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric",
              "isprintable", "isspace", "istitle", "isupper", "rfind", "rindex", "startswith"):  # fmt: skip
    setattr(GuardedText, _name, _looking(_name))
for _name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper"):
    setattr(GuardedText, _name, _changing_case(_name))
