"""From deltas to the client: the output of one HTTP request, as a whole response or as server-sent events.

An endpoint creates a `Call`, gives it a source of deltas (generations of the engine, or an answer of a session) and a
`Writer` that formats them. Nothing is left running on any path: a client that disconnects, in the
queue, in prefill or between two tokens, cancels its call. Sessions' own streams are the exception: they can be
resumed, so a disconnect ends nothing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import pydantic_core
from starlette.responses import JSONResponse, Response

from tokenmill.engine.request import Hints, context_overflow
from tokenmill.entrypoints.async_llm import AsyncLLM
from tokenmill.errors import ContextOverflow, IntegrityError, InvalidRequest
from tokenmill.outputs import FinishReason, OutputDelta, RequestOutput, TurnPart, Usage, joined
from tokenmill.params import SamplingParams
from tokenmill.pipeline.bridge import EngineStream
from tokenmill.pipeline.output import Generation
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError, cancelled, ended_badly, log_failure, timed_out, to_api_error
from tokenmill.server.middleware import Caller
from tokenmill.server.requests import ChatInput
from tokenmill.server.sse import DONE, EventStream, Framing, event
from tokenmill.server.telemetry.figures import CLIENT_GONE, Outcome
from tokenmill.server.tokens import TokenForms
from tokenmill.session.answer import Answer
from tokenmill.session.explain import message_at
from tokenmill.session.service import SessionService
from tokenmill.text.messages import Message
from tokenmill.text.tool_grammar import ToolUse
from tokenmill.text.turn_parser import ParsedTurn, TurnPlan
from tokenmill.text.workers import TextWorkers

T = TypeVar("T")
MAX_DIVERGENCE, LOOKAHEAD_TOKENS = 1024, 512
"""Tokens before and after the point where a prompt diverges from the cached prefix, searched for its message."""
END = "end"
"""Replaces the number of tokens in the id of a stream's last event."""


class ClientGone(Exception):
    """The client has disconnected."""


COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "accepted_prediction_tokens",
          "rejected_prediction_tokens")  # fmt: skip


def usage_of(used: Sequence[Usage]) -> dict[str, Any]:
    """Total usage in OpenAI's format."""
    counts = zip((0,) * len(COUNTS), *map(attrgetter(*COUNTS), used), strict=True)
    prompt, completion, cached, reasoning, accepted, rejected = map(sum, counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def answer_message(turn: ParsedTurn) -> dict[str, Any]:
    """An answer with reasoning or tool calls, as a message. Reasoning has both of its usual names."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.calls:
        message["content"] = turn.content or None
        message["tool_calls"] = [call.to_message() for call in turn.calls]
    if turn.reasoning:
        message["reasoning_content"] = message["reasoning"] = turn.reasoning
    return message


def call_arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; of truncated JSON, the complete part, as streaming clients parse it."""
    try:
        given = pydantic_core.from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {}


def part_delta(part: TurnPart) -> dict[str, Any]:
    """A part of an answer, in the format of a chunk's delta."""
    if part.kind == "content":
        return {"content": part.text}
    if part.kind == "reasoning":
        return {"reasoning_content": part.text, "reasoning": part.text}
    if part.kind == "arguments":
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}
    function = {"name": part.name, "arguments": ""}
    return {"tool_calls": [{"index": part.call, "id": part.call_id, "type": "function", "function": function}]}


# -- sources of deltas ------------------------------------------------------------------------------------------------


