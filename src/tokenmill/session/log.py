"""`TokenLog`: the ids of a conversation, and where its turns end.

A log is a value: what changes it makes another one, and both share storage that only grows. So a snapshot is a
reference, and a turn costs what is new in it, however long the conversation is. Any thread may read a log and derive
others from it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Self, TypeVar, overload

import numpy as np

from tokenmill.contract import IntArray
from tokenmill.engine.prefix import common_prefix
from tokenmill.errors import InvalidRequest
from tokenmill.text.messages import Message, num_chars

Kind = Literal["input", "answer"]
T = TypeVar("T")


# -- sequences that share storage -------------------------------------------------------------------------------------

_EXTENDING = threading.Lock()
"""Two threads may extend the same sequence: the first one gets the storage, the other one a copy."""


class SharedList(Sequence[T]):
    """An immutable sequence: the first `count` items of a list that only grows."""

    __slots__ = ("_count", "_items")

    def __init__(self, items: Sequence[T] = ()) -> None:
        self._items = list(items)
        self._count = len(self._items)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._count)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            return self._items[start:stop] if step == 1 else [self._items[i] for i in range(start, stop, step)]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._items[index if index >= 0 else self._count + index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_same, self, other))

    __hash__ = None  # type: ignore[assignment]

    def extended(self, more: Sequence[T]) -> SharedList[T]:
        """With more items. Costs what is added, unless another sequence goes on from here already."""
        longer: SharedList[T] = SharedList.__new__(SharedList)
        with _EXTENDING:
            is_free = 0 < len(self._items) == self._count
            items = self._items if is_free else self._items[: self._count]
            items.extend(more)
        longer._items, longer._count = items, self._count + len(more)
        return longer

    def first(self, count: int) -> SharedList[T]:
        """The first `count` items."""
        if count == self._count:
            return self
        shorter: SharedList[T] = SharedList.__new__(SharedList)
        shorter._items, shorter._count = self._items, count
        return shorter

    def num_shared(self, other: SharedList[T]) -> int:
        """How many first items are the same objects. Sequences that share their storage are not looked through."""
        count = min(self._count, other._count)
        if self._items is other._items:
            return count
        return next((i for i in range(count) if self._items[i] is not other._items[i]), count)


def _same(one: object, other: object) -> bool:
    return one is other or one == other


class _Storage:
    """Room for ids, of which the first `used` never change."""

    __slots__ = ("array", "used")

    def __init__(self, ids: IntArray) -> None:
        self.array = ids
        self.used = len(ids)

    def append(self, ids: IntArray) -> None:
        needed = self.used + len(ids)
        if needed > len(self.array):
            grown = np.empty(needed + needed // 32, dtype=np.int32)
            grown[: self.used] = self.array[: self.used]
            grown[self.used : needed] = ids
            self.array = grown  # complete before it is visible to other threads
        else:
            self.array[self.used : needed] = ids
        self.used = needed


class Tokens:
    """An immutable sequence of ids, four bytes each: the first `count` of a storage that only grows."""

    __slots__ = ("_count", "_storage")

    def __init__(self, ids: Sequence[int] | IntArray = ()) -> None:
        self._storage = _Storage(np.array(ids, dtype=np.int32))
        self._count = self._storage.used

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and np.array_equal(self.array, other.array)

    __hash__ = None  # type: ignore[assignment]

    @property
    def array(self) -> IntArray:
        """The ids, without a copy; not to be written to."""
        ids = self._storage.array[: self._count]
        ids.flags.writeable = False
        return ids

    def tolist(self) -> list[int]:
        ids: list[int] = self.array.tolist()
        return ids

    def extended(self, ids: Sequence[int]) -> Tokens:
        """With more ids. Costs what is added, unless another sequence goes on from here already."""
        longer, new = Tokens.__new__(Tokens), np.array(ids, dtype=np.int32)
        with _EXTENDING:
            storage = self._storage
            if storage.used != self._count or self._count == 0:
                storage = _Storage(self.array.copy())
            storage.append(new)
        longer._storage, longer._count = storage, self._count + len(new)
        return longer

    def first(self, count: int) -> Tokens:
        """The first `count` ids."""
        shorter = Tokens.__new__(Tokens)
        shorter._storage, shorter._count = self._storage, count
        return shorter

    def num_same(self, other: Tokens) -> int:
        """How many first ids are the same. Sequences that share their storage are not looked through."""
        if self._storage is other._storage:
            return min(self._count, other._count)
        return common_prefix(self.array, other.array)


# -- the log ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """What was put in since the last answer, or an answer."""

    kind: Kind
    messages: tuple[Message, ...]
    """As a template takes them; none for input that went in as it was."""
    end: int | None
    """Tokens of the log up to its end. None: the template has rewritten it since, and only its messages are known."""
    ended_with: int | None = None
    """The stop token that an answer's tokens end with; None if it was cut short."""
    finish_reason: str | None = None
    changes: Mapping[str, Any] | None = None
    """Fields of `SamplingParams` that an answer was drawn with, where they are not its session's."""
    is_replayable: bool = True
    """False for an answer that was drawn after turns that were dropped since, or whose beginning was given."""

    @property
    def is_raw(self) -> bool:
        """Did it go in as it was, outside any message?"""
        return self.kind == "input" and not self.messages

    @property
    def inexact(self) -> Turn:
        """The same turn, known by its messages only."""
        return Turn(self.kind, self.messages, None, None, self.finish_reason)


