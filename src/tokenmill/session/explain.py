"""Why an answer's prompt was computed: a plain reason for each turn, from what the engine saw and the session knows.

The engine says how much KV there was, where the prompt leaves what is known, and what was given up for whom. The
session knows what there should have been: what it held when it last answered, on which core, of which weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tokenmill.entrypoints.options import OpenedModel
from tokenmill.outputs import CacheVerdict, Divergence
from tokenmill.pipeline.output import Generation
from tokenmill.session.session import Session
from tokenmill.text.messages import Message
from tokenmill.text.tokenizer import Tokenizer

MOST_TURNS = 32
"""Answers whose costs a session remembers."""
BEFORE = float("-inf")
"""When KV was that no engine of this process has had."""
SLACK = 1
"""The last token of a log has no KV: it was drawn, and not computed."""


OPENING = 64
"""Characters of a message by which it is found."""


class Cause(Enum):
    """Why tokens were computed that had been computed before, if any were."""

    NEW = "new_input"
    """Only what is new was."""
    FIRST = "first_turn"
    CHANGED = "changed"
    """The log is another from some token on: it was edited, rewound, or its template has rewritten it."""
    DROPPED_TURNS = "dropped_turns"
    """The oldest turns were dropped to fit the context: what is left was computed once more."""
    EVICTED = "evicted"
    """Others needed the room."""
    RESTART = "restart"
    """The process or its engine core is another one."""
    OTHER_WORKER = "other_worker"
    WEIGHTS = "weights_changed"
    FAILURE = "failed_step"
    NOT_REUSED = "not_reused"
    """The engine does not look for KV, or can't go on from there."""
    UNKNOWN = "unknown"
    """The engine is another process, which does not tell."""


@dataclass(frozen=True, slots=True)
class KVMark:
    """What a session's log had of KV at some moment."""

    num_tokens: int
    core: int
    weights_version: int
    at: float
    """By the engine's clock; before the engine was there, for a session that comes from a store or a file."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a log and the KV of what it was before begin to differ."""

    at: int
    turn: int | None
    """The turn it lies in, and..."""
    message: int | None
    """...which of its messages."""
    role: str | None
    before: str
    now: str


@dataclass(frozen=True, slots=True)
class TurnCost:
    """What an answer cost before its first token, and why."""

    request_id: str
    num_prompt: int
    num_cached: int
    cause: Cause
    num_again: int
    """Tokens that had to be recomputed."""
    difference: Difference | None = None
    lost_s: float | None = None
    """Seconds between the eviction and the answer."""
    lost_to: tuple[str, str] | None = None
    """The request that the KV was evicted for, and its key."""
    num_proposed: int = 0
    """Tokens of the answer that speculation proposed and a step verified..."""
    num_agreed: int = 0
    """...and those of them that were accepted."""

    @property
    def num_prefilled(self) -> int:
        return self.num_prompt - self.num_cached


def mark_before(session: Session) -> KVMark | None:
    """The KV that a session from a store or a file had in its former process: its log up to the last answer."""
    turns = session.log.turns
    last = next((turn for turn in reversed(turns) if turn.kind == "answer"), None)
    return None if last is None else KVMark(last.end or 0, session.core, 0, BEFORE)


def note_cost(session: Session, generation: Generation, opened: OpenedModel) -> None:
    """An answer is over: record its cost, and how much of the log has KV now."""
    request, weights, now = generation.choices[0].request, opened.model.weights_version, time.monotonic()
    if generation.num_generated:
        asked = (request.num_prompt, request.num_cached, request.verdict, weights, now, opened.text.tokenizer)
        cost = cost_of(session, generation.request_id, *asked)
        cost = replace(cost, num_proposed=request.num_proposed, num_agreed=request.num_agreed)
        session.costs = (*(session.costs or ())[1 - MOST_TURNS :], cost)
        # Tokens that a grammar forced are computed with what follows them. If none does, the next turn computes them.
        is_known = generation.params.structured_outputs is None or session.log.ended_with is not None
        num_known = len(session.log) if is_known else request.num_prompt
        session.mark = KVMark(num_known, session.core, weights, now)
        session.log = session.log.marked()


