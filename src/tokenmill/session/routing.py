"""Where commands and sessions go: the one queue of a model's commands, and the engine core of each new session.

Every command enters one queue with one consumer. It finds the session, keeps the order of its operations, and answers
each command once, with its result or an error. Long texts are rendered and tokenized off the event loop, on a copy of
the session, while other sessions go on. Tokens do not pass through here: they go from an engine core to the readers of
the answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

from tokenmill.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    SessionBusy,
    SessionEnded,
    SessionMoved,
    SessionNotFound,
    TokenmillError,
)
from tokenmill.session.session import Session, SessionState
from tokenmill.text.model_text import ModelText
from tokenmill.text.workers import TextWorkers

T = TypeVar("T")

# -- commands ----------------------------------------------------------------------------------------------------------

MAX_WAITING = 8
"""Operations that may wait for one session."""
MAX_REMEMBERED = 10_000
"""Ended sessions whose names are remembered, to tell "ended" from "never was"."""
MAX_MOVES = 3
"""How often an operation follows a session that another server takes away."""


@dataclass(frozen=True, slots=True)
class TextWork:
    """The part of an operation that renders and tokenizes text."""

    workers: TextWorkers
    text: ModelText
    num_bytes: int
    """Of the new text; the part of the session's history that is rendered with it comes on top."""
    work: Callable[[Session], Any]
    """Runs on any thread, on a copy of the session; if it succeeds, the session takes over the copy's state."""

    def num_bytes_in(self, session: Session) -> int:
        """Approximate size of the text. A session with a long history never runs inline: all of it may be rendered."""
        num_bytes = self.num_bytes + session.num_text_bytes(self.text)
        inline_bytes = self.workers.inline_bytes
        return num_bytes if session.num_bytes < inline_bytes else max(num_bytes, inline_bytes)


@dataclass(frozen=True, slots=True)
class Command:
    """An operation on a session, and the future that gets its result."""

    session_id: str
    operation: Callable[..., Any]
    answer: asyncio.Future[Any]
    at_once: bool
    """Run it even while the session generates, such as a cancel."""
    prepare: TextWork | None
    """Done before the operation, which gets its result."""


class Shelf(Protocol):
    """Where sessions come from that are not in memory."""

    async def open(self, session_id: str, *, may_be_stale: bool = False) -> None:
        """Have a session in memory, if there is one: as it is now, unless it `may_be_stale`."""
        ...

    def open_now(self, session_id: str) -> None:
        """The same for callers that can't wait."""
        ...


