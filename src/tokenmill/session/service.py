"""`SessionService`: conversations over one model. The API of sessions; everything else here serves it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, Unpack

from tokenmill.core import ModelHandle
from tokenmill.engine.async_llm import AsyncLLM
from tokenmill.engine.client import EngineClient
from tokenmill.engine.opening import EngineOptions
from tokenmill.engine.request import Hints, context_overflow
from tokenmill.errors import (
    ConfigError,
    ContextOverflow,
    EngineDead,
    InvalidRequest,
    ModelNotLoaded,
    NotDurable,
    RequestFailed,
)
from tokenmill.outputs import ENDED_WELL, FinishReason
from tokenmill.params import SamplingParams
from tokenmill.session.explain import TurnCost, note_cost
from tokenmill.session.info import SessionInfo, SessionLimits, info_of
from tokenmill.session.keeping import until_durable
from tokenmill.session.live import Answer, Chunk, LiveTurn
from tokenmill.session.loaded import LoadedModel
from tokenmill.session.portable import write_whole
from tokenmill.session.room import LogRoom
from tokenmill.session.routing import Policy
from tokenmill.session.sampling import changed, of_fork
from tokenmill.session.session import (
    Input,
    Overflow,
    Session,
    SessionOptions,
    SessionState,
    check_template_options,
    whole_number,
)
from tokenmill.session.store import SessionStore, Stored
from tokenmill.session.transfer import exported, imported

T = TypeVar("T")
SETTLE_S = 5.0
"""What answers may take to end when the model goes."""
NAME_BYTES = 16
"""Of a session's name: nobody guesses one."""


