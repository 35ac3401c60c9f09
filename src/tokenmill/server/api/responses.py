"""`/v1/responses`: OpenAI's newer form of a chat, for text.

A stored response is a document with its input, its output and the conversation up to its end. Its session is kept as
well, while there is room: a response that goes on from it is a fork of that, and reuses its KV. A response in the
background runs as a task of its own; its events are kept, so that a client can come back for them.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from tokenmill.errors import Overloaded, TokenmillError, TooManyTokens
from tokenmill.outputs import CompletionOutput, OutputDelta, RequestOutput, TurnPart
from tokenmill.params import SamplingParams
from tokenmill.server import schemas
from tokenmill.server.api.conversations import (
    Talk,
    conversation_locked,
    end_session,
    find_talk,
    save_talk,
    session_of,
    with_items,
)
from tokenmill.server.api.items import (
    After,
    Item,
    Limit,
    Message,
    Order,
    as_items,
    as_messages,
    call_ids,
    encrypted,
    item_id,
    item_page,
    response_of,
)
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.errors import ApiError
from tokenmill.server.fields import MOST_IDS
from tokenmill.server.middleware import Caller
from tokenmill.server.models import ServedModel
from tokenmill.server.protocol import Connection
from tokenmill.server.requests import ChatInput, ResponsesRequest, format_of
from tokenmill.server.served import RESPONSE, Served, StoredResponse
from tokenmill.server.sse import DONE, SERVER_SENT_EVENTS, EventStream, event
from tokenmill.server.streaming import Call, SessionSource, folded, while_connected
from tokenmill.server.telemetry.figures import CLIENT_GONE
from tokenmill.session.documents import Document
from tokenmill.text.tool_grammar import ToolUse

log = logging.getLogger(__name__)

ITEM_OF = {"content": "message", "reasoning": "reasoning", "call": "function_call", "arguments": "function_call"}
"""The type of the item that a part of an answer belongs to."""
MOST_FINISHED = 64
"""Background responses that have ended, but whose events are kept for clients that come back."""
ENCRYPTED = "reasoning.encrypted_content"
"""Can be included, as log-probabilities can."""
RUNNING = ("queued", "in_progress")
SYSTEM_ROLES = ("system", "developer")
ResponseId = Annotated[str, Path(description="The response's id.", max_length=256)]
FORGOTTEN = {"code": "server_error", "message": "the server was stopped before the response was complete"}


def response_routes(served: Served) -> APIRouter:
    """Responses, stored ones included. One of another key's is not there."""
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["generation"])
    background = Background(served)
    answers = schemas.generated(schemas.ResponseObject)
    answers[200]["links"] = schemas.response_links()
    refusals = schemas.errors(400, 401, 404, 409, 429, 503)

    async def find(http: Request, response_id: str) -> Document:
        found = await served.document(RESPONSE, response_id, http.state.caller.key)
        if found is None:
            raise ApiError(404, f"response {response_id!r:.80} not found", code="response_not_found")
        return found

    def state_of(found: Document) -> dict[str, Any]:
        """The response as it is now."""
        running = background.find(found.id)
        if running is not None:
            return {**running.state(), "metadata": found.body["response"]["metadata"]}
        response: dict[str, Any] = found.body["response"]
        is_lost = response["status"] in RUNNING
        return {**response, "status": "failed", "error": FORGOTTEN} if is_lost else response

    @api.post("/responses", responses=answers | schemas.errors(409))
    async def create_response(http: Request, body: ResponsesRequest) -> Response:
        """An answer; with `previous_response_id` or `conversation` it goes on from what was said before."""
        return await respond(served, http.state.caller, body, background)

    @api.post(
        "/responses/input_tokens",
        responses={200: {"model": schemas.InputTokens}, **schemas.errors(400, 401, 404, 413, 429, 503)},
    )
    async def count_input_tokens(http: Request, body: ResponsesRequest) -> Response:
        """The number of input tokens that a response would have."""
        body.check(served.config)
        body.use()
        model = await served.models.use(body.model, default_model=served.config.default_model)
        past = await find_past(served, body, http.state.caller.key)
        _, messages = await _given(served, body, past, http.state.caller.key)
        system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        template, options = model.llm.opened.text.chat_template(), body.template_options()

        def count() -> int:
            return len(template.encode([*system, *past.messages(), *messages], MOST_IDS, **options))

        counting = served.texts.run(http.state.caller.body_bytes, count)
        num_tokens = await while_connected(http.state.caller, counting)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": num_tokens})

    @api.get("/responses/{response_id}", responses=schemas.generated(schemas.ResponseObject))
    async def get_response(
        http: Request,
        response_id: ResponseId,
        stream: Annotated[bool | None, Query(description="The events of a background response, as they come.")] = None,
        starting_after: Annotated[int | None, Query(ge=0, description="Events after the one of this number.")] = None,
    ) -> Response:
        """A stored response, or how far a background response has come."""
        found = await find(http, response_id)
        if not stream:
            return JSONResponse(state_of(found))
        running, first = background.find(response_id), -1 if starting_after is None else starting_after
        if running is None and not found.body["response"]["background"]:
            what = "only background responses can be streamed again; retrieve it without stream"
            raise ApiError(400, what, param="stream")
        events = StoredEvents(state_of(found), found.body["num_events"]) if running is None else running
        return EventStream(EventReader(events, first + 1), http.state.caller, served.config)

    @api.delete("/responses/{response_id}", responses={200: {"model": schemas.Deleted}, **refusals})
    async def delete_response(http: Request, response_id: ResponseId) -> Response:
        """Forget it; what goes on from it stays."""
        found = await find(http, response_id)
        await background.cancel(found.id)
        await asyncio.wrap_future(served.documents.delete(RESPONSE, found.id, found.owner))
        served.responses.drop(found.id)
        return JSONResponse({"id": found.id, "object": "response", "deleted": True})

    @api.post("/responses/{response_id}/cancel", responses={200: {"model": schemas.ResponseObject}, **refusals})
    async def cancel_response(http: Request, response_id: ResponseId) -> Response:
        """End a background response; one that has ended stays as it is."""
        found = await find(http, response_id)
        if not found.body["response"]["background"]:
            what = "only background responses can be cancelled; for others, close the connection"
            raise ApiError(400, what, param="response_id")
        await background.cancel(found.id)
        return JSONResponse(state_of(await find(http, response_id)))

    @api.get("/responses/{response_id}/input_items", responses={200: {"model": schemas.ItemPage}, **refusals})
    async def list_input_items(
        http: Request, response_id: ResponseId, limit: Limit = 20, after: After = None, order: Order = "desc"
    ) -> Response:
        """What the request said, page by page."""
        return JSONResponse(item_page((await find(http, response_id)).body["input"], limit, after, order))

    return api


