"""`SessionRecord`: all that a session is, without what only a running process needs; as JSON and ids, and back.

The store keeps records, and session files carry them. What is read back is checked: it may come from anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from tokenmill.contract import IntArray
from tokenmill.errors import InvalidRequest, SessionFileError
from tokenmill.params import SamplingParams
from tokenmill.session.log import Kind, SharedList, TokenLog, Tokens, Turn
from tokenmill.session.session import (
    OVERFLOW_KEEP,
    LastAnswer,
    Overflow,
    Session,
    SessionOptions,
    SessionState,
    check_metadata,
    check_overflow_keep,
    check_template_options,
    check_title,
)
from tokenmill.text.messages import Message, check_messages

Json = dict[str, Any]
MAX_TIME = 1 << 40
"""In seconds."""


@dataclass(frozen=True)
class SessionRecord:
    """A session at one moment. Nothing in it changes any more: any thread may read it."""

    session_id: str
    head: Json
    """Everything but its log."""
    tokens: Tokens
    turns: SharedList[Turn]


def record_of(session: Session) -> SessionRecord:
    """A snapshot, for the event loop. Nothing is copied: logs are values."""
    options = session.options
    head = {
        "system": session.system,
        "sampling": options.sampling,
        "overflow": options.overflow,
        "overflow_keep": options.overflow_keep,
        "template_options": options.template_options,
        "key": options.key,
        "namespace": options.namespace,
        "priority": options.priority,
        "inbox": session.inbox,
        "attempt": session.attempt,
        "num_forks": session.num_forks,
        "last_answer": session.last_answer,
        "title": session.title,
        "metadata": session.metadata,
        "created_at": session.created_at,
        "used_at": session.used_at,
    }
    return SessionRecord(session.session_id, head, session.log.tokens, session.log.turns)


# -- writing ----------------------------------------------------------------------------------------------------------


def head_json(record: SessionRecord) -> Json:
    """The head as JSON values; `InvalidRequest` for a namespace that is none."""
    head = record.head
    return {
        **head,
        "sampling": asdict(head["sampling"]),
        "template_options": dict(head["template_options"]),
        "namespace": _plain(head["namespace"]),
        "inbox": [dict(message) for message in head["inbox"]],
        "last_answer": None if head["last_answer"] is None else asdict(head["last_answer"]),
        "metadata": dict(head["metadata"]),
    }


def turn_json(turn: Turn) -> Json:
    return {
        "kind": turn.kind,
        "messages": [dict(message) for message in turn.messages],
        "end": turn.end,
        "ended_with": turn.ended_with,
        "finish_reason": turn.finish_reason,
        "changes": turn.changes,
        "is_replayable": turn.is_replayable,
    }


def _plain(namespace: Hashable) -> Any:
    """Tuples become lists; what JSON does not know would not be the same when it comes back."""
    if namespace is None or isinstance(namespace, str | int):
        return namespace
    if isinstance(namespace, tuple):
        return [_plain(one) for one in namespace]
    raise InvalidRequest(f"a namespace of {type(namespace).__name__} can't be written down; use texts and tuples")


# -- reading ----------------------------------------------------------------------------------------------------------


def restored(record: SessionRecord, core: int, now: float) -> Session:
    """The session that a record is of. Its renderer is its service's to give."""
    head = record.head
    options = SessionOptions(
        sampling=head["sampling"],
        overflow=head["overflow"],
        overflow_keep=head["overflow_keep"],
        template_options=head["template_options"],
        key=head["key"],
        namespace=head["namespace"],
        priority=head["priority"],
    )
    session = Session(record.session_id, core, options, head["system"], now)
    session.log = TokenLog.of(record.tokens, record.turns)
    session.inbox = head["inbox"]
    session.attempt, session.num_forks = head["attempt"], head["num_forks"]
    session.last_answer = head["last_answer"]
    session.title, session.metadata = head["title"], head["metadata"]
    session.used_at = session.used_at if head["used_at"] is None else head["used_at"]
    session.created_at = session.used_at if head["created_at"] is None else head["created_at"]
    session.state = SessionState.APPENDING if session.is_unanswered else SessionState.IDLE
    return session


