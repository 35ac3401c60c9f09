"""`/v1/chat/completions`, stored ones included."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import JSONResponse, Response

from tokenmill.errors import TokenmillError
from tokenmill.outputs import OutputDelta, RequestOutput, TurnPart, Usage
from tokenmill.pipeline.output import Generation
from tokenmill.server import schemas
from tokenmill.server.api.items import After, Limit, Order, item_page, page_of
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.errors import ApiError
from tokenmill.server.middleware import Caller
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import (
    ChatInput,
    ChatRequest,
    Prediction,
    UpdateMetadata,
    session_use,
    template_options,
    tool_use,
)
from tokenmill.server.served import COMPLETION, Served
from tokenmill.server.sse import DONE, SERVER_SENT_EVENTS, TextEvent, event
from tokenmill.server.streaming import Call, SessionSource, answer_message, part_delta, usage_of
from tokenmill.session.documents import Document
from tokenmill.session.session import MAX_METADATA, check_metadata
from tokenmill.text.turn_parser import ParsedTurn

log = logging.getLogger(__name__)

CompletionId = Annotated[str, Path(description="The completion's id.", max_length=256)]


def chat_routes(served: Served) -> APIRouter:
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["generation"])

    @api.post("/chat/completions", responses=schemas.generated(schemas.ChatCompletion))
    async def create_chat_completion(http: Request, body: ChatRequest) -> Response:
        """An answer to a conversation; with `session_id`, to what is new in one."""
        return await complete_chat(served, http.state.caller, body)

    refusals = schemas.errors(400, 401, 404, 429, 503)
    one: dict[int | str, dict[str, Any]] = {200: {"model": schemas.StoredCompletion}, **refusals}

    async def find(http: Request, completion_id: str) -> Document:
        found = await served.document(COMPLETION, completion_id, http.state.caller.key)
        if found is None:
            what = f"chat completion {completion_id!r:.80} not found; only those with store: true are kept"
            raise ApiError(404, what, code="completion_not_found")
        return found

    @api.get("/chat/completions", responses={200: {"model": schemas.CompletionPage}, **refusals})
    async def list_chat_completions(
        http: Request,
        model: Annotated[str | None, Query(max_length=256, description="Those of this model.")] = None,
        limit: Limit = 20,
        after: After = None,
        order: Order = "asc",
    ) -> Response:
        """The key's stored chat completions, page by page; `metadata[name]=value` for those with this metadata."""
        where = {} if model is None else {("$.completion", "model"): model}
        for name, value in http.query_params.multi_items():
            if name.startswith("metadata[") and name.endswith("]"):
                where["$.completion.metadata", name[9:-1]] = value
        if len(where) > MAX_METADATA + (model is not None):
            raise ApiError(400, f"at most {MAX_METADATA} metadata filters", param="metadata")
        listing = served.documents.list(
            COMPLETION, http.state.caller.key, limit=limit, after=after, newest_first=order == "desc", where=where
        )
        page = await asyncio.wrap_future(listing)
        if page is None:
            raise ApiError(404, f"no chat completion {after!r:.80}", param="after")
        return JSONResponse(page_of([one.body["completion"] for one in page.documents], has_more=page.has_more))

    @api.get("/chat/completions/{completion_id}", responses=one)
    async def get_chat_completion(http: Request, completion_id: CompletionId) -> Response:
        """A stored chat completion."""
        return JSONResponse((await find(http, completion_id)).body["completion"])

    @api.post("/chat/completions/{completion_id}", responses=one)
    async def update_chat_completion(http: Request, completion_id: CompletionId, body: UpdateMetadata) -> Response:
        """Other metadata for a stored chat completion."""
        found = await find(http, completion_id)
        changed = {**found.body["completion"], "metadata": check_metadata(body.metadata)}
        await served.put(COMPLETION, found.id, found.owner, {**found.body, "completion": changed}, replaces=True)
        return JSONResponse(changed)

    @api.delete("/chat/completions/{completion_id}", responses={200: {"model": schemas.Deleted}, **refusals})
    async def delete_chat_completion(http: Request, completion_id: CompletionId) -> Response:
        """Forget a stored chat completion."""
        found = await find(http, completion_id)
        await asyncio.wrap_future(served.documents.delete(COMPLETION, found.id, found.owner))
        return JSONResponse({"id": found.id, "object": "chat.completion.deleted", "deleted": True})

    @api.get("/chat/completions/{completion_id}/messages", responses={200: {"model": schemas.MessagePage}, **refusals})
    async def list_chat_messages(
        http: Request, completion_id: CompletionId, limit: Limit = 20, after: After = None, order: Order = "asc"
    ) -> Response:
        """The messages that a stored chat completion answers, page by page."""
        return JSONResponse(item_page((await find(http, completion_id)).body["messages"], limit, after, order))

    return api


