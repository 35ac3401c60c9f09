"""`DeltaRenderer`: a conversation turn by turn, for a log of ids that grows.

What a new turn adds is what the template writes now beyond what it wrote before and the answer. Both are rendered and
compared: templates that rewrite the past (that drop past reasoning, or move the system text into the last turn) are
found out by the conversation itself. Then the log is cut where it begins to differ, and the rest is computed again.
Where the template writes each message on its own (`separable.py`), the beginning and the end of the conversation are
rendered for that, so that a turn does not cost more in a longer one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tokenmill.contract import IntArray
from tokenmill.errors import InvalidRequest, TooManyTokens
from tokenmill.text.messages import QUESTION, Message, check_messages
from tokenmill.text.separable import shortened
from tokenmill.text.template import ChatTemplate
from tokenmill.text.turn_parser import end_of_calls

ANSWER = "probe of an answer"
PROBES: dict[str, tuple[list[Message], str]] = {
    "plain": ([], ANSWER),
    "with a system message": ([{"role": "system", "content": "probe of a system message"}], ANSWER),
    "with reasoning": ([], f"<think>\nprobe of reasoning\n</think>\n\n{ANSWER}"),
}
"""Kinds of conversations: what comes first, and what is answered."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Continuation:
    """What new messages do to a conversation's log: its first `keep` ids are kept, and `ids` follow."""

    keep: int
    ids: list[int]