# -- what was said before ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Past:
    """What a response goes on from: a response before it, or a conversation; without both, nothing."""

    stored: StoredResponse | None = None
    """A response whose session is still there."""
    document: Document | None = None
    """A response whose session is gone."""
    talk: Talk | None = None
    most_parts: int = 0

    def messages(self) -> list[Message]:
        """All that was said, without instructions."""
        if self.stored is not None:
            return self.stored.conversation()
        if self.document is not None:
            return list(self.document.body["messages"])
        items = () if self.talk is None else self.talk.items
        return as_messages(items, self.most_parts, known_calls=None) if items else []


async def find_past(served: Served, body: ResponsesRequest, key: str) -> Past:
    name, most_parts = body.previous_response_id, served.config.max_content_parts
    if body.conversation_id is not None:
        talk = await find_talk(served, body.conversation_id, key, "conversation")
        return Past(talk=talk, most_parts=most_parts)
    if name is None:
        return Past()
    if (stored := served.responses.find(name, key)) is not None:
        served.documents.get(RESPONSE, name, key, is_used=True)  # not waited for: it is not looked at
        return Past(stored)
    found = await served.document(RESPONSE, name, key, is_used=True)
    if found is None:
        what = f"response {name!r:.80} not found"
        raise ApiError(400, what, code="previous_response_not_found", param="previous_response_id")
    if found.body["messages"] is None:
        what = f"response {name!r:.80} has no answer to go on from: its status is {found.body['response']['status']}"
        raise ApiError(400, what, param="previous_response_id")
    return Past(document=found)


