"""Answers of sessions: as part of a `Call` (chats, responses), or as a stream of their own that can be resumed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from tokenmill.outputs import ENDED_WELL, FinishReason, RequestOutput
from tokenmill.server.calls import stop, while_there
from tokenmill.server.config import ServerConfig
from tokenmill.server.deltas import counted
from tokenmill.server.errors import ApiError, cancelled, ended_badly, log_failure
from tokenmill.server.middleware import caller_of
from tokenmill.server.models import ServedModel
from tokenmill.server.sse import DONE, EventStream, event
from tokenmill.server.telemetry.figures import Outcome
from tokenmill.session.live import Answer, Chunk, LiveTurn

T = TypeVar("T")
END = "end"
"""In an event's id, instead of a number of tokens: there is nothing after it."""


class SessionTurn:
    """An answer of a session to new messages, as one of a call's generations: a client that leaves ends it."""

    def __init__(
        self,
        model: ServedModel,
        session: Callable[[], Awaitable[str]],
        *,
        on_end: Callable[[str, bool], None] | None = None,
        **options: Any,
    ) -> None:
        self._model = model
        self._session = session
        """Finds or makes the session, when the answer is first asked for: what is never asked for leaves none."""
        self._on_end = on_end
        """Told the session's name, and whether there was an answer."""
        self._options = options
        self._session_id: str | None = None
        self._asking: asyncio.Future[LiveTurn] | None = None
        self._live: LiveTurn | None = None
        self._is_cancelled = False

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        """Waits until the session has time for it."""
        self._asking = asyncio.ensure_future(self._ask())
        try:
            live = await self._begun(self._asking)
            async for output in live.outputs():
                yield output
        finally:
            await stop(self._asking)
            if self._live is not None and not self._live.is_over:
                self._live.cancel()
            if self._on_end is not None and self._session_id is not None:
                self._on_end(self._session_id, self._has_ended_well())

    async def _ask(self) -> LiveTurn:
        self._session_id = await self._session()
        self._live = await self._model.sessions.answer(self._session_id, **self._options)
        return self._live

    async def _begun(self, asking: asyncio.Future[LiveTurn]) -> LiveTurn:
        try:
            return await asking
        except asyncio.CancelledError:
            if self._is_cancelled:  # by its name; whoever reads has not been
                raise cancelled() from None
            raise

    def _has_ended_well(self) -> bool:
        if self._live is None or not self._live.is_over:
            return False
        return FinishReason(self._live.generation.output.outputs[0].finish_reason) in ENDED_WELL

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._live is not None:
            self._live.cancel()
        elif self._asking is not None:
            self._asking.cancel()


def existing(session_id: str) -> Callable[[], Awaitable[str]]:
    """For a `SessionTurn`: a session that is there."""

    async def found() -> str:
        return session_id

    return found


async def in_turn(http: HttpRequest, operation: Awaitable[T]) -> T:
    """Do something with a session when its turn comes; a client that leaves before that has changed its mind."""
    doing = asyncio.ensure_future(operation)
    try:
        await while_there(http, doing)
        return doing.result()
    finally:
        await stop(doing)


# -- streams of their own ---------------------------------------------------------------------------------------------