class DeltaRenderer:
    """Renders a conversation turn by turn: the first turn whole, then what each new turn adds to the log."""

    def __init__(self, template: ChatTemplate, **options: Any) -> None:
        self._template = template
        self._options = options
        self._warned = False

    @cached_property
    def is_consistent(self) -> bool:
        """Does a new turn only add to what was there, in every kind of conversation that the template takes?

        A hint only: `extend` looks at the conversation itself.
        """
        return self._only_adds(*PROBES["plain"]) is True and all(
            self._only_adds(*probe) is not False for probe in PROBES.values()
        )

    def first_turn(self, messages: Sequence[Message], limit: int | None = None) -> list[int]:
        """Ids up to where the model answers, default system prompt and BOS included."""
        return self._template.encode(messages, limit, **self._options)

    def extend(
        self,
        log: Sequence[int] | IntArray,
        past: Sequence[Message],
        new: Sequence[Message],
        ended_with: int | None,
        limit: int | None = None,
    ) -> Continuation:
        """The log of a conversation after new messages: what the template would write now.

        `past` are the messages that the log holds, answers included, each as it was generated; none, if they are not
        known. The log's own ids are kept, unless the template would no longer write their text. `TooManyTokens` if the
        log would have more than `limit`, as soon as that is known.
        """
        if not len(log):
            return Continuation(0, self.first_turn([*past, *new], limit))
        if not len(past):
            return Continuation(len(log), _after(log, limit, lambda left: self.next_turn(new, ended_with, left)))
        shown, new = check_messages(self.shown(past)), check_messages(new)
        now = self._template.rendered([*shown, *new], **self._options)
        end = self._end_of_log(shown, now.text)
        if end is not None:
            ids = _after(log, limit, lambda left: self._template.encode_rendered(now, end, left))
            return Continuation(len(log), self._without_second_end(ids, ended_with))
        if not self._warned:
            self._warned = True
            logger.warning("this chat template rewrites past turns: part of each turn is computed again")
        if len(shown) < len(past):
            now = self._template.rendered([*past, *new], **self._options)
        whole = self._template.encode_rendered(now, limit=limit)
        keep = _common_length(log, whole)
        return Continuation(keep, whole[keep:])

    def shown(self, past: Sequence[Message]) -> Sequence[Message]:
        """The messages of a conversation that tell what new ones add to it: without its middle, if that is safe."""
        return shortened(past) if self._template.is_separable else past

    def next_turn(self, messages: Sequence[Message], ended_with: int | None, limit: int | None = None) -> list[int]:
        """Ids that follow an answer: its end, the new messages, up to where the model answers again.

        `ended_with` is the stop token that the answer's log ends with; a turn that was cut short has none, and gets the
        template's own end. What was said before is not known here: `extend` is exact.
        """
        answer: Message = {"role": "assistant", "content": ANSWER}
        now = self._template.rendered([QUESTION, answer, *check_messages(messages)], **self._options)
        at = now.text.find(ANSWER)
        if at < 0:
            raise InvalidRequest("this chat template does not render answers verbatim: send the whole conversation")
        ids = self._template.encode_rendered(now, at + len(ANSWER), limit)
        return self._without_second_end(ids, ended_with)

    def opening(self, past: Sequence[Message], num_replaced: int, start: Sequence[Message]) -> list[int] | None:
        """Ids of `start`, to take the place of the first messages of a log; the ids after those stay as they are.

        None if the template writes what follows differently after `start`. `past` ends with an answer.
        """
        rest = past[num_replaced:]
        begun = self._template.rendered(start, **self._options)
        replaced = self._rendered_or_none(past[:num_replaced], "")
        before, now = self._text_of_log(past), self._text_of_log([*start, *rest])
        if replaced is None or before is None or not before.startswith(replaced):
            return None
        return self._template.encode_rendered(begun) if now == begun.text + before[len(replaced) :] else None

    def _end_of_log(self, past: Sequence[Message], now: str) -> int | None:
        """Up to where what the template writes now is what the log says; None if it says something else.

        An answer with reasoning or tool calls is in the log as it was generated, which need not be how the template
        writes it: it is enough that the template still writes all of it, and the same before it.
        """
        before = self._text_of_log(past)
        if before is not None:
            return len(before) if now.startswith(before) else None
        answer, prompt = past[-1], self._rendered_or_none(past[:-1], "")
        if answer["role"] != "assistant" or prompt is None or not now.startswith(prompt):
            return None
        end = len(prompt)
        for said in (answer.get("reasoning_content"), answer.get("content")):
            if said:
                at = now.find(str(said).strip(), end)
                if at < 0:
                    return None
                end = at + len(str(said).strip())
        calls = answer.get("tool_calls")
        if not calls:
            return end
        names = {call["function"]["name"] for call in calls}
        num_chars = end_of_calls(self._template.turn_format, names, now[end:], len(calls))
        return None if num_chars is None else end + num_chars

    def _text_of_log(self, past: Sequence[Message]) -> str | None:
        """What the log says: the conversation up to the last answer, and this answer. None if that can't be told."""
        answer = past[-1]
        known = {name for name, value in answer.items() if value} <= {"role", "content"}
        if answer["role"] != "assistant" or not known:
            return None  # not answered, or the answer became more than text (tool calls)
        return self._rendered_or_none(past[:-1], str(answer["content"]))

    def _rendered_or_none(self, messages: Sequence[Message], answer: str) -> str | None:
        try:
            return self._template.render(messages, **self._options) + answer
        except InvalidRequest:
            return None

    def _without_second_end(self, ids: list[int], ended_with: int | None) -> list[int]:
        """What follows an answer, without the template's end of it where the log has one already, if another."""
        ends = self._template.tokenizer.eos_ids
        has_end = ended_with is not None and (
            ids[:1] == [ended_with] or (ended_with in ends and ends.issuperset(ids[:1]))
        )
        return ids[1:] if has_end else ids

    def _only_adds(self, first: Sequence[Message], answer: str) -> bool | None:
        """Does each of two answers stay as it was when the next question comes? None: the template refuses."""
        turn: list[Message] = [QUESTION, {"role": "assistant", "content": answer}]
        texts = [self._rendered_or_none([*first, *turn * count, QUESTION], "") for count in range(3)]
        if any(text is None for text in texts):
            return None
        before, once, twice = map(str, texts)
        return once.startswith(before + answer) and twice.startswith(once + answer)


def _after(log: Sequence[int] | IntArray, limit: int | None, encode: Callable[[int | None], list[int]]) -> list[int]:
    """Ids that follow a log, where the limit is on both together."""
    if limit is None:
        return encode(None)
    try:
        return encode(limit - len(log) + 1)  # the end of the answer may be left out again
    except TooManyTokens as error:
        raise TooManyTokens(len(log) + error.at_least - 1, limit) from None


def _common_length(log: Sequence[int] | IntArray, whole: Sequence[int]) -> int:
    """How far two lists of ids are the same."""
    count = min(len(log), len(whole))
    differ = np.asarray(log[:count], dtype=np.int32) != np.array(whole[:count], dtype=np.int32)
    return int(differ.argmax()) if differ.any() else count