async def _given(served: Served, body: ResponsesRequest, past: Past, key: str) -> tuple[list[Item], list[Message]]:
    """What is said in the request: its items, and as messages."""
    items = [await _referred(served, item, past, key) for item in as_items(body.input)]
    has_results = any(item["type"] == "function_call_output" for item in items)
    known = call_ids(past.messages()) if has_results else ()
    return items, as_messages(items, served.config.max_content_parts, known_calls=known)


async def _referred(served: Served, item: Item, past: Past, key: str) -> Item:
    """The item itself, where another one is referred to: one of a stored response, or of the conversation."""
    if item["type"] != "item_reference":
        return item
    name = item["id"]
    known = [] if past.talk is None else list(past.talk.items)
    if (response := response_of(name)) is not None:
        found = await served.document(RESPONSE, response, key)
        known += [] if found is None else found.body["response"]["output"]
    for one in known:
        if one["id"] == name:
            return dict(one)
    raise ApiError(400, f"item {name!r:.80} not found", code="item_not_found", param="input")


# -- from a request to its answer -------------------------------------------------------------------------------------


async def respond(
    served: Served, caller: Caller, body: ResponsesRequest, background: Background | None = None
) -> Response:
    """The answer to a request: whole, as a stream, or in the background, where there is one."""
    body.check(served.config)
    model = await served.models.use(body.model, default_model=served.config.default_model)
    runs_for = replace(caller, connection=Connection.detached()) if body.background else caller
    call = served.call(runs_for, body, model, "resp_")
    caller.call_id, caller.model = call.id, model.name
    try:
        started = await start_response(served, call, body, model)
        if background is None or not body.background:
            return await call.respond(started.writer, stream=bool(body.stream))
        running = await background.start(started, caller)
    except BaseException:
        await call.close()
        raise
    if not body.stream:
        return JSONResponse(running.state())
    return EventStream(EventReader(running, 0), caller, served.config)


@dataclass
class Started:
    """A response that is about to run."""

    served: Served
    call: Call
    body: ResponsesRequest
    items: list[Item]
    """Of its input."""
    writer: ResponseWriter
    past: Past
    session: dict[str, Any] | None = None
    """Of a conversation: which session it has now."""
    messages: list[Message] | None = None
    """The conversation with its answer, once it is complete."""
    is_saved: bool = False
    """Does its conversation have its items?"""

    def made(self, model: ServedModel) -> dict[str, Any]:
        """All that a session of its conversation must have been made with to go on with it."""
        hints, body = self.call.hints, self.body
        about = {"model": model.name, "instructions": body.instructions, "namespace": hints.namespace}
        return {**about, "options": body.template_options(), "truncates": body.truncation == "auto"}

    def stored(self, model: ServedModel, session_id: str) -> StoredResponse:
        """Its session, for responses that go on from it."""
        hints, body = self.call.hints, self.body
        whose = (model.sessions, model.name, session_id, hints.key, hints.namespace)
        return StoredResponse(*whose, body.instructions, body.template_options(), body.truncation == "auto")

    def document(self, response: dict[str, Any]) -> dict[str, Any]:
        num_events = self.writer.num_events
        return {"response": response, "input": self.items, "messages": self.messages, "num_events": num_events}

    async def archive(self, response: dict[str, Any]) -> None:
        """Store the response, and add its items to its conversation."""
        if self.messages is None:
            self.messages = self._said(response)
        if self.past.talk is not None:
            more = [*self.items, *response["output"]]
            try:
                await save_talk(self.served, with_items(self.past.talk, more, self.session), self.past.talk)
            except Overloaded as error:  # not a moment's: nothing is won if it is generated again
                raise ApiError(507, f"the conversation can't grow: {error}", "server_error", "not_stored") from None
            self.is_saved = True
        if self.body.is_stored and not self.body.background:  # else its task does
            await self.store(response)

    def _said(self, response: dict[str, Any]) -> list[Message] | None:
        """The conversation with its answer, where no session has it; None if what was before is gone as well."""
        items, most_parts = [*self.items, *response["output"]], self.served.config.max_content_parts
        try:
            return [*self.past.messages(), *as_messages(items, most_parts, known_calls=None)]
        except TokenmillError:
            return None

    async def store(self, response: dict[str, Any], *, replaces: bool = False) -> None:
        """The answer stands, stored or not."""
        try:
            name, key = self.call.id, self.call.hints.key
            await self.served.put(RESPONSE, name, key, self.document(response), replaces=replaces)
        except TokenmillError as error:
            log.warning("response %s is not stored: %s", self.call.id, error)