class AnswerStream:
    """The events of a session's answer. Each has an id: a client that was cut off goes on after the last one it saw.

    A client that leaves ends nothing. The answer goes on, and ends by itself if nobody comes back for it.
    """

    def __init__(self, http: HttpRequest, model: ServedModel, session_id: str, answer: LiveTurn | Answer) -> None:
        self._http = http
        self._caller = caller_of(http.scope)
        self._caller.call_id = answer.request_id
        self._answer = answer
        self._forms = model.forms
        self._head = {
            "id": answer.request_id,
            "object": "session.chunk",
            "session_id": session_id,
            "model": model.name,
        }

    async def whole(self) -> dict[str, Any]:
        """Without streaming. A cancelled answer is one; one that has failed is an error."""
        reading = asyncio.ensure_future(_all(self._chunks(0)))
        try:
            await while_there(self._http, reading)
            chunks = reading.result()
        finally:
            await stop(reading)
        end = chunks[-1]
        _raise_if_refused(end)
        if (error := _failure(end)) is not None:
            raise error
        joined = replace(
            end,
            text="".join(one.text for one in chunks),
            token_ids=[token for one in chunks for token in one.token_ids],
            logprobs=None if end.logprobs is None else [score for one in chunks for score in one.logprobs or ()],
            offset=0,
        )
        return {**self._shape(joined), "object": "session.answer"}

    async def stream(self, offset: int | None, config: ServerConfig) -> EventStream:
        """From a token on; None: from its end. What can be refused is refused before the first byte."""
        timeouts = {"keep_alive_s": config.keep_alive_s, "send_timeout_s": config.send_timeout_s}
        if offset is None:
            return EventStream(_nothing_more(), _nothing_to_end, **timeouts)
        chunks = self._chunks(offset)
        first = asyncio.ensure_future(anext(chunks))
        try:
            await while_there(self._http, first, config.keep_alive_s)
            if first.done():
                _raise_if_refused(first.result())
        except BaseException:
            await stop(first)
            raise

        async def end() -> None:
            await stop(first)

        return EventStream(self._events(first, chunks), end, **timeouts)

    async def _events(self, first: asyncio.Future[Chunk], rest: AsyncIterator[Chunk]) -> AsyncGenerator[bytes]:
        yield self._event(await first)
        async for chunk in rest:
            yield self._event(chunk)
        yield DONE

    async def _chunks(self, offset: int) -> AsyncGenerator[Chunk]:
        """What is read for the caller, on its account."""
        async for chunk in self._answer.read(offset):
            if chunk.token_ids and self._caller.first_token_at is None:
                self._caller.first_token_at = time.monotonic()
            if chunk.usage is not None:
                self._caller.charge(chunk.usage)
            yield chunk

    def _event(self, chunk: Chunk) -> bytes:
        shape, place = self._shape(chunk), chunk.offset + len(chunk.token_ids)
        if (error := _failure(chunk)) is not None:  # the status has been sent
            log_failure(error, error)
            self._caller.outcome = Outcome.FAILED
            shape |= error.body()
        is_end = chunk.finish_reason is not None
        return event(shape, event_id=f"{self._answer.request_id}:{END if is_end else place}")

    def _shape(self, chunk: Chunk) -> dict[str, Any]:
        scores = chunk.logprobs
        return {
            **self._head,
            "text": chunk.text,
            "token_ids": chunk.token_ids,
            "offset": chunk.offset,
            "logprobs": None if scores is None else self._forms.for_chat(chunk.token_ids, scores),
            "finish_reason": chunk.finish_reason,
            "usage": None if chunk.usage is None else counted([chunk.usage]),
            "durable": chunk.durable,
        }


async def _all(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


async def _nothing_more() -> AsyncGenerator[bytes]:
    yield DONE


async def _nothing_to_end() -> None:
    pass


def _failure(chunk: Chunk) -> ApiError | None:
    """What went wrong with an answer that is over. That it was cancelled is no failure: somebody wanted it."""
    if chunk.finish_reason in (None, FinishReason.CANCELLED.value):
        return None
    return ended_badly(chunk.finish_reason, chunk.error, chunk.offset + len(chunk.token_ids))


def _raise_if_refused(chunk: Chunk) -> None:
    """Raise if it has ended badly before it has said anything: then there is nothing to tell."""
    is_silent = chunk.finish_reason is not None and chunk.offset == 0 and not chunk.token_ids
    if is_silent and (error := ended_badly(chunk.finish_reason or "", chunk.error, 0)) is not None:
        raise error


@dataclass(frozen=True)
class EventId:
    """The last event that a client has seen."""

    request_id: str | None
    """Of the answer; None: whichever is the last one."""
    offset: int | None
    """The token after it; None if it was the end."""

    def check(self, answer: LiveTurn | Answer) -> None:
        if self.request_id not in (None, answer.request_id):
            what = "the session has another answer by now; read it from the beginning, or see its turns"
            raise ApiError(409, what, code="answer_replaced", param="Last-Event-ID")


def read_event_id(header: str | None) -> EventId:
    """A Last-Event-ID; without one a client has seen nothing."""
    if header is None:
        return EventId(None, 0)
    name, _, place = header.rpartition(":")
    is_end = place == END
    if not name or (not is_end and (not place.isdecimal() or len(place) > 9)):
        raise ApiError(400, "Last-Event-ID is not one of ours", param="Last-Event-ID")
    return EventId(name, None if is_end else int(place))
