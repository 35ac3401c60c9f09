"""`Served`: the state that endpoints share: models, settings, running calls, stored responses."""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request as HttpRequest

from tokenmill.engine.request import Hints, Quota
from tokenmill.errors import SessionNotFound, TokenmillError
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError, stopping, unavailable
from tokenmill.server.keys import KeyRing
from tokenmill.server.middleware import Caller, Gate
from tokenmill.server.models import Models, ModelSpec, ServedModel
from tokenmill.server.requests import Hinted
from tokenmill.server.streaming import Call, OpenCalls
from tokenmill.server.telemetry.hub import Telemetry
from tokenmill.server.telemetry.timeline import open_spans
from tokenmill.session.manager import SessionLimits
from tokenmill.session.service import SessionService
from tokenmill.session.session import SessionInfo
from tokenmill.session.store import SessionStore
from tokenmill.text.workers import TextWorkers

LOADING = unavailable("the model is loading", "loading")
STOPPING = stopping()
TIMEOUT_HEADER = "x-request-timeout"
"""A client's timeout, in seconds."""


UNLIMITED = Quota()
"""Of a server without keys."""
ServedSession = tuple[ServedModel, SessionInfo]
"""A session and its model."""


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
        limits = SessionLimits(
            ttl_s=config.session_ttl_s, max_log_bytes=config.max_session_bytes, quota=self.keys.session_quota
        )
        self.store = None if config.store is None else SessionStore(config.store)
        self.texts = TextWorkers(config.tokenizer_threads, config.max_tokenizing_bytes)
        self.models = Models(specs, self.calls, self.telemetry, limits, self.store, self.texts, spec_of)
        self.responses = ResponseStore(
            config.max_stored_responses, lambda key: self.keys.limits_of(key).stored_responses
        )

    def open(self) -> None:
        """The models are loaded: admit requests, unless the server is shutting down already."""
        if self.gate.closed is LOADING:
            self.gate.closed = None

    def drain(self) -> None:
        """Admit no new requests; running ones go on."""
        self.gate.closed = STOPPING
        self.telemetry.end_streams()

    async def close(self) -> None:
        """Everything that runs ends with `shutdown`."""
        await self.models.close()
        self.texts.close()
        if self.store is not None:
            await asyncio.to_thread(self.store.close)
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)

    @property
    def is_ready(self) -> bool:
        """Does it admit requests, and do the engines make progress?"""
        return self.gate.closed is None and all(model.llm.is_ready for model in self.models.loaded)

    @property
    def is_hung(self) -> bool:
        """Does an engine thread hang? It can't be replaced: only a restart of the server helps."""
        return any(model.llm.is_hung for model in self.models.loaded)

    def call(self, http: HttpRequest, body: Hinted, model: ServedModel, prefix: str) -> Call:
        """A call of the engine for a request."""
        caller: Caller = http.state.caller
        hints, timeout_s = self.hints(caller.key, body), self.timeout(http, body)
        call = Call(http, model.llm, self.config, self.calls, self.texts, prefix, hints, timeout_s)
        caller.model = model.name
        self.telemetry.note_call(caller.key, caller.request_id, call.id)
        return call

    def hints(self, key: str, body: Hinted) -> Hints:
        """Whose request it is, and how it is scheduled and cached.

        Where there are several keys, they share no KV: timing can't tell what another one has cached.
        """
        salts = (*((key,) if self.keys.are_several else ()), *((body.cache_salt,) if body.cache_salt else ()))
        return Hints(priority=body.priority or 0, key=key, namespace=salts or None, quota=self.quota(key, body))

    def quota(self, key: str, body: Hinted) -> Quota:
        """How much of the engine a request may use: what its key may, or less where the body says so."""
        quota = self.keys.quotas.get(key, UNLIMITED)
        given = {name: getattr(body, name) for name in ("max_context", "max_tokens_per_step")}
        own = {name: min(value, getattr(quota, name) or value) for name, value in given.items() if value is not None}
        return replace(quota, **own) if own else quota

    def timeout(self, http: HttpRequest, body: Hinted) -> float:
        """Seconds that a request may take: the server's limit, or less where the header or the body says so."""
        timeout_s = self.config.max_request_s
        if body.timeout_s is not None:
            timeout_s = min(timeout_s, body.timeout_s)
        given = http.headers.get(TIMEOUT_HEADER)
        return timeout_s if given is None else min(timeout_s, _seconds(given))

    # -- sessions -----------------------------------------------------------------------------------------------------

    def model_of(self, caller: Caller, session_id: str) -> ServedModel:
        """The model of a session of the caller's key; those of other keys are not found."""
        for model in self.models.loaded:
            try:
                key = model.sessions.key_of(session_id)
            except SessionNotFound:
                continue
            if key == caller.key:
                model.last_used = time.monotonic()
                return model
        raise SessionNotFound(f"no session {session_id!r:.80}")

    def sessions(
        self, caller: Caller, limit: int, after: str | None = None, *, newest_first: bool = False
    ) -> tuple[list[ServedSession], bool]:
        """A page of this caller's by creation time, from the one after a session on; and whether there are more."""
        models = self.models.loaded
        rows = (
            (created_at, name, place)
            for place, model in enumerate(models)
            for created_at, name in model.sessions.creation_times(caller.key)
        )
        if after is not None:
            last = (self.model_of(caller, after).sessions.get(after).created_at, after)
            rows = (row for row in rows if (row[:2] < last if newest_first else row[:2] > last))
        found = (heapq.nlargest if newest_first else heapq.nsmallest)(limit + 1, rows)
        page = [(models[place], models[place].sessions.get(name)) for _, name, place in found[:limit]]
        return page, len(found) > limit


