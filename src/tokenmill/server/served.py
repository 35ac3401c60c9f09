"""`Served`: the state shared by the endpoints: models, settings, running calls, documents, stored responses."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenmill.engine.request import BACKGROUND, Hints, Quota
from tokenmill.errors import Overloaded, SessionNotFound, TokenmillError
from tokenmill.server.batch_runner import Batches
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError, stopping, unavailable
from tokenmill.server.keys import KeyRing
from tokenmill.server.middleware import TIMEOUT_HEADER, Caller, Gate
from tokenmill.server.models import Models, ModelSpec, ServedModel
from tokenmill.server.requests import Hinted
from tokenmill.server.stored_files import Files
from tokenmill.server.streaming import Call, OpenCalls
from tokenmill.server.telemetry.hub import Telemetry
from tokenmill.server.telemetry.timeline import open_spans
from tokenmill.session.documents import Bounds, Document, Documents
from tokenmill.session.manager import SessionLimits
from tokenmill.session.postgres import PostgresStore
from tokenmill.session.service import SessionService
from tokenmill.session.session import SessionInfo
from tokenmill.session.store import SessionStore, Store
from tokenmill.text.workers import TextWorkers

LOADING = unavailable("the model is loading", "loading")
STOPPING = stopping()
WAITING_LINES = 2
"""Batch lines that wait for a row."""
UNLIMITED = Quota()
"""On a server without keys."""
ServedSession = tuple[ServedModel, SessionInfo]
"""A session and its model."""
RESPONSE, COMPLETION, CONVERSATION = "response", "chat.completion", "conversation"
"""Kinds of documents."""
EVICTED = frozenset({RESPONSE, COMPLETION})
"""Kinds whose oldest documents are evicted for new ones."""
MAX_CONVERSATIONS = 10_000
"""Per key; beyond it, new ones are rejected."""
KEPT_S = 30 * 24 * 3600.0
"""Maximum retention."""


class Served:
    """A server's state. Its gate is closed until the models are loaded, and again on shutdown."""

    def __init__(
        self,
        config: ServerConfig,
        specs: Sequence[ModelSpec] = (),
        spec_of: Callable[[str], ModelSpec] | None = None,
    ) -> None:
        self.config = config
        self.started = int(time.time())
        self.calls = OpenCalls()
        self.keys = KeyRing(config)
        self.spans = None if config.spans_url is None else open_spans(config.spans_url)
        self.telemetry = Telemetry(None if self.spans is None else self.spans.note)
        self.gate = Gate(LOADING)
        self.is_leaving = False
        """About to shut down: routers should send requests elsewhere."""
        limits = SessionLimits(
            ttl_s=config.session_ttl_s, max_log_bytes=config.max_session_bytes, quota=self.keys.session_quota
        )
        self.store: Store | None = None
        if isinstance(config.store, str):
            address, name = config.advertise or "", config.replica
            self.store = PostgresStore(
                config.store, address=address, lease_s=config.lease_s, name=name, kv_transfer=config.kv_transfer
            )
        elif config.store is not None:
            self.store = SessionStore(config.store)
        self.texts = TextWorkers(config.tokenizer_threads, config.max_tokenizing_bytes)
        self.models = Models(specs, self.calls, self.telemetry, limits, self.store, self.texts, spec_of)
        self.documents = Documents.in_memory() if self.store is None else self.store.documents
        self.busy_conversations: set[tuple[str, str]] = set()
        """Keys and ids of conversations that a response is being added to."""
        max_bytes_of: Callable[[str], int | None] = lambda key: self.keys.limits_of(key).file_bytes  # noqa: E731
        blobs = None if self.store is None else self.store.blobs
        directory = config.store if isinstance(config.store, Path) else None
        self.files = Files(self.documents, directory, config.max_files_bytes, max_bytes_of, blobs)
        self.batches = Batches(
            self.files,
            self.documents,
            self.keys,
            self.telemetry.batches,
            self.num_spare_rows,
            config.max_body_bytes,
            blobs,
            look_s=config.lease_s / 2,
        )
        self.responses = ResponseStore(
            config.max_stored_responses, lambda key: self.keys.limits_of(key).stored_responses
        )

    def open(self) -> None:
        """The models are loaded: admit requests, unless the server is already shutting down."""
        if self.gate.closed is LOADING:
            self.gate.closed = None

    def drain(self) -> None:
        """Admit no new requests; running ones continue."""
        self.gate.closed = STOPPING
        self.telemetry.end_streams()

    async def close(self) -> None:
        """End everything that runs, with `shutdown`."""
        await self.batches.stop()
        await self.models.close()
        self.files.close()
        self.texts.close()
        self.documents.close()
        if self.store is not None:
            await asyncio.to_thread(self.store.close)
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)

    @property
    def is_ready(self) -> bool:
        """Whether it admits requests and the engines make progress."""
        return (
            self.gate.closed is None and not self.is_leaving and all(model.llm.is_ready for model in self.models.loaded)
        )

    @property
    def is_lost(self) -> bool:
        """Whether an engine is lost: hung or given up. Only a restart of the server helps."""
        return any(model.llm.is_lost for model in self.models.loaded)

    def num_spare_rows(self) -> int:
        """Maximum batch lines in the engines: the rows beside live requests, plus a few that
        wait, so that no row is idle in between.
        """
        rows = sum(model.llm.opened.config.max_num_seqs * model.llm.num_cores for model in self.models.loaded)
        live = sum(call.num_choices for call in self.calls if call.caller.background_s is None)
        return max(1, rows - live) + WAITING_LINES

    def call(self, caller: Caller, body: Hinted, model: ServedModel, prefix: str) -> Call:
        """An engine call for a request."""
        hints, timeout_s = self.hints(caller.key, body), self.timeout(caller, body)
        if caller.background_s is not None:
            hints, timeout_s = replace(hints, priority=BACKGROUND + hints.priority), caller.background_s
        call = Call(caller, model.llm, self.config, self.calls, self.texts, prefix, hints, timeout_s)
        caller.model = model.name
        self.telemetry.note_call(caller.key, caller.request_id, call.id)
        return call

    def hints(self, key: str, body: Hinted) -> Hints:
        """The owner of a request, and how it is scheduled and cached.

        Several keys share no KV: timing must not reveal what another key has cached.
        """
        salts = (*((key,) if self.keys.are_several else ()), *((body.cache_salt,) if body.cache_salt else ()))
        return Hints(priority=body.priority or 0, key=key, namespace=salts or None, quota=self.quota(key, body))

    def quota(self, key: str, body: Hinted) -> Quota:
        """Engine quota of a request: its key's, or less if the body says so."""
        quota = self.keys.quotas.get(key, UNLIMITED)
        given = {name: getattr(body, name) for name in ("max_context", "max_tokens_per_step")}
        own = {name: min(value, getattr(quota, name) or value) for name, value in given.items() if value is not None}
        return replace(quota, **own) if own else quota

    def timeout(self, caller: Caller, body: Hinted) -> float:
        """Time limit of a request (s): the server's, or less if header or body say so."""
        timeout_s = self.config.max_request_s
        if body.timeout_s is not None:
            timeout_s = min(timeout_s, body.timeout_s)
        given = caller.timeout
        return timeout_s if given is None else min(timeout_s, _seconds(given))

    # -- documents ----------------------------------------------------------------------------------------------------

    async def put(
        self,
        kind: str,
        name: str,
        key: str,
        body: dict[str, Any],
        *,
        replaces: bool = False,
        expected: dict[str, Any] | None = None,
    ) -> bool:
        """Store or replace a document of a key; False if the one that it `replaces` is gone, or not as `expected`.

        `Overloaded` beyond a limit, `NotDurable` if the disk rejects the write.
        """
        limits, is_evicted = self.keys.limits_of(key), kind in EVICTED
        bounds = Bounds(
            evicts=EVICTED,
            max_documents=limits.stored_responses if is_evicted else MAX_CONVERSATIONS,
            max_kind=self.config.max_stored_responses if is_evicted else None,
            max_owner_bytes=limits.stored_bytes,
            max_bytes=self.config.max_stored_bytes,
        )
        expires_at = time.time() + KEPT_S if is_evicted else None
        document = Document(kind, name, key, body, expires_at=expires_at)
        put = await asyncio.wrap_future(self.documents.put(document, bounds, replaces=replaces, expected=expected))
        for evicted_kind, evicted in put.evicted:
            if evicted_kind == RESPONSE:
                self.responses.drop(evicted)
        if put.refusal is not None:
            raise Overloaded(f"{put.refusal}; delete some first")
        return put.is_stored

    async def document(self, kind: str, name: str, key: str, *, is_used: bool = False) -> Document | None:
        """A document of this key; those of other keys are not found."""
        return await asyncio.wrap_future(self.documents.get(kind, name, key, is_used=is_used))

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def model_of(
        self,
        caller: Caller,
        session_id: str,
        *,
        is_read: bool = False,
        resumes: str | None = None,
        may_be_stale: bool = True,
    ) -> ServedModel:
        """The model of a session of the caller's key; those of other keys are not found.

        Unless it `is_read` only, loads the session into memory, as it is now unless it `may_be_stale`: operations see
        to that themselves.
        """
        for model in self.models.loaded:
            try:
                key = await model.sessions.whose(session_id)
            except SessionNotFound:
                continue
            if key == caller.key:
                if not is_read and self.store is not None:
                    await model.sessions.open(session_id, resumes=resumes, may_be_stale=may_be_stale)
                caller.session_id = session_id
                model.last_used = time.monotonic()
                return model
        raise SessionNotFound(f"no session {session_id!r:.80}")

    async def sessions(
        self, caller: Caller, limit: int, after: str | None = None, *, newest_first: bool = False
    ) -> tuple[list[ServedSession], bool]:
        """A page of the caller's sessions by creation time, starting after a session; and whether there are more."""
        models = self.models.loaded
        last = None
        if after is not None:
            model = await self.model_of(caller, after, is_read=True)
            last = ((await model.sessions.info(after)).created_at, after)
        rows = [
            (*row, place)
            for place, model in enumerate(models)
            for row in await model.sessions.places(caller.key, limit + 1, last, newest_first=newest_first)
        ]
        found = sorted(rows, reverse=newest_first)[: limit + 1]
        shown = {
            info.session_id: info
            for place, model in enumerate(models)
            for info in await model.sessions.infos([name for _, name, where in found[:limit] if where == place])
        }
        page = [(models[place], shown[name]) for _, name, place in found[:limit] if name in shown]
        return page, len(found) > limit