class CommandQueue:
    """Owns all sessions that are in memory. Everything happens on one event loop."""

    def __init__(self, shelf: Shelf | None = None) -> None:
        self.sessions: dict[str, Session] = {}
        self._shelf = shelf
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._ingress: asyncio.Queue[Command | str] = asyncio.Queue()
        """Commands, and the names of sessions that are free again."""
        self._consumer: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._preparing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def ask(
        self,
        session_id: str,
        operation: Callable[..., T],
        *,
        at_once: bool = False,
        undo: Callable[[T], object] | None = None,
        prepare: TextWork | None = None,
        is_fenced: bool = False,
    ) -> T:
        """Run an operation on a session, after those that were queued before it; the result.

        If it `is_fenced`, its result is written before anyone sees it, which fails where another server has taken the
        session; so that needs to be found out beforehand only for an operation that has failed.

        `operation` gets the session, and the result of `prepare` where that is done first; if either fails, the session
        is as it was. If the caller is cancelled first, nothing is done. If it is cancelled after the operation, `undo`
        gets the result.
        """
        loop = asyncio.get_running_loop()
        for _ in range(MAX_MOVES):
            if self._shelf is not None:
                await self._shelf.open(session_id, may_be_stale=is_fenced)
            if self._closed:
                raise EngineDead("the service was closed")
            if self._consumer is None:
                self._loop = loop
                self._consumer = asyncio.create_task(self._consume(), name="tokenmill-commands")
            elif self._loop is not loop:
                raise InvalidRequest("a service must be used on the event loop of its first call")
            answer: asyncio.Future[T] = loop.create_future()
            self._ingress.put_nowait(Command(session_id, operation, answer, at_once, prepare))
            try:
                return await answer
            except SessionMoved:
                continue
            except TokenmillError:
                if not is_fenced or self._shelf is None or (known := self.sessions.get(session_id)) is None:
                    raise
                await self._shelf.open(session_id)
                if self.sessions.get(session_id) is known:
                    raise
            except asyncio.CancelledError:
                if undo is not None and not answer.cancelled() and answer.exception() is None:
                    undo(answer.result())
                raise
        raise SessionMoved(f"session {session_id} is used on several servers at once")

    def add(self, session: Session) -> None:
        self.sessions[session.session_id] = session

    def remove(self, session: Session) -> None:
        """The session has ended: its waiting commands fail with `SessionEnded`."""
        self._ended[session.session_id] = None
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._take_out(session, SessionEnded(f"session {session.session_id} has ended"))

    def put_away(self, session: Session) -> None:
        """The session is no longer in memory: commands that wait look for it again."""
        self._take_out(session, SessionMoved(f"session {session.session_id} has moved"))

    def _take_out(self, session: Session, error: Exception) -> None:
        self.sessions.pop(session.session_id, None)
        for command in session.waiting or ():
            _fail(command, error)
        session.waiting = None

    def forget_end(self, session_id: str) -> None:
        """It has not ended after all."""
        self._ended.pop(session_id, None)

    def has_ended(self, session_id: str) -> bool:
        return session_id in self._ended

    def note_free(self, session: Session) -> None:
        """Its answer is over: run the commands that wait for it."""
        if session.waiting:
            self._ingress.put_nowait(session.session_id)

    def find(self, session_id: str) -> Session:
        if not isinstance(session_id, str):
            raise SessionNotFound(f"a session id must be a string, not {type(session_id).__name__}")
        session = self.sessions.get(session_id)
        if session is None and session_id not in self._ended and self._shelf is not None:
            self._shelf.open_now(session_id)
            session = self.sessions.get(session_id)
        if session is not None:
            return session
        if session_id in self._ended:
            raise SessionEnded(f"session {session_id} has ended")
        raise SessionNotFound(f"no session {session_id!r}")

    async def close(self) -> None:
        """Fail the commands that are left, and stop."""
        self._closed = True
        if self._consumer is not None:
            tasks = [self._consumer, *self._preparing]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        left = [self._ingress.get_nowait() for _ in range(self._ingress.qsize())]
        waiting = [command for session in self.sessions.values() for command in session.waiting or ()]
        for command in [*left, *waiting]:
            if isinstance(command, Command):
                _fail(command, EngineDead("the service was closed"))

    # -- the consumer -------------------------------------------------------------------------------------------------

    async def _consume(self) -> None:
        while True:
            item = await self._ingress.get()
            if isinstance(item, Command):
                self._route(item)
            elif item in self.sessions:
                self._go_on(self.sessions[item])

    def _route(self, command: Command) -> None:
        try:
            session = self.find(command.session_id)
        except Exception as error:  # of the store, too: the consumer must go on for the other sessions
            _fail(command, error)
            return
        if session.waiting:  # some may have left
            session.waiting = deque(one for one in session.waiting if not one.answer.cancelled())
        if command.at_once or (not session.is_busy and not session.waiting):
            self._carry_out(session, command)
        elif session.waiting is not None and len(session.waiting) >= MAX_WAITING:
            _fail(
                command,
                SessionBusy(f"{MAX_WAITING} operations are queued for session {session.session_id}; wait for them"),
            )
        else:
            session.waiting = session.waiting or deque()
            session.waiting.append(command)

    def _go_on(self, session: Session) -> None:
        """Run waiting commands in order, until the next answer begins."""
        while session.waiting and not session.is_busy and session.state is not SessionState.ENDED:
            self._carry_out(session, session.waiting.popleft())
        if not session.waiting:
            session.waiting = None

    def _carry_out(self, session: Session, command: Command) -> None:
        if command.answer.cancelled():
            return  # the caller has gone
        prepare = command.prepare
        num_bytes = 0 if prepare is None else prepare.num_bytes_in(session)
        if prepare is not None and num_bytes >= prepare.workers.inline_bytes:
            session.is_preparing = True
            task = asyncio.create_task(self._prepare(session, command, prepare, num_bytes), name="tokenmill-prepare")
            self._preparing.add(task)
            task.add_done_callback(partial(self._end_preparing, session, command))
            command.answer.add_done_callback(lambda answer: task.cancel() if answer.cancelled() else None)
            return
        before = session.snapshot() if prepare is not None else None
        try:
            prepared = () if prepare is None else (prepare.work(session),)
            command.answer.set_result(command.operation(session, *prepared))
        except Exception as error:
            if before is not None:
                session.restore(before)
            _fail(command, error)

    async def _prepare(self, session: Session, command: Command, prepare: TextWork, num_bytes: int) -> None:
        """Prepare an operation on a copy of the session, and carry it out if the session and its client are there."""
        twin = session.copy()
        try:
            prepared = await prepare.workers.run(num_bytes, lambda: prepare.work(twin))
            if command.answer.cancelled():
                return
            if session.state is SessionState.ENDED:
                raise (SessionEnded if self.has_ended(session.session_id) else SessionMoved)(
                    f"session {session.session_id} has ended"
                )
            before = session.snapshot()
            session.restore(twin.snapshot())
            try:
                command.answer.set_result(command.operation(session, prepared))
            except BaseException:
                session.restore(before)
                raise
        except Exception as error:
            _fail(command, error)

    def _end_preparing(self, session: Session, command: Command, task: asyncio.Task[None]) -> None:
        """However it ended, and if it never began."""
        self._preparing.discard(task)
        session.is_preparing = False
        _fail(command, EngineDead("the service was closed"))  # unless it was answered or cancelled
        self.note_free(session)


