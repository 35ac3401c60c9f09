"""`POST /v1/responses`: OpenAI's newer form of a chat, for text.

A response that is stored is a session; one that goes on from it is a fork of that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, get_args

from fastapi import APIRouter, Request
from starlette.responses import Response

from tokenmill.outputs import CompletionOutput, OutputDelta, RequestOutput
from tokenmill.params import SamplingParams
from tokenmill.server import schemas
from tokenmill.server.api.chat_completions import check_room
from tokenmill.server.bodies import KEY, JsonRoute
from tokenmill.server.config import ServerConfig
from tokenmill.server.errors import ApiError
from tokenmill.server.models import ServedModel
from tokenmill.server.requests import ResponsesRequest, Role
from tokenmill.server.served import ResponseStore, Served, StoredResponse
from tokenmill.server.sse import event
from tokenmill.server.streaming import Call, SessionSource, folded

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})


def response_routes(served: Served) -> APIRouter:
    api = APIRouter(route_class=JsonRoute.with_texts(served.texts), dependencies=[KEY], tags=["generation"])

    @api.post("/responses", responses=schemas.generated(schemas.ResponseObject))
    async def create_response(http: Request, body: ResponsesRequest) -> Response:
        """OpenAI's newer form of a chat; with `previous_response_id` it goes on from an earlier one."""
        model = await served.requested_model(body.model)
        with served.call(http, body, model, "resp_") as call:
            writer = await start_response(call, body, model, served.responses, served.config)
            return await call.respond(writer, stream=bool(body.stream))

    return api


async def start_response(
    call: Call, body: ResponsesRequest, model: ServedModel, store: ResponseStore, config: ServerConfig
) -> ResponseWriter:
    """Check it, turn the items into a prompt, and add its generation to the call."""
    body.check(config)
    params = body.sampling(model.default_params, logprobs=body.num_logprobs)
    messages = as_messages(body, config.max_content_parts)
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if body.previous_response_id is None and body.store is False:
        ids = await call.tokens(lambda: call.llm.chat_ids([*system, *messages]))
        check_room(ids, body.max_output_tokens, call.llm.max_model_len, config)
        call.generate(ids, params)
    else:
        call.follow(_answer(call, body, model, store, messages, params, must_fit=not config.clamp_max_tokens))
    return ResponseWriter(call, body, params.temperature, params.top_p, model)


def _answer(
    call: Call,
    body: ResponsesRequest,
    model: ServedModel,
    store: ResponseStore,
    messages: list[dict[str, str]],
    params: SamplingParams,
    *,
    must_fit: bool,
) -> SessionSource:
    """A session of its own for the answer: new, or a fork of the one it goes on from."""
    before, hints = None, call.hints
    if body.previous_response_id is not None:
        before = store.find(body.previous_response_id, hints.key)
        if before.sessions is not model.sessions:
            what = f"the response was made by {before.model_name}, not by {model.name}"
            raise ApiError(400, what, param="model")
    # Instructions are a request's own: with others the conversation is another one, as it is with other KV.
    goes_on = before is not None and (before.instructions, before.namespace) == (body.instructions, hints.namespace)
    if before is not None and not goes_on:
        messages = [*before.conversation(), *messages]

    async def session() -> str:
        if before is not None and goes_on:
            return str(await model.sessions.fork(before.session_id))
        owner: dict[str, Any] = {"key": hints.key, "namespace": hints.namespace}
        return await model.sessions.create_session(system=body.instructions, is_kept=False, **owner)

    def end(session_id: str, is_whole: bool) -> None:
        made = (model.sessions, model.name, session_id, hints.key, hints.namespace, body.instructions)
        if is_whole and body.store is not False:
            store.add(call.id, StoredResponse(*made))
        else:
            store.forget(StoredResponse(*made))

    # All of a request's parameters are its own; the seed of an unseeded one is drawn anew.
    changes = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__ if name != "attempt"}
    own = {"timeout_s": call.timeout_s, "priority": hints.priority, "request_id": call.next_name, **changes}
    return SessionSource(model.sessions, session, on_end=end, given=messages, must_fit=must_fit, **own)


