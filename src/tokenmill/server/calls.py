"""`Call`: what one HTTP request runs in the engine, until it has ended or its client has gone.

An endpoint makes a call, starts generations in it and reads them to the end, or as a stream. Whatever happens on the
way, nothing is left running: a client that leaves, in the queue, in prefill or in between two tokens, cancels.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest

from tokenmill.engine.request import Hints
from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.outputs import RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.server.config import ServerConfig
from tokenmill.server.deltas import Delta, Deltas
from tokenmill.server.errors import ApiError, cancelled, ended_badly, log_failure, to_api_error
from tokenmill.server.middleware import Caller, caller_of
from tokenmill.server.sse import DONE, EventStream, disconnected
from tokenmill.server.telemetry.figures import CLIENT_GONE, Outcome
from tokenmill.session.explain import message_at
from tokenmill.text.messages import Message
from tokenmill.text.workers import TextWorkers

T = TypeVar("T")
Placed = tuple[int, RequestOutput]
"""Which of a call's generations, and its output so far."""
LOOKED_AT, MORE_LOOKED_AT = 1024, 512
"""Tokens of a prompt up to where it leaves what was known, and beyond, among which the message is looked for."""


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Answer(Protocol):
    """How an endpoint writes a stream: each method gives whole events."""

    def opening(self, output: RequestOutput) -> bytes:
        """Before anything else, with the first output that there is."""
        ...

    def delta(self, place: int, delta: Delta, output: RequestOutput) -> bytes: ...

    def closing(self, outputs: Sequence[RequestOutput]) -> bytes: ...

    def failed(self, error: ApiError) -> bytes: ...


class OpenCalls:
    """The calls that run now, by every name that their clients know them by."""

    def __init__(self) -> None:
        self._calls: set[Call] = set()

    def add(self, call: Call) -> None:
        self._calls.add(call)

    def remove(self, call: Call) -> None:
        self._calls.discard(call)

    def of(self, llm: AsyncLLM) -> int:
        """How many of them use this model."""
        return sum(call.llm is llm for call in self._calls)

    def cancel(self, name: str, key: str) -> int:
        """Cancel the calls of this name that were made with the same API key; how many there were."""
        found = [call for call in self._calls if name in call.names and call.caller.key == key]
        for call in found:
            call.cancel()
        return len(found)

    def __len__(self) -> int:
        return len(self._calls)


class Call:
    """One HTTP request's generations."""

    def __init__(
        self,
        http: HttpRequest,
        llm: AsyncLLM,
        config: ServerConfig,
        calls: OpenCalls,
        texts: TextWorkers,
        prefix: str,
        hints: Hints,
        timeout_s: float,
    ) -> None:
        self.caller: Caller = caller_of(http.scope)
        self.id = f"{prefix}{secrets.token_hex(16)}"
        self.caller.call_id = self.id
        self.names = frozenset({self.id, self.caller.request_id})
        self.created = int(time.time())
        self.llm = llm
        self._http = http
        self._config = config
        self._calls = calls
        self._texts = texts
        self.hints = hints
        self._generations: list[AsyncGenerator[RequestOutput]] = []
        self._cancels: list[Callable[[], object]] = []
        """What ends each of them."""
        self.timeout_s = timeout_s
        self.messages: Sequence[Message] | None = None
        """What its prompt was made of, if it is a chat's."""
        self._is_cancelled = False
        self._first: asyncio.Future[Any] | None = None
        self._work: asyncio.Future[Any] | None = None
        """What is no generation, and is cancelled by itself."""
        self._is_streaming = False

    def __enter__(self) -> Call:
        self._calls.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_streaming:  # a stream goes on after its endpoint has returned
            self._calls.remove(self)

    # -- before it runs -----------------------------------------------------------------------------------------------

    async def tokens(self, work: Callable[[], T]) -> T:
        """Turn what the request says into tokens: on another thread, if that may be much."""
        num_bytes = self.caller.body_bytes
        if self._texts.runs_inline(num_bytes):
            return work()
        return await self.do(asyncio.ensure_future(self._texts.run(num_bytes, work)))

    def generate(self, prompt: list[int], params: SamplingParams, messages: Sequence[Message] | None = None) -> None:
        """Add a generation; it starts when it is read. `messages` are what the prompt was made of."""
        self.messages = messages
        name = self.next_name
        stream = self.llm.generate(prompt, params, name, hints=self.hints, timeout_s=self.timeout_s)
        self.follow(stream, partial(self.llm.cancel, name))

    @property
    def next_name(self) -> str:
        """What the engine is to call the next generation."""
        return f"{self.id}/{len(self._generations)}"

    def follow(self, outputs: AsyncGenerator[RequestOutput], cancel: Callable[[], object]) -> None:
        """Add a generation of any kind, and what ends it; it starts when it is read."""
        self._generations.append(self._unless_cancelled(outputs))
        self._cancels.append(cancel)

    async def _unless_cancelled(self, stream: AsyncGenerator[RequestOutput]) -> AsyncGenerator[RequestOutput]:
        """Nothing starts after a cancel: up to here there was nothing that it could have ended."""
        self._check_cancelled()
        output: RequestOutput | None = None
        try:
            async for output in stream:
                self.caller.note(output)
                yield output
        finally:
            if output is not None:
                self.caller.charge(output.usage)
                self._note_difference(output)
            await stream.aclose()

    def _note_difference(self, output: RequestOutput) -> None:
        """In which message the prompt leaves what was known. Near its beginning only: that is where it costs most."""
        divergence = None if output.cache is None else output.cache.divergence
        if self.messages is None or divergence is None or divergence.at > LOOKED_AT:
            return
        tokenizer, ids = self.llm.get_tokenizer(), output.prompt_token_ids
        place = len(tokenizer.decode(ids[: divergence.at], skip_special=False))
        text = tokenizer.decode(ids[: divergence.at + MORE_LOOKED_AT], skip_special=False)
        number = message_at(self.messages, text, place)
        if number is not None:
            self.caller.differs_in = (number, str(self.messages[number]["role"]))

    def cancel(self) -> None:
        """End it, whatever it is doing."""
        self._is_cancelled = True
        if self._work is not None:
            self._work.cancel()
        for cancel in self._cancels:
            cancel()

    # -- reading ------------------------------------------------------------------------------------------------------

    async def finish(self) -> list[RequestOutput]:
        """All answers, whole; if one of them fails the others are cancelled."""
        self._check_cancelled()
        reading = asyncio.ensure_future(together(_last(one) for one in self._generations))
        try:
            await while_there(self._http, reading)
            return reading.result()
        finally:
            await stop(reading)
            await self._close()

    async def do(self, work: asyncio.Future[T]) -> T:
        """The result of work that is no generation."""
        self._check_cancelled()
        self._work = work
        try:
            await while_there(self._http, work)
            if work.cancelled():
                self._check_cancelled()
            return work.result()
        finally:
            await stop(work)

    async def stream(self, answer: Answer) -> EventStream:
        """The answers as events. What can be refused is refused before the first byte.

        The status is sent with the first output, or after a while without one: from then on errors are events.
        """
        self._check_cancelled()
        outputs = _merged(self._generations)
        first = self._first = asyncio.ensure_future(anext(outputs))
        try:
            await while_there(self._http, first, timeout_s=self._config.keep_alive_s)
            if first.done():
                _raise_if_refused(first.result()[1])
        except BaseException:
            await stop(first)
            await outputs.aclose()
            await self._close()
            raise
        self._is_streaming = True
        events = self._events(answer, first, outputs)
        timeouts = {"keep_alive_s": self._config.keep_alive_s, "send_timeout_s": self._config.send_timeout_s}
        return EventStream(events, self._end_stream, **timeouts)

    async def _events(
        self, answer: Answer, first: asyncio.Future[Placed], grown: AsyncGenerator[Placed]
    ) -> AsyncGenerator[bytes]:
        deltas = [Deltas() for _ in self._generations]
        outputs: dict[int, RequestOutput] = {}
        try:
            place, output = await first
            outputs[place] = output
            _raise_if_refused(output)
            yield answer.opening(output) + _grown(answer, deltas[place], place, output)
            _raise_if_bad(output)
            async for place, output in grown:
                outputs[place] = output
                if piece := _grown(answer, deltas[place], place, output):
                    yield piece
                _raise_if_bad(output)
            yield answer.closing([outputs[place] for place in range(len(deltas))])
        except Exception as error:  # the status has been sent: the error goes into the stream
            told = to_api_error(error)
            log_failure(told, error)
            self.caller.outcome = Outcome.CANCELLED if told.status == CLIENT_GONE else Outcome.FAILED
            yield answer.failed(told)
        finally:
            await grown.aclose()
        yield DONE

    async def _end_stream(self) -> None:
        self._calls.remove(self)
        if self._first is not None:
            await stop(self._first)
        await self._close()

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise cancelled()

    async def _close(self) -> None:
        for generation in self._generations:
            await generation.aclose()


