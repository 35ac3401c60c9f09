"""`SessionService`: conversations over one model. The API of sessions; everything else here serves it."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, Unpack

from tokenmill.contract import ModelHandle
from tokenmill.engine.client import EngineClient
from tokenmill.engine.request import Hints, Quota
from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.errors import (
    EngineDead,
    InvalidRequest,
    ModelNotLoaded,
    NotDurable,
    RequestFailed,
    SessionEnded,
    SessionMoved,
    SessionNotFound,
    TokenmillError,
)
from tokenmill.outputs import FinishReason, OutputDelta
from tokenmill.params import SamplingParams
from tokenmill.session.answer import Answer
from tokenmill.session.explain import TurnCost
from tokenmill.session.manager import SessionLimits, SessionManager, Source, answer_in_log, no_answer, stored_info
from tokenmill.session.records import Fingerprint, answer_json, read_answer, write_whole
from tokenmill.session.routing import MAX_MOVES, Policy
from tokenmill.session.session import (
    OVERFLOW_KEEP,
    Input,
    Overflow,
    Session,
    SessionInfo,
    check_metadata,
    check_title,
    whole_number,
)
from tokenmill.session.store import Place, SessionStore, Store
from tokenmill.text.messages import num_chars
from tokenmill.text.tool_grammar import ToolUse
from tokenmill.text.turn_parser import TurnPlan
from tokenmill.text.workers import TextWorkers

SETTLE_S = 5.0
"""What answers may take to end when the model is unloaded."""
LATE = "timed out waiting for the session"


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


class SessionService:
    """Sessions on a model; many at once, from one event loop.

    Without a model it waits for `load_model_with_workers`. The options are those of `EngineOptions`, and `num_workers`
    is `workers` among them; `client` is an engine that runs elsewhere, of the same model. Over an `AsyncLLM` they share
    its engine with its other requests.
    With a `store`, or the directory of one, sessions outlive the service: what it acknowledges is on the disk. Long
    input is tokenized on the threads of `texts`, which may be shared with others on the same event loop.
    """

    _current: ClassVar[SessionService | None] = None

    def __init__(
        self,
        model: str | ModelHandle | AsyncLLM | None = None,
        *,
        num_workers: int | None = None,
        routing: Policy = "round_robin",
        limits: SessionLimits = SessionLimits(),
        client: EngineClient | None = None,
        store: Store | str | Path | None = None,
        texts: TextWorkers | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self.limits = limits
        self._policy: Policy = routing
        self._owns_texts = texts is None
        self._texts = texts or TextWorkers()
        self._owns_store = isinstance(store, str | Path)
        self.store: Store | None = SessionStore(store) if isinstance(store, str | Path) else store
        self._loaded: SessionManager | None = None
        self._changing = asyncio.Lock()
        """Around loading, reloading and closing: one of them at a time."""
        self._is_closed = False
        if model is not None:
            self._open(model, _with_workers(options, num_workers), client)

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
            raise ModelNotLoaded("no service; call SessionService.init first")
        return cls._current

    async def reload(self) -> None:
        """Close the model and open it again as it was. Sessions end."""
        before = self._model()
        async with self._changing:
            await self._unload()
            await self._load(before.source, before.options)

    async def load_model_with_workers(
        self, path: str | ModelHandle, params: Mapping[str, Any] | None = None, num_workers: int | None = None
    ) -> None:
        """Open a model on `num_workers` engine cores, in place of any before it; `params` are `EngineOptions`."""
        async with self._changing:
            await self._load(path, _with_workers(EngineOptions(**(params or {})), num_workers))  # type: ignore[typeddict-item]

    def _open(self, source: Source, options: EngineOptions, client: EngineClient | None) -> None:
        """Load the first model, where there is no event loop yet. If that fails the store is closed."""
        try:
            self._loaded = self._manager(source, options, client)
        except BaseException:
            self._close_store()
            raise

    async def _load(self, source: Source, options: EngineOptions) -> None:
        loaded = await asyncio.to_thread(self._manager, source, options, None)
        await self._unload()
        if self._is_closed:
            await loaded.close()
            raise EngineDead("the service was closed")
        self._loaded = loaded
        await asyncio.to_thread(loaded.count_stored)  # once more: those of the model before were in memory
        loaded.watch_idle()

    def _manager(self, source: Source, options: EngineOptions, client: EngineClient | None) -> SessionManager:
        """Takes as long as the model does to load."""
        return SessionManager(source, options, self._policy, client, self.store, self.limits, self._texts)

    async def _unload(self) -> None:
        """Let the model go. Its sessions end; those in a store end only in this process."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        loaded.is_leaving = True
        loaded.stop_watching()
        if loaded.persistence is not None:
            await self._settle_all(loaded)
            await loaded.persistence.close()
        for session in list(loaded.queue.sessions.values()):
            loaded.end(session, for_good=loaded.persistence is None)
        await loaded.close()

    @staticmethod
    async def _settle_all(loaded: SessionManager) -> None:
        """End the answers that run, and wait until what they have said is in the store."""
        running = [session.live for session in loaded.queue.sessions.values() if session.live is not None]
        for live in running:
            live.cancel(FinishReason.SHUTDOWN)
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                for live in running:
                    async for _ in live.read(len(live.token_ids)):
                        pass

    async def close(self) -> None:
        """End all sessions and free the engine and the store, for good. Completes even if the caller stops waiting."""
        if SessionService._current is self:
            SessionService._current = None
        self._is_closed = True
        if self._loaded is not None:
            self._loaded.stop_watching()
        await asyncio.shield(asyncio.ensure_future(self._close()))
        if self._owns_texts:
            self._texts.close()

    async def _close(self) -> None:
        async with self._changing:
            await self._unload()
        await asyncio.to_thread(self._close_store)

    def _close_store(self) -> None:
        if self.store is not None and self._owns_store:
            self.store.close()

    def watch_idle(self) -> None:
        """End sessions whose time to live is over, from now on. Those of a store may have waited for long."""
        if self._loaded is not None:
            self._loaded.watch_idle()

    def end_idle(self, seconds: float) -> int:
        """End the sessions that have been idle for this many seconds; their number."""
        return self._model().end_idle(seconds)

    async def __aenter__(self) -> Self:
        self.watch_idle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def create_session(
        self,
        *,
        system: str | None = None,
        sampling_params: SamplingParams | None = None,
        seed: int | None = None,
        overflow: Overflow = "error",
        overflow_keep: float = OVERFLOW_KEEP,
        template_options: Mapping[str, Any] | None = None,
        key: str = "",
        namespace: Hashable = None,
        priority: int = 0,
        is_kept: bool = True,
        title: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """A new conversation, routed to one engine core for life; its name. Unless `is_kept` it is in no store.

        With `overflow="drop_oldest_turns"` a conversation that outgrows the context is cut down to the fraction
        `overflow_keep` of it.
        `title` and `metadata` are for lists of sessions: the model does not see them.
        """
        loaded = self._model()
        if sampling_params is not None:
            await loaded.intake.prepare(sampling_params)
        loaded.budget.check(key, num_new=int(is_kept))
        session = loaded.new_session(
            system=system,
            sampling_params=sampling_params,
            seed=seed,
            overflow=overflow,
            overflow_keep=overflow_keep,
            template_options=template_options,
            key=key,
            namespace=namespace,
            priority=priority,
            is_kept=is_kept,
            title=title,
            metadata=metadata,
        )
        return await loaded.begin(session)

    async def update_session(self, session_id: str, **changes: Any) -> None:
        """Another `title` or other `metadata`; None for none. What is not named stays as it is."""
        checks = {"title": check_title, "metadata": check_metadata}
        unknown = changes.keys() - checks.keys()
        if unknown:
            raise InvalidRequest(f"cannot change {', '.join(sorted(unknown))} of a session; supported: title, metadata")
        checked = {name: checks[name](value) for name, value in changes.items()}

        def operation(session: Session) -> None:
            for name, value in checked.items():
                setattr(session, name, value)

        await self._model().change(session_id, operation)

    async def append_input(
        self, session_id: str, given: Input, *, raw: bool = False, continue_final_message: bool = False
    ) -> int:
        """New input: a user's message, a list of messages, or ids; `raw` text goes in as it is.

        Only what is new, never the history. With `continue_final_message` the last message, an assistant's, is the
        beginning of the next answer. The number of tokens that the next answer will start from.
        """
        loaded = self._model()

        def operation(session: Session) -> int:
            loaded.budget.check(session.options.key)
            text, longest = loaded.opened.text, loaded.client.max_model_len
            return session.append(given, text, longest, raw=raw, continue_final_message=continue_final_message)

        return await loaded.change_text(session_id, num_chars(given), operation)

    async def generate_stream(
        self, session_id: str, max_new_tokens: int | None = None, **changes: Any
    ) -> AsyncIterator[OutputDelta]:
        """The answer to what was put in, as it grows. `changes` are fields of `SamplingParams`, for this one only."""
        return (await self.answer(session_id, max_new_tokens, **changes)).read()

    async def regenerate(
        self, session_id: str, max_new_tokens: int | None = None, **changes: Any
    ) -> AsyncIterator[OutputDelta]:
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
        quota: Quota = Quota(),
        use: ToolUse | None = None,
        thinking_budget: int | None = None,
        prefix: Sequence[int] = (),
        **changes: Any,
    ) -> Answer:
        """The answer as it grows, for any number of readers; `generate_stream` and `regenerate` are built on it.

        `given` is appended first, as one with the answer; `again` puts it in place of the last one. If it then ends
        without a word, by an error or a cancel, the session is as it was. If it `must_fit`, an answer that could
        outgrow the context is refused; else it ends there. `request_id` names it; it ends with `timeout` after
        `timeout_s`, waiting for the session included; its `priority` is the session's, unless told. `quota` limits
        what it may use of the engine. `use` says which functions it may call, `thinking_budget` for how many tokens the
        model may think. It begins with the `prefix`, undrawn, as far as its parameters permit.
        """
        loaded = self._model()
        loop = asyncio.get_running_loop()
        asked_at, is_shared = loop.time(), self.store is not None and self.store.is_shared
        if max_new_tokens is not None:
            changes["max_tokens"] = max_new_tokens
        if changes.get("structured_outputs") is not None:
            await loaded.intake.compile(changes["structured_outputs"])

        def left() -> float | None:
            seconds = None if timeout_s is None else timeout_s - (loop.time() - asked_at)
            if seconds is not None and seconds <= 0:
                raise RequestFailed(LATE, finish_reason="timeout")
            return seconds

        def take_in(session: Session) -> tuple[SamplingParams, TurnPlan | None, tuple[Any, ...]]:
            left()
            before = session.snapshot()
            if again:
                session.drop_answer(loaded.opened.text)
            else:
                session.attempt = 0
            if given is not None:
                loaded.budget.check(session.options.key)
                session.append(given, loaded.opened.text, loaded.client.max_model_len, raw=False)
            params = session.options.for_answer({"attempt": session.attempt, **changes})
            loaded.commit_prompt(session, params, must_fit)
            return *loaded.plan(session, params, use, thinking_budget), before

        def operation(session: Session, prepared: tuple[SamplingParams, TurnPlan | None, tuple[Any, ...]]) -> Answer:
            if loaded.is_leaving:
                raise EngineDead("the model is being closed")
            params, plan, before = prepared
            order = session.hints.priority if priority is None else priority
            hints = replace(session.hints, priority=order, quota=quota)
            live = loaded.begin_answer(session, params, plan, hints, request_id, left(), prefix)
            live.on_void = partial(session.restore, before)
            if given is not None or again:
                live.undo = partial(session.restore, before)
            if is_shared:
                options: dict[str, Any] = {"again": again, "must_fit": must_fit, "timeout_s": timeout_s}
                options |= {"priority": priority, "thinking_budget": thinking_budget, "quota": asdict(quota)}
                form = loaded.fingerprint.form
                loaded.note_begun(session, live, answer_json(live.request_id, form, given, changes, use, **options))
            return live

        try:
            async with asyncio.timeout(timeout_s) as waiting:
                for _ in range(MAX_MOVES):
                    if loaded.persistence is not None:
                        await loaded.open(session_id, may_be_stale=True)
                        if session_id in loaded.queue.sessions:
                            await loaded.persistence.warm(loaded.queue.sessions[session_id])
                    # Where a grammar has to be compiled, that is long.
                    found = loaded.queue.sessions.get(session_id)
                    outputs = changes.get("structured_outputs", found and found.options.structured_outputs)
                    compiles = bool(use and use.tools) or thinking_budget is not None or outputs is not None
                    num_bytes = max(num_chars(given), self._texts.inline_bytes if compiles else 0)
                    work = loaded.text_work(num_bytes, take_in)
                    live = await loaded.queue.ask(
                        session_id, operation, undo=Answer.cancel, prepare=work, is_fenced=True
                    )
                    if await loaded.has_begun(session_id, live):
                        return live
        except TimeoutError:
            if not waiting.expired():
                raise
            raise RequestFailed(LATE, finish_reason="timeout") from None
        raise SessionMoved(f"session {session_id} is used on several servers at once")

    async def attach(self, session_id: str, offset: int = 0) -> AsyncIterator[OutputDelta]:
        """Read the running answer, or the last one, from a token on: for a reader whose connection was lost."""
        return (await self.last_answer(session_id)).read(offset)

    async def last_answer(
        self, session_id: str, request_id: str | None = None, token_ids: Sequence[int] = ()
    ) -> Answer:
        """The running answer, or the last one that is over; `request_id` names it for a caller who has seen some of it.

        `AnswerLost` if it was made by a process before this one: only its log is there. In a store that is shared, an
        answer that its server has not finished is run again, beginning with the `token_ids` that the caller has of it,
        and one that it has finished is read from the log.
        """
        loaded = self._model()
        await loaded.open(session_id)
        session = loaded.queue.sessions.get(session_id)
        if session is not None and session.live is not None and session.live.void is not None:
            async for _ in session.live.read(len(session.live.token_ids)):  # an attempt that failed is being taken back
                pass
        if session is not None and session.unfinished is not None and session.live is None:
            unfinished, session.unfinished = session.unfinished, None
            if request_id in (None, unfinished["id"]):
                return await self._run_again(session, unfinished, token_ids)

        def operation(session: Session) -> Answer:
            loaded.used(session)
            found = session.live or session.answer
            if found is None and session.epoch:
                found = answer_in_log(session, request_id, loaded.opened.text.tokenizer)
            if found is None:
                raise no_answer(session, request_id)
            return found

        return await loaded.queue.ask(session_id, operation, at_once=True)

    async def _run_again(self, session: Session, unfinished: Mapping[str, Any], token_ids: Sequence[int]) -> Answer:
        """An answer that another server has begun. Readers of exact ones go on where they were."""
        try:
            live = await self.answer(session.session_id, prefix=token_ids, **read_answer(unfinished))
        except BaseException:
            session.unfinished = unfinished  # somebody may ask for it again
            raise
        live.is_rerun = True
        live.is_exact = self._model().opened.model.info.deterministic and (
            unfinished["form"] == self._model().fingerprint.form
        )
        return live

    async def cancel_generate(self, session_id: str) -> bool:
        """End the running answer; the session keeps its KV and goes on. Was there one? Returns when it has ended."""

        def operation(session: Session) -> Answer | None:
            if session.live is not None:
                session.live.cancel()
            return session.live

        live = await self._model().queue.ask(session_id, operation, at_once=True)
        if live is None:
            return False
        async for _ in live.read(len(live.token_ids)):
            pass
        return True

    async def end_session(self, session_id: str) -> EndedSession:
        """The conversation is over: its log, its KV and its name are given up. Says whether that is durable."""
        loaded = self._model()
        ending = await loaded.queue.ask(session_id, loaded.end, at_once=True)
        if ending is None:
            return EndedSession(session_id, None)
        try:
            await asyncio.wrap_future(ending)
        except SessionMoved:  # it is there, on another server
            loaded.queue.forget_end(session_id)
            raise
        except NotDurable as error:
            return EndedSession(session_id, False, str(error))
        return EndedSession(session_id, True)

    async def fork(
        self, session_id: str, *, at_turn: int | None = None, at_token: int | None = None, n: int | None = None
    ) -> Any:
        """A session that goes on from here, or from a turn or token before; `n` of them: a list. Runs nothing."""
        loaded = self._model()

        def operation(session: Session) -> list[Session]:
            if n is not None and whole_number("n", n) < 1:
                raise InvalidRequest(f"n must be at least 1, not {n}")
            made: list[Session] = []
            try:
                for _ in range(1 if n is None else n):
                    made.append(loaded.fork(session, at_turn, at_token))  # noqa: PERF401 (all or none)
            except BaseException:
                end(made)
                raise
            loaded.used(session)
            loaded.save(session)
            return made

        def end(made: Sequence[Session]) -> None:
            for child in made:
                loaded.end(child)

        made = await loaded.queue.ask(session_id, operation, undo=end)
        await loaded.until_saved(made)
        names = [child.session_id for child in made]
        return names[0] if n is None else names

    async def rewind(self, session_id: str, *, at_turn: int | None = None, at_token: int | None = None) -> None:
        """Keep the first `at_turn` turns, or the first `at_token` tokens, and forget the rest."""
        loaded = self._model()

        def operation(session: Session) -> None:
            session.rewind(loaded.opened.text, at_turn, at_token)

        await loaded.change_text(session_id, 0, operation)

    async def edit(self, session_id: str, turn: int, content: str) -> int:
        """Another text for an input turn; what came after it is forgotten. As `append_input` otherwise."""
        loaded = self._model()

        def operation(session: Session) -> int:
            loaded.budget.check(session.options.key)
            return session.edit(turn, content, loaded.opened.text, loaded.client.max_model_len)

        return await loaded.change_text(session_id, num_chars(content), operation)

    # -- files --------------------------------------------------------------------------------------------------------

    async def export(self, session_id: str, *, kv: bool = False) -> bytes:
        """The session as the bytes of a file (docs/durability.md), with its KV if that is wanted and there is any."""
        return await self._model().exported(session_id, kv=kv)

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

        It belongs to this key, not to its former one. KV that does not fit is dropped, and the log replayed. For an
        untrusted file, `template_options` names the options that it may set; then its KV is ignored.
        """
        loaded = self._model()
        loaded.budget.check(key, num_new=1)
        hints = Hints(key=key, namespace=namespace, priority=priority)
        session = await loaded.imported(source, hints, template_options)
        try:
            if loaded.is_leaving:
                raise EngineDead("the model was closed while the file was read")
            loaded.budget.check(key, num_new=1)  # others may have been created meanwhile
        except TokenmillError:
            loaded.discard(session)
            raise
        return await loaded.begin(session)

    async def hand_over_kv(self, session_id: str, epoch: int) -> tuple[bytes, bytes, bytes] | None:
        """KV of a session, in pieces, for another server of the database, whose later claim on it has this epoch."""
        return await self._model().hand_over_kv(session_id, epoch)

    # -- what there is ------------------------------------------------------------------------------------------------

    def key_of(self, session_id: str) -> str:
        """Whose session it is."""
        return self._model().queue.find(session_id).options.key

    def tools_of(self, session_id: str) -> Sequence[Mapping[str, Any]]:
        """The functions that its chat template is told of."""
        tools = self._model().queue.find(session_id).options.template_options.get("tools")
        return tools if isinstance(tools, Sequence) else ()

    def get(self, session_id: str) -> SessionInfo:
        return self._model().queue.find(session_id).info(has_store=self.store is not None)

    async def open(self, session_id: str, *, resumes: str | None = None, may_be_stale: bool = False) -> None:
        """Have a session in memory, if there is one: what comes next need not wait for the store."""
        await self._model().open(session_id, resumes=resumes, may_be_stale=may_be_stale)

    async def whose(self, session_id: str) -> str:
        """Whose session it is, without having it in memory; `SessionNotFound` if there is none."""
        loaded = self._model()
        if loaded.persistence is not None and session_id not in loaded.queue.sessions:
            if loaded.queue.has_ended(session_id):
                raise SessionEnded(f"session {session_id} has ended")
            store, scope = loaded.persistence.store, loaded.persistence.scope
            key = await asyncio.to_thread(store.key_of, scope, session_id)
            if key is None and session_id not in loaded.queue.sessions:
                raise SessionNotFound(f"no session {session_id!r}")
            if key is not None:
                return key
        return loaded.queue.find(session_id).options.key

    async def info(self, session_id: str) -> SessionInfo:
        """As `get`, from the store where that is newer; a session that is only looked at stays where it is."""
        return await self._model().info(session_id)

    async def infos(self, names: Sequence[str]) -> builtins.list[SessionInfo]:
        """Several, in this order; those that are gone are left out."""
        return await self._model().infos(names)

    async def places(
        self, key: str | None, limit: int, after: Place | None = None, *, newest_first: bool = False
    ) -> builtins.list[Place]:
        """A page of a key's sessions: when each was created, and its name."""
        return await self._model().places(key, limit, after, newest_first=newest_first)

    def list(self, key: str | None = None) -> list[SessionInfo]:
        """All sessions, or those of a key. Waits for the store."""
        loaded = self._model()
        places = set(loaded.in_memory(key))
        found = {}
        if loaded.persistence is not None:
            store, scope = loaded.persistence.store, loaded.persistence.scope
            more = [name for _, name in store.page(scope, key, 1 << 30) if name not in loaded.queue.sessions]
            stored = [stored_info(one) for one in store.read(scope, more)]
            places |= {(one.created_at, one.session_id) for one in stored}
            found = {one.session_id: one for one in stored}
        return [found[name] if name in found else self.get(name) for _, name in sorted(places)]

    def usage_of(self, key: str) -> tuple[int, int]:
        """How many sessions a key has, and the bytes of their logs."""
        return (0, 0) if self._loaded is None else self._loaded.budget.used(key)

    @property
    def fingerprint(self) -> Fingerprint:
        """Which model it has. Reads its files the first time: not for an event loop."""
        return self._model().fingerprint

    def explain(self, session_id: str) -> tuple[TurnCost, ...]:
        """What its latest answers cost on this server before their first token, and why; oldest first."""
        session = self._model().queue.sessions.get(session_id)
        return () if session is None else tuple(session.costs or ())

    def __len__(self) -> int:
        """Sessions that there are; those of other servers were counted a while ago."""
        return 0 if self._loaded is None else len(self._loaded.queue.sessions) + self._loaded.budget.num_stored

    def _model(self) -> SessionManager:
        """The model that is loaded, with its sessions."""
        if self._is_closed:
            raise EngineDead("the service was closed")
        if self._loaded is None:
            raise ModelNotLoaded("no model is loaded; call load_model_with_workers first")
        return self._loaded


def _with_workers(options: EngineOptions, num_workers: int | None) -> EngineOptions:
    return options if num_workers is None else {**options, "workers": num_workers}
