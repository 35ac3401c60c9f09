"""`TokenLog`: the ids of a conversation, and where its turns end. Plain data; owned by the service's event loop."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tokenmill.engine.prefix import common_prefix
from tokenmill.errors import InvalidRequest
from tokenmill.text.messages import Message, num_chars

Kind = Literal["input", "answer"]


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


class TokenLog:
    """Ids that are never tokenised anew, four bytes each."""

    __slots__ = ("has_dropped_turns", "low", "tokens", "turns")

    def __init__(self) -> None:
        self.tokens: array[int] = array("i")
        self.turns: list[Turn] = []
        self.low = 0
        """The least it has been cut to since `note_length`: as far as that it is as it was then."""
        self.has_dropped_turns = False
        """Has it lost its oldest turns since `note_length`?"""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def messages(self) -> list[Message]:
        """Everything said so far, as a template takes it."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    def has_raw_input(self) -> bool:
        """Did something go in as it was, outside any message?"""
        return any(turn.is_raw for turn in self.turns)

    @property
    def ended_with(self) -> int | None:
        return self.turns[-1].ended_with if self.turns else None

    @property
    def num_bytes(self) -> int:
        return 4 * len(self.tokens) + sum(map(num_chars, self.messages))

    def note_length(self) -> None:
        """From now on `low` says what has stayed."""
        self.low = len(self.tokens)
        self.has_dropped_turns = False

    def _cut(self, keep: int) -> None:
        del self.tokens[keep:]
        self.low = min(self.low, keep)

    def add(self, keep: int, ids: Sequence[int], turn: Turn) -> None:
        """Keep the first `keep` ids and go on with these; turns beyond are known by their messages only."""
        if keep < len(self.tokens):
            self._cut(keep)
            self.turns = [_inexact(one) if one.end is None or one.end > keep else one for one in self.turns]
        self.tokens.extend(ids)
        self.turns.append(turn)

    def copy(self) -> TokenLog:
        twin = TokenLog()
        twin.tokens, twin.turns = self.tokens[:], list(self.turns)
        twin.low, twin.has_dropped_turns = self.low, self.has_dropped_turns
        return twin

    def from_turn(self, index: int, messages: Sequence[Message], ids: Sequence[int] | None) -> TokenLog:
        """A log of the turns from an input turn on, which now has these messages and ids.

        Without ids, the turns are known by their messages only, and are to be rendered anew.
        """
        kept, (first, *rest) = TokenLog(), self.turns[index:]
        if ids is None or first.end is None:
            kept.turns = [Turn("input", tuple(messages), None), *map(_inexact, rest)]
        else:
            kept.tokens = array("i", ids) + self.tokens[first.end :]
            moved_by = len(ids) - first.end
            kept.turns = [Turn("input", tuple(messages), len(ids)), *(_moved(turn, moved_by) for turn in rest)]
        same = common_prefix(np.array(self.tokens, dtype=np.int32), np.array(kept.tokens, dtype=np.int32))
        kept.low, kept.has_dropped_turns = min(self.low, same), True
        return kept

    def cut_at_turn(self, count: int) -> None:
        """Keep the first `count` turns. Where they were rewritten since, the ids must be rendered from the messages."""
        if not 0 <= count <= len(self.turns):
            raise InvalidRequest(f"the session has {len(self.turns)} turns; {count} of them can't be kept")
        del self.turns[count:]
        end = self.turns[-1].end if self.turns else 0
        self._cut(0 if end is None else end)

    @property
    def is_known(self) -> bool:
        """Are the ids of its turns there? Not after a cut to a turn that was rewritten."""
        return bool(self.tokens) or not self.turns

    def rebuild(self, ids: Sequence[int]) -> None:
        """These are the ids of all its turns, rendered anew; where each but the last one ends is not known."""
        last = self.turns[-1]
        self.tokens, self.low = array("i", ids), 0
        self.turns = [_inexact(turn) for turn in self.turns[:-1]]
        self.turns.append(Turn(last.kind, last.messages, len(ids), None, last.finish_reason))

    def cut_at_token(self, count: int, text: str) -> None:
        """Keep the first `count` tokens. A turn that they end inside is cut; `text` is what is left of an answer."""
        if not 0 <= count <= len(self.tokens):
            raise InvalidRequest(f"the session has {len(self.tokens)} tokens; {count} of them can't be kept")
        ends = [turn.end for turn in self.turns]
        whole = sum(1 for end in ends if end is not None and end <= count)
        begin = (self.turns[whole - 1].end or 0) if whole else 0
        if None in ends[: whole + 1]:
            raise InvalidRequest("the template has rewritten these turns; choose a turn instead of a token")
        left = self.turns[whole] if whole < len(self.turns) and count > begin else None
        del self.turns[whole:]
        self._cut(count)
        if left is not None:
            is_answer = left.kind == "answer"
            messages: tuple[Message, ...] = ({"role": "assistant", "content": text},) if is_answer else ()
            reason = "cut" if is_answer else None
            self.turns.append(replace(left, messages=messages, end=count, ended_with=None, finish_reason=reason))

    def begin_of(self, index: int) -> int | None:
        """Tokens before a turn, if they are known."""
        return self.turns[index - 1].end if index else 0


def _moved(turn: Turn, num_tokens: int) -> Turn:
    """A turn whose beginning of the log has changed."""
    end = None if turn.end is None else turn.end + num_tokens
    return replace(turn, end=end, is_replayable=turn.kind == "input")


def _inexact(turn: Turn) -> Turn:
    return Turn(turn.kind, turn.messages, None, None, turn.finish_reason)