class SessionService:
    """Sessions on a model; many at once, from one event loop.

    Without a model it waits for `load_model_with_workers`. The options are those of `EngineOptions`; `client` is an
    engine that runs elsewhere, of the same model. Over an `AsyncLLM` they share its engine with its other requests.
    With a `store`, or the directory of one, sessions outlive the service: what it acknowledges is on the disk.
    """

    _current: ClassVar[SessionService | None] = None

    def __init__(
        self,
        model: str | ModelHandle | AsyncLLM | None = None,
        *,
        num_workers: int = 1,
        routing: Policy = "round_robin",
        limits: SessionLimits = SessionLimits(),
        client: EngineClient | None = None,
        store: SessionStore | str | Path | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.limits = limits
        self._owns_store = isinstance(store, str | Path)
        self._store = SessionStore(store) if isinstance(store, str | Path) else store
        self._policy: Policy = routing
        self._loaded: LoadedModel | None = None
        self._room = LogRoom(limits.max_log_bytes)
        self._expiry: asyncio.Task[None] | None = None
        self._lifecycle = asyncio.Lock()
        """Around loading, reloading and closing: one of them at a time."""
        self._is_closed = False
        if model is not None:
            try:
                loaded = LoadedModel(model, options, num_workers, routing, client, self._store)
                try:
                    self._adopt(loaded, loaded.stored())
                except BaseException:
                    loaded.free()
                    raise
            except BaseException:
                self._close_store()
                raise

    # -- lifecycle ----------------------------------------------------------------------------------------------------

    @classmethod
    async def init(cls, model: str | ModelHandle | AsyncLLM | None = None, **options: Any) -> SessionService:
        """Make the service that `current` gives, in place of any before it."""
        before, cls._current = cls._current, None
        if before is not None:
            await before.close()
        cls._current = cls(model, **options)
        return cls._current

    @classmethod
    def current(cls) -> SessionService:
        """The service that `init` made; `ModelNotLoaded` if there is none."""
        if cls._current is None:
            raise ModelNotLoaded("there is no service; call SessionService.init first")
        return cls._current

    async def reload(self) -> None:
        """Close the model and open it again as it was. Sessions end."""
        before = self._model()
        async with self._lifecycle:
            await self._unload()
            await self._load(before.source, before.options, before.num_workers)

    async def load_model_with_workers(
        self, path: str | ModelHandle, params: Mapping[str, Any] | None = None, num_workers: int = 1
    ) -> None:
        """Open a model on so many engine cores, in place of any before it; `params` are `EngineOptions`."""
        async with self._lifecycle:
            await self._load(path, EngineOptions(**(params or {})), num_workers)  # type: ignore[typeddict-item]

    async def _load(self, path: str | ModelHandle | AsyncLLM, options: EngineOptions, num_workers: int) -> None:
        loaded = await asyncio.to_thread(LoadedModel, path, options, num_workers, self._policy, None, self._store)
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
        self.watch_idle()

    def _adopt(self, loaded: LoadedModel, stored: Sequence[Stored]) -> None:
        """Use a model, and go on with its sessions, but for those whose time went by meanwhile."""
        self._loaded = loaded
        for one in stored:
            session = loaded.adopt(one)
            self._room.take(session.session_id, session.num_bytes)
            if self.limits.ttl_s is not None and one.idle_s >= self.limits.ttl_s:
                self._end(loaded, session)

    def _close_store(self) -> None:
        if self._store is not None and self._owns_store:
            self._store.close()

    async def close(self) -> None:
        """End all sessions and free the engine, for good."""
        self._is_closed = True
        if SessionService._current is self:
            SessionService._current = None
        if self._expiry is not None:
            self._expiry.cancel()
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        async with self._lifecycle:
            await self._unload()
        await asyncio.to_thread(self._close_store)

    async def _unload(self) -> None:
        """Let the model go. Sessions end; those in a store only here."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        if loaded.keeper is not None:
            await self._settle_all(loaded)
            await loaded.keeper.close()
        for session in list(loaded.master.sessions.values()):
            self._end(loaded, session, for_good=loaded.keeper is None)
        await loaded.close()

    async def _settle_all(self, loaded: LoadedModel) -> None:
        """End the answers that run, and wait until what they have said is in the store."""
        running = [session.live for session in loaded.master.sessions.values() if session.live is not None]
        for live in running:
            live.cancel(FinishReason.SHUTDOWN)
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                for live in running:
                    async for _ in live.read(live.num_settled):
                        pass

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def create_session(
        self,
        *,
        system: str | None = None,
        sampling_params: SamplingParams | None = None,
        seed: int | None = None,
        overflow: Overflow = "error",
        template_options: Mapping[str, Any] | None = None,
        key: str = "",
        namespace: Hashable = None,
        priority: int = 0,
        is_kept: bool = True,
    ) -> str:
        """A new conversation, routed to one engine core for life; its name. Unless `is_kept` it is in no store."""
        loaded = self._model()
        if overflow not in ("error", "drop_oldest_turns"):
            raise ConfigError(f"overflow {overflow!r} is not known; known: 'error', 'drop_oldest_turns'")
        if system is not None and not isinstance(system, str):
            raise InvalidRequest(f"the system prompt must be a text, not {type(system).__name__}")
        Hints(key=key, namespace=namespace, priority=priority)
        sampling = loaded.opened.text.sampling_params(max_tokens=None) if sampling_params is None else sampling_params
        chosen = seed if seed is not None else getattr(sampling, "seed", None)
        options = SessionOptions(
            sampling=changed(sampling, {"seed": secrets.randbits(63) if chosen is None else chosen}),
            overflow=overflow,
            template_options=check_template_options(template_options),
            key=key,
            namespace=namespace,
            priority=priority,
            renderer=loaded.renderer(template_options),
            is_kept=is_kept,
        )
        self._room.check()
        name, now = secrets.token_urlsafe(NAME_BYTES), asyncio.get_running_loop().time()
        core = loaded.routing.choose(system, loaded.cores_alive())
        session = Session(name, core, options, system, now)
        loaded.master.add(session)
        self._used(session)
        await self._until_kept(loaded, [session])
        return name

    async def append_input(self, session_id: str, given: Input, *, raw: bool = False) -> int:
        """New input: a user's message, a list of messages, or ids; `raw` text goes in as it is.

        Only what is new, never the history. The number of tokens that the next answer will start from.
        """
        loaded = self._model()

        def operation(session: Session) -> int:
            self._room.check()
            return session.append(given, loaded.opened.text, loaded.client.max_model_len, raw=raw)

        return await self._change(loaded, session_id, operation)

    async def generate_stream(
        self, session_id: str, max_new_tokens: int | None = None, **changes: Any
    ) -> AsyncIterator[Chunk]:
        """The answer to what was put in, as it grows. `changes` are fields of `SamplingParams`, for this one only."""
        return (await self.answer(session_id, max_new_tokens, **changes)).read()

    async def regenerate(
        self, session_id: str, max_new_tokens: int | None = None, **changes: Any
    ) -> AsyncIterator[Chunk]:
        """Another answer in place of the last one; the same seed draws another."""
        return (await self.answer(session_id, max_new_tokens, again=True, **changes)).read()

    async def answer(
        self,
        session_id: str,
        max_new_tokens: int | None = None,
        *,
        given: Input | None = None,
        again: bool = False,
        must_fit: bool = False,
        request_id: str | None = None,
        timeout_s: float | None = None,
        priority: int | None = None,
        **changes: Any,
    ) -> LiveTurn:
        """The answer on its way, for whoever reads it; `generate_stream` and `regenerate` are made of it.

        `given` is appended first, as one with the answer; `again` puts it in place of the last one. If it then ends
        without a word, by an error or a cancel, the session is as it was. If it `must_fit`, an answer that could
        outgrow the context is refused; else it ends there. `request_id` names it; it ends with `timeout` after
        `timeout_s`, waiting for the session included; its `priority` is the session's, unless told.
        """
        loaded = self._model()
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        if max_new_tokens is not None:
            changes["max_tokens"] = max_new_tokens
        if loaded.keeper is not None and session_id in loaded.master.sessions:
            await loaded.keeper.warm(loaded.master.sessions[session_id])

        def operation(session: Session) -> LiveTurn:
            if self._loaded is not loaded:
                raise EngineDead("the model is being closed")
            left = None if timeout_s is None else timeout_s - (loop.time() - asked_at)
            if left is not None and left <= 0:
                raise RequestFailed("its time went by while it waited for the session", finish_reason="timeout")
            before = session.snapshot()
            try:
                if again:
                    session.drop_answer(loaded.opened.text)
                else:
                    session.attempt = 0
                if given is not None:
                    self._room.check()
                    session.append(given, loaded.opened.text, loaded.client.max_model_len, raw=False)
                params = changed(session.options.sampling, {"attempt": session.attempt, **changes})
                hints = session.hints if priority is None else replace(session.hints, priority=priority)
                live = self._generate(loaded, session, params, hints, must_fit, request_id, left)
            except BaseException:
                session.restore(before)
                raise
            if given is not None or again:
                live.undo = partial(session.restore, before)
            return live

        return await loaded.master.ask(session_id, operation, undo=LiveTurn.cancel)

    async def attach(self, session_id: str, offset: int = 0) -> AsyncIterator[Chunk]:
        """Read the running answer, or the last one, from a token on: for a reader whose connection was lost."""
        return (await self.last_answer(session_id)).read(offset)

    async def last_answer(self, session_id: str) -> LiveTurn | Answer:
        """The running answer, or the last one that is over."""

        def operation(session: Session) -> LiveTurn | Answer:
            self._used(session)
            found = session.live or session.answer
            if found is None:
                raise InvalidRequest(f"session {session_id} has no answer to read")
            return found

        return await self._model().master.ask(session_id, operation, at_once=True)

    async def cancel_generate(self, session_id: str) -> bool:
        """End the running answer; the session keeps its KV and goes on. Was there one? Returns when it has ended."""

        def operation(session: Session) -> LiveTurn | None:
            if session.live is not None:
                session.live.cancel()
            return session.live

        live = await self._model().master.ask(session_id, operation, at_once=True)
        if live is None:
            return False
        async for _ in live.read(live.num_settled):
            pass
        return True

    async def end_session(self, session_id: str) -> None:
        """The conversation is over: its log, its KV and its name are given up."""
        loaded = self._model()
        ending = await loaded.master.ask(session_id, lambda session: self._end(loaded, session), at_once=True)
        if ending is not None:
            with suppress(NotDurable):  # then it will be there again after a restart
                await asyncio.wrap_future(ending)

    async def fork(
        self, session_id: str, *, at_turn: int | None = None, at_token: int | None = None, n: int | None = None
    ) -> Any:
        """A session that goes on from here, or from a turn or token before; `n` of them: a list. Runs nothing."""
        loaded = self._model()

        def operation(session: Session) -> list[str]:
            if n is not None and whole_number("n", n) < 1:
                raise InvalidRequest(f"n must be at least 1, not {n}")
            made: list[str] = []
            try:
                for _ in range(1 if n is None else n):
                    made.append(self._fork(loaded, session, at_turn, at_token))  # noqa: PERF401 (some may fail)
            except BaseException:
                end(made)
                raise
            self._used(session)
            self._save(loaded, session)
            return made

        def end(made: Sequence[str]) -> None:
            for name in made:
                self._end(loaded, loaded.master.find(name))

        names = await loaded.master.ask(session_id, operation, undo=end)
        await self._until_kept(loaded, [loaded.master.find(name) for name in names])
        return names[0] if n is None else names

    async def rewind(self, session_id: str, *, at_turn: int | None = None, at_token: int | None = None) -> None:
        """Keep so many turns, or so many tokens, and forget the rest."""
        loaded = self._model()

        await self._change(loaded, session_id, lambda one: one.rewind(loaded.opened.text, at_turn, at_token))

    async def edit(self, session_id: str, turn: int, content: str) -> int:
        """Another text for an input turn; what came after it is forgotten. As `append_input` otherwise."""
        loaded = self._model()

        def operation(session: Session) -> int:
            self._room.check()
            return session.edit(turn, content, loaded.opened.text, loaded.client.max_model_len)

        return await self._change(loaded, session_id, operation)

    # -- files --------------------------------------------------------------------------------------------------------

    async def export(self, session_id: str, *, kv: bool = False) -> bytes:
        """The session as the bytes of a file (docs/durability.md), with its KV if that is wanted and there is any."""
        return await exported(self._model(), session_id, kv=kv)

    async def save(self, session_id: str, path: str | Path, *, kv: bool = False) -> Path:
        """Write the session to a file, which is whole or not there."""
        data = await self.export(session_id, kv=kv)
        return await asyncio.to_thread(write_whole, Path(path), data)

    async def restore(
        self,
        source: bytes | str | Path,
        *,
        key: str = "",
        namespace: Hashable = None,
        priority: int = 0,
        template_options: Collection[str] | None = None,
    ) -> str:
        """A new session from a file or its bytes; its name. `SessionFileError` says why it is refused.

        It is this key's, whosever it was. KV that does not fit is dropped, and the log replayed. Of a file that may
        come from anywhere, say which `template_options` it may have: then its KV is not taken at all.
        """
        loaded = self._model()
        self._room.check()
        name = secrets.token_urlsafe(NAME_BYTES)
        hints = Hints(key=key, namespace=namespace, priority=priority)
        session = await imported(loaded, source, name, hints, template_options)
        if self._loaded is not loaded:
            raise EngineDead("the model was closed while the file was read")
        loaded.master.add(session)
        self._used(session)
        await self._until_kept(loaded, [session])
        return name

    # -- what there is ------------------------------------------------------------------------------------------------

    def get(self, session_id: str) -> SessionInfo:
        return info_of(self._model().master.find(session_id), has_store=self._store is not None)

    def list(self, key: str | None = None) -> list[SessionInfo]:
        """All sessions, or those of a key."""
        found = self._model().master.sessions.values()
        has_store = self._store is not None
        return [info_of(one, has_store=has_store) for one in found if key is None or one.options.key == key]

    def explain(self, session_id: str) -> tuple[TurnCost, ...]:
        """What its latest answers cost before their first token, and why; oldest first."""
        return tuple(self._model().master.find(session_id).costs or ())

    def __len__(self) -> int:
        """Sessions that there are."""
        return 0 if self._loaded is None else len(self._loaded.master.sessions)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _model(self) -> LoadedModel:
        if self._is_closed:
            raise EngineDead("the service was closed")
        if self._loaded is None:
            raise ModelNotLoaded("no model is loaded; call load_model_with_workers first")
        return self._loaded

    async def _change(self, loaded: LoadedModel, session_id: str, operation: Callable[[Session], T]) -> T:
        """Have a session changed when its turn comes; the result, once that is durable or known not to be."""
        savings: list[asyncio.Future[bool] | None] = []

        def change(session: Session) -> T:
            result = operation(session)
            self._used(session)
            savings.append(self._save(loaded, session))
            return result

        result = await loaded.master.ask(session_id, change)
        await until_durable(savings[0])
        return result

    async def _until_kept(self, loaded: LoadedModel, made: Sequence[Session]) -> None:
        """Wait until new sessions are durable, or known not to be. Whoever leaves before that never had them."""
        savings = [self._save(loaded, session) for session in made]
        try:
            for saving in savings:
                await until_durable(saving)
        except asyncio.CancelledError:
            for session in made:
                self._end(loaded, session)
            raise

    @staticmethod
    def _save(loaded: LoadedModel, session: Session) -> asyncio.Future[bool] | None:
        """Put what a session is now into the store, if it is to be there."""
        return loaded.keeper.save(session) if loaded.keeper is not None and session.options.is_kept else None

    @staticmethod
    def _is_in_store(loaded: LoadedModel, session: Session) -> bool:
        return loaded.keeper is not None and session.options.is_kept

    def _generate(
        self,
        loaded: LoadedModel,
        session: Session,
        params: SamplingParams,
        hints: Hints,
        must_fit: bool,
        request_id: str | None,
        timeout_s: float | None,
    ) -> LiveTurn:
        session.commit_input(loaded.opened.text)
        longest = loaded.client.max_model_len
        if must_fit and params.max_tokens is not None and len(session.log) + params.max_tokens > longest:
            raise ContextOverflow(context_overflow(longest, len(session.log), params.max_tokens))
        name = request_id or f"answer-{secrets.token_hex(12)}"
        generation = loaded.intake.generation(session.log.tokens, params, name, hints, timeout_s)
        live = LiveTurn(
            generation,
            loaded.client,
            lambda done: self._finished(loaded, session, done),
            self.limits.stall_timeout_s,
            self.limits.max_unread_bytes,
        )
        if session.core not in loaded.cores_alive():  # its core is gone for good: it is a log, and goes on elsewhere
            loaded.routing.leave(session.core, session.system)
            session.core = loaded.routing.choose(session.system, loaded.cores_alive())
        loaded.client.submit(generation.choices[0].request, live.hear, session.core)
        session.live, session.state = live, SessionState.GENERATING
        return live

    def _finished(self, loaded: LoadedModel, session: Session, live: LiveTurn) -> asyncio.Future[bool] | None:
        """The engine has let go of an answer, however it ended. It is over when it is in the store, if there is one."""
        if session.state is SessionState.ENDED or session.live is not live:
            live.durable = False if self._is_in_store(loaded, session) else None
            return None
        output = live.generation.output.outputs[0]
        if live.undo is not None and not output.token_ids and FinishReason(output.finish_reason) not in ENDED_WELL:
            live.undo()
        params = live.generation.choices[0].request.draw.params
        session.take_answer(output, params, loaded.opened.text.tokenizer)
        note_cost(session, live.generation, loaded.opened)
        self._used(session)
        saving = self._save(loaded, session)
        if saving is None:
            self._settle(loaded, session, live)
        else:
            saving.add_done_callback(lambda done: self._settle(loaded, session, live, done.result()))
        return saving

    def _settle(self, loaded: LoadedModel, session: Session, live: LiveTurn, durable: bool | None = None) -> None:
        """An answer is over: the session is free for what comes next."""
        live.durable = durable
        if session.state is SessionState.ENDED or session.live is not live:
            return
        session.live, session.answer = None, live.answer()
        session.state = SessionState.APPENDING if session.is_unanswered else SessionState.IDLE
        loaded.master.note_free(session)
        if loaded.keeper is not None and session.options.is_kept:
            loaded.keeper.note_answered(session)

    def _fork(self, loaded: LoadedModel, session: Session, at_turn: int | None, at_token: int | None) -> str:
        self._room.check()
        now = asyncio.get_running_loop().time()
        options = replace(session.options, sampling=of_fork(session.options.sampling, session.num_forks + 1))
        child = Session(secrets.token_urlsafe(NAME_BYTES), session.core, options, session.system, now)
        child.restore(session.snapshot())
        child.mark = session.mark
        if at_turn is not None or at_token is not None:
            child.rewind(loaded.opened.text, at_turn, at_token)
        session.num_forks += 1
        loaded.master.add(child)
        loaded.routing.stay(child.core, child.system)
        self._used(child)
        return child.session_id

    def _end(self, loaded: LoadedModel, session: Session, *, for_good: bool = True) -> Future[None] | None:
        """Give a session up; unless it is `for_good` it stays in the store. Gives what says when that is durable."""
        if session.state is SessionState.ENDED:
            return None
        if session.live is not None:
            session.live.cancel(FinishReason.SHUTDOWN if self._loaded is None else FinishReason.CANCELLED)
        session.state = SessionState.ENDED
        loaded.master.remove(session)
        loaded.routing.leave(session.core, session.system)
        self._room.give_up(session.session_id)
        loaded.client.release(session.session_id)
        if loaded.keeper is None or not session.options.is_kept:
            return None
        if for_good:
            return loaded.keeper.end(session)
        loaded.keeper.let_go(session)
        return None

    # -- bytes and time -----------------------------------------------------------------------------------------------

    def _used(self, session: Session) -> None:
        """Something was done with it: note when, and what its log costs now."""
        session.last_used = asyncio.get_running_loop().time()
        self._room.take(session.session_id, session.num_bytes)
        self.watch_idle()

    def watch_idle(self) -> None:
        """From now on end sessions whose time has come: those of a store have waited before anybody uses one."""
        if self.limits.ttl_s is not None and (self._expiry is None or self._expiry.done()):
            self._expiry = asyncio.create_task(self._expire(self.limits.ttl_s), name="tokenmill-expiry")

    async def _expire(self, ttl_s: float) -> None:
        """End sessions that nobody has used for long enough."""
        while True:
            await asyncio.sleep(ttl_s / 4)
            if self._loaded is not None:
                self.end_idle(ttl_s)

    def end_idle(self, seconds: float) -> int:
        """End the sessions that nobody has used for so long and that are not answering; how many."""
        loaded, now = self._model(), asyncio.get_running_loop().time()
        idle = [
            session
            for session in loaded.master.sessions.values()
            if session.state is not SessionState.GENERATING and now - session.last_used >= seconds
        ]
        for session in idle:
            self._end(loaded, session)
        return len(idle)

    async def __aenter__(self) -> Self:
        self.watch_idle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