def _seconds(given: str) -> float:
    """The deadline in the header."""
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
    """Those of its model; not the model itself, which is free to go."""
    model_name: str
    session_id: str
    key: str
    namespace: Hashable
    instructions: str | None
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def conversation(self) -> list[dict[str, Any]]:
        """What was said up to its end, without the instructions."""
        turns = self.sessions.get(self.session_id).turns
        said = [dict(message) for turn in turns for message in turn.messages]
        return said if self.instructions is None else said[1:]


class ResponseStore:
    """The most recent responses of /v1/responses, each a session cut after its answer; older ones are evicted.

    They are divided by key: where there are too many, the oldest of the key that has most is evicted.
    """

    def __init__(self, most: int, most_of: Callable[[str], int | None] = lambda key: None) -> None:  # noqa: ARG005
        self._most = most
        self._most_of = most_of
        """The limit of a key, if it has one."""
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
        """Forget the oldest response of a key."""
        oldest = next(name for name, one in self._stored.items() if one.key == key)
        self.forget(self._remove(oldest))

    def _remove(self, response_id: str) -> StoredResponse:
        stored = self._stored.pop(response_id)
        self._counts[stored.key] -= 1
        if not self._counts[stored.key]:
            del self._counts[stored.key]
        return stored

    def find(self, response_id: str, key: str) -> StoredResponse:
        """One of this key's, whose session is still there."""
        stored = self._stored.get(response_id)
        if stored is not None and stored.key == key:
            try:
                stored.sessions.get(stored.session_id)
            except TokenmillError:  # it has ended, or its model is gone
                self._remove(response_id)
            else:
                self._stored.move_to_end(response_id)
                return stored
        what = f"response {response_id!r:.80} not found"
        raise ApiError(400, what, code="previous_response_not_found", param="previous_response_id")

    def forget(self, stored: StoredResponse) -> None:
        """End its session, in a while."""
        ending = asyncio.ensure_future(_end(stored))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def num_of(self, key: str) -> int:
        """How many a key has."""
        return self._counts[key]

    def __len__(self) -> int:
        return len(self._stored)


async def _end(stored: StoredResponse) -> None:
    with suppress(TokenmillError):  # it has ended by itself, or its model is gone
        await stored.sessions.end_session(stored.session_id)