async def while_there(http: HttpRequest, work: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    """Until the work is done or the time is up; `ClientGone` if the client leaves, and the work is cancelled."""
    leaving = asyncio.ensure_future(disconnected(http.receive))
    waited_for: set[asyncio.Future[Any]] = {work, leaving}
    try:
        await asyncio.wait(waited_for, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            await stop(work)
            raise ClientGone
    finally:
        await stop(leaving)


async def together(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all; when one fails, or nobody waits any more, the others have ended before this does."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stop(task: asyncio.Future[Any]) -> None:
    """Cancel it, and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _grown(answer: Answer, deltas: Deltas, place: int, output: RequestOutput) -> bytes:
    """Events of what is new. A choice that has ended badly has no end here: the stream has, and it is an error."""
    events = []
    for delta in deltas.take(output):
        if delta.is_bad_end:
            events += [answer.delta(place, replace(delta, finish_reason=None), output)] if delta.text else []
        else:
            events.append(answer.delta(place, delta, output))
    return b"".join(events)


async def _last(generation: AsyncGenerator[RequestOutput]) -> RequestOutput:
    async for output in generation:
        _raise_if_bad(output)
        last = output
    return last


def _raise_if_bad(output: RequestOutput) -> None:
    """Raise an `ApiError` if a choice has ended otherwise than by being complete."""
    for choice in output.outputs:
        if choice.finish_reason is not None:
            error = ended_badly(choice.finish_reason, output.error, len(choice.token_ids))
            if error is not None:
                raise error


def _raise_if_refused(output: RequestOutput) -> None:
    """Raise if it has ended badly before it has said anything: then there is nothing to stream."""
    if not any(choice.text for choice in output.outputs):
        _raise_if_bad(output)


async def _merged(generations: Sequence[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[Placed]:
    """What all of them give, as it comes: which one, and its output."""
    if len(generations) == 1:
        async for output in generations[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()
    readers = [asyncio.ensure_future(_read(place, one, queue)) for place, one in enumerate(generations)]
    try:
        num_left = len(readers)
        while num_left:
            place, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_left -= 1
            else:
                yield place, item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(place: int, generation: AsyncGenerator[RequestOutput], queue: asyncio.Queue[Any]) -> None:
    try:
        async for output in generation:
            queue.put_nowait((place, output))
        queue.put_nowait((place, None))
    except Exception as error:
        queue.put_nowait((place, error))