async def start_response(served: Served, call: Call, body: ResponsesRequest, model: ServedModel) -> Started:
    """Turn the items into a prompt, and add its generation to the call."""
    config, key = served.config, call.hints.key
    params = replace(model.chat_params, **body.changes())
    if body.conversation_id is not None:
        _lock(served, call, body.conversation_id)
    past = await find_past(served, body, key)
    items, messages = await _given(served, body, past, key)
    use = body.use()
    writer = ResponseWriter(call, body, params.temperature, params.top_p, model)
    started = Started(served, call, body, items, writer, past)
    if past == Past() and not body.is_stored and body.truncation != "auto":
        system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        options, budget = body.template_options(), body.thinking_token_budget
        asked = ChatInput([*system, *messages], params, options, use, budget, body.constraining)
        await call.chat(asked, reasons=model.reasons)
        return started
    if params.structured_outputs is not None:
        await call.compile(params, body.constraining)
    known = await _known_session(started, model)
    if known is None:
        messages = [*past.messages(), *messages]
    elif past.talk is not None and past.talk.session is not None:  # what was added to it besides
        more = past.talk.items[past.talk.session["num_items"] :]
        messages = [*as_messages(more, past.most_parts, known_calls=None), *messages] if more else messages
    if body.truncation == "auto":
        new = messages
        messages = await call.tokens(lambda: _truncated(body, model, new))
    follow = _answer if past.talk is None else _answer_in_conversation
    call.follow(follow(started, model, known, messages, params, use, must_fit=not config.clamp_max_tokens))
    call.archive = started.archive
    return started


def _lock(served: Served, call: Call, conversation: str) -> None:
    """Have a conversation for this response alone, until its items are added."""
    busy, name = served.busy_conversations, (call.hints.key, conversation)
    if name in busy:
        raise conversation_locked()
    busy.add(name)
    call.on_closed = lambda: busy.discard(name)


def _forget_unsaved(started: Started, stored: StoredResponse, unlock: Callable[[], None] | None) -> None:
    """An answer that its conversation does not have: its session is ahead of it, and can't be gone on with."""
    if not started.is_saved:
        started.served.responses.forget(stored)
    if unlock is not None:
        unlock()


async def _known_session(started: Started, model: ServedModel) -> str | None:
    """The session that has all that was said before, if there is one.

    Instructions and tools are a request's own: with others the conversation is another one, as with other KV.
    """
    past, body, hints = started.past, started.body, started.call.hints
    if past.talk is not None:
        return await session_of(past.talk, model, started.made(model))
    asked = (model.sessions, body.instructions, hints.namespace, body.template_options(), body.truncation == "auto")
    return None if past.stored is None or past.stored.made != asked else past.stored.session_id