def _fail(command: Command, error: Exception) -> None:
    if not command.answer.done():
        command.answer.set_exception(error)


# -- engine cores ------------------------------------------------------------------------------------------------------

Policy = Literal["round_robin", "least_loaded"]


class Routing(Protocol):
    def choose(self, opening: str | None, alive: Sequence[int]) -> int:
        """The core of a new session, one of those alive; `opening` is the system prompt it begins with."""
        ...

    def leave(self, core: int, opening: str | None) -> None:
        """A session of this core with this system prompt has ended."""
        ...

    def stay(self, core: int, opening: str | None) -> None:
        """A fork has joined the core of its parent."""
        ...


class RoundRobin:
    """One core after the other."""

    def __init__(self, num_cores: int) -> None:
        self._num_cores = num_cores
        self._next = 0

    def choose(self, opening: str | None, alive: Sequence[int]) -> int:  # noqa: ARG002
        in_turn = [*range(self._next, self._num_cores), *range(self._next)]
        core: int = next(core for core in in_turn if core in alive)
        self._next = (core + 1) % self._num_cores
        return core

    def leave(self, core: int, opening: str | None) -> None:
        """Loads are not counted."""

    def stay(self, core: int, opening: str | None) -> None:
        """Loads are not counted."""


class LeastLoaded:
    """The core with the fewest sessions, give or take `SLACK`; preferably one that has the system prompt in its KV."""

    SLACK = 2
    """A core that has the system prompt may have this many sessions more than the least loaded one."""

    def __init__(self, num_cores: int) -> None:
        self._loads = [0] * num_cores
        self._knows: Counter[tuple[str, int]] = Counter()

    def choose(self, opening: str | None, alive: Sequence[int]) -> int:
        least = min(self._loads[core] for core in alive)
        cores = [core for core in alive if self._loads[core] <= least + self.SLACK]
        known = [core for core in cores if opening is not None and self._knows[opening, core]]
        core = min(known or cores, key=lambda one: self._loads[one])
        self.stay(core, opening)
        return core

    def leave(self, core: int, opening: str | None) -> None:
        self._loads[core] -= 1
        if opening is not None:
            self._knows[opening, core] -= 1
            self._knows += Counter()  # without those that are zero

    def stay(self, core: int, opening: str | None) -> None:
        """A fork has joined a core."""
        self._loads[core] += 1
        if opening is not None:
            self._knows[opening, core] += 1


def make_routing(policy: Policy, num_cores: int) -> Routing:
    if policy == "round_robin":
        return RoundRobin(num_cores)
    if policy == "least_loaded":
        return LeastLoaded(num_cores)
    raise ConfigError(f"routing {policy!r} is not supported; supported: 'round_robin', 'least_loaded'")