def _seconds(given: str) -> float:
    """The deadline from the header."""
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"{TIMEOUT_HEADER} must be a number of seconds, not {given!r:.40}", param=TIMEOUT_HEADER)
    return seconds


# -- stored responses -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredResponse:
    sessions: SessionService
    """The session service of its model; not the model itself, which may be unloaded."""
    model_name: str
    session_id: str
    key: str
    namespace: Hashable
    instructions: str | None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    truncates: bool = False
    """Whether its oldest turns are dropped when it exceeds the context."""

    @property
    def made(self) -> tuple[Any, ...]:
        """Settings that a session must share to continue from this one."""
        return (self.sessions, self.instructions, self.namespace, self.template_options, self.truncates)

    def conversation(self) -> list[dict[str, Any]]:
        """The conversation up to its end, without the instructions."""
        turns = self.sessions.get(self.session_id).turns
        said = [dict(message) for turn in turns for message in turn.messages]
        return said if self.instructions is None else said[1:]


class ResponseStore:
    """The sessions of the most recent stored responses, each truncated after its answer.

    A response that continues another one is a fork of it, and reuses its KV. Older ones are read from documents.

    Shared fairly between keys: at the limit, the oldest response of the key with most is evicted.
    """

    def __init__(self, most: int, most_of: Callable[[str], int | None] = lambda key: None) -> None:  # noqa: ARG005
        self._most = most
        self._most_of = most_of
        """The limit of a key, if any."""
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._counts: Counter[str] = Counter()
        """By key."""
        self._ending: set[asyncio.Task[None]] = set()

    def add(self, response_id: str, stored: StoredResponse) -> None:
        self._stored[response_id] = stored
        self._counts[stored.key] += 1
        while len(self._stored) > self._most:
            self._evict(max(self._counts, key=self._counts.__getitem__))
        limit = self._most_of(stored.key)
        while limit is not None and self._counts[stored.key] > limit:
            self._evict(stored.key)

    def _evict(self, key: str) -> None:
        """Evict the oldest response of a key."""
        oldest = next(name for name, one in self._stored.items() if one.key == key)
        self.forget(self._remove(oldest))

    def _remove(self, response_id: str) -> StoredResponse:
        stored = self._stored.pop(response_id)
        self._counts[stored.key] -= 1
        if not self._counts[stored.key]:
            del self._counts[stored.key]
        return stored

    def find(self, response_id: str, key: str) -> StoredResponse | None:
        """A response of this key whose session still exists."""
        stored = self._stored.get(response_id)
        if stored is not None and stored.key == key:
            try:
                stored.sessions.get(stored.session_id)
            except TokenmillError:  # it has ended, or its model was unloaded
                self._remove(response_id)
            else:
                self._stored.move_to_end(response_id)
                return stored
        return None

    def drop(self, response_id: str) -> None:
        """Delete the response."""
        if response_id in self._stored:
            self.forget(self._remove(response_id))

    def forget(self, stored: StoredResponse) -> None:
        """End its session, in the background."""
        ending = asyncio.ensure_future(_end(stored))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def __len__(self) -> int:
        return len(self._stored)


async def _end(stored: StoredResponse) -> None:
    with suppress(TokenmillError):  # it has ended by itself, or its model was unloaded
        await stored.sessions.end_session(stored.session_id)
