"""`SessionManager`: the sessions of one loaded model, from admission to their end. What `reload` replaces.

It owns the engine client (unless an `AsyncLLM` does), the command queue, the routing to engine cores and the
persistence of its sessions. Everything but loading and reading files runs on the service's event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tokenmill.contract import ModelHandle
from tokenmill.engine.client import EngineClient
from tokenmill.engine.request import Hints, context_overflow
from tokenmill.entrypoints.async_llm import AsyncLLM, open_engine
from tokenmill.entrypoints.options import EngineOptions
from tokenmill.errors import (
    AnswerLost,
    ConfigError,
    ContextOverflow,
    EngineDead,
    IntegrityError,
    InvalidRequest,
    NotDurable,
    Overloaded,
    SessionFileError,
    SessionMoved,
    SessionNotFound,
    TokenmillError,
    TooManyTokens,
)
from tokenmill.outputs import FinishReason
from tokenmill.params import SamplingParams
from tokenmill.pipeline.bridge import StepBridge
from tokenmill.pipeline.prompts import Intake
from tokenmill.session.answer import Answer
from tokenmill.session.explain import mark_before, note_cost
from tokenmill.session.persistence import MIN_KV_TOKENS, Persistence, export_kv, import_kv, until_durable
from tokenmill.session.records import (
    Fingerprint,
    SessionFile,
    SessionRecord,
    fingerprint,
    pack,
    packed_kv,
    read_fingerprint,
    read_whole,
    record_of,
    restored,
    unpack,
)
from tokenmill.session.routing import MAX_MOVES, CommandQueue, Policy, TextWork, make_routing
from tokenmill.session.session import (
    LastAnswer,
    Overflow,
    Session,
    SessionInfo,
    SessionOptions,
    SessionState,
    check_metadata,
    check_overflow_keep,
    check_template_options,
    check_title,
)
from tokenmill.session.store import Place, Store, Stored
from tokenmill.text.delta import DeltaRenderer
from tokenmill.text.messages import num_chars
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.text.tool_grammar import ToolUse
from tokenmill.text.turn_parser import ParsedTurn, TurnPlan
from tokenmill.text.workers import INLINE_BYTES, TextWorkers

log = logging.getLogger(__name__)

MIB = 1 << 20
NAME_BYTES = 16
"""Random bytes of a session's name, so that it can't be guessed."""
MAX_TEXT_BYTES = 8 * MIB
"""A session file counts as this many bytes of text at most: the rest is KV."""
SAID_PER_CONTEXT = 2
"""Rendered tokens that a session file may hold, as a multiple of the context: a log that fits may render to more."""
MAX_LOADED = 10_000
"""Idle sessions of a store that stay in memory: then those used least recently are read again when they are needed."""
RECOUNT_S = 30.0
"""How often the sessions of other servers are counted."""
MOST_RENDERERS = 16
"""Renderers that are shared between sessions; there is one for each set of template options."""
Source: TypeAlias = "str | ModelHandle | AsyncLLM"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SessionQuota:
    """How many sessions a key may have; None: no limit of its own."""

    max_sessions: int | None = None
    max_log_bytes: int | None = None
    is_shared: bool = False
    """Leave room for other keys: at least as many bytes as its own logs take must be free."""


def _no_quota(_: str) -> SessionQuota:
    return SessionQuota()


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """Limits on the sessions of a service."""

    max_log_bytes: int = 1024 * MIB
    """Bytes of all logs together; without quotas, the number of sessions has no other limit."""
    quota: Callable[[str], SessionQuota] = _no_quota
    """The quota of a key, as it is now."""
    ttl_s: float | None = None
    """End a session after this many idle seconds; None: never."""
    stall_timeout_s: float | None = 30.0
    """End an answer with `timeout` when it has not been read for this long; None: never."""
    max_unread_bytes: int = MIB
    """End an answer with `timeout` when this much of it is unread."""


class LogBudget:
    """Sessions and bytes of their logs, of all keys and of each, and how many there may be."""

    def __init__(self, max_bytes: int, quota: Callable[[str], SessionQuota]) -> None:
        self._max_bytes = max_bytes
        self._quota = quota
        self.total = 0
        self._bytes_of: dict[str, int] = {}
        self._num_sessions: Counter[str] = Counter()
        self._num_bytes: Counter[str] = Counter()
        self._stored: dict[str, tuple[int, int]] = {}
        """Sessions and bytes of each key that are in the store and not in memory."""

    def set(self, session: Session) -> None:
        """A session's log has this size now."""
        key, before = session.options.key, self._bytes_of.get(session.session_id)
        more = session.num_bytes - (before or 0)
        self._bytes_of[session.session_id] = session.num_bytes
        self._num_sessions[key] += before is None and session.options.is_kept
        self._num_bytes[key] += more
        self.total += more

    def release(self, session: Session) -> None:
        key, num_bytes = session.options.key, self._bytes_of.pop(session.session_id, None)
        if num_bytes is None:
            return
        self.total -= num_bytes
        self._num_bytes[key] -= num_bytes
        self._num_sessions[key] -= session.options.is_kept
        if not self._num_bytes[key] and not self._num_sessions[key]:
            del self._num_sessions[key], self._num_bytes[key]

    def set_stored(self, stored: Mapping[str, tuple[int, int]]) -> None:
        """What the store has beside the sessions in memory, by key."""
        self.total += sum(num_bytes for _, num_bytes in stored.values())
        self.total -= sum(num_bytes for _, num_bytes in self._stored.values())
        self._stored = dict(stored)

    def load(self, session: Session) -> None:
        """A session has come from the store."""
        self._move(session, -1)
        self.set(session)

    def put_away(self, session: Session) -> None:
        """A session is in the store only."""
        self.release(session)
        self._move(session, 1)

    def _move(self, session: Session, sign: int) -> None:
        count, num_bytes = self._stored.get(session.options.key, (0, 0))
        now = (max(0, count + sign), max(0, num_bytes + sign * session.num_bytes))
        self.total += now[1] - num_bytes
        self._stored[session.options.key] = now

    def used(self, key: str) -> tuple[int, int]:
        """A key's sessions, without those of stored responses, and the bytes of all their logs."""
        count, num_bytes = self._stored.get(key, (0, 0))
        return self._num_sessions[key] + count, self._num_bytes[key] + num_bytes

    @property
    def num_stored(self) -> int:
        """Sessions that are in the store and not in memory."""
        return sum(count for count, _ in self._stored.values())

    def check(self, key: str, num_new: int = 0) -> None:
        """Raise `Overloaded` if a key's share of the bytes is used up, or it can't have so many new sessions."""
        quota, (count, num_bytes) = self._quota(key), self.used(key)
        free, why = self._max_bytes - self.total, None
        if num_new and quota.max_sessions is not None and count + num_new > quota.max_sessions:
            why = f"this API key has {count} sessions, its limit is {quota.max_sessions}"
        elif quota.max_log_bytes is not None and num_bytes >= quota.max_log_bytes:
            why = f"the session logs of this API key take {num_bytes} bytes, its limit is {quota.max_log_bytes}"
        elif free <= 0:
            why = f"the session logs take {self.total} bytes"
        elif quota.is_shared and num_bytes > free:
            why = f"the session logs of this API key take {num_bytes} bytes, more than are left for others"
        if why is not None:
            raise Overloaded(f"{why}; end some sessions first")