def _truncated(body: ResponsesRequest, model: ServedModel, messages: list[Message]) -> list[Message]:
    """New messages that fit into the context, with room for the answer: without the oldest turns, if need be.

    Turns that are in a session already are the session's to drop.
    """
    template, options = model.llm.opened.text.chat_template(), body.template_options()
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    num_fixed = next((place for place, one in enumerate(messages) if one["role"] not in SYSTEM_ROLES), len(messages))
    fixed = [*system, *messages[:num_fixed]]
    capacity = max(1, model.llm.max_model_len - (body.max_output_tokens or 1))
    starts = [place for place, one in enumerate(messages) if one["role"] == "user" and place > num_fixed]

    def fits(start: int) -> bool:
        try:
            return len(template.encode([*fixed, *messages[start:]], capacity, **options)) <= capacity
        except TooManyTokens:
            return False

    start = starts[bisect.bisect_left(starts[:-1], True, key=fits)] if starts and not fits(num_fixed) else num_fixed
    return [*messages[:num_fixed], *messages[start:]]


def _answer(
    started: Started,
    model: ServedModel,
    known: str | None,
    messages: list[Message],
    params: SamplingParams,
    use: ToolUse | None,
    *,
    must_fit: bool,
) -> SessionSource:
    """A session of its own for the answer: new, or a fork of the one it goes on from."""
    call, body, store = started.call, started.body, started.served.responses

    async def session() -> str:
        if known is not None:
            return str(await model.sessions.fork(known))
        return await _new_session(started, model, is_kept=False)

    def end(session_id: str, is_whole: bool) -> None:
        made = started.stored(model, session_id)
        if not is_whole or not body.is_stored:
            store.forget(made)
            return
        with suppress(TokenmillError):  # it was ended while its answer was read: its document has all of it
            started.messages = made.conversation()
            store.add(call.id, made)

    return _source(started, model, session, end, messages, params, use, must_fit=must_fit)


def _answer_in_conversation(
    started: Started,
    model: ServedModel,
    known: str | None,
    messages: list[Message],
    params: SamplingParams,
    use: ToolUse | None,
    *,
    must_fit: bool,
) -> SessionSource:
    """The session of the conversation, which goes on; a new one where it has none, or one that was made otherwise."""
    talk = started.past.talk
    assert talk is not None

    async def session() -> str:
        if known is not None:
            return known
        await end_session(started.served, talk)
        return await _new_session(started, model, is_kept=True, metadata={"conversation": talk.id})

    def end(session_id: str, is_whole: bool) -> None:
        stored = started.stored(model, session_id)
        if not is_whole:  # the items are as they were: the next response makes a session of them
            started.served.responses.forget(stored)
            return
        with suppress(TokenmillError):  # it was ended while its answer was read: the items have all of it
            num_turns = len(model.sessions.get(session_id).turns)
            started.messages = stored.conversation()
            started.session = {"id": session_id, "made": started.made(model), "num_turns": num_turns}
            started.call.on_closed = partial(_forget_unsaved, started, stored, started.call.on_closed)

    return _source(started, model, session, end, messages, params, use, must_fit=must_fit)


async def _new_session(
    started: Started, model: ServedModel, *, is_kept: bool, metadata: Mapping[str, str] | None = None
) -> str:
    hints, body = started.call.hints, started.body
    return await model.sessions.create_session(
        system=body.instructions,
        is_kept=is_kept,
        template_options=body.template_options(),
        overflow="drop_oldest_turns" if body.truncation == "auto" else "error",
        key=hints.key,
        namespace=hints.namespace,
        metadata=metadata,
    )


def _source(
    started: Started,
    model: ServedModel,
    session: Callable[[], Any],
    end: Callable[[str, bool], None],
    messages: list[Message],
    params: SamplingParams,
    use: ToolUse | None,
    *,
    must_fit: bool,
) -> SessionSource:
    call, budget = started.call, started.body.thinking_token_budget
    # All of a request's parameters are its own; the seed of an unseeded one is drawn anew.
    changes = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__ if name != "attempt"}
    own = {"timeout_s": call.timeout_s, "priority": call.hints.priority, "request_id": f"{call.id}/0", **changes}
    own |= {"quota": call.hints.quota, "use": use, "thinking_budget": budget}
    return SessionSource(model.sessions, session, on_end=end, given=messages, must_fit=must_fit, **own)


# -- in the background ------------------------------------------------------------------------------------------------