def cost_of(
    session: Session, request_id: str, num_prompt: int, num_cached: int, verdict: CacheVerdict | None,
    weights: int, at: float, tokenizer: Tokenizer,
) -> TurnCost:  # fmt: skip
    """The cost of an answer that is over, before its session's mark is moved."""
    mark = session.mark
    if verdict is None:
        return TurnCost(request_id, num_prompt, num_cached, Cause.UNKNOWN, 0)
    base, cached = (request_id, num_prompt, num_cached), num_cached
    if mark is None:
        return TurnCost(*base, Cause.FIRST, 0, _difference(session, verdict.divergence, cached, tokenizer))
    held, same = min(mark.num_tokens, num_prompt), session.log.low
    lost = max(0, min(held, same) - cached)
    if lost > SLACK:
        return _lost(base, mark, session.core, verdict, weights, at, lost)
    if same < held - SLACK:
        again = held - max(same, cached)
        if session.log.has_dropped_turns:
            return TurnCost(*base, Cause.DROPPED_TURNS, again)
        difference = _difference(session, verdict.divergence, cached, tokenizer)
        return TurnCost(*base, Cause.CHANGED, again, difference)
    return TurnCost(*base, Cause.NEW, lost)


def _lost(
    base: tuple[str, int, int], mark: KVMark, core: int, verdict: CacheVerdict, weights: int, at: float, again: int
) -> TurnCost:
    """KV of the same tokens was there, and is not any more."""
    loss = verdict.loss
    if mark.weights_version != weights or (loss is not None and loss.reason == "weights"):
        return TurnCost(*base, Cause.WEIGHTS, again)
    if verdict.core_since > mark.at:
        return TurnCost(*base, Cause.RESTART, again)
    if mark.core != core:
        return TurnCost(*base, Cause.OTHER_WORKER, again)
    if loss is not None and loss.reason == "failure":
        return TurnCost(*base, Cause.FAILURE, again, lost_s=at - loss.at)
    if loss is None and not verdict.is_found:
        return TurnCost(*base, Cause.NOT_REUSED, again)
    to = None if loss is None or loss.by is None else (loss.by, loss.by_key)
    return TurnCost(*base, Cause.EVICTED, again, lost_s=None if loss is None else at - loss.at, lost_to=to)


def _difference(
    session: Session, divergence: Divergence | None, cached: int, tokenizer: Tokenizer
) -> Difference | None:
    if divergence is None or divergence.at < cached:
        return None
    at, log = divergence.at, session.log
    before, now = (tokenizer.decode(ids, skip_special=False) for ids in (divergence.held, divergence.asked))
    for number, turn in enumerate(log.turns):
        begin = log.begin_of(number)
        if begin is not None and turn.end is not None and begin <= at < turn.end:
            text = tokenizer.decode(log.tokens.array[begin : turn.end].tolist(), skip_special=False)
            place = len(tokenizer.decode(log.tokens.array[begin:at].tolist(), skip_special=False))
            message = message_at(turn.messages, text, place)
            role = None if message is None else str(turn.messages[message]["role"])
            return Difference(at, number, message, role, before, now)
    return Difference(at, None, None, None, before, now)


def message_at(messages: Sequence[Message], text: str, place: int) -> int | None:
    """Which message a character of their rendered text lies in: what is before a message's own text belongs to it."""
    done = 0
    for number, message in enumerate(messages):
        content = str(message.get("content") or "")
        begin = text.find(content[:OPENING], done)  # the text may end within it
        if begin >= 0:
            done = begin + len(content)
            if place < done:
                return number
    return len(messages) - 1 if messages else None


SENTENCES = {
    Cause.NEW: "only what is new was computed",
    Cause.FIRST: "it was the first answer of the session here",
    Cause.CHANGED: "the conversation is another one{where}",
    Cause.DROPPED_TURNS: "the oldest turns were dropped to fit the context",
    Cause.EVICTED: "its KV was evicted{when}{whom}",
    Cause.RESTART: "its KV went with a process or an engine core that was restarted",
    Cause.OTHER_WORKER: "it has moved to another engine core",
    Cause.WEIGHTS: "the weights were replaced",
    Cause.FAILURE: "its KV was lost with a step that failed",
    Cause.NOT_REUSED: "the engine reuses no KV, or its model can't go on in the middle of it",
    Cause.UNKNOWN: "the engine runs in another process and does not tell",
}


def in_words(cost: TurnCost, to: str | None = None) -> str:
    """One sentence; `to` is how the request is to be called that needed the room."""
    difference = cost.difference
    words = SENTENCES[cost.cause].format(
        where=""
        if difference is None
        else f" from token {difference.at} on: {difference.now!r:.60}, not {difference.before!r:.60}",
        when="" if cost.lost_s is None else f" {cost.lost_s:.1f} s before",
        whom="" if to is None else f" for {to}",
    )
    counts = f"{cost.num_cached} of {cost.num_prompt} tokens were there, {cost.num_prefilled} were computed"
    return f"{counts}: {words}"
