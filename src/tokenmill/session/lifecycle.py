"""`Lifecycle`: which model a service has, from loading to closing, and the store whose sessions come and go with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from tokenmill.contract import ModelHandle
from tokenmill.engine.client import EngineClient
from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.errors import EngineDead, ModelNotLoaded
from tokenmill.outputs import FinishReason
from tokenmill.session.loaded import LoadedModel
from tokenmill.session.routing import Policy
from tokenmill.session.store import SessionStore, Stored
from tokenmill.session.upkeep import Upkeep

SETTLE_S = 5.0
"""What answers may take to end when the model goes."""
Source: TypeAlias = "str | ModelHandle | AsyncLLM"


class Lifecycle:
    """One model at a time, or none. A store that was given as a directory is closed at the end."""

    def __init__(self, upkeep: Upkeep, policy: Policy, store: SessionStore | str | Path | None) -> None:
        self._upkeep = upkeep
        self._policy: Policy = policy
        self._owns_store = isinstance(store, str | Path)
        self.store = SessionStore(store) if isinstance(store, str | Path) else store
        self._loaded: LoadedModel | None = None
        self._changing = asyncio.Lock()
        """Around loading, reloading and closing: one of them at a time."""
        self._is_closed = False

    @property
    def model(self) -> LoadedModel:
        """The model that is loaded, for whatever is to be done with its sessions."""
        if self._is_closed:
            raise EngineDead("the service was closed")
        if self._loaded is None:
            raise ModelNotLoaded("no model is loaded; call load_model_with_workers first")
        return self._loaded

    @property
    def num_sessions(self) -> int:
        return 0 if self._loaded is None else len(self._loaded.master.sessions)

    def watch_idle(self) -> None:
        """From now on end sessions whose time has come."""
        if self._loaded is not None:
            self._upkeep.watch_idle(self._loaded)

    # -- loading ------------------------------------------------------------------------------------------------------

    def open(self, source: Source, options: EngineOptions, num_workers: int, client: EngineClient | None) -> None:
        """Load the first model, where there is no event loop yet. If that fails the store is closed."""
        try:
            loaded = LoadedModel(source, options, num_workers, self._policy, client, self.store)
            try:
                self._adopt(loaded, loaded.stored())
            except BaseException:
                loaded.free()
                raise
        except BaseException:
            self._close_store()
            raise

    async def load(self, source: Source, options: EngineOptions, num_workers: int) -> None:
        """Load a model in place of any before it."""
        async with self._changing:
            await self._load(source, options, num_workers)

    async def reload(self) -> None:
        """Close the model and open it again as it was."""
        before = self.model
        async with self._changing:
            await self._unload()
            await self._load(before.source, before.options, before.num_workers)

    async def _load(self, source: Source, options: EngineOptions, num_workers: int) -> None:
        loaded = await asyncio.to_thread(LoadedModel, source, options, num_workers, self._policy, None, self.store)
        await self._unload()
        if self._is_closed:
            await loaded.close()
            raise EngineDead("the service was closed")
        try:
            self._adopt(loaded, await asyncio.to_thread(loaded.stored))
        except BaseException:
            self._loaded = None
            await loaded.close()
            raise
        self._upkeep.watch_idle(loaded)

    def _adopt(self, loaded: LoadedModel, stored: Sequence[Stored]) -> None:
        """Use a model, and go on with its sessions, but for those whose time went by meanwhile."""
        self._loaded, ttl_s = loaded, self._upkeep.limits.ttl_s
        for one in stored:
            session = loaded.adopt(one)
            self._upkeep.room.take(session.session_id, session.num_bytes)
            if ttl_s is not None and one.idle_s >= ttl_s:
                self._upkeep.end(loaded, session)

    # -- closing ------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Let the model and the store go, for good. Goes on to its end, whoever stops waiting."""
        self._is_closed = True
        self._upkeep.stop()
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        async with self._changing:
            await self._unload()
        await asyncio.to_thread(self._close_store)

    def _close_store(self) -> None:
        if self.store is not None and self._owns_store:
            self.store.close()

    async def _unload(self) -> None:
        """Let the model go. Sessions end; those in a store only here."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        loaded.is_leaving = True
        self._upkeep.stop()
        if loaded.keeper is not None:
            await self._settle_all(loaded)
            await loaded.keeper.close()
        for session in list(loaded.master.sessions.values()):
            self._upkeep.end(loaded, session, for_good=loaded.keeper is None)
        await loaded.close()

    @staticmethod
    async def _settle_all(loaded: LoadedModel) -> None:
        """End the answers that run, and wait until what they have said is in the store."""
        running = [session.live for session in loaded.master.sessions.values() if session.live is not None]
        for live in running:
            live.cancel(FinishReason.SHUTDOWN)
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                for live in running:
                    async for _ in live.read(len(live.token_ids)):
                        pass
