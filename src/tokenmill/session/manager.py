"""`SessionManager`: the sessions of one loaded model, from admission to their end. What `reload` replaces.

It owns the engine client (unless an `AsyncLLM` does), the command queue, the routing to engine cores and the
persistence of its sessions. Everything but loading and reading files runs on the service's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
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
    Overloaded,
    SessionFileError,
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
    read_fingerprint,
    read_whole,
    record_of,
    restored,
    unpack,
)
from tokenmill.session.routing import CommandQueue, Policy, TextWork, make_routing
from tokenmill.session.session import (
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
from tokenmill.session.store import SessionStore, Stored
from tokenmill.text.delta import DeltaRenderer
from tokenmill.text.messages import num_chars
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

    def used(self, key: str) -> tuple[int, int]:
        """A key's sessions, without those of stored responses, and the bytes of all their logs."""
        return self._num_sessions[key], self._num_bytes[key]

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
        store: SessionStore | None,
        limits: SessionLimits,
        texts: TextWorkers,
    ) -> None:
        self.source, self.options = source, options
        self.limits = limits
        self.texts = texts
        """Where long input is rendered and tokenized."""
        self.budget = LogBudget(limits.max_log_bytes, limits.quota)
        self.queue = CommandQueue()
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
                None if store is None else Persistence(store, self.fingerprint, opened.model, self.client)
            )
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
        child = Session(new_name(), session.core, options, session.system, asyncio.get_running_loop().time())
        child.restore(session.snapshot())
        child.mark = session.mark
        child.title, child.metadata = session.title, session.metadata
        if at_turn is not None or at_token is not None:
            child.rewind(self.opened.text, at_turn, at_token)
        session.num_forks += 1
        self.routing.stay(child.core, child.system)
        self._add(child)
        return child

    def adopt(self, stored: Stored) -> Session:
        """Go on with a session that was in the store, unless it has expired meanwhile."""
        core = self.routing.choose(stored.record.head["system"], self.cores_alive())
        session = restored(stored.record, core, time.monotonic() - stored.idle_s)
        session.options = replace(session.options, renderer=self.renderer(session.options.template_options))
        session.has_saved_kv = True
        session.mark = mark_before(session)
        self.queue.add(session)
        self.budget.set(session)
        if self.limits.ttl_s is not None and stored.idle_s >= self.limits.ttl_s:
            self.end(session)
        return session

    def stored(self) -> list[Stored]:
        """Those of its sessions that are in the store. Waits for the disk."""
        return [] if self.persistence is None else self.persistence.load()

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

        def change(session: Session) -> tuple[T, asyncio.Future[bool] | None]:
            return operation(session), self._changed(session)

        result, saving = await self.queue.ask(session_id, change)
        await until_durable(saving)
        return result

    async def change_text(self, session_id: str, num_bytes: int, operation: Callable[[Session], T]) -> T:
        """As `change`, with an operation that renders and tokenizes `num_bytes` of new text."""

        def change(session: Session, result: T) -> tuple[T, asyncio.Future[bool] | None]:
            return result, self._changed(session)

        result, saving = await self.queue.ask(session_id, change, prepare=self.text_work(num_bytes, operation))
        await until_durable(saving)
        return result

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
    ) -> Answer:
        """Ask the engine for an answer to a session's log."""
        name = request_id or f"answer-{secrets.token_hex(12)}"
        said = [] if params.structured_outputs is None else session.said
        log = session.log.tokens.array
        generation = self.intake.generation(log, params, name, hints, timeout_s, plan=plan, said=said)
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
        try:
            self._take_answer(session, live)
            saving = self._changed(session)
        except Exception:  # a bug; but the session is not to wait for this answer for ever
            log.exception("answer %s could not be put into its session's log", live.request_id)
            saving = None
        if saving is None:
            self._settle(session, live)
        else:
            saving.add_done_callback(lambda done: self._settle(session, live, done.result()))
        return saving

    def _take_answer(self, session: Session, live: Answer) -> None:
        if live.end is None:
            raise IntegrityError(f"the engine has let go of answer {live.request_id} before its end")
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
            self.end(session)
        return len(idle)

    def watch_idle(self) -> None:
        """End sessions whose time to live is over, from now on."""
        is_watched = self._expiry is not None and not self._expiry.done()
        if self.limits.ttl_s is not None and not is_watched and not self.is_leaving:
            self._expiry = asyncio.create_task(self._expire(self.limits.ttl_s), name="tokenmill-expiry")

    async def _expire(self, ttl_s: float) -> None:
        while not self.is_leaving:
            await asyncio.sleep(ttl_s / 4)
            self.end_idle(ttl_s)

    def stop_watching(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    # -- session files ------------------------------------------------------------------------------------------------

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
                self.routing.leave(core, session.system)
                self.client.release(name)
                raise
        return session

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


def new_name() -> str:
    return secrets.token_urlsafe(NAME_BYTES)


def no_answer(session: Session, request_id: str | None) -> TokenmillError:
    """Why there is nothing to read of a session's last answer, or of the one with this id."""
    known = session.last_answer
    if known is None and request_id is None:
        return InvalidRequest(f"session {session.session_id} has no answer to read")
    is_kept = known is not None and request_id in (None, known.request_id)
    offset = known.num_tokens if known is not None and is_kept else 0
    what = f"the answer cannot be resumed after a restart; the session has {offset} of its tokens"
    return AnswerLost(what, durable_offset=offset)