class SessionSource:
    """A session's answer to new messages. Cancelled if its client disconnects."""

    def __init__(
        self,
        sessions: SessionService,
        session: Callable[[], Awaitable[str]],
        *,
        on_end: Callable[[str, bool], None] | None = None,
        **options: Any,
    ) -> None:
        self._sessions = sessions
        self._session = session
        """Finds or creates the session on the first read: a call that is never read creates none."""
        self._on_end = on_end
        """Called with the session's name, and whether the answer is complete."""
        self._options = options
        self._session_id: str | None = None
        self._asking: asyncio.Future[Answer] | None = None
        self._answer: Answer | None = None
        self._deltas: AsyncIterator[OutputDelta] | None = None
        self._is_cancelled = False
        self.generations: Sequence[Generation] = ()

    async def take(self) -> list[OutputDelta]:
        """New deltas: at most one, none at the end. Waits for the session if it is busy."""
        if self._deltas is None:
            self._asking = asyncio.ensure_future(self._ask())
            self._deltas = (await self._begun(self._asking)).read()
        delta = await anext(self._deltas, None)
        return [] if delta is None else [delta]

    async def _ask(self) -> Answer:
        self._session_id = await self._session()
        answer = self._answer = await self._sessions.answer(self._session_id, **self._options)
        self.generations = [answer.generation]
        return answer

    async def _begun(self, asking: asyncio.Future[Answer]) -> Answer:
        try:
            return await asking
        except asyncio.CancelledError:
            if self._is_cancelled:  # cancelled by id; the reading task has not been
                raise cancelled() from None
            raise

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._answer is not None:
            self._answer.cancel()
        elif self._asking is not None:
            self._asking.cancel()

    async def close(self) -> None:
        """Stop reading: an unfinished answer is cancelled."""
        if self._asking is not None:
            await stop(self._asking)
        if self._answer is not None and not self._answer.is_over:
            self._answer.cancel()
        on_end, self._on_end = self._on_end, None
        if on_end is not None and self._session_id is not None:
            answer = self._answer
            is_whole = answer is not None and answer.is_over and answer.end is not None and answer.end.is_complete
            on_end(self._session_id, is_whole)


# -- calls ------------------------------------------------------------------------------------------------------------


class Writer(Protocol):
    """An endpoint's format for a call's deltas. Returns whole events."""

    @property
    def framing(self) -> Framing: ...

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response without streaming."""
        ...

    def opening(self) -> bytes:
        """Events before all others, if any."""
        ...

    def delta(self, delta: OutputDelta) -> bytes: ...

    def closing(self) -> bytes:
        """The end of a stream, including its last event."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that failed after its status was sent."""
        ...


class OpenCalls(set["Call"]):
    """The running calls, by every id that their clients know them by."""

    def of(self, llm: AsyncLLM) -> int:
        """Number of calls that use this model."""
        return sum(call.llm is llm for call in self)

    def cancel(self, name: str, key: str) -> int:
        """Cancel the calls with this id and API key; returns their number."""
        found = [call for call in self if name in call.names and call.caller.key == key]
        for call in found:
            call.cancel()
        return len(found)