def read_record(session_id: str, head: Any, turns: Any, tokens: IntArray, vocab_size: int) -> SessionRecord:
    """A record from what was written; `SessionFileError` says what is wrong with it."""
    try:
        if not isinstance(head, Mapping) or not isinstance(turns, Sequence):
            raise InvalidRequest("it has no head or no turns")
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(outside):
            raise InvalidRequest(f"token {outside[0]} is outside the vocabulary of {vocab_size}")
        json.dumps([head, turns], ensure_ascii=False).encode()  # what is no valid Unicode could be written nowhere
        read = SharedList([_turn(turn) for turn in turns])
        _check_ends(read, len(tokens))
        return SessionRecord(session_id, _head(head), Tokens(tokens), read)
    except (InvalidRequest, KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        raise SessionFileError(f"the session can't be read: {what}") from None


def _head(head: Mapping[str, Any]) -> Json:
    sampling = {**head["sampling"]}
    return {
        "system": _text_or_none("system", head["system"]),
        "sampling": SamplingParams(**sampling),
        "overflow": _one_of("overflow", head["overflow"], get_args(Overflow)),
        "overflow_keep": check_overflow_keep(head.get("overflow_keep", OVERFLOW_KEEP)),  # older records have none
        "template_options": check_template_options(head["template_options"]),
        "key": str(head["key"]),
        "namespace": _hashable(head["namespace"]),
        "priority": _count("priority", head["priority"], least=None),
        "inbox": _messages(head["inbox"]),
        "attempt": _count("attempt", head["attempt"]),
        "num_forks": _count("num_forks", head["num_forks"]),
        "last_answer": _last_answer(head.get("last_answer")),
        # Sessions of earlier versions have none of these; files have no times.
        "title": check_title(head.get("title")),
        "metadata": check_metadata(head.get("metadata")),
        "created_at": _time("created_at", head.get("created_at")),
        "used_at": _time("used_at", head.get("used_at")),
    }


def _last_answer(answer: Mapping[str, Any] | None) -> LastAnswer | None:
    if answer is None:
        return None
    return LastAnswer(str(answer["request_id"]), _count("num_tokens", answer["num_tokens"]))


def _turn(turn: Mapping[str, Any]) -> Turn:
    return Turn(
        _one_of("kind", turn["kind"], get_args(Kind)),
        _messages(turn["messages"]),
        None if turn["end"] is None else _count("end", turn["end"]),
        None if turn["ended_with"] is None else _count("ended_with", turn["ended_with"]),
        _text_or_none("finish_reason", turn["finish_reason"]),
        None if turn["changes"] is None else _changes(turn["changes"]),
        _one_of("is_replayable", turn.get("is_replayable", True), (True, False)),  # older records do not say
    )


def _changes(changes: Mapping[str, Any]) -> Json:
    """Fields of `SamplingParams`, as they are there: JSON has no tuples and no numbers for keys."""
    params = SamplingParams(**changes)
    return {name: getattr(params, name) for name in changes}


def _check_ends(turns: Sequence[Turn], num_tokens: int) -> None:
    """Turns follow each other, and the last one ends where the log does."""
    ends = [turn.end for turn in turns if turn.end is not None]
    if ends != sorted(ends) or (ends[-1] if ends else 0) != num_tokens:
        raise InvalidRequest(f"its turns do not end where its {num_tokens} tokens do")


def _messages(given: Any) -> tuple[Message, ...]:
    return tuple(check_messages(given)) if given else ()


def _hashable(value: Any) -> Hashable:
    return tuple(_hashable(one) for one in value) if isinstance(value, list) else _name(value)


def _name(value: Any) -> Hashable:
    if value is not None and not isinstance(value, str | int):
        raise InvalidRequest("its namespace is no text")
    return value


def _text_or_none(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"{name} is no text")
    return value


def _count(name: str, value: Any, least: int | None = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise InvalidRequest(f"{name} is no number that can be")
    return value


def _time(name: str, value: Any) -> float | None:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < MAX_TIME):
        return value
    raise InvalidRequest(f"{name} must be a Unix time, not {value!r:.40}")


def _one_of(name: str, value: Any, known: Sequence[Any]) -> Any:
    if value not in known:
        raise InvalidRequest(f"{name} is {value!r:.40}; known: {', '.join(map(repr, known))}")
    return value