async def store_completion(
    served: Served, call: Call, body: ChatRequest, messages: Sequence[dict[str, Any]], whole: dict[str, Any]
) -> None:
    """Keep a completion and what it answers. The answer stands, stored or not."""
    completion = {**whole, "metadata": body.metadata}
    said = [{"id": f"{call.id}-{number}", "content": None, **message} for number, message in enumerate(messages)]
    try:
        await served.put(COMPLETION, call.id, call.hints.key, {"completion": completion, "messages": said})
    except TokenmillError as error:
        log.warning("chat completion %s is not stored: %s", call.id, error)


async def complete_chat(served: Served, caller: Caller, body: ChatRequest) -> Response:
    """The answer to a conversation, whole or as a stream."""
    model = await served.models.use(body.model, default_model=served.config.default_model)
    if body.session_id is not None and await served.model_of(caller, body.session_id) is not model:
        raise ApiError(400, "the session belongs to another model", param="model")
    call = served.call(caller, body, model, "chatcmpl-")
    body.check(served.config)
    if body.store:
        body.metadata = check_metadata(body.metadata)
    messages = [message.model_dump(exclude_unset=True) for message in body.messages]
    if body.session_id is None:
        use = None
        if body.tools or body.tool_choice is not None:
            use = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
        changes = body.changes()
        if body.prediction is not None:
            changes = await _predicting(call, model, body.prediction, changes)
        params, options = replace(model.chat_params, **changes), template_options(body, served.config)
        asked = ChatInput(messages, params, options, use, body.thinking_token_budget, body.constraining)
        await call.chat(asked, reasons=model.reasons)
    else:
        hints: dict[str, Any] = {
            "timeout_s": call.timeout_s,
            "priority": body.priority,
            "quota": call.hints.quota,
            "request_id": f"{call.id}/0",
        }
        use = session_use(model.sessions.tools_of(body.session_id), body)
        hints |= {"use": use, "thinking_budget": body.thinking_token_budget}
        own = {"must_fit": not served.config.clamp_max_tokens, **hints, **body.changes()}
        call.follow(SessionSource(model.sessions, _existing(body.session_id), given=messages, **own))
    if body.store:
        call.archive = partial(store_completion, served, call, body, messages)
    return await call.respond(ChatWriter(call, body, model), stream=bool(body.stream))


async def _predicting(
    call: Call, model: ServedModel, prediction: Prediction, changes: dict[str, Any]
) -> dict[str, Any]:
    """The parameters of a request with a prediction: it is proposed, unless the request turns speculation off."""
    tokenizer = model.llm.get_tokenizer()
    ids = await call.tokens(lambda: tokenizer.encode(prediction.text, add_special=False))
    return {"speculation": "lookup", **changes, "prediction_token_ids": tuple(ids)}


def _existing(session_id: str) -> Callable[[], Awaitable[str]]:
    """For a `SessionSource`: a session that is there."""

    async def found() -> str:
        return session_id

    return found