class Call:
    """The generations of one request, owned from its start until the last byte is sent or the client has disconnected.

    It is the source of its stream's events: an `EventStream` takes them.
    """

    def __init__(
        self,
        caller: Caller,
        llm: AsyncLLM,
        config: ServerConfig,
        calls: OpenCalls,
        texts: TextWorkers,
        prefix: str,
        hints: Hints,
        timeout_s: float,
    ) -> None:
        self.caller = caller
        self.id = f"{prefix}{secrets.token_hex(16)}"
        self.caller.call_id = self.id
        self.names = frozenset({self.id, self.caller.request_id})
        self.created = int(time.time())
        self.llm = llm
        self.hints = hints
        self.timeout_s = timeout_s
        self.generations: list[Generation] = []
        """For a session, known from the first delta on."""
        self._config = config
        self._calls = calls
        self._texts = texts
        self._messages: Sequence[Message] | None = None
        """The messages that its prompt was rendered from, for a chat."""
        self._source: EngineStream | SessionSource | None = None
        self._is_cancelled = False
        self._work: asyncio.Future[Any] | None = None
        """Work before or instead of a generation, cancelled separately."""
        self.archive: Callable[[dict[str, Any]], Awaitable[None]] | None = None
        """Stores the whole answer, before the client receives its end."""
        self.on_closed: Callable[[], None] | None = None
        """Called at the very end, after the archive."""
        self._writer: Writer | None = None
        """Set if it streams."""
        self._told: list[OutputDelta] = []
        """Streamed deltas, kept if the answer is to be stored."""
        self._has_begun = False
        self._is_over = False
        self._buffered: dict[int, OutputDelta] = {}
        """Per choice, deltas without output yet: sent with the next one that has some."""

    @property
    def left_s(self) -> float:
        """Seconds until its timeout, which counts from the request's arrival; not positive once that is over."""
        return self.timeout_s - (time.monotonic() - self.caller.began)

    @property
    def num_choices(self) -> int:
        """Upper bound on its engine rows, at least one."""
        return sum(len(generation.choices) for generation in self.generations) or 1

    # -- preparation --------------------------------------------------------------------------------------------------

    async def tokens(self, work: Callable[[], T]) -> T:
        """Tokenize the request's input: on another thread if it is long."""
        num_bytes = self.caller.body_bytes
        if num_bytes < self._texts.inline_bytes:
            return work()
        return await self.do(self._texts.run(num_bytes, work))

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        num_wanted: int | None,
        messages: Sequence[Message] | None = None,
        plan: TurnPlan | None = None,
    ) -> None:
        """Add a generation, started by its first read. `messages`: the source; `plan`: how to parse the answer.

        A requested length must fit beside the prompt, or is clamped to the context.
        """
        max_model_len = self.llm.max_model_len
        if num_wanted is not None and not self._config.clamp_max_tokens and len(prompt) + num_wanted > max_model_len:
            raise ContextOverflow(context_overflow(max_model_len, len(prompt), num_wanted))
        self._messages = messages
        index = sum(len(generation.choices) for generation in self.generations)
        if (left_s := self.left_s) <= 0:
            raise timed_out(self.timeout_s)
        more: dict[str, Any] = {"hints": self.hints, "timeout_s": left_s, "first_index": index, "plan": plan}
        name = f"{self.id}/{len(self.generations)}"
        self.generations.append(self.llm.generation(prompt, params, name, **more))
        if self.caller.account.is_rated:
            self.caller.reserved += self.caller.account.reserve(len(prompt) + params.n * (num_wanted or 0))

    async def chat(self, asked: ChatInput, *, reasons: bool) -> None:
        """Add the answer to a conversation, in any dialect; `reasons`: the model may emit reasoning."""
        params, plan = asked.params, None
        if params.structured_outputs is not None:
            await self.compile(params, asked.constraining)
        ids = await self.tokens(lambda: self.llm.chat_ids(asked.messages, **asked.options))
        if asked.use is not None or reasons:
            params, plan = await self.plan(ids, params, asked.use, asked.thinking_budget)
        self.generate(ids, params, params.max_tokens, asked.messages, plan)

    async def compile(self, params: SamplingParams, field: str) -> None:
        """Compile its constraint, off the event loop. An error names the field that the caller sent."""
        try:
            await self.do(self.llm.prepare(params))
        except InvalidRequest as error:
            if error.param != "structured_outputs":
                raise
            raise InvalidRequest(str(error).replace("structured_outputs", field, 1), param=field) from None

    async def plan(
        self, prompt: list[int], params: SamplingParams, use: ToolUse | None, thinking_budget: int | None
    ) -> tuple[SamplingParams, TurnPlan | None]:
        """How a chat's answer is constrained and parsed. Compiles its grammar, off the event loop."""
        asked = use or ToolUse()
        await self.do(self.llm.prepare_plan(params, asked, thinking_budget))
        planned, plan = await self.tokens(lambda: self.llm.plan(prompt, params, asked, thinking_budget))
        if planned.structured_outputs is not None:
            try:
                await self.do(self.llm.prepare(planned))
            except InvalidRequest as error:
                if use is None or error.param != "structured_outputs":
                    raise
                raise InvalidRequest(f"tools: {str(error).split(': ', 1)[-1]}", param="tools") from None
        return planned, plan

    def follow(self, source: SessionSource) -> None:
        """Use a session's answer as source instead of generations of its own."""
        self._source = source

    def generation_of(self, delta: OutputDelta) -> Generation:
        """The generation that a delta belongs to."""
        return self.generations[delta.index // len(self.generations[0].choices)]

    async def do(self, work: Awaitable[T]) -> T:
        """The result of work other than a generation."""
        self._work = asyncio.ensure_future(work)
        if self._is_cancelled:
            self._work.cancel()
        self._calls.add(self)
        try:
            async with asyncio.timeout(self.left_s) as limit:
                return await while_connected(self.caller, self._work)
        except TimeoutError:
            if limit.expired():
                raise timed_out(self.timeout_s) from None
            raise
        except asyncio.CancelledError:
            if self._is_cancelled:  # cancelled by id; the waiting task has not been
                raise cancelled() from None
            raise
        finally:
            self._calls.discard(self)

    def cancel(self) -> None:
        """Cancel it, in any phase."""
        self._is_cancelled = True
        if self._work is not None:
            self._work.cancel()
        if self._source is not None:
            self._source.cancel()

    # -- the answer ---------------------------------------------------------------------------------------------------

    async def respond(self, writer: Writer, *, stream: bool) -> Response:
        """The endpoint's response. Starts the generations; a stream's events can be taken from now on."""
        if self._is_cancelled:
            raise cancelled()
        if self._source is None:
            self._source = self.llm.open_stream(self.generations)
        self._calls.add(self)
        self._writer = writer
        if stream:
            return EventStream(self, self.caller, self._config, writer.framing)
        try:
            deltas = await while_connected(self.caller, self._all(self._source))
            whole = writer.whole(folded(self.generations, deltas))
            await self.close(is_over=False)
            if self.archive is not None:
                await self.archive(whole)
            return JSONResponse(whole)
        finally:
            await self.close()

    async def _all(self, source: EngineStream | SessionSource) -> list[OutputDelta]:
        """All deltas to the end; if a choice fails, the others are cancelled."""
        found: list[OutputDelta] = []
        while deltas := await self._next(source):
            found += deltas
            for delta in deltas:
                if delta.is_failure:
                    raise _failure(delta)
        return found

    async def _next(self, source: EngineStream | SessionSource) -> list[OutputDelta]:
        """The next deltas, none at the end."""
        if self._is_cancelled and not self._has_begun:  # cancelled before it had anything running
            raise cancelled()
        deltas = await source.take()
        if not self._has_begun:
            self._has_begun = True
            self.generations = list(source.generations)
            if any(delta.token_ids for delta in deltas):
                self.caller.first_token_at = time.monotonic()
        return deltas

    async def take(self) -> bytes:
        """The next events of its stream."""
        source, writer, piece = self._source, self._writer, b""
        if self._is_over or source is None or writer is None:
            return b""
        while not piece:
            if self._has_begun:
                deltas = await source.take()
            else:
                deltas = await self._next(source)
                if not any(delta.text for delta in deltas):  # a failed stream has nothing left to send
                    for delta in deltas:
                        if delta.is_failure:
                            raise _failure(delta)
                piece = writer.opening()
            if not deltas:
                self._is_over = True
                await self.close(is_over=False)  # stored before the client receives the end
                if self.archive is not None:
                    await self.archive(writer.whole(folded(self.generations, self._told)))
                return piece + writer.closing()
            if self.archive is not None:
                self._told += deltas
            for delta in deltas:
                if delta.index in self._buffered:
                    delta = joined([self._buffered.pop(delta.index), delta])
                if delta.finish_reason is None and not (delta.text if delta.parts is None else delta.parts):
                    self._buffered[delta.index] = delta
                    continue
                if delta.finish_reason is not None and delta.is_failure:
                    # A cancelled choice has no end of its own: the stream ends with one error for all choices.
                    said = writer.delta(delta._replace(finish_reason=None)) if delta.text else b""
                    return piece + said + self.failed(_failure(delta))
                piece += writer.delta(delta)
        return piece

    def failed(self, error: Exception) -> bytes:
        """The status has been sent, so the error goes into the stream."""
        self._is_over = True
        told = to_api_error(error)
        log_failure(told, error)
        self.caller.outcome = Outcome.CANCELLED if told.status == CLIENT_GONE else Outcome.FAILED
        return b"" if self._writer is None else self._writer.failed(told)

    async def close(self, *, is_over: bool = True) -> None:
        """Cancel what still runs, and charge the key. Unless it `is_over`, the answer is yet to be stored."""
        self._calls.discard(self)
        source = self._source
        try:
            if isinstance(source, SessionSource):
                await source.close()
            elif source is not None:
                self.llm.close_stream(source)
            self._source = None
        finally:  # releases its locks
            if is_over and self.on_closed is not None:
                self.on_closed()
                self.on_closed = None
        for generation in () if source is None else source.generations:
            if generation.num_generated or generation.is_finished:
                self.caller.charge(generation.usage)
                cache = generation.cache
                if cache is not None and cache.divergence is not None and self._messages is not None:
                    self._note_difference(generation, self._messages, cache.divergence.at)

    def _note_difference(self, generation: Generation, messages: Sequence[Message], at: int) -> None:
        """The message in which the prompt diverges from the cached prefix, if near the start, where it costs most."""
        if at > MAX_DIVERGENCE:
            return
        tokenizer, ids = self.llm.get_tokenizer(), generation.prompt_token_ids
        place = len(tokenizer.decode(ids[:at], skip_special=False))
        text = tokenizer.decode(ids[: at + LOOKAHEAD_TOKENS], skip_special=False)
        number = message_at(messages, text, place)
        if number is not None:
            self.caller.differs_in = (number, str(messages[number]["role"]))


def folded(generations: Sequence[Generation], deltas: Iterable[OutputDelta]) -> list[RequestOutput]:
    """Whole outputs: the sums of the deltas."""
    outputs, num_choices = [generation.new_output() for generation in generations], len(generations[0].choices)
    for delta in deltas:
        place = delta.index // num_choices
        generations[place].fold(outputs[place], delta)
    return outputs


def _failure(delta: OutputDelta) -> ApiError:
    """The error of a failed choice."""
    num_tokens = delta.offset + len(delta.token_ids)
    error = ended_badly(delta.finish_reason or "", delta.error or delta.finish_reason, num_tokens)
    if error is None:
        raise IntegrityError(f"{delta.finish_reason} is no failure")
    return error


# -- sessions' own streams --------------------------------------------------------------------------------------------


class AnswerEvents:
    """The events of a session's answer. Each has an id, from which a disconnected client can resume.

    A disconnect ends nothing: the answer continues, and ends by itself if no client resumes it.
    """

    def __init__(self, caller: Caller, model: str, forms: TokenForms, session_id: str, answer: Answer) -> None:
        self._caller = caller
        self._caller.call_id = answer.request_id
        self._answer = answer
        self._forms = forms
        self._head = {
            "id": answer.request_id,
            "object": "session.chunk",
            "session_id": session_id,
            "model": model,
        }
        self._deltas: AsyncIterator[OutputDelta] | None = None
        """None once everything has been read."""
        self._delta: OutputDelta | None = None
        """Id of the latest event."""
        self._opening = b""
        """Events before the answer."""
        self._is_over = False

    async def whole(self) -> dict[str, Any]:
        """The response without streaming. A cancelled answer is one; a failed one is an error."""
        whole = joined(await while_connected(self._caller, _all_of(self._answer.read())))
        self._note(whole)
        _raise_if_silent(whole)
        if (error := _answer_error(whole)) is not None:
            raise error
        message = {} if whole.parts is None else {"message": answer_message(ParsedTurn.of(whole.parts))}
        return {**self._shape(whole), "object": "session.answer", **message}

    def stream(self, offset: int | None, config: ServerConfig) -> EventStream:
        """Read from this token on; None: from the end."""
        if offset and self._answer.is_rerun and not self._answer.is_exact:
            self._opening, offset = self._restarted(0), 0
        self._deltas = None if offset is None else self._answer.read(offset)
        return EventStream(self, self._caller, config)

    async def stream_after(self, token_ids: Sequence[int], config: ServerConfig) -> EventStream:
        """Read on after the tokens that the client has, as far as they are those of the answer."""
        kept = await while_connected(self._caller, self._answer.agreement(token_ids))
        if kept < len(token_ids):
            self._opening = self._restarted(kept)
        self._deltas = self._answer.read(kept)
        return EventStream(self, self._caller, config)

    def _restarted(self, offset: int) -> bytes:
        """The answer was run again, possibly with other tokens: the client discards those from the offset on."""
        shape = {**self._head, "object": "session.restarted", "offset": offset}
        return event(shape, "restarted", f"{self._answer.request_id}:{offset}")

    async def take(self) -> bytes:
        if self._opening:
            opening, self._opening = self._opening, b""
            return opening
        if self._is_over:
            return b""
        if self._deltas is None:
            self._is_over = True
            return DONE
        delta = self._delta = await anext(self._deltas)
        self._note(delta)
        self._is_over = delta.finish_reason is not None
        if not delta.offset:
            _raise_if_silent(delta)
        return self._event(delta) + DONE if self._is_over else self._event(delta)

    def failed(self, error: Exception) -> bytes:
        if self._delta is None or not self._is_over:
            raise error
        return self._event(self._delta) + DONE

    async def close(self) -> None:
        """The answer continues without it."""

    def _note(self, delta: OutputDelta) -> None:
        """Read for the caller, and charged to its account."""
        if delta.token_ids and self._caller.first_token_at is None:
            self._caller.first_token_at = time.monotonic()
        if delta.usage is not None:
            self._caller.usages.append(delta.usage)

    def _event(self, delta: OutputDelta) -> bytes:
        shape, place = self._shape(delta), delta.offset + len(delta.token_ids)
        if delta.parts is not None:
            shape["deltas"] = [part_delta(part) for part in delta.parts]
        if (error := _answer_error(delta)) is not None:  # the status has been sent
            log_failure(error, error)
            self._caller.outcome = Outcome.FAILED
            shape |= error.body()
        # An interrupted answer that is rerun elsewhere has not ended: its client resumes from what it has.
        is_handed_over = delta.finish_reason == FinishReason.SHUTDOWN.value and delta.durable is False
        is_end = delta.finish_reason is not None and not is_handed_over
        return event(shape, event_id=f"{self._answer.request_id}:{END if is_end else place}")

    def _shape(self, delta: OutputDelta) -> dict[str, Any]:
        scores = delta.logprobs
        return {
            **self._head,
            "text": delta.text,
            "token_ids": list(delta.token_ids),
            "offset": delta.offset,
            "logprobs": None if scores is None else self._forms.for_chat(delta.token_ids, scores),
            "finish_reason": delta.finish_reason,
            "usage": None if delta.usage is None else usage_of([delta.usage]),
            "durable": delta.durable,
        }


async def _all_of(deltas: AsyncIterator[OutputDelta]) -> list[OutputDelta]:
    return [delta async for delta in deltas]


def _answer_error(delta: OutputDelta) -> ApiError | None:
    """The error of a failed answer; None if it is complete or was cancelled."""
    is_failure = delta.is_failure and delta.finish_reason != FinishReason.CANCELLED.value
    return _failure(delta) if is_failure else None


def _raise_if_silent(delta: OutputDelta) -> None:
    """Raise if an answer failed or was cancelled before its first token: there is nothing to send."""
    if delta.is_failure and not delta.token_ids:
        raise _failure(delta)


@dataclass(frozen=True)
class EventId:
    """The last event that a client has received."""

    request_id: str | None
    """Id of the answer; None for the latest one."""
    offset: int | None
    """The token after it; None if it was the last event."""
    param: str = "Last-Event-ID"
    """What named it."""

    def check(self, answer: Answer) -> None:
        if self.request_id not in (None, answer.request_id):
            what = "the session has a newer answer; read it from the beginning, or get its turns"
            raise ApiError(409, what, code="answer_replaced", param=self.param)


def read_event_id(header: str | None) -> EventId:
    """Parse a Last-Event-ID; without one, the client has received nothing."""
    if header is None:
        return EventId(None, 0)
    name, _, place = header.rpartition(":")
    is_end = place == END
    if not name or (not is_end and (not place.isdecimal() or len(place) > 9)):
        raise ApiError(400, "invalid Last-Event-ID", param="Last-Event-ID")
    return EventId(name, None if is_end else int(place))


# -- disconnects ------------------------------------------------------------------------------------------------------


async def while_connected(caller: Caller, work: Awaitable[T]) -> T:
    """The result of some work; `ClientGone` if the client disconnects first, after cancelling the work."""
    doing, lost = asyncio.ensure_future(work), caller.connection.lost
    waited_for: set[asyncio.Future[Any]] = {doing, lost}
    try:
        await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            raise ClientGone
        return doing.result()
    finally:
        await stop(doing)


async def together(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """All results; if one fails or the caller is cancelled, the others have ended before this returns."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stop(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait until it has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
