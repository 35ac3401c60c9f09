"""What a service is told about limits, and what it tells about sessions. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.session.session import Session

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits of sessions."""

    max_log_bytes: int = 1024 * MIB
    """Total log size of all sessions; their number is not limited otherwise."""
    ttl_s: float | None = None
    """End a session after this many idle seconds; None for never."""
    stall_timeout_s: float | None = 30.0
    """An answer that is not read for this long ends with `timeout`; None for never."""
    max_unread_bytes: int = MIB
    """An answer with more unread bytes ends with `timeout`."""


@dataclass(frozen=True)
class TurnInfo:
    """A turn, as `get` shows it."""

    kind: str
    messages: tuple[Mapping[str, Any], ...]
    num_tokens: int | None
    finish_reason: str | None


@dataclass(frozen=True)
class SessionInfo:
    """A session, as `get` and `list` show it."""

    session_id: str
    key: str
    """Whose it is."""
    state: str
    core: int
    num_tokens: int
    turns: tuple[TurnInfo, ...]
    pending: tuple[Mapping[str, Any], ...] = ()
    """Messages that wait for an answer: an input turn from the next `generate_stream` on."""
    durable: bool | None = None
    """Is all that was acknowledged on the disk? None: it is not meant to be."""
    problem: str | None = None
    """Why it is not."""
    title: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_at: float = 0.0
    """In Unix time, as the next one."""
    used_at: float = 0.0


@dataclass(frozen=True)
class EndedSession:
    """What became of a session that was ended."""

    session_id: str
    durable: bool | None
    """Is it gone from the disk, too? If not, it is there again after a restart, unless a later attempt succeeds.

    None: it was not on the disk.
    """
    problem: str | None = None
    """Why it is not gone."""


def info_of(session: Session, *, has_store: bool = False) -> SessionInfo:
    """A snapshot of a session."""
    turns = []
    for i, turn in enumerate(session.log.turns):
        begin = session.log.begin_of(i)
        count = None if turn.end is None or begin is None else turn.end - begin
        turns.append(TurnInfo(turn.kind, turn.messages, count, turn.finish_reason))
    return SessionInfo(
        session.session_id,
        session.options.key,
        session.state.value,
        session.core,
        len(session.log),
        tuple(turns),
        session.inbox,
        durable=session.problem is None if has_store and session.options.is_kept else None,
        problem=session.problem,
        title=session.title,
        metadata=session.metadata,
        created_at=session.created_at,
        used_at=session.used_at,
    )