class SessionManager:
    """One for each model that a service loads. Loading takes as long as the model does.

    It uses the engine of an `AsyncLLM` beside its other callers, and leaves it open.
    """

    def __init__(
        self,
        source: Source,
        options: EngineOptions,
        policy: Policy,
        client: EngineClient | None,
        store: Store | None,
        limits: SessionLimits,
        texts: TextWorkers,
    ) -> None:
        self.source, self.options = source, options
        self.limits = limits
        self.texts = texts
        """Where long input is rendered and tokenized."""
        self.budget = LogBudget(limits.max_log_bytes, limits.quota)
        self.queue = CommandQueue(None if store is None else self)
        self._loading: dict[str, asyncio.Task[None]] = {}
        """Sessions that are being read from the store."""
        self.is_leaving = False
        """It is being unloaded: nothing new begins, and its sessions end."""
        self._renderers: dict[str, DeltaRenderer] = {}
        self._expiry: asyncio.Task[None] | None = None
        self._owns_engine = not isinstance(source, AsyncLLM)
        if isinstance(source, AsyncLLM):
            if options or client is not None:
                raise ConfigError("options cannot be given with an existing engine")
            opened = self.opened = source.opened
            self.client: EngineClient = source.client
            self.bridge = source.bridge
            self.routing = make_routing(policy, self.client.num_cores)
        else:
            self.opened, self.client = open_engine(source, options, client=client)
            opened = self.opened
            try:
                self.bridge = StepBridge(self.client, opened.config.queue_timeout_s)
                self.routing = make_routing(policy, self.client.num_cores)
            except BaseException:
                self.free()
                raise
        self.intake = Intake("session", opened.text, opened.model.info, self.client.max_model_len, seed=None)
        template = self.opened.text.template
        self._reasons = template is not None and template.turn_format.reasons
        """May answers begin with thinking?"""
        try:
            self.persistence = (
                None
                if store is None
                else Persistence(store, self.fingerprint, opened.model, self.client, limits.ttl_s, self.drop)
            )
            self._end_expired()
            self.count_stored()
        except BaseException:
            self.free()
            raise

    # -- the model ----------------------------------------------------------------------------------------------------

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Which model it is. Reads its files the first time: not for an event loop."""
        return fingerprint(self.opened.model, self.opened.text)

    def renderer(self, options: Mapping[str, Any] | None) -> DeltaRenderer | None:
        """One for all sessions with these template options; None for a model without a template."""
        if self.opened.text.template is None:
            return None
        name = repr(sorted((options or {}).items(), key=repr))
        if name not in self._renderers:
            while len(self._renderers) >= MOST_RENDERERS:  # sessions that have it keep it
                del self._renderers[next(iter(self._renderers))]
            self._renderers[name] = DeltaRenderer(self.opened.text.template, **(options or {}))
        return self._renderers[name]

    def cores_alive(self) -> list[int]:
        """`EngineDead` if there is none left."""
        alive = self.client.cores_alive
        if not alive:
            raise EngineDead("no engine core is running")
        return alive

    async def close(self) -> None:
        await self.queue.close()
        await asyncio.to_thread(self.free)

    def free(self) -> None:
        """Close the engine, if it is ours. Waits for its threads."""
        if self._owns_engine:
            self.client.close()
            if not self.client.is_hung:
                self.opened.close()

    # -- admission ----------------------------------------------------------------------------------------------------

    def new_session(
        self,
        *,
        system: str | None,
        sampling_params: SamplingParams | None,
        seed: int | None,
        overflow: Overflow,
        overflow_keep: float,
        template_options: Mapping[str, Any] | None,
        key: str,
        namespace: Hashable,
        priority: int,
        is_kept: bool,
        title: str | None,
        metadata: Mapping[str, str] | None,
    ) -> Session:
        """An empty conversation, routed to one engine core; its options are checked."""
        if overflow not in ("error", "drop_oldest_turns"):
            raise ConfigError(f"overflow {overflow!r} is not supported; supported: 'error', 'drop_oldest_turns'")
        if system is not None and not isinstance(system, str):
            raise InvalidRequest(f"the system prompt must be a string, not {type(system).__name__}")
        Hints(key=key, namespace=namespace, priority=priority)
        sampling = self.opened.text.sampling_params(max_tokens=None) if sampling_params is None else sampling_params
        chosen = seed if seed is not None else getattr(sampling, "seed", None)
        options = SessionOptions(
            sampling=sampling,
            overflow=overflow,
            overflow_keep=check_overflow_keep(overflow_keep),
            template_options=check_template_options(template_options),
            key=key,
            namespace=namespace,
            priority=priority,
            renderer=self.renderer(template_options),
            is_kept=is_kept,
        )
        seeded = options.for_answer({"seed": secrets.randbits(63) if chosen is None else chosen})
        options = replace(options, sampling=seeded)
        label = check_title(title), check_metadata(metadata)
        core = self.routing.choose(system, self.cores_alive())
        session = Session(new_name(), core, options, system, asyncio.get_running_loop().time())
        session.title, session.metadata = label
        return session

    def fork(self, session: Session, at_turn: int | None, at_token: int | None) -> Session:
        """A session that continues another one, or a turn or token of it, on the same engine core. It is added."""
        self.budget.check(session.options.key, num_new=int(session.options.is_kept))
        options = session.options.for_fork(session.num_forks + 1)
        name = f"{session.session_id.partition('.')[0]}.{new_name()}"  # routers keep it on its root's server
        child = Session(name, session.core, options, session.system, asyncio.get_running_loop().time())
        child.restore(session.snapshot())
        child.mark = session.mark
        child.title, child.metadata = session.title, session.metadata
        if at_turn is not None or at_token is not None:
            child.rewind(self.opened.text, at_turn, at_token)
        session.num_forks += 1
        self.routing.stay(child.core, child.system)
        self._add(child)
        return child

    # -- sessions that are not in memory ------------------------------------------------------------------------------

    async def open(self, session_id: str, *, resumes: str | None = None, may_be_stale: bool = False) -> None:
        """Have a session in memory as it is now, if there is one; it is this server's from now on.

        `resumes` names an answer that is to be gone on with, if its server has not finished it. One that is in memory
        and `may_be_stale` is not looked up: what is written of it will fail if another server has taken it.
        """
        persistence = self.persistence
        if persistence is None or not isinstance(session_id, str) or self.queue.has_ended(session_id):
            return
        session = self.queue.sessions.get(session_id)
        if session is not None:
            if session.problem is not None and not (session.is_stored or session.num_saving or session.is_busy):
                self.save(session)  # the store had failed when it was created; what is next is written behind this
            if may_be_stale or not session.epoch or not session.is_stored or session.is_busy or session.waiting:
                return
            if await asyncio.wrap_future(persistence.store.holds(session_id, session.epoch)):
                return
            if self.queue.sessions.get(session_id) is session and not session.is_busy:
                self.drop(session)
        loading = self._loading.get(session_id)
        if loading is None:
            loading = asyncio.create_task(self._load(persistence, session_id, resumes), name="tokenmill-open")
            self._loading[session_id] = loading
            loading.add_done_callback(lambda done: self._loaded(session_id, done))
        await asyncio.shield(loading)

    async def _load(self, persistence: Persistence, session_id: str, resumes: str | None) -> None:
        store, scope = persistence.store, persistence.scope
        stored = await asyncio.to_thread(store.claim, scope, session_id, resumes=resumes)
        if stored is None:
            return
        if self.is_leaving:
            store.let_go(session_id, stored.epoch)
        else:
            self.adopt(stored)

    def _loaded(self, session_id: str, done: asyncio.Task[None]) -> None:
        del self._loading[session_id]
        if not done.cancelled():
            done.exception()  # those who wait have it

    def open_now(self, session_id: str) -> None:
        """The same for callers that can't wait: reads the store in between."""
        if self.persistence is not None and not self.is_leaving and session_id not in self._loading:
            stored = self.persistence.store.claim(self.persistence.scope, session_id)
            if stored is not None:
                self.adopt(stored)

    def adopt(self, stored: Stored) -> Session:
        """Go on with a session that was in the store."""
        self._make_room()
        core = self.routing.choose(stored.record.head["system"], self.cores_alive())
        session = restored(stored.record, core, time.monotonic() - stored.idle_s)
        session.options = replace(session.options, renderer=self.renderer(session.options.template_options))
        session.kv_source = stored.kv
        session.epoch, session.unfinished, session.is_stored = stored.epoch, stored.unfinished, True
        session.mark = mark_before(session)
        self.queue.add(session)
        self.budget.load(session)
        return session

    def _make_room(self) -> None:
        """Put sessions away that were used least recently, once there are too many in memory."""
        if len(self.queue.sessions) < MAX_LOADED:
            return
        idle = [one for one in self.queue.sessions.values() if self._can_leave(one)]
        for session in heapq.nsmallest(MAX_LOADED // 10, idle, key=lambda one: one.last_used):
            self.drop(session, is_ours=True)

    @staticmethod
    def _can_leave(session: Session) -> bool:
        is_idle = session.live is None and not session.is_preparing and not session.waiting
        return is_idle and session.options.is_kept and session.problem is None and session.num_saving == 0

    def drop(self, session: Session, *, is_ours: bool = False) -> None:
        """Take a session out of memory, whose state is in the store; unless it `is_ours`, another server has it."""
        if session.state is SessionState.ENDED or self.persistence is None:
            return
        session.is_moved = not is_ours
        if session.live is not None:
            session.live.cancel(FinishReason.ERROR)
        session.state = SessionState.ENDED
        self.queue.put_away(session)
        self.routing.leave(session.core, session.system)
        self.budget.put_away(session)
        self.client.release(session.session_id)
        self.persistence.let_go(session)

    def count_stored(self) -> None:
        """Count what is in the store. Waits for it."""
        self._count(self._usage())

    def _end_expired(self) -> None:
        """Those of the store whose time is over already."""
        if self.persistence is not None and self.limits.ttl_s is not None and not self.persistence.store.is_read_only:
            with suppress(NotDurable):
                self.persistence.store.delete_idle(self.persistence.scope, self.limits.ttl_s).result()

    def _usage(self) -> dict[str, tuple[int, int]]:
        return {} if self.persistence is None else self.persistence.store.usage(self.persistence.scope)

    def _count(self, stored: dict[str, tuple[int, int]]) -> None:
        for session in self.queue.sessions.values():
            if session.epoch and session.is_stored and session.options.key in stored:  # it is counted as in memory
                count, num_bytes = stored[session.options.key]
                stored[session.options.key] = (max(0, count - 1), max(0, num_bytes - session.num_bytes))
        self.budget.set_stored(stored)

    async def info(self, session_id: str) -> SessionInfo:
        """A session as it is now, wherever it is: reading it does not move it."""
        if self.persistence is None or self.queue.has_ended(session_id):
            return self.queue.find(session_id).info(has_store=self.persistence is not None)
        (found,) = await self.infos([session_id]) or (None,)
        if found is None:
            raise SessionNotFound(f"no session {session_id!r}")
        return found

    async def infos(self, names: Sequence[str]) -> list[SessionInfo]:
        """Several sessions as they are now, in this order; those that are gone are left out."""
        here = {name: one for name in names if (one := self.queue.sessions.get(name)) is not None}
        # What other servers may change is read from the store, unless it is newer here.
        ours = {name for name, one in here.items() if not one.epoch or one.is_busy or one.problem or not one.is_stored}
        others, read = [name for name in names if name not in ours], dict[str, SessionInfo]()
        if others and self.persistence is not None:
            found = await asyncio.to_thread(self.persistence.store.read, self.persistence.scope, others)
            read = {one.record.session_id: stored_info(one) for one in found}
        has_store = self.persistence is not None
        told = {name: here[name].info(has_store=has_store) for name in ours} | read
        return [told[name] for name in names if name in told]

    async def places(
        self, key: str | None, limit: int, after: Place | None = None, *, newest_first: bool = False
    ) -> list[Place]:
        """A key's sessions by creation time, from the one after a place on."""
        found = {
            place
            for place in self.in_memory(key)
            if after is None or (place < after if newest_first else place > after)
        }
        if self.persistence is not None:
            store, scope = self.persistence.store, self.persistence.scope
            page = await asyncio.to_thread(store.page, scope, key, limit, after, newest_first=newest_first)
            found.update(page)
        return (heapq.nlargest if newest_first else heapq.nsmallest)(limit, found)

    def in_memory(self, key: str | None = None) -> list[Place]:
        found = self.queue.sessions.values()
        return [(one.created_at, one.session_id) for one in found if key is None or one.options.key == key]

    def _add(self, session: Session) -> None:
        self.queue.add(session)
        self.used(session)

    async def begin(self, session: Session) -> str:
        """Add a new session; its name, once it is durable or known not to be."""
        self._add(session)
        await self.until_saved([session])
        return session.session_id

    async def until_saved(self, made: Sequence[Session]) -> None:
        """Wait until new sessions are durable, or known not to be. They end if the caller stops waiting."""
        savings = [self.save(session) for session in made]
        try:
            for saving in savings:
                await until_durable(saving)
        except asyncio.CancelledError:
            for session in made:
                self.end(session)
            raise

    # -- operations ---------------------------------------------------------------------------------------------------

    def used(self, session: Session) -> None:
        """Note that a session was used, and how large its log is now."""
        session.last_used, session.used_at = asyncio.get_running_loop().time(), time.time()
        self.budget.set(session)
        self.watch_idle()

    async def change(self, session_id: str, operation: Callable[[Session], T]) -> T:
        """Have a session changed when its turn comes; the result, once that is durable or known not to be."""

        def change(session: Session) -> tuple[T, Session, asyncio.Future[bool] | None]:
            return operation(session), session, self._changed(session)

        return await self._until_kept(lambda: self.queue.ask(session_id, change))

    async def change_text(self, session_id: str, num_bytes: int, operation: Callable[[Session], T]) -> T:
        """As `change`, with an operation that renders and tokenizes `num_bytes` of new text."""

        def change(session: Session, result: T) -> tuple[T, Session, asyncio.Future[bool] | None]:
            return result, session, self._changed(session)

        work = self.text_work(num_bytes, operation)
        return await self._until_kept(lambda: self.queue.ask(session_id, change, prepare=work))

    async def _until_kept(self, change: Callable[[], Awaitable[tuple[T, Session, asyncio.Future[bool] | None]]]) -> T:
        """Make a change until it is durable, or known not to be: once more if another server has taken the session."""
        for _ in range(MAX_MOVES):
            result, session, saving = await change()
            if saving is None or await asyncio.shield(saving) or not session.is_moved:
                return result
        raise SessionMoved(f"session {session.session_id} is used on several servers at once")

    def text_work(self, num_bytes: int, work: Callable[[Session], Any]) -> TextWork:
        """The part of an operation that renders and tokenizes: off the event loop if it is long."""
        return TextWork(self.texts, self.opened.text, num_bytes, work)

    def _changed(self, session: Session) -> asyncio.Future[bool] | None:
        self.used(session)
        return self.save(session)

    def save(self, session: Session) -> asyncio.Future[bool] | None:
        """Put the state of a session into the store, if it is to be there; one that has ended is not put back."""
        if self.persistence is None or not session.options.is_kept or session.state is SessionState.ENDED:
            return None
        session.unfinished = None  # as in the store: the session has gone on without it
        return self.persistence.save(session)

    # -- answers ------------------------------------------------------------------------------------------------------

    def commit_prompt(self, session: Session, params: SamplingParams, must_fit: bool) -> None:
        """Put a session's input into its log, with room for an answer. If it raises, the log may have changed."""
        longest = self.client.max_model_len
        wanted = params.max_tokens or 1
        # Where it is only an upper bound, a large `max_tokens` must not drive out the conversation.
        session.reserve(self.opened.text, longest, wanted if must_fit else min(wanted, longest // 2))
        session.commit_input(self.opened.text)
        if must_fit and params.max_tokens is not None and len(session.log) + params.max_tokens > longest:
            raise ContextOverflow(context_overflow(longest, len(session.log), params.max_tokens))

    def plan(
        self, session: Session, params: SamplingParams, use: ToolUse | None, thinking_budget: int | None
    ) -> tuple[SamplingParams, TurnPlan | None]:
        """How the answer to a session's log is constrained and read."""
        plan = None
        if use is not None or self._reasons:
            params, plan = self.intake.plan(session.log.tokens.array, params, use or ToolUse(), thinking_budget)
        if params.structured_outputs is not None:
            self.intake.grammars.compile(params.structured_outputs)  # here, where it holds up no event loop
        return params, plan

    def begin_answer(
        self,
        session: Session,
        params: SamplingParams,
        plan: TurnPlan | None,
        hints: Hints,
        request_id: str | None,
        timeout_s: float | None,
        prefix: Sequence[int] = (),
    ) -> Answer:
        """Ask the engine for an answer to a session's log, which begins with the `prefix`."""
        name = request_id or f"answer-{secrets.token_hex(12)}"
        said = [] if params.structured_outputs is None else session.said
        log = session.log.tokens.array
        generation = self.intake.generation(log, params, name, hints, timeout_s, plan=plan, said=said, prefix=prefix)
        live = Answer(
            generation,
            lambda done: self._finished(session, done),
            self.limits.stall_timeout_s,
            self.limits.max_unread_bytes,
        )
        if session.core not in self.cores_alive():  # its core is gone for good: it is a log, and goes on elsewhere
            self.routing.leave(session.core, session.system)
            session.core = self.routing.choose(session.system, self.cores_alive())
        live.start(self.bridge, session.core)
        session.live, session.state = live, SessionState.GENERATING
        return live

    def _finished(self, session: Session, live: Answer) -> asyncio.Future[bool] | None:
        """The engine has let go of an answer, however it ended. It is over when it is in the store, if there is one."""
        if session.state is SessionState.ENDED or session.live is not live:
            live.durable = False if self.persistence is not None and session.options.is_kept else None
            return None
        if self.hands_over(session, live):
            live.durable = False
            return None
        unfinished = session.unfinished if live.void is not None else None  # can still be resumed
        try:
            self._take_answer(session, live)
            saving = self._changed(session)
            session.unfinished = unfinished
        except Exception:  # a bug; but the session is not to wait for this answer for ever
            log.exception("answer %s could not be put into its session's log", live.request_id)
            saving = None
        if saving is None:
            self._settle(session, live)
        else:
            saving.add_done_callback(lambda done: self._settle(session, live, done.result()))
        return saving

    def hands_over(self, session: Session, live: Answer) -> bool:
        """Is an answer cut off by a shutdown left to the next server, which runs it again?"""
        is_cut = live.end is not None and live.end.finish_reason == FinishReason.SHUTDOWN.value
        return self.is_leaving and is_cut and bool(session.epoch) and live.void is None

    def note_begun(self, session: Session, live: Answer, answer: Mapping[str, Any]) -> None:
        """Note in a store that is shared that an answer begins. The engine computes it meanwhile."""
        if self.persistence is not None and session.epoch:  # else it is not kept
            live.begun = self.persistence.store.begin_answer(session.session_id, session.epoch, answer)

    async def has_begun(self, session_id: str, live: Answer) -> bool:
        """Wait until that is noted; nobody reads the answer before. False: the session has moved, the answer ended."""
        if live.begun is None:
            return True
        try:
            await asyncio.wrap_future(live.begun)
        except SessionMoved:
            session = self.queue.sessions.get(session_id)
            if session is not None and session.live is live:
                self.drop(session)
            return False
        except BaseException as error:
            if isinstance(error, NotDurable) and live.is_released:
                return True  # and it is not durable either
            live.void = live.on_void
            live.cancel()
            raise
        return True

    def _take_answer(self, session: Session, live: Answer) -> None:
        if live.end is None:
            raise IntegrityError(f"the engine has let go of answer {live.request_id} before its end")
        if live.void is not None:
            live.void()
            return
        if live.undo is not None and not live.token_ids and live.end.is_failure:
            live.undo()
        ending = (live.end.finish_reason, live.end.stop_reason)
        turn = None if live.parts is None else ParsedTurn.of(live.parts)
        session.take_answer(live.token_ids, *ending, live.generation.params, self.opened.text.tokenizer, turn)
        if live.token_ids:
            session.last_answer = LastAnswer(live.request_id, len(live.token_ids))
        note_cost(session, live.generation, self.opened)

    def _settle(self, session: Session, live: Answer, durable: bool | None = None) -> None:
        """An answer is over: the session is free for what comes next."""
        live.durable = durable
        if session.state is SessionState.ENDED or session.live is not live:
            return
        session.live, session.answer = None, live.kept()
        session.state = SessionState.APPENDING if session.is_unanswered else SessionState.IDLE
        self.queue.note_free(session)
        if self.persistence is not None and session.options.is_kept:
            self.persistence.note_answered(session)

    # -- ending -------------------------------------------------------------------------------------------------------

    def end(self, session: Session, *, for_good: bool = True) -> Future[None] | None:
        """End a session; unless it is `for_good` it stays in the store. The future says when that is durable."""
        if session.state is SessionState.ENDED:
            return None
        if session.live is not None:
            session.live.cancel(FinishReason.SHUTDOWN if self.is_leaving else FinishReason.CANCELLED)
        session.state = SessionState.ENDED
        self.queue.remove(session)
        self.routing.leave(session.core, session.system)
        self.budget.release(session)
        self.client.release(session.session_id)
        if self.persistence is None or not session.options.is_kept:
            return None
        if for_good:
            return self.persistence.end(session)
        self.persistence.let_go(session)
        return None

    def end_idle(self, seconds: float) -> int:
        """End the sessions that have been idle for this many seconds; their number."""
        now = asyncio.get_running_loop().time()
        idle = [
            session
            for session in self.queue.sessions.values()
            if session.state is not SessionState.GENERATING and now - session.last_used >= seconds
        ]
        for session in idle:
            if session.epoch:  # another server may have used it since: the store knows
                self.drop(session, is_ours=True)
            else:
                self.end(session)
        if self.persistence is not None and not self.persistence.store.is_read_only:
            self.persistence.store.delete_idle(self.persistence.scope, seconds)
        return len(idle)

    def watch_idle(self) -> None:
        """End sessions whose time to live is over, from now on."""
        is_watched = self._expiry is not None and not self._expiry.done()
        if self.limits.ttl_s is not None and not is_watched and not self.is_leaving:
            self._expiry = asyncio.create_task(self._expire(self.limits.ttl_s), name="tokenmill-expiry")

    async def _expire(self, ttl_s: float) -> None:
        while not self.is_leaving:
            await asyncio.sleep(min(ttl_s / 4, RECOUNT_S))
            self.end_idle(ttl_s)
            with suppress(NotDurable):
                self._count(await asyncio.to_thread(self._usage))

    def stop_watching(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    # -- session files ------------------------------------------------------------------------------------------------

    async def hand_over_kv(self, session_id: str, epoch: int) -> tuple[bytes, bytes, bytes] | None:
        """KV of a session for the server whose later claim has this epoch, in pieces; the session is dropped here."""
        session = self.queue.sessions.get(session_id)
        if session is None or session.is_busy or not 0 < session.epoch < epoch:
            return None
        found = await export_kv(self.client, self.opened.model, session, at_once=True)
        if self.queue.sessions.get(session_id) is session and not session.is_busy:
            self.drop(session)
        return None if found is None else await asyncio.to_thread(packed_kv, self.fingerprint.form, *found)

    async def exported(self, session_id: str, *, kv: bool) -> bytes:
        """A session when its turn comes, as the bytes of a file; with its KV, if that is wanted and there is any."""
        record, session = await self.queue.ask(session_id, lambda one: (record_of(one), one))
        identity = await asyncio.to_thread(lambda: self.fingerprint)
        found = await export_kv(self.client, self.opened.model, session) if kv else None
        if found is None or not np.array_equal(found[0], record.tokens.array[: len(found[0])]):
            return await asyncio.to_thread(pack, record, identity)
        return await asyncio.to_thread(pack, record, identity, len(found[0]), found[1])

    async def imported(
        self, source: bytes | str | Path, hints: Hints, template_options: Collection[str] | None
    ) -> Session:
        """A session from a file or its bytes, for the caller that the hints name; KV that fits is with its core.

        `template_options` are the names that its options for the template may have. A caller that restricts them does
        not trust the file, so its KV is not taken either: it would be shared with all requests that begin alike.
        """
        name = new_name()
        data = source if isinstance(source, bytes) else await asyncio.to_thread(read_whole, Path(source))
        size = max(INLINE_BYTES, min(len(data), MAX_TEXT_BYTES))
        file = await self.texts.run(size, lambda: self.read_file(data, name))
        is_trusted = template_options is None
        unknown = set(file.record.head["template_options"]) - set(template_options or ()) if not is_trusted else set()
        if unknown:
            raise SessionFileError(f"template options {', '.join(sorted(unknown))} are not accepted")
        core = self.routing.choose(file.record.head["system"], self.cores_alive())
        session = restored(file.record, core, asyncio.get_running_loop().time())
        renderer = self.renderer(session.options.template_options)
        session.options = replace(
            session.options, key=hints.key, namespace=hints.namespace, priority=hints.priority, renderer=renderer
        )
        session.mark = mark_before(session)
        if is_trusted and file.num_kv_tokens >= MIN_KV_TOKENS and file.fingerprint.form == self.fingerprint.form:
            tokens = file.record.tokens.array[: file.num_kv_tokens]
            try:
                await import_kv(self.client, self.opened.model, session, tokens, file.kv)
            except BaseException:  # the caller has gone
                self.discard(session)
                raise
        return session

    def discard(self, session: Session) -> None:
        """Release the core and the KV of an imported session that was not added."""
        self.routing.leave(session.core, session.system)
        self.client.release(session.session_id)

    def read_file(self, data: bytes, session_id: str) -> SessionFile:
        """A session's file, if it is of this model. Not for an event loop: it may hold a long conversation."""
        refusal = self.fingerprint.why_not(read_fingerprint(data).of_log)
        if refusal is not None:
            raise SessionFileError(refusal)
        file = unpack(data, session_id, self.opened.model.info.vocab_size)
        longest, said = self.client.max_model_len, self._num_rendered(file.record)
        if len(file.record.tokens) >= longest or said > SAID_PER_CONTEXT * longest:
            count = max(len(file.record.tokens), said)
            raise SessionFileError(f"the session has {count} tokens; the context is {longest}")
        return file

    def _num_rendered(self, record: SessionRecord) -> int:
        """Tokens of all messages of a record, if they may be many: they may have to be rendered later."""
        has_raw_input = any(turn.is_raw for turn in record.turns)
        past = [] if has_raw_input else [message for turn in record.turns for message in turn.messages]
        messages = [*past, *record.head["inbox"]] or [{"role": "system", "content": record.head["system"] or ""}]
        if self.opened.text.template is None or num_chars(messages) < self.client.max_model_len:
            return 0
        limit = SAID_PER_CONTEXT * self.client.max_model_len
        try:
            return len(self.opened.text.template.encode(messages, limit, **record.head["template_options"]))
        except TooManyTokens as error:
            return error.at_least
        except TokenmillError:  # then they can't be rendered later either
            return 0


def stored_info(stored: Stored) -> SessionInfo:
    """A session that is not in memory; which core it would have is not known."""
    info = restored(stored.record, 0, time.monotonic()).info(has_store=True)
    return replace(info, state=SessionState.GENERATING.value) if stored.unfinished is not None else info


def new_name() -> str:
    return secrets.token_urlsafe(NAME_BYTES)


def answer_in_log(session: Session, request_id: str | None, tokenizer: Tokenizer) -> Answer | None:
    """The last answer of a session, if it is this one and the log still has all of it."""
    known, turns = session.last_answer, session.log.turns
    if known is None or request_id not in (None, known.request_id) or not turns or turns[-1].kind != "answer":
        return None
    ids = session.log.tokens.array[: turns[-1].end][-known.num_tokens :].tolist()
    return Answer.of_log(known.request_id, ids, turns[-1].finish_reason or "stop", tokenizer)


def no_answer(session: Session, request_id: str | None) -> TokenmillError:
    """Why there is nothing to read of a session's last answer, or of the one with this id."""
    known = session.last_answer
    if known is None and request_id is None:
        return InvalidRequest(f"session {session.session_id} has no answer to read")
    is_kept = known is not None and request_id in (None, known.request_id)
    offset = known.num_tokens if known is not None and is_kept else 0
    what = f"the answer cannot be resumed after a restart; the session has {offset} of its tokens"
    return AnswerLost(what, durable_offset=offset)
