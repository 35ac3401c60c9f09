"""`Upkeep`: what all sessions of a service take and how long they stay; in the store, too. For its event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from tokenmill.outputs import FinishReason
from tokenmill.session.info import SessionLimits
from tokenmill.session.keeping import until_durable
from tokenmill.session.loaded import LoadedModel
from tokenmill.session.master import TextWork
from tokenmill.session.room import LogRoom
from tokenmill.session.session import Session, SessionState
from tokenmill.text.workers import TextWorkers

T = TypeVar("T")


class Upkeep:
    """One for each service, whatever model it has."""

    def __init__(self, limits: SessionLimits, texts: TextWorkers) -> None:
        self.limits = limits
        self.texts = texts
        """Where long input is rendered and tokenized."""
        self.room = LogRoom(limits.max_log_bytes)
        self._expiry: asyncio.Task[None] | None = None

    # -- use ----------------------------------------------------------------------------------------------------------

    def used(self, loaded: LoadedModel, session: Session) -> None:
        """Something was done with it: note when, and what its log costs now."""
        session.last_used, session.used_at = asyncio.get_running_loop().time(), time.time()
        self.room.take(session.session_id, session.num_bytes)
        self.watch_idle(loaded)

    async def change(self, loaded: LoadedModel, session_id: str, operation: Callable[[Session], T]) -> T:
        """Have a session changed when its turn comes; the result, once that is durable or known not to be."""

        def change(session: Session) -> tuple[T, asyncio.Future[bool] | None]:
            return operation(session), self._changed(loaded, session)

        result, saving = await loaded.master.ask(session_id, change)
        await until_durable(saving)
        return result

    async def change_text(
        self, loaded: LoadedModel, session_id: str, num_bytes: int, operation: Callable[[Session], T]
    ) -> T:
        """As `change`, with an operation that renders and tokenizes: so many bytes, and what was said before."""

        def change(session: Session, result: T) -> tuple[T, asyncio.Future[bool] | None]:
            return result, self._changed(loaded, session)

        work = TextWork(self.texts, loaded.opened.text, num_bytes, operation)
        result, saving = await loaded.master.ask(session_id, change, prepare=work)
        await until_durable(saving)
        return result

    def _changed(self, loaded: LoadedModel, session: Session) -> asyncio.Future[bool] | None:
        self.used(loaded, session)
        return save(loaded, session)

    # -- beginning and ending -----------------------------------------------------------------------------------------

    async def begin(self, loaded: LoadedModel, session: Session) -> str:
        """There is a new session; its name, once it is durable or known not to be."""
        loaded.master.add(session)
        self.used(loaded, session)
        await self.until_kept(loaded, [session])
        return session.session_id

    async def until_kept(self, loaded: LoadedModel, made: Sequence[Session]) -> None:
        """Wait until new sessions are durable, or known not to be. Whoever leaves before that never had them."""
        savings = [save(loaded, session) for session in made]
        try:
            for saving in savings:
                await until_durable(saving)
        except asyncio.CancelledError:
            for session in made:
                self.end(loaded, session)
            raise

    def end(self, loaded: LoadedModel, session: Session, *, for_good: bool = True) -> Future[None] | None:
        """Give a session up; unless it is `for_good` it stays in the store. Gives what says when that is durable."""
        if session.state is SessionState.ENDED:
            return None
        if session.live is not None:
            session.live.cancel(FinishReason.SHUTDOWN if loaded.is_leaving else FinishReason.CANCELLED)
        session.state = SessionState.ENDED
        loaded.master.remove(session)
        loaded.routing.leave(session.core, session.system)
        self.room.give_up(session.session_id)
        loaded.client.release(session.session_id)
        if loaded.keeper is None or not session.options.is_kept:
            return None
        if for_good:
            return loaded.keeper.end(session)
        loaded.keeper.let_go(session)
        return None

    # -- idle ones ----------------------------------------------------------------------------------------------------

    def watch_idle(self, loaded: LoadedModel) -> None:
        """From now on end sessions whose time has come: those of a store have waited before anybody uses one."""
        is_watched = self._expiry is not None and not self._expiry.done()
        if self.limits.ttl_s is not None and not is_watched and not loaded.is_leaving:
            expiring = self._expire(loaded, self.limits.ttl_s)
            self._expiry = asyncio.create_task(expiring, name="tokenmill-expiry")

    async def _expire(self, loaded: LoadedModel, ttl_s: float) -> None:
        while not loaded.is_leaving:
            await asyncio.sleep(ttl_s / 4)
            self.end_idle(loaded, ttl_s)

    def end_idle(self, loaded: LoadedModel, seconds: float) -> int:
        """End the sessions that nobody has used for so long and that are not answering; how many."""
        now = asyncio.get_running_loop().time()
        idle = [
            session
            for session in loaded.master.sessions.values()
            if session.state is not SessionState.GENERATING and now - session.last_used >= seconds
        ]
        for session in idle:
            self.end(loaded, session)
        return len(idle)

    def stop(self) -> None:
        """The sessions of a model that goes, or of a service, need no watching."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None


def save(loaded: LoadedModel, session: Session) -> asyncio.Future[bool] | None:
    """Put what a session is now into the store, if it is to be there; one that has ended is not put back."""
    if loaded.keeper is None or not session.options.is_kept or session.state is SessionState.ENDED:
        return None
    return loaded.keeper.save(session)