class BackgroundResponse:
    """A response that runs without its client, and its events."""

    def __init__(self, started: Started) -> None:
        self.started = started
        self.is_over = False
        self._grown = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def state(self) -> dict[str, Any]:
        return self.started.writer.state

    def run(self, on_end: Callable[[], None]) -> None:
        self._task = asyncio.create_task(self._run(on_end), name=f"tokenmill-{self.started.call.id}")

    async def _run(self, on_end: Callable[[], None]) -> None:
        call, writer = self.started.call, self.started.writer
        try:
            await call.respond(writer, stream=True)
            while await call.take():
                self._grown.set()
        except Exception as error:
            call.failed(error)
        finally:
            try:
                await call.close()
                await self.started.store(writer.state, replaces=True)
            finally:
                self.is_over = True
                self._grown.set()
                on_end()

    async def cancel(self) -> None:
        """End it; returns when its end is stored."""
        if self._task is not None:
            self.started.call.cancel()
            await asyncio.shield(self._task)

    async def events(self, first: int) -> list[bytes]:
        """Those from a number on, once there are some; none at the end."""
        events = self.started.writer.events
        while len(events) <= first and not self.is_over:
            self._grown.clear()
            await self._grown.wait()
        return events[first:]


@dataclass(frozen=True)
class StoredEvents:
    """The events of a background response that ended long ago: what is left of them is the last one."""

    response: dict[str, Any]
    num_events: int

    async def events(self, first: int) -> list[bytes]:
        last = max(self.num_events - 1, 1)
        begun = {**self.response, "status": "in_progress", "output": [], "usage": None, "error": None}
        told = [_numbered("response.created", 0, response=begun)] if first == 0 else []
        kind = f"response.{'failed' if self.response['status'] == 'cancelled' else self.response['status']}"
        return [*told, _numbered(kind, last, response=self.response)] if first <= last else []


class EventReader:
    """Reads the events of a background response, from a number on. A client that leaves ends nothing."""

    def __init__(self, source: BackgroundResponse | StoredEvents, first: int) -> None:
        self._source = source
        self._next: int | None = first

    async def take(self) -> bytes:
        if self._next is None:
            return b""
        events = await self._source.events(self._next)
        if not events or isinstance(self._source, StoredEvents):
            self._next = None
            return b"".join(events) + DONE
        self._next += len(events)
        return b"".join(events)

    def failed(self, error: Exception) -> bytes:
        raise error

    async def close(self) -> None:
        """The response goes on without it."""


