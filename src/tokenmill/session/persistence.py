"""`Persistence`: which state of a model's sessions is in the store, and when it is durable. For the event loop.

A change is queued for the store when it is made, in order, and acknowledged when it is on disk. If that fails (the disk
is full, the store is read-only) the session goes on in memory and reports it; the write is retried after the next one
that succeeds. KV bytes are written lazily, once a session has been idle for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from tokenmill.contract import IntArray, Model
from tokenmill.engine.client import EngineClient
from tokenmill.engine.cost_model import ENOUGH, LineFit
from tokenmill.errors import EngineDead, SessionMoved, TokenmillError
from tokenmill.session.records import Fingerprint, record_of
from tokenmill.session.session import Session, SessionState
from tokenmill.session.store import Scope, Store

log = logging.getLogger(__name__)

MIN_KV_TOKENS = 64
"""Shorter logs are replayed: bytes would win little or nothing. docs/durability.md has what was measured."""
QUIET_S = 5.0
"""KV of a session is written after this many idle seconds."""
FETCH_AGAIN = 16
"""One of so many is fetched from another server although it is predicted not to pay off."""
NUM_READERS = 4
FLUSH_S = 5.0
"""What writing KV may take when the service is closed."""


class Persistence:
    """One for each model that a service with a store has."""

    def __init__(
        self,
        store: Store,
        fingerprint: Fingerprint,
        model: Model,
        client: EngineClient,
        ttl_s: float | None,
        on_moved: Callable[[Session], None],
    ) -> None:
        self.store = store
        self.scope = Scope(fingerprint.of_log, model.info.vocab_size, ttl_s)
        """Which of the store's sessions are this model's."""
        self._on_moved = on_moved
        """Told of a session that another server has taken over."""
        self._fingerprint = fingerprint
        self._model = model
        self._client = client
        self.min_kv_tokens = MIN_KV_TOKENS
        self._unsaved: dict[str, Session] = {}
        """Sessions whose latest state could not be written."""
        self._without_kv: OrderedDict[str, Session] = OrderedDict()
        """Sessions whose KV on disk is not that of their log, longest waiting first."""
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="tokenmill-kv")
        """For KV bytes, which may be long in coming: nothing else waits for these threads."""
        self._fetches = LineFit()
        """What it took to bring KV here from other servers, by its number of tokens..."""
        self._num_replayed = 0
        """...and how often that was predicted to take longer than computing it."""
        self._has_work = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None

    # -- logs ---------------------------------------------------------------------------------------------------------

    def save(self, session: Session) -> asyncio.Future[bool]:
        """Put what a session is now into the store: True once that is durable. Also told as its `problem`."""
        if self.store.is_shared and not session.epoch:
            session.epoch = 1
        saving = self.store.save(
            record_of(session), self._fingerprint.of_log, session.epoch, is_new=not session.is_stored
        )
        session.num_saving += 1
        told = asyncio.get_running_loop().create_future()
        asyncio.wrap_future(saving).add_done_callback(lambda done: self._saved(session, done, told))
        return told

    def _saved(self, session: Session, done: asyncio.Future[None], told: asyncio.Future[bool]) -> None:
        error = done.exception()
        session.num_saving -= 1
        if error is None:
            session.problem, session.is_stored = None, True
            self._unsaved.pop(session.session_id, None)
            self._try_again()
        elif isinstance(error, SessionMoved):
            session.problem = str(error)
            self._on_moved(session)
        elif session.state is not SessionState.ENDED:
            if session.problem is None:
                log.warning("session %s is not durable: %s", session.session_id, error)
            session.problem = str(error)
            self._unsaved[session.session_id] = session
        if not told.done():
            told.set_result(error is None)

    def _try_again(self) -> None:
        """Something could be written: so may be what could not."""
        waiting, self._unsaved = self._unsaved, {}
        for session in waiting.values():
            self.save(session)

    def end(self, session: Session) -> Future[None]:
        """The session is over: nothing of it is kept."""
        self._forget(session)
        session.is_dropped = True
        return self.store.delete(session.session_id, session.epoch)

    def let_go(self, session: Session) -> None:
        """The session stays in the store, for any server; nothing changes there if another one has it already."""
        self._forget(session)
        self.store.let_go(session.session_id, session.epoch)

    def _forget(self, session: Session) -> None:
        self._unsaved.pop(session.session_id, None)
        self._without_kv.pop(session.session_id, None)

    # -- KV -----------------------------------------------------------------------------------------------------------

    async def warm(self, session: Session) -> None:
        """Bring KV back to the engine, for a session that comes from the store. Once."""
        source, session.kv_source = session.kv_source, None
        tokens = session.log.tokens.array
        if source is None or len(tokens) < self.min_kv_tokens:
            return
        if source.is_remote and not await self._is_fetched(session, len(tokens)):
            return
        began = time.monotonic()
        reading = asyncio.get_running_loop().run_in_executor(self._readers, source.read, self._fingerprint.form, tokens)
        saved = await reading
        if saved is None or saved.num_tokens < self.min_kv_tokens or session.state is SessionState.ENDED:
            return
        await import_kv(self._client, self._model, session, tokens[: saved.num_tokens], saved.state)
        if source.is_remote:
            self._fetches.observe(saved.num_tokens, time.monotonic() - began)

    async def _is_fetched(self, session: Session, num_tokens: int) -> bool:
        """Is KV on another server predicted to be here before it is computed? Unknown costs are found out."""
        if self._fetches.num_observed < ENOUGH:
            return True
        try:
            replay_s = await asyncio.wrap_future(self._client.replay_s(session.core, num_tokens))
        except EngineDead:
            return False
        line = self._fetches.line
        if replay_s is None or line.entry + num_tokens * line.each < replay_s:
            return True
        self._num_replayed += 1
        return self._num_replayed % FETCH_AGAIN == 0

    def note_answered(self, session: Session) -> None:
        """Its KV is worth writing, when there is time."""
        kv = self.store.kv
        if kv is None or kv.max_bytes <= 0 or self.store.is_read_only or len(session.log) < self.min_kv_tokens:
            return
        self._without_kv[session.session_id] = session
        self._without_kv.move_to_end(session.session_id)
        self._has_work.set()
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_all(), name="tokenmill-kv")

    async def _write_all(self) -> None:
        while True:
            await self._has_work.wait()
            session = next(iter(self._without_kv.values()), None)
            if session is None:
                self._has_work.clear()
                continue
            quiet_at = session.last_used + QUIET_S
            await asyncio.sleep(max(0.0, quiet_at - time.monotonic()))
            if session.session_id in self._without_kv and session.last_used + QUIET_S <= time.monotonic():
                self._without_kv.pop(session.session_id)
                await self._write(session)

    async def _write(self, session: Session) -> None:
        if session.state in (SessionState.GENERATING, SessionState.ENDED):
            return
        try:
            found = await export_kv(self._client, self._model, session)
        except TokenmillError as error:  # its core is gone, and its KV with it
            log.info("KV of session %s is not kept: %s", session.session_id, error)
            return
        if found is not None and not session.is_dropped:
            await asyncio.to_thread(self._write_file, session, *found)

    def _write_file(self, session: Session, tokens: IntArray, state: bytes) -> None:
        """On a thread. If the session ends meanwhile, its file is removed here or by the store, whichever is later."""
        kv = self.store.kv
        if kv is not None:
            kv.write(session.session_id, self._fingerprint.form, tokens, state, session.used_at)
            if session.is_dropped:
                kv.remove(session.session_id)

    async def close(self) -> None:
        """Write the KV that waits, as far as there is time. Logs are safe already."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                while self._without_kv:
                    await self._write(self._without_kv.popitem()[1])


# -- bytes of the engine's --------------------------------------------------------------------------------------------


async def export_kv(
    client: EngineClient, model: Model, session: Session, *, at_once: bool = False
) -> tuple[IntArray, bytes] | None:
    """KV that the engine has of a session's log: ids and bytes, if it is of weights as they are in the files."""
    found = await asyncio.wrap_future(client.export_kv(session.core, session.session_id, at_once=at_once))
    # Weights that were replaced are in no file. Looked at afterwards: before, it could have been too early.
    if found is None or model.weights_version != 0:
        return None
    return found


async def import_kv(client: EngineClient, model: Model, session: Session, tokens: IntArray, state: bytes) -> bool:
    """Give a session's KV to its engine core. What does not fit is dropped: the log will be replayed."""
    if model.weights_version != 0:
        return False
    try:
        return await asyncio.wrap_future(client.import_kv(session.core, tokens.copy(), state, session.hints))
    except TokenmillError:
        return False


async def until_durable(saving: asyncio.Future[bool] | None) -> None:
    """Wait until a change is on the disk, or known not to be."""
    if saving is not None:
        await asyncio.shield(saving)