def as_messages(body: ResponsesRequest, most_parts: int) -> list[dict[str, str]]:
    """What is said in the request, as messages."""
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not isinstance(items, list) or not items:
        raise ApiError(400, "input must be a text or a list of items", param="input")
    return [as_message(item, most_parts) for item in items]


def as_message(item: Any, most_parts: int, param: str = "input") -> dict[str, str]:
    """One item of a list that a client gave."""
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        kind = item.get("type") if isinstance(item, dict) else type(item).__name__
        raise ApiError(400, f"input items of type {kind!r:.40} are not supported: only messages are", param=param)
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in get_args(Role):
        raise ApiError(400, f"the role {role!r:.40} is not known", param=param)
    if isinstance(content, str):
        return {"role": role, "content": content}
    if not isinstance(content, list) or not 1 <= len(content) <= most_parts:
        raise ApiError(400, f"the content of an item is a text or a list of 1 to {most_parts} parts", param=param)
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)
        if not is_text:
            raise ApiError(400, "only parts that are text are supported", param=param)
        texts.append(part["text"])
    return {"role": role, "content": "".join(texts)}


class ResponseWriter:
    """One response: whole, or as a sequence of numbered events."""

    def __init__(
        self, call: Call, body: ResponsesRequest, temperature: float, top_p: float, model: ServedModel
    ) -> None:
        self._call = call
        self._body = body
        self._temperature, self._top_p = temperature, top_p
        self._forms = model.forms
        self._model_name = body.model or model.name
        self._item_id = f"msg_{call.id.removeprefix('resp_')}"
        self._number = -1
        self._deltas: list[OutputDelta] = []
        """What was streamed: the last events repeat it."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (choice,) = output.outputs
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        return self._response(status, [self._item(choice, status)], output)

    # -- as a stream --------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        begun = self._response("in_progress", [])
        item = {"type": "message", "id": self._item_id, "status": "in_progress", "role": "assistant", "content": []}
        return b"".join(
            [
                self._event("response.created", response=begun),
                self._event("response.in_progress", response=begun),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place(), part=self._part("", [])),
            ]
        )

    def delta(self, delta: OutputDelta) -> bytes:
        self._deltas.append(delta)
        if not delta.text:
            return b""
        scores = [] if delta.logprobs is None else self._forms.for_chat(delta.token_ids, delta.logprobs)
        return self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=scores)

    def closing(self) -> bytes:
        response = self.whole(folded(self._call.generations, self._deltas))
        item = response["output"][0]
        part = item["content"][0]
        text = {"text": part["text"], "logprobs": part["logprobs"]}
        return b"".join(
            [
                self._event("response.output_text.done", **self._place(), **text),
                self._event("response.content_part.done", **self._place(), part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(f"response.{response['status']}", response=response),
            ]
        )

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed", [])
        # The type of the codes is closed; what there is no word for is the server's error.
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response["error"] = {"code": code, "message": error.message}
        begun = b"" if self._number >= 0 else self.opening()  # clients wait for the beginning first
        return begun + self._event("response.failed", response=response)

    # -- parts --------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **data}, kind)

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
        body = self._body
        return {
            "id": self._call.id,
            "object": "response",
            "created_at": self._call.created,
            "completed_at": int(time.time()) if status == "completed" else None,
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
            "text": {"format": {"type": "text"}},
            "previous_response_id": body.previous_response_id,
            "store": body.store is not False,
            "background": False,
            "truncation": "disabled",
            "reasoning": None,
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_tool_calls": None,
            "service_tier": "default",
            "safety_identifier": None,
            "prompt_cache_key": None,
        }


def _usage(output: RequestOutput) -> dict[str, Any]:
    used = output.usage
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