@dataclass(frozen=True, slots=True)
class TokenLog:
    """Ids that are never tokenized again, and the turns that they are of."""

    tokens: Tokens = field(default_factory=Tokens)
    turns: SharedList[Turn] = field(default_factory=SharedList)
    messages: SharedList[Message] = field(default_factory=SharedList)
    """Everything said so far, as a template takes it."""
    num_chars: int = 0
    """Of all messages."""
    num_raw: int = 0
    """Turns that went in as they were, outside any message."""
    low: int = 0
    """The shortest it has been cut to since `marked`: as far as that it is as it was then."""
    has_dropped_turns: bool = False
    """Has it lost its oldest turns since `marked`?"""

    @classmethod
    def of(cls, tokens: Tokens, turns: Sequence[Turn]) -> Self:
        """A log of these turns."""
        messages = [message for turn in turns for message in turn.messages]
        num_raw = sum(turn.is_raw for turn in turns)
        return cls(tokens, SharedList(turns), SharedList(messages), num_chars(messages), num_raw, len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def ended_with(self) -> int | None:
        return self.turns[-1].ended_with if self.turns else None

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.tokens) + self.num_chars

    @property
    def is_known(self) -> bool:
        """Are the ids of its turns there? Not after a cut to a turn that was rewritten."""
        return bool(len(self.tokens)) or not self.turns

    def begin_of(self, index: int) -> int | None:
        """Tokens before a turn, if they are known."""
        return self.turns[index - 1].end if index else 0

    def marked(self) -> TokenLog:
        """From now on `low` says what has stayed."""
        return replace(self, low=len(self.tokens), has_dropped_turns=False)

    def added(self, keep: int, ids: Sequence[int], turn: Turn) -> TokenLog:
        """Keep the first `keep` ids and go on with these; turns beyond are known by their messages only."""
        kept = self if keep == len(self.tokens) else self._rewritten_from(keep)
        return kept._with_turn(ids, turn)

    def continued(self, ids: Sequence[int], turn: Turn) -> TokenLog:
        """More ids for the last turn, which becomes this one."""
        return self._first_turns(len(self.turns) - 1)._with_turn(ids, turn)

    def _with_turn(self, ids: Sequence[int], turn: Turn) -> TokenLog:
        return replace(
            self,
            tokens=self.tokens.extended(ids) if len(ids) else self.tokens,
            turns=self.turns.extended((turn,)),
            messages=self.messages.extended(turn.messages) if turn.messages else self.messages,
            num_chars=self.num_chars + sum(map(num_chars, turn.messages)),
            num_raw=self.num_raw + turn.is_raw,
        )

    def _rewritten_from(self, keep: int) -> TokenLog:
        num_exact = len(self.turns)
        while num_exact and ((end := self.turns[num_exact - 1].end) is None or end > keep):
            num_exact -= 1
        rewritten = [turn.inexact for turn in self.turns[num_exact:]]
        return replace(self._cut(keep), turns=self.turns.first(num_exact).extended(rewritten))

    def _cut(self, keep: int) -> TokenLog:
        return replace(self, tokens=self.tokens.first(keep), low=min(self.low, keep))

    def _first_turns(self, count: int) -> TokenLog:
        """All ids, but only the first `count` turns."""
        gone = self.turns[count:]
        messages = [message for turn in gone for message in turn.messages]
        return replace(
            self,
            turns=self.turns.first(count),
            messages=self.messages.first(len(self.messages) - len(messages)),
            num_chars=self.num_chars - sum(map(num_chars, messages)),
            num_raw=self.num_raw - sum(turn.is_raw for turn in gone),
        )

    def from_turn(self, index: int, messages: Sequence[Message], ids: Sequence[int] | None) -> TokenLog:
        """A log of the turns from an input turn on, which now has these messages and ids.

        Without ids, the turns are known by their messages only, and are to be rendered again.
        """
        first, *rest = self.turns[index:]
        if ids is None or first.end is None:
            kept = TokenLog.of(Tokens(), [Turn("input", tuple(messages), None), *(turn.inexact for turn in rest)])
        else:
            tokens = Tokens(np.concatenate([np.array(ids, dtype=np.int32), self.tokens.array[first.end :]]))
            moved_by = len(ids) - first.end
            turns = [Turn("input", tuple(messages), len(ids)), *(_moved(turn, moved_by) for turn in rest)]
            kept = TokenLog.of(tokens, turns)
        low = min(self.low, self.tokens.num_same(kept.tokens))
        return replace(kept, low=low, has_dropped_turns=True)

    def cut_at_turn(self, count: int) -> TokenLog:
        """The first `count` turns. Where they were rewritten since, the ids must be rendered from the messages."""
        if not 0 <= count <= len(self.turns):
            raise InvalidRequest(f"cannot keep {count} turns; the session has {len(self.turns)}")
        kept = self._first_turns(count)
        end = kept.turns[-1].end if kept.turns else 0
        return kept._cut(0 if end is None else end)

    def rebuilt(self, ids: Sequence[int]) -> TokenLog:
        """With the ids of all its turns, rendered again; where each but the last one ends is not known."""
        last = self.turns[-1]
        turns = [turn.inexact for turn in self.turns[:-1]]
        turns.append(Turn(last.kind, last.messages, len(ids), None, last.finish_reason))
        return replace(self, tokens=Tokens(ids), turns=SharedList(turns), low=0)

    def cut_at_token(self, count: int, text: str) -> TokenLog:
        """The first `count` tokens. A turn that they end inside is cut; `text` is what is left of an answer."""
        if not 0 <= count <= len(self.tokens):
            raise InvalidRequest(f"cannot keep {count} tokens; the session has {len(self.tokens)}")
        ends = [turn.end for turn in self.turns]
        whole = sum(1 for end in ends if end is not None and end <= count)
        begin = (self.turns[whole - 1].end or 0) if whole else 0
        if None in ends[: whole + 1]:
            raise InvalidRequest("the chat template has rewritten these turns; use at_turn instead of at_token")
        kept = self._first_turns(whole)._cut(count)
        if whole == len(self.turns) or count <= begin:
            return kept
        left = self.turns[whole]
        is_answer = left.kind == "answer"
        messages: tuple[Message, ...] = ({"role": "assistant", "content": text},) if is_answer else ()
        reason = "cut" if is_answer else None
        return kept._with_turn((), replace(left, messages=messages, end=count, ended_with=None, finish_reason=reason))


def _moved(turn: Turn, num_tokens: int) -> Turn:
    """A turn whose beginning of the log has changed."""
    end = None if turn.end is None else turn.end + num_tokens
    return replace(turn, end=end, is_replayable=turn.kind == "input")