class Background:
    """The background responses that run, and the events of the latest that have ended."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._responses: OrderedDict[str, BackgroundResponse] = OrderedDict()

    async def start(self, started: Started, caller: Caller) -> BackgroundResponse:
        """Run it as a task; it is stored before that."""
        name, key = started.call.id, started.call.hints.key
        running = BackgroundResponse(started)
        await self._served.put(RESPONSE, name, key, started.document(running.state()))
        self._responses[name] = running
        # On its key's account until it has ended, and waited for on shutdown, as a request would be.
        caller.is_left_to_task = True
        self._served.gate.num_inside += 1

        def end() -> None:
            self._served.gate.num_inside -= 1
            caller.account.leave(200, started.call.caller.reserved)
            self._forget_oldest()

        running.run(end)
        return running

    def _forget_oldest(self) -> None:
        over = [name for name, one in self._responses.items() if one.is_over]
        for name in over[: max(0, len(over) - MOST_FINISHED)]:
            del self._responses[name]

    def find(self, name: str) -> BackgroundResponse | None:
        """One that runs, or that has not ended long ago. Whose it is, its document says."""
        return self._responses.get(name)

    async def cancel(self, name: str) -> None:
        running = self._responses.get(name)
        if running is not None and not running.is_over:
            await running.cancel()


# -- its words --------------------------------------------------------------------------------------------------------


def _numbered(kind: str, number: int, **data: Any) -> bytes:
    return event({"type": kind, "sequence_number": number, **data}, kind)


class ResponseWriter:
    """One response: whole, or as a sequence of numbered events."""

    framing = SERVER_SENT_EVENTS

    def __init__(
        self, call: Call, body: ResponsesRequest, temperature: float, top_p: float, model: ServedModel
    ) -> None:
        self._call = call
        self._body = body
        self._temperature, self._top_p = temperature, top_p
        self._forms = model.forms
        self._model_name = body.model or model.name
        self._item_id = self._name_item("message", 0)
        self.num_events = 0
        self.events: list[bytes] = []
        """All that were written, if it runs in the background."""
        self._deltas: list[OutputDelta] = []
        """What was streamed: the last events repeat it."""
        self._items: list[dict[str, Any]] = []
        """Of an answer with reasoning or tool calls: what it is made of so far."""
        self._includes = frozenset(body.include or ())
        self._is_json = format_of("text", body.text or {}) is not None
        self._ended_at: int | None = None
        self.state = self._response("queued" if body.background else "in_progress", [])
        """The response as it was told last."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (choice,) = output.outputs
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        if choice.parts is None:
            return self._response(status, [self._item(choice, status)], output)
        if not self._items:  # not streamed
            for part in choice.parts:
                self._say(part)
        items = self._items
        if items and items[-1]["status"] == "in_progress":
            items = [*items[:-1], self._ended(items[-1], status)]
        return self._response(status, items, output)

    # -- as a stream --------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        told = self._event("response.created", response=self.state)
        if self._body.background:
            told += self._event("response.queued", response=self.state)
        self.state = self._response("in_progress", [])
        told += self._event("response.in_progress", response=self.state)
        if self._is_parsed:  # items are announced as they come
            return told
        item = {"type": "message", "id": self._item_id, "status": "in_progress", "role": "assistant", "content": []}
        told += self._event("response.output_item.added", output_index=0, item=item)
        return told + self._event("response.content_part.added", **self._place(), part=self._part("", []))

    def delta(self, delta: OutputDelta) -> bytes:
        self._deltas.append(delta)
        if delta.parts is not None:
            return b"".join(map(self._say, delta.parts))
        if not delta.text:
            return b""
        scores = [] if delta.logprobs is None else self._forms.for_chat(delta.token_ids, delta.logprobs)
        return self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=scores)

    def closing(self) -> bytes:
        response = self.state = self.whole(folded(self._call.generations, self._deltas))
        status = response["status"]
        if self._is_parsed:
            told = self._end_item(status)
        else:
            item = response["output"][0]
            part = item["content"][0]
            told = self._text_done(self._place(), part, status)
            told += self._event("response.content_part.done", **self._place(), part=part)
            told += self._event("response.output_item.done", output_index=0, item=item)
        return told + self._event(f"response.{status}", response=response) + DONE

    def failed(self, error: ApiError) -> bytes:
        is_cancelled = error.status == CLIENT_GONE
        response = self._response("cancelled" if is_cancelled else "failed", [])
        # The type of the codes is closed; what there is no word for is the server's error.
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if not is_cancelled or not self._body.background:
            response |= {"status": "failed", "error": {"code": code, "message": error.message}}
        begun = b"" if self.num_events else self.opening()  # clients wait for the beginning first
        self.state = response
        return begun + self._event("response.failed", response=response) + DONE

    # -- reasoning and tool calls -------------------------------------------------------------------------------------

    @property
    def _is_parsed(self) -> bool:
        return bool(self._call.generations) and self._call.generations[0].plan is not None

    def _text_done(self, place: dict[str, Any], part: dict[str, Any], status: str) -> bytes:
        """A text is complete. Of JSON that was cut off it is not told: clients parse what they are told is done."""
        if status == "incomplete" and self._is_json:
            return b""
        return self._event("response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"])

    def _say(self, part: TurnPart) -> bytes:
        """Add a part to its item, a new one if need be; the events that tell of it."""
        told = b""
        kind = ITEM_OF[part.kind]
        if part.kind == "call" or not self._items or self._items[-1]["type"] != kind:
            told = self._end_item("completed") + self._begin_item(kind, part)
        item, place = self._items[-1], {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        if part.kind == "arguments":
            item["arguments"] += part.text
            return told + self._event("response.function_call_arguments.delta", **place, delta=part.text)
        if part.kind == "call":
            return told
        item["content"][0]["text"] += part.text
        if part.kind == "reasoning":
            return told + self._event("response.reasoning_text.delta", **place, content_index=0, delta=part.text)
        return told + self._event("response.output_text.delta", **place, content_index=0, delta=part.text, logprobs=[])

    def _begin_item(self, kind: str, part: TurnPart) -> bytes:
        number = len(self._items)
        name = self._name_item(kind, number)
        item: dict[str, Any] = {"type": kind, "id": name, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": part.call_id, "name": part.name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        else:
            item |= {"role": "assistant", "content": []}
        told = self._event("response.output_item.added", output_index=number, item=item)
        self._items.append(item)
        if kind == "function_call":
            return told
        piece = self._part("", []) if kind == "message" else {"type": "reasoning_text", "text": ""}
        place = {"item_id": name, "output_index": number, "content_index": 0}
        told += self._event("response.content_part.added", **place, part=piece)
        self._items[-1] = {**item, "content": [dict(piece)]}
        return told

    def _end_item(self, status: str) -> bytes:
        """The item that is open is complete, or cut off."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return b""
        item = self._items[-1] = self._ended(self._items[-1], status)
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if item["type"] == "function_call":
            said = {"arguments": item["arguments"], "name": item["name"]}
            told = self._event("response.function_call_arguments.done", **place, **said)
        else:
            piece, place["content_index"] = item["content"][0], 0
            if item["type"] == "message":
                told = self._text_done(place, piece, status)
            else:
                told = self._event("response.reasoning_text.done", **place, text=piece["text"])
            told += self._event("response.content_part.done", **place, part=piece)
        return told + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _ended(self, item: dict[str, Any], status: str) -> dict[str, Any]:
        """An item that is complete, or cut off."""
        more = {}
        if item["type"] == "reasoning" and ENCRYPTED in self._includes:
            more["encrypted_content"] = encrypted(item["content"][0]["text"])
        return {**item, "status": status, **more}

    # -- parts --------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **data: Any) -> bytes:
        told = _numbered(kind, self.num_events, **data)
        self.num_events += 1
        if self._body.background:
            self.events.append(told)
        return told

    def _name_item(self, kind: str, number: int) -> str:
        """Says which response it is of: `response_of` reads it."""
        return item_id(kind, f"{self._call.id.removeprefix('resp_')}{number:02x}")

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, choice: CompletionOutput, status: str) -> dict[str, Any]:
        scores = [] if choice.logprobs is None else self._forms.for_chat(choice.token_ids, choice.logprobs)
        content = [self._part(choice.text, scores)]
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}

    def _part(self, text: str, scores: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}

    def _response(
        self, status: str, items: list[dict[str, Any]], output: RequestOutput | None = None
    ) -> dict[str, Any]:
        body, others = self._body, self._body.model_extra or {}
        if status == "completed" and self._ended_at is None:
            self._ended_at = int(time.time())
        talk = body.conversation_id
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._call.created,
            "completed_at": self._ended_at if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model_name,
            "output": items,
            "usage": None if output is None else _usage(output),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "temperature": self._temperature,
            "top_p": self._top_p,
            "top_logprobs": body.top_logprobs or 0,
            "presence_penalty": body.presence_penalty or 0.0,
            "frequency_penalty": body.frequency_penalty or 0.0,
            "text": {"format": {"type": "text"}, **(body.text or {})},
            "previous_response_id": body.previous_response_id,
            "conversation": None if talk is None else {"id": talk},
            "store": body.is_stored,
            "background": bool(body.background),
            "truncation": body.truncation or "disabled",
            "reasoning": body.reasoning,
            "tools": body.tools or [],
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "max_tool_calls": others.get("max_tool_calls"),
            "service_tier": "default",
            "safety_identifier": others.get("safety_identifier"),
            "prompt_cache_key": others.get("prompt_cache_key"),
        }


def _usage(output: RequestOutput) -> dict[str, Any]:
    used = output.usage
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