class ChatWriter:
    """A chat completion: whole, or as chunks."""

    framing = SERVER_SENT_EVENTS

    def __init__(self, call: Call, body: ChatRequest, model: ServedModel) -> None:
        self._call = call
        self._body = body
        self._forms = model.forms
        self._head = {
            "id": call.id,
            "object": "chat.completion.chunk",
            "created": call.created,
            "model": body.model or model.name,
            "system_fingerprint": model.system_fingerprint,
        }
        if body.session_id is not None:
            self._head["session_id"] = body.session_id
        options = body.stream_options
        self._has_usage = options is not None and bool(options.include_usage)
        """At the end; until then it is null..."""
        self._has_usage_always = self._has_usage and options is not None and bool(options.continuous_usage_stats)
        """...or what was used so far."""
        self._plain: list[TextEvent] = []
        """For each choice, chunks that have nothing but a text. Empty if they have more."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        choices = []
        for choice in output.outputs:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            if choice.parts is not None:
                message = answer_message(ParsedTurn.of(choice.parts))
            ending = OutputDelta(
                choice.index, "", choice.token_ids, 0, choice.logprobs, finish_reason=choice.finish_reason
            )
            choices.append(self._choice(ending, {"message": message}))
        usage = usage_of([output.usage])
        about = self._about_prompt(self._call.generations[0])
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage, **about}

    def opening(self) -> bytes:
        """The first chunk of each choice has its role."""
        (generation,) = self._call.generations
        is_plain = not self._has_usage and not self._body.return_token_ids and not self._body.logprobs
        more = {} if is_plain and generation.params.prompt_logprobs is None else self._about_prompt(generation)  # once
        used = replace(generation.usage, completion_tokens=0)  # the first token comes with the next chunk
        chunks = []
        for index in range(len(generation.choices)):
            first = OutputDelta(index)
            chunks.append(event(self._chunk(first, {"role": "assistant", "content": ""}, used, **more)))
            more = {}
            if is_plain:
                self._plain.append(TextEvent(lambda text: self._chunk(first, {"content": text}, used)))  # noqa: B023
        return b"".join(chunks)

    def delta(self, delta: OutputDelta) -> bytes:
        """Text, and at the end the finish reason in a chunk of its own, with an empty delta."""
        if delta.parts is not None:
            return self._parts(delta, delta.parts)
        text = delta.text
        if self._plain and delta.finish_reason is None:
            return self._plain[delta.index].encode(text)
        used = self._call.generations[0].usage
        if not text:
            return event(self._chunk(delta, {}, used))
        said = event(self._chunk(delta._replace(finish_reason=None), {"content": text}, used))
        if delta.finish_reason is None:
            return said
        return said + event(self._chunk(delta._replace(token_ids=(), logprobs=None), {}, used))

    def _parts(self, delta: OutputDelta, parts: Sequence[TurnPart]) -> bytes:
        """A chunk for each part; the tokens are told with the first."""
        used = self._call.generations[0].usage
        chunks = []
        rest = delta._replace(finish_reason=None)
        for part in parts:
            chunks.append(event(self._chunk(rest, part_delta(part), used)))
            rest = rest._replace(token_ids=(), logprobs=None if rest.logprobs is None else [])
        if delta.finish_reason is not None:
            chunks.append(event(self._chunk(rest._replace(finish_reason=delta.finish_reason), {}, used)))
        return b"".join(chunks)

    def closing(self) -> bytes:
        """Usage, if it was asked for."""
        if not self._has_usage:
            return DONE
        usage = usage_of([generation.usage for generation in self._call.generations])
        return event({**self._head, "choices": [], "usage": usage}) + DONE

    def failed(self, error: ApiError) -> bytes:
        return event(error.body()) + DONE

    def _chunk(self, delta: OutputDelta, said: dict[str, Any], used: Usage, **more: Any) -> dict[str, Any]:
        made = {**self._head, "choices": [self._choice(delta, {"delta": said})], **more}
        if self._has_usage:
            made["usage"] = usage_of([used]) if self._has_usage_always else None
        return made

    def _choice(self, delta: OutputDelta, said: dict[str, Any]) -> dict[str, Any]:
        made = {"index": delta.index, **said, "logprobs": None, "finish_reason": delta.finish_reason}
        if delta.logprobs is not None:
            made["logprobs"] = {"content": self._forms.for_chat(delta.token_ids, delta.logprobs), "refusal": None}
        if self._body.return_token_ids:
            made["token_ids"] = list(delta.token_ids)
        return made

    def _about_prompt(self, generation: Generation) -> dict[str, Any]:
        """Extensions: the prompt's ids and log-probabilities, if they were asked for."""
        about: dict[str, Any] = {}
        if self._body.return_token_ids:
            about["prompt_token_ids"] = generation.prompt_token_ids
        if (logprobs := generation.prompt_logprobs) is not None:
            about["prompt_logprobs"] = self._forms.for_prompt(generation.prompt_token_ids, logprobs)
        return about
